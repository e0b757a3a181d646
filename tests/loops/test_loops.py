"""Loops drawn at random do what the oracle says, or are refused. `python -m tests.loops.test_loops SEED` replays one."""

import datetime
import sys
import warnings

import pytest
import torch
from tests.depth import depth
from tests.loops.grammar import IN_BATCH, NOT_EACH_BATCH_ONCE, PLAIN, described, draw, shrink
from tests.loops.training import EPOCHS, Training

import thresher

LOOPS = depth(200, 5000)
GROUPS = 20
REFUSALS = (thresher.AttributionError, NotImplementedError, RuntimeError, TypeError, ValueError)
FULL = ("FullData", "observe")


class WrongError(AssertionError):
    """A loop did not do what the oracle says."""


def expect(condition, what):
    if not condition:
        raise WrongError(what)


def same_tensors(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def close_tensors(one, other):
    return all(torch.allclose(one[name], other[name], rtol=1e-4, atol=1e-6) for name in one)


def check_full(spec, attached):
    """Selecting nothing changes nothing."""
    plain = Training(spec, library=False)
    torch.manual_seed(2)
    plain.train()
    expect(plain.order == attached.order, "FullData has another order than the plain loop")
    alike = close_tensors if "reduce" in spec["loss"] else same_tensors
    expect(
        alike(plain.model.state_dict(), attached.model.state_dict()),
        "FullData trains other parameters than the plain loop",
    )
    expect(
        plain.book.trained.equal(attached.book.trained), "the oracle disagrees with the plain loop"
    )


def check_records(spec, training):
    run, book = training.run, training.book
    if "loss" not in run.records or spec["method"] == "selective twice":
        return
    records = run.records["loss"].float()
    known = ~book.last.isnan()
    if spec["method"] == "kakurenbo":  # hidden samples have the losses of the refresh
        known &= book.this_epoch
    wrong = known & ~torch.isclose(records, book.last, rtol=0.012, atol=2e-3)
    wrong = wrong.nonzero().flatten().tolist()
    expect(
        not wrong,
        f"records of {wrong}: {records[wrong].tolist()} for {book.last[wrong].tolist()}",
    )
    if spec["method"] != "kakurenbo":
        unseen = book.last.isnan()
        expect(
            bool((records[unseen] == -torch.inf).all()), "samples that were never seen have records"
        )


def check_counts(spec, training):
    run, book = training.run, training.book
    in_batch = spec["method"] in IN_BATCH
    expected = training.probed if in_batch else book.trained
    repeats = spec["sampler"] in NOT_EACH_BATCH_ONCE
    # A group of batches that goes on in the next epoch may have a sample twice.
    shows_rows = spec["step"] != "accumulated" and spec["labels"] == "all"
    if not in_batch and not repeats and shows_rows:
        labeled = training.data.y if spec["task"] == "tokens" else torch.zeros(len(book.last), 1)
        shown = (labeled >= 0).any(1)
        expect(
            training.probed[shown].equal(book.trained[shown]),
            "the oracle disagrees with the gradients",
        )
    if not (in_batch and spec["step"] == "accumulated"):
        expect(
            run.trained.long().equal(expected),
            f"trained {run.trained.tolist()} for {expected.tolist()}",
        )
    cost = run.cost
    if cost.unknown is None and not in_batch:
        own = cost.refresh + cost.scoring + cost.comparing
        expect(
            cost.forward - own == book.forward, f"forward {cost.forward - own} for {book.forward}"
        )
        expect(
            cost.backward == book.backward_rows,
            f"backward {cost.backward} for {book.backward_rows}",
        )
    if spec["method"] in FULL and cost.unknown is None:
        expect(
            cost.full_forward == cost.forward - cost.comparing,
            "full training costs more or less than itself",
        )
    expect(cost.steps == book.steps, f"steps {cost.steps} for {book.steps}")


def check_history(spec, training):
    run = training.run
    expect(
        len(run.history) == EPOCHS, f"{len(run.history)} entries of the history for {EPOCHS} epochs"
    )
    for entry, batches in zip(run.history, training.order, strict=True):
        rows = sum(map(len, batches))
        whole = spec["loop"] != "break" and not spec["drop_last"] and spec["method"] not in IN_BATCH
        # What is kept is a number of samples of the dataset, whether the sampler draws them or not, and BatchNorm drops a row.
        drawn = spec["sampler"] not in (*NOT_EACH_BATCH_ONCE, "subset")
        if whole and drawn and spec["model"] != "batch norm":
            expect(entry["kept"] == rows, f"kept {entry['kept']} for {rows} rows")
        expect(entry["complete"] or spec["loop"] == "break", "an epoch is not complete")
    total = sum(entry["forward"] for entry in run.history)
    expect(total == run.cost.forward, "forward passes of the history do not add up to the cost")


def check_map(spec, training):
    if spec["method"] != "observe":
        return
    table = training.run.data_map()
    if spec["sampler"] not in NOT_EACH_BATCH_ONCE:
        seen = torch.as_tensor(table["times_seen"])
        expect(
            seen.equal(training.book.seen),
            f"seen {seen.tolist()} for {training.book.seen.tolist()}",
        )
    suspicion = torch.as_tensor(table["suspicion"])[training.book.seen > 0]
    confidence = torch.as_tensor(table.get("confidence", [1.0]))
    expect(
        bool((confidence[training.book.seen[: len(confidence)] > 0] > 0).all()), "confidences are 0"
    )
    expect(bool(((suspicion >= 0) & (suspicion <= 1)).all()), "suspicions are not within [0, 1]")


def check_resume(spec, whole):
    """A training that was interrupted is the one that was not."""
    stop = (1, None) if spec["resume"] == "after an epoch" else (1, 2)
    first = Training(spec, library=True)
    torch.manual_seed(2)
    first.train(stop)
    state = first.state()
    torch.manual_seed(99)
    second = Training(spec, library=True)
    torch.manual_seed(98)
    second.load(state)
    second.train()
    expect(second.order == whole.order, "the resumed training has another order")
    expect(
        same_tensors(second.model.state_dict(), whole.model.state_dict()),
        "the resumed training has other parameters",
    )
    for name in whole.run.records:
        expect(
            torch.equal(second.run.records[name], whole.run.records[name]),
            f"resumed records {name}",
        )
    expect(torch.equal(second.run.trained, whole.run.trained), "resumed counts of trained samples")
    expect(
        [*map(kept_of, second.run.history)] == [*map(kept_of, whole.run.history)], "resumed history"
    )
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


@pytest.mark.parametrize("group", range(GROUPS))
def test_drawn_loops(group):
    seeds = range(group, LOOPS, GROUPS)
    assert check_seeds(seeds) < 0.4 * len(seeds)


@pytest.mark.skipif(LOOPS < 1000, reason="make verify runs it")
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
