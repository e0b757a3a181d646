"""`check_method` checks that a method keeps the contract of methods; authors of methods call it in a test.

    def test_mine() -> None:
        thresher.testing.check_method(Mine(keep=0.3))

The checks ask the method for plans in hard cases: many ties, single samples, and losses that are equal, huge, or not finite.
The inputs are the same in every run. Global random states are restored afterwards.
"""

import copy
import dataclasses
import inspect
import io
import itertools
import math
import pathlib
import pickle
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from thresher import rng
from thresher.methods.contract import (
    BatchMethod,
    BeforeMethod,
    Card,
    EpochMethod,
    State,
    check_declaration,
    defines,
    requirements_of,
)
from thresher.methods.full import FullData
from thresher.passes.scoring_settings import Scoring
from thresher.plans import BatchPlan, EpochPlan
from thresher.records import EPOCH, Records
from thresher.run.attach import attach
from thresher.score_table import Scores

CPU = torch.device("cpu")

SignalGenerator = Callable[[np.random.Generator, int], NDArray[Any]]
"""Function `(generator, n) -> (n,)` that draws random values of one signal."""

SIGNAL_GENERATORS: dict[str, SignalGenerator] = {
    "loss": lambda r, n: r.gamma(1.0, 1.0, n),
    "grad_norm": lambda r, n: r.gamma(1.0, 0.5, n),
    "alignment": lambda r, n: r.normal(size=n),
    "el2n": lambda r, n: r.uniform(0, math.sqrt(2), n),
    "entropy": lambda r, n: r.gamma(1.0, 0.5, n),
    "uncertainty": lambda r, n: r.random(n),
    "margin": lambda r, n: r.uniform(-1, 1, n),
    "confidence": lambda r, n: r.random(n),
    "batch_confidence": lambda r, n: r.random(n),
    "batch_loss": lambda r, n: r.gamma(4.0, 0.25, n),
    "label": lambda r, n: r.integers(0, 4, n),
    "correct": lambda r, n: r.random(n) < 0.8,
}
VALUE_KINDS = ("tied", "smooth", "equal", "zero", "huge", "spoilt", "lost")
"""Kinds of values, in this order: rounded to eighths (many ties), not rounded, all equal, all 0, up to 1e31, some not finite,
none finite."""


def signal_values(generator: SignalGenerator, kind: str, seed: tuple[int, ...], n: int) -> Tensor:
    """Draws values of one signal. With the same seed, the same samples have values that are not finite in every signal.

    Args:
        generator: Function that draws the values.
        kind: Kind of values, one of `VALUE_KINDS`.
        seed: Integers that seed the values; the first is the number of the signal.
        n: Number of values.

    Returns:
        Values, shape (n,), float32, bool or int64.

    Example:
        >>> signal_values(SIGNAL_GENERATORS["loss"], "equal", (0, 1), 3)
        tensor([2.5000, 2.5000, 2.5000])
    """
    r = np.random.default_rng(seed)
    values = np.asarray(generator(r, n))
    if values.dtype == np.bool_:
        return torch.from_numpy(np.ones(n, dtype=np.bool_) if kind in ("equal", "zero") else values)
    if values.dtype.kind == "i":
        return torch.from_numpy(values.astype(np.int64) * (kind not in ("equal", "zero")))
    values = values.astype(np.float32)
    if kind != "smooth":
        values = np.round(values * 8) / 8  # sums of eighths are exact in any order
    if kind in ("equal", "zero"):
        values = np.full(n, 0.0 if kind == "zero" else values[0])
    if kind == "huge":
        values = values * np.float32(1e30)
    places = np.random.default_rng([*seed[1:], n])
    if kind in ("spoilt", "lost"):
        bad = places.random(n) < (0.2 if kind == "spoilt" else 2.0)
        values[bad] = places.choice([math.nan, math.inf, -math.inf], int(bad.sum()))
    return torch.from_numpy(values.astype(np.float32))


def signals_of_kind(
    generators: Mapping[str, SignalGenerator], kind: str, seed: int, n: int
) -> dict[str, Tensor]:
    """Draws values of several signals.

    Args:
        generators: Function that draws the values, by the name of the signal.
        kind: Kind of values, one of `VALUE_KINDS`.
        seed: Random seed of the values.
        n: Number of values.

    Returns:
        Values by the name of the signal, each of shape (n,).

    Example:
        >>> signals_of_kind(SIGNAL_GENERATORS, "zero", 0, 2)["margin"]
        tensor([0., 0.])
    """
    return {
        name: signal_values(generator, kind, (i, seed), n)
        for i, (name, generator) in enumerate(sorted(generators.items()))
    }


def graded_signals(names: Iterable[str], grades: NDArray[Any]) -> dict[str, Tensor]:
    """Makes signals that rise or fall together: samples of the same grade are tied in all of them.

    Args:
        names: Names of the signals.
        grades: Grades of the samples, shape (n,), integers 0 to 4; a higher grade is harder.

    Returns:
        Values by the name of the signal, each of shape (n,).

    Example:
        >>> graded_signals(["confidence"], np.array([0, 4, 0]))
        {'confidence': tensor([0.8750, 0.3750, 0.8750])}
    """
    rising = torch.from_numpy((grades + 1) / 8).float()
    falling = {"confidence": 1 - rising, "margin": 1 - rising, "correct": rising < 0.5}
    return {name: falling.get(name, rising) for name in names}


def full_pass_columns(kind: str, seed: tuple[int, ...], n: int) -> dict[str, Tensor]:
    """Draws the results of a full pass over n samples by a classifier of 4 classes.

    Args:
        kind: Kind of values, one of `VALUE_KINDS`.
        seed: Random seed of the values.
        n: Number of samples.

    Returns:
        "error": probabilities minus one-hot labels, shape (n, 4); "feature": shape (n, 5), both float32; "label": shape (n,),
        int64.

    Example:
        >>> {name: tuple(column.shape) for name, column in full_pass_columns("tied", (0, 0), 3).items()}
        {'error': (3, 4), 'feature': (3, 5), 'label': (3,)}
    """
    r = np.random.default_rng(seed)
    chances = np.exp(r.normal(size=(n, 4)))
    error = chances / chances.sum(1, keepdims=True) - np.eye(4)[r.integers(0, 4, n)]
    scale = signal_values(lambda _, k: np.ones(k), kind, seed, n)[:, None]
    columns = {"error": error, "feature": r.normal(size=(n, 5))}
    label = torch.from_numpy(error.argmin(1))
    if kind == "equal":
        columns = {name: np.broadcast_to(rows[:1], rows.shape) for name, rows in columns.items()}
    if kind != "smooth":
        columns = {name: np.round(rows * 8) / 8 for name, rows in columns.items()}
    return {
        name: torch.tensor(rows, dtype=torch.float32) * scale for name, rows in columns.items()
    } | {"label": label}


def comparable(value: Any) -> Any:
    """Returns a copy that `==` compares bit by bit, except that all NaN are equal and -0.0 equals 0.0.

    Args:
        value: Tensor, plain value, or nested dicts, lists and tuples of these.

    Example:
        >>> comparable({"a": torch.tensor([0.0])}) == comparable({"a": torch.tensor([-0.0])})
        True
    """
    if isinstance(value, Tensor):
        if value.is_floating_point():
            value = torch.where(value.isnan(), torch.nan, value + 0.0)
        plain = value.float() if value.dtype is torch.bfloat16 else value  # NumPy has no bfloat16
        return str(value.dtype), tuple(value.shape), plain.detach().cpu().numpy().tobytes()
    if isinstance(value, dict):
        return {name: comparable(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [comparable(one) for one in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def comparable_plan(plan: EpochPlan | BatchPlan) -> Any:
    """Returns the contents of a plan as a copy that can be compared with `==`.

    Args:
        plan: Plan of an epoch or a batch.

    Example:
        >>> comparable_plan(BatchPlan(torch.tensor([0, 2]))) == comparable_plan(BatchPlan(torch.tensor([0, 1])))
        False
    """
    contents = {
        name: dict(value) if isinstance(value, Mapping) else value
        for name, value in vars(plan).items()
    }
    return comparable(contents)


CHECK_EPOCHS = 20
"""Default number of epochs of the training run for which a method is checked."""
CHECK_SAMPLES = 50
"""Default number of samples of the dataset for which a method is checked."""
OF_A_PASS = {"error", "feature"}
"""Signals with several numbers per sample, which `full_pass_columns` draws."""
BATCH_SIZES = (16, 16, 1, 16, 16, 5)
"""Sizes of the successive batches on which a batch method is checked."""


class ContractError(AssertionError):
    """A method breaks a promise; the message names the method and the promise.

    Example:
        >>> try:
        ...     subject_of(3, None, 20, 50)
        ... except ContractError as error:
        ...     print(error)
        int: has stage = None; it must be one of 'epoch', 'batch', 'before'
    """


class Subject:
    """A method to check, and the inputs that the checks give it.

    Args:
        method: Instance of the method.
        signals: Functions `(generator, n) -> (n,)` that draw values of signals that Thresher does not know, by name.
        epochs: Number of epochs of the training run for which the method makes plans.
        samples: Number of samples of the dataset.

    Raises:
        ValueError: The method needs a signal that Thresher does not know and that `signals` lacks.

    Example:
        >>> from thresher import UniformSubset
        >>> len(EpochSubject(UniformSubset(keep=0.5), None, epochs=20, samples=50).answers())
        20
    """

    def __init__(
        self, method: Any, signals: Mapping[str, SignalGenerator] | None, epochs: int, samples: int
    ) -> None:
        self.method = method
        self.signals = signals
        self.epochs = epochs
        self.samples = samples
        self.name = type(method).__name__
        self.generators: dict[str, SignalGenerator] = {}
        known = {**SIGNAL_GENERATORS, **(signals or {})}
        for wanted in sorted(self.needs() - OF_A_PASS):
            if wanted not in known:
                raise ValueError(
                    f"check_method: {self.name} needs the signal {wanted!r}; pass a function that draws values of it, such as "
                    f"signals={{{wanted!r}: lambda generator, n: generator.random(n)}}"
                )
            self.generators[wanted] = known[wanted]

    def needs(self) -> set[str]:
        """Returns the names of the signals that the method needs."""
        return set()

    def of(self, method: Any) -> "Subject":
        """Returns a subject with another instance of the method, and the same inputs."""
        return type(self)(method, self.signals, self.epochs, self.samples)

    def answers(self, kind: str = "tied") -> list[Any]:
        """Asks the method for a fixed series of plans, and returns them as copies that `==` can compare.

        Args:
            kind: Kind of the signals that the method gets, one of `VALUE_KINDS`. Default: "tied".
        """
        raise NotImplementedError

    def fail(self, sentence: str) -> NoReturn:
        """Raises the error that names a broken promise.

        Args:
            sentence: Rest of the sentence that starts with the name of the method.
        """
        raise ContractError(f"{self.name}: {sentence}")

    def expect(self, holds: bool, sentence: str) -> None:
        """Raises `ContractError` with this sentence if a condition does not hold."""
        if not holds:
            self.fail(sentence)

    @contextmanager
    def asked(self, question: str) -> Iterator[None]:
        """Turns an exception in the block into a `ContractError`; `question` describes the call, for the message."""
        try:
            yield
        except ContractError:
            raise
        except Exception as error:
            raise ContractError(
                f"{self.name}: {question} raised {type(error).__name__}: {error}"
            ) from error

    def check_facts(self, facts: Mapping[str, Any], actual: float) -> None:
        """Checks that the facts of a plan are plain finite numbers, and have the correct fractions of samples left out.

        Args:
            facts: Facts of a plan.
            actual: Share of the samples that the plan leaves out.
        """
        for name in ("scheduled_fraction", "actual_fraction"):
            self.expect(
                name in facts,
                f"its plan has no fact {name!r}, a share of the samples left out, for the history",
            )
        for name, value in facts.items():
            is_plain = type(value) in (bool, int, float) and math.isfinite(value)
            self.expect(
                is_plain,
                f"its plan has the fact {name!r} = {value!r}; facts are finite plain numbers",
            )
        dropped = facts.get("dropped_fraction", 0.0)
        if abs(facts["actual_fraction"] + dropped - actual) > 1e-6:
            said = f"actual_fraction = {facts['actual_fraction']}" + (
                f" and dropped_fraction = {dropped}" if dropped else ""
            )
            self.fail(f"its plan has {said}, but {actual} of the samples are left out")

    def check_weights(self, weights: Tensor | None) -> None:
        """Checks that weights are finite and not negative, and that not all are 0."""
        if weights is None or not weights.numel():
            return
        sound = (
            bool(weights.isfinite().all()) and bool((weights >= 0).all()) and bool(weights.any())
        )
        self.expect(
            sound,
            f"its plan has weights that are not finite, negative, or all 0: {weights.tolist()}",
        )


class EpochSubject(Subject):
    """A method to check that makes a plan before each epoch.

    Example:
        >>> from thresher import UniformSubset
        >>> subject = EpochSubject(UniformSubset(keep=0.5), None, epochs=20, samples=50)
        >>> len(subject.ask(subject.seen(), epoch=3).ids)
        25
    """

    def needs(self) -> set[str]:
        """Returns the names of the signals that the columns of the method store."""
        return Records(self.method.columns(), 1, CPU).signals

    def table(self, n: int | None = None) -> Records:
        """Returns records of samples that were never seen.

        Args:
            n: Number of samples. Default: the size of the dataset.
        """
        return Records(self.method.columns(), self.samples if n is None else n, CPU)

    def seen(self, kind: str = "tied", n: int | None = None, *, seed: int = 0) -> Records:
        """Returns records as they are after a few epochs of full training.

        Args:
            kind: Kind of values, one of `VALUE_KINDS`. Default: "tied".
            n: Number of samples. Default: the size of the dataset.
            seed: Random seed of the values. Default: 0.
        """
        table = self.table(n)
        everyone = torch.arange(self.samples if n is None else n)
        for epoch in range(3):
            table.epoch = epoch
            table.start_epoch()
            table.write(
                everyone, signals_of_kind(self.generators, kind, seed + epoch, len(everyone))
            )
        return table

    def full_pass(
        self, epoch: int, n: int, kind: str = "tied", *, seed: int = 0
    ) -> dict[str, Tensor]:
        """Returns generated results of the forward pass over all samples that the method asks for before it plans an epoch.

        Args:
            epoch: Number of the epoch.
            n: Number of samples.
            kind: Kind of values, one of `VALUE_KINDS`. Default: "tied".
            seed: Random seed of the values. Default: 0.
        """
        names = (
            self.method.full_pass(epoch, self.epochs) if defines(self.method, "full_pass") else ()
        )
        self.expect(
            set(names) <= {"error", "feature", "label"},
            f"full_pass asks for {names}; it can ask for 'error', 'feature' and 'label' only",
        )
        columns = full_pass_columns(kind, (9, seed + epoch), n) if names else {}
        return {name: columns[name] for name in names}

    def ask(
        self,
        records: Mapping[str, Tensor],
        epoch: int,
        *,
        n: int | None = None,
        seed: int = 0,
        kind: str = "tied",
    ) -> EpochPlan:
        """Returns the plan of an epoch, after checking every promise about a single plan.

        Args:
            records: Values by column, each of shape (n,); columns of a full pass that are missing are added.
            epoch: Number of the epoch.
            n: Number of samples. Default: the size of the dataset.
            seed: Random seed of the generator that the method gets. Default: 0.
            kind: Kind of values of the full pass, one of `VALUE_KINDS`. Default: "tied".
        """
        n = self.samples if n is None else n
        with self.asked(f"plan_epoch of epoch {epoch} ({n} samples, {kind})"):
            inputs = {
                **records,
                **{k: v for k, v in self.full_pass(epoch, n, kind).items() if k not in records},
            }
            generator = rng.seeded(seed, epoch)
            plan = self.method.plan_epoch(
                inputs, epoch=epoch, epochs=self.epochs, generator=generator
            )
            self.expect(
                isinstance(plan, EpochPlan),
                f"plan_epoch returned {type(plan).__name__}, it must return a thresher.EpochPlan",
            )
            plan.check(n)
        self.check_weights(plan.weights)
        self.check_facts(plan.facts, 1 - len(plan.ids) / n)
        return plan

    def answers(self, kind: str = "tied") -> list[Any]:
        """Returns the plans of a whole training run in which only kept and refreshed samples are seen."""
        table = self.table()
        plans = []
        for epoch in range(self.epochs):
            plan = self.ask(table, epoch, kind=kind)
            plans.append(comparable_plan(plan))
            with self.asked("what its plan wants to remember"):
                table.remember(plan.remember)
            table.epoch = epoch
            table.start_epoch()
            seen = torch.cat(
                [plan.ids, plan.ids[:0] if plan.refresh is None else plan.refresh]
            ).unique()
            values = signals_of_kind(self.generators, kind, epoch, self.samples)
            with self.asked("a merge of its columns"):
                table.write(seen, {name: column[seen] for name, column in values.items()})
        return plans

    def reads_values(self, epoch: int) -> bool:
        """Checks whether the plan of an epoch depends on the records or the full pass at all."""
        questions = (
            {**self.seen(seed=i), **self.full_pass(epoch, self.samples, seed=i)} for i in (0, 100)
        )
        one, other = (comparable_plan(self.ask(question, epoch)) for question in questions)
        return one != other


class BatchSubject(Subject):
    """A method to check that chooses within each batch.

    Example:
        >>> from thresher import SelectiveBackprop
        >>> subject = BatchSubject(SelectiveBackprop(keep=0.5), None, epochs=20, samples=50)
        >>> plan, _ = subject.ask(subject.batch(8, seed=0), subject.method.init_state(), step=0)
        >>> len(plan.rows)
        4
    """

    def needs(self) -> set[str]:
        """Returns "loss" and the names of the signals that the method declares."""
        return {"loss", *requirements_of(self.method).signals}

    def batch(
        self, n: int, seed: int, kind: str = "tied", samples: int | None = None
    ) -> dict[str, Tensor]:
        """Returns the signals of n samples, with their ids in random order.

        Args:
            n: Number of samples in the batch.
            seed: Random seed of the values and ids.
            kind: Kind of values, one of `VALUE_KINDS`. Default: "tied".
            samples: Number of samples of the dataset. Default: that of this subject.
        """
        ids = np.random.default_rng([seed, n]).permutation(samples or self.samples)[:n]
        wide = {*requirements_of(self.method).signals} & OF_A_PASS
        columns = full_pass_columns(kind, (9, seed), len(ids)) if wide else {}
        signals = {
            **signals_of_kind(self.generators, kind, seed, len(ids)),
            **{name: columns[name] for name in sorted(wide)},
        }
        return {"id": torch.from_numpy(ids.astype(np.int64)), **signals}

    def ask(
        self,
        signals: Mapping[str, Tensor],
        state: State,
        step: int,
        *,
        seed: int = 0,
        check_values: bool = True,
    ) -> tuple[BatchPlan, State]:
        """Returns the plan of a batch and the next state, after checking every promise about a single plan.

        Args:
            signals: Values by signal, each of shape (n,).
            state: State that the method returned last.
            step: Number of the step.
            seed: Random seed of the generator that the method gets. Default: 0.
            check_values: Whether to check the values of rows and weights, which tensors on the meta device lack.
                Default: True.
        """
        n = len(signals["id"])
        with self.asked(f"plan_batch of {n} samples"):
            plan, after = self.method.plan_batch(
                signals, state, step=step, generator=rng.seeded(seed, step)
            )
        self.expect(
            isinstance(plan, BatchPlan),
            f"plan_batch returned {type(plan).__name__}, not (thresher.BatchPlan, state)",
        )
        self.expect(
            after is not state,
            "plan_batch returned the state it was given; the next state is always a new dict",
        )
        count = self.method.count(n)
        self.expect(
            count is None or count == len(plan.rows),
            f"count({n}) gives {count} rows, plan_batch kept {len(plan.rows)}",
        )
        self.check_facts(plan.facts, 1 - len(plan.rows) / n)
        rows = plan.rows
        self.expect(
            rows.device == signals["id"].device,
            f"its rows are on {rows.device}, its signals on {signals['id'].device}",
        )
        if check_values and rows.numel():
            self.expect(
                bool((rows[1:] >= rows[:-1]).all()), f"its rows are not ascending: {rows.tolist()}"
            )
            within = bool(rows[0] >= 0) and bool(rows[-1] < n)
            self.expect(within, f"its rows are not within a batch of {n}: {rows.tolist()}")
            self.check_weights(plan.weights)
        return plan, after

    def steps(
        self, kind: str = "tied", state: State | None = None, start: int = 0
    ) -> tuple[list[Any], State]:
        """Runs the method on a fixed series of batches; returns plans and states as copies to compare, and the last state.

        Args:
            kind: Kind of values, one of `VALUE_KINDS`. Default: "tied".
            state: State before the first of these batches. Default: the initial state.
            start: Number of the first of these batches. Default: 0.
        """
        now: State = self.method.init_state() if state is None else state
        answers = []
        for step in range(start, len(BATCH_SIZES)):
            plan, now = self.ask(
                self.batch(min(BATCH_SIZES[step], self.samples), step, kind), now, step
            )
            answers.append([comparable_plan(plan), comparable(now)])
        return answers, now

    def answers(self, kind: str = "tied") -> list[Any]:
        """Returns the plans and states of a few batches."""
        return self.steps(kind)[0]


class BeforeSubject(Subject):
    """A method to check that chooses before training.

    Example:
        >>> from thresher import Prune
        >>> from thresher.scores import Scores
        >>> method = Prune(Scores(torch.arange(4), torch.tensor([3.0, 1.0, 2.0, 4.0])), keep=0.5)
        >>> BeforeSubject(method, None, epochs=20, samples=4).ask()
        tensor([0, 3])
    """

    def ask(self) -> Tensor:
        """Returns the ids of the samples that the method keeps, after checking every promise about them."""
        with self.asked(f"kept({self.samples})"):
            ids = self.method.kept(self.samples)
        self.expect(
            isinstance(ids, Tensor),
            f"kept returned {type(ids).__name__}, it must return a tensor of ids",
        )
        self.expect(
            ids.dtype == torch.int64 and ids.dim() == 1,
            f"kept returned {ids.dtype} of shape {tuple(ids.shape)}, ids are int64 of one dimension",
        )
        sound = (
            len(ids) > 0
            and bool((ids[1:] > ids[:-1]).all())
            and int(ids[0]) >= 0
            and int(ids[-1]) < self.samples
        )
        self.expect(
            sound,
            f"kept({self.samples}) is not ascending within the dataset, or empty: {ids.tolist()}",
        )
        return ids

    def answers(self, kind: str = "tied") -> list[Any]:
        """Returns the ids of the samples that the method keeps."""
        return self.ask().tolist()


SUBJECTS = {
    "epoch": (EpochSubject, EpochMethod),
    "batch": (BatchSubject, BatchMethod),
    "before": (BeforeSubject, BeforeMethod),
}


def subject_of(
    method: Any, signals: Mapping[str, SignalGenerator] | None, epochs: int, samples: int
) -> Subject:
    """Checks the stage and the declaration of a method, and wraps it in the `Subject` of its stage.

    Args:
        method: Instance of the method.
        signals: Functions that draw values of signals that Thresher does not know, by name; as in `check_method`.
        epochs: Number of epochs of the training run for which the method makes plans.
        samples: Number of samples of the dataset.

    Raises:
        ContractError: `method` is a class, has an unknown stage, lacks a function of its stage, or its declaration `requires`
            does not match its functions and attributes.
        ValueError: The method needs a signal that Thresher does not know and that `signals` lacks.

    Example:
        >>> from thresher import UniformSubset
        >>> type(subject_of(UniformSubset(keep=0.5), None, epochs=20, samples=50)).__name__
        'EpochSubject'
    """
    name = type(method).__name__
    stage = getattr(method, "stage", None)
    if isinstance(method, type):
        raise ContractError(
            f"{method.__name__}: is a class; check an instance, {method.__name__}()"
        )
    if stage not in SUBJECTS:
        raise ContractError(
            f"{name}: has stage = {stage!r}; it must be one of {', '.join(map(repr, SUBJECTS))}"
        )
    kind, protocol = SUBJECTS[stage]
    if not isinstance(method, protocol):
        members = sorted(
            name for name in {*dir(protocol), *protocol.__annotations__} if not name.startswith("_")
        )
        missing = [member for member in members if not hasattr(method, member)]
        raise ContractError(f"{name}: has stage = {stage!r} but lacks {', '.join(missing)}")
    try:
        check_declaration(method)
    except TypeError as error:
        raise ContractError(str(error)) from error
    return kind(method, signals, epochs, samples)


class Check:
    """A check of one promise of methods; call it with the arguments of `thresher.testing.check_method`.

    Args:
        examine: Function of a `Subject` that raises `ContractError` if the promise is broken.
        stage_names: Stages whose methods make the promise.

    Example:
        >>> from thresher import UniformSubset
        >>> @promise("epoch")
        ... def check_keep(subject):
        ...     subject.expect(subject.method.keep > 0.5, "keeps half of the samples or less")
        >>> check_keep(UniformSubset(keep=0.3))
        Traceback (most recent call last):
        ...
        thresher.testing.check.ContractError: UniformSubset: keeps half of the samples or less
    """

    def __init__(self, examine: Callable[[Any], None], stage_names: tuple[str, ...]) -> None:
        update_wrapper(self, examine)
        self._examine = examine
        self.stage_names = stage_names

    def __call__(
        self,
        method: Any,
        *,
        signals: Mapping[str, SignalGenerator] | None = None,
        epochs: int = CHECK_EPOCHS,
        samples: int = CHECK_SAMPLES,
    ) -> None:
        """Checks a method.

        Args:
            method: Instance of the method, of one of the stages of this check.
            signals: Functions that draw values of signals that Thresher does not know, by name. Default: None.
            epochs: Number of epochs of the training run for which the method makes plans. Default: 20.
            samples: Number of samples of the dataset. Default: 50.

        Raises:
            ContractError: The method breaks the promise.
        """
        with rng.undisturbed(CPU), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            self._examine(subject_of(method, signals, epochs, samples))


def promise(*stage_names: str) -> Callable[[Callable[[Any], None]], Check]:
    """Returns a decorator that turns a function of a `Subject` into a `Check`.

    Args:
        *stage_names: Stages whose methods must pass the check: "before", "epoch" or "batch".

    Example:
        >>> @promise("batch", "epoch")
        ... def check_nothing(subject):
        ...     '''Checks nothing.'''
        >>> check_nothing.__doc__, check_nothing.stage_names
        ('Checks nothing.', ('batch', 'epoch'))
    """
    return lambda examine: Check(examine, stage_names)


PLAIN_TYPES = (bool, int, float, str, type(None))
"""Types of plain values."""


@promise("before", "epoch", "batch")
def check_value(subject: Subject) -> None:
    """Checks that a method is a frozen dataclass without tensors or random state; repr, pickle and deepcopy must reproduce it.

    Args:
        subject: Method to check, an instance.

    Example:
        >>> import thresher
        >>> @dataclasses.dataclass(frozen=True)
        ... class Listed(thresher.UniformSubset):
        ...     ids: list = dataclasses.field(default_factory=list)
        >>> check_value(Listed(keep=0.5))
        Traceback (most recent call last):
        ...
        thresher.testing.check.ContractError: Listed: its setting `ids` owns a list; state belongs to the run
    """
    method = subject.method
    subject.expect(
        dataclasses.is_dataclass(method),
        "is not a dataclass; a method is a frozen dataclass of settings",
    )
    frozen = type(method).__dataclass_params__.frozen  # pyright: ignore[reportAttributeAccessIssue]
    subject.expect(
        frozen,
        "is not frozen: settings could change while it decides; write @dataclass(frozen=True)",
    )
    for field in dataclasses.fields(method):
        owned = _forbidden_type(getattr(method, field.name))
        subject.expect(
            not owned, f"its setting `{field.name}` owns a {owned}; state belongs to the run"
        )
    extra = sorted(
        set(getattr(method, "__dict__", ())) - {field.name for field in dataclasses.fields(method)}
    )
    subject.expect(
        not extra,
        f"keeps {', '.join(extra)} besides its settings; a method must not store anything itself",
    )
    with subject.asked("hash, pickle or deepcopy"):
        again = {"pickle": pickle.loads(pickle.dumps(method)), "deepcopy": copy.deepcopy(method)}
        for how, other in again.items():
            subject.expect(
                other == method and hash(other) == hash(method),
                f"{how} gives another method: {other!r}",
            )
    if not any(
        isinstance(getattr(method, field.name), Scores) for field in dataclasses.fields(method)
    ):
        with subject.asked("eval(repr(method))"):
            names = {
                **vars(pathlib),
                **vars(sys.modules[type(method).__module__]),
                type(method).__name__: type(method),
            }
            subject.expect(
                eval(repr(method), names) == method, f"its repr gives another method: {method!r}"
            )


def _forbidden_type(value: Any) -> str:
    """Returns the name of the type of a value that no setting may have; "" if the value is allowed."""
    if isinstance(value, (*PLAIN_TYPES, Scores, pathlib.PurePath, type)) or inspect.isroutine(
        value
    ):
        return ""
    if isinstance(value, tuple | frozenset):
        return next(filter(None, map(_forbidden_type, value)), "")
    return "" if dataclasses.is_dataclass(value) else type(value).__name__


@promise("before", "epoch", "batch")
def check_interface(subject: Subject) -> None:
    """Checks that a method has a card, and that its functions take the arguments that the run passes.

    Args:
        subject: Method to check, an instance.

    Example:
        >>> import thresher
        >>> class NoCard(thresher.UniformSubset):
        ...     card = None
        >>> try:
        ...     check_interface(NoCard(keep=0.5))
        ... except AssertionError as error:
        ...     print(error)
        NoCard: has no `card`: add a thresher.methods.contract.Card with facts that the settings do not show
    """
    method = subject.method
    card = getattr(method, "card", None)
    subject.expect(
        isinstance(card, Card),
        "has no `card`: add a thresher.methods.contract.Card with facts that the settings do not show",
    )
    if method.stage == "before":
        return
    function = method.plan_epoch if method.stage == "epoch" else method.plan_batch
    wanted = {"epoch": ["epoch", "epochs", "generator"], "batch": ["step", "generator"]}[
        method.stage
    ]
    parameters = inspect.signature(function).parameters.values()
    named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    subject.expect(
        named == wanted,
        f"{function.__name__} takes {', '.join(named) or 'nothing'} by name, not {', '.join(wanted)}",
    )
    if method.stage == "batch":
        names = requirements_of(method).signals
        subject.expect(
            isinstance(names, tuple),
            f"`signals` is a {type(names).__name__}, it must be a tuple of names",
        )
        _check_active(subject)


def _check_active(subject: Subject) -> None:
    if not defines(subject.method, "active"):
        return
    for step, progress in enumerate((0.0, 0.3, 0.5, 0.999, 1.0)):
        with subject.asked(f"active({progress}, {step})"):
            answer = subject.method.active(progress, step)
        subject.expect(
            type(answer) is bool,
            f"active({progress}, {step}) is {answer!r}, it must be True or False",
        )


@promise("epoch", "batch")
def check_bytes(subject: Subject) -> None:
    """Checks that a method with its default settings stores as many bytes per sample as its card says.

    Args:
        subject: Method to check, an instance.

    Example:
        >>> import thresher
        >>> class Modest(thresher.Kakurenbo):
        ...     card = dataclasses.replace(thresher.Kakurenbo.card, bytes_per_sample=1)
        >>> try:
        ...     check_bytes(Modest())
        ... except AssertionError as error:
        ...     print(error)
        Modest: its card says 1 bytes per sample, it takes 9
    """
    defaults = {
        f.name: f.default
        for f in dataclasses.fields(subject.method)
        if f.init and f.default is not dataclasses.MISSING
    }
    default = subject.of(dataclasses.replace(subject.method, **defaults))
    declared = subject.method.card.bytes_per_sample
    used = _bytes_per_sample(default)
    subject.expect(
        abs(used - declared) < 1e-6,
        f"its card says {declared:g} bytes per sample, it takes {used:g}",
    )


def _bytes_per_sample(subject: Subject) -> float:
    if isinstance(subject, EpochSubject):
        return subject.table(1).bytes_per_sample
    assert isinstance(subject, BatchSubject)
    if any(
        field.default is field.default_factory is dataclasses.MISSING
        for field in dataclasses.fields(subject.method)
    ):
        # A required setting has a value of every sample.
        return _bytes_of(subject.method.init_state()) / subject.samples
    few = 64
    many = 1024
    size = 64
    used = []
    for samples in (few, many):
        state = subject.method.init_state()
        for step in range(many // size):
            ids = torch.arange(size) + (step * size) % samples
            _, state = subject.ask(
                {**subject.batch(size, step, samples=samples), "id": ids}, state, step
            )
        used.append(_bytes_of(state))
    return (used[1] - used[0]) / (many - few)


def _bytes_of(value: Any) -> int:
    """Returns the size of a state in bytes: all elements of its tensors, and 8 bytes for every other value."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(8 * (not isinstance(name, str)) + _bytes_of(one) for name, one in value.items())
    if isinstance(value, list | tuple):
        return sum(_bytes_of(one) for one in value)
    return 8


@promise("before", "epoch", "batch")
def check_random_states(subject: Subject) -> None:
    """Checks that a method draws from the argument `generator`, and neither reads nor changes global random states.

    Args:
        subject: Method to check, an instance.

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
        before = comparable(rng.capture(CPU))
        answers.append(subject.answers())
        same = before == comparable(rng.capture(CPU))
        subject.expect(
            same, "draws from global random state (torch, NumPy or random); draw from `generator`"
        )
    subject.expect(
        answers[0] == answers[1],
        "its answer depends on global random state (torch, NumPy or random)",
    )


@promise("before", "epoch", "batch")
def check_determinism(subject: Subject) -> None:
    """Checks that the same inputs give the same plans, also from copies of a method, and from itself after other inputs.

    Args:
        subject: Method to check, an instance.

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
        subject.expect(
            again == first,
            "answers differently to the same question: it draws or remembers something of its own",
        )
    subject.answers("smooth")
    subject.expect(
        subject.answers() == first,
        "answers differently after other questions: it keeps state outside",
    )


@promise("epoch", "batch")
def check_plans(subject: Subject) -> None:
    """Checks that every answer is a valid plan, for values that are tied, equal, huge or not finite, and for one sample.

    Args:
        subject: Method to check, an instance.

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
            many = subject.seen(kind)
            one = subject.seen(kind, 1)
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
        subject: Method to check, an instance.

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
    """Checks that samples without a finite value are kept: in epoch plans, unless there is a budget, and first in a batch.

    Args:
        subject: Method to check, an instance.

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
    # A method with a budget keeps the same number of samples, however many have no finite value.
    if requirements_of(subject.method).smaller_batches:
        return
    n = subject.samples
    columns = subject.table(1).columns
    epochs = [epoch for epoch in range(subject.epochs) if subject.reads_values(epoch)]
    for value, bad in itertools.product(
        (math.nan, math.inf, -math.inf), (torch.arange(n - n // 5, n), torch.arange(n))
    ):
        records = subject.seen()
        floats = [
            name
            for name in records.written
            if records[name].is_floating_point() and columns[name].signal != EPOCH
        ]
        for name in floats:
            records[name][bad] = value
        for epoch in epochs:
            full_pass = {
                name: column.clone()
                for name, column in subject.full_pass(epoch, subject.samples).items()
            }
            for column in full_pass.values():
                if column.is_floating_point():
                    column[bad] = value
            if not (floats or full_pass):
                continue
            hidden = set(bad.tolist()) - set(
                subject.ask({**records, **full_pass}, epoch).ids.tolist()
            )
            subject.expect(
                not hidden,
                f"hides samples whose loss is {value}; a sample without a finite score must be kept",
            )


def _check_batch_not_finite(subject: BatchSubject) -> None:
    if not requirements_of(subject.method).signals:
        return
    bad = torch.tensor([2, 5, 9])
    signals = subject.batch(20, 3)
    for name, values in signals.items():
        if values.is_floating_point():
            values[bad] = torch.tensor([math.nan, math.inf, -math.inf], dtype=torch.float32).view(
                -1, *[1] * (values.dim() - 1)
            )
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
        subject: Method to check, an instance.

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
            subject.expect(
                same,
                f"another order of a batch's rows gives other samples, weights or states ({kind} values)",
            )
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
        same = comparable_plan(subject.ask(records, epoch)) == comparable_plan(
            subject.ask(strided, epoch)
        )
        subject.expect(same, "columns that are not contiguous in memory give another plan")


def _check_ties(subject: EpochSubject) -> None:
    """Permutes samples but keeps the order of tied ones; a plan that draws nothing must keep the same samples as before."""
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
    for epoch in range(
        subject.epochs if by_values and not defines(subject.method, "full_pass") else 0
    ):
        here, there = (subject.ask(table, epoch, n=n) for table in tables)
        draws = comparable_plan(subject.ask(tables[0], epoch, n=n, seed=1)) != comparable_plan(here)
        same = set(to[here.ids.numpy()].tolist()) == set(there.ids.tolist())
        subject.expect(
            draws or same, "breaks ties by something else than (value, id): use a stable order"
        )


class AttachedTraining:
    """A linear model on a small problem, with a method attached.

    Args:
        subject: The method.
        **settings: Other arguments of `thresher.attach`.

    Example:
        >>> from thresher import UniformSubset
        >>> from thresher.testing.check import subject_of
        >>> training = AttachedTraining(subject_of(UniformSubset(keep=0.5), None, epochs=4, samples=16))
        >>> training.train(stop=(1, 1))
        >>> [len(ids) for _, ids, *_ in training.log]
        [8, 8]
        >>> training.run.detach()
    """

    EPOCHS = 4
    BATCH = 8

    def __init__(self, subject: Subject, **settings: Any) -> None:
        n = subject.samples
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(n, 6, dtype=torch.float32, generator=generator)
        self.y = (self.x @ torch.randn(6, 3, dtype=torch.float32, generator=generator)).argmax(1)
        torch.manual_seed(0)
        self.net = nn.Linear(6, 3)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.3, momentum=0.5)
        user_signals = sorted(set(subject.generators) - set(SIGNAL_GENERATORS))
        method = (
            [subject.method, FullData()] if subject.method.stage == "before" else subject.method
        )
        self.run = attach(
            method,
            loader=DataLoader(TensorDataset(self.x, self.y), self.BATCH, shuffle=True),
            criterion=nn.CrossEntropyLoss(),
            model=self.net,
            optimizer=self.optimizer,
            epochs=self.EPOCHS,
            signals=(lambda outputs, _: {name: outputs.square().mean(1) for name in user_signals})
            if user_signals
            else None,
            **settings,
        )
        self.log: list[Any] = []
        self.planned: dict[int, EpochPlan] = {}

    def loss(self, net: nn.Module | None = None) -> float:
        """Returns the mean loss over the samples that were trained on.

        Args:
            net: Network to evaluate. Default: the trained one.
        """
        ids = sorted({i for _, of_batch, *_ in self.log for i in of_batch})
        with torch.no_grad():
            return nn.functional.cross_entropy((net or self.net)(self.x[ids]), self.y[ids]).item()

    def train(self, stop: tuple[int, int] | None = None) -> None:
        """Trains to the end, or until some batches of an epoch are done.

        Args:
            stop: Number of an epoch, and the number of its batches after which training stops. Default: None.
        """
        while self.run.epoch < self.EPOCHS:
            epoch = self.run.epoch
            for done, (x, y) in enumerate(self.run.loader, 1):
                self.optimizer.zero_grad()
                loss = self.run.criterion(self.run.model(x), y)
                loss.backward()
                self.optimizer.step()
                self.log.append([epoch, self.run.ids.tolist(), loss.item(), self.run.plan.lr_scale])
                self.planned.setdefault(epoch, self.run.plan)
                if stop == (epoch, done):
                    return

    def save(self, subject: Subject) -> Any:
        """Returns a checkpoint that was written and read again.

        Args:
            subject: The method, for the error message.
        """
        parts = {"net": self.net, "optimizer": self.optimizer, "run": self.run}
        return save_and_load(subject, {name: part.state_dict() for name, part in parts.items()})

    def load(self, state: Any) -> None:
        """Restores a checkpoint."""
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.run.load_state_dict(state["run"])

    def result(self) -> Any:
        """Returns what a resumed and an uninterrupted run must agree on: weights, states, stored losses, plan, history."""
        run = self.run
        states = [self.net.state_dict(), self.optimizer.state_dict()]
        return comparable([*states, dict(run.records), comparable_plan(run.plan), run.history])


def save_and_load(subject: Subject, state: Any) -> Any:
    """Returns a state after `torch.save` and `torch.load(weights_only=True)`.

    Args:
        subject: The method, for the error message.
        state: Tensors and plain values in nested dicts, lists and tuples.

    Raises:
        ContractError: The state cannot be saved or loaded.

    Example:
        >>> from thresher import UniformSubset
        >>> from thresher.testing.check import subject_of
        >>> save_and_load(subject_of(UniformSubset(keep=0.5), None, epochs=4, samples=16), {"seen": torch.arange(3)})
        {'seen': tensor([0, 1, 2])}
    """
    buffer = io.BytesIO()
    try:
        torch.save(state, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=True)
    except Exception as error:
        raise ContractError(
            f"{subject.name}: its state does not load with weights_only=True ({type(error).__name__}); keep tensors and plain "
            "values in it"
        ) from error


@promise("epoch", "batch")
def check_inputs(subject: Subject) -> None:
    """Checks that a method neither changes its input tensors nor keeps views of them.

    Args:
        subject: Method to check, an instance.

    Example:
        >>> import thresher
        >>> class Halves(thresher.BigLoss):
        ...     def plan_batch(self, signals, state, *, step, generator):
        ...         signals["loss"].mul_(0.5)
        ...         return super().plan_batch(signals, state, step=step, generator=generator)
        >>> try:
        ...     check_inputs(Halves(keep=0.5))
        ... except AssertionError as error:
        ...     print(error)
        Halves: changes the signals it is given
    """
    if isinstance(subject, BatchSubject):
        _check_batch_inputs(subject)
    elif isinstance(subject, EpochSubject):
        _check_epoch_inputs(subject)


def _check_epoch_inputs(subject: EpochSubject) -> None:
    for epoch in range(subject.epochs):
        inputs = {**subject.seen("spoilt"), **subject.full_pass(epoch, subject.samples)}
        before = comparable(inputs)
        plan = subject.ask(inputs, epoch)
        subject.expect(comparable(inputs) == before, "changes the records it is given")
        content = comparable_plan(plan)
        for values in inputs.values():
            values.zero_()
        subject.expect(
            comparable_plan(plan) == content,
            "its plan holds on to the records: it changes when they do",
        )


def _check_batch_inputs(subject: BatchSubject) -> None:
    state = subject.steps()[1]
    signals = subject.batch(16, 9, "spoilt")
    before = comparable(signals)
    remembered = comparable(state)
    plan, after = subject.ask(signals, state, 5)
    subject.expect(comparable(signals) == before, "changes the signals it is given")
    subject.expect(
        comparable(state) == remembered,
        "changes the state it is given; the next state is a new dict of new tensors",
    )
    answer = comparable_plan(plan), comparable(after)
    unchanged = {id(value) for name, value in after.items() if value is state.get(name)}
    for tensor in (
        *signals.values(),
        *(v for v in state.values() if isinstance(v, Tensor) and id(v) not in unchanged),
    ):
        tensor.zero_()
    same = (comparable_plan(plan), comparable(after)) == answer
    subject.expect(same, "its plan or its state holds on to the signals: it changes when they do")


@promise("epoch", "batch")
def check_state(subject: Subject) -> None:
    """Checks that a method makes the same choices after its records and state are saved, and loaded with weights_only=True.

    Args:
        subject: Method to check, an instance.

    Example:
        >>> import thresher
        >>> class KeepsObject(thresher.BigLoss):
        ...     def init_state(self):
        ...         return {"object": object()}
        >>> try:
        ...     check_state(KeepsObject(keep=0.5))
        ... except AssertionError as error:
        ...     print(str(error).partition(";")[0])
        KeepsObject: its state does not load with weights_only=True (UnpicklingError)
    """
    if isinstance(subject, EpochSubject):
        records = subject.seen("spoilt")
        loaded = subject.table()
        loaded.load_state_dict(save_and_load(subject, records.state_dict()))
        for epoch in range(subject.epochs):
            same = comparable_plan(subject.ask(loaded, epoch)) == comparable_plan(
                subject.ask(records, epoch)
            )
            subject.expect(same, "answers differently after its records were saved and loaded")
    if isinstance(subject, BatchSubject):
        answers, _ = subject.steps()
        state = subject.method.init_state()
        for step in range(3):
            _, state = subject.ask(subject.batch(BATCH_SIZES[step], step), state, step)
        again, _ = subject.steps(state=save_and_load(subject, state), start=3)
        subject.expect(
            again == answers[3:], "answers differently after its state was saved and loaded"
        )


@promise("batch")
def check_waiting(subject: BatchSubject) -> None:
    """Checks that a method with a known number of rows never waits for the device, with tensors without values as inputs.

    Args:
        subject: Method to check, an instance.

    Example:
        >>> import thresher
        >>> class Waits(thresher.BigLoss):
        ...     def scores(self, signals):
        ...         return signals["loss"] / signals["loss"].max().item()
        >>> try:
        ...     check_waiting(Waits(keep=0.5))
        ... except AssertionError as error:
        ...     print(str(error)[:65])
        Waits: plan_batch waits for the device: it reads values of a tens
    """
    if subject.method.count(16) is None:
        return
    state = subject.method.init_state()
    for step in range(3):
        signals = {name: values.to("meta") for name, values in subject.batch(16, step).items()}
        try:
            _, state = subject.ask(signals, state, step, check_values=False)
        except ContractError as error:
            cause = error.__cause__
            if cause is None:
                raise
            subject.fail(
                "plan_batch waits for the device: it reads values of a tensor (`.item()`, `.cpu()`, `if tensor`, `nonzero`, a "
                f"boolean mask as an index), or mixes devices. On tensors without values: {type(cause).__name__}: {cause}"
            )


@promise("epoch", "batch")
def check_device(subject: Subject) -> None:
    """Checks that a method answers on a GPU as on the CPU; without CUDA it checks nothing.

    Args:
        subject: Method to check, an instance.

    Example:
        >>> import thresher
        >>> check_device(thresher.BigLoss(keep=0.5)) is None
        True
    """
    if not torch.cuda.is_available():
        return
    if isinstance(subject, EpochSubject):
        records = subject.seen()
        for epoch in range(subject.epochs):
            inputs = {**records, **subject.full_pass(epoch, subject.samples)}
            there = subject.ask({name: values.cuda() for name, values in inputs.items()}, epoch)
            same = there.ids.tolist() == subject.ask(inputs, epoch).ids.tolist()
            subject.expect(same, "plans differently if the records are on a GPU")
    if isinstance(subject, BatchSubject):
        states = [subject.method.init_state(), subject.method.init_state()]
        for step, n in enumerate(BATCH_SIZES):
            signals = subject.batch(n, step)
            here, states[0] = subject.ask(signals, states[0], step)
            there, states[1] = subject.ask(
                {name: values.cuda() for name, values in signals.items()}, states[1], step
            )
            subject.expect(
                there.rows.tolist() == here.rows.tolist(),
                "chooses differently if the signals are on a GPU",
            )


@promise("before", "epoch", "batch")
def check_training(subject: Subject) -> None:
    """Checks that a model learns with a method, and that training continues unchanged from a state saved within an epoch.

    Args:
        subject: Method to check, an instance.

    Example:
        >>> import dataclasses
        >>> import thresher
        >>> class Diverges(thresher.UniformSubset):
        ...     requires = thresher.Requirements(optimizer=True)
        ...     def plan_epoch(self, records, *, epoch, epochs, generator):
        ...         plan = super().plan_epoch(records, epoch=epoch, epochs=epochs, generator=generator)
        ...         return dataclasses.replace(plan, lr_scale=1e6)
        >>> try:
        ...     check_training(Diverges(keep=0.5))
        ... except AssertionError as error:
        ...     print(str(error)[:42])
        Diverges: training does not lower the loss
    """
    passes: list[dict[str, Any]] = [{}]
    if isinstance(subject, BatchSubject) and requirements_of(subject.method).signals:
        passes = [{"forward_passes": "once"}, {"forward_passes": "twice"}]
        # The forward pass of the loop does not give the feature.
        if "feature" in requirements_of(subject.method).signals:
            passes = [
                {
                    "forward_passes": Scoring(
                        validation=lambda: (torch.eye(6, dtype=torch.float32), torch.arange(6) % 3)
                    )
                }
            ]
    for settings in passes:
        whole = _check_learning(subject, settings)
        _check_resuming(subject, settings, whole)


def _check_learning(subject: Subject, settings: dict[str, Any]) -> AttachedTraining:
    """Trains once, checks that it uses the planned samples and lowers the loss, and returns the finished training."""
    with subject.asked("a training with it attached"):
        whole = AttachedTraining(subject, **settings)
        start = copy.deepcopy(whole.net)
        whole.train()
    for epoch, plan in whole.planned.items() if not isinstance(subject, BatchSubject) else ():
        seen = sorted(i for entry in whole.log if entry[0] == epoch for i in entry[1])
        ids = plan.ids.tolist()
        subject.expect(
            seen == sorted(ids), f"epoch {epoch} trains on other samples than its plan has"
        )
    before = whole.loss(start)
    after = whole.loss()
    subject.expect(
        after < before, f"training does not lower the loss: {before:.3f} before, {after:.3f} after"
    )
    return whole


def _check_resuming(subject: Subject, settings: dict[str, Any], whole: AttachedTraining) -> None:
    """Compares a run that is interrupted, saved and resumed with an uninterrupted run; detaches both."""
    with subject.asked("saving and resuming its training"):
        first = AttachedTraining(subject, **settings)
        steps = [entry[0] for entry in whole.log].count(2)
        first.train(stop=(2, max(1, steps // 2)))
        checkpoint = first.save(subject)
        second = AttachedTraining(subject, **settings)
        torch.manual_seed(99)
        second.load(checkpoint)
        second.train()
    same = [*first.log, *second.log] == whole.log and second.result() == whole.result()
    subject.expect(
        same, "a run that is resumed in the middle of an epoch differs from an uninterrupted run"
    )
    for training in (whole, first, second):
        training.run.detach()


CHECKS: tuple[Check, ...] = (
    check_value,
    check_interface,
    check_bytes,
    check_random_states,
    check_determinism,
    check_plans,
    check_kept,
    check_not_finite,
    check_inputs,
    check_order,
    check_state,
    check_waiting,
    check_device,
    check_training,
)
"""Every check, in the order in which they run."""


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
    subject = subject_of(method, signals, epochs, samples)
    for check in CHECKS:
        if method.stage in check.stage_names:
            check(subject.method, signals=signals, epochs=epochs, samples=samples)
