"""The result of a comparison, its progress and the cards, on terminals of several widths."""

import io
import os
import re
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from helpers import noted
from thresher_lab.cli import _progress, demo
from thresher_lab.cli._comparison import after_a_loss, explained_interruptions, print_summary
from thresher_lab.cli._console import open_console, print_table, targets_table
from thresher_lab.cli._progress import progress_on
from thresher_lab.cli.app import app
from thresher_lab.cli.methods import _method_card, _methods_table
from thresher_lab.cli.recipes import _recipe_table
from thresher_lab.cli.reproduce import _artefact_table
from thresher_lab.comparison.controls import Job
from thresher_lab.comparison.summary import summarize
from thresher_lab.comparison.workers import RunValueError
from thresher_lab.training.specs import MethodSpec

CAPTURES = Path(__file__).parent / "captures"
WIDTHS = (60, 80, 100, 120)
NAMES = ("winnow:share=0.5", "selective_backprop:beta=1 twice every=3 bfloat16")
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def run_of(method, seed, value, ratio, control_of=None, metric="accuracy"):
    times = {
        "wall_s": 10.0 * ratio,
        "cpu_s": 10.0 * ratio,
        "step_memory": None if control_of else round(1e6 * ratio**0.5),
    }
    found = {
        "method": method,
        "control_of": control_of,
        "seed": seed,
        "metric": {"name": metric, "value": value},
    }
    return found | times | {"cost": {"ratio": ratio}, "history": []}


def results_of(margin=0.5, scale=1.0, metric="accuracy", controls=True):
    """Results of a comparison: one method that is as good as full training, and one that loses, each beside its controls."""
    runs = [
        run_of("full", seed, scale * (0.9 + 0.001 * seed), 1.0, metric=metric) for seed in range(3)
    ]
    for name, loss, cost in zip(NAMES, (0.0004, 0.03), (0.5, 0.667), strict=True):
        worse = {
            None: loss,
            "uniform": loss + 0.02,
            "shorter": loss + 0.03,
            "smaller": loss + 0.001,
            "placebo": loss + 0.0005,
        }
        for kind, less in worse.items() if controls else {None: loss}.items():
            label = name if kind is None else f"{kind}@{cost:.3f}"
            for seed in range(3):
                value = scale * (0.9 + 0.0007 * seed - less * (1 + 0.1 * seed))
                runs.append(
                    run_of(label, seed, value, cost, None if kind is None else name, metric)
                )
    return {
        "task": "fashion-mnist@10000", "epochs": 20, "device": "cpu", "margin": margin, "runs": runs,
        "summary": summarize(runs, margin),
    }  # fmt: skip


def shown(print_to, width, **settings):
    console = Console(file=io.StringIO(), width=width, color_system=None, **settings)
    print_to(console)
    return (
        "\n".join(line.rstrip() for line in ESCAPES.sub("", console.file.getvalue()).splitlines())
        + "\n"
    )


def words(text):
    return " ".join(text.split())


@pytest.mark.parametrize("width", WIDTHS)
def test_the_capture_of_each_width(width):
    results = results_of()
    text = shown(lambda console: print_summary(console, results), width)
    assert max(map(len, text.splitlines())) <= width
    for row in results["summary"]:
        assert all(
            word in words(text) for word in (*row["method"].split(), *row["verdict"].split())
        ), row["method"]
    path = CAPTURES / f"summary-{width}.txt"
    if os.environ.get("THRESHER_WRITE_CAPTURES"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), (
        "if the change is meant, run this test with THRESHER_WRITE_CAPTURES=1"
    )


def test_each_verdict_is_whole_on_a_narrow_terminal():
    results = results_of()
    text = words(shown(lambda console: print_summary(console, results), 60))
    for row in results["summary"]:
        assert row["verdict"] in text and row["method"] in text


def test_one_method_with_two_controls_fits_on_25_lines():
    results = results_of()
    names = {NAMES[0], "full", "shorter@0.500", "smaller@0.500"}
    results["summary"] = [row for row in results["summary"] if row["method"] in names]
    text = shown(lambda console: print_summary(console, results), 80)
    assert (
        len(results["summary"]) == 4 and len(text.splitlines()) <= 25 - 2
    )  # two lines are the paths of the files
    assert text.splitlines()[1].split() == [
        "CPU",
        "cost",
        "memory",
        "accuracy,",
        "%",
        "difference",
        "[95",
        "%]",
    ]


def test_the_screen_says_if_intervals_are_valid_at_every_look():
    results = results_of()
    for until in (False, True):
        text = words(shown(lambda console: print_summary(console, results), 80))
        assert ("Intervals and verdicts are valid at every look" in text) is until
        results["until"] = "decided"


def test_a_metric_that_is_no_share_is_not_in_percent():
    text = shown(
        lambda console: print_summary(console, results_of(margin=1.0, scale=40, metric="loss")), 60
    )
    assert "memory" in text and "loss, %" not in text
    assert "36.04 ± 0.04" in text


@pytest.mark.parametrize("width", WIDTHS)
def test_the_time_left_is_whole_at_each_width(width, monkeypatch):
    job = Job.of(MethodSpec("selective_backprop", {"keep": 0.33}), 0)
    frames = []

    def watch(console):
        with progress_on(console) as watcher:
            watcher.planned(400, 1000)
            watcher.started(job)
            whole, bar = watcher._progress.tasks
            monkeypatch.setattr(type(whole), "time_remaining", property(lambda _: 359999.0))
            watcher.advanced(job, 250, 0.9)
            frames.append(
                shown(lambda other: other.print(watcher._progress.get_renderable()), width)
            )

    shown(watch, width, force_terminal=True)
    lines = frames[0].splitlines()
    assert len(lines) == 2 and all(line.endswith("left 99:59:59") for line in lines)
    assert max(map(len, lines)) <= width and "250/1000" in lines[1] and "1/400000" in lines[0]


def test_without_a_terminal_there_is_a_line_each_minute(monkeypatch):
    assert _progress.HEARTBEAT_S == 60
    monkeypatch.setattr(_progress, "HEARTBEAT_S", 0.01)
    first = Job.of(MethodSpec("full"), 0)

    def watch(console):
        with progress_on(console) as watcher:
            wait_for(console, "nothing is trained yet: the data and the task are being read")
            watcher.planned(2, 5)
            wait_for(
                console,
                "0 of 2 runs done, 0 of 10 epochs; time left: not known before the first epoch is over",
            )
            watcher.started(first)
            watcher.advanced(first, 1, 0.5)
            wait_for(console, "0 of 2 runs done, 1 of 10 epochs; time left: about 0:00:0")

    def wait_for(console, line):
        for _ in range(2000):
            if line in console.file.getvalue():
                return
            _progress.Event().wait(0.005)
        raise AssertionError(console.file.getvalue())

    shown(watch, 120)


def test_a_warning_of_several_runs_is_printed_once():
    def watch(console):
        with progress_on(console) as watcher:
            for text, run in (
                ("Warning: [a] 1.5", "full, seed 0"),
                ("Warning: b", ""),
                ("Warning: [a] 2.5", "full, seed 1"),
            ):
                watcher.warned(text, run)

    assert shown(watch, 120).splitlines() == [
        "Warning: [a] 1.5 (first in the run full, seed 0)",
        "Warning: b",
    ]


@pytest.mark.parametrize("width", WIDTHS)
def test_tables_and_cards_are_whole_at_each_width(width):
    reached = {"seeds": 3, "of": 3, "cost_to_full": 0.5, "cpu_to_full": 0.625}
    measured = {
        "targets": [{"factor": factor, "error": 0.1 * factor} for factor in (1.4, 1.2, 1.1)],
        "arms": [{"method": NAMES[1], "error": 0.12, "reached": [reached] * 3}],
    }
    for table in (targets_table(measured), _methods_table(), _recipe_table(), _artefact_table()):
        text = shown(lambda console, table=table: print_table(console, table), width)
        assert max(map(len, text.splitlines())) <= width
        joined = "".join(text.split())
        with noted(text):
            if width == 60:
                for column in table.columns:
                    for cell in column.cells:
                        assert "…" not in text and "".join(str(cell).split())[:14] in joined, cell
    card = shown(lambda console: console.print(_method_card("kakurenbo")), width)
    assert max(
        map(len, card.splitlines())
    ) <= width and "max_fraction (float; default: 0.3): Largest share" in words(card)


def lost(rates=None, cost=0.5):
    """Results of a comparison in which Winnow has lost."""
    runs = [run_of("full", seed, 0.9 + 0.001 * seed, 1.0) for seed in range(3)]
    runs += [run_of("winnow:share=0.5", seed, 0.85 + 0.0009 * seed, cost) for seed in range(3)]
    return {
        "task": "my folder/a.py:build",
        "margin": 0.5,
        "runs": runs,
        "rates": rates,
        "summary": summarize(runs, 0.5),
    }


def test_after_a_loss_the_next_command_tries_learning_rates():
    said, command = after_a_loss(
        lost(),
        "winnow:share=0.5,infobatch",
        {"epochs": 4, "seeds": "0,1,2", "data": None, "out": "r"},
    )
    assert (
        said
        == "winnow:share=0.5 lost at the learning rate of the training. Another rate may suit fewer samples; try that first:"
    )
    assert command == (
        "thresher compare 'my folder/a.py:build' --methods winnow:share=0.5 --rates 0.5,1,2 --epochs 4 --seeds 0,1,2 --out r"
    )


def test_after_a_loss_with_the_best_rate_it_tries_a_larger_share():
    tried = {"factors": [0.5, 1, 2], "seeds": [10000, 10001]}
    said, command = after_a_loss(
        lost(tried), "winnow:share=0.5", {"epochs": 4, "rates": "0.5,1,2", "out": "r"}
    )
    assert said == "winnow:share=0.5 lost even at the best learning rate. Try a larger share:"
    assert (
        command
        == "thresher compare 'my folder/a.py:build' --budget 0.75 --epochs 4 --rates 0.5,1,2 --out r"
    )
    assert after_a_loss(lost(tried, cost=0.9), "winnow:share=0.5", {}) is None


def test_without_a_loss_or_with_a_method_that_is_picked_there_is_no_next_command():
    assert after_a_loss(results_of(), ",".join(NAMES), {}) is None


def test_the_demo_ends_with_the_commands_for_a_training_of_ones_own(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(demo, "run_and_print", lambda *_, **__: None)
    monkeypatch.setattr(demo, "find_wrong_labels", lambda *_: [])
    demo.demo(tmp_path)
    commands = capsys.readouterr().out.splitlines()[-3:]
    assert commands[::2] == ["thresher init", "thresher advise my_training.py:build --budget 0.5"]
    monkeypatch.chdir(tmp_path)
    assert (
        CliRunner().invoke(app, commands[0].split()[1:]).exit_code == 0
        and (tmp_path / "my_training.py").is_file()
    )
    asked = {}
    monkeypatch.setattr(
        "thresher_lab.advise.advise.advise", lambda task, *_, **__: asked.update(task=task) or 1 / 0
    )
    monkeypatch.setattr(
        "thresher_lab.comparison.observing.observed",
        lambda task, **_: asked.update(observed=task) or 1 / 0,
    )
    for command in commands[1:]:
        found = CliRunner().invoke(app, command.split()[1:])
        assert isinstance(found.exception, ZeroDivisionError)
    assert asked == dict.fromkeys(("task", "observed"), "my_training.py:build")


@pytest.mark.parametrize(("columns", "width"), [("70", 70), ("200", 200), (None, 120)])
def test_without_a_terminal_lines_are_as_long_as_columns_says(monkeypatch, columns, width):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    assert open_console().width == width


def test_of_a_run_that_fails_it_is_said_that_others_are_kept(tmp_path):
    def fails():
        with explained_interruptions(tmp_path):
            raise RunValueError("winnow, seed 5: ValueError: one row")

    with pytest.raises(ValueError, match="^winnow, seed 5: ValueError: one row$"):
        fails()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "full-seed0.json").write_text("{}")
    with pytest.raises(
        ValueError,
        match=rf"one row. Finished runs are kept in {tmp_path}: mend this one, or leave out its seed",
    ):
        fails()
