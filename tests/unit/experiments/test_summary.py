import math

import pytest

from thresher.experiments.summary import control_verdict, interval, summarise, verdict

T_2 = 4.302652729911275  # 97.5 % quantile of Student's t with 2 degrees of freedom


def run(method, seed, value, *, cost=1.0, wall=10.0, cpu=10.0, control_of=None):
    return {
        "method": method,
        "settings": {"keep": cost},
        "seed": seed,
        "control_of": control_of,
        "metric": {"name": "accuracy", "value": value},
        "cost": {"ratio": cost},
        "wall_s": wall,
        "cpu_s": cpu,
    }


FULL = [run("full", 0, 0.90), run("full", 1, 0.92, cpu=20.0), run("full", 2, 0.94)]
METHOD = [run("m", 0, 0.91, cost=0.5, cpu=6.0), run("m", 1, 0.95, cost=0.6, cpu=8.0), run("m", 2, 0.96, cost=0.7, wall=7.0)]
CONTROL = [run(f"uniform@0.{k}00", k - 5, 0.5, cost=k / 10, control_of="m") for k in (5, 6, 7)]
SHORTER = [run(f"shorter@0.{k}00", k - 5, 0.9 + (k == 6) / 10, cost=k / 10 + 0.002, control_of="m") for k in (5, 6, 7)]


def test_rows_against_an_independent_computation():
    mixed = [run for runs in zip(METHOD, CONTROL, SHORTER, strict=True) for run in runs]
    full, method, control, shorter = summarise([*FULL, *mixed])
    assert (full["method"], full["difference"], full["ci95"], full["verdict"]) == ("full", None, None, "the baseline")
    differences = [0.01, 0.03, 0.02]
    mean = sum(differences) / 3
    half = T_2 * math.sqrt(sum((d - mean) ** 2 for d in differences) / 2 / 3)
    assert method["method"] == "m" and method["control_of"] is None
    assert method["mean"] == pytest.approx(0.94)
    assert method["std"] == pytest.approx(math.sqrt((0.03**2 + 0.01**2 + 0.02**2) / 2))
    assert method["difference"] == pytest.approx(mean)
    assert method["ci95"] == pytest.approx([mean - half, mean + half])
    assert method["cost_ratio"] == pytest.approx(0.6)
    assert method["wall_ratio"] == 1.0 and method["cpu_ratio"] == 0.6
    assert method["verdict"] == "no difference shown; beats uniform; not told from shorter"
    assert (control["method"], control["control_of"], control["verdict"]) == ("uniform@0.600", "m", "loses")
    assert (shorter["method"], shorter["control_of"], shorter["verdict"]) == ("shorter@0.602", "m", "no difference shown")


def test_one_seed_tells_nothing():
    _, row = summarise([FULL[0], METHOD[0]])
    assert (row["std"], row["ci95"], row["verdict"]) == (None, None, "not enough seeds to tell")
    assert row["difference"] == pytest.approx(0.01)


def test_pairs_go_by_seed_not_by_order():
    _, row = summarise([*FULL, *METHOD[::-1]])
    assert row["difference"] == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("differences", "words", "against_control"),
    [
        ([-0.02, -0.021, -0.019], "loses", "loses to uniform"),
        ([0.02, 0.021, 0.019], "gains", "beats uniform"),
        ([0.02, -0.02, 0.0], "no difference shown", "not told from uniform"),
        ([0.0, 0.0], "not enough seeds to tell", ""),
        ([0.1 + 0.2, 0.3], "not enough seeds to tell", ""),
        ([0.02], "not enough seeds to tell", ""),
    ],
)
def test_verdicts(differences, words, against_control):
    bounds = interval(differences)
    assert verdict(bounds) == words and control_verdict({"uniform": bounds}) == against_control


def test_verdicts_of_several_controls():
    better, worse = (0.1, 0.2), (-0.2, -0.1)
    assert control_verdict({"uniform": better, "shorter": better}) == "beats uniform and shorter"
    assert control_verdict({"uniform": better, "shorter": worse}) == "beats uniform; loses to shorter"
    assert control_verdict({"uniform": None, "shorter": worse}) == "loses to shorter"
    assert control_verdict({}) == ""


def test_methods_that_share_a_control_have_it_each():
    others = [other | {"method": "other"} for other in METHOD]
    shared = [control | {"control_of": "other"} for control in CONTROL]
    rows = summarise([*FULL, *METHOD, *CONTROL, *others, *shared])
    assert [row["control_of"] or row["method"] for row in rows] == ["full", "m", "m", "other", "other"]
