"""The contract check: methods that keep their promises pass, and each broken promise is found and named."""

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
from thresher.testing import check as checks

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
        return signals["loss"] * max(signals["loss"].nan_to_num(posinf=1).sum().item() * 0, 1)


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


def test_a_method_that_decides_before_training_passes() -> None:
    check_method(Drops())


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        (DrawsFromTorch(), "draws from global random state"),
        (DrawsFromNumpy(), "draws from global random state"),
        (
            Unseeded(),
            "its answer depends on global random state|answers differently to the same question",
        ),
        (SortsUnstably(), r"breaks ties by something else than \(value, id\)"),
        (HidesNan(), "hides samples whose loss is"),
        (HidesUnseen(), "hides samples whose loss is -inf"),
        (LiesAboutBytes(), "its card says 4 bytes per sample, it takes 8"),
        (ChangesRecords(), "changes the records it is given"),
        (NotFrozen(), "is not frozen"),
        (FloatIds(), "plan_epoch of epoch 0 .* raised TypeError: EpochPlan: `ids` must be int64"),
        (
            BeyondTheDataset(),
            r"plan_epoch of epoch 0 .* raised ValueError: EpochPlan: `ids` must be within \[0, 50\)",
        ),
        (WrongFact(), "its plan has actual_fraction = 0.9, but"),
        (WrongDrop(), "its plan has actual_fraction = .* and dropped_fraction = 0.5, but"),
        (NoFact(), "its plan has no fact 'scheduled_fraction'"),
        (NanWeights(), "its plan has weights that are not finite"),
        (KeepsStateOutside(), "its answer depends on global random state|answers differently"),
        (OwnsTensor(), "its setting `table` owns a Tensor"),
        (RemembersItself(), "keeps seen besides its settings"),
        (ForgetsSettings(0.4), "its repr gives another method"),
        (NoCard(), "has no `card`"),
        (OtherNames(), "plan_epoch takes epoch, generator by name, not epoch, epochs, generator"),
        (HidesTheOnly(), "plan_epoch of epoch . .* raised ValueError: EpochPlan: `ids` is empty"),
        (TrainsBackwards(), "training does not lower the loss"),
        (ByRow(), "another order of a batch's rows gives other samples"),
        (DrawsByRow(), "another order of a batch's rows gives other samples"),
        (NanLast(), "leaves out samples without a finite score"),
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
        (DropsAll(), r"kept\(50\) is not ascending within the dataset, or empty"),
        (DropsAtRandom(), "draws from global random state"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_a_broken_promise_is_named(method: Any, sentence: str) -> None:
    with pytest.raises(ContractError, match=f"^{type(method).__name__}: ({sentence})"):
        check_method(method)


def test_what_is_no_method() -> None:
    with pytest.raises(ContractError, match=r"^Hides: is a class; check an instance, Hides\(\)"):
        check_method(Hides)
    with pytest.raises(
        ContractError, match="^int: has stage = None; it must be one of 'epoch', 'batch', 'before'"
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


def test_each_check_stands_for_itself() -> None:
    checks.check_value(Waits())
    checks.check_order(Waits())
    with pytest.raises(ContractError, match="^Waits: plan_batch waits for the device"):
        checks.check_waiting(Waits())


def test_warnings_of_the_training_are_not_the_callers() -> None:
    checks.check_training(thresher.SelectiveBackprop(keep=0.9))
