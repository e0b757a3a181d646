"""Checks of the answers of a method: where its random numbers come from, and what its plans are for hard questions."""

import copy
import itertools
import math
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thresher import rng
from thresher.methods.contract import State, requirements_of
from thresher.records import EPOCH
from thresher.testing.promise import promise
from thresher.testing.questions import CPU, VALUE_KINDS, comparable, comparable_plan, graded_signals
from thresher.testing.subjects import BatchSubject, BeforeSubject, EpochSubject, Subject


def _random_states() -> Any:
    return comparable(rng.capture(CPU))


@promise("before", "epoch", "batch")
def check_random_states(subject: Subject) -> None:
    """Checks that a method draws from the generator it is given, and neither reads nor changes global random states.

    Args:
        subject: Method under examination; callers pass the method itself.

    Example:
        >>> import thresher
        >>> class Global(thresher.UniformSubset):
        ...     def plan_epoch(self, records, *, epoch, epochs, generator):
        ...         return super().plan_epoch(records, epoch=epoch, epochs=epochs, generator=torch.default_generator)
        >>> try:
        ...     check_random_states(Global(keep=0.5))
        ... except AssertionError as error:
        ...     print(error)
        Global: draws from global random state (torch, NumPy or random); draw from `generator`
    """
    answers = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        before = _random_states()
        answers.append(subject.answers())
        subject.expect(
            before == _random_states(), "draws from global random state (torch, NumPy or random); draw from `generator`"
        )
    subject.expect(answers[0] == answers[1], "its answer depends on global random state (torch, NumPy or random)")


@promise("before", "epoch", "batch")
def check_determinism(subject: Subject) -> None:
    """Checks that the same question has the same answer: from copies of a method, and from itself after other questions.

    Args:
        subject: Method under examination; callers pass the method itself.

    Example:
        >>> import thresher
        >>> class Unseeded(thresher.UniformSubset):
        ...     def plan_epoch(self, records, *, epoch, epochs, generator):
        ...         fresh = torch.Generator()
        ...         fresh.seed()
        ...         return super().plan_epoch(records, epoch=epoch, epochs=epochs, generator=fresh)
        >>> try:
        ...     check_determinism(Unseeded(keep=0.5))
        ... except AssertionError as error:
        ...     print(error)
        Unseeded: answers differently to the same question: it draws or remembers something of its own
    """
    first = subject.answers()
    for _ in range(2):
        again = subject.of(copy.deepcopy(subject.method)).answers()
        subject.expect(again == first, "answers differently to the same question: it draws or remembers something of its own")
    subject.answers("smooth")
    subject.expect(subject.answers() == first, "answers differently after other questions: it keeps state outside")


@promise("epoch", "batch")
def check_plans(subject: Subject) -> None:
    """Checks that every answer is a valid plan, for values that are tied, equal, huge or not finite, and for one sample.

    Args:
        subject: Method under examination; callers pass the method itself.

    Example:
        >>> import thresher
        >>> class Backwards(thresher.BigLoss):
        ...     def plan_batch(self, signals, state, *, step, generator):
        ...         plan, after = super().plan_batch(signals, state, step=step, generator=generator)
        ...         return thresher.BatchPlan(plan.rows.flip(0), facts=plan.facts), after
        >>> try:
        ...     check_plans(Backwards(keep=0.3))
        ... except AssertionError as error:
        ...     print(error)
        Backwards: its rows are not ascending: [12, 10, 9, 8]
    """
    for kind in VALUE_KINDS:
        subject.answers(kind)
        if isinstance(subject, EpochSubject):
            many, one = subject.seen(kind), subject.seen(kind, 1)
            for epoch in range(subject.epochs):
                subject.ask(many, epoch, kind=kind)
                plan = subject.ask(one, epoch, n=1, kind=kind)
                subject.expect(set(plan.ids.tolist()) == {0}, "leaves out the only sample there is")
        if isinstance(subject, BatchSubject):
            for n in (1, 2, 7):
                subject.ask(subject.batch(n, n, kind), subject.method.init_state(), 0)


@promise("before")
def check_kept(subject: BeforeSubject) -> None:
    """Checks that a method keeps at least one sample, and returns ids of the dataset in ascending order.

    Args:
        subject: Method under examination; callers pass the method itself.

    Example:
        >>> import thresher
        >>> class Nothing(thresher.Prune):
        ...     def kept(self, n):
        ...         return torch.arange(0)
        >>> scores = thresher.scores.Scores(torch.arange(50), torch.arange(50.0))
        >>> try:
        ...     check_kept(Nothing(scores, keep=0.5))
        ... except AssertionError as error:
        ...     print(error)
        Nothing: kept(50) is not ascending within the dataset, or empty: []
    """
    subject.ask()


@promise("epoch", "batch")
def check_not_finite(subject: Subject) -> None:
    """Checks that a sample without a finite value is kept: by every epoch plan, and before all other rows of a batch.

    Args:
        subject: Method under examination; callers pass the method itself.

    Example:
        >>> import thresher
        >>> class NanLast(thresher.BigLoss):
        ...     def scores(self, signals):
        ...         return signals["loss"].nan_to_num(nan=-1.0, posinf=-1.0, neginf=-1.0)
        >>> try:
        ...     check_not_finite(NanLast(keep=0.5))
        ... except AssertionError as error:
        ...     print(error)
        NanLast: leaves out samples without a finite score while it keeps others; such samples come first
    """
    if isinstance(subject, BatchSubject):
        _check_batch_not_finite(subject)
    elif isinstance(subject, EpochSubject):
        _check_epoch_not_finite(subject)


def _check_epoch_not_finite(subject: EpochSubject) -> None:
    n = subject.samples
    columns = subject.table(1).columns
    epochs = [epoch for epoch in range(subject.epochs) if subject.reads_values(epoch)]
    for value, bad in itertools.product((math.nan, math.inf, -math.inf), (torch.arange(n - n // 5, n), torch.arange(n))):
        records = subject.seen()
        floats = [name for name in records.written if records[name].is_floating_point() and columns[name].signal != EPOCH]
        for name in floats:
            records[name][bad] = value
        for epoch in epochs:
            full_pass = {name: column.clone() for name, column in subject.full_pass(epoch, subject.samples).items()}
            for column in full_pass.values():
                if column.is_floating_point():
                    column[bad] = value
            if not (floats or full_pass):
                continue
            hidden = set(bad.tolist()) - set(subject.ask({**records, **full_pass}, epoch).ids.tolist())
            subject.expect(not hidden, f"hides samples whose loss is {value}; a sample without a finite score must be kept")


def _check_batch_not_finite(subject: BatchSubject) -> None:
    if not requirements_of(subject.method).signals:
        return
    bad = torch.tensor([2, 5, 9])
    signals = subject.batch(20, 3)
    for name, values in signals.items():
        if values.is_floating_point():
            values[bad] = torch.tensor([math.nan, math.inf, -math.inf]).view(-1, *[1] * (values.dim() - 1))
            signals[name] = values
    for step in range(3):
        plan, _ = subject.ask(signals, subject.method.init_state(), step)
        kept = set(plan.rows.tolist()) & set(bad.tolist())
        subject.expect(
            len(kept) == min(len(bad), subject.method.count(20) or len(bad)),
            "leaves out samples without a finite score while it keeps others; such samples come first",
        )


@promise("epoch", "batch")
def check_order(subject: Subject) -> None:
    """Checks that a choice depends on values and ids only, not on row order, strides, or the order in which a sort puts ties.

    Args:
        subject: Method under examination; callers pass the method itself.

    Example:
        >>> import thresher
        >>> class ByRow(thresher.BigLoss):
        ...     def plan_batch(self, signals, state, *, step, generator):
        ...         rows = torch.arange(len(signals["id"]))
        ...         return super().plan_batch({**signals, "id": rows}, state, step=step, generator=generator)
        >>> try:
        ...     check_order(ByRow(keep=0.5))
        ... except AssertionError as error:
        ...     print(error)
        ByRow: another order of a batch's rows gives other samples, weights or states (equal values)
    """
    if isinstance(subject, BatchSubject):
        _check_rows(subject)
    elif isinstance(subject, EpochSubject):
        _check_strides(subject)
        _check_ties(subject)


def _strided(values: Tensor) -> Tensor:
    """Returns the same values as every second element of a larger tensor."""
    wide = torch.zeros(*values.shape, 2, dtype=values.dtype)
    wide[..., 0] = values
    return wide[..., 0]


def _check_rows(subject: BatchSubject) -> None:
    state = subject.steps()[1]
    for kind in ("tied", "equal", "spoilt"):
        signals = subject.batch(16, 3, kind)
        expected = _chosen_samples(subject, signals, state)
        for seed in range(5):
            order = torch.randperm(16, generator=rng.seeded(seed))
            permuted = {name: values[order] for name, values in signals.items()}
            same = _chosen_samples(subject, permuted, state) == expected
            subject.expect(same, f"another order of a batch's rows gives other samples, weights or states ({kind} values)")
        strided = {name: _strided(values) for name, values in signals.items()}
        same = _chosen_samples(subject, strided, state) == expected
        subject.expect(same, "signals that are not contiguous in memory give other samples")


def _chosen_samples(subject: BatchSubject, signals: Mapping[str, Tensor], state: State) -> Any:
    """Returns the ids of the chosen samples with their weights, in ascending order, and the next state."""
    plan, after = subject.ask(signals, state, 5)
    ids = signals["id"][plan.rows].tolist()
    weights = [1.0] * len(ids) if plan.weights is None else plan.weights.tolist()
    return sorted(zip(ids, weights, strict=True)), comparable(after)


def _check_strides(subject: EpochSubject) -> None:
    records = subject.seen()
    strided = {name: _strided(values) for name, values in records.items()}
    for epoch in range(subject.epochs):
        same = comparable_plan(subject.ask(records, epoch)) == comparable_plan(subject.ask(strided, epoch))
        subject.expect(same, "columns that are not contiguous in memory give another plan")


def _check_ties(subject: EpochSubject) -> None:
    """Permutes samples but keeps the order of tied ones; a plan that draws nothing must keep the permuted samples."""
    n = 200
    r = np.random.default_rng(0)
    grades = r.integers(0, 5, n)
    permuted = r.permutation(grades)
    to = np.empty(n, dtype=np.int64)
    to[np.argsort(grades, kind="stable")] = np.argsort(permuted, kind="stable")
    tables = []
    for labels in (grades, permuted):
        table = subject.table(n)
        table.write(torch.arange(n), graded_signals(subject.generators, labels))
        tables.append(table)
    by_values = "plan" not in {column.merge for column in tables[0].columns.values()}
    for epoch in range(subject.epochs if by_values and not requirements_of(subject.method).full_pass else 0):
        here, there = (subject.ask(table, epoch, n=n) for table in tables)
        draws = comparable_plan(subject.ask(tables[0], epoch, n=n, seed=1)) != comparable_plan(here)
        same = set(to[here.ids.numpy()].tolist()) == set(there.ids.tolist())
        subject.expect(draws or same, "breaks ties by something else than (value, id): use a stable order")
