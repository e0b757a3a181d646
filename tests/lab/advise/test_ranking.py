import shlex
import sys

import pytest

from thresher_lab import cli
from thresher_lab.advise.advise import next_command, worth_trying
from thresher_lab.advise.findings import Measurement, Record
from thresher_lab.advise.forecast import Outlook
from thresher_lab.training.specs import parse_methods

OPEN = Outlook(0.3, 0.3, 1.5, 0.5, 0.0)
ALIKE = Outlook(0.95, 0.95, 1.0, 0.5, 0.0)


def record(**findings):
    return Record([Measurement("here", "a", "b", 0.5, 0.0, "unclear", findings)] if findings else [])


def row(method, at_most, refused=None, **findings):
    return {"method": method, "refused": refused, "at_most": at_most, "record": record(**findings).as_dict(), "missing": {}}


def test_what_was_measured_comes_before_time():
    rows = [
        row("new", 0.6),
        row("open", 0.2, uniform="unclear"),
        row("slow", 0.1, uniform="better"),
        row("good", 0.3, smaller="better"),
        row("bad", 0.9, uniform="worse"),
        row("idle", 0.04, uniform="better"),
        row("uniform:keep=0.5", 0.5),
        row("random_backprop:keep=0.5", 0.5, uniform="better"),
        row("blind", 0.5, uniform="better") | {"missing": {"uncertainty": "draws uniformly"}},
        row("refused", 0.5, refused="no classes", uniform="better"),
    ]
    assert [one["method"] for one in worth_trying(rows, OPEN)] == ["good", "slow", "open", "new"]
    assert worth_trying(rows, ALIKE) == []


METHODS = (
    "winnow:share=0.35:score=loss,selective_backprop:keep=0.33:forward_passes=twice:score_every=2,"
    "infobatch:spend=batches,uniform:keep=0.5+random_backprop:keep=0.5"
)


@pytest.mark.parametrize("data", [None, "my data"])
@pytest.mark.parametrize("task", ["fashion-mnist@2000", "my folder/training.py:build"])
def test_the_next_command_runs_as_printed(monkeypatch, task, data):
    specs = parse_methods(METHODS)
    command = next_command(task, [spec.text for spec in specs], epochs=7, data=data)
    asked = {}

    def compared(task, methods, seeds, epochs, out, **options):
        asked.update(task=task, methods=parse_methods(methods), epochs=epochs, out=str(out), data=options["data"])

    monkeypatch.setattr("thresher_lab.cli.compare.run_and_print", compared)
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert not left.value.code
    assert (asked["task"], asked["methods"], asked["epochs"]) == (task, specs, 7)
    assert asked["out"] in ("runs/fashion-mnist-2000", "runs/training")
    assert (None if asked["data"] is None else str(asked["data"])) == data


def test_without_a_method_random_samples_are_compared():
    command = next_command("digits", [], epochs=3)
    assert command == "thresher compare digits --methods uniform:keep=0.5 --epochs 3 --out runs/digits"
