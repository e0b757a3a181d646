import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from thresher_lab.advise import budget
from thresher_lab.advise.budget import (
    budget_advice,
    budget_sentences,
    equal_seeds,
    needs_steps,
    next_after_budget,
    odds_of_free,
    smaller_losses,
    times_at,
)
from thresher_lab.advise.pace import Pace
from thresher_lab.comparison.controls import parse_budget
from thresher_lab.tasks.base import Data, Task

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def planted(lost):
    """Returns a short run that loses so much with smaller batches, and differs by a hundredth between the seeds."""

    def metric(spec, seed):
        smaller = spec.attachment().get("spend") == "batches"
        return 0.9 + 0.01 * seed - (lost * spec.given["keep"] if smaller else 0.0)

    return metric


def test_losses_are_paired_by_seed_and_taken_with_smaller_batches():
    found = smaller_losses(planted(0.02), [0.5, 0.25])
    assert found["full"] == pytest.approx(0.905)
    assert [loss["share"] for loss in found["losses"]] == [0.5, 0.25]
    assert [loss["lost"] for loss in found["losses"]] == pytest.approx([0.01, 0.005])
    assert found["losses"][0]["by_seed"] == pytest.approx([0.01, 0.01])


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        (
            0.003,
            "lose 0.30 points of accuracy in short runs of 5 epochs (90.5 to 90.2; by seed 0.30, 0.30).",
        ),
        (-0.01, "smaller batches lose nothing in short runs"),
    ],
)
def test_what_is_said_of_a_share(lost, said):
    found = {"epochs": 5, "metric": "accuracy", **smaller_losses(planted(2 * lost), [0.5])}
    assert said in budget_sentences(found)[0]


def test_of_a_metric_that_is_no_share_no_limit_is_known():
    values = iter([41.0, 39.0, 39.0, 35.0])
    found = {"epochs": 5, "metric": "score", **smaller_losses(lambda *_: next(values), [0.5])}
    assert "lose 3.00 of score" in budget_sentences(found)[0] and "no limit is known" in budget_sentences(found)[0]


def test_short_runs_of_a_real_training(monkeypatch):
    monkeypatch.setattr(budget, "SEEDS", (0,))
    said = []
    found = budget_advice("digits@200", [0.5], epochs=4, says=said.append)
    assert said == ["training short run 1 of 2, 2 epochs", "training short run 2 of 2, 2 epochs"]
    assert (found["epochs"], found["metric"]) == (2, "accuracy") and 0 < found["full"] < 1
    assert "there was time for one seed" in found["sentences"][0]


COMPARE = "thresher compare digits {} --epochs 8 --out runs/digits"


@pytest.mark.parametrize(
    ("lost", "full", "command"),
    [
        ([0.001, 0.02], 0.9, COMPARE.format("--budget 0.5,0.35")),
        ([0.001, 0.011], 0.9, COMPARE.format("--budget 0.5,0.35")),
        ([0.02, 0.03], 0.9, COMPARE.format("--budget 0.5,0.35,0.75")),
        ([20.0, 30.0], 40.0, COMPARE.format("--budget 0.5,0.35")),
    ],
)
def test_the_next_command_follows_from_the_losses(monkeypatch, lost, full, command):
    """Whole runs lose less, so that all shares are compared; where all lose in short runs, a larger one is tried, too."""
    metrics = iter([full, *(full - loss for loss in lost)])
    monkeypatch.setattr(budget, "SEEDS", (0,))
    monkeypatch.setattr(budget, "train", lambda *_, **__: {"metric": {"name": "metric", "value": next(metrics)}})
    found = budget_advice("digits", [0.5, 0.35], epochs=8)
    assert next_after_budget(found, "digits", ["winnow:share=0.5"], epochs=8) == command


def of_findings(**shares):
    """A loss of each finding, with which the seeds agree; a share of which they do not has the finding of its mean."""
    lost = {"free": [0.0, 0.0], "lost": [0.02, 0.02], "split": [0.05, 0.0]}
    losses = [
        {"share": float(share[1:]) / 10**5, "finding": "lost" if finding == "split" else finding, "by_seed": lost[finding]}
        for share, finding in shares.items()
    ]
    return {"points": True, "losses": losses}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (of_findings(_80000="lost", _50000="lost"), "compare digits --budget 0.8,0.5,0.9 --epochs 8"),
        (of_findings(_99999="lost", _50000="lost"), "compare digits --budget 0.99999,0.5 --epochs 8"),
        (of_findings(_50000="split"), "compare digits --budget 0.5,0.75 --epochs 8"),
        (of_findings(_50001="free", _50002="free"), "compare digits --budget 0.50001,0.50002 --epochs 8"),
    ],
)
def test_the_next_command_can_be_run_for_all_shares(found, expected):
    command = next_after_budget(found, "digits", ["winnow:share=0.5", "infobatch"], epochs=8)
    assert command.startswith(f"thresher {expected}")
    alone = next_after_budget(found, "digits", ["infobatch", "rs2"], epochs=8)
    assert alone == command.replace("compare digits", "compare digits --methods infobatch,rs2")
    parse_budget(command.split("--budget ")[1].split()[0])


def test_where_only_fewer_steps_save_time_winnow_leaves_out_steps():
    found = next_after_budget(of_findings(_50000="free"), "digits", ["infobatch"], epochs=8, by_steps=True)
    assert found.startswith("thresher compare digits --methods winnow:share=0.5:spend=steps,infobatch --epochs 8")
    found = next_after_budget(of_findings(_50000="free"), "digits", ["winnow:share=0.5"], epochs=8, and_steps=True)
    assert found.startswith("thresher compare digits --methods winnow:share=0.5:spend=steps --budget 0.5 --epochs 8")


def test_the_time_of_a_share_is_that_of_smaller_batches():
    quick = Pace(0.0, 1.0, 2.0, 1.0, 0.8, 0.0, half=2.0).as_dict()
    slow = Pace(0.0, 1.0, 2.0, 1.0, 0.8, 0.0, half=3.9).as_dict()
    assert [one["batches"] for one in times_at(quick, [0.5, 0.25])] == pytest.approx([0.5, 0.25])
    assert times_at(slow, [0.5]) == [{"share": 0.5, "batches": pytest.approx(0.975), "steps": 0.5}]
    assert needs_steps(times_at(slow, [0.5])) and not needs_steps(times_at(quick, [0.5, 0.25]))
    waits = Pace(10.0, 1.0, 2.0, 1.0, 0.8, 1.0, half=3.9).as_dict()  # samples that are not loaded save the time of loading
    assert not needs_steps(times_at(waits, [0.5]))


def test_a_share_with_too_few_rows_a_batch():
    with pytest.raises(ValueError, match="fewer than two per batch, which BatchNorm needs"):
        budget_advice("digits@200", [0.01], epochs=4)


def of_planted(monkeypatch, inputs, labels, test, test_labels, lr):
    """Returns the loss at half of the cost of a training of a linear model on given data."""
    data = Data(TensorDataset(inputs, labels), test, test_labels)
    task = Task("planted", lambda _: None, lambda _: data, lambda: nn.Linear(inputs.shape[1], 2), lr=lr, batch_size=20)
    monkeypatch.setattr(budget, "task_of", lambda _: task)
    return budget_advice("planted", [0.5], epochs=8)["losses"][0]


def test_a_planted_training_that_is_finished_early_can_spare_half(monkeypatch):
    """Two classes far apart: a few samples show all that there is to learn."""
    torch.manual_seed(0)
    labels = torch.arange(400) % 2
    inputs = torch.randn(400, 5) + 6 * (labels[:, None] - 0.5)
    said = of_planted(monkeypatch, inputs[:200], labels[:200], inputs[200:], labels[200:], lr=0.1)
    assert said["finding"] == "free"


def test_a_planted_training_that_is_not_finished_is_told(monkeypatch):
    """Each sample has a feature of its own, so that only samples that were trained on are known."""
    labels = (torch.arange(200) * 7 // 3) % 2
    inputs = torch.eye(200)
    said = of_planted(monkeypatch, inputs, labels, inputs, labels, lr=1.0)
    assert said["finding"] == "lost"


def test_of_seeds_that_are_one_training_there_is_no_verdict(monkeypatch):
    def train(task, data, spec, *, seed, epochs, progress):
        history = [{"accuracy": 0.8, "loss_histogram": [3, 1]}] * epochs
        return {"method": spec.label, "seed": seed, "metric": {"name": "accuracy", "value": 0.8}, "history": history}

    monkeypatch.setattr(budget, "train", train)
    found = budget_advice("digits", [0.5], epochs=8)
    assert found["equal_seeds"] == [[0, 1]] and len(found["sentences"]) == 1
    assert found["sentences"][0].startswith("Seeds 0, 1 are the same training")


@pytest.mark.parametrize(
    ("epoch_s", "limit", "losses", "trained"),
    [(1.0, 1e9, [2, 2], 6), (1.0, 8.5, [1, 1], 4), (1.0, 3.5, [], 1), (5.0, 8.5, [], 0), (1.0, 4.5, [1], 2)],
)
def test_short_runs_end_in_time(monkeypatch, epoch_s, limit, losses, trained):
    """Each epoch takes a second by a clock that stands still otherwise; a run that would not end in time does not begin."""
    clock, begun = [0.0], []

    def train(task, data, spec, *, seed, epochs, progress):
        begun.append(spec.label)
        for done in range(1, epochs + 1):
            clock[0] += 1.0
            progress(done, 0.5)
        return {"method": spec.label, "seed": seed, "metric": {"name": "accuracy", "value": 0.5 + seed / 10}, "history": [{}]}

    monkeypatch.setattr(budget, "train", train)
    monkeypatch.setattr(budget, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    found = budget_advice("digits@200", [0.5, 0.35], epochs=8, until=limit, epoch_s=epoch_s)
    assert [len(loss["by_seed"]) for loss in found["losses"]] == losses and len(begun) == trained and clock[0] <= limit
    assert len(found["sentences"]) == len(losses)


def test_the_odds_are_those_of_the_committed_comparisons():
    """In each with smaller batches that lost so little, the best way to spend as little is held against the margin."""
    tables = json.loads((RESULTS / "winnow.json").read_text())["shares"].values()
    known = [rows for table in tables for rows in table["tasks"].values()]
    free = [rows for rows in known if -rows["smaller"]["to_full"]["mean"] <= 0.4]
    none_lost = [any(row["to_full"]["mean"] >= -0.2 for name, row in rows.items() if name != "full") for rows in free]
    assert odds_of_free()[:2] == (sum(none_lost), len(free))


def test_the_rule_of_thumb_in_the_readme_is_that_of_the_committed_tasks():
    """Half of the epochs lost so much where every way to spend half lost more than the margin, and less elsewhere."""
    tasks = json.loads((RESULTS / "winnow.json").read_text())["shares"]["0.5"]["tasks"]
    best = {t: max(row["to_full"]["mean"] for arm, row in rows.items() if arm != "full") for t, rows in tasks.items()}
    epochs = {t: -rows["shorter"]["to_full"]["mean"] for t, rows in tasks.items()}
    lost = [epochs[task] for task in tasks if best[task] < -0.2]
    others = [epochs[task] for task in tasks if best[task] >= -0.2]
    assert (len(lost), round(min(lost), 1)) == (4, 1.9) and (len(others), round(max(others), 1)) == (7, 1.2)


@pytest.mark.parametrize(("losses", "expected"), [([0.3, 0.2], []), ([0.3, 0.3], [[0, 1]]), ([None, None], [])])
def test_seeds_of_a_trainer_are_told_apart_by_the_loss_of_the_evaluation(losses, expected):
    """Two seeds can be equally accurate; without a loss nothing is known."""
    runs = [
        {"method": "full", "seed": seed, "metric": {"name": "eval_accuracy", "value": 1.0},
         "history": [{"eval_accuracy": 1.0, "eval_loss": loss}]}
        for seed, loss in enumerate(losses)
    ]  # fmt: skip
    assert equal_seeds(runs) == expected
