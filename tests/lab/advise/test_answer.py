"""The answer of `thresher advise`, in the words of every case."""

from dataclasses import replace

import pytest

from thresher_lab.advise.answer import answer_lines, answer_of, on_the_interval
from thresher_lab.advise.budget import budget_sentences
from thresher_lab.advise.findings import Measurement, Record, all_measurements, record_of
from thresher_lab.advise.forecast import Outlook
from thresher_lab.advise.pace import Pace
from thresher_lab.training.specs import parse_methods

UNLIKE = Outlook(0.3, 0.31, 1.5, 0.5, 0.0)
HALF = "winnow:share=0.5"
PACE = Pace(0.0, 2.0, 4.0, 1.0, 2.0, half=3.6)
SAFE = ("no loss", "safe", "lost more than the margin", "loses nothing", "lost nothing", "within the margin")


def record(name=HALF):
    [spec] = parse_methods(name)
    return record_of(spec).as_dict()


def advice(outlook=UNLIKE, at_most=0.45, saves=None, worth=(HALF,), lost=None, finding="free"):
    row = {"method": HALF, "refused": None, "at_most": at_most, "saves": at_most if saves is None else saves}
    row |= {"record": record(), "settings": {"share": 0.5}, "compute_s": 1.1 * PACE.compute}
    found = {"outlook": outlook.as_dict(), "methods": [row], "worth_trying": [*worth], "next": "thresher next"}
    found |= {"step": PACE.as_dict(), "steps": 4000, "epochs": 20, "probe": {"epochs": 3.0}}
    if lost is None:
        return found
    loss = {"share": 0.5, "lost": lost, "by_seed": [lost, lost], "finding": finding}
    budget = {"epochs": 5, "metric": "accuracy", "points": True, "losses": [loss]}
    budget |= {"times": [{"share": 0.5, "batches": 0.6, "steps": 0.5}]}
    return found | {"budget": budget | {"sentences": budget_sentences(budget)}}


def test_before_short_runs_the_answer_is_on_time_and_calls_nothing_safe():
    assert answer_lines(advice()) == [
        "Can selection help here? Yes, it can save time. What it loses is unknown.",
        "Why: the samples are unlike (rho 0.30; 1 is all alike), and winnow:share=0.5 could save about 45 % of the time.",
        "Measured elsewhere: for winnow:share=0.5, the interval of the difference to full training reached below the margin "
        "on 7 of 11 trainings, and all of it was below 0 on 5 of them.",
        "Next (trains short runs, which show what half of the cost loses here):",
        "thresher next",
    ]


def test_of_the_eleven_trainings_those_below_the_margin_are_counted_and_named():
    known = {one.task: one for one in all_measurements() if one.method == HALF}
    below = {name for name, one in known.items() if one.low < -one.margin}
    found = record()
    under = {name for name, one in known.items() if one.high < 0}
    assert set(found["under_zero_on"]) == under and {"relief", "fashion-augmented-40"} <= under
    assert len(known) == 11 and set(found["below_on"]) == below and under - below <= {"fashion-10k-noisy"}
    said = " ".join(answer_lines(advice()))
    assert f"below the margin on {len(below)} of 11 trainings, and all of it was below 0 on {len(under)} of them." in said
    assert not any(word in said for word in SAFE)


@pytest.mark.parametrize(
    ("given", "answer", "why"),
    [
        ({"outlook": Outlook(0.95, 0.95, 1.0, 0.5, 0.0), "worth": ()}, "no", "the samples are much alike (rho 0.95; 1 is all"),
        ({"outlook": Outlook(0.95, 0.95, 1.0, 0.95, 0.0), "worth": ()}, "no", "by much, and smaller batches save no time."),
        ({"at_most": 0.01, "worth": ()}, "no", "none of these methods could save 5 % of the time."),
        (
            {"outlook": Outlook(0.9, 0.99, 1.0, 0.5, 0.0)},
            "unknown",
            "network has learned: the probe of 3 epochs was too short, and a comparison shows it.",
        ),
        ({"outlook": Outlook(None, None, None, 0.5, 0.0)}, "unknown", "the criterion does not show how unlike the samples"),
        (
            {"outlook": Outlook(0.97, 0.98, 1.0, 0.5, 0.0, 0.06)},
            "unknown",
            "network has learned: the probe of 3 epochs was too short, and a comparison shows it.",
        ),
        ({"outlook": Outlook(0.97, 0.98, 1.0, 0.5, 0.0, 0.02), "worth": ()}, "no", "the samples are much alike"),
        (
            {"saves": 0.1},
            "yes",
            "could save about 45 % of the time once all samples are learned, and 10 % of it at the losses of",
        ),
        ({"saves": -0.1}, "yes", "once all samples are learned, and nothing at the losses of the probe."),
        ({"worth": ()}, "unknown", "draw at random here, or were worse than a control"),
        ({"lost": 0.001}, "yes", "the samples are unlike"),
        ({"lost": 0.008, "finding": "between"}, "unknown", "the samples are unlike"),
        ({"lost": 0.02, "finding": "lost"}, "unknown", "the samples are unlike"),
        ({"lost": 2.0, "finding": "unknown"}, "unknown", "the samples are unlike"),
        ({"lost": 0.0, "outlook": Outlook(0.95, None, 1.0, 0.5, 0.0)}, "unknown", "the probe of 3 epochs was too short"),
    ],
)
def test_the_answer_and_why(given, answer, why):
    found = advice(**given)
    lines = answer_lines(found)
    assert answer_of(found) == answer and lines[0].startswith(f"Can selection help here? {answer.title()}")
    assert (
        lines[1].startswith("Why: ")
        and why in lines[1]
        and len(lines) == 5 + ("lost" in given)
        and lines[-1] == "thresher next"
    )


def test_after_short_runs_their_losses_take_the_place_of_other_trainings():
    lines = answer_lines(advice(lost=0.003))
    assert lines[0] == ("Can selection help here? Yes, as far as short runs show. Simpler ways to spend less may do as well.")
    assert lines[2].startswith("At 0.5 of the cost, smaller batches lose 0.30 points of accuracy") and lines[4] == (
        "Next (trains Winnow at a budget and its controls):"
    )
    assert lines[3] == "Smaller batches take about this share of the time of full training at 0.5, 60%."


def test_where_smaller_batches_save_little_that_is_said():
    found = advice(lost=0.003)
    found["budget"]["times"] = [{"share": 0.5, "batches": 0.9, "steps": 0.5}, {"share": 0.8, "batches": 0.85, "steps": 0.8}]
    assert answer_lines(found)[3] == (
        "Smaller batches take about this share of the time of full training at 0.5, 90%; at 0.8, 85%: only full-size batches "
        "in fewer steps, spend='steps', save time in proportion."
    )
    assert "The machine was busy" not in " ".join(answer_lines(found))
    assert answer_lines(found | {"busy": True})[-3].startswith("The machine was busy, with more work than cores")


@pytest.mark.parametrize("lost", [None, 0.003])
def test_where_smaller_batches_save_less_than_their_part_fewer_steps_are_named(lost):
    found = advice(lost=lost, at_most=0.2) | {"step": replace(PACE, half=5.3).as_dict()}
    if lost is not None:
        found["budget"]["times"] = [{"share": 0.5, "batches": 0.75, "steps": 0.5}]
    [said] = [line for line in answer_lines(found) if "--methods winnow:share=0.5:spend=steps" in line]
    assert "and about 45% in fewer full-size ones: --methods" in said and said.endswith("that lost 0.4 to 7 points more.")


@pytest.mark.parametrize(
    ("trained", "planned", "way"), [(0.4, 20, "--seconds makes it longer"), (2.0, 2, "a comparison shows it")]
)
def test_a_probe_that_was_too_short_says_what_shows_it(trained, planned, way):
    found = advice(Outlook(0.9, 0.99, 1.0, 0.5, 0.0)) | {"epochs": planned, "probe": {"epochs": trained}}
    assert way in answer_lines(found)[1]


def test_where_seeds_do_not_agree_the_answer_is_unknown():
    found = advice(lost=0.0025)
    loss = found["budget"]["losses"][0] | {"by_seed": [-0.0075, 0.0125]}
    budget = found["budget"] | {"losses": [loss]}
    found["budget"] = budget | {"sentences": budget_sentences(budget)}
    lines = answer_lines(found)
    assert lines[0] == "Can selection help here? Unknown."
    assert "the seeds differ by 2.00 points. The seeds do not agree whether that is little (0.4) or much (1.2)" in lines[2]
    assert not any(word in lines[2] for word in ("little or nothing", "That is much"))


def test_what_is_said_of_the_interval():
    unknown = "no interval of the difference to full training is known for ies."
    old = Record([Measurement("here", "a", "ies", 0.5, -1.0, "loses", {})])
    assert on_the_interval("ies", Record([]).as_dict()) == on_the_interval("ies", old.as_dict()) == unknown
    one = Record([Measurement("here", "a", "ies", 0.5, 0.1, "no loss", {}, -0.2, 0.4, 0.2)], other_settings=True)
    assert on_the_interval("ies", one.as_dict()) == (
        "for ies with other settings, the interval of the difference to full training reached below the margin on 0 of 1 "
        "training, and all of it was below 0 on 0 of them."
    )
