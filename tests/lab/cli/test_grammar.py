"""Options that mean the same in every command that has them: -h, --json and --quiet."""

import io
import json
import sys

import pytest
import typer
from rich.console import Console

from thresher.methods import names
from thresher_lab import cli
from thresher_lab.cli._console import announcer
from thresher_lab.cli._progress import progress_on
from thresher_lab.cli.app import app
from thresher_lab.cli.compare import compare
from thresher_lab.cli.demo import demo
from thresher_lab.comparison.controls import Job
from thresher_lab.recipes.schema import recipe_names
from thresher_lab.training.specs import MethodSpec

QUIET = {
    "demo",
    "advise",
    "audit",
    "compare",
    "league",
    "observe",
    "score",
    "time-to-target",
    "reproduce",
    "train",
}
"""Commands that show progress."""
JSON = {"advise", "audit", "compare", "methods", "recipes", "why"}
"""Commands that print what no file of theirs has."""


def called(capsys, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["thresher", *words])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 0
    return capsys.readouterr()


def test_commands_have_the_options_that_they_can_have():
    commands = typer.main.get_command(app).commands
    options = {
        name: {option for one in command.params for option in one.opts}
        for name, command in commands.items()
    }
    assert {name for name, found in options.items() if {"--quiet", "-q"} <= found} == QUIET
    assert {name for name, found in options.items() if "--json" in found} == JSON


def test_help_has_a_short_form_everywhere(capsys, monkeypatch):
    for name in typer.main.get_command(app).commands:
        assert f"thresher {name} [OPTIONS]" in " ".join(
            called(capsys, monkeypatch, name, "-h").out.split()
        )


def test_quiet_says_what_changes_the_meaning_and_nothing_else(capsys):
    console = Console(file=io.StringIO(), width=120, color_system=None, force_terminal=True)
    job = Job.of(MethodSpec("full"), 0)
    with progress_on(console, quiet=True) as watcher:
        watcher.planned(2, 5)
        watcher.started(job)
        watcher.advanced(job, 1, 0.5)
        watcher.warned("Warning: mind this", "")
        watcher.left_out("winnow", "placebo", "there is nothing to permute")
        watcher.finished(
            job, {"wall_s": 1.0, "metric": {"name": "accuracy", "value": 1.0}}, reused=False
        )
    warning, left_out = console.file.getvalue().splitlines()
    assert (
        warning == "Warning: mind this"
        and "winnow" in left_out
        and "there is nothing to permute" in left_out
    )
    announcer("advise", quiet=True)("loading")
    announcer("advise")("loading")
    assert capsys.readouterr().err == "advise: loading\n"


def test_quiet_reaches_the_comparison(monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr(
        "thresher_lab.cli.demo.run_and_print", lambda *_, **options: given.append(options["quiet"])
    )
    monkeypatch.setattr("thresher_lab.cli.demo.find_wrong_labels", lambda *_: [])
    demo(tmp_path, quiet=True)
    demo(tmp_path)
    assert given == [True, False]


def test_methods_and_recipes_as_json(capsys, monkeypatch):
    found = json.loads(called(capsys, monkeypatch, "methods", "--json", "-").out)
    assert list(found) == names() and found["selective_backprop"]["stage"] == "batch"
    assert (
        json.loads(called(capsys, monkeypatch, "methods", "winnow", "--json", "-").out)
        == found["winnow"]
    )
    recipes = json.loads(called(capsys, monkeypatch, "recipes", "--json", "-").out)
    assert list(recipes) == recipe_names()
    assert (
        json.loads(called(capsys, monkeypatch, "recipes", "wrn-28-10", "--json", "-").out)
        == recipes["wrn-28-10"]
    )
    monkeypatch.setattr(sys, "argv", ["thresher", "methods", "winow", "--json", "-"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert (
        left.value.code == 2
        and "no method 'winow'; did you mean 'winnow'?" in capsys.readouterr().err
    )


def test_the_history_of_a_sample_as_json(capsys, monkeypatch, tmp_path):
    epochs = [
        {"epoch": 0, "loss": 0.5, "trained": 1, "rule": ""},
        {"epoch": 1, "loss": 0.25, "trained": 0, "rule": "hidden"},
    ]
    history = {"title": "sample 3", "epochs": epochs}
    monkeypatch.setattr("thresher_lab.comparison.histories.history_of", lambda *_: history)
    out = tmp_path / "why.json"
    assert called(capsys, monkeypatch, "why", "run", "3", "--json", str(out)).out == ""
    assert json.loads(out.read_text()) == history


def test_a_quick_look_as_json_has_nothing_beside_it(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("thresher_lab.cli.compare.run_and_print", lambda *_, **__: None)
    words = [
        "compare",
        "digits",
        "--methods",
        "infobatch",
        "--epochs",
        "1",
        "--out",
        str(tmp_path),
        "--quick",
        "--json",
        "-",
    ]
    found = called(capsys, monkeypatch, *words)
    assert not found.out and found.err.startswith("This was a quick look")


def test_quick_takes_the_first_seed_and_until_is_handed_on(capsys, monkeypatch, tmp_path):
    given = []
    for command in ("compare", "demo"):
        monkeypatch.setattr(
            f"thresher_lab.cli.{command}.run_and_print",
            lambda *of, **options: given.append((of[2], options["until_decided"])),
        )
    words = ["compare", "digits", "--methods", "infobatch", "--epochs", "1", "--out", str(tmp_path)]
    called(capsys, monkeypatch, *words, "--seeds", "4-9", "--quick")
    called(capsys, monkeypatch, *words, "--seeds", "4-9", "--until", "decided")
    monkeypatch.setattr("thresher_lab.cli.demo.find_wrong_labels", lambda *_: [])
    demo(tmp_path, until="decided")
    assert given == [("4", False), ("4-9", True), ("0,1,2,3,4,5,6,7,8,9", True)]
    with pytest.raises(ValueError, match="--quick trains one seed .* leave out --until"):
        compare(
            task="digits", methods="winnow", epochs=1, out=tmp_path, quick=True, until="decided"
        )
