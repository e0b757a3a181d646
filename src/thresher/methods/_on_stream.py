"""An epoch method on a stream, which has no epoch to plan: each batch keeps a uniform share of its rows."""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thresher.methods.contract import EpochMethod, Requirements, State
from thresher.plans import BatchPlan
from thresher.selection import chosen, ids_of, share


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
