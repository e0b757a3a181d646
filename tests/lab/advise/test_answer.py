"""The answer of `thresher advise`, in the words of every case."""

from dataclasses import replace

import pytest

from thresher_lab.advise.answer import answer_lines, answer_of
from thresher_lab.advise.budget import budget_sentences
from thresher_lab.advise.findings import Record, all_measurements, record_of
from thresher_lab.advise.forecast import Outlook
from thresher_lab.advise.pace import Pace
from thresher_lab.advise.probe import NO_TIME
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
    budget = {"epochs": 5, "metric": "accuracy", "full": 0.8, "points": True, "losses": [loss]}
    budget |= {"times": [{"share": 0.5, "batches": 0.6, "steps": 0.5}]}
    return found | {"budget": budget | {"sentences": budget_sentences(budget)}}


def test_before_short_runs_the_answer_is_on_time_and_calls_nothing_safe():
    assert answer_lines(advice()) == [
        "Can selection help here? Perhaps: winnow:share=0.5 could save about 45 % of the time; it lost on 5 of 11 tasks of "
        "this project, and may have on 3.",
        "Why: the samples are unlike (rho 0.30; 1 is all alike), and winnow:share=0.5 could save about 45 % of the time.",
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
    assert f"it lost on {len(under)} of 11 tasks of this project, and may have on {len(below - under)}." in said
    assert not any(word in said for word in SAFE)


@pytest.mark.parametrize(
    ("given", "answer", "why"),
    [
        ({"outlook": Outlook(0.95, 0.95, 1.0, 0.5, 0.0), "worth": ()}, "no", "the samples are much alike (rho 0.95; 1 is all"),
        ({"outlook": Outlook(0.95, 0.95, 1.0, 0.95, 0.0), "worth": ()}, "no", "by much, and smaller batches save no time."),
        ({"at_most": 0.01, "worth": ()}, "no", "none of these methods could save 5 % of the time."),
        (
            {"outlook": Outlook(0.9, 0.99, 1.0, 0.5, 0.0)},
            "perhaps",
            "the samples are still alike (rho 0.90; 1 is all alike), as",
        ),
        ({"outlook": Outlook(None, None, None, 0.5, 0.0)}, "perhaps", "the criterion does not show how unlike the samples"),
        ({"outlook": Outlook(0.97, 0.98, 1.0, 0.5, 0.0, 0.06)}, "perhaps", "as they are before a network has learned: this"),
        ({"outlook": Outlook(0.97, 0.98, 1.0, 0.5, 0.0, 0.02), "worth": ()}, "no", "the samples are much alike"),
        (
            {"saves": 0.1},
            "perhaps",
            "could save about 45 % of the time once all samples are learned, and 10 % of it at the losses",
        ),
        ({"saves": -0.1}, "perhaps", "once all samples are learned, and nothing at the losses of the probe."),
        ({"worth": ()}, "unknown", "draw at random here, or were worse than a control"),
        ({"lost": 0.001}, "probably", "At 0.5 of the cost, smaller batches lose 0.10 points"),
        ({"lost": 0.008, "finding": "between"}, "perhaps not", "At 0.5 of the cost, smaller batches lose 0.80 points"),
        ({"lost": 0.02, "finding": "lost"}, "perhaps not", "At 0.5 of the cost, smaller batches lose 2.00 points"),
        ({"lost": 0.02, "finding": "lost", "at_most": 0.01}, "no", "none of these methods could save 5 % of the time."),
        ({"lost": 2.0, "finding": "unknown"}, "perhaps", "the samples are unlike"),
        ({"lost": 0.0, "outlook": Outlook(0.95, None, 1.0, 0.5, 0.0)}, "probably", "smaller batches lose nothing"),
    ],
)
def test_the_answer_and_why(given, answer, why):
    found = advice(**given)
    lines = answer_lines(found)
    assert answer_of(found) == answer and lines[1].startswith("Why: ") and why in lines[1] and lines[-1] == "thresher next"
    said = "Not known yet: `thresher next` tells." if answer == "unknown" else answer.capitalize()
    assert lines[0].startswith(f"Can selection help here? {said}")


def test_after_short_runs_their_losses_take_the_place_of_other_trainings():
    lines = answer_lines(advice(lost=0.003))
    assert lines[0] == (
        "Can selection help here? Probably: in 8 of 8 comparisons on 5 tasks of this project where whole runs of smaller "
        "batches lost 0.4 points or less, a way to spend less lost 0.2 points or less."
    )
    assert lines[1:5] == [
        "Why: At 0.5 of the cost, smaller batches lose 0.30 points of accuracy in short runs of 5 epochs (80.0 to 79.7; "
        "by seed 0.30, 0.30).",
        "Smaller batches take 60% of the time at 0.5 of the cost.",
        "The samples are unlike (rho 0.30; 1 is all alike), and winnow:share=0.5 could save about 45 % of the time.",
        "Next (trains Winnow at a budget and its controls; --dry-run says how long it takes):",
    ]


def test_a_loss_in_short_runs_is_the_reason_and_the_answer_says_that_whole_runs_may_lose_less():
    lines = answer_lines(advice(lost=0.0525, finding="lost"))
    assert lines[:2] == [
        "Can selection help here? Perhaps not: at 0.5 of the cost, smaller batches lose in short runs. Whole runs lose "
        "less, often far less.",
        "Why: At 0.5 of the cost, smaller batches lose 5.25 points of accuracy in short runs of 5 epochs (80.0 to 74.8; by "
        "seed 5.25, 5.25).",
    ]


def test_where_smaller_batches_save_little_that_is_said():
    found = advice(lost=0.003)
    found["budget"]["times"] = [{"share": 0.5, "batches": 0.9, "steps": 0.5}, {"share": 0.8, "batches": 0.85, "steps": 0.8}]
    assert answer_lines(found)[2] == (
        "Smaller batches take 90% of the time at 0.5 of the cost, and 85% of the time at 0.8 of the cost: only full-size "
        "batches in fewer steps, spend='steps', save time in proportion."
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


def test_what_the_time_did_not_suffice_for_and_warm_up_are_said():
    found = advice() | {"probe": {"epochs": 0.2, "warm_up": 0.6}, "skipped": ["timing infobatch", "short runs"]}
    assert answer_lines(found)[-4:-2] == [
        "The 0.2 epochs of the probe were within the warm-up of the learning rate, which takes 0.6.",
        "There was no time for timing infobatch, short runs; --seconds gives more.",
    ]
    empty = advice(lost=0.003)
    empty["budget"] |= {"losses": [], "sentences": []}
    assert answer_of(empty) == "perhaps" and answer_lines(empty)[-2].startswith("Next (trains short runs")
    assert not any("warm-up" in line for line in answer_lines(found | {"probe": {"epochs": 0.7, "warm_up": 0.6}}))
    assert not any("warm-up" in line for line in answer_lines(found | {"probe": {"epochs": 0.7, "warm_up": 0.0}}))


def test_a_method_that_there_was_no_time_for_is_no_reason_to_say_no():
    found = advice(worth=())
    found["methods"] = [found["methods"][0] | {"refused": NO_TIME}]
    assert answer_of(found) == "unknown" and answer_of(advice(worth=(), at_most=0.0)) == "no"


@pytest.mark.parametrize(
    ("by_seed", "said", "doubt"),
    [
        ([-0.0075, 0.0125], "by seed -0.75, 1.25).", ", but seeds differ here."),
        ([0.0025], "there was time for one seed).", ", but this is one seed."),
    ],
)
def test_where_seeds_do_not_agree_or_there_is_one_the_answer_is_less_sure(by_seed, said, doubt):
    found = advice(lost=0.0025)
    loss = found["budget"]["losses"][0] | {"by_seed": by_seed}
    budget = found["budget"] | {"losses": [loss]}
    found["budget"] = budget | {"sentences": budget_sentences(budget)}
    lines = answer_lines(found)
    assert lines[0].startswith("Can selection help here? Perhaps: in 8 of 8 comparisons") and lines[0].endswith(doubt)
    assert lines[1].endswith(said)


def test_a_method_that_was_not_measured_is_said_to_be():
    found = advice()
    found["methods"][0]["record"] |= {"other_settings": True}
    assert answer_lines(found)[0].endswith("and may have on 3 with other settings.")
    found["methods"][0]["record"] = Record([]).as_dict()
    assert answer_lines(found)[0].endswith(
        "winnow:share=0.5 could save about 45 % of the time; what it loses was not measured."
    )
