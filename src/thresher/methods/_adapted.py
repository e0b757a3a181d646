"""Epoch methods that cannot plan for the whole dataset: on a stream, after pruning, or beside another sampler."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from thresher.methods.contract import EpochMethod, Requirements, State
from thresher.plans import BatchPlan, EpochPlan
from thresher.records import Column
from thresher.selection import chosen, ids_of, share
from thresher.shards import Shard, ShardColumns, shard_of


class OnStream:
    """A batch method in place of an epoch method: as many steps as full training, each with the same share of a batch.

    What a batch has too little or too much, because its share is no whole number of rows, later batches make up for.

    Args:
        method: Epoch method whose place it takes.
        share: Share kept of each batch, (0, 1].
        least: Least number of rows of a batch, 1 or more. A smaller last batch has fewer only where it is smaller than that.

    Example:
        >>> from thresher import Winnow
        >>> method, state, sizes = OnStream(Winnow(0.5), 0.5), {"seen": 0, "kept": 0}, []
        >>> for step in range(4):
        ...     generator = torch.Generator().manual_seed(step)
        ...     plan, state = method.plan_batch({"id": torch.arange(5)}, state, step=step, generator=generator)
        ...     sizes.append(len(plan.rows))
        >>> sizes
        [2, 3, 2, 3]
    """

    stage: ClassVar[Literal["batch"]] = "batch"
    requires: ClassVar[Requirements] = Requirements()

    def __init__(self, method: EpochMethod, share: float, least: int = 1) -> None:
        self.method, self.share, self.least = method, share, least

    def init_state(self) -> State:
        """Returns the numbers of rows that were seen and kept so far."""
        return {"seen": 0, "kept": 0}

    def count(self, n: int) -> int | None:
        """Returns None: the number of rows of a batch depends on the batches before it."""
        return None

    def plan_batch(
        self, signals: Mapping[str, Tensor], state: State, *, step: int, generator: torch.Generator
    ) -> tuple[BatchPlan, State]:
        """Returns a random part of the batch, whose row numbers are made on the host: nothing waits for the device."""
        n = len(signals["id"])
        seen = state["seen"] + n
        rows = max(min(self.least, n), share(self.share, n), share(self.share, seen) - state["kept"])
        facts = {"scheduled_fraction": 1 - self.share, "actual_fraction": 1 - rows / max(1, n)}
        return BatchPlan(ids_of(chosen(n, rows, generator)), facts=facts), {"seen": seen, "kept": state["kept"] + rows}


class OnSubset:
    """An epoch method that plans for a subset of the dataset; its plans have the ids of the dataset.

    Args:
        method: Epoch method that makes the plans.
        kept: Ids of the samples that the training has at all, shape (K,), int64, ascending; of those in the shard of this rank,
            where records are in shards.
        n: Number of samples of the dataset.
        of: Number of samples that fractions refer to. Default: `n`, as after pruning.
    """

    stage: ClassVar[Literal["epoch"]] = "epoch"

    def __init__(self, method: EpochMethod, kept: Tensor, n: int, of: int | None = None) -> None:
        self.method, self.kept, self.n, self.of = method, kept, n, of or n

    def __getattr__(self, name: str) -> Any:
        if name == "method" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.method, name)

    def columns(self) -> dict[str, Column]:
        """Returns the columns of the method."""
        return self.method.columns()

    def plan_epoch(self, records: Mapping[str, Tensor], *, epoch: int, epochs: int, generator: torch.Generator) -> EpochPlan:
        """Returns the plan of the method with the ids of the dataset; its fractions include the samples that were pruned."""
        columns, shard = self.columns(), shard_of(records)
        places = self.kept - shard.first
        inner = shard.subset(len(places))
        inside = {
            name: values.index_select(0, places.to(values.device)) if name in columns else values
            for name, values in records.items()
        }
        plan = self.method.plan_epoch(ShardColumns(inside, inner), epoch=epoch, epochs=epochs, generator=generator)
        if not isinstance(plan, EpochPlan):
            return plan
        plan.check(inner)
        facts = dict(plan.facts)
        if "actual_fraction" in facts:
            facts["actual_fraction"] = 1 - plan.share * shard.world.total(len(plan.ids)) / self.of
        if "scheduled_fraction" in facts:
            facts["scheduled_fraction"] = 1 - (1 - facts["scheduled_fraction"]) * inner.n / self.of
        if inner.n < self.of:
            facts["pruned_fraction"] = 1 - inner.n / self.of
        return replace(
            plan,
            ids=self.kept[plan.ids - inner.first],
            refresh=None if plan.refresh is None else self.kept[plan.refresh - inner.first],
            facts=facts,
            remember={name: self._spread(values, columns[name], shard) for name, values in plan.remember.items()},
            lots=None,
        )

    def _spread(self, values: Tensor, column: Column, shard: Shard) -> Tensor:
        whole = torch.full((len(shard),), column.fill, dtype=values.dtype)
        return whole.index_copy_(0, self.kept - shard.first, values.cpu())

    def __repr__(self) -> str:
        return f"{self.method!r} within {len(self.kept)} of {self.n} samples"
