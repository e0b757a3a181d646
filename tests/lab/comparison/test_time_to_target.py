import pytest

from thresher_lab.comparison.time_to_target import measure, points_of


def run(method, seed, accuracies, *, cost=1.0, cpu=10.0, control_of=None):
    n = len(accuracies)
    return {
        "method": method,
        "settings": {"name": method},
        "seed": seed,
        "control_of": control_of,
        "metric": {"name": "accuracy", "value": accuracies[-1]},
        "cost": {"ratio": cost, "backward_to_forward": 1.5},
        "history": [
            {"accuracy": value, "cost": cost * (e + 1) / n, "cpu_s": cpu * (e + 1)}
            for e, value in enumerate(accuracies)
        ],
    }


RUNS = [
    run("full", 0, [0.70, 0.80, 0.86, 0.90]),
    run("full", 1, [0.70, 0.86, 0.85, 0.90]),
    run("full", 2, [0.70, 0.80, 0.81, 0.82]),
    run("fast", 0, [0.70, 0.87, 0.88, 0.89], cost=0.5, cpu=6.0),
    run("fast", 1, [0.87, 0.86, 0.88, 0.89], cost=0.5, cpu=6.0),
    run("fast", 2, [0.90, 0.86, 0.88, 0.89], cost=0.5, cpu=6.0),
    run("slow", 0, [0.1, 0.2, 0.3, 0.87]),
    run("slow", 1, [0.1, 0.2, 0.3, 0.4]),
    run("slow", 2, [0.1, 0.2, 0.3, 0.4]),
    run("shorter@0.500", 0, [0.99, 0.99], control_of="fast"),
]
RESULTS = {"task": "t", "epochs": 4, "device": "cpu", "versions": {}, "runs": RUNS, "summary": []}


@pytest.fixture(scope="module")
def measured():
    return measure(RESULTS, factors=(1.4, 0.5))


def test_targets_are_multiples_of_the_error_of_full(measured):
    assert [(target["factor"], target["error"]) for target in measured["targets"]] == [
        (1.4, pytest.approx(0.14)), (0.5, pytest.approx(0.05)),
    ]  # fmt: skip
    assert (measured["task"], measured["epochs"], measured["backward_to_forward"]) == ("t", 4, 1.5)
    assert [(arm["method"], arm["settings"]["name"]) for arm in measured["arms"]] == [
        (m, m) for m in ("full", "fast", "slow")
    ]
    assert [arm["error"] for arm in measured["arms"]] == pytest.approx([0.1, 0.11, 0.6])


def test_a_target_is_reached_at_the_end_of_the_first_epoch_with_that_error(measured):
    full, fast, slow = (arm["reached"][0] for arm in measured["arms"])
    assert full == {
        "seeds": 2,
        "of": 3,
        "cost": 0.75,
        "cpu_s": 30,
        "cost_to_full": 1.0,
        "cpu_to_full": 1.0,
    }
    assert (fast["seeds"], fast["cost"], fast["cpu_s"]) == (3, 0.125, 6)
    assert fast["cost_to_full"] == pytest.approx(
        (0.25 / 0.75 + 0.125 / 0.5) / 2
    )  # with seed 2 full never reached it
    assert fast["cpu_to_full"] == pytest.approx((12 / 30 + 6 / 20) / 2)
    assert slow == {
        "seeds": 1,
        "of": 3,
        "cost": None,
        "cpu_s": None,
        "cost_to_full": None,
        "cpu_to_full": None,
    }


def test_a_target_that_nobody_reached(measured):
    for arm in measured["arms"]:
        assert arm["reached"][1] == {
            "seeds": 0, "of": 3, "cost": None, "cpu_s": None, "cost_to_full": None, "cpu_to_full": None,
        }  # fmt: skip


def test_curves_are_means_over_the_seeds(measured):
    point = measured["arms"][0]["curve"][1]
    assert (point["epoch"], point["cost"], point["cpu_s"]) == (1, 0.5, 20)
    assert point["error"] == pytest.approx(0.18)
    assert (point["lowest"], point["highest"]) == (pytest.approx(0.14), pytest.approx(0.20))


def test_a_metric_that_comes_after_the_last_epoch_only_is_refused():
    run = {
        "metric": {"name": "downstream accuracy", "value": 0.5},
        "history": [{"accuracy": 0.5, "cost": 1.0, "cpu_s": 1.0}],
    }
    with pytest.raises(ValueError, match="'downstream accuracy' is measured once, after the last"):
        points_of(run)
