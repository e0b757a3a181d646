"""The plan of an epoch: asked of the method, checked, and spent as the user wants."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from thresher import rng
from thresher.distributed.kept import HeldPlan, part_of_plan
from thresher.distributed.layout import ShardLayout
from thresher.distributed.packed import PackedPlan
from thresher.distributed.records import ShardedRecords
from thresher.exact import exact_mean
from thresher.loading.loader import SelectedLoader
from thresher.loading.order import SequentialOrder, TensorOrder
from thresher.methods._on_stream import OnStream
from thresher.methods._on_subset import OnSubset
from thresher.methods.contract import EpochMethod, requirements_of, way_around
from thresher.passes.own import OwnPasses
from thresher.plans import EpochPlan
from thresher.records import Records
from thresher.shards import ALONE, Shard, World, shard_of


@dataclass(frozen=True)
class RunSettings:
    """What a run was attached with.

    Args:
        epochs: Number of epochs of the whole training.
        seed: Random seed of all draws.
        on_nonfinite: "keep" or "raise", see `attach`.
        spend: "steps", "batches" or None, see `attach`.
        alone: Whether there is one method only, so that facts of its batches need no prefix in the history.
    """

    epochs: int
    seed: int
    on_nonfinite: Literal["keep", "raise"]
    spend: Literal["steps", "batches"] | None
    alone: bool


class Planner:
    """Makes the plans of a run.

    Args:
        settings: Arguments of `attach`.
        method: The epoch method, on the samples that pruning left where there was pruning.
        loader: The loader of the run.
        records: Records of all samples.
        passes: Makes own forward passes.
        fills: Function that returns whether a batch method fills the rows that it chooses up to full batches.
        steps_are_seen: Whether there is an optimizer, whose learning rate can be scaled.
    """

    def __init__(
        self,
        settings: RunSettings,
        method: EpochMethod | OnSubset,
        loader: SelectedLoader,
        records: Records,
        passes: OwnPasses,
        *,
        fills: Callable[[], bool | None],
        steps_are_seen: bool,
    ) -> None:
        self._settings, self._method, self._loader = settings, method, loader
        self._records, self._passes, self._fills, self._steps_are_seen = records, passes, fills, steps_are_seen
        self._said: set[str] = set()

    def plan(self, epoch: int, seed: int) -> HeldPlan:
        """Returns the plan of an epoch.

        Args:
            epoch: Number of the epoch.
            seed: Random seed of the run.

        Raises:
            TypeError: The method returned no plan.
            ValueError: The plan does not fit the training.
        """
        generator, epochs = rng.seeded(seed, epoch), self._settings.epochs
        known, shard = self._known(epoch), self._records.shard
        plan = self._method.plan_epoch(known, epoch=epoch, epochs=epochs, generator=generator)
        plan = self._checked(plan, shard_of(known))
        if self._gathers:
            plan = part_of_plan(plan, shard)
        held = self.hold(PackedPlan.of(plan, shard))
        self._records.remember(plan.remember)
        if plan.note and plan.note not in self._said:
            self._said.add(plan.note)
            warnings.warn(plan.note, stacklevel=5)
        return held

    def hold(self, own: PackedPlan) -> HeldPlan:
        """Returns a plan as a run holds it; all processes call it together.

        Args:
            own: Part of the plan that is of this process's block.
        """
        shard = self._records.shard
        return HeldPlan(own, ShardLayout(shard.n, shard.world.size), shard.world)

    def _known(self, epoch: int) -> Mapping[str, Tensor]:
        """What a plan is made of: the records and, where the method asks for one, the results of a full pass."""
        method: Any = self._method
        if self._gathers:
            assert isinstance(self._records, ShardedRecords)
            return self._records.gathered(title_of(method), way_around(method, "sharded"))
        names = method.full_pass(epoch, self._settings.epochs) if requirements_of(method).full_pass else ()
        if not names:
            return self._records
        kept = method.kept if isinstance(method, OnSubset) else None
        ids = SequentialOrder(self._loader.n) if kept is None else TensorOrder(lambda: kept)
        return {**self._records, **self._passes.full_pass(ids, names)}

    @property
    def _gathers(self) -> bool:
        """Whether every process makes the plan of all samples, because the method does not plan for a shard."""
        return self._records.shard.world.size > 1 and not requirements_of(self._method).sharded

    def _checked(self, plan: Any, shard: Shard) -> EpochPlan:
        name = title_of(self._method)
        if not isinstance(plan, EpochPlan):
            raise TypeError(f"{name}.plan_epoch must return a thresher.EpochPlan, got {type(plan).__name__}")
        plan.check(shard)
        plan = as_spent(plan, self._settings.spend, shard.world)
        if plan.smaller_batches and self._fills():
            raise ValueError(
                f"{name} makes smaller batches, which the batch method would fill up with forward_passes='twice': use "
                "forward_passes='once', or one of the two methods"
            )
        if plan.drawn and not self._loader.order_is_free:
            raise ValueError(
                f"{name} draws the order of training, but the loader's sampler has an order of its own: use shuffle=True"
            )
        if plan.lr_scale != 1 and not self._steps_are_seen:
            raise ValueError(f"{name} scales the learning rate: pass attach(optimizer=...)")
        if plan.scores is not None and not requirements_of(self._method).weighted_statistics:
            raise ValueError(
                f"{name} has plans with `scores`, and does not declare it: requires = Requirements(weighted_statistics=True)"
            )
        if plan.refresh is not None and not self._passes.possible:
            raise ValueError(f"{name} refreshes samples: pass attach(model=..., criterion=...)")
        return plan


def as_spent(plan: EpochPlan, spend: Literal["steps", "batches"] | None, world: World = ALONE) -> EpochPlan:
    """Returns a plan that spends its samples as `attach(spend=)` says.

    With as many steps as in full training there is nothing to make up for: the learning rate is not scaled, and weights have a
    mean of 1.

    Args:
        plan: Plan of the method.
        spend: "steps", "batches", or None for the plan as it is.
        world: Processes that have the other parts of the plan. Default: there are none.
    """
    if spend != "batches" or plan.smaller_batches:
        return plan
    weights = None if plan.weights is None else plan.weights / exact_mean(plan.weights.numpy(), world)
    return replace(plan, smaller_batches=True, weights=weights, lr_scale=1.0)


def title_of(method: Any) -> str:
    """Returns the name of a method, for messages."""
    return type(method.method if isinstance(method, OnSubset | OnStream) else method).__name__
