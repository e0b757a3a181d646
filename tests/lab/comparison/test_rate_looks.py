import math

import pytest

from in_process import InProcessWorkers
from thresher_lab.comparison import compare as comparison
from thresher_lab.comparison.compare import LOOK_SEEDS, chosen_rates, compare
from thresher_lab.comparison.controls import SAME_TIME
from thresher_lab.comparison.workers import Finished, RunValueError
from thresher_lab.training.specs import parse_methods
from thresher_lab.training.store import restart

BEST = {
    "full": 1.0,
    "infobatch": 0.5,
    "uniform": 2.0,
    "shorter": 1.0,
    "smaller": 0.5,
    SAME_TIME: 2.0,
}
"""The rate that each arm is best with here."""


def arm_of(label):
    return label if label == SAME_TIME else label.partition("@")[0]


def outcome(job):
    """A run that is the worse the further its rate is from the best one."""
    arm = arm_of(job.label)
    value = 0.9 - 0.1 * abs(math.log2(job.rate / BEST.get(arm, 1.0)))
    kept = 50 if arm != "full" else 100
    cost = {"forward": kept, "backward": kept, "refresh": 0, "scoring": 0, "steps": 10}
    cost |= {
        "full_forward": 100,
        "full_backward": 100,
        "backward_to_forward": 2.0,
        "ratio": kept / 100,
    }
    history = [{"epoch": 0, "forward": kept, "backward": kept, "steps": 10, "accuracy": value}]
    return {
        "method": job.label, "settings": {}, "seed": job.seed, "rate": job.rate, "control_of": None,
        "metric": {"name": "accuracy", "value": value}, "classes": None, "cost": cost, "cpu_s": 1.0, "wall_s": 1.0,
        "history": history, "device": "cpu",
    }  # fmt: skip


class Here(InProcessWorkers):
    """Workers that train nothing."""

    trained: list = []
    fails = staticmethod(lambda job: False)

    def __init__(self, *count, **settings):
        super().__init__(*count, **settings)
        self._train = lambda job: Finished(job, outcome(job))

    def start(self, job):
        self.trained.append(job)
        super().start(job)

    def next_event(self):
        if self.fails(self._jobs[0]):
            raise RunValueError(f"{self._jobs[0].name}: evaluate returned nan after epoch 0")
        return super().next_event()


@pytest.fixture
def trained(monkeypatch):
    monkeypatch.setattr(comparison, "Workers", Here)
    monkeypatch.setattr(Here, "trained", [])
    return Here.trained


def looked(out, **options):
    return chosen_rates(
        "digits", parse_methods("infobatch"), [0, 1], 1, out, [0.5, 1.0, 2.0], **options
    )


def test_every_arm_gets_the_rate_that_it_is_best_with(tmp_path, trained):
    rates = looked(tmp_path)
    assert rates.chosen == {
        ("full", None): 1.0, ("infobatch", None): 0.5, ("infobatch", "uniform"): 2.0, ("infobatch", "shorter"): 1.0,
        ("infobatch", "smaller"): 0.5, ("infobatch", SAME_TIME): 2.0,
    }  # fmt: skip
    assert {job.seed for job in trained} == set(LOOK_SEEDS) and {job.rate for job in trained} == {
        0.5,
        1.0,
        2.0,
    }
    assert not any(job.label.startswith("placebo") for job in trained) and len(trained) == 3 * 2 * 6
    trained.clear()
    assert looked(tmp_path) == rates and not trained, "what was tried is not trained again"
    results = compare("digits", parse_methods("infobatch"), [0, 1], 1, tmp_path, rates=rates)
    assert results["rates"] == {"factors": [0.5, 1.0, 2.0], "seeds": list(LOOK_SEEDS)}
    found = {arm_of(row["method"]): row["rate"] for row in results["summary"]}
    assert found == BEST | {"placebo": 0.5}
    assert {(arm_of(run["method"]), run["rate"]) for run in results["runs"]} == set(found.items())
    assert {job.seed for job in trained} == {0, 1}


def test_only_the_kinds_that_are_asked_for_are_tried(tmp_path, trained):
    assert set(looked(tmp_path, controls=("smaller", "placebo")).chosen) == {
        ("full", None), ("infobatch", None), ("infobatch", "smaller"),
    }  # fmt: skip
    assert set(looked(tmp_path / "none", controls=()).chosen) == {
        ("full", None),
        ("infobatch", None),
    }


def test_of_equally_good_rates_the_one_near_1(tmp_path, trained, monkeypatch):
    monkeypatch.setattr(math, "log2", lambda _: 0.0)
    assert set(looked(tmp_path).chosen.values()) == {1.0}


def test_seeds_that_count_are_not_looked_at(tmp_path, trained):
    with pytest.raises(
        ValueError, match=r"--rates: .* seeds \(10000, 10001\), .* leave \[10001\] out of --seeds"
    ):
        chosen_rates("digits", parse_methods("infobatch"), [0, 10_001], 1, tmp_path, [1.0, 2.0])
    assert not trained


def test_a_factor_with_which_a_training_fails_is_named(tmp_path, trained, monkeypatch):
    monkeypatch.setattr(Here, "fails", staticmethod(lambda job: job.rate == 2))
    with pytest.raises(
        ValueError,
        match=r"with the factor 2, full, seed 10000, rate x 2: .* nan .* Leave this factor out",
    ):
        looked(tmp_path)


def test_a_restart_deletes_what_was_tried(tmp_path, trained):
    looked(tmp_path)
    restart(tmp_path)
    assert not list(tmp_path.rglob("*.json")), "also where nothing but rates was tried yet"
    rates = looked(tmp_path)
    compare("digits", parse_methods("infobatch"), [0, 1], 1, tmp_path, rates=rates)
    restart(tmp_path)
    assert not list(tmp_path.rglob("*.json"))
