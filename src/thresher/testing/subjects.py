"""A method under examination: what it is asked at each stage, and the promises that every single answer must keep."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from thresher import rng
from thresher.methods.contract import BatchMethod, BeforeMethod, EpochMethod, State, check_declaration, requirements_of
from thresher.plans import BatchPlan, EpochPlan
from thresher.records import Records
from thresher.testing.questions import (
    CPU,
    SIGNAL_GENERATORS,
    SignalGenerator,
    comparable,
    comparable_plan,
    full_pass_columns,
    signals_of_kind,
)

CHECK_EPOCHS = 20
"""Default length of the training that a method is asked about, in epochs."""
CHECK_SAMPLES = 50
"""Default size of the dataset that a method is asked about."""
OF_A_PASS = {"error", "feature"}
"""Signals with several numbers per sample, which are drawn as the results of a pass."""
BATCH_SIZES = (16, 16, 1, 16, 16, 5)
"""Sizes of the batches that a batch method is asked about, one after the other."""


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
    """A method under examination.

    Args:
        method: Instance of the method.
        signals: Functions `(generator, n) -> (n,)` that draw values of signals that Thresher does not know, by name.
        epochs: Length of the training that the method is asked about.
        samples: Size of the dataset that the method is asked about.

    Raises:
        ValueError: The method needs a signal that Thresher does not know and that `signals` lacks.

    Example:
        >>> from thresher import UniformSubset
        >>> len(EpochSubject(UniformSubset(keep=0.5), None, epochs=20, samples=50).answers())
        20
    """

    def __init__(self, method: Any, signals: Mapping[str, SignalGenerator] | None, epochs: int, samples: int) -> None:
        self.method, self.signals, self.epochs, self.samples = method, signals, epochs, samples
        self.name = type(method).__name__
        self.generators: dict[str, SignalGenerator] = {}
        known = {**SIGNAL_GENERATORS, **(signals or {})}
        for wanted in sorted(self.needs() - OF_A_PASS):
            if wanted not in known:
                raise ValueError(
                    f"check_method: {self.name} needs the signal {wanted!r}; say what its values are like, such as "
                    f"signals={{{wanted!r}: lambda generator, n: generator.random(n)}}"
                )
            self.generators[wanted] = known[wanted]

    def needs(self) -> set[str]:
        """Returns the names of the signals that the method is given."""
        return set()

    def of(self, method: Any) -> "Subject":
        """Returns a subject for another instance, with the same questions."""
        return type(self)(method, self.signals, self.epochs, self.samples)

    def answers(self, kind: str = "tied") -> list[Any]:
        """Returns the answers to a fixed series of questions, in a form that `==` compares.

        Args:
            kind: Kind of values in the questions, one of `questions.VALUE_KINDS`. Default: "tied".
        """
        raise NotImplementedError

    def fail(self, sentence: str) -> NoReturn:
        """Raises the error that names a broken promise.

        Args:
            sentence: Rest of the sentence that starts with the name of the method.
        """
        raise ContractError(f"{self.name}: {sentence}")

    def expect(self, holds: bool, sentence: str) -> None:
        """Raises the error that names a broken promise where a condition does not hold."""
        if not holds:
            self.fail(sentence)

    @contextmanager
    def asked(self, question: str) -> Iterator[None]:
        """Turns any exception inside into an error that names the question."""
        try:
            yield
        except ContractError:
            raise
        except Exception as error:
            raise ContractError(f"{self.name}: {question} raised {type(error).__name__}: {error}") from error

    def check_facts(self, facts: Mapping[str, Any], actual: float) -> None:
        """Checks that facts are plain finite numbers and that the two fractions are among them.

        Args:
            facts: Facts of a plan.
            actual: Share of the samples that the plan leaves out.
        """
        for name in ("scheduled_fraction", "actual_fraction"):
            self.expect(name in facts, f"its plan has no fact {name!r}, the share left out; the history shows it")
        for name, value in facts.items():
            is_plain = type(value) in (bool, int, float) and math.isfinite(value)
            self.expect(is_plain, f"its plan has the fact {name!r} = {value!r}; facts are finite plain numbers")
        dropped = facts.get("dropped_fraction", 0.0)
        if abs(facts["actual_fraction"] + dropped - actual) > 1e-6:
            said = f"actual_fraction = {facts['actual_fraction']}" + (f" and dropped_fraction = {dropped}" if dropped else "")
            self.fail(f"its plan has {said}, but {actual} of the samples are left out")

    def check_weights(self, weights: Tensor | None) -> None:
        """Checks that weights are finite and not negative, and that not all are 0."""
        if weights is None or not weights.numel():
            return
        sound = bool(weights.isfinite().all()) and bool((weights >= 0).all()) and bool(weights.any())
        self.expect(sound, f"its plan has weights that are not finite, negative, or all 0: {weights.tolist()}")


class EpochSubject(Subject):
    """A method under examination that decides before each epoch.

    Example:
        >>> from thresher import UniformSubset
        >>> subject = EpochSubject(UniformSubset(keep=0.5), None, epochs=20, samples=50)
        >>> len(subject.ask(subject.seen(), epoch=3).ids)
        25
    """

    def needs(self) -> set[str]:
        """Returns the names of the signals that the columns of the method remember."""
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
            kind: Kind of values, one of `questions.VALUE_KINDS`. Default: "tied".
            n: Number of samples. Default: the size of the dataset.
            seed: Random seed of the values. Default: 0.
        """
        table = self.table(n)
        everyone = torch.arange(self.samples if n is None else n)
        for epoch in range(3):
            table.epoch = epoch
            table.start_epoch()
            table.write(everyone, signals_of_kind(self.generators, kind, seed + epoch, len(everyone)))
        return table

    def full_pass(self, epoch: int, n: int, kind: str = "tied", *, seed: int = 0) -> dict[str, Tensor]:
        """Returns the columns of the full pass that the method asks for before the plan of an epoch.

        Args:
            epoch: Number of the epoch.
            n: Number of samples.
            kind: Kind of values, one of `questions.VALUE_KINDS`. Default: "tied".
            seed: Random seed of the values. Default: 0.
        """
        names = self.method.full_pass(epoch, self.epochs) if requirements_of(self.method).full_pass else ()
        self.expect(
            set(names) <= {"error", "feature", "label"},
            f"full_pass asks for {names}; there are 'error', 'feature' and 'label'",
        )
        columns = full_pass_columns(kind, (9, seed + epoch), n) if names else {}
        return {name: columns[name] for name in names}

    def ask(
        self, records: Mapping[str, Tensor], epoch: int, *, n: int | None = None, seed: int = 0, kind: str = "tied"
    ) -> EpochPlan:
        """Returns the plan of an epoch, after checking every promise about a single plan.

        Args:
            records: Values by column, each of shape (n,); a full pass is added where `records` lacks its columns.
            epoch: Number of the epoch.
            n: Number of samples. Default: the size of the dataset.
            seed: Random seed of the generator that the method is given. Default: 0.
            kind: Kind of values of the full pass, one of `questions.VALUE_KINDS`. Default: "tied".
        """
        n = self.samples if n is None else n
        with self.asked(f"plan_epoch of epoch {epoch} ({n} samples, {kind})"):
            given = {**records, **{k: v for k, v in self.full_pass(epoch, n, kind).items() if k not in records}}
            generator = rng.seeded(seed, epoch)
            plan = self.method.plan_epoch(given, epoch=epoch, epochs=self.epochs, generator=generator)
            self.expect(
                isinstance(plan, EpochPlan), f"plan_epoch returned {type(plan).__name__}, it must return a thresher.EpochPlan"
            )
            plan.check(n)
        self.check_weights(plan.weights)
        self.check_facts(plan.facts, 1 - plan.share * len(plan.ids) / n)
        return plan

    def answers(self, kind: str = "tied") -> list[Any]:
        """Returns the plans of a whole training in which only kept and refreshed samples are seen."""
        table, plans = self.table(), []
        for epoch in range(self.epochs):
            plan = self.ask(table, epoch, kind=kind)
            plans.append(comparable_plan(plan))
            with self.asked("what its plan wants to remember"):
                table.remember(plan.remember)
            table.epoch = epoch
            table.start_epoch()
            seen = torch.cat([plan.ids, plan.ids[:0] if plan.refresh is None else plan.refresh]).unique()
            found = signals_of_kind(self.generators, kind, epoch, self.samples)
            with self.asked("a merge of its columns"):
                table.write(seen, {name: values[seen] for name, values in found.items()})
        return plans

    def reads_values(self, epoch: int) -> bool:
        """Checks whether the plan of an epoch depends on the records at all."""
        questions = ({**self.seen(seed=i), **self.full_pass(epoch, self.samples, seed=i)} for i in (0, 100))
        one, other = (comparable_plan(self.ask(question, epoch)) for question in questions)
        return one != other


class BatchSubject(Subject):
    """A method under examination that decides inside each batch.

    Example:
        >>> from thresher import SelectiveBackprop
        >>> subject = BatchSubject(SelectiveBackprop(keep=0.5), None, epochs=20, samples=50)
        >>> plan, _ = subject.ask(subject.batch(8, seed=0), subject.method.init_state(), step=0)
        >>> len(plan.rows)
        4
    """

    def needs(self) -> set[str]:
        """Returns the name of the loss and those of the signals that the method declares."""
        return {"loss", *requirements_of(self.method).signals}

    def batch(self, n: int, seed: int, kind: str = "tied", samples: int | None = None) -> dict[str, Tensor]:
        """Returns the signals of n samples, with their ids in random order.

        Args:
            n: Number of samples in the batch.
            seed: Random seed of the values and ids.
            kind: Kind of values, one of `questions.VALUE_KINDS`. Default: "tied".
            samples: Size of the dataset. Default: the size that the method is asked about.
        """
        ids = np.random.default_rng([seed, n]).permutation(samples or self.samples)[:n]
        wide = {*requirements_of(self.method).signals} & OF_A_PASS
        columns = full_pass_columns(kind, (9, seed), len(ids)) if wide else {}
        found = {**signals_of_kind(self.generators, kind, seed, len(ids)), **{name: columns[name] for name in sorted(wide)}}
        return {"id": torch.from_numpy(ids.astype(np.int64)), **found}

    def ask(
        self, signals: Mapping[str, Tensor], state: State, step: int, *, seed: int = 0, check_values: bool = True
    ) -> tuple[BatchPlan, State]:
        """Returns the plan of a batch and the next state, after checking every promise about a single plan.

        Args:
            signals: Values by signal, each of shape (n,).
            state: State that the method returned last.
            step: Number of the step.
            seed: Random seed of the generator that the method is given. Default: 0.
            check_values: Whether to check the values of rows and weights, which tensors on the meta device lack.
                Default: True.
        """
        n = len(signals["id"])
        with self.asked(f"plan_batch of {n} samples"):
            plan, after = self.method.plan_batch(signals, state, step=step, generator=rng.seeded(seed, step))
        self.expect(isinstance(plan, BatchPlan), f"plan_batch returned {type(plan).__name__}, not (thresher.BatchPlan, state)")
        self.expect(after is not state, "plan_batch returned the state it was given; the next state is always a new dict")
        count = self.method.count(n)
        self.expect(
            count is None or count == len(plan.rows), f"count({n}) gives {count} rows, plan_batch kept {len(plan.rows)}"
        )
        self.check_facts(plan.facts, 1 - len(plan.rows) / n)
        rows = plan.rows
        self.expect(
            rows.device == signals["id"].device, f"its rows are on {rows.device}, its signals on {signals['id'].device}"
        )
        if check_values and rows.numel():
            self.expect(bool((rows[1:] >= rows[:-1]).all()), f"its rows are not ascending: {rows.tolist()}")
            within = bool(rows[0] >= 0) and bool(rows[-1] < n)
            self.expect(within, f"its rows are not within a batch of {n}: {rows.tolist()}")
            self.check_weights(plan.weights)
        return plan, after

    def steps(self, kind: str = "tied", state: State | None = None, start: int = 0) -> tuple[list[Any], State]:
        """Returns the plans and states of the same few batches, in a form that `==` compares, and the last state.

        Args:
            kind: Kind of values, one of `questions.VALUE_KINDS`. Default: "tied".
            state: State before the first of these batches. Default: the initial state.
            start: Number of the first of these batches. Default: 0.
        """
        now: State = self.method.init_state() if state is None else state
        answers = []
        for step in range(start, len(BATCH_SIZES)):
            plan, now = self.ask(self.batch(min(BATCH_SIZES[step], self.samples), step, kind), now, step)
            answers.append([comparable_plan(plan), comparable(now)])
        return answers, now

    def answers(self, kind: str = "tied") -> list[Any]:
        """Returns the plans and states of a few batches."""
        return self.steps(kind)[0]


class BeforeSubject(Subject):
    """A method under examination that decides before training.

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
        self.expect(isinstance(ids, Tensor), f"kept returned {type(ids).__name__}, it must return a tensor of ids")
        self.expect(
            ids.dtype == torch.int64 and ids.dim() == 1,
            f"kept returned {ids.dtype} of shape {tuple(ids.shape)}, ids are int64 of one dimension",
        )
        sound = len(ids) > 0 and bool((ids[1:] > ids[:-1]).all()) and int(ids[0]) >= 0 and int(ids[-1]) < self.samples
        self.expect(sound, f"kept({self.samples}) is not ascending within the dataset, or empty: {ids.tolist()}")
        return ids

    def answers(self, kind: str = "tied") -> list[Any]:
        """Returns the ids of the samples that the method keeps."""
        return self.ask().tolist()


SUBJECTS = {"epoch": (EpochSubject, EpochMethod), "batch": (BatchSubject, BatchMethod), "before": (BeforeSubject, BeforeMethod)}


def subject_of(method: Any, signals: Mapping[str, SignalGenerator] | None, epochs: int, samples: int) -> Subject:
    """Returns a method as the subject of an examination, after checking its stage and its declaration.

    Args:
        method: Instance of the method.
        signals: Functions that draw values of signals that Thresher does not know, by name; as in `check_method`.
        epochs: Length of the training that the method is asked about.
        samples: Size of the dataset that the method is asked about.

    Raises:
        ContractError: `method` is a class, is of no stage, lacks a function of its stage, or its declaration `requires`
            does not match its functions and attributes.
        ValueError: The method needs a signal that Thresher does not know and that `signals` lacks.

    Example:
        >>> from thresher import UniformSubset
        >>> type(subject_of(UniformSubset(keep=0.5), None, epochs=20, samples=50)).__name__
        'EpochSubject'
    """
    name, stage = type(method).__name__, getattr(method, "stage", None)
    if isinstance(method, type):
        raise ContractError(f"{method.__name__}: is a class; check an instance, {method.__name__}()")
    if stage not in SUBJECTS:
        raise ContractError(f"{name}: has stage = {stage!r}; it must be one of {', '.join(map(repr, SUBJECTS))}")
    kind, protocol = SUBJECTS[stage]
    if not isinstance(method, protocol):
        members = sorted(name for name in {*dir(protocol), *protocol.__annotations__} if not name.startswith("_"))
        missing = [member for member in members if not hasattr(method, member)]
        raise ContractError(f"{name}: has stage = {stage!r} but lacks {', '.join(missing)}")
    try:
        check_declaration(method)
    except TypeError as error:
        raise ContractError(str(error)) from error
    return kind(method, signals, epochs, samples)
