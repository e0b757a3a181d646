"""The contract check: methods that keep their promises pass, and each broken promise is found and named."""

import inspect
import random
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

import thresher
from depth import depth
from thresher.methods import Requirements
from thresher.methods._base import KeepLargest
from thresher.methods.contract import Card
from thresher.plans import EpochPlan
from thresher.records import NEVER_SEEN, Column
from thresher.selection import ids_of, on_host, share, smallest
from thresher.testing import ContractError, check_method

pytestmark = pytest.mark.usefixtures("shared_traces")
CARD = Card(biased="yes", forwards="none", bytes_per_sample=4)
CARD_OF_BATCHES = replace(CARD, bytes_per_sample=0)


@dataclass(frozen=True)
class Hides:
    """A sound epoch method: hides the smallest losses."""

    stage: ClassVar[Literal["epoch"]] = "epoch"
    card: ClassVar[Card] = CARD
    fraction: float = 0.3

    def columns(self) -> dict[str, Column]:
        return {"loss": Column(torch.float32, fill=NEVER_SEEN)}

    def hidden(self, loss: Any, generator: torch.Generator) -> Any:
        return smallest(loss, share(self.fraction, len(loss)))

    def plan_epoch(
        self, records: Any, *, epoch: int, epochs: int, generator: torch.Generator
    ) -> EpochPlan:
        ids = ids_of(~self.hidden(on_host(records["loss"]), generator))
        return self.planned(ids, len(records["loss"]))

    def planned(self, ids: Tensor, n: int) -> EpochPlan:
        return EpochPlan(
            ids, facts={"scheduled_fraction": self.fraction, "actual_fraction": 1 - len(ids) / n}
        )


@dataclass(frozen=True)
class Keeps(KeepLargest):
    """A sound batch method: keeps the largest losses."""

    card: ClassVar[Card] = CARD_OF_BATCHES

    def scores(self, signals: Any) -> Tensor:
        return signals["loss"]


@pytest.mark.parametrize(
    "method",
    [
        Hides(),
        Keeps(),
        *depth(
            [
                thresher.Kakurenbo(),
                thresher.SelectiveBackprop(),
                thresher.RandomBackprop(),
            ],  # the roster in tests/conformance has them all
            [
                thresher.Kakurenbo(),
                thresher.InfoBatch(),
                thresher.UniformSubset(),
                thresher.FullData(),
                thresher.SelectiveBackprop(),
                thresher.SelectiveBackprop(keep=0.3),
                thresher.RandomBackprop(),
            ],
        ),
    ],
    ids=repr,
)
def test_sound_methods_pass(method: Any) -> None:
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]
    check_method(method)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == states[1:]  # type: ignore[index]


# Epoch methods that break a promise


@dataclass(frozen=True)
class DrawsFromTorch(Hides):
    def hidden(self, loss: Any, generator: torch.Generator) -> Any:
        return (torch.rand(len(loss)) < self.fraction).numpy() & np.isfinite(loss) & (len(loss) > 1)


@dataclass(frozen=True)
class DrawsFromNumpy(Hides):
    def hidden(self, loss: Any, generator: torch.Generator) -> Any:
        return (np.random.random(len(loss)) < self.fraction) & np.isfinite(loss) & (len(loss) > 1)


@dataclass(frozen=True)
class Unseeded(Hides):
    def hidden(self, loss: Any, generator: torch.Generator) -> Any:
        return (
            (np.random.default_rng().random(len(loss)) < self.fraction)
            & np.isfinite(loss)
            & (len(loss) > 1)
        )


@dataclass(frozen=True)
class SortsUnstably(Hides):
    def hidden(self, loss: Any, generator: torch.Generator) -> Any:
        # Ties go to ever other places, as with a sort that is not stable.
        finite = np.isfinite(loss)
        keys = np.where(finite, loss, np.inf)
        scattered = (np.arange(len(loss)) * 7919) % 101
        hidden = np.zeros(len(loss), dtype=bool)
        hidden[np.lexsort((scattered, keys))[: share(self.fraction, len(loss))]] = True
        return hidden & finite


@dataclass(frozen=True)
class HidesNan(Hides):
    def hidden(self, loss: Any, generator: torch.Generator) -> Any:
        return smallest(np.nan_to_num(loss, posinf=0, neginf=0), share(self.fraction, len(loss)))


@dataclass(frozen=True)
class HidesUnseen(Hides):
    """Orders what was never seen by its fill, but spares NaN and +inf."""

    def hidden(self, loss: Any, generator: torch.Generator) -> Any:
        return smallest(np.where(np.isneginf(loss), -1e9, loss), share(self.fraction, len(loss)))


@dataclass(frozen=True)
class LiesAboutBytes(Hides):
    def columns(self) -> dict[str, Column]:
        return {**super().columns(), "confidence": Column(torch.float32)}


@dataclass(frozen=True)
class ChangesRecords(Hides):
    def hidden(self, loss: Any, generator: torch.Generator) -> Any:
        hidden = super().hidden(loss, generator)
        loss *= 0.5
        return hidden


@dataclass
class NotFrozen:
    stage: ClassVar[Literal["epoch"]] = "epoch"
    card: ClassVar[Card] = CARD
    fraction: float = 0.3
    columns = Hides.columns
    hidden = Hides.hidden
    plan_epoch = Hides.plan_epoch
    planned = Hides.planned


@dataclass(frozen=True)
class FloatIds(Hides):
    def planned(self, ids: Tensor, n: int) -> EpochPlan:
        return super().planned(ids.float(), n)


@dataclass(frozen=True)
class BeyondTheDataset(Hides):
    def planned(self, ids: Tensor, n: int) -> EpochPlan:
        return super().planned(ids + 1, n)


@dataclass(frozen=True)
class WrongFact(Hides):
    def planned(self, ids: Tensor, n: int) -> EpochPlan:
        return EpochPlan(ids, facts={"scheduled_fraction": 0.3, "actual_fraction": 0.9})


@dataclass(frozen=True)
class WrongDrop(Hides):
    def planned(self, ids: Tensor, n: int) -> EpochPlan:
        facts = {
            "scheduled_fraction": 0.3,
            "actual_fraction": 1 - len(ids) / n,
            "dropped_fraction": 0.5,
        }
        return EpochPlan(ids, facts=facts)


@dataclass(frozen=True)
class NoFact(Hides):
    def planned(self, ids: Tensor, n: int) -> EpochPlan:
        return EpochPlan(ids)


@dataclass(frozen=True)
class NanWeights(Hides):
    def planned(self, ids: Tensor, n: int) -> EpochPlan:
        return replace(super().planned(ids, n), weights=torch.full((len(ids),), torch.nan))


CALLS: list[int] = []


@dataclass(frozen=True)
class KeepsStateOutside(Hides):
    def hidden(self, loss: Any, generator: torch.Generator) -> Any:
        CALLS.append(1)
        return np.roll(super().hidden(loss, generator), len(CALLS)) & np.isfinite(loss)


@dataclass(frozen=True)
class OwnsTensor(Hides):
    table: Any = field(default_factory=lambda: torch.zeros(3))


@dataclass(frozen=True)
class RemembersItself(Hides):
    def __post_init__(self) -> None:
        object.__setattr__(self, "seen", 0)


@dataclass(frozen=True)
class ForgetsSettings(Hides):
    """Its repr leaves out what it was given."""

    fraction: float = field(default=0.3, repr=False)


@dataclass(frozen=True)
class NoCard(Hides):
    card: ClassVar[None] = None  # type: ignore[assignment]


@dataclass(frozen=True)
class OtherNames(Hides):
    def plan_epoch(self, records: Any, *, epoch: int, generator: torch.Generator) -> EpochPlan:  # type: ignore[override]
        return super().plan_epoch(records, epoch=epoch, epochs=1, generator=generator)


@dataclass(frozen=True)
class HidesTheOnly(Hides):
    def hidden(self, loss: Any, generator: torch.Generator) -> Any:
        return np.isfinite(loss)


@dataclass(frozen=True)
class TrainsBackwards(Hides):
    """Weights are refused where negative; a learning-rate scale out of all measure is found by training."""

    requires: ClassVar[Requirements] = Requirements(optimizer=True)

    def planned(self, ids: Tensor, n: int) -> EpochPlan:
        return replace(super().planned(ids, n), lr_scale=1e6)


@dataclass(frozen=True)
class DrawsFromRandom(Hides):
    def hidden(self, loss: Any, generator: torch.Generator) -> Any:
        return np.array([random.random() < self.fraction for _ in loss]) & np.isfinite(loss)


@dataclass(frozen=True)
class ReadsTheSeed(Hides):
    """Reads a global random state and leaves it as it is."""

    def hidden(self, loss: Any, generator: torch.Generator) -> Any:
        return np.roll(super().hidden(loss, generator), torch.initial_seed()) & np.isfinite(loss)


SMOOTH_QUESTIONS: list[int] = []


@dataclass(frozen=True)
class RemembersQuestions(Hides):
    """Answers the same question alike, until it has met one of another kind."""

    def hidden(self, loss: Any, generator: torch.Generator) -> Any:
        if is_kind(torch.from_numpy(loss), "smooth"):
            SMOOTH_QUESTIONS.append(1)
        hidden = super().hidden(loss, generator)
        return np.roll(hidden, len(SMOOTH_QUESTIONS)) & np.isfinite(loss)


FIRST_ASKED: list[Any] = []


@dataclass(frozen=True)
class AnswersByIdentity(Hides):
    """A copy answers differently."""

    def hidden(self, loss: Any, generator: torch.Generator) -> Any:
        FIRST_ASKED[:] = FIRST_ASKED or [self]
        is_copy = self is not FIRST_ASKED[0]
        return np.roll(super().hidden(loss, generator), int(is_copy)) & np.isfinite(loss)


@dataclass(frozen=True)
class HidesTheLost(Hides):
    """Keeps samples without a finite loss, unless no other samples are left."""

    def hidden(self, loss: Any, generator: torch.Generator) -> Any:
        if np.isfinite(loss).any() or np.isneginf(loss[0]) or len(loss) == 1:
            return super().hidden(loss, generator)
        return np.arange(len(loss)) > 0


@dataclass(frozen=True)
class ReadsFeatures(Hides):
    """A sound method that reads a pass over all samples."""

    card: ClassVar[Card] = CARD_OF_BATCHES

    def columns(self) -> dict[str, Column]:
        return {}

    def full_pass(self, epoch: int, epochs: int) -> tuple[str, ...]:
        return ("feature",)

    def plan_epoch(
        self, records: Any, *, epoch: int, epochs: int, generator: torch.Generator
    ) -> EpochPlan:
        sizes = records["feature"].square().sum(1)
        return self.planned(ids_of(~self.hidden(on_host(sizes), generator)), len(sizes))


@dataclass(frozen=True)
class HidesNanFeatures(ReadsFeatures):
    hidden = HidesNan.hidden


@dataclass(frozen=True)
class ChangesFeatures(ReadsFeatures):
    def plan_epoch(self, records: Any, **rest: Any) -> EpochPlan:
        plan = ReadsFeatures.plan_epoch(self, records, **rest)
        records["feature"].mul_(0.5)
        return plan

    plan_epoch.__signature__ = inspect.signature(Hides.plan_epoch)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class AsksForMore(ReadsFeatures):
    def full_pass(self, epoch: int, epochs: int) -> tuple[str, ...]:
        return ("feature", "loss")


@dataclass(frozen=True)
class HoldsRecords(Hides):
    """Its weights are a column, unless that is all 0."""

    card: ClassVar[Card] = replace(CARD, bytes_per_sample=8)

    def columns(self) -> dict[str, Column]:
        return {**super().columns(), "seen": Column(torch.float32, signal="epoch")}

    def plan_epoch(
        self, records: Any, *, epoch: int, epochs: int, generator: torch.Generator
    ) -> EpochPlan:
        seen = records["seen"]
        n = len(seen)
        weights = seen if bool(seen.any()) else torch.ones(n)
        return replace(self.planned(torch.arange(n), n), weights=weights)


class NoDataclass:
    stage: ClassVar[Literal["epoch"]] = "epoch"
    card: ClassVar[Card] = CARD
    columns = Hides.columns
    plan_epoch = Hides.plan_epoch


@dataclass(frozen=True)
class OwnsNestedList(Hides):
    table: Any = field(default_factory=lambda: (1, (2, [3])))


@dataclass
class Unhashable:
    """A value without a hash."""


@dataclass(frozen=True)
class HasNoHash(Hides):
    inner: Any = field(default_factory=Unhashable)


@dataclass(frozen=True)
class CopiesDifferently(Hides):
    def __reduce__(self) -> Any:
        return CopiesDifferently, (0.4,)


@dataclass(frozen=True)
class HashesByIdentity(Hides):
    __hash__ = object.__hash__  # type: ignore[assignment]


@dataclass(frozen=True)
class HasUnreadableRepr(Hides):
    def __repr__(self) -> str:
        return "<a method>"


@dataclass(frozen=True)
class InfiniteFact(Hides):
    def planned(self, ids: Tensor, n: int) -> EpochPlan:
        plan = super().planned(ids, n)
        return replace(plan, facts={**plan.facts, "largest": float("inf")})


@dataclass(frozen=True)
class FactIsText(Hides):
    def planned(self, ids: Tensor, n: int) -> EpochPlan:
        plan = super().planned(ids, n)
        return replace(plan, facts={**plan.facts, "rule": "smallest"})


@dataclass(frozen=True)
class Weighted(Hides):
    weight: float = -1.0

    def planned(self, ids: Tensor, n: int) -> EpochPlan:
        return replace(super().planned(ids, n), weights=torch.full((len(ids),), self.weight))


@dataclass(frozen=True)
class ReturnsIds(Hides):
    def planned(self, ids: Tensor, n: int) -> Any:
        return ids


@dataclass(frozen=True)
class RemembersUnknown(Hides):
    def planned(self, ids: Tensor, n: int) -> EpochPlan:
        return replace(super().planned(ids, n), remember={"loss": torch.zeros(n)})


def failing_merge(old: Tensor, new: Tensor) -> Tensor:
    raise ArithmeticError("cannot merge")


@dataclass(frozen=True)
class MergeFails(Hides):
    def columns(self) -> dict[str, Column]:
        return {"loss": Column(torch.float32, fill=NEVER_SEEN, merge=failing_merge)}


def is_kind(loss: Tensor, kind: str) -> bool:
    """Whether losses are of a kind of values of the check."""
    finite = loss[loss.isfinite()]
    return {
        "smooth": bool((finite * 8 != (finite * 8).round()).any()),
        "equal": len(finite) > 1 and bool((finite == finite[0]).all() and finite[0] != 0),
        "zero": len(finite) > 1 and not bool(finite.any()),
        "huge": bool((finite > 1e20).any()),
        "spoilt": bool(loss.isnan().any()) and len(finite) > 0,
        "lost": len(loss) > 1 and bool(loss.isnan().any()) and not len(finite),
        "one": len(loss) == 1,
        "two": len(loss) == 2,
        "seven": len(loss) == 7,
    }[kind]


@dataclass(frozen=True)
class FailsOn(Hides):
    """Fails for one kind of losses."""

    kind: str = "one"

    def hidden(self, loss: Any, generator: torch.Generator) -> Any:
        if is_kind(torch.from_numpy(loss), self.kind):
            raise ArithmeticError(self.kind)
        return super().hidden(loss, generator)


@dataclass(frozen=True)
class NeedsContiguous(Hides):
    def plan_epoch(
        self, records: Any, *, epoch: int, epochs: int, generator: torch.Generator
    ) -> EpochPlan:
        loss = records["loss"]
        dense = torch.as_strided(loss, loss.shape, (1,))
        return super().plan_epoch({"loss": dense}, epoch=epoch, epochs=epochs, generator=generator)


@dataclass(frozen=True)
class RefusesTraining(Hides):
    def check(self, ids: Tensor) -> None:
        raise ValueError("no such samples")


SEEN_EPOCHS: dict[int, int] = {}


@dataclass(frozen=True)
class CountsPlans(Hides):
    """Plans of a training of four epochs depend on how often it has planned them."""

    def plan_epoch(
        self, records: Any, *, epoch: int, epochs: int, generator: torch.Generator
    ) -> EpochPlan:
        plan = super().plan_epoch(records, epoch=epoch, epochs=epochs, generator=generator)
        if epochs != 4:
            return plan
        SEEN_EPOCHS[epoch] = SEEN_EPOCHS.get(epoch, 0) + 1
        return replace(plan, lr_scale=1 + 0.1 * SEEN_EPOCHS[epoch])


# Batch methods that break a promise


@dataclass(frozen=True)
class ByRow(Keeps):
    """Breaks ties by the order of the rows."""

    def plan_batch(self, signals: Any, state: Any, *, step: int, generator: torch.Generator) -> Any:
        return super().plan_batch(
            {**signals, "id": torch.arange(len(signals["id"]))},
            state,
            step=step,
            generator=generator,
        )


@dataclass(frozen=True)
class DrawsByRow(Keeps):
    """Draws for the rows as they come."""

    def plan_batch(self, signals: Any, state: Any, *, step: int, generator: torch.Generator) -> Any:
        draws = torch.rand(len(signals["id"]), generator=generator)
        finite = signals["loss"].isfinite()
        return super().plan_batch(
            {**signals, "loss": torch.where(finite, draws, torch.inf)},
            state,
            step=step,
            generator=generator,
        )


@dataclass(frozen=True)
class NanLast(Keeps):
    def scores(self, signals: Any) -> Tensor:
        return signals["loss"].nan_to_num(nan=-1e9, posinf=-1e9, neginf=-1e9)


@dataclass(frozen=True)
class RemembersIds(Keeps):
    """A table that grows with the dataset, and a card that does not say so."""

    def init_state(self) -> dict[str, Any]:
        return {"seen": torch.empty(0, dtype=torch.int64)}

    def plan_batch(self, signals: Any, state: Any, *, step: int, generator: torch.Generator) -> Any:
        plan, _ = super().plan_batch(signals, state, step=step, generator=generator)
        return plan, {"seen": torch.cat((state["seen"], signals["id"])).unique()}


@dataclass(frozen=True)
class ChangesSignals(Keeps):
    def scores(self, signals: Any) -> Tensor:
        return signals["loss"]

    def plan_batch(self, signals: Any, state: Any, *, step: int, generator: torch.Generator) -> Any:
        answer = super().plan_batch(signals, state, step=step, generator=generator)
        signals["loss"].mul_(0.5)
        return answer


@dataclass(frozen=True)
class ChangesState(Keeps):
    def init_state(self) -> dict[str, Any]:
        return {"steps": torch.zeros(1)}

    def plan_batch(self, signals: Any, state: Any, *, step: int, generator: torch.Generator) -> Any:
        state["steps"] += 1
        return super().plan_batch(signals, state, step=step, generator=generator)


@dataclass(frozen=True)
class HoldsSignals(Keeps):
    def plan_batch(self, signals: Any, state: Any, *, step: int, generator: torch.Generator) -> Any:
        plan, _ = super().plan_batch(signals, state, step=step, generator=generator)
        return plan, {"last": signals["loss"].detach()[:1]}


@dataclass(frozen=True)
class SameState(Keeps):
    def plan_batch(self, signals: Any, state: Any, *, step: int, generator: torch.Generator) -> Any:
        return super().plan_batch(signals, state, step=step, generator=generator)[0], state


class Odd:
    """Not a plain value."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class OddState(Keeps):
    def init_state(self) -> dict[str, Any]:
        return {"odd": Odd()}


@dataclass(frozen=True)
class Waits(Keeps):
    def scores(self, signals: Any) -> Tensor:
        return signals["loss"] * max(signals["loss"].nan_to_num(0, 1, 1).sum().item() * 0, 1)


@dataclass(frozen=True)
class Miscounts(Keeps):
    def count(self, n: int) -> int | None:
        return n


@dataclass(frozen=True)
class Descending(Keeps):
    def plan_batch(self, signals: Any, state: Any, *, step: int, generator: torch.Generator) -> Any:
        plan, after = super().plan_batch(signals, state, step=step, generator=generator)
        return replace(plan, rows=plan.rows.flip(0)), after


@dataclass(frozen=True)
class Undecided(Keeps):
    requires: ClassVar[Requirements] = Requirements(signals=("loss",))

    def active(self, progress: float, step: int) -> Any:
        return progress


@dataclass(frozen=True)
class NoPlan(Keeps):
    def plan_batch(self, signals: Any, state: Any, *, step: int, generator: torch.Generator) -> Any:
        return torch.arange(1), {}


@dataclass(frozen=True)
class OtherNamesOfBatch(Keeps):
    def plan_batch(self, signals: Any, state: Any, *, step: int) -> Any:  # type: ignore[override]
        return super().plan_batch(signals, state, step=step, generator=torch.Generator())


@dataclass(frozen=True)
class HoldsState(Keeps):
    def init_state(self) -> dict[str, Any]:
        return {"steps": torch.zeros(2)}

    def plan_batch(self, signals: Any, state: Any, *, step: int, generator: torch.Generator) -> Any:
        plan, _ = super().plan_batch(signals, state, step=step, generator=generator)
        return plan, {"steps": state["steps"].flip(0).flip(0) + 1, "last": state["steps"][:1]}


START = (0.0,)


@dataclass(frozen=True)
class StateByIdentity(Keeps):
    """Loaded state is not the object that it was."""

    def init_state(self) -> dict[str, Any]:
        return {"start": START}

    def plan_batch(self, signals: Any, state: Any, *, step: int, generator: torch.Generator) -> Any:
        plan, _ = super().plan_batch(signals, state, step=step, generator=generator)
        weights = torch.full(plan.rows.shape, 1.0 if state["start"] is START else 2.0)
        return replace(plan, weights=weights.to(plan.rows.device)), dict(state)


@dataclass(frozen=True)
class RowsOnCpu(Keeps):
    def plan_batch(self, signals: Any, state: Any, *, step: int, generator: torch.Generator) -> Any:
        plan, after = super().plan_batch(signals, state, step=step, generator=generator)
        on_cpu = plan.rows if plan.rows.device.type == "cpu" else torch.arange(len(plan.rows))
        return replace(plan, rows=on_cpu), after


@dataclass(frozen=True)
class BeyondTheBatch(Keeps):
    def plan_batch(self, signals: Any, state: Any, *, step: int, generator: torch.Generator) -> Any:
        plan, after = super().plan_batch(signals, state, step=step, generator=generator)
        return replace(plan, rows=plan.rows + 1), after


@dataclass(frozen=True)
class ActiveFails(Undecided):
    def active(self, progress: float, step: int) -> Any:
        return 1 / (1 - progress) > 0


@dataclass(frozen=True)
class WeightedRows(Keeps):
    weight: float = -1.0

    def plan_batch(self, signals: Any, state: Any, *, step: int, generator: torch.Generator) -> Any:
        plan, after = super().plan_batch(signals, state, step=step, generator=generator)
        weights = torch.full(plan.rows.shape, self.weight, device=plan.rows.device) * 1e38
        return replace(plan, weights=weights), after


@dataclass(frozen=True)
class WeighsByRow(Keeps):
    """Chooses the same samples in any order, but weighs the first row more."""

    def plan_batch(self, signals: Any, state: Any, *, step: int, generator: torch.Generator) -> Any:
        plan, after = super().plan_batch(signals, state, step=step, generator=generator)
        first = torch.arange(len(plan.rows), device=plan.rows.device) == 0
        return replace(plan, weights=1.0 + first), after


@dataclass(frozen=True)
class RemembersFirstRow(Keeps):
    def init_state(self) -> dict[str, Any]:
        return {"first": torch.zeros(1)}

    def plan_batch(self, signals: Any, state: Any, *, step: int, generator: torch.Generator) -> Any:
        plan, _ = super().plan_batch(signals, state, step=step, generator=generator)
        return plan, {"first": signals["loss"][:1] + 0}


@dataclass(frozen=True)
class NoFactOfBatch(Keeps):
    def plan_batch(self, signals: Any, state: Any, *, step: int, generator: torch.Generator) -> Any:
        plan, after = super().plan_batch(signals, state, step=step, generator=generator)
        return replace(plan, facts={}), after


@dataclass(frozen=True)
class NeedsContiguousRows(Keeps):
    def plan_batch(self, signals: Any, state: Any, *, step: int, generator: torch.Generator) -> Any:
        loss = signals["loss"]
        signals = {**signals, "loss": torch.as_strided(loss, loss.shape, (1,))}
        return super().plan_batch(signals, state, step=step, generator=generator)


@dataclass(frozen=True)
class FailsOnRows(Keeps):
    """Fails for one kind of losses, or number of rows."""

    kind: str = "one"

    def scores(self, signals: Any) -> Tensor:
        if signals["loss"].device.type == "cpu" and is_kind(signals["loss"], self.kind):
            raise ArithmeticError(self.kind)
        return signals["loss"]


@dataclass(frozen=True)
class FailsLate(Keeps):
    def plan_batch(self, signals: Any, state: Any, *, step: int, generator: torch.Generator) -> Any:
        if step > 20:
            raise ArithmeticError("too many steps")
        return super().plan_batch(signals, state, step=step, generator=generator)


# Methods of the third stage


@dataclass(frozen=True)
class Drops:
    """A sound method that decides before training: drops every third sample."""

    stage: ClassVar[Literal["before"]] = "before"
    card: ClassVar[Card] = CARD_OF_BATCHES

    def kept(self, n: int) -> Tensor:
        ids = torch.arange(n)
        return ids[ids % 3 > 0]


@dataclass(frozen=True)
class DropsAll(Drops):
    def kept(self, n: int) -> Tensor:
        return torch.arange(0)


@dataclass(frozen=True)
class DropsAtRandom(Drops):
    def kept(self, n: int) -> Tensor:
        return torch.randperm(n)[: n // 2].sort().values


@dataclass(frozen=True)
class DropsWrongly(Drops):
    """Returns what cannot be ids of kept samples."""

    returned: str = "list"

    def kept(self, n: int) -> Any:
        ids = torch.arange(n)
        return {
            "list": ids.tolist(),
            "floats": ids.float(),
            "table": ids[None],
            "descending": ids.flip(0),
            "repeated": torch.cat([ids, ids[-1:]]),
            "beyond": ids + 1,
            "negative": ids - 1,
        }[self.returned]


@dataclass(frozen=True)
class DropsNothing(Drops):
    def kept(self, n: int) -> Tensor:
        raise ArithmeticError("cannot choose")


@dataclass(frozen=True)
class DropsByCall(Drops):
    def kept(self, n: int) -> Tensor:
        CALLS.append(1)
        return torch.arange(1 + len(CALLS) % (n - 1))


@dataclass(frozen=True)
class Misspelt(Keeps):
    def actve(self, progress: float, step: int) -> bool:
        return progress > 0.1


def test_a_method_that_decides_before_training_passes() -> None:
    check_method(Drops())


def test_a_method_with_a_pass_over_all_samples_passes() -> None:
    check_method(ReadsFeatures())


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        (DrawsFromTorch(), "draws from global random state"),
        (DrawsFromNumpy(), "draws from global random state"),
        (Unseeded(), "answers differently to the same question"),
        (SortsUnstably(), r"breaks ties by something else than \(value, id\)"),
        (HidesNan(), "leaves out samples whose signals are"),
        (HidesUnseen(), "leaves out samples whose signals are -inf"),
        (LiesAboutBytes(), "its card says 4 bytes per sample, it takes 8"),
        (ChangesRecords(), "changes the records it is given"),
        (NotFrozen(), "is not frozen"),
        (FloatIds(), "plan_epoch of epoch 0 .* raised TypeError: EpochPlan: `ids` must be int64"),
        (
            BeyondTheDataset(),
            r"plan_epoch of epoch 0 .* raised ValueError: EpochPlan: `ids` must be within \[0, 50\)",
        ),
        (WrongFact(), "its plan has actual_fraction = 0.9 and dropped_fraction = 0.0, but"),
        (WrongDrop(), "its plan has actual_fraction = .* and dropped_fraction = 0.5, but"),
        (NoFact(), "its plan has no fact 'scheduled_fraction'"),
        (NanWeights(), "its plan has weights that are not finite"),
        (KeepsStateOutside(), "answers differently to the same question"),
        (OwnsTensor(), "its setting `table` owns a Tensor"),
        (RemembersItself(), "keeps seen besides its settings"),
        (ForgetsSettings(0.4), "its repr gives another method"),
        (NoCard(), "has no `card`"),
        (OtherNames(), "plan_epoch takes epoch, generator by name, not epoch, epochs, generator"),
        (HidesTheOnly(), "plan_epoch of epoch . .* raised ValueError: EpochPlan: `ids` is empty"),
        (TrainsBackwards(), "training does not lower the loss"),
        (ByRow(), "another order of a batch's rows gives other samples"),
        (DrawsByRow(), "another order of a batch's rows gives other samples"),
        (NanLast(), "leaves out samples whose signals are nan"),
        (RemembersIds(), "its card says 0 bytes per sample, it takes 8"),
        (ChangesSignals(), "changes the signals it is given"),
        (ChangesState(), "changes the state it is given"),
        (HoldsSignals(), "its plan or its state holds on to the signals"),
        (SameState(), "plan_batch returned the state it was given"),
        (OddState(), "its state does not load with weights_only=True"),
        (Waits(), "plan_batch waits for the device"),
        (Miscounts(), r"count\(64\) gives 64 rows, plan_batch kept 32"),
        (Descending(), "its rows are not ascending"),
        (Undecided(), r"active\(0.0, 0\) is 0.0, it must be True or False"),
        (NoPlan(), "plan_batch returned Tensor, not"),
        (DrawsFromRandom(), "draws from global random state"),
        (ReadsTheSeed(), "its answer depends on global random state"),
        (RemembersQuestions(), "answers differently after other questions"),
        (AnswersByIdentity(), "answers differently to the same question"),
        (HidesTheLost(), "leaves out samples whose signals are (nan|inf|-inf)"),
        (HidesNanFeatures(), "leaves out samples whose signals are (nan|inf|-inf)"),
        (ChangesFeatures(), "changes the records it is given"),
        (
            AsksForMore(),
            "full_pass asks for .*; it can ask for 'error', 'feature' and 'label' only",
        ),
        (HoldsRecords(), "its plan or its state holds on to the records: it changes when they do"),
        (NoDataclass(), "is not a dataclass"),
        (OwnsNestedList(), "its setting `table` owns a list"),
        (HasNoHash(), "hash, pickle or deepcopy raised TypeError: unhashable type"),
        (CopiesDifferently(), "pickle gives another method: CopiesDifferently"),
        (HashesByIdentity(), "pickle gives another method: HashesByIdentity"),
        (HasUnreadableRepr(), r"eval\(repr\(method\)\) raised SyntaxError"),
        (InfiniteFact(), "its plan has the fact 'largest' = inf; facts are finite plain numbers"),
        (FactIsText(), "its plan has the fact 'rule' = 'smallest'; facts are finite plain numbers"),
        (Weighted(weight=-1.0), "its plan has weights that are not finite, negative, or all 0"),
        (Weighted(weight=0.0), "its plan has weights that are not finite, negative, or all 0"),
        (ReturnsIds(), "plan_epoch returned Tensor, it must return a thresher.EpochPlan"),
        (RemembersUnknown(), "what its plan wants to remember raised ValueError: EpochPlan"),
        (MergeFails(), "a merge of its columns raised ArithmeticError: cannot merge"),
        *(
            (FailsOn(kind=kind), f"plan_epoch of epoch .* raised ArithmeticError: {kind}$")
            for kind in ("smooth", "equal", "zero", "huge", "spoilt", "lost", "one")
        ),
        (NeedsContiguous(), "inputs that are not contiguous in memory give another plan"),
        (RefusesTraining(), "a training with it attached raised ValueError: no such samples"),
        (CountsPlans(), "a run that is resumed in the middle of an epoch differs"),
        (OtherNamesOfBatch(), "plan_batch takes step by name, not step, generator"),
        (HoldsState(), "its plan or its state holds on to the signals"),
        (StateByIdentity(), "answers differently after its state was saved and loaded"),
        (RowsOnCpu(), "its rows are on cpu, its signals on meta|plan_batch waits for the device"),
        (BeyondTheBatch(), "its rows are not within a batch of"),
        (ActiveFails(), r"active\(1.0, 4\) raised ZeroDivisionError"),
        (WeightedRows(weight=-1.0), "its plan has weights that are not finite, negative, or all 0"),
        (WeightedRows(weight=0.0), "its plan has weights that are not finite, negative, or all 0"),
        (WeightedRows(weight=10.0), "its plan has weights that are not finite, negative, or all 0"),
        (WeighsByRow(), "another order of a batch's rows gives other samples, weights or states"),
        (RemembersFirstRow(), "another order of a batch's rows gives other samples, weights or"),
        (NoFactOfBatch(), "its plan has no fact 'scheduled_fraction'"),
        (NeedsContiguousRows(), "inputs that are not contiguous in memory give another plan"),
        *(
            (FailsOnRows(kind=kind), f"plan_batch of step .* raised ArithmeticError: {kind}$")
            for kind in ("smooth", "equal", "zero", "huge", "spoilt", "lost", "one", "two", "seven")
        ),
        (FailsLate(), "a training with it attached raised ArithmeticError: too many steps"),
        *(
            (DropsWrongly(returned=kind), sentence)
            for kind, sentence in {
                "list": "kept returned list, it must return a tensor of ids",
                "floats": "a plan with .* kept.50. raised TypeError: .* must be int64, got torch.float32",
                "table": r".* kept.50. raised .* must have one dimension, got shape \(1, 50\)",
                "descending": ".* kept.50. raised .* must be ascending without repeats",
                "repeated": ".* kept.50. raised .* must be ascending without repeats",
                "beyond": r".* kept.50. raised .* within \[0, 50\), got 1 to 50",
                "negative": r".* kept.50. raised .* within \[0, 50\), got -1 to 48",
            }.items()
        ),
        (DropsNothing(), r".* kept\(50\) raised ArithmeticError: cannot choose"),
        (DropsByCall(), "answers differently to the same question"),
        (
            DropsAll(),
            "a plan with the ids of kept.50. raised ValueError: EpochPlan: `ids` is empty",
        ),
        (DropsAtRandom(), "draws from global random state"),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_a_broken_promise_is_named(method: Any, sentence: str) -> None:
    with pytest.raises(ContractError, match=f"^{type(method).__name__}: ({sentence})"):
        check_method(method)


@dataclass(frozen=True)
class DependsOnDevice(Keeps):
    def scores(self, signals: Any) -> Tensor:
        return -signals["loss"] if signals["loss"].is_cuda else signals["loss"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_method_that_depends_on_the_device() -> None:
    with pytest.raises(ContractError, match="chooses differently if its inputs are on a GPU"):
        check_method(DependsOnDevice())


def test_what_is_no_method() -> None:
    with pytest.raises(ContractError, match=r"^Hides: is a class; check an instance, Hides\(\)"):
        check_method(Hides)
    with pytest.raises(
        ContractError, match="^int: has stage = None; it must be one of 'before', 'epoch', 'batch'"
    ):
        check_method(3)

    @dataclass(frozen=True)
    class Half:
        stage: ClassVar[str] = "batch"

        def count(self, n: int) -> int:
            return n

    with pytest.raises(
        ContractError, match="^Half: has stage = 'batch' but lacks init_state, plan_batch$"
    ):
        check_method(Half())
    with pytest.raises(ContractError, match=r"^Misspelt\.actve is neither .* name is 'active'"):
        check_method(Misspelt())


@dataclass(frozen=True)
class ByOwnSignal(Keeps):
    """Keeps the largest of a signal that `attach(signals=...)` gives."""

    requires: ClassVar[Requirements] = Requirements(signals=("surprise",))

    def scores(self, signals: Any) -> Tensor:
        return signals["surprise"]


def test_signals_of_the_users_own() -> None:
    check_method(ByOwnSignal(), signals={"surprise": lambda generator, n: generator.random(n)})
    with pytest.raises(
        ValueError, match="^check_method: ByOwnSignal needs the signal 'surprise'; pass a function"
    ):
        check_method(ByOwnSignal())


def test_warnings_of_the_training_are_not_the_callers() -> None:
    check_method(thresher.SelectiveBackprop(keep=0.9))
