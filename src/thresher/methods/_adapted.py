"""Epoch methods that choose from a part of the dataset: after pruning, or with a sampler that leaves out samples."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from thresher.methods.contract import EpochMethod
from thresher.plans import EpochPlan
from thresher.records import Column


class OnSubset:
    """An epoch method that chooses from a subset of the dataset; its plans have ids of the whole dataset.

    Args:
        method: Epoch method that makes the plans.
        kept: Ids of the samples in the subset, shape (K,), int64, ascending.
        n: Number of samples of the dataset.
        of: Number of samples that the fractions in the history are shares of. Default: `n`, which includes pruned samples.
    """

    stage: ClassVar[Literal["epoch"]] = "epoch"

    def __init__(self, method: EpochMethod, kept: Tensor, n: int, of: int | None = None) -> None:
        self.method = method
        self.kept = kept
        self.n = n
        self.of = of or n

    def __getattr__(self, name: str) -> Any:
        if name == "method" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.method, name)

    def columns(self) -> dict[str, Column]:
        """Returns what the method stores for each sample."""
        return self.method.columns()

    def plan_epoch(
        self, records: Mapping[str, Tensor], *, epoch: int, epochs: int, generator: torch.Generator
    ) -> EpochPlan:
        """Returns the plan of the method, with ids of the whole dataset and with fractions of `of` samples."""
        columns = self.columns()
        kept = len(self.kept)
        # A full pass runs over the subset only, so its results need no selection.
        inside = {
            name: values.index_select(0, self.kept.to(values.device))
            if len(values) == self.n
            else values
            for name, values in records.items()
        }
        plan = self.method.plan_epoch(inside, epoch=epoch, epochs=epochs, generator=generator)
        if not isinstance(plan, EpochPlan):
            return plan
        plan.check(kept)
        facts = dict(plan.facts)
        if "actual_fraction" in facts:
            facts["actual_fraction"] = 1 - len(plan.ids) / self.of
        if "scheduled_fraction" in facts:
            facts["scheduled_fraction"] = 1 - (1 - facts["scheduled_fraction"]) * kept / self.of
        if kept < self.of:
            facts["pruned_fraction"] = 1 - kept / self.of
        return replace(
            plan,
            ids=self.kept[plan.ids],
            refresh=None if plan.refresh is None else self.kept[plan.refresh],
            facts=facts,
            remember={
                name: self._spread(values, columns[name]) for name, values in plan.remember.items()
            },
        )

    def _spread(self, values: Tensor, column: Column) -> Tensor:
        whole = torch.full((self.n,), column.fill, dtype=values.dtype)
        return whole.index_copy_(0, self.kept, values.cpu())

    def __repr__(self) -> str:
        return f"{self.method!r} within {len(self.kept)} of {self.n} samples"
