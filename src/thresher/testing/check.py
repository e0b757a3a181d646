"""The contract of a method, checked on an instance. Third parties run it on their own methods, whatever their stage.

    def test_mine() -> None:
        thresher.testing.check_method(Mine(keep=0.3))

The questions are hard on purpose: ties everywhere, single samples, equal losses, huge ones, ones that are not finite. They
are the same in every run. Nothing is left behind: global random states are put back.
"""

import copy
import dataclasses
import inspect
import itertools
import math
import pathlib
import pickle
import random
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thresher import rng
from thresher.methods.card import Card
from thresher.methods.contract import State, requirements_of
from thresher.records import EPOCH
from thresher.testing.subjects import (
    CPU,
    EPOCHS,
    KINDS,
    SAMPLES,
    SIZES,
    BatchSubject,
    BeforeSubject,
    ContractError,
    Draw,
    EpochSubject,
    Subject,
    content,
    examined,
    graded,
    plain,
)
from thresher.testing.training import Training, saved

PLAIN = (bool, int, float, str, type(None))

Check = Callable[..., None]
CHECKS: list[tuple[Check, tuple[str, ...]]] = []
"""Every check, in the order they are made, and the stages it is for."""


def _promise(*stages: str) -> Callable[[Callable[[Any], None]], Check]:
    """Make a check of a method out of one of a subject: nothing it draws or warns of is left behind."""

    def register(function: Callable[[Any], None]) -> Check:
        @wraps(function)
        def check(
            method: Any, *, signals: Mapping[str, Draw] | None = None, epochs: int = EPOCHS, samples: int = SAMPLES
        ) -> None:
            with rng.undisturbed(CPU), warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                function(examined(method, signals, epochs, samples))

        CHECKS.append((check, stages))
        return check

    return register


def check_method(
    method: Any, *, signals: Mapping[str, Draw] | None = None, epochs: int = EPOCHS, samples: int = SAMPLES
) -> None:
    """Check everything that a method promises: what it is, what it answers to hard questions, and that it trains.

    Args:
        method: An instance, of any stage.
        signals: Signals that Thresher does not know: name to `(numpy generator, n) -> (n,) values`.
        epochs: Length of the training it is asked about; choose it such that the method acts.
        samples: Size of the dataset, where the method knows it (scores of every sample).

    Raises:
        ContractError: It breaks a promise; the message says which.
        ValueError: It needs a signal that is neither known nor given.
    """
    subject = examined(method, signals, epochs, samples)
    for check, stages in CHECKS:
        if method.stage in stages:
            check(subject.method, signals=signals, epochs=epochs, samples=samples)


# What it is


@_promise("before", "epoch", "batch")
def check_value(subject: Subject) -> None:
    """It is a frozen dataclass without tensors or random state, and repr, pickle and copies give it back."""
    method = subject.method
    subject.expect(dataclasses.is_dataclass(method), "is not a dataclass; a method is a frozen dataclass of settings")
    frozen = type(method).__dataclass_params__.frozen  # pyright: ignore[reportAttributeAccessIssue]
    subject.expect(frozen, "is not frozen: settings could change while it decides; write @dataclass(frozen=True)")
    for field in dataclasses.fields(method):
        owned = _owned(getattr(method, field.name))
        subject.expect(not owned, f"its setting `{field.name}` owns a {owned}; state belongs to the run")
    extra = sorted(set(getattr(method, "__dict__", ())) - {field.name for field in dataclasses.fields(method)})
    subject.expect(not extra, f"keeps {', '.join(extra)} beside its settings; a method remembers nothing itself")
    with subject.asked("hash, pickle or deepcopy"):
        again = {"pickle": pickle.loads(pickle.dumps(method)), "deepcopy": copy.deepcopy(method)}
        for how, other in again.items():
            subject.expect(other == method and hash(other) == hash(method), f"{how} gives another method: {other!r}")
    if not any(_is_scores(getattr(method, field.name)) for field in dataclasses.fields(method)):
        with subject.asked("eval(repr(method))"):
            names = {**vars(pathlib), **vars(sys.modules[type(method).__module__]), type(method).__name__: type(method)}
            subject.expect(eval(repr(method), names) == method, f"its repr gives another method: {method!r}")


def _is_scores(value: Any) -> bool:
    return type(value).__module__.startswith("thresher.scores")


def _owned(value: Any) -> str:
    """The kind of a thing that no setting may be; "" where there is none."""
    if isinstance(value, (*PLAIN, pathlib.PurePath, type)) or inspect.isroutine(value) or _is_scores(value):
        return ""
    if isinstance(value, tuple | frozenset):
        return next(filter(None, map(_owned, value)), "")
    return "" if dataclasses.is_dataclass(value) else type(value).__name__


@_promise("before", "epoch", "batch")
def check_interface(subject: Subject) -> None:
    """It has a card, and its functions take what the run gives."""
    method = subject.method
    card = getattr(method, "card", None)
    subject.expect(isinstance(card, Card), "has no `card`, a thresher.methods.card.Card that says what its settings do not")
    if method.stage == "before":
        return
    function = method.plan_epoch if method.stage == "epoch" else method.plan_batch
    wanted = {"epoch": ["epoch", "epochs", "generator"], "batch": ["step", "generator"]}[method.stage]
    parameters = inspect.signature(function).parameters.values()
    named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    subject.expect(
        named == wanted, f"{function.__name__} takes {', '.join(named) or 'nothing'} by name, not {', '.join(wanted)}"
    )
    if method.stage == "batch":
        names = requirements_of(method).signals
        subject.expect(isinstance(names, tuple), f"`signals` is a {type(names).__name__}, it must be a tuple of names")
        _check_active(subject)


def _check_active(subject: Subject) -> None:
    if not requirements_of(subject.method).active:
        return
    for step, progress in enumerate((0.0, 0.3, 0.5, 0.999, 1.0)):
        with subject.asked(f"active({progress}, {step})"):
            answer = subject.method.active(progress, step)
        subject.expect(type(answer) is bool, f"active({progress}, {step}) is {answer!r}, it must be True or False")


@_promise("epoch", "batch")
def check_bytes(subject: Subject) -> None:
    """What it remembers of every sample by its default settings is what its card says."""
    defaults = {
        f.name: f.default for f in dataclasses.fields(subject.method) if f.init and f.default is not dataclasses.MISSING
    }
    default = subject.of(dataclasses.replace(subject.method, **defaults))
    declared, used = subject.method.card.bytes_per_sample, _used(default)
    subject.expect(abs(used - declared) < 1e-6, f"its card says {declared:g} bytes a sample, it takes {used:g}")


def _used(subject: Subject) -> float:
    if isinstance(subject, EpochSubject):
        return subject.table(1).bytes_per_sample
    assert isinstance(subject, BatchSubject)
    if any(field.default is field.default_factory is dataclasses.MISSING for field in dataclasses.fields(subject.method)):
        return _bytes_of(subject.method.init_state()) / subject.samples  # it was told of every sample
    few, many, size = 64, 1024, 64
    taken = []
    for samples in (few, many):
        state = subject.method.init_state()
        for step in range(many // size):
            ids = torch.arange(size) + (step * size) % samples
            _, state = subject.ask({**subject.batch(size, step, samples=samples), "id": ids}, state, step)
        taken.append(_bytes_of(state))
    return (taken[1] - taken[0]) / (many - few)


def _bytes_of(value: Any) -> int:
    """What a state takes: tensors by their elements, everything else 8 bytes a value."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(8 * (not isinstance(name, str)) + _bytes_of(one) for name, one in value.items())
    if isinstance(value, list | tuple):
        return sum(_bytes_of(one) for one in value)
    return 8


# What it answers


def _random_states() -> Any:
    return plain(rng.capture(CPU))


@_promise("before", "epoch", "batch")
def check_random_states(subject: Subject) -> None:
    """Its draws come from the generator it is given: global random states are neither used nor touched."""
    said = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        before = _random_states()
        said.append(subject.answers())
        subject.expect(
            before == _random_states(), "draws from global random state (torch, NumPy or random); draw from `generator`"
        )
    subject.expect(said[0] == said[1], "its answer depends on global random state (torch, NumPy or random)")


@_promise("before", "epoch", "batch")
def check_determinism(subject: Subject) -> None:
    """The same question has the same answer: of copies, and of the method itself after other questions."""
    first = subject.answers()
    for _ in range(2):
        again = subject.of(copy.deepcopy(subject.method)).answers()
        subject.expect(again == first, "answers differently to the same question: it draws or remembers something of its own")
    subject.answers("smooth")
    subject.expect(subject.answers() == first, "answers differently after other questions: it keeps state outside")


@_promise("epoch", "batch")
def check_plans(subject: Subject) -> None:
    """Every answer is a valid plan: to ties, equal values, huge ones, some or all not finite, and to one sample."""
    for kind in KINDS:
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


@_promise("before")
def check_kept(subject: BeforeSubject) -> None:
    """What it keeps are ids of the dataset, ascending, at least one."""
    subject.ask()


@_promise("epoch", "batch")
def check_not_finite(subject: Subject) -> None:
    """A sample without a finite value is kept: never hidden by plans of epochs, before all others in a batch."""
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
            survey = {name: table.clone() for name, table in subject.surveyed(epoch, subject.samples).items()}
            for table in survey.values():
                if table.is_floating_point():
                    table[bad] = value
            if not (floats or survey):
                continue
            hidden = set(bad.tolist()) - set(subject.ask({**records, **survey}, epoch).ids.tolist())
            subject.expect(not hidden, f"hides samples whose loss is {value}; what has no finite score is kept")


def _check_batch_not_finite(subject: BatchSubject) -> None:
    if not requirements_of(subject.method).signals:
        return
    bad = torch.tensor([2, 5, 9])
    signals = subject.batch(20, 3)
    for name, values in signals.items():
        if values.is_floating_point():
            values[bad] = torch.tensor([math.nan, math.inf, -math.inf])
            signals[name] = values
    for step in range(3):
        plan, _ = subject.ask(signals, subject.method.init_state(), step)
        kept = set(plan.rows.tolist()) & set(bad.tolist())
        subject.expect(
            len(kept) == min(len(bad), subject.method.count(20) or len(bad)),
            "leaves out samples without a finite score while it keeps others; they come before all others",
        )


@_promise("epoch", "batch")
def check_inputs(subject: Subject) -> None:
    """What it is given is neither changed nor held on to."""
    if isinstance(subject, BatchSubject):
        _check_batch_inputs(subject)
    elif isinstance(subject, EpochSubject):
        _check_epoch_inputs(subject)


def _check_epoch_inputs(subject: EpochSubject) -> None:
    for epoch in range(subject.epochs):
        given = {**subject.seen("spoilt"), **subject.surveyed(epoch, subject.samples)}
        before = plain(given)
        plan = subject.ask(given, epoch)
        subject.expect(plain(given) == before, "changes the records it is given")
        said = content(plan)
        for values in given.values():
            values.zero_()
        subject.expect(content(plan) == said, "its plan holds on to the records: it changes when they do")


def _check_batch_inputs(subject: BatchSubject) -> None:
    state = subject.steps()[1]
    signals = subject.batch(16, 9, "spoilt")
    before, remembered = plain(signals), plain(state)
    plan, after = subject.ask(signals, state, 5)
    subject.expect(plain(signals) == before, "changes the signals it is given")
    subject.expect(plain(state) == remembered, "changes the state it is given; the next state is a new dict of new tensors")
    said, known = content(plan), plain(after)
    unchanged = {id(value) for name, value in after.items() if value is state.get(name)}
    for tensor in (*signals.values(), *(v for v in state.values() if isinstance(v, Tensor) and id(v) not in unchanged)):
        tensor.zero_()
    held = (content(plan), plain(after)) != (said, known)
    subject.expect(not held, "its plan or its state holds on to the signals: it changes when they do")


@_promise("epoch", "batch")
def check_order(subject: Subject) -> None:
    """Who is chosen depends on values and ids alone: not on the order of rows, on strides, or on how a sort treats ties."""
    if isinstance(subject, BatchSubject):
        _check_rows(subject)
    elif isinstance(subject, EpochSubject):
        _check_strides(subject)
        _check_ties(subject)


def _strided(values: Tensor) -> Tensor:
    """The same values, every second element of memory that holds others in between."""
    wide = torch.zeros(*values.shape, 2, dtype=values.dtype)
    wide[..., 0] = values
    return wide[..., 0]


def _check_rows(subject: BatchSubject) -> None:
    state = subject.steps()[1]
    for kind in ("tied", "equal", "spoilt"):
        signals = subject.batch(16, 3, kind)
        expected = _chosen(subject, signals, state)
        for seed in range(5):
            order = torch.randperm(16, generator=rng.seeded(seed))
            permuted = {name: values[order] for name, values in signals.items()}
            same = _chosen(subject, permuted, state) == expected
            subject.expect(same, f"another order of a batch's rows gives other samples, weights or states ({kind} values)")
        same = _chosen(subject, {name: _strided(values) for name, values in signals.items()}, state) == expected
        subject.expect(same, "signals that are not contiguous in memory give other samples")


def _chosen(subject: BatchSubject, signals: Mapping[str, Tensor], state: State) -> Any:
    """Samples with their weights, in the order of their ids, and the next state."""
    plan, after = subject.ask(signals, state, 5)
    ids = signals["id"][plan.rows].tolist()
    weights = [1.0] * len(ids) if plan.weights is None else plan.weights.tolist()
    return sorted(zip(ids, weights, strict=True)), plain(after)


def _check_strides(subject: EpochSubject) -> None:
    records = subject.seen()
    strided = {name: _strided(values) for name, values in records.items()}
    for epoch in range(subject.epochs):
        same = content(subject.ask(records, epoch)) == content(subject.ask(strided, epoch))
        subject.expect(same, "columns that are not contiguous in memory give another plan")


def _check_ties(subject: EpochSubject) -> None:
    """Samples change places, those of equal values in the order they have; so does the plan, where nothing is drawn."""
    n = 200
    r = np.random.default_rng(0)
    grades = r.integers(0, 5, n)
    moved = r.permutation(grades)
    to = np.empty(n, dtype=np.int64)
    to[np.argsort(grades, kind="stable")] = np.argsort(moved, kind="stable")
    tables = []
    for labels in (grades, moved):
        table = subject.table(n)
        table.write(torch.arange(n), graded(subject.draws, labels))
        tables.append(table)
    plain = "plan" not in {column.merge for column in tables[0].columns.values()}
    for epoch in range(subject.epochs if plain and not requirements_of(subject.method).full_pass else 0):
        here, there = (subject.ask(table, epoch, n=n) for table in tables)
        drawn = content(subject.ask(tables[0], epoch, n=n, seed=1)) != content(here)
        same = set(to[here.ids.numpy()].tolist()) == set(there.ids.tolist())
        subject.expect(drawn or same, "breaks ties by something else than (value, id): use a stable order")


@_promise("epoch", "batch")
def check_state(subject: Subject) -> None:
    """What is remembered saves, loads with weights_only=True, and gives the same answers then."""
    if isinstance(subject, EpochSubject):
        records = subject.seen("spoilt")
        loaded = subject.table()
        loaded.load_state_dict(saved(subject, records.state_dict()))
        for epoch in range(subject.epochs):
            same = content(subject.ask(loaded, epoch)) == content(subject.ask(records, epoch))
            subject.expect(same, "answers differently after its records were saved and loaded")
    if isinstance(subject, BatchSubject):
        said, _ = subject.steps()
        state = subject.method.init_state()
        for step in range(3):
            _, state = subject.ask(subject.batch(SIZES[step], step), state, step)
        again, _ = subject.steps(state=saved(subject, state), start=3)
        subject.expect(again == said[3:], "answers differently after its state was saved and loaded")


# On a device


@_promise("batch")
def check_waiting(subject: BatchSubject) -> None:
    """Nothing in a step waits for the device, where the number of rows is known before: asked with tensors without values."""
    if subject.method.count(16) is None:
        return
    state = subject.method.init_state()
    for step in range(3):
        signals = {name: values.to("meta") for name, values in subject.batch(16, step).items()}
        try:
            _, state = subject.ask(signals, state, step, hold=False)
        except ContractError as error:
            cause = error.__cause__
            if cause is None:
                raise
            subject.fail(
                "plan_batch waits for the device: it reads values of a tensor (`.item()`, `.cpu()`, `if tensor`, `nonzero`, a "
                f"boolean mask as an index), or mixes devices. On tensors without values: {type(cause).__name__}: {cause}"
            )


@_promise("epoch", "batch")
def check_device(subject: Subject) -> None:
    """Where CUDA is available the answers are those of the CPU."""
    if not torch.cuda.is_available():
        return
    if isinstance(subject, EpochSubject):
        records = subject.seen()
        for epoch in range(subject.epochs):
            given = {**records, **subject.surveyed(epoch, subject.samples)}
            there = subject.ask({name: values.cuda() for name, values in given.items()}, epoch)
            same = there.ids.tolist() == subject.ask(given, epoch).ids.tolist()
            subject.expect(same, "plans otherwise where the records live on a GPU")
    if isinstance(subject, BatchSubject):
        states = [subject.method.init_state(), subject.method.init_state()]
        for step, n in enumerate(SIZES):
            signals = subject.batch(n, step)
            here, states[0] = subject.ask(signals, states[0], step)
            there, states[1] = subject.ask({name: values.cuda() for name, values in signals.items()}, states[1], step)
            subject.expect(there.rows.tolist() == here.rows.tolist(), "chooses otherwise where the signals are on a GPU")


# In training


@_promise("before", "epoch", "batch")
def check_training(subject: Subject) -> None:
    """It trains a model attached, and goes on from a state saved in the middle of an epoch as if nothing had been."""
    passes = [{}]
    if isinstance(subject, BatchSubject) and requirements_of(subject.method).signals:
        passes = [{"forward_passes": "once"}, {"forward_passes": "twice"}]
    for settings in passes:
        with subject.asked("a training with it attached"):
            whole = Training(subject, **settings)
            before = whole.loss()
            whole.train()
        for epoch, ids in whole.planned.items() if not isinstance(subject, BatchSubject) else ():
            seen = sorted(i for entry in whole.log if entry[0] == epoch for i in entry[1])
            subject.expect(seen == sorted(ids), f"epoch {epoch} trains on other samples than its plan has")
        subject.expect(
            whole.loss() < before, f"training does not lower the loss: {before:.3f} before, {whole.loss():.3f} after"
        )
        with subject.asked("saving and resuming its training"):
            first = Training(subject, **settings)
            steps = [entry[0] for entry in whole.log].count(2)
            first.train(stop=(2, max(1, steps // 2)))
            saved = first.save(subject)
            second = Training(subject, **settings)
            torch.manual_seed(99)
            second.load(saved)
            second.train()
        same = [*first.log, *second.log] == whole.log and second.result() == whole.result()
        subject.expect(same, "a training resumed in the middle of an epoch goes on otherwise than one that was not interrupted")
        for training in (whole, first, second):
            training.run.detach()
