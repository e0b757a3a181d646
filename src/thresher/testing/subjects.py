"""A method under examination, the hard questions it is asked, and what every single answer must be."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thresher import rng
from thresher.methods.contract import BatchMethod, BeforeMethod, EpochMethod, State, check_declaration, requirements_of
from thresher.plans import BatchPlan, EpochPlan
from thresher.records import Records

EPOCHS = 20
SAMPLES = 50

Draw = Callable[[np.random.Generator, int], NDArray[Any]]
"""Makes n values of a signal."""

CPU = torch.device("cpu")
SIZES = (16, 16, 1, 16, 16, 5)
"""Of the batches that a batch method is asked about, one after the other."""

DRAWS: dict[str, Draw] = {
    "loss": lambda r, n: r.gamma(1.0, 1.0, n),
    "grad_norm": lambda r, n: r.gamma(1.0, 0.5, n),
    "el2n": lambda r, n: r.uniform(0, math.sqrt(2), n),
    "entropy": lambda r, n: r.gamma(1.0, 0.5, n),
    "margin": lambda r, n: r.uniform(-1, 1, n),
    "confidence": lambda r, n: r.random(n),
    "batch_confidence": lambda r, n: r.random(n),
    "correct": lambda r, n: r.random(n) < 0.8,
}
KINDS = ("tied", "smooth", "equal", "zero", "huge", "spoilt", "lost")
"""Sorts of values: rounded, as drawn, all the same, all 0, up to 1e31, some not finite, none finite."""


class ContractError(AssertionError):
    """A method breaks a promise; the message names both."""


# Values to be asked about


def _values(draw: Draw, kind: str, seed: tuple[int, ...], n: int) -> Tensor:
    """Values of one signal, shape (n,); those of different signals are not finite in the same places."""
    r = np.random.default_rng(seed)
    values = np.asarray(draw(r, n))
    if values.dtype == np.bool_:
        return torch.from_numpy(np.ones(n, dtype=np.bool_) if kind in ("equal", "zero") else values)
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


def _signals(draws: Mapping[str, Draw], kind: str, seed: int, n: int) -> dict[str, Tensor]:
    return {name: _values(draw, kind, (i, seed), n) for i, (name, draw) in enumerate(sorted(draws.items()))}


def graded(names: Iterable[str], grades: NDArray[Any]) -> dict[str, Tensor]:
    """Signals that rise or fall together: samples of one grade are tied in all of them."""
    rising = torch.from_numpy((grades + 1) / 8).float()
    falling = {"confidence": 1 - rising, "margin": 1 - rising, "correct": rising < 0.5}
    return {name: falling.get(name, rising) for name in names}


def _tables(kind: str, seed: tuple[int, ...], n: int) -> dict[str, Tensor]:
    """What a survey gives: errors of a classifier of 4 classes, p - y, and features, one row a sample."""
    r = np.random.default_rng(seed)
    chances = np.exp(r.normal(size=(n, 4)))
    error = chances / chances.sum(1, keepdims=True) - np.eye(4)[r.integers(0, 4, n)]
    scale = _values(lambda _, k: np.ones(k), kind, seed, n)[:, None]
    found = {"error": error, "feature": r.normal(size=(n, 5))}
    label = torch.from_numpy(error.argmin(1))
    if kind == "equal":
        found = {name: np.broadcast_to(rows[:1], rows.shape) for name, rows in found.items()}
    if kind != "smooth":
        found = {name: np.round(rows * 8) / 8 for name, rows in found.items()}
    return {name: torch.tensor(rows, dtype=torch.float32) * scale for name, rows in found.items()} | {"label": label}


# Answers that compare


def plain(value: Any) -> Any:
    """A copy that compares: tensors as their bytes, with one NaN and one zero."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            value = torch.where(value.isnan(), torch.nan, value + 0.0)
        return str(value.dtype), tuple(value.shape), value.detach().cpu().numpy().tobytes()
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def content(plan: EpochPlan | BatchPlan) -> Any:
    """What a plan says, copied, as values that compare."""
    return plain({name: dict(value) if isinstance(value, Mapping) else value for name, value in vars(plan).items()})


# A method and the questions it is asked


class Subject:
    """A method under examination.

    Args:
        method: The instance.
        signals: How to make values of signals that Thresher does not know: name to `(generator, n) -> (n,)`.
        epochs: Of the training that it is asked about.
        samples: Of the dataset that it is asked about.
    """

    def __init__(self, method: Any, signals: Mapping[str, Draw] | None, epochs: int, samples: int) -> None:
        self.method, self.signals, self.epochs, self.samples = method, signals, epochs, samples
        self.name = type(method).__name__
        self.draws: dict[str, Draw] = {}
        known = {**DRAWS, **(signals or {})}
        for wanted in sorted(self.needs()):
            if wanted not in known:
                raise ValueError(
                    f"check_method: {self.name} needs the signal {wanted!r}; say what its values are like, such as "
                    f"signals={{{wanted!r}: lambda generator, n: generator.random(n)}}"
                )
            self.draws[wanted] = known[wanted]

    def needs(self) -> set[str]:
        """Names of the signals it is given."""
        return set()

    def of(self, method: Any) -> "Subject":
        """The same questions for another instance."""
        return type(self)(method, self.signals, self.epochs, self.samples)

    def answers(self, kind: str = "tied") -> list[Any]:
        """What it answers to the same series of questions, as values that compare."""
        raise NotImplementedError

    def fail(self, sentence: str) -> NoReturn:
        """Say which promise is broken."""
        raise ContractError(f"{self.name}: {sentence}")

    def expect(self, holds: bool, sentence: str) -> None:
        """A promise."""
        if not holds:
            self.fail(sentence)

    @contextmanager
    def asked(self, question: str) -> Iterator[None]:
        """A question that must not raise."""
        try:
            yield
        except ContractError:
            raise
        except Exception as error:
            raise ContractError(f"{self.name}: {question} raised {type(error).__name__}: {error}") from error

    def hold_facts(self, facts: Mapping[str, Any], actual: float) -> None:
        """Facts are plain finite numbers, the two fractions among them."""
        for name in ("scheduled_fraction", "actual_fraction"):
            self.expect(name in facts, f"its plan has no fact {name!r}, the share left out; the history shows it")
        for name, value in facts.items():
            plain = type(value) in (bool, int, float) and math.isfinite(value)
            self.expect(plain, f"its plan has the fact {name!r} = {value!r}; facts are finite plain numbers")
        if abs(facts["actual_fraction"] - actual) > 1e-6:
            self.fail(f"its plan says actual_fraction = {facts['actual_fraction']}, but {actual} of the samples are left out")

    def hold_weights(self, weights: Tensor | None) -> None:
        """Weights are finite, not negative, and not all 0."""
        if weights is None or not weights.numel():
            return
        sound = bool(weights.isfinite().all()) and bool((weights >= 0).all()) and bool(weights.any())
        self.expect(sound, f"its plan has weights that are not finite, negative, or all 0: {weights.tolist()}")


class EpochSubject(Subject):
    """A method that decides before each epoch."""

    def needs(self) -> set[str]:
        """The signals that its columns remember."""
        return Records(self.method.columns(), 1, CPU).signals

    def table(self, n: int | None = None) -> Records:
        """Records of samples that were never seen."""
        return Records(self.method.columns(), self.samples if n is None else n, CPU)

    def seen(self, kind: str = "tied", n: int | None = None, *, seed: int = 0) -> Records:
        """Records as a few epochs of full training leave them."""
        table = self.table(n)
        everyone = torch.arange(self.samples if n is None else n)
        for epoch in range(3):
            table.epoch = epoch
            table.start_epoch()
            table.write(everyone, _signals(self.draws, kind, seed + epoch, len(everyone)))
        return table

    def surveyed(self, epoch: int, n: int, kind: str = "tied", *, seed: int = 0) -> dict[str, Tensor]:
        """What it wants to know of all samples before this plan."""
        names = self.method.full_pass(epoch, self.epochs) if requirements_of(self.method).full_pass else ()
        self.expect(
            set(names) <= {"error", "feature", "label"}, f"survey asks for {names}; there are 'error', 'feature' and 'label'"
        )
        tables = _tables(kind, (9, seed + epoch), n) if names else {}
        return {name: tables[name] for name in names}

    def ask(
        self, records: Mapping[str, Tensor], epoch: int, *, n: int | None = None, seed: int = 0, kind: str = "tied"
    ) -> EpochPlan:
        """A plan, held against what plans must be."""
        n = self.samples if n is None else n
        with self.asked(f"plan_epoch of epoch {epoch} ({n} samples, {kind})"):
            given = {**records, **{k: v for k, v in self.surveyed(epoch, n, kind).items() if k not in records}}
            generator = rng.seeded(seed, epoch)
            plan = self.method.plan_epoch(given, epoch=epoch, epochs=self.epochs, generator=generator)
            self.expect(
                isinstance(plan, EpochPlan), f"plan_epoch returned {type(plan).__name__}, it must return a thresher.EpochPlan"
            )
            plan.check(n)
        self.hold_weights(plan.weights)
        self.hold_facts(plan.facts, 1 - len(plan.ids) / n)
        return plan

    def answers(self, kind: str = "tied") -> list[Any]:
        """Plans of a whole training in which only kept and refreshed samples are seen."""
        table, said = self.table(), []
        for epoch in range(self.epochs):
            plan = self.ask(table, epoch, kind=kind)
            said.append(content(plan))
            with self.asked("what its plan wants to remember"):
                table.remember(plan.remember)
            table.epoch = epoch
            table.start_epoch()
            seen = torch.cat([plan.ids, plan.ids[:0] if plan.refresh is None else plan.refresh]).unique()
            found = _signals(self.draws, kind, epoch, self.samples)
            with self.asked("a merge of its columns"):
                table.write(seen, {name: values[seen] for name, values in found.items()})
        return said

    def reads_values(self, epoch: int) -> bool:
        """Whether its plan depends on the records at all."""
        questions = ({**self.seen(seed=i), **self.surveyed(epoch, self.samples, seed=i)} for i in (0, 100))
        one, other = (content(self.ask(question, epoch)) for question in questions)
        return one != other


class BatchSubject(Subject):
    """A method that decides inside each batch."""

    def needs(self) -> set[str]:
        """The loss, and what it names."""
        return {"loss", *requirements_of(self.method).signals}

    def batch(self, n: int, seed: int, kind: str = "tied", samples: int | None = None) -> dict[str, Tensor]:
        """Signals of n samples with their ids, in no order."""
        ids = np.random.default_rng([seed, n]).permutation(samples or self.samples)[:n]
        return {"id": torch.from_numpy(ids.astype(np.int64)), **_signals(self.draws, kind, seed, len(ids))}

    def ask(
        self, signals: Mapping[str, Tensor], state: State, step: int, *, seed: int = 0, hold: bool = True
    ) -> tuple[BatchPlan, State]:
        """A plan and the next state, held against what they must be."""
        n = len(signals["id"])
        with self.asked(f"plan_batch of {n} samples"):
            plan, after = self.method.plan_batch(signals, state, step=step, generator=rng.seeded(seed, step))
        self.expect(isinstance(plan, BatchPlan), f"plan_batch returned {type(plan).__name__}, not (thresher.BatchPlan, state)")
        self.expect(after is not state, "plan_batch returned the state it was given; the next state is always a new dict")
        count = self.method.count(n)
        self.expect(count is None or count == len(plan.rows), f"count({n}) says {count} rows, plan_batch kept {len(plan.rows)}")
        self.hold_facts(plan.facts, 1 - len(plan.rows) / n)
        rows = plan.rows
        self.expect(
            rows.device == signals["id"].device, f"its rows are on {rows.device}, its signals on {signals['id'].device}"
        )
        if hold and rows.numel():
            self.expect(bool((rows[1:] >= rows[:-1]).all()), f"its rows are not ascending: {rows.tolist()}")
            within = bool(rows[0] >= 0) and bool(rows[-1] < n)
            self.expect(within, f"its rows are not within a batch of {n}: {rows.tolist()}")
            self.hold_weights(plan.weights)
        return plan, after

    def steps(self, kind: str = "tied", state: State | None = None, start: int = 0) -> tuple[list[Any], State]:
        """Plans for the same few batches from a state, and the last state."""
        now: State = self.method.init_state() if state is None else state
        said = []
        for step in range(start, len(SIZES)):
            plan, now = self.ask(self.batch(min(SIZES[step], self.samples), step, kind), now, step)
            said.append([content(plan), plain(now)])
        return said, now

    def answers(self, kind: str = "tied") -> list[Any]:
        """Plans and states of a few batches."""
        return self.steps(kind)[0]


class BeforeSubject(Subject):
    """A method that decides before training."""

    def ask(self) -> Tensor:
        """The samples it keeps, held against what they must be."""
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
        """The samples kept."""
        return self.ask().tolist()


SUBJECTS = {"epoch": (EpochSubject, EpochMethod), "batch": (BatchSubject, BatchMethod), "before": (BeforeSubject, BeforeMethod)}


def examined(method: Any, signals: Mapping[str, Draw] | None, epochs: int, samples: int) -> Subject:
    """A method as a subject of its stage.

    Raises:
        ContractError: It is of no stage.
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
