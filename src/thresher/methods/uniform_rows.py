"""Uniform rows: every step trains on a uniformly drawn part of a batch of the loader. It also works with an IterableDataset.

Developed for this library. `attach(0.5, ...)` uses it with an IterableDataset, from which no samples can be chosen in advance.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thresher.methods._base import check_keep, in_id_order, plan_of
from thresher.methods.contract import Card, Requirements, State
from thresher.plans import BatchPlan
from thresher.selection import chosen, ids_of, share


@dataclass(frozen=True)
class UniformRows:
    """Trains on the same uniformly drawn share of every batch, with as many steps as full training.

    If the share of a batch is not a whole number of rows, later batches make up for the difference. Rows that are left out are
    loaded, too.

    Args:
        keep: Share kept of each batch, (0, 1]. Default 0.5.
        least: Least number of rows to keep of a batch, 1 or more; a batch with fewer rows is kept whole. Default 1, which
            `attach` raises to 2 if the model has BatchNorm.

    Raises:
        ValueError: `keep` is outside (0, 1], or `least` is below 1.

    Example:
        >>> import torch
        >>> from thresher import UniformRows
        >>> method, sizes = UniformRows(0.5), []
        >>> state = method.init_state()
        >>> for step in range(4):
        ...     generator = torch.Generator().manual_seed(step)
        ...     plan, state = method.plan_batch({"id": torch.arange(5)}, state, step=step, generator=generator)
        ...     sizes.append(len(plan.rows))
        >>> sizes
        [2, 3, 2, 3]
    """

    stage: ClassVar[Literal["batch"]] = "batch"
    requires: ClassVar[Requirements] = Requirements()
    card: ClassVar[Card] = Card(
        summary="train on a uniform share of each batch, also of a stream",
        rule="not drawn in its batch",
        biased="no: every row is kept equally often",
        forwards="none: the rows left out are not even forwarded",
        caveat="it is random selection",
    )
    keep: float = 0.5
    least: int = 1

    def __post_init__(self) -> None:
        check_keep(self, self.keep)
        if self.least < 1:
            raise ValueError(
                f"UniformRows: `least` is a number of rows, 1 or more, got {self.least}"
            )

    def init_state(self) -> State:
        """Returns the first state: 0 rows seen and kept."""
        return {"seen": 0, "kept": 0}

    def count(self, n: int) -> int | None:
        """Returns None: the number of rows of a batch depends on the batches before it."""
        return None

    def plan_batch(
        self, signals: Mapping[str, Tensor], state: State, *, step: int, generator: torch.Generator
    ) -> tuple[BatchPlan, State]:
        """Returns a random part of the batch, and the next state."""
        by_id, _ = in_id_order(signals)
        n = len(by_id)
        seen = state["seen"] + len(by_id)
        k = max(min(self.least, n), share(self.keep, n), share(self.keep, seen) - state["kept"])
        picked = ids_of(chosen(n, k, generator)).to(by_id.device, non_blocking=True)
        return plan_of(by_id.index_select(0, picked).sort().values, n, self.keep), {
            "seen": seen,
            "kept": state["kept"] + k,
        }
