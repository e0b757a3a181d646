"""The answer of advise: what is printed for planted times."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from thresher_lab.advise.advise import advise, answer, in_words, savings
from thresher_lab.advise.measurement import Measured, Sizes
from thresher_lab.advise.pace import Pace
from thresher_lab.cli.app import app

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
COMPUTING = Pace(loader=0.0, forward=0.2, backward=0.4, optimizer=0.2, scoring=0.15, half=0.5)
SAMPLES = Sizes(8, 64, 0.4, 0.05)
MEASURED = Measured("cpu", 32, 100, COMPUTING, 0.8, evaluation_s=2.0, sizes=SAMPLES)
GIVEN = {"task": "my folder/a.py:build", "epochs": 20, "budget": [0.5], "threads": 1}
ANSWER = """\
my folder/a.py:build: 20 epochs of 100 steps, 32 samples a step, on 1 CPU thread

A step takes 800 ms: loading 0 %, forward 25 %, backward 50 %, optimizer 25 %.
The loader is not the bottleneck: a step waits for it 0 % of the time.
Half a batch takes 62 % of the computing time of a whole one.
Samples have 8 to 64 values. Random batches are 40 % padding, batches of similar sizes 5 %.

Time that each way saves at most, by share of the cost        at 0.5
  fewer epochs                                                  50 %
  smaller batches, thresher.attach(share, ...)                  38 %
  hiding samples each epoch                                     50 %
  hiding samples, with a forward pass for the hidden ones       41 %
  selection within the batch, in one forward pass               19 %
  selection within the batch, in two forward passes             31 %

What it costs in accuracy, only a comparison can measure. A rule of thumb: if training
for half of the epochs costs you 1.9 points of accuracy or more, train in full.

Next: 21 trainings (full training, Winnow and its controls, 3 seeds each), about 3.1 hours:
thresher compare 'my folder/a.py:build' --budget 0.5 --epochs 20 --out runs/a"""


def said(measured=MEASURED, **given):
    return "\n".join(answer(measured, GIVEN | given)["lines"])


def test_the_answer_fits_on_one_screen():
    assert said() == ANSWER and len(ANSWER.splitlines()) <= 24
    worst = replace(MEASURED, busy=True, fallback="it has hooks")
    assert len(said(worst, budget=[0.5, 0.35, 0.25]).splitlines()) <= 24


def test_a_loader_that_is_the_bottleneck_decides_what_can_be_saved():
    waiting = replace(
        MEASURED,
        pace=Pace(loader=9.2, forward=0.2, backward=0.4, optimizer=0.2, scoring=0.15, half=0.5),
    )
    text = said(waiting)
    assert "A step takes 10000 ms: loading 92 %, forward 2 %, backward 4 %, optimizer 2 %." in text
    assert "The loader is the bottleneck: a step waits for it 92 % of the time." in text
    assert "hiding samples, with a forward pass for the hidden ones        3 %" in text
    assert "selection within the batch, in one forward pass                2 %" in text
    assert "smaller batches, thresher.attach(share, ...)                  49 %" in text


def test_loading_during_computing_is_not_waited_for():
    hidden = replace(MEASURED, pace=replace(COMPUTING, loader=0.6, overlap=1.0))
    assert "The loader is not the bottleneck: a step waits for it 0 % of the time." in said(hidden)


def test_if_half_a_batch_takes_as_long_the_comparison_leaves_out_steps():
    found = answer(
        replace(MEASURED, pace=replace(COMPUTING, half=0.76)), GIVEN | {"budget": [0.5, 0.25]}
    )
    text = "\n".join(found["lines"])
    assert (
        "Half a batch takes 95 % of the computing time of a whole one: smaller batches save little."
        in text
    )
    assert (
        " --methods winnow:share=0.5:spend=steps,winnow:share=0.25:spend=steps --epochs 20 " in text
    )
    assert "at 0.5   at 0.25" in text and "39 trainings" in text
    loading = answer(replace(MEASURED, pace=replace(COMPUTING, half=0.76, loader=5.0)), GIVEN)[
        "lines"
    ]
    assert (
        "save little" not in "\n".join(loading) and " --budget 0.5 " in loading[-1]
    )  # half of the samples are loaded


@pytest.mark.parametrize("settings", [":stratify=none", ":spend=steps:stratify=none"])
def test_the_command_has_settings_that_the_training_accepts(settings):
    command = said(replace(MEASURED, settings=[settings])).splitlines()[-1]
    assert f" --methods winnow:share=0.5{settings} " in command
    assert said(replace(MEASURED, settings=[])) == ANSWER


def test_a_model_that_cannot_be_traced_saves_nothing_in_one_pass():
    text = said(replace(MEASURED, fallback="it has hooks"))
    assert "selection within the batch, in one forward pass               none" in text
    assert (
        "One forward pass saves no part of the backward pass: the model cannot be traced (it has hooks)."
        in text
    )


def test_two_passes_save_nothing_if_scoring_takes_what_is_left_out():
    pace = Pace(loader=0.0, forward=0.6, backward=0.2, optimizer=0.0, scoring=0.6)
    assert savings(pace, 0.5)["selection within the batch, in two forward passes"] == pytest.approx(
        -0.25
    )
    assert "in two forward passes             none" in said(replace(MEASURED, pace=pace))


def test_samples_of_one_size_and_of_unknown_size():
    assert "All samples have the same size, so none is padded." in said(
        replace(MEASURED, sizes=Sizes(8, 8, 0.0, 0.0))
    )
    assert "padd" not in said(replace(MEASURED, sizes=None))


def test_a_machine_that_is_too_slow_is_named_and_the_comparison_stays():
    text = said(replace(MEASURED, pace=None, step_s=14.2))
    assert (
        "One step did not end within 10 s: it took 14 s or more. This machine is too slow for this training."
        in text
    )
    assert (
        text.endswith(ANSWER.splitlines()[-1])
        and "3 seeds each):\n" in text
        and "saves" not in text
    )


def test_a_busy_machine_is_named():
    assert "The machine was busy, with more work than cores: the times are rough." in said(
        replace(MEASURED, busy=True)
    )
    assert "on 4 CPU threads" in said(threads=4) and "on cuda" in said(
        replace(MEASURED, device="cuda")
    )


def test_the_length_is_that_of_all_trainings_two_side_by_side():
    found = answer(MEASURED, GIVEN)["comparison"]
    epochs = 3 * 20 * (1 + 4 * 0.625 + 2 * 0.5)
    assert found["trainings"] == 21 and found["seconds"] == pytest.approx(
        (epochs * 100 * 0.8 + 21 * 20 * 2.0) / 2
    )
    assert (
        in_words(61.0) == "about 2 minutes"
        and in_words(60.0) == "about 1 minute"
        and in_words(1e5) == "about 28 hours"
    )


def test_a_loader_without_smaller_batches_has_a_control_less():
    only_steps = replace(MEASURED, settings=[":spend=steps", ":spend=steps:stratify=none"])
    found = answer(only_steps, GIVEN)["comparison"]
    epochs = 3 * 20 * (1 + 3 * 0.5 + 2 * 0.5)
    assert found["trainings"] == 18 and found["seconds"] == pytest.approx(
        (epochs * 100 * 0.8 + 18 * 20 * 2.0) / 2
    )


def test_the_command_runs_as_printed(monkeypatch, tmp_path):
    asked = {}

    def begun(training, methods, seeds, epochs, out, **_):
        asked.update(training=training, methods=methods, epochs=epochs, seeds=seeds, out=str(out))
        raise ZeroDivisionError

    monkeypatch.setattr("thresher_lab.cli.compare.run_and_print", begun)
    command = shlex.split(answer(MEASURED, GIVEN | {"budget": [0.5, 0.35]}, tmp_path)["lines"][-1])
    assert isinstance(CliRunner().invoke(app, command[1:]).exception, ZeroDivisionError)
    assert asked == {
        "training": "my folder/a.py:build",
        "methods": "winnow:share=0.5,winnow:share=0.35",
        "epochs": 20,
        "seeds": "0,1,2",
        "out": "runs/a",
    }


@pytest.mark.parametrize("settings", [{"epochs": 0}, {"threads": 0}, {"seconds": 0.0}])
def test_settings_that_make_no_sense(settings):
    with pytest.raises(
        ValueError, match="`epochs` and `threads` must be 1 or more and `seconds` above 0, got"
    ):
        advise("digits@200", **settings)


def test_the_rule_of_thumb_is_that_of_the_committed_tasks():
    """Half of the epochs lost so much where every way to spend half lost more than the margin, and less elsewhere."""
    tasks = json.loads((RESULTS / "winnow.json").read_text())["shares"]["0.5"]["tasks"]
    best = {
        t: max(row["to_full"]["mean"] for arm, row in rows.items() if arm != "full")
        for t, rows in tasks.items()
    }
    epochs = {t: -rows["shorter"]["to_full"]["mean"] for t, rows in tasks.items()}
    lost = [epochs[task] for task in tasks if best[task] < -0.2]
    others = [epochs[task] for task in tasks if best[task] >= -0.2]
    assert (len(lost), round(min(lost), 1)) == (4, 1.9) and (
        len(others),
        round(max(others), 1),
    ) == (7, 1.2)
