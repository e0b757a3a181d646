import json

import pytest
from typer.testing import CliRunner

from depth import in_verify
from thresher_lab.cli.app import app
from thresher_lab.comparison.compare import compare
from thresher_lab.comparison.scoring import make_scores
from thresher_lab.comparison.workers import RunError
from thresher_lab.training.specs import parse_methods


@pytest.fixture
def template(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["init"])
    assert done.exit_code == 0, done.output
    assert (
        done.output.splitlines()[0] == "my_training.py"
        and "advise my_training.py:build --budget 0.5" in done.output
    )
    return tmp_path / "my_training.py"


def test_the_template_runs_as_it_is(template, called):
    given = (
        "--methods",
        "kakurenbo",
        "--epochs",
        "2",
        "--seeds",
        "0",
        "--out",
        "runs/mine",
        "--controls",
        "uniform,shorter",
    )
    done = called("compare", "my_training.py:build", *given)
    assert done.returncode == 0, done.stderr
    results = json.loads((template.parent / "runs/mine/results.json").read_text())
    assert results["task"] == "my_training.py:build" and {
        run["metric"]["name"] for run in results["runs"]
    } == {"accuracy"}
    methods = [row["method"].partition("@")[0] for row in results["summary"]]
    assert methods == ["full", "kakurenbo", "uniform", "shorter"]
    assert all(0.5 < run["metric"]["value"] <= 1 for run in results["runs"])
    assert "CPU time of full training" in done.stdout
    assert results["classes"] == [*"0123456789"] and {
        type(run["busy"]) for run in results["runs"]
    } == {bool}
    files = {run["method"].partition("@")[0]: run.get("shown") for run in results["runs"]}
    assert all(files.pop(name).endswith(".shown") for name in ("full", "kakurenbo"))
    assert files == {"uniform": None, "shorter": None}
    page = (template.parent / "runs/mine/report.html").read_text()
    sheets = page.partition('id="sheets"')[2]
    assert (
        sheets.count('<img src="data:image/png;base64,') == sheets.count("<li>") > 50
        and "not shown" not in sheets
    )
    why = CliRunner().invoke(app, ["why", f"runs/mine/{results['runs'][0]['samples']}", "17"])
    assert why.exit_code == 0 and "sample 17 (class" in why.output


@in_verify
def test_its_loader_may_have_processes_of_its_own(template):
    template.write_text(
        template.read_text().replace("batch_size=64,", "batch_size=64, num_workers=1,")
    )
    results = compare(
        "my_training.py:build", parse_methods("full"), [0], 1, template.parent / "out", jobs=1
    )
    assert results["runs"][0]["metric"]["value"] > 0.5


def test_init_leaves_a_file_alone(template):
    template.write_text("mine")
    done = CliRunner().invoke(app, ["init"])
    assert isinstance(
        done.exception, ValueError
    ) and "my_training.py is there already; give another name" in str(done.exception)
    assert template.read_text() == "mine"


@pytest.mark.parametrize(
    ("before", "after", "line", "said"),
    [
        (
            "torch.manual_seed(seed)",
            "torch.manual_sead(seed)",
            "torch.manual_sead",
            "AttributeError",
        ),
        (
            "(predicted == right).float().mean().item()",
            "predicted.no_such()",
            "predicted.no_such()",
            "AttributeError",
        ),
        (
            '"optimizer": optimizer,',
            "",
            "def build",
            "must return a dict with .*; got one without optimizer",
        ),
        ("train[i][0]", "train[i]", "train[i]", "AttributeError"),
        (
            "train[i][0].reshape(8, 8)",
            "i",
            "def show",
            r"show\(0\) must return a PIL image, .* or a text; got int",
        ),
        (
            "import torch\n",
            "import torch, no_such_package\n",
            "no_such_package",
            "ModuleNotFoundError",
        ),
    ],
    ids=["building", "evaluating", "returned", "showing", "shown", "imported"],
)
def test_errors_name_file_and_line(template, inline_runs, before, after, line, said):
    template.write_text(template.read_text().replace(before, after, 1))
    number = next(i for i, text in enumerate(template.read_text().splitlines(), 1) if line in text)
    with pytest.raises((RunError, ValueError), match=f"my_training.py, line {number}: .*{said}"):
        compare(
            "my_training.py:build", parse_methods("full"), [0], 1, template.parent / "out", jobs=1
        )


def test_batches_of_any_form(template, inline_runs):
    """A function makes outputs and targets of dictionaries, in the loop, in own passes and in scores."""
    code = template.read_text()
    code = code.replace(
        "train = TensorDataset(x[:1400], y[:1400])", "train = Named(x[:1400], y[:1400])"
    )
    code = code.replace(
        '"optimizer": optimizer,',
        '"optimizer": optimizer, "forward": lambda model, b: (model(b["x"]), b["y"]),',
    )
    code = code.replace("return train[i][0]", "return train[i]['x']")
    named = """class Named(TensorDataset):
    def __getitem__(self, i):
        return dict(zip("xy", super().__getitem__(i)), place=i)


def build"""
    template.write_text(code.replace("def build", named, 1))
    found = compare(
        "my_training.py:build",
        parse_methods("kakurenbo"),
        [0],
        2,
        template.parent / "out",
        jobs=1,
        controls=(),
    )
    assert (
        all(0.8 < run["metric"]["value"] < 1 for run in found["runs"]) and len(found["runs"]) == 2
    )
    done = CliRunner().invoke(
        app, ["advise", "my_training.py:build", "--epochs", "4", "--seconds", "2", "--quiet"]
    )
    assert done.exit_code == 0 and "A step takes " in done.output
    for score in ("el2n", "forgetting", "dyn_unc", "grand"):
        table = make_scores("my_training.py:build", score, models=1, epochs=3, window=2)
        assert len(table) == 1400 and table.values.isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give the name of a task, or your own training"),
        (
            ("my_training.py:build", "--task", "digits"),
            "give the name of a task, or your own training",
        ),
        (("my_training.py",), "write your own training as FILE.py:FUNCTION"),
        (("my_training.py:make",), "has no 'make'"),
        (("other.py:build",), "no such file"),
    ],
)
def test_mistakes_on_the_command_line(template, arguments, said):
    done = CliRunner().invoke(
        app, ["compare", *arguments, "--methods", "full", "--epochs", "1", "--out", "out"]
    )
    told = f"{done.output} {done.exception}"
    assert done.exit_code and said in " ".join(told.replace("│", " ").split())
