"""`check_method` checks that a method keeps the contract of methods; authors of methods call it in a test.

    def test_mine() -> None:
        thresher.testing.check_method(Mine(keep=0.3))

Each invariant is a function. The invariants ask the method for plans in hard cases: many ties, single samples, and losses that
are equal, huge, or not finite. The inputs are the same in every run. Global random states are restored afterwards.
"""

import copy
import inspect
import io
import itertools
import math
import pathlib
import pickle
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from thresher import rng
from thresher.methods.contract import (
    STAGES,
    Card,
    State,
    check_declaration,
    defines,
    requirements_of,
)
from thresher.methods.full import FullData
from thresher.plans import BatchPlan, EpochPlan
from thresher.records import EPOCH, Records
from thresher.run.attach import attach
from thresher.score_table import Scores
from thresher.testing.toys import train_steps
from thresher.trees import differing_part, to_device

CPU = torch.device("cpu")
CHECK_EPOCHS = 20
"""Default number of epochs of the training run for which a method is checked."""
CHECK_SAMPLES = 50
"""Default number of samples of the dataset for which a method is checked."""
BATCH_SIZES = (16, 16, 1, 7, 2, 16, 5)
"""Sizes of the successive batches on which a batch method is checked."""

SignalGenerator = Callable[[np.random.Generator, int], NDArray[Any]]
"""Function `(generator, n) -> (n,)` that draws random values of one signal."""


def _errors(r: np.random.Generator, n: int) -> NDArray[Any]:
    """Draws probabilities minus one-hot labels, of 4 classes."""
    return r.dirichlet(np.ones(4), n) - np.eye(4)[r.integers(0, 4, n)]


SIGNAL_GENERATORS: dict[str, SignalGenerator] = {
    **dict.fromkeys(
        ("loss", "grad_norm", "entropy", "batch_loss"), lambda r, n: r.gamma(1.0, 1.0, n)
    ),
    **dict.fromkeys(
        ("confidence", "batch_confidence", "uncertainty", "el2n"), lambda r, n: r.random(n)
    ),
    "margin": lambda r, n: r.uniform(-1, 1, n),
    "label": lambda r, n: r.integers(0, 4, n),
    "correct": lambda r, n: r.random(n) < 0.8,
    "feature": lambda r, n: r.normal(size=(n, 5)),
    "error": _errors,
}


def _round(values: Tensor, r: np.random.Generator) -> Tensor:
    """Rounds values to eighths: there are many ties, and sums are exact in any order."""
    return (values * 8).round() / 8


def _spoil(share: float) -> Callable[[Tensor, np.random.Generator], Tensor]:
    def spoil(values: Tensor, r: np.random.Generator) -> Tensor:
        bad = np.flatnonzero(r.random(len(values)) < share)
        spoilt = _round(values, r)
        shape = (len(bad), *[1] * (values.dim() - 1))
        spoilt[bad] = torch.from_numpy(r.choice([math.nan, math.inf, -math.inf], shape)).float()
        return spoilt

    return spoil


VALUE_KINDS: dict[str, Callable[[Tensor, np.random.Generator], Tensor]] = {
    "tied": _round,
    "smooth": lambda values, r: values,
    "equal": lambda values, r: _round(values, r)[:1].expand_as(values).clone(),
    "zero": lambda values, r: torch.zeros_like(values),
    "huge": lambda values, r: values * 1e30,
    "spoilt": _spoil(0.2),
    "lost": _spoil(1.0),
}
"""Functions that turn random values into a kind of input: many ties, no ties, all equal, all 0, up to 1e31, some not finite,
none finite."""


def draw_signals(
    generators: Mapping[str, SignalGenerator], kind: str, seed: int, n: int
) -> dict[str, Tensor]:
    """Draws values of several signals. The same samples have values that are not finite in every signal.

    Args:
        generators: Function that draws the values, by the name of the signal.
        kind: Kind of values, one of `VALUE_KINDS`.
        seed: Random seed of the values.
        n: Number of values.

    Returns:
        Values by the name of the signal, each of shape (n, ...), float32, bool or int64.

    Example:
        >>> draw_signals(SIGNAL_GENERATORS, "zero", 0, 2)["margin"]
        tensor([0., 0.])
    """
    signals = {}
    for number, name in enumerate(sorted(generators)):
        values = torch.from_numpy(generators[name](np.random.default_rng((number, seed)), n))
        if values.is_floating_point():
            values = VALUE_KINDS[kind](values.float(), np.random.default_rng((seed, n)))
        elif kind in ("equal", "zero"):
            values = torch.zeros_like(values)
        signals[name] = values
    return signals


class ContractError(AssertionError):
    """A method breaks a promise; the message names the method and the promise.

    Example:
        >>> try:
        ...     check_method(3)
        ... except ContractError as error:
        ...     print(error)
        int: has stage = None; it must be one of 'before', 'epoch', 'batch'
    """


def _expect(holds: bool, sentence: str) -> None:
    if not holds:
        raise ContractError(sentence)


@contextmanager
def _asked(question: str) -> Iterator[None]:
    """Turns an exception in the block into a `ContractError`; `question` describes the call."""
    try:
        yield
    except ContractError:
        raise
    except Exception as error:
        raise ContractError(f"{question} raised {type(error).__name__}: {error}") from error


def _same(one: Any, other: Any) -> bool:
    return differing_part(one, other) is None


Plan = EpochPlan | BatchPlan


def _numbers(plan: Plan) -> Tensor:
    return plan.rows if isinstance(plan, BatchPlan) else plan.ids


@dataclass(frozen=True)
class Case:
    """The inputs of one plan.

    Args:
        n: Number of samples to choose from.
        columns: Records or signals by name, each of shape (n, ...).
        number: Number of the epoch or step.
        kind: Kind of the values, for messages.
        state: State of a batch method.
        seed: Random seed of the generator that the method gets.

    Example:
        >>> Case(2, {"loss": torch.ones(2)}).number
        0
    """

    n: int
    columns: Mapping[str, Tensor]
    number: int = 0
    kind: str = "tied"
    state: State = field(default_factory=dict)
    seed: int = 0


QUESTIONS = {
    "before": "a plan with the ids of kept({n})",
    "epoch": "plan_epoch of epoch {number} ({n} samples, {kind})",
    "batch": "plan_batch of step {number} ({n} samples, {kind})",
}


@dataclass(frozen=True)
class Exam:
    """A method to check, and the inputs that the invariants give it.

    Args:
        method: Instance of the method.
        epochs: Number of epochs of the training run for which the method makes plans.
        samples: Number of samples of the dataset.
        signals: Functions that draw values of signals that Thresher does not know, by name.

    Example:
        >>> from thresher import UniformSubset
        >>> [len(plan.ids) for _, plan, _ in Exam(UniformSubset(keep=0.5), epochs=3).series()]
        [25, 25, 25]
    """

    method: Any
    epochs: int = CHECK_EPOCHS
    samples: int = CHECK_SAMPLES
    signals: Mapping[str, SignalGenerator] = field(default_factory=dict)

    @property
    def generators(self) -> dict[str, SignalGenerator]:
        """Functions that draw the signals that the method needs, by name."""
        known = {**SIGNAL_GENERATORS, **self.signals}
        names = set()
        if self.method.stage == "epoch":
            names = self.records(1).signals
        if self.method.stage == "batch":
            names = {"loss", *requirements_of(self.method).signals}
        for name in sorted(names - set(known)):
            raise ValueError(
                f"check_method: {type(self.method).__name__} needs the signal {name!r}; pass a function that draws values of it, "
                f"such as signals={{{name!r}: lambda generator, n: generator.random(n)}}"
            )
        return {name: known[name] for name in names}

    def records(self, n: int) -> Records:
        """Returns records of n samples that were never seen."""
        return Records(self.method.columns(), n, CPU)

    def full_pass(self, epoch: int, n: int, kind: str, seed: int = 0) -> dict[str, Tensor]:
        """Draws the results of the forward pass over all samples that the method asks for before it plans an epoch."""
        if not defines(self.method, "full_pass"):
            return {}
        names = self.method.full_pass(epoch, self.epochs)
        _expect(
            set(names) <= {"error", "feature", "label"},
            f"full_pass asks for {names}; it can ask for 'error', 'feature' and 'label' only",
        )
        return draw_signals(
            {name: SIGNAL_GENERATORS[name] for name in names}, kind, seed + epoch, n
        )

    def drawn(self, case: Case) -> set[str]:
        """Returns the names of the columns of a case with drawn values, rather than ids, epochs and values of plans."""
        columns = self.method.columns() if self.method.stage == "epoch" else {}
        others = {
            name for name, one in columns.items() if one.merge == "plan" or one.signal == EPOCH
        }
        return set(case.columns) - others - {"id"}

    def batch(self, n: int, step: int, kind: str = "tied", seed: int = 0) -> dict[str, Tensor]:
        """Draws the signals of a batch of n samples, with their ids in random order."""
        ids = np.random.default_rng((step, n)).permutation(self.samples)[:n]
        return {
            "id": torch.from_numpy(ids),
            **draw_signals(self.generators, kind, seed + step, n),
        }

    def ask(self, case: Case) -> tuple[Any, State]:
        """Returns a plan and the next state of the method, after checking every promise about a single plan."""
        method = self.method
        generator = rng.seeded(case.seed, case.number)
        next_state: State = {}
        with _asked(QUESTIONS[method.stage].format(**vars(case))):
            if method.stage == "before":
                kept = method.kept(case.n)
                _expect(
                    isinstance(kept, Tensor),
                    f"kept returned {type(kept).__name__}, it must return a tensor of ids",
                )
                plan = EpochPlan(kept)
            elif method.stage == "epoch":
                plan = method.plan_epoch(
                    case.columns, epoch=case.number, epochs=self.epochs, generator=generator
                )
                _expect(
                    isinstance(plan, EpochPlan),
                    f"plan_epoch returned {type(plan).__name__}, it must return a thresher.EpochPlan",
                )
            else:
                plan, next_state = method.plan_batch(
                    case.columns, case.state, step=case.number, generator=generator
                )
                _expect(
                    isinstance(plan, BatchPlan),
                    f"plan_batch returned {type(plan).__name__}, not (thresher.BatchPlan, state)",
                )
            for invariant in PLAN_INVARIANTS[method.stage]:
                invariant(self, case, plan, next_state)
        return plan, next_state

    def series(
        self,
        kind: str = "tied",
        n: int | None = None,
        *,
        seed: int = 0,
        everyone: bool = False,
    ) -> Iterator[tuple[Case, Plan, State]]:
        """Asks the method for a series of plans, each of which follows from the last one.

        Args:
            kind: Kind of the values, one of `VALUE_KINDS`. Default: "tied".
            n: Number of samples. Default: the size of the dataset.
            seed: Random seed of the values. Default: 0.
            everyone: Whether every epoch sees all samples, rather than those that are kept or refreshed. Default: False.

        Yields:
            The inputs, the plan and the next state.
        """
        n = n or self.samples
        if self.method.stage == "before":
            case = Case(self.samples, {})
            yield case, *self.ask(case)
        elif self.method.stage == "batch":
            state = self.method.init_state()
            for step, size in enumerate(BATCH_SIZES):
                rows = min(size, n)
                case = Case(rows, self.batch(rows, step, kind, seed), step, kind, state)
                plan, state = self.ask(case)
                yield case, plan, state
        else:
            records = self.records(n)
            for epoch in range(self.epochs):
                columns = {**records.state_dict(), **self.full_pass(epoch, n, kind, seed)}
                case = Case(n, columns, epoch, kind)
                plan, _ = self.ask(case)
                yield case, plan, {}
                with _asked("what its plan wants to remember"):
                    records.remember(plan.remember)
                records.epoch = epoch
                records.start_epoch()
                refreshed = plan.ids[:0] if plan.refresh is None else plan.refresh
                if everyone:
                    seen = torch.arange(n)
                else:
                    seen = torch.cat([plan.ids, refreshed]).unique()
                values = draw_signals(self.generators, kind, seed + epoch, n)
                with _asked("a merge of its columns"):
                    records.write(seen, {name: column[seen] for name, column in values.items()})

    def series_on(self, device: str) -> Iterator[tuple[Plan, Plan]]:
        """Yields the plans of a series, each with the plan that the method makes from inputs on a device."""
        state = self.method.init_state() if self.method.stage == "batch" else {}
        for case, plan, _ in self.series():
            columns = to_device(case.columns, torch.device(device))
            there, state = self.ask(replace(case, columns=columns, state=state))
            yield plan, there


# Invariants of a single plan


def _is_within_dataset(exam: Exam, case: Case, plan: EpochPlan, next_state: State) -> None:
    plan.check(case.n)


def _has_true_facts(exam: Exam, case: Case, plan: Plan, next_state: State) -> None:
    facts = plan.facts
    for name in ("scheduled_fraction", "actual_fraction"):
        _expect(
            name in facts,
            f"its plan has no fact {name!r}, a share of the samples left out, for the history",
        )
    for name, value in facts.items():
        is_plain = type(value) in (bool, int, float) and math.isfinite(value)
        _expect(
            is_plain, f"its plan has the fact {name!r} = {value!r}; facts are finite plain numbers"
        )
    actual = facts["actual_fraction"]
    dropped = facts.get("dropped_fraction", 0.0)
    left_out = 1 - len(_numbers(plan)) / case.n
    _expect(
        abs(actual + dropped - left_out) <= 1e-6,
        f"its plan has actual_fraction = {actual} and dropped_fraction = {dropped}, but {left_out} of the samples are left out",
    )


def _has_usable_weights(exam: Exam, case: Case, plan: Plan, next_state: State) -> None:
    weights = plan.weights
    if weights is None or weights.is_meta or not weights.numel():
        return
    usable = bool(weights.isfinite().all() and (weights >= 0).all() and weights.any())
    _expect(
        usable,
        f"its plan has weights that are not finite, negative, or all 0: {weights.tolist()}",
    )


def _has_ascending_rows(exam: Exam, case: Case, plan: BatchPlan, next_state: State) -> None:
    rows = plan.rows
    device = case.columns["id"].device
    _expect(rows.device == device, f"its rows are on {rows.device}, its signals on {device}")
    if rows.is_meta:
        return
    _expect(bool((rows.diff() >= 0).all()), f"its rows are not ascending: {rows.tolist()}")
    within = bool(((rows >= 0) & (rows < case.n)).all())
    _expect(within, f"its rows are not within a batch of {case.n}: {rows.tolist()}")


def _has_as_many_rows_as_counted(
    exam: Exam, case: Case, plan: BatchPlan, next_state: State
) -> None:
    count = exam.method.count(case.n)
    _expect(
        count in (None, len(plan.rows)),
        f"count({case.n}) gives {count} rows, plan_batch kept {len(plan.rows)}",
    )


def _returns_new_state(exam: Exam, case: Case, plan: BatchPlan, next_state: State) -> None:
    _expect(
        next_state is not case.state,
        "plan_batch returned the state it was given; the next state is always a new dict",
    )


PLAN_INVARIANTS: dict[str, tuple[Callable[[Exam, Case, Any, State], None], ...]] = {
    "before": (_is_within_dataset,),
    "epoch": (_is_within_dataset, _has_true_facts, _has_usable_weights),
    "batch": (
        _returns_new_state,
        _has_as_many_rows_as_counted,
        _has_true_facts,
        _has_ascending_rows,
        _has_usable_weights,
    ),
}
"""Invariants of every plan, by the stage of the method."""


# Invariants of a method


def _is_frozen(exam: Exam) -> None:
    method = exam.method
    _expect(is_dataclass(method), "is not a dataclass; a method is a frozen dataclass of settings")
    _expect(
        type(method).__dataclass_params__.frozen,  # pyright: ignore[reportAttributeAccessIssue]
        "is not frozen: settings could change while it decides; write @dataclass(frozen=True)",
    )


def _owns_only_settings(exam: Exam) -> None:
    settings = {one.name: getattr(exam.method, one.name) for one in fields(exam.method)}
    for name, value in settings.items():
        owned = _forbidden_type(value)
        _expect(not owned, f"its setting `{name}` owns a {owned}; state belongs to the run")
    extra = sorted(set(getattr(exam.method, "__dict__", ())) - set(settings))
    _expect(
        not extra,
        f"keeps {', '.join(extra)} besides its settings; a method must not store anything itself",
    )


def _forbidden_type(value: Any) -> str:
    """Returns the name of the type of a value that no setting may have; "" if the value is allowed."""
    name = type(value).__name__
    if isinstance(value, tuple | frozenset):
        return next(filter(None, map(_forbidden_type, value)), "")
    plain = (bool, int, float, str, type(None), Scores, pathlib.PurePath, type)
    allowed = isinstance(value, plain) or inspect.isroutine(value) or is_dataclass(value)
    return "" if allowed else name


def _survives_copies(exam: Exam) -> None:
    method = exam.method
    with _asked("hash, pickle or deepcopy"):
        copies = {"pickle": pickle.loads(pickle.dumps(method)), "deepcopy": copy.deepcopy(method)}
        for how, other in copies.items():
            equal = other == method and hash(other) == hash(method)
            _expect(equal, f"{how} gives another method: {other!r}")


def _shows_its_settings(exam: Exam) -> None:
    method = exam.method
    if any(isinstance(getattr(method, one.name), Scores) for one in fields(method)):
        return
    kind = type(method)
    names = {**vars(pathlib), **vars(sys.modules[kind.__module__]), kind.__name__: kind}
    with _asked("eval(repr(method))"):
        _expect(eval(repr(method), names) == method, f"its repr gives another method: {method!r}")


def _has_card(exam: Exam) -> None:
    _expect(
        isinstance(getattr(exam.method, "card", None), Card),
        "has no `card`: add a thresher.methods.contract.Card with facts that the settings do not show",
    )


def _takes_arguments_by_name(exam: Exam) -> None:
    if exam.method.stage == "before":
        return
    name = f"plan_{exam.method.stage}"

    def by_name(owner: Any) -> list[str]:
        parameters = inspect.signature(getattr(owner, name)).parameters.values()
        return [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]

    wanted = by_name(STAGES[exam.method.stage])
    taken = by_name(exam.method)
    _expect(
        taken == wanted,
        f"{name} takes {', '.join(taken) or 'nothing'} by name, not {', '.join(wanted)}",
    )


def _declares_signals_as_a_tuple(exam: Exam) -> None:
    names = requirements_of(exam.method).signals
    _expect(
        isinstance(names, tuple),
        f"`signals` is a {type(names).__name__}, it must be a tuple of names",
    )


def _decides_whether_it_is_active(exam: Exam) -> None:
    if exam.method.stage != "batch" or not defines(exam.method, "active"):
        return
    for step, progress in enumerate((0.0, 0.3, 0.5, 0.999, 1.0)):
        question = f"active({progress}, {step})"
        with _asked(question):
            answer = exam.method.active(progress, step)
        _expect(type(answer) is bool, f"{question} is {answer!r}, it must be True or False")


def _stores_what_its_card_says(exam: Exam) -> None:
    if exam.method.stage == "before":
        return
    settings = fields(exam.method)
    defaults = {
        one.name: one.default for one in settings if one.init and one.default is not MISSING
    }
    default = replace(exam, method=replace(exam.method, **defaults))
    if exam.method.stage == "epoch":
        used = default.records(1).bytes_per_sample
    elif any(one.default is one.default_factory is MISSING for one in settings):
        # A required setting has a value of every sample.
        used = _bytes_of(default.method.init_state()) / exam.samples
    else:
        used = (_bytes_after(default, 1024) - _bytes_after(default, 64)) / (1024 - 64)
    declared = exam.method.card.bytes_per_sample
    _expect(
        abs(used - declared) < 1e-6,
        f"its card says {declared:g} bytes per sample, it takes {used:g}",
    )


def _bytes_after(exam: Exam, samples: int) -> int:
    """Returns the size of the state after 1,024 rows from a dataset."""
    state = exam.method.init_state()
    for step in range(16):
        ids = torch.arange(64) + 64 * step % samples
        columns = {**draw_signals(exam.generators, "tied", step, 64), "id": ids}
        _, state = exam.ask(Case(64, columns, step, state=state))
    return _bytes_of(state)


def _bytes_of(value: Any) -> int:
    """Returns the size of a state in bytes: all elements of its tensors, and 8 bytes for every other value."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(8 * (not isinstance(name, str)) + _bytes_of(one) for name, one in value.items())
    if isinstance(value, list | tuple):
        return sum(map(_bytes_of, value))
    return 8


def _depends_on_its_inputs_alone(exam: Exam) -> None:
    series = []
    for seed, method in ((1, exam.method), (1, copy.deepcopy(exam.method)), (2, exam.method)):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        before = rng.capture(CPU)
        series.append(list(replace(exam, method=method).series()))
        _expect(
            rng.equal(before, rng.capture(CPU)),
            "draws from global random state (torch, NumPy or random); draw from `generator`",
        )
    first, again, reseeded = series
    _expect(
        _same(first, again),
        "answers differently to the same question: it draws or remembers something of its own",
    )
    _expect(
        _same(first, reseeded), "its answer depends on global random state (torch, NumPy or random)"
    )
    list(exam.series("smooth"))
    _expect(
        _same(first, list(exam.series())),
        "answers differently after other questions: it keeps state outside",
    )


def _plans_for_every_input(exam: Exam) -> None:
    sizes = ((exam.samples, False), (exam.samples, True), (1, False))
    for kind, (n, everyone) in itertools.product(VALUE_KINDS, sizes):
        list(exam.series(kind, n, everyone=everyone))


def _keeps_what_is_not_finite(exam: Exam) -> None:
    # A method with a budget keeps the same number of samples, however many have no finite value.
    if requirements_of(exam.method).smaller_batches:
        return
    series = zip(exam.series(everyone=True), exam.series(seed=100, everyone=True), strict=True)
    for (case, plan, _), (other, *_) in series:
        values = {name: other.columns[name] for name in exam.drawn(case)}
        other_plan, _ = exam.ask(replace(case, columns={**case.columns, **values}))
        firsts = () if _same(plan, other_plan) else (case.n - case.n // 5, 0)
        for first, value in itertools.product(firsts, (math.nan, math.inf, -math.inf)):
            _keeps_spoilt(exam, case, first, value)


def _keeps_spoilt(exam: Exam, case: Case, first: int, value: float) -> None:
    """Sets the values of all samples from the first one on, and checks that these samples are kept."""
    columns = {name: one.clone() for name, one in case.columns.items()}
    floats = [name for name in exam.drawn(case) if columns[name].is_floating_point()]
    for name in floats:
        columns[name][first:] = value
    plan, _ = exam.ask(replace(case, columns=columns))
    kept = int((_numbers(plan).unique() >= first).sum())
    budget = exam.method.count(case.n) if exam.method.stage == "batch" else None
    _expect(
        not floats or kept == min(case.n - first, budget or case.n),
        f"leaves out samples whose signals are {value}; samples without a finite score are kept before all others",
    )


def _leaves_inputs_alone(exam: Exam) -> None:
    what = "signals" if exam.method.stage == "batch" else "records"
    for case, *_ in exam.series("spoilt", everyone=True):
        before = copy.deepcopy(case)
        plan, next_state = exam.ask(case)
        _expect(_same(case.columns, before.columns), f"changes the {what} it is given")
        _expect(
            _same(case.state, before.state),
            "changes the state it is given; the next state is a new dict of new tensors",
        )
        answer = copy.deepcopy((plan, next_state))
        passed_on = {id(value) for value in next_state.values()}
        for value in (*case.columns.values(), *case.state.values()):
            if isinstance(value, Tensor) and id(value) not in passed_on:
                value.zero_()
        _expect(
            _same((plan, next_state), answer),
            f"its plan or its state holds on to the {what}: it changes when they do",
        )


def _stride(case: Case) -> Case:
    return replace(
        case,
        columns={name: torch.stack([one, one], -1)[..., 0] for name, one in case.columns.items()},
    )


def _permute(case: Case) -> Case:
    if "id" not in case.columns:
        return case
    order = torch.randperm(case.n, generator=rng.seeded(case.number))
    return replace(case, columns={name: one[order] for name, one in case.columns.items()})


def _reload(case: Case) -> Case:
    if case.state:
        return replace(case, state=_save_and_load(case.state))
    return case


def _save_and_load(state: Any) -> Any:
    buffer = io.BytesIO()
    try:
        torch.save(state, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=True)
    except Exception as error:
        raise ContractError(
            f"its state does not load with weights_only=True ({type(error).__name__}); keep tensors and plain values in it"
        ) from error


SAME_CHOICE: dict[Callable[[Case], Case], str] = {
    _permute: "another order of a batch's rows gives other samples, weights or states",
    _stride: "inputs that are not contiguous in memory give another plan",
    _reload: "answers differently after its state was saved and loaded",
}
"""Functions that return the same values in another form, or the same object if they do not apply; and the complaint about a
method that then chooses differently."""


def _chooses_the_same_from_equal_inputs(exam: Exam) -> None:
    """Asks again with the same values in another form; the form must not matter."""
    for change_form, complaint in SAME_CHOICE.items():
        for kind in ("tied", "equal", "spoilt"):
            for case, plan, next_state in exam.series(kind, everyone=True):
                changed = change_form(case)
                # The same object comes back if there is nothing to change, such as no state to reload.
                if changed is case:
                    continue
                same = _same(_choice(changed, *exam.ask(changed)), _choice(case, plan, next_state))
                _expect(same, f"{complaint} ({kind} values)")


def _choice(case: Case, plan: Plan, next_state: State) -> Any:
    """Returns what does not depend on the order of rows: the chosen samples, their weights, and the next state."""
    if isinstance(plan, EpochPlan):
        return plan
    ids = case.columns["id"][plan.rows].tolist()
    weights = [1.0] * len(ids) if plan.weights is None else plan.weights.tolist()
    return sorted(zip(ids, weights, strict=True)), next_state


def _breaks_ties_by_id(exam: Exam) -> None:
    """Permutes samples but keeps the order of tied ones; a plan that draws nothing must keep the same samples as before."""
    if exam.method.stage != "epoch" or defines(exam.method, "full_pass"):
        return
    n = 200
    r = np.random.default_rng(0)
    grades = r.integers(0, 5, n)
    source = np.empty(n, dtype=np.int64)
    source[np.argsort(r.permutation(grades), kind="stable")] = np.argsort(grades, kind="stable")
    records = exam.records(n)
    if "plan" in {column.merge for column in records.columns.values()}:
        return
    graded = draw_signals(exam.generators, "smooth", 0, 5)
    records.write(torch.arange(n), {name: values[grades] for name, values in graded.items()})
    for epoch in range(exam.epochs):
        case = Case(n, dict(records), epoch, "graded")
        permuted = replace(case, columns={name: one[source] for name, one in records.items()})
        (plan, _), (reseeded, _), (moved, _) = map(
            exam.ask, (case, replace(case, seed=1), permuted)
        )
        _expect(
            not _same(plan, reseeded)
            or set(source[_numbers(moved)].tolist()) == set(_numbers(plan).tolist()),
            "breaks ties by something else than (value, id): use a stable order",
        )


def _never_waits_for_the_device(exam: Exam) -> None:
    if exam.method.stage != "batch" or exam.method.count(16) is None:
        return
    try:
        list(exam.series_on("meta"))
    except ContractError as error:
        cause = error.__cause__
        if cause is None:
            raise
        raise ContractError(
            "plan_batch waits for the device: it reads values of a tensor (`.item()`, `.cpu()`, `if tensor`, `nonzero`, a "
            f"boolean mask as an index), or mixes devices. On tensors without values: {type(cause).__name__}: {cause}"
        ) from cause


def _chooses_the_same_on_a_gpu(exam: Exam) -> None:
    if not torch.cuda.is_available():
        return
    for here, there in exam.series_on("cuda"):
        _expect(
            _numbers(here).tolist() == _numbers(there).tolist(),
            "chooses differently if its inputs are on a GPU",
        )


class _Training:
    """A linear model on a small problem, with the method attached."""

    EPOCHS = 4

    def __init__(self, exam: Exam, forward_passes: Any) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(exam.samples, 6, dtype=torch.float32, generator=generator)
        self.y = (self.x @ torch.randn(6, 3, dtype=torch.float32, generator=generator)).argmax(1)
        torch.manual_seed(0)
        self.model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.3, momentum=0.5)
        own = set(exam.generators) - set(SIGNAL_GENERATORS)
        self.run = attach(
            [exam.method, FullData()] if exam.method.stage == "before" else exam.method,
            loader=DataLoader(TensorDataset(self.x, self.y), 8, shuffle=True),
            criterion=nn.CrossEntropyLoss(),
            model=self.model,
            optimizer=optimizer,
            epochs=self.EPOCHS,
            signals=(lambda outputs, _: {name: outputs.square().mean(1) for name in own})
            if own
            else None,
            forward_passes=forward_passes,
        )
        self.parts = {"model": self.model, "optimizer": optimizer, "run": self.run}
        self.log: list[tuple[int, list[int], float, float]] = []
        self.steps = train_steps(self.run, optimizer, self.EPOCHS)

    def train(self, steps: int | None = None) -> None:
        for loss in itertools.islice(self.steps, steps):
            run = self.run
            self.log.append((run.epoch, run.ids.tolist(), loss.item(), run.plan.lr_scale))

    def loss(self, model: nn.Module) -> float:
        """Returns the mean loss over the samples that were trained on."""
        ids = sorted({i for _, of_batch, *_ in self.log for i in of_batch})
        with torch.no_grad():
            return nn.functional.cross_entropy(model(self.x[ids]), self.y[ids]).item()

    def result(self) -> Any:
        """Returns what a resumed and an uninterrupted run must agree on."""
        run = self.run
        return dict(self.model.state_dict()), self.log, dict(run.records), run.plan, run.history


def _lowers_the_loss_and_resumes(exam: Exam) -> None:
    signals = requirements_of(exam.method).signals if exam.method.stage == "batch" else ()
    ways = ("once", "twice") if signals else ("auto",)
    # The forward pass of the loop does not give the feature.
    for way in ("twice",) if "feature" in signals else ways:
        with _asked("a training with it attached"):
            whole = _Training(exam, way)
            start = copy.deepcopy(whole.model)
            whole.train()
        before = whole.loss(start)
        after = whole.loss(whole.model)
        _expect(
            after < before,
            f"training does not lower the loss: {before:.3f} before, {after:.3f} after",
        )
        with _asked("saving and resuming its training"):
            first = _Training(exam, way)
            epochs = [epoch for epoch, *_ in whole.log]
            first.train(epochs.index(2) + max(1, epochs.count(2) // 2))
            state = {name: part.state_dict() for name, part in first.parts.items()}
            checkpoint = _save_and_load(state)
            resumed = _Training(exam, way)
            torch.manual_seed(99)
            for name, part in resumed.parts.items():
                part.load_state_dict(checkpoint[name])
            resumed.log = first.log
            resumed.train()
        _expect(
            _same(whole.result(), resumed.result()),
            "a run that is resumed in the middle of an epoch differs from an uninterrupted run",
        )
        for training in (whole, first, resumed):
            training.run.detach()


INVARIANTS: tuple[Callable[[Exam], None], ...] = (
    _is_frozen,
    _owns_only_settings,
    _survives_copies,
    _shows_its_settings,
    _has_card,
    _takes_arguments_by_name,
    _declares_signals_as_a_tuple,
    _decides_whether_it_is_active,
    _stores_what_its_card_says,
    _depends_on_its_inputs_alone,
    _plans_for_every_input,
    _keeps_what_is_not_finite,
    _leaves_inputs_alone,
    _chooses_the_same_from_equal_inputs,
    _breaks_ties_by_id,
    _never_waits_for_the_device,
    _chooses_the_same_on_a_gpu,
    _lowers_the_loss_and_resumes,
)
"""Every invariant, in the order in which they are checked."""


def _check_stage(method: Any) -> None:
    if isinstance(method, type):
        raise ContractError(
            f"{method.__name__}: is a class; check an instance, {method.__name__}()"
        )
    name = type(method).__name__
    stage = getattr(method, "stage", None)
    if stage not in STAGES:
        raise ContractError(
            f"{name}: has stage = {stage!r}; it must be one of {', '.join(map(repr, STAGES))}"
        )
    members = {*dir(STAGES[stage]), *STAGES[stage].__annotations__}
    missing = sorted(one for one in members if one[0] != "_" and not hasattr(method, one))
    if missing:
        raise ContractError(f"{name}: has stage = {stage!r} but lacks {', '.join(missing)}")
    try:
        check_declaration(method)
    except TypeError as error:
        raise ContractError(str(error)) from error


def check_method(
    method: Any,
    *,
    signals: Mapping[str, SignalGenerator] | None = None,
    epochs: int = CHECK_EPOCHS,
    samples: int = CHECK_SAMPLES,
) -> None:
    """Checks every promise of a method: its declaration, its choices in hard cases, and a training run with it.

    Args:
        method: Instance of the method, of any stage.
        signals: Functions `(generator, n) -> (n,)` that draw values of signals that Thresher does not know, by name;
            `generator` is a `numpy.random.Generator`. Default: None.
        epochs: Number of epochs of the training run for which the method makes plans; choose it so that the method leaves out
            samples. Default: 20.
        samples: Size of the dataset, for a method that needs to know it (such as one with a score of every sample).
            Default: 50.

    Raises:
        ContractError: The method breaks a promise; the message names the method and the promise.
        ValueError: The method needs a signal that Thresher does not know and that `signals` lacks.

    Example:
        >>> from thresher import SelectiveBackprop
        >>> class Misspelt(SelectiveBackprop):
        ...     def actve(self, progress, step):
        ...         return progress > 0.1
        >>> try:
        ...     check_method(Misspelt(keep=0.5))
        ... except AssertionError as error:
        ...     print(str(error).split(". ")[0])
        Misspelt.actve is neither a setting nor part of the interface of methods; the nearest name is 'active'
    """
    _check_stage(method)
    exam = Exam(method, epochs, samples, signals or {})
    _ = exam.generators  # reports an unknown signal first
    with rng.undisturbed(CPU), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for invariant in INVARIANTS:
            try:
                invariant(exam)
            except ContractError as error:
                raise ContractError(f"{type(method).__name__}: {error}") from error.__cause__
