"""Tables and figures from real, short trainings to their claims: what made-up runs cannot show, such as keys of the history."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from depth import depth
from in_process import InProcessWorkers
from thresher_lab.cli.reproduce import reproduce as command
from thresher_lab.comparison import compare as comparison
from thresher_lab.recipes.running import task_of
from thresher_lab.reproduction import ARTEFACTS
from thresher_lab.reproduction.artefact import Artefact, ArtefactPart, reproduce

SAMPLES, EPOCHS = 200, 4
QUICK = ("diet-sb-e",)
NAMES = depth(QUICK, tuple(name for name in ARTEFACTS if not name.startswith("kakurenbo-table-2")))
"""Table 2 of KAKURENBO trains other networks after each run, or the largest ones."""


def shortened(part: ArtefactPart) -> ArtefactPart:
    """Returns a part on a few samples, for a few epochs; in `make test` on digits, which are read at once."""
    task = depth("digits", part.task.partition("@")[0])
    return replace(part, task=f"{task}@{SAMPLES}", epochs=EPOCHS, controls=())


def short(artefact: Artefact) -> Artefact:
    """Returns a table or figure with short parts."""
    return replace(artefact, parts=[shortened(part) for part in artefact.parts], seeds=(0, 1))


@pytest.mark.filterwarnings("ignore:AdaSelection. `pool` is")
@pytest.mark.parametrize("name", NAMES)
def test_a_short_training_is_judged_and_shown(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in short(ARTEFACTS[name]).parts:
        try:
            (task := task_of(part.task)).load(task.find(None))
        except FileNotFoundError as error:
            pytest.skip(f"the data of {part.task} is not installed: {error}")
    monkeypatch.setattr(comparison, "Workers", InProcessWorkers)
    found = reproduce(short(ARTEFACTS[name]), tmp_path, jobs=1)
    assert all(claim["verdict"] for claim in found["claims"]) and found["tables"]
    assert all(row["steps"] > 0 for part in found["parts"] for row in part["summary"])
    assert len(found["pictures"]) == (name in ("diet-sb-e", "diet-sb-f"))


AT_FULL_SIZE = {
    "kakurenbo-table-2": "wrn-28-10",
    "selective-backprop-time-to-target": "selective-backprop-cifar10",
    "adaselection-weights": "adaselection-line",
    "diet-sb-a": "diet-sb-resnet20-cifar10",
    "diet-sb-d": "diet-sb-resnet20-cifar10",
    "kakurenbo-figure-5": "deepcam",
    "kakurenbo-table-4": "resnet50-a",
}
"""Tables and figures of each paper, with a recipe."""
app = typer.Typer()
app.command()(command)


@pytest.mark.parametrize("name", depth(("adaselection-weights",), tuple(AT_FULL_SIZE)))
def test_a_recipe_at_smoke_size(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "Workers", InProcessWorkers)
    recipe = AT_FULL_SIZE[name]
    given = [
        name,
        "--recipe",
        recipe,
        "--data",
        str(tmp_path),
        "--smoke",
        "--work",
        str(tmp_path / "work"),
        "--jobs",
        "1",
        "-q",
    ]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output
    assert (
        f"the recipe `{recipe}`" in " ".join(done.output.split()) and "is not read" in done.output
    )
    found = json.loads((tmp_path / "work" / "results" / f"{name}@{recipe}-smoke.json").read_text())
    assert all(claim["mean"] is not None for claim in found["claims"])
    page = (tmp_path / "work" / f"{name}@{recipe}-smoke.md").read_text()
    assert f"smoke:{recipe}, 8 epochs" in page or name in (
        "adaselection-weights",
        "diet-sb-d",
    )  # they have tables of their own
