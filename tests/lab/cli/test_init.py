"""`thresher init`: a training of one's own, and a new method with its registration and its reference test."""

import ast
import doctest
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import thresher
from thresher import methods
from thresher.methods import registry
from thresher.testing import check_method
from thresher_lab import cli
from thresher_lab.cli.app import app
from thresher_lab.cli.init import REFERENCE_TESTS, REGISTRY, STAGE_NAMES

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder with the two places that make a checkout, the registry being that of this repository."""
    for path in (tmp_path / REGISTRY, tmp_path / REFERENCE_TESTS):
        path.parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / REFERENCE_TESTS).mkdir()
    (tmp_path / REGISTRY).write_bytes((REPOSITORY / REGISTRY).read_bytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def init(*arguments):
    done = CliRunner().invoke(app, ["init", *arguments])
    if done.exception is not None:
        raise done.exception
    return done.output


def refused(message, *arguments):
    with pytest.raises(ValueError, match=message):
        init(*arguments)


def module_of(path, monkeypatch, name):
    """The module in a file of the checkout, as if it were installed."""
    spec = importlib.util.spec_from_file_location(f"thresher.methods.{name}", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setitem(thresher._HOME, "Seta9", spec.name)
    return module


def files_in(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("stage", STAGE_NAMES)
def test_a_new_method_keeps_every_promise_before_a_line_of_it_is_changed(
    checkout, monkeypatch, stage
):
    init("method", "seta9", "--stage", stage)
    path = checkout / "src/thresher/methods/seta9.py"
    module = module_of(path, monkeypatch, "seta9")
    assert module.Seta9.stage == stage
    check_method(module.Seta9())
    assert doctest.testmod(module) == (0, 2 + 2 * (stage != "before") + (stage == "batch"))
    with pytest.raises(ValueError, match="Seta9: `keep` is the share kept"):
        module.Seta9(keep=2)


@pytest.mark.parametrize("stage", STAGE_NAMES)
def test_its_files_pass_the_checks_of_this_repository(checkout, stage):
    init("method", "seta9", "--stage", stage)
    files = [checkout / "src/thresher/methods/seta9.py", checkout / "tests/reference/test_seta9.py"]
    assert not any("$" in path.read_text() for path in files)
    assert max(len(line) for path in files for line in path.read_text().splitlines()) <= 128
    for path in files:
        ast.parse(path.read_text())


@pytest.mark.parametrize("stage", STAGE_NAMES)
def test_its_reference_test_fails_until_the_transcription_is_written(checkout, monkeypatch, stage):
    init("method", "seta9", "--stage", stage)
    module_of(checkout / "src/thresher/methods/seta9.py", monkeypatch, "seta9")
    spec = importlib.util.spec_from_file_location(
        "test_seta9", checkout / "tests/reference/test_seta9.py"
    )
    test = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(test)
    given = [] if stage == "before" else ["ties"]
    name = (
        "test_the_ids_are_those_of_the_paper"
        if stage == "before"
        else "test_the_plan_is_that_of_the_paper"
    )
    with pytest.raises(
        pytest.fail.Exception,
        match=r"^write the paper's pseudo-code in `trans",
    ):
        getattr(test, name)(*given)
    test.test_a_share_outside_its_range_is_refused("half")


def test_one_line_registers_it(checkout, monkeypatch):
    before = (checkout / REGISTRY).read_text()
    said = init("method", "seta9")
    after = (checkout / REGISTRY).read_text()
    line = "from thresher.methods.seta9 import Seta9 as Seta9\n"
    assert after.replace(line, "") == before and after.count(line) == 1
    lines = after[after.index("from ") :].splitlines()
    assert lines == sorted(lines)
    assert registry.reexports(checkout / REGISTRY)["Seta9"] == "thresher.methods.seta9"
    monkeypatch.setattr(registry, "FOLDER", checkout / "src/thresher/methods")
    monkeypatch.setattr(registry, "BUILT_IN", {"seta9": "thresher.methods.seta9:Seta9"})
    info = methods.infos()["seta9"]
    assert (
        info.stage == "epoch"
        and info.summary
        and info.rule == "its last loss was among the smallest"
    )
    assert said.splitlines()[:3] == [
        "src/thresher/methods/seta9.py",
        "tests/reference/test_seta9.py",
        "src/thresher/methods/built_in.py (one line)",
    ]
    assert "make cards" in said and "CONTRIBUTING.md" in said


def test_it_works_from_a_folder_inside_the_checkout(checkout, monkeypatch):
    monkeypatch.chdir(checkout / "src/thresher")
    init("method", "two_words", "--stage", "batch")
    assert "class TwoWords:" in (checkout / "src/thresher/methods/two_words.py").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["method"], r"a new method needs a name: `thresher init method NAME`"),
        (
            ["method", "Seta"],
            r"'Seta' cannot be the name of a method: write lower-case words joined by underscores",
        ),
        (["method", "2seta"], "'2seta' cannot be the name"),
        (["method", "seta-2"], "'seta-2' cannot be the name"),
        (["method", "../seta"], "cannot be the name"),
        (["method", "lambda"], "'lambda' cannot be the name"),
        (
            ["method", "kakurenbo"],
            "thresher has Kakurenbo and kakurenbo already; choose another name than 'kakurenbo'",
        ),
        (["method", "column"], "thresher has Column already; choose another name than 'column'"),
        (
            ["method", "card"],
            r"src/thresher/methods/card\.py is there already; choose another name, or delete the file",
        ),
        (
            ["method", "taken"],
            r"tests/reference/test_taken\.py is there already; choose another name, or delete the file",
        ),
        (
            ["method", "seta9", "--stage", "step"],
            "--stage must be one of before, epoch, batch, got 'step'",
        ),
        (
            ["mine.py", "seta9"],
            "a name and --stage belong to a new method: `thresher init method NAME`, got 'mine.py'",
        ),
        (["mine.py", "--stage", "epoch"], "a name and --stage belong to a new method"),
    ],
)
def test_mistakes_write_nothing_and_say_what_to_do(checkout, arguments, message):
    (checkout / "src/thresher/methods/card.py").write_text("mine")
    (checkout / "tests/reference/test_taken.py").write_text("mine")
    before = files_in(checkout)
    refused(message, *arguments)
    assert files_in(checkout) == before


def test_outside_a_checkout_it_names_the_ways_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(
        r"is not in a checkout of thresher: .*Clone the repository .* entry-point group `thresher\.methods`",
        "method",
        "seta9",
    )
    assert not files_in(tmp_path)


def test_a_second_time_is_refused(checkout):
    init("method", "seta9")
    before = files_in(checkout)
    refused(r"src/thresher/methods/seta9\.py is there already", "method", "seta9")
    assert files_in(checkout) == before


def test_a_training_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = "thresher advise mine.py:build --budget 0.5"
    assert (
        init("mine.py").splitlines() == ["mine.py", command]
        and command in (tmp_path / "mine.py").read_text()
    )
    refused(r"mine\.py is there already; give another name", "mine.py")
    assert init().startswith("my_training.py\n")


def test_mistakes_are_one_message_of_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["thresher", "init", "method"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith("thresher: a new method needs a name")


def test_importing_and_listing_load_no_torch():
    code = """
import sys, thresher
from typer.testing import CliRunner
from thresher_lab.cli.app import app
for words in (["--help"], ["methods"], ["init", "--help"]):
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
assert "kakurenbo" in CliRunner().invoke(app, ["methods"]).output
assert {"Kakurenbo", "subset_backward", "mixes_samples", "methods", "cost"} <= set(dir(thresher)) & set(thresher.__all__)
assert "torch" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
