"""Makes the plan (chosen samples) of each epoch: calls the method, checks the plan, and stratifies its order."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from thresher import rng
from thresher.loading.packed_plan import PackedPlan, equal_part
from thresher.loading.sampler_order import SamplerOrder
from thresher.methods._adapted import OnSubset
from thresher.methods.contract import EpochMethod, defines, title_given
from thresher.plans import EpochPlan
from thresher.run.parts import Parts
from thresher.run.strata import NO_CLASSES
from thresher.warning import warn


class Planner:
    """Makes the plans of a run, and stores the plan of the current epoch or, between epochs, of the next.

    Args:
        parts: Parts of the run.
        method: The epoch method; after pruning, it chooses among the samples that pruning kept.
        fills: Function that returns whether chosen rows of several batches are gathered into full batches.
    """

    def __init__(
        self, parts: Parts, method: EpochMethod | OnSubset, *, fills: Callable[[], bool | None]
    ) -> None:
        self._config = parts.config
        self._method = method
        self._fills = fills
        self._loader = parts.loader
        self._records = parts.records
        self._passes = parts.passes
        self._warned_of: set[str] = set()
        self.current: PackedPlan | None = None
        """The plan; None if it is not made yet, and for a stream."""

    def plan(self, epoch: int, seed: int) -> PackedPlan:
        """Returns the plan of an epoch.

        Args:
            epoch: Number of the epoch.
            seed: Random seed of the run.

        Raises:
            TypeError: The method did not return a plan.
            ValueError: The plan cannot be used in this run.
        """
        # Before `from_first`, because all processes share the forward passes that it may make.
        inputs = self._inputs(epoch)
        # One process plans, and the others receive the plan: means can differ in the last bit between kinds of CPUs, and
        # processes with different plans would wait for each other.
        plan = PackedPlan(
            **self._config.world.from_first(
                lambda: self._make_plan(inputs, epoch, seed).state_dict()
            )
        )
        if plan.note:
            self._warn(plan.note)
        return plan

    def _make_plan(self, inputs: Mapping[str, Tensor], epoch: int, seed: int) -> PackedPlan:
        """Makes the plan, in the process that has the records."""
        # The draws of an epoch depend on the seed and its number alone, so that a resumed run plans the same.
        generator = rng.seeded(seed, epoch)
        n = self._records.n
        plan = self._method.plan_epoch(
            inputs, epoch=epoch, epochs=self._config.given.epochs, generator=generator
        )
        plan = self._check(plan)
        order = self._loader.order
        if self._config.strata is not None and isinstance(order, SamplerOrder):
            # The batches follow from the number of rows, before the rows have their order.
            rows = len(plan.ids)
            smaller = plan.smaller_batches
            ends, by_rows = order.cut(rows, everything=False, smaller=smaller)
            # A step takes one batch of each process: one entry of `ends` if rows are dealt, else W of them.
            rows_of_steps = np.diff(ends if by_rows else ends[:: self._config.world.size])
            plan = self._config.strata.in_order(
                plan,
                self._records,
                rows_of_steps,
                generator,
                ranks=self._config.world.size,
                by_rows=by_rows,
            )
            if (
                epoch
                and self._config.given.stratify == "class"
                and not self._config.strata.has_classes(self._records)
            ):
                self._warn(NO_CLASSES)
        # After all checks: a refused plan leaves no trace in the records.
        self._records.remember(plan.remember)
        return PackedPlan.of(plan, n)

    def _warn(self, message: str) -> None:
        if message not in self._warned_of:
            self._warned_of.add(message)
            warn(message)

    def _inputs(self, epoch: int) -> Mapping[str, Tensor]:
        """Returns the data for a plan: the records and, if the method requests one, the results of a full pass."""
        method = self._method
        world = self._config.world
        names = ()
        if defines(method, "full_pass"):
            names = method.full_pass(epoch, self._config.given.epochs)  # pyright: ignore[reportAttributeAccessIssue]
        if not names:
            return self._records
        ids = method.kept if isinstance(method, OnSubset) else torch.arange(self._loader.n)
        part = ids[slice(*equal_part(len(ids), world.rank, world.size))]
        signals = self._passes.full_pass(part, names)
        if world.size > 1:
            of_rank = {name: values.cpu() for name, values in signals.items()}
            # `to_first` yields the last rank first, and nothing in the other processes.
            parts = [*world.to_first([of_rank])][::-1]
            signals = {
                name: torch.cat([part[name] for part in parts]).to(signals[name].device)
                for name in signals
                if parts
            }
        return {**self._records, **signals}

    def _check(self, plan: Any) -> EpochPlan:
        name = title_of(self._method)
        if not isinstance(plan, EpochPlan):
            raise TypeError(
                f"{name}.plan_epoch must return a thresher.EpochPlan, got {type(plan).__name__}"
            )
        plan.check(self._records.n)
        # Before the further checks, because `spend` decides about smaller batches and the learning rate.
        plan = as_spent(plan, self._config.spend)
        if plan.smaller_batches and self._fills():
            raise ValueError(
                f"{name} makes smaller batches, and with forward_passes='twice' the method that chooses within a batch "
                "collects rows until a batch is full again. Use spend='batches', forward_passes='once', or only one method."
            )
        if plan.drawn and self._config.strata is not None:
            raise ValueError(
                f"{name} draws the order of training, which stratified batches would change: declare Requirements(order='plan')"
            )
        if plan.drawn and not self._config.free:
            raise ValueError(
                f"{name} draws the order of training, but the loader's sampler sets another order: use shuffle=True"
            )
        # `attach` has checked what the method declares; a plan may still ask for what it did not declare.
        if plan.lr_scale != 1 and self._config.given.optimizer is None:
            raise ValueError(f"{name} scales the learning rate: pass attach(optimizer=optimizer)")
        if plan.refresh is not None and not self._passes.possible:
            raise ValueError(
                f"{name} makes extra forward passes: pass attach(model=model, criterion=criterion)"
            )
        return plan


def as_spent(plan: EpochPlan, spend: Literal["steps", "batches"] | None) -> EpochPlan:
    """Returns a plan with fewer steps or smaller batches, as `attach(spend=)` asks.

    With as many steps as in full training, the learning rate is not scaled, and weights have a mean of 1.

    Args:
        plan: Plan of the method.
        spend: "steps", "batches", or None for the plan as it is.
    """
    if spend == "steps":
        return replace(plan, smaller_batches=False)
    if spend != "batches" or plan.smaller_batches:
        return plan
    # In float64, so that the mean of many weights keeps its digits.
    if plan.weights is None:
        weights = None
    else:
        weights = plan.weights / plan.weights.mean(dtype=torch.float64).item()
    return replace(plan, smaller_batches=True, weights=weights, lr_scale=1.0)


def title_of(method: Any) -> str:
    """Returns the name of a method, for error messages."""
    return title_given(method.method if isinstance(method, OnSubset) else method)
