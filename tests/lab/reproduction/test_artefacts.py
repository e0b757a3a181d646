"""Every table and figure against made-up runs: its claims can be judged and its tables filled, and they tell what is there."""

import base64
import itertools
import math
import re
import statistics
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import thresher
from depth import in_verify
from thresher.scores import Scores
from thresher_lab.comparison.statistics import Paired
from thresher_lab.comparison.summary import summarize
from thresher_lab.reproduction import (
    ARTEFACTS,
    ada_selection,
    diet_sb,
    kakurenbo,
    measures,
    selective_backprop,
)
from thresher_lab.reproduction.artefact import (
    FILLED_BATCHES,
    FIVE_SEEDS,
    FULL_BATCHES,
    FULL_ROW,
    LEAST_RATIO,
    ArtefactPart,
    Claim,
    batches_of,
    judge_all,
    judged,
    overall,
    specs_of,
    tables_of_parts,
    units_of,
    untested,
    with_interval,
    with_spread,
    with_steps,
)
from thresher_lab.tasks import built_in
from thresher_lab.training.samples import LOSS_BINS

EPOCHS, SAMPLES = 20, 100
VARIANTS = ("v1000", "v1001", "v1010", "v1011", "v1100", "v1101", "v1110", "v1111")
"""Rows of the ablations of KAKURENBO; the digits are hiding, moving back, reducing the fraction and the learning rate."""


@pytest.fixture(autouse=True)
def nothing_is_trained(monkeypatch):
    monkeypatch.setattr(kakurenbo, "from_scratch", lambda seed: 0.8 + 0.01 * seed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("papers")
    rng = np.random.default_rng(0)
    losses = rng.random((SAMPLES, EPOCHS)).astype(np.float32)
    losses[:2] = 5.0
    columns = {
        "id": np.arange(SAMPLES),
        "target": np.arange(SAMPLES) % 10,
        "trained": rng.integers(0, EPOCHS, SAMPLES),
        "loss_by_epoch": list(losses),
        "trained_by_epoch": list(np.ones((SAMPLES, EPOCHS), np.uint8)),
    }
    pq.write_table(pa.table(columns), found / "samples.parquet")
    Scores(
        torch.arange(SAMPLES), torch.rand(SAMPLES, generator=torch.Generator().manual_seed(0))
    ).save(found / "scores.parquet")
    return found


def entry(epoch, seed):
    return {
        "accuracy": 0.5 + 0.02 * epoch,
        "cpu_s": 0.4 * epoch + 0.001 * epoch**2,
        "cost": epoch / EPOCHS,
        "easy_share": epoch / EPOCHS,
        "loss_histogram": [edge + epoch for edge in range(len(LOSS_BINS) - 1)],
        "scheduled_fraction": 0.3,
        "actual_fraction": 0.3 * min(1, epoch / 10),
        "hidden_by_class": [(epoch * label) % 7 for label in range(10)],
        "moved_back": 20 - epoch,
        **dict(
            zip(ada_selection.WEIGHT_NAMES, (0.5, 0.01 * epoch, 0.5 - 0.01 * epoch), strict=True)
        ),
    }


def run(row, seed, folder, epochs=EPOCHS):
    rng = np.random.default_rng([seed, sum(map(ord, row))])
    value = 0.9 if row == FULL_ROW else 0.85 + 0.01 * rng.random()
    return {
        "method": row,
        "seed": seed,
        "control_of": None,
        "metric": {"name": "accuracy", "value": value + 0.001 * rng.random()},
        "cost": {
            "ratio": 1.0 if row == FULL_ROW else 0.6,
            "steps": 1000 if row == FULL_ROW else 600,
            "forward": 2000 if row == FULL_ROW else 1600,
            "backward": 2000 if row == FULL_ROW else 1000,
            "full_forward": 2000,
            "full_backward": 2000,
            "backward_to_forward": 2.0,
        },
        "wall_s": 1.0,
        "cpu_s": 10.0 if row == FULL_ROW else 7.0,
        "history": [entry(epoch, seed) for epoch in range(epochs)],
        "samples": str(folder / "samples.parquet"),
        "scores": str(folder / "scores.parquet"),
    }


def measure(artefact, folder):
    """Runs by part, row and seed, and what `compare` would say of them."""
    rows = {part.name: [FULL_ROW, *part.rows] for part in artefact.parts}
    lengths = {part.name: max(EPOCHS, part.epochs) for part in artefact.parts}
    runs = {
        part: {
            row: {seed: run(row, seed, folder, lengths[part]) for seed in artefact.seeds}
            for row in of
        }
        for part, of in rows.items()
    }
    results = {
        part: {
            "summary": with_steps(
                summarize(flat := [each for seeds in of.values() for each in seeds.values()]), flat
            ),
            "labels": {row: row for row in of},
            "metric": "accuracy",
            "task": "made-up",
            "epochs": lengths[part],
        }
        for part, of in runs.items()
    }
    return runs, results


@pytest.mark.parametrize("name", ARTEFACTS)
def test_claims_are_judged_and_tables_are_filled(name, folder):
    artefact = ARTEFACTS[name]
    measured, results = measure(artefact, folder)
    for claim in artefact.claims:
        found = claim.judge(measured, artefact.seeds)
        assert found["claim"] and found["mean"] == pytest.approx(
            statistics.mean(claim.value(measured, seed) for seed in artefact.seeds)
        )
    make = artefact.tables
    tables = tables_of_parts(artefact, results) if make is None else make(measured, results)
    assert tables
    for table in tables:
        assert table.rows and all(len(row) == len(table.header) for row in table.rows)
    for title, png in (artefact.pictures(measured) if artefact.pictures else {}).items():
        assert title and base64.b64decode(png).startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ARTEFACTS)
def test_there_are_five_seeds_or_more_each_once(name):
    seeds = ARTEFACTS[name].seeds
    assert len(seeds) >= len(FIVE_SEEDS) == 5 and len(set(seeds)) == len(seeds)


PARTS = {
    f"{name} {part.name}": part
    for name, artefact in reversed(ARTEFACTS.items())
    for part in artefact.parts
}
DISTINCT_PARTS = {id(part): name for name, part in PARTS.items()}
"""Parts that several artefacts share come once."""


POOL_WARNING = "ignore:AdaSelection. `pool` is"


@pytest.mark.filterwarnings(POOL_WARNING)
@pytest.mark.parametrize("name", DISTINCT_PARTS.values())
def test_rows_are_methods_and_tasks_are_there(name, folder):
    part = PARTS[name]
    built_in(part.task)
    specs = specs_of(part, folder / "scores.parquet")
    assert list(specs) == list(part.rows) and len({spec.label for spec in specs.values()}) == len(
        specs
    )
    assert set(part.published) <= {FULL_ROW, *part.rows}
    assert (part.scores is not None) == any("{scores}" in text for text in part.rows.values())


def test_names_of_parts_are_distinct_in_each():
    for artefact in ARTEFACTS.values():
        names = [part.name for part in artefact.parts]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("values", "above", "verdict"),
    [
        ([1.0, 1.1, 0.9], 0.5, "reproduced"),
        ([1.0, 1.1, 0.9], 1.5, "not reproduced"),
        ([1.0, 1.1, 0.9], 1.0, "cannot tell"),
        ([1.0, 1.0, 1.0], 0.9, "cannot tell"),
        ([1.0, 1.1], 0.0, "cannot tell"),
        ([1.0], 0.0, "cannot tell"),
    ],
)
def test_the_whole_interval_must_be_on_one_side(values, above, verdict):
    assert judged(Paired.of(values), above) == verdict


def test_values_that_are_not_finite_tell_nothing():
    found = Claim("it never comes", lambda _, seed: float("nan") if seed else 1.0).judge(
        {}, (0, 1, 2)
    )
    assert found["verdict"] == "cannot tell" and found["mean"] is None


@pytest.mark.parametrize(
    ("values", "counted", "verdict", "has_interval"),
    [
        ((0.92, 0.92, 0.92), False, "cannot tell", False),
        ((1.0, 1.0, 1.0), False, "reproduced", False),
        ((0.5, 0.5, 0.5), False, "not reproduced", False),
        ((1.0, 1.0, 1.0), True, "holds by count", False),
        ((0.5, 0.5, 0.5), True, "fails by count", False),
        ((1.0, 1.01, 0.99), True, "reproduced", True),
    ],
)
def test_an_interval_without_width_judges_only_far_from_the_limit(
    values, counted, verdict, has_interval
):
    found = Claim("it costs less", lambda _, seed: values[seed], above=0.9, counted=counted).judge(
        {}, (0, 1, 2)
    )
    assert found["verdict"] == verdict and (found["ci95"] is not None) == has_interval


def judged_as(*verdicts, says="the paper"):
    return [{"verdict": verdict, "says": says} for verdict in verdicts]


def test_what_is_not_tested_keeps_its_conditions():
    claims = untested(
        [*judged_as("reproduced", "not reproduced"), *judged_as("cannot tell", says="")],
        "no reason",
    )
    assert [claim["verdict"] for claim in claims] == ["not tested", "not tested", "cannot tell"]
    assert [claim.get("note") for claim in claims] == ["no reason", "no reason", None] and overall(
        claims
    ) == "not tested"
    assert (
        overall([*judged_as("reproduced"), *judged_as("not reproduced", says="")]) == "reproduced"
    )


def with_ratios(**ratios):
    return {
        part: {FULL_ROW: {0: {"cost": {"backward_to_forward": ratio}}}}
        for part, ratio in ratios.items()
    }


@pytest.mark.parametrize(
    ("part", "ratios", "verdict", "printed"),
    [
        ("", {"a": 1.69}, "not tested", "1.69"),
        ("", {"a": 1.7}, "not reproduced", "1.70"),
        ("", {"a": 2.0, "b": 0.81}, "not tested", "0.81"),
        ("a: ", {"a": 2.0, "b": 0.81}, "not reproduced", "2.00"),
    ],
)
def test_a_claim_about_time_fails_where_a_backward_pass_costs_enough(
    part, ratios, verdict, printed
):
    values = (1.0, 1.1, 0.9)
    claim = Claim(f"{part}it takes less time", lambda _, seed: values[seed], above=2.0, timed=True)
    found = claim.judge(with_ratios(**ratios), (0, 1, 2))
    assert LEAST_RATIO == 1.7 and (found["verdict"], found["note"]) == (
        verdict,
        f"backward pass: {printed} forward passes",
    )
    assert found["mean"] == 1.0 and found["ci95"]
    for above, expected in ((0.5, "reproduced"), (1.0, "cannot tell")):
        noted = replace(claim, above=above, note="ours").judge(with_ratios(**ratios), (0, 1, 2))
        assert noted["verdict"] == expected
        assert noted["note"] == f"ours; backward pass: {printed} forward passes"
    counted = replace(claim, timed=False).judge(with_ratios(**ratios), (0, 1, 2))
    assert counted["verdict"] == "not reproduced" and counted["note"] == ""


@pytest.mark.parametrize(
    ("condition", "tested"),
    [("a: it can tell", {"b: it gains"}), ("they can tell", set()), (None, {"a", "b", "both"})],
)
def test_a_condition_blocks_the_claims_about_its_part(condition, tested):
    texts = ["a: it gains", "b: it gains", "both gain"]
    claims = [
        Claim(text, lambda _, seed: 1 + 0.1 * seed, says="Table 1: it gains") for text in texts
    ]
    if condition:
        claims.append(Claim(condition, lambda _, seed: -1 - 0.1 * seed))
    found = judge_all(claims, {"a": {}, "b": {}}, (0, 1, 2))
    assert [one["claim"] for one in found] == [claim.text for claim in claims]
    reproduced = {one["claim"] for one in found if one["verdict"] == "reproduced"}
    assert reproduced == (tested if condition else set(texts))
    assert [one["verdict"] for one in found[3:]] == ["not reproduced"] * (condition is not None)


def test_time_follows_the_trend_of_what_is_hidden():
    def runs(*seconds):
        times = itertools.accumulate(seconds)
        history = [
            {"actual_fraction": hidden, "cpu_s": time}
            for hidden, time in zip((0.0, 0.1, 0.3, 0.2), times, strict=True)
        ]
        full = [{"cpu_s": 1.0 + at} for at in range(4)]
        return {
            FULL_ROW: {0: {"history": full}},
            kakurenbo.HIDING_ROW: {0: {"history": history}},
        }

    assert kakurenbo.follows_hidden(runs(0.1, 0.95, 0.8, 0.9), 0) == pytest.approx(1)
    assert kakurenbo.follows_hidden(runs(0.1, 0.8, 0.95, 0.9), 0) == pytest.approx(-1)


def test_the_lead_of_a_row_is_over_the_best_other():
    runs = {
        row: {0: {"metric": {"value": value}}}
        for row, value in {"full": 0.9, "a": 0.8, "b": 0.7, "c": 0.75}.items()
    }
    assert measures.lead(runs, 0, "a", ["b", "c"]) == pytest.approx(0.05)
    assert ada_selection.gain_of_best(runs, 0, ["b", "c"], "a") == pytest.approx(-0.05)


def test_the_overhead_is_what_takes_longer_than_the_passes():
    runs = {
        "full": {0: {"cpu_s": 10.0}},
        "a": {0: {"cpu_s": 14.0, "cost": {"ratio": 0.7}}},
    }
    assert measures.overhead(runs, 0, "a") == pytest.approx(-0.7)


def test_classes_are_compared_by_their_shares_of_the_hidden_samples():
    history = [{"hidden_by_class": counts} for counts in ([9, 9], [6, 2], [6, 2], [1, 1])]
    runs = {kakurenbo.HIDING_ROW: {0: {"history": history}}}
    assert kakurenbo.class_shift(runs, 0) == pytest.approx(0.25)
    [table] = kakurenbo.figure_2({"inside": runs}, {})
    assert [row[1] for row in table.rows] == ["75.0 (1)", "25.0 (2)"]
    history[-1]["hidden_by_class"] = [0, 0]
    assert math.isnan(kakurenbo.class_shift(runs, 0))
    [table] = kakurenbo.figure_2({"inside": runs}, {})
    assert [row[-1] for row in table.rows] == ["-", "-"]


def test_claims_about_times_say_so():
    timed = {
        claim.text for artefact in ARTEFACTS.values() for claim in artefact.claims if claim.timed
    }
    for artefact in ARTEFACTS.values():
        for claim in artefact.claims:
            measures_time = (
                "time" in claim.text.split() or "(CPU time)" in claim.text or "sooner" in claim.text
            )
            assert claim.timed == measures_time, claim.text
    assert len(timed) == 24


def test_the_page_of_adaselection_begins_with_late_selection():
    def table(*last):
        return {
            "header": ["epoch", *ada_selection.POOL],
            "rows": [["0", "1.000", "0", "0"], ["9", *last]],
        }

    uniform, other = table("0.116", "0.000", "0.884"), table("0.117", "0.736", "0.147")
    text = ada_selection.late_selection([uniform, table("0", "0", "1.000"), other])
    assert text.startswith(
        "AdaSelection ends on 2 of 3 tasks with 0.88 to 1.00 of its weight on uniform selection"
    )
    assert ada_selection.late_selection([other]) == ""


def test_what_these_seeds_cannot_tell_has_the_number_that_could():
    values = (1.0, 1.4, 0.9)
    found = Claim("it is larger", lambda _, seed: values[seed], above=1.0).judge({}, (0, 1, 2))
    assert found["seeds_needed"] == Paired.of(values).seeds_for(0.1) and found["seeds_needed"] > 3
    assert "seeds_needed" not in Claim("it is", lambda _, seed: values[seed]).judge({}, (0, 1, 2))


def test_each_claim_says_what_the_paper_says_and_where():
    for artefact in ARTEFACTS.values():
        said = [claim.says for claim in artefact.claims if claim.says]
        assert said, artefact.name
        for text in said:
            assert re.match(
                r"(Table \d|[CD]\.\d|Appendix [DE]|Section [14]|Figure \d|Abstract|Analysis|Conclusion|\([a-f]\))",
                text,
            ), text


def test_what_is_not_tested_hides_nothing():
    for verdict in ("reproduced", "cannot tell", "not reproduced"):
        assert overall(judged_as("not tested", verdict)) == verdict


def test_counts_decide_no_table():
    assert overall(judged_as("fails by count", "reproduced")) == "reproduced"
    assert overall(judged_as("holds by count")) == "cannot tell"
    assert overall([]) == overall(judged_as("reproduced", says="")) == "not tested"


def test_one_claim_that_fails_decides():
    for verdicts in itertools.permutations(["reproduced", "cannot tell", "not reproduced"]):
        assert overall(judged_as(*verdicts)) == "not reproduced"
    assert (
        overall(judged_as("reproduced", "cannot tell")) == "cannot tell"
        and overall(judged_as("reproduced")) == "reproduced"
    )


def test_numbers_of_a_seed():
    runs = {
        row: {0: {"metric": {"value": value}, "cpu_s": 2 * value, "cost": {"steps": 7}}}
        for row, value in {FULL_ROW: 4.0, "a": 3.0, "b": 2.0}.items()
    }
    assert measures.metric(runs, 0) == 4 and measures.metric(runs, 0, "a") == 3
    assert measures.surplus(runs, 0, "a", "b") == 1
    assert measures.mean_gain(runs, 0, ["a", FULL_ROW], ["b", "b"]) == 1.5
    assert measures.cpu(runs, 0, "b") == 0.5 and measures.cpu_saved(runs, 0, "b", "a") == 0.25
    assert measures.steps(runs, 0, "a") == 7
    with pytest.raises(ValueError, match="zip"):
        measures.mean_gain(runs, 0, ["a", FULL_ROW], ["b"])


def test_the_best_of_several_is_that_of_the_best_mean():
    """The largest of each seed would be 3, 4 and 5 here, above each of the candidates."""
    by_seed = {"a": (3.0, 0.0, 0.0), "b": (1.0, 4.0, 2.0), "c": (0.0, 0.0, 5.0)}
    values = [of.__getitem__ for of in by_seed.values()]
    best, worst = (measures.best_of(values, range(3), choose) for choose in (max, min))
    assert [best(seed) for seed in range(3)] == [1, 4, 2]
    assert [worst(seed) for seed in range(3)] == [3, 0, 0]


def test_kakurenbos_variants_as_its_own_names():
    from thresher_lab.training.specs import parse_methods

    for name in ("kakurenbo-table-5", "kakurenbo-table-5-hurt"):
        for part in ARTEFACTS[name].parts:
            assert tuple(part.rows) == VARIANTS
            for bits, text in part.rows.items():
                made = parse_methods(text)[0].create()
                assert made == thresher.Kakurenbo.variant(bits, max_fraction=0.4)


def test_what_a_component_adds_is_of_pairs_that_differ_in_it_alone():
    moving = {"history": [{"moved_back": 20}]}
    values = {
        bits: {
            0: {
                "metric": {"value": 4.0 * int(bits[2]) + 2.0 * int(bits[3]) + int(bits[4])},
                **moving,
            }
        }
        for bits in VARIANTS
    }
    added = {"moving back": 4, "reducing the fraction": 2, "adjusting the learning rate": 1}
    judged_claims = 0
    for name in ("kakurenbo-table-5", "kakurenbo-table-5-hurt"):
        artefact = ARTEFACTS[name]
        measured = {part.name: values for part in artefact.parts}
        for claim in artefact.claims:
            component = claim.text.partition(": ")[2].partition(" gains")[0]
            if component in added:
                assert claim.value(measured, 0) == added[component]
                judged_claims += 1
    assert judged_claims == 2 * 3 + 3


def test_top_losses_are_of_the_last_epochs(folder):
    found = kakurenbo.top_losses({"samples": str(folder / "samples.parquet")})
    assert list(found) == ["all", "bottom", "top"]
    assert {len(of_part) for of_part in found.values()} == {10}
    for of_all, bottom, top in zip(*found.values(), strict=True):
        assert top == pytest.approx(5.0) and bottom < 1
        assert of_all == pytest.approx(0.02 * 5 + 0.98 * bottom)


def test_time_until_an_error_and_what_never_comes():
    def one(accuracies):
        history = [
            {"accuracy": a, "cpu_s": 2.0 * (i + 1), "cost": 0.0} for i, a in enumerate(accuracies)
        ]
        return {
            "metric": {"name": "accuracy", "value": accuracies[-1]},
            "history": history,
            "cpu_s": history[-1]["cpu_s"],
        }

    runs = {
        FULL_ROW: {0: one([0.5, 0.8, 0.9])},
        "fast": {0: one([0.88, 0.9, 0.9])},
        "bad": {0: one([0.1, 0.2, 0.3])},
    }
    assert selective_backprop.time_until(runs, 0, FULL_ROW, 1.2) == 6
    assert selective_backprop.time_until(runs, 0, "fast", 1.2) == 2
    assert selective_backprop.sooner(runs, 0, "fast", FULL_ROW, 1.2) == 3
    assert selective_backprop.sooner(runs, 0, "bad", FULL_ROW, 1.2) == 0
    # at least: the other one is not there after 6 s
    assert selective_backprop.sooner(runs, 0, "fast", "bad", 1.2) == 3


def test_ranks_of_adaselection_are_over_the_rates():
    def runs(value):
        return {0: {"metric": {"value": value}}}

    methods = [FULL_ROW, "AdaSelection", "Uniform", "Big Loss"]
    measured = {
        ada_selection.row_name(method, rate): runs(-number)
        for number, method in enumerate(methods)
        for rate in ada_selection.RATES
    }
    assert ada_selection.mean_ranks(measured, methods) == [1, 2, 3, 4]


def test_rates_of_a_loss_are_not_in_hundredths():
    methods = [FULL_ROW]
    runs = {FULL_ROW: {0: {"metric": {"value": -3.5}, "cpu_s": 1.0, "cost": {"steps": 9}}}}
    [loss] = ada_selection.by_rate({"line": runs}, {"line": {"metric": "-loss"}}, methods)
    assert loss.title.startswith("line: -loss (full training -3.50)")
    assert loss.rows[0][1] == "-3.50, 1.00, 9"
    [share] = ada_selection.by_rate({"line": runs}, {"line": {"metric": "r2"}}, methods)
    assert share.title.startswith("line: metric in hundredths (full training -350.00)")


def test_selectors_that_train_on_the_same_rows_are_named(folder):
    artefact = ARTEFACTS["adaselection-table-4"]
    measured, results = measure(artefact, folder)
    for rate in ada_selection.RATES:
        for one in ("Gradient Norm", "AdaBoost, losses scaled"):
            measured["line"][f"{one} {rate}"] = measured["line"][f"Big Loss {rate}"]
    assert artefact.tables is not None
    title = artefact.tables(measured, results)[0].title
    same = "Big Loss and Gradient Norm and AdaBoost, losses scaled"
    assert title.endswith(f"larger is better. line: {same} train on the same rows in every run")


def test_a_loss_has_its_own_unit():
    assert (
        with_spread(-0.04653, 0.0083, units_of("-loss")) == "-0.0465 ± 0.0083"
        and units_of("accuracy") == 100
    )
    assert with_spread(-1.5, None, 1) == "-1.50" and with_spread(0.97, 0.01, 100) == "97.00 ± 1.00"
    assert (
        with_interval(-0.0032, [-0.01, 0.004], 1) == "-0.0032 [-0.0100, +0.0040]"
        and with_interval(0.0012, None) == "+0.12"
    )


def test_overlap_of_the_lowest():
    values = np.arange(10)
    assert (
        diet_sb.overlap_of_least(values, values, 0.3) == 1
        and diet_sb.overlap_of_least(values, -values, 0.3) == 0
    )
    assert diet_sb.overlap_of_least(values, -values, 1.0) == 1


def test_concentration_of_the_lowest(monkeypatch, tmp_path):
    target = np.repeat([0, 1, 2, 3], 10)
    pq.write_table(pa.table({"target": target}), tmp_path / "samples.parquet")
    runs = {diet_sb.SB_ROW: {0: {"samples": str(tmp_path / "samples.parquet")}}}
    monkeypatch.setitem(diet_sb.RANKS, "EL2N", lambda *_: np.arange(40))
    assert diet_sb.concentration(runs, 0, "EL2N") == 1
    monkeypatch.setitem(diet_sb.RANKS, "EL2N", lambda *_: np.arange(40) % 10)
    assert diet_sb.concentration(runs, 0, "EL2N") == 0.75


@in_verify
@pytest.mark.filterwarnings(POOL_WARNING)
def test_selection_at_random_fills_batches_as_the_others_do(folder):
    """Else its smaller batches take as many steps as full training, which is worth more than any choice of rows."""
    scores = folder / "scores.parquet"
    for name in (
        "diet-sb-a",
        "diet-sb-b",
        "diet-sb-runtime",
        *(n for n in ARTEFACTS if n.startswith("adaselection")),
    ):
        for part in ARTEFACTS[name].parts:
            specs = specs_of(part, scores)
            filled = [
                spec
                for row, spec in specs.items()
                if not row.endswith("as many steps as full training")
            ]
            assert {batches_of(spec) for spec in filled} <= {FULL_BATCHES, FILLED_BATCHES}


def test_moving_back_is_judged_only_where_it_happens():
    def ablations(count):
        run = {
            "metric": {"value": 0.5},
            "cost": {"full_forward": 1000.0},
            "history": [{"moved_back": count}] * 10,
        }
        return {"best rate": {bits: {0: run} for bits in VARIANTS}}

    [claim] = [
        one
        for one in ARTEFACTS["kakurenbo-table-5"].claims
        if one.text.startswith("best rate: moving back")
    ]
    assert claim.value(ablations(20), 0) == 0
    assert math.isnan(claim.value(ablations(0), 0))
    some = ablations(20)
    some["best rate"]["v1101"] = ablations(0)["best rate"]["v1101"]
    assert math.isnan(claim.value(some, 0))


def test_the_cost_for_another_price_of_a_backward_pass():
    counts = {"forward": 30, "backward": 10, "full_forward": 40, "full_backward": 40}
    runs = {"a": {0: {"cost": {**counts, "ratio": 0.45}}}, "b": {0: {"cost": {"ratio": 0.25}}}}
    assert measures.cost(runs, 0, "a", 2.0) == pytest.approx(50 / 120)
    assert measures.cost(runs, 0, "a", 1.0) == pytest.approx(40 / 80)
    assert measures.cost(runs, 0, "a") == 0.45
    assert measures.cost_saved(runs, 0, "b", "a") == pytest.approx(0.2)
    assert measures.cost_saved(runs, 0, "a", "a", 2.0) == 0


def test_weights_between_tasks():
    artefact = ARTEFACTS["adaselection-weights"]
    ends = ((1, 0, 0), (0, 0, 1), (0.5, 0, 0.5), (1, 0, 0), (1, 0, 0))
    measured = {}
    for part, end in zip(artefact.parts, ends, strict=True):
        history = [dict(zip(ada_selection.WEIGHT_NAMES, end, strict=True))]
        runs = {0: {"history": history}}
        measured[part.name] = {FULL_ROW: runs, ada_selection.WEIGHTS_ROW: runs}
    assert artefact.claims[0].value(measured, 0) == 1


@pytest.mark.parametrize("name", ["diet-sb-b", "diet-sb-runtime"])
def test_diet_drops_in_the_batch_what_makes_the_total(name):
    [part] = ARTEFACTS[name].parts
    for total, row in ((0.5, "Diet-SB 50% (25%)"), (0.625, "Diet-SB 62.5% (25%)")):
        keep = round(thresher.keep_in_batch(0.25, total), 4)
        in_batch = f"selective_backprop:keep={keep}:draw=true:forward_passes=twice"
        assert part.rows[row] == f"prune:scores={{scores}}:keep=0.75+{in_batch}"
    assert part.rows[row].count("keep=0.5:") == 1


def test_where_the_scores_are_is_part_of_a_method(tmp_path):
    found = specs_of(
        ArtefactPart("p", "digits", 1, {"a": "prune:scores={scores}:keep=0.5"}),
        tmp_path / "s.parquet",
    )
    assert found["a"].given["scores"] == str(tmp_path / "s.parquet")


def test_the_least_with_ties_by_id():
    assert np.flatnonzero(diet_sb.least(np.array([3, 1, 2, 1, 1]), 0.4)).tolist() == [1, 3]
    assert not diet_sb.least(np.array([1.0, 2.0]), 0.2).any()
