import io
import subprocess
import sys

import pytest
from rich.console import Console

import thresher
from thresher import cli
from thresher.cli.display import progress_on, summary_table
from thresher.experiments.job import Job
from thresher.experiments.specs import MethodSpec


def python(code):
    return subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)


def test_methods_are_listed_without_torch():
    code = """
import sys
sys.argv = ["thresher", "methods"]
from thresher.cli import main
try:
    main()
finally:
    heavy = {"torch", "numpy", "scipy", "accelerate", "sklearn"} & set(sys.modules)
    assert not heavy, heavy
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    for word in ("full", "uniform", "kakurenbo", "infobatch", "epoch", "arXiv:2310.10102", "hide easy samples"):
        assert word in done.stdout


def test_help_and_version_without_torch():
    for option in ("--help", "--version"):
        done = python(f"import sys; sys.argv = ['thresher', {option!r}]\nfrom thresher.cli import main\ntry: main()\n"
                      "finally: assert 'torch' not in sys.modules")  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert done.stdout == f"thresher {thresher.__version__}\n"


def test_without_the_extra_one_sentence_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == "typer" else object())
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        cli.main()
    assert "pip install 'thresher[experiments]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--methods": "kakurembo"}, "no method 'kakurembo'; there are full, infobatch, kakurenbo, uniform"),
        ({"--methods": "kakurenbo:hide=1"}, "kakurenbo has no setting 'hide'; it has max_fraction"),
        ({"--task": "cifar"}, "no task 'cifar'; there are digits"),
        ({"--seeds": "a"}, "--seeds: whole numbers"),
        ({"--data": "."}, "only fashion-mnist takes a folder"),
        ({"--task": "fashion-mnist", "--data": "."}, "torchvision"),
        ({"--epochs": "0"}, "--epochs"),
    ],
)
def test_mistakes_are_one_message_before_anything_runs(tmp_path, monkeypatch, capsys, change, message):
    given = {"--task": "digits", "--methods": "full", "--epochs": "1", "--out": str(tmp_path / "out")} | change
    monkeypatch.setattr(sys, "argv", ["thresher", "compare", *(word for pair in given.items() for word in pair)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.err and not captured.out
    assert not (tmp_path / "out").exists()


RUN = {"metric": {"name": "accuracy", "value": 0.9}, "wall_s": 1.0}


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "plain"])
def test_progress(terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    first, second = Job.of(MethodSpec("full"), 0), Job.of(MethodSpec("infobatch"), 0)
    with progress_on(console) as watcher:
        watcher.planned(2, 5)
        watcher.finished(first, RUN, reused=True)
        watcher.started(second)
        for epoch in range(5):
            watcher.advanced(second, epoch + 1, 0.5)
        if terminal:
            whole = watcher._progress.tasks[0]
            assert (whole.completed, whole.total) == (5, 5)
        watcher.finished(second, RUN, reused=False)
    text = console.file.getvalue()
    assert "[1/2] full, seed 0: accuracy 90.00 %, kept from before" in text
    assert "[2/2] infobatch, seed 0: accuracy 90.00 %, 1.0 s" in text
    assert ("5/5" in text) == terminal


def test_table():
    row = {"method": "full", "control_of": None, "mean": 0.9, "std": None, "difference": None, "ci95": None}
    row |= {"cost_ratio": 1.0, "wall_ratio": 1.0, "cpu_ratio": 1.0, "verdict": "the baseline"}
    other = row | {"method": "m", "std": 0.01, "difference": -0.012, "ci95": [-0.02, 0.004], "cost_ratio": 0.5, "verdict": "v"}
    control = other | {"method": "uniform@0.500", "control_of": "m"}
    results = {"task": "digits", "epochs": 3, "device": "cpu", "runs": [RUN | {"seed": 0}], "summary": [row, other, control]}
    console = Console(file=io.StringIO(), width=100)
    console.print(summary_table(results))
    text = console.file.getvalue()
    assert "digits, 3 epochs, 1 seed, cpu" in text
    assert "90.00 ± 1.00" in text and "-1.20 [-2.00, +0.40]" in text and "0.500" in text
    assert "   uniform@0.500" in text
