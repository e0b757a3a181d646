"""How far suspicions can be trusted: the trainings, their readings, and what the pages say of them."""

import json
import shutil

import pytest
import torch
from benchmarks import trust
from benchmarks.trust import Job


def two_classes():
    inputs = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
    return inputs, (inputs[:, 0] > 0).long()


def small(epochs):
    return trust.Problem(two_classes, lambda: torch.nn.Linear(4, 2), epochs)


def test_every_training_is_planned_once():
    jobs = trust.planned()
    assert len(set(jobs)) == len(jobs) == 4 * 5 * (14 + 10)
    assert {job.share for job in jobs[: len(jobs) // 4]} == {10}
    pairs = {job.task for job in jobs if job.kind == "pairs"}
    assert pairs.isdisjoint(trust.OF_TWO_CLASSES)


@pytest.mark.parametrize("task", [name for name in trust.TASKS_TRAINED if "images" not in name])
def test_a_network_fits_its_data(task):
    if "Debian" in task and shutil.which("apt-cache") is None:
        pytest.skip("reads the package lists of Debian")
    problem = trust.TASKS_TRAINED[task]
    inputs, labels = problem.data()
    with torch.no_grad():
        outputs = problem.network()(inputs[:2])
    assert len(labels.unique()) == labels.max() + 1 <= outputs.shape[1]
    assert len(inputs) == len(labels) and inputs.isfinite().all()
    assert (len(labels.unique()) == 2) == (task in trust.OF_TWO_CLASSES)


def test_the_first_part_of_a_training_is_a_shorter_training():
    job = Job("small", "symmetric", 10, 0)
    whole, half = (list(trust.readings(small(n), job, two_classes())) for n in (8, 4))
    assert [one["visits"] for one in whole] == [1, 2, 4, 8]
    assert whole[:3] == half
    assert {one["wrong"] for one in whole} == {8}
    assert 0.5 < whole[-1]["auroc"] <= 1


def test_it_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(trust, "TASKS_TRAINED", {"small": small(2)})
    path = tmp_path / "runs.jsonl"
    trust.measure(path, minutes=0)
    assert not trust.load(path)
    monkeypatch.setattr(trust, "SHARES", (10,))
    trust.measure(path, minutes=10)
    lines = path.read_text()
    monkeypatch.setattr(trust, "SHARES", (10, 20))
    trust.measure(path, minutes=10)
    assert len(lines.splitlines()) == 10 and path.read_text().startswith(lines)
    assert set(trust.load(path)) == set(trust.planned())


def row(accuracy, auroc, precision, visits=3):
    return {
        "accuracy": accuracy,
        "agreement": accuracy,
        "largest": 0.1,
        "auroc": auroc,
        "precision": precision,
        "visits": visits,
        "wrong": 50,
    }


def test_a_row_has_means_and_intervals(monkeypatch):
    task = next(iter(trust.TASKS_TRAINED))
    done = {
        Job(task, "pairs", 5, seed): {
            "readings": [row(0.4 + 0.2 * seed, 0.9, 0.5), row(0.9, 1, 0.2, 2)]
        }
        for seed in range(2)
    }
    third, second = trust.summary(done)
    assert (third["visits"], third["in_rule"], second["in_rule"]) == (3, True, False)
    assert third["accuracy"]["mean"] == pytest.approx(0.5) and third["accuracy"]["n"] == 2
    assert third["precision"] == {"mean": 1, "low": 1, "high": 1, "n": 2}
    assert second["precision"]["mean"] == pytest.approx(0.4)


def test_guessing_the_largest_class_is_not_in_the_rule():
    task = trust.OF_TWO_CLASSES[0]
    done = {
        Job(task, "symmetric", 5, 0): {"readings": [row(0.646, 0.608, 0.2) | {"largest": 0.61}]},
        Job(task, "symmetric", 5, 1): {"readings": []},
    }
    assert [one["in_rule"] for one in trust.summary(done)] == [False]


def planted():
    """Results in which the first two tasks have readings: one that is known well, one whose labels were learned by heart."""
    known, by_heart = list(trust.TASKS_TRAINED)[:2]
    values = {known: (0.9, 0.9, 0.988), by_heart: (0.4, 1.0, 0.7)}
    done = {}
    for job in trust.planned():
        if job.task in values:
            accuracy, agreement, auroc = values[job.task]
            last = row(accuracy, auroc - 0.1 * (job.kind == "pairs"), 0.2) | {
                "agreement": agreement
            }
            first = row(0.2, 0.5, 0.1, 1) | {"wrong": 10 * job.share}
            done[job] = {"cpu_s": 6.0, "readings": [first, last | {"wrong": 10 * job.share}]}
    return done


def test_the_verdict_follows_from_the_readings():
    found = trust.results(planted())
    assert (found["trainings"], found["planned"], found["cpu_minutes"]) == (80, 480, 8.0)
    rule = found["rule"]
    assert (rule["low_accuracy"], rule["low_accuracy_shown"]) == (8, 0)
    assert (rule["within"], rule["within_shown"], rule["rows"]) == (8, 0, 16)
    text = trust.verdict(found)
    assert "as low as 0.50" in text and "of 8 cases with 3 visits or more" in text
    assert "at least 0.98 on each of 1 tasks" in text and "at least 0.88 on each of 1 tasks" in text
    lines = trust.table_of_bands(found).splitlines()
    assert [line.split(" | ")[1] for line in lines[2:5]] == [
        "any, fewer than 3 visits",
        "too low",
        "0.9 or more",
    ]
    assert lines[4].endswith("| 1 | 0.99 | 0.988 | 0.45 |")  # of 20, 50, 100 and 200 wrong labels
    changes = trust.of_changes(found)
    assert changes.count("AUROC +0.00 [+0.00, +0.00]") == 2
    assert changes.count("precision -0.80 [-0.80, -0.80] (symmetric, 2 tasks)") == 1
    assert len(trust.table_of_shares(found).splitlines()) == 2 + 8
    assert trust.table_of_ends(found).splitlines()[2].count("0.988 (") == 4
    assert len(trust.table_of_tasks(found, 10).splitlines()) == 2 + 4


def test_results_and_pages_are_those_of_the_trainings():
    done = trust.load(trust.RUNS)
    found = json.loads(trust.RESULTS.read_text())
    assert set(done) == set(trust.planned()) and trust.results(done) == found
    for path, text in trust.pages(found).items():
        assert path.read_text() == text
