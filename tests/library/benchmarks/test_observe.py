"""The comparison of data maps with cross-validation: its data, its scores, and what its page says."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks import observe
from benchmarks.marks import between_marks
from benchmarks.observe import MARKS, NOISES, PROBLEMS, RUNS, Job


@pytest.mark.parametrize(
    ("noise", "count"), [("5 %", 10), ("10 %", 20), ("20 %", 40), ("10 %, the next class", 20)]
)
def test_wrong_labels_are_wrong_and_as_many_as_told(noise, count):
    labels = torch.arange(200) % 7
    found, wrong = observe.with_wrong_labels(labels, noise, 3)
    assert wrong.sum() == count and ((found != labels).numpy() == wrong).all()
    if "next" in noise:
        assert (found[wrong] == (labels[wrong] + 1) % 7).all()
    assert not torch.equal(found, observe.with_wrong_labels(labels, noise, 4)[0])


def test_a_score_is_judged_by_order_and_at_the_true_number():
    wrong = np.array([True, False, True, False, False])
    assert observe.judged(np.array([0.9, 0.8, 0.7, 0.1, 0.0]), wrong) == {
        "auroc": pytest.approx(5 / 6),
        "precision": 0.5,
    }


def test_texts_are_of_their_modules_and_tables_are_scaled():
    inputs, targets = PROBLEMS["texts, 10 modules of Python"].data()
    assert len(inputs) == len(targets) > 1500 and set(targets.tolist()) == set(range(10))
    assert (inputs.square().sum(1) == 158).all()
    inputs, targets = PROBLEMS["table, breast cancer"].data()
    assert inputs.mean(0).abs().max() < 1e-5 and targets.max() == 1


def test_one_training_is_judged_by_every_score(monkeypatch):
    small = observe.Problem(
        lambda: (torch.randn(80, 4), torch.arange(80) % 2), lambda: torch.nn.Linear(4, 2), 2
    )
    monkeypatch.setattr(observe, "PROBLEMS", {"small": small})
    found = observe.run(Job("small", "10 %", 0))
    assert set(observe.SCORES) < set(found) and all(
        0 <= found[name]["auroc"] <= 1 for name in observe.SCORES
    )


def planted(difference: float) -> dict[Job, Mapping[str, Any]]:
    same = {name: {"auroc": 0.9, "precision": 0.5} for name in observe.SCORES} | {
        "cpu_s": 1.0,
        "cross_validation_cpu_s": 4.0,
    }
    return {
        Job(task, noise, seed): same
        | {"suspicion": {"auroc": 0.9 + difference + 0.001 * seed, "precision": 0.5}}
        for noise, seeds in NOISES.items()
        for seed in range(seeds)
        for task in PROBLEMS
    }


@pytest.mark.parametrize(("difference", "tasks"), [(0.0, 5), (-0.02, 0)])
def test_the_verdict_follows_from_the_differences(difference, tasks):
    text = observe.text(planted(difference))
    assert (
        f"on {tasks} of 5 tasks (4 of 5 were the goal). The cross-validation took 4.0 times" in text
    )
    assert (
        text.count("% of the labels are wrong**")
        + text.count("the next class of the labels are wrong**")
        == 4
    )
    assert observe.text({}) == "Not measured yet."


def test_the_page_is_that_of_the_trainings():
    page = (observe.ROOT / "docs" / "evidence" / "wrong-labels.md").read_text()
    assert between_marks(page, *MARKS, observe.text(observe.load(RUNS))) == page
    counts = json.loads(observe.COUNTS.read_text())
    assert between_marks(page, *observe.MARKS_OF_COUNTS, observe.text_of_counts(counts)) == page


def test_wrong_labels_are_counted_below_0_and_by_a_mixture(monkeypatch):
    rng = np.random.default_rng(0)
    aum = np.concatenate((rng.normal(-2.0, 0.3, 20), rng.normal(3.0, 1.0, 180), [-0.5]))
    found = observe.counts(aum)
    assert found["below 0"] == (aum < 0).mean() and found["mixture"] == pytest.approx(0.1, abs=0.02)
    small = observe.Problem(
        lambda: (torch.randn(80, 4), torch.arange(80) % 2), lambda: torch.nn.Linear(4, 2), 2
    )
    monkeypatch.setattr(observe, "PROBLEMS", {"small": small})
    found = observe.counted()
    assert (
        list(found["small"]) == ["0 %", "5 %", "10 %", "20 %"]
        and len(found["small"]["5 %"]["mixture"]) == 2
    )
    assert observe.text_of_counts(found).count("| small |") == 1


def test_it_goes_on_where_it_was_stopped(tmp_path, monkeypatch, capsys):
    runs, page = tmp_path / "runs.jsonl", tmp_path / "page.md"
    page.write_text("\n".join((*MARKS, *observe.MARKS_OF_COUNTS)))
    runs.write_text(
        "".join(
            json.dumps({"job": vars(job), "result": dict(one)}) + "\n"
            for job, one in planted(0.0).items()
        )
    )
    monkeypatch.setattr("sys.argv", ["observe", "--runs", str(runs), "--page", str(page)])
    observe.main()  # all trainings are there: none begins
    assert (
        len(runs.read_text().splitlines()) == len(observe.planned())
        and "4 of 5 were the goal" in capsys.readouterr().out
    )
