"""Loops drawn at random do what the oracle says, or are refused. `python -m tests.loops.test_loops SEED` replays one."""

import datetime
import itertools
import sys
import warnings

import pytest
import torch
from tests.depth import DEEP, depth, in_verify
from tests.loops.grammar import IN_BATCH, NOT_EACH_BATCH_ONCE, PLAIN, described, draw, shrink
from tests.loops.training import EPOCHS, Training

import thresher

GROUPS = depth(5, 20)
REFUSALS = (thresher.AttributionError, NotImplementedError, RuntimeError, TypeError, ValueError)
FULL = ("FullData", "observe")


class WrongError(AssertionError):
    """A loop did not do what the oracle says."""


def expect(condition, what):
    if not condition:
        raise WrongError(what)


def equal(what, found, expected):
    expect(found == expected, f"{what}: {found} for {expected}")


def same_tensors(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def close_tensors(one, other):
    return all(torch.allclose(one[name], other[name], rtol=1e-4, atol=1e-6) for name in one)


def check_full(spec, attached):
    """Selecting nothing changes nothing."""
    plain = Training(spec, library=False)
    torch.manual_seed(2)
    plain.train()
    equal("order of FullData", attached.order, plain.order)
    alike = close_tensors if "reduce" in spec["loss"] else same_tensors
    states = plain.model.state_dict(), attached.model.state_dict()
    expect(alike(*states), "FullData trains other parameters than the plain loop")
    equal("the oracle's counts", attached.book.trained.tolist(), plain.book.trained.tolist())


def check_records(spec, training):
    run, book = training.run, training.book
    if "loss" not in run.records or spec["method"] == "selective twice":
        return
    records = run.records["loss"].float()
    known = ~book.last.isnan()
    if spec["method"] == "kakurenbo":  # hidden samples have the losses of the refresh
        known &= book.this_epoch
    else:
        expect(bool((records[~known] == -torch.inf).all()), "samples without a loss have records")
    wrong = known & ~torch.isclose(records, book.last, rtol=0.012, atol=2e-3)
    wrong = wrong.nonzero().flatten().tolist()
    expect(not wrong, f"records of {wrong}: {records[wrong]} for {book.last[wrong]}")


def check_counts(spec, training):
    run, book, cost = training.run, training.book, training.run.cost
    in_batch = spec["method"] in IN_BATCH
    repeats = spec["sampler"] in NOT_EACH_BATCH_ONCE
    # A group of batches that goes on in the next epoch may have a sample twice.
    shows_rows = spec["step"] != "accumulated" and spec["labels"] == "all"
    if shows_rows and not in_batch and not repeats:
        labeled = training.data.y if spec["task"] == "tokens" else torch.zeros(len(book.last), 1)
        shown = (labeled >= 0).any(1)
        equal("by the probe", training.probed[shown].tolist(), book.trained[shown].tolist())
    if not (in_batch and spec["step"] == "accumulated"):
        expected = training.probed if in_batch else book.trained
        equal("trained", run.trained.tolist(), expected.tolist())
    equal("steps", cost.steps, book.steps)
    if cost.unknown is not None or in_batch:
        return
    own = cost.refresh + cost.scoring + cost.comparing
    equal("forward", cost.forward - own, book.forward)
    equal("backward", cost.backward, book.backward_rows)
    if spec["method"] in FULL:
        equal("full training", cost.full_forward, cost.forward - cost.comparing)


def check_history(spec, training):
    run = training.run
    equal("epochs of the history", len(run.history), EPOCHS)
    for entry, batches in zip(run.history, training.order, strict=True):
        whole = spec["loop"] != "break" and not spec["drop_last"] and spec["method"] not in IN_BATCH
        # What is kept is a number of samples of the dataset, whether the sampler draws them or not, and BatchNorm drops a row.
        drawn = spec["sampler"] not in (*NOT_EACH_BATCH_ONCE, "subset")
        if whole and drawn and spec["model"] != "batch norm":
            equal("kept", entry["kept"], sum(map(len, batches)))
        expect(entry["complete"] or spec["loop"] == "break", "an epoch is not complete")
    equal("sum of the history", sum(entry["forward"] for entry in run.history), run.cost.forward)


def check_map(spec, training):
    if spec["method"] != "observe":
        return
    table, seen = training.run.data_map(), training.book.seen
    if spec["sampler"] not in NOT_EACH_BATCH_ONCE:
        equal("seen", table["times_seen"].tolist(), seen.tolist())
    suspicion = torch.as_tensor(table["suspicion"])[seen > 0]
    expect(bool(((suspicion >= 0) & (suspicion <= 1)).all()), "suspicions are not within [0, 1]")
    if "confidence" in table:
        confidence = torch.as_tensor(table["confidence"])[seen > 0]
        expect(bool((confidence > 0).all()), "confidences are 0")


def check_resume(spec, whole):
    """A training that was interrupted is the one that was not."""
    first = Training(spec, library=True)
    torch.manual_seed(2)
    first.train((1, None) if spec["resume"] == "after an epoch" else (1, 2))
    state = first.state()
    torch.manual_seed(99)
    second = Training(spec, library=True)
    torch.manual_seed(98)
    second.load(state)
    second.train()
    equal("resumed order", second.order, whole.order)
    states = second.model.state_dict(), whole.model.state_dict()
    expect(same_tensors(*states), "the resumed training has other parameters")
    for name, column in whole.run.records.items():
        expect(torch.equal(second.run.records[name], column), f"resumed records {name}")
    equal("resumed counts", second.run.trained.tolist(), whole.run.trained.tolist())
    history = [*map(kept_of, whole.run.history)]
    equal("resumed history", [*map(kept_of, second.run.history)], history)
    check_counts(spec, second)
    check_records(spec, second)


def kept_of(entry):
    return entry["epoch"], entry["kept"], entry["complete"], entry["steps"]


def check(spec):
    """Checks one loop; returns the message of a refusal, or "".

    Raises:
        WrongError: The loop did not do what the oracle says.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            attached = Training(spec, library=True)
            torch.manual_seed(2)
            attached.train()
        except REFUSALS as error:
            expect(len(str(error)) > 40, f"refused without a reason: {error!r}")
            return f"{type(error).__name__}: {error}"
        if spec["method"] in FULL:
            check_full(spec, attached)
        expect(attached.far < 1e-3, f"gradients differ by {attached.far:.1e}")
        check_counts(spec, attached)
        check_records(spec, attached)
        check_history(spec, attached)
        check_map(spec, attached)
        if spec["resume"] != "never":
            check_resume(spec, attached)
    return ""


def fails(spec):
    try:
        check(spec)
    except Exception:
        return True
    return False


def check_seeds(seeds):
    """Checks loops, and returns how many were refused."""
    refused = 0
    for seed in seeds:
        spec = draw(seed)
        try:
            refused += bool(check(spec))
        except Exception as error:
            smallest = shrink(spec, fails)
            pytest.fail(f"loop {seed}: {described(smallest)}: {type(error).__name__}: {error}")
    return refused


def varied(number):
    """Returns the first seeds of loops that have at least 20 pairs of values that no loop before them has."""
    seen, seeds = set(), []
    seed = 0
    while len(seeds) < number:
        pairs = set(itertools.combinations(draw(seed).items(), 2))
        if len(pairs - seen) >= 20:
            seen |= pairs
            seeds.append(seed)
        seed += 1
    return seeds


@pytest.mark.parametrize("group", range(GROUPS))
def test_drawn_loops(group):
    seeds = (range(5000) if DEEP else varied(50))[group::GROUPS]
    assert check_seeds(seeds) < 0.4 * len(seeds)


@in_verify
@pytest.mark.parametrize("group", range(GROUPS))
def test_loops_of_the_day(group):
    first = 10_000 + datetime.date.today().toordinal() * 1000
    check_seeds(range(first + group, first + 1000, GROUPS))


@pytest.mark.parametrize("seed", range(20))
def test_the_oracle_counts_plain_loops(seed):
    """Without the library, the book agrees with the gradients of the probe."""
    spec = draw(seed) | {
        "method": "FullData",
        "task": "classes",
        "step": "plain",
        "form": "as returned",
        "labels": "all",
    }
    training = Training(spec, library=False)
    training.train()
    counts = training.book.trained
    assert spec["sampler"] in NOT_EACH_BATCH_ONCE or training.probed.equal(counts)


def test_the_shrinker_keeps_what_fails():
    spec = draw(3) | {"log": "after step", "step": "plain", "optimizer": True}
    smallest = shrink(spec, lambda one: one["log"] == "after step")
    assert smallest == PLAIN | {"log": "after step"}


if __name__ == "__main__":
    for number in map(int, sys.argv[1:]):
        result = check(draw(number)) or "right"
        sys.stdout.write(f"{number}: {described(draw(number))}: {result}\n")
