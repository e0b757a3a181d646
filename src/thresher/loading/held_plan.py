"""The plan of an epoch as a run stores it: one bit per sample, and the weights of the chosen samples."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thresher.loading.bitmask import Bitmask, number, packed, unpacked
from thresher.plans import EpochPlan
from thresher.selection import Mask, ids_of


# Compared by identity, because == of tensors has no truth value.
@dataclass(frozen=True, eq=False)
class HeldPlan:
    """An `EpochPlan` with bitmasks instead of ids, and without `remember`. All processes have the same one.

    Args:
        n: Number of samples.
        ids: Bitmask of the kept samples, lowest id first, shape (ceil(n / 8),), uint8; bits beyond n are 0. If `drawn` is True,
            the ids in the order of training, shape (K,), int64.
        weights: Factors on the losses of the kept samples in the order of their ids, shape (K,), float32; None means 1 for all.
        refresh: Bitmask of the samples that get one forward pass without gradients at the end of the epoch; None means none.
        lr_scale: Factor on the learning rate of each step of the epoch.
        drawn: Whether `ids` is an order of training, drawn at random, which may repeat samples.
        facts: Scalars for the history by name.
        smaller_batches: Whether the epoch has as many steps as full training, each with a smaller batch.
        note: Warning for the user, a whole sentence.

    Raises:
        ValueError: A bitmask does not have one bit per sample.

    Example:
        >>> plan = HeldPlan.of(EpochPlan(torch.tensor([1, 3, 4]), refresh=torch.tensor([0])), 5)
        >>> plan.ids, plan.rows, plan.refreshed, plan.plan().ids
        (tensor([26], dtype=torch.uint8), 3, 1, tensor([1, 3, 4]))
    """

    n: int
    ids: Tensor
    weights: Tensor | None
    refresh: Tensor | None
    lr_scale: float
    drawn: bool
    facts: Mapping[str, float]
    smaller_batches: bool
    note: str

    def __post_init__(self) -> None:
        for name in self._packed:
            bits = getattr(self, name)
            if bits is not None and (bits.dtype != torch.uint8 or bits.shape != (-(-self.n // 8),)):
                raise ValueError(
                    f"`{name}` must be one bit for each of {self.n} samples, a torch.uint8 tensor of shape "
                    f"({-(-self.n // 8)},), got a {bits.dtype} tensor of shape {tuple(bits.shape)}"
                )

    @property
    def _packed(self) -> tuple[str, ...]:
        # Drawn ids have an order and may repeat, which a bitmask cannot express.
        return ("refresh",) if self.drawn else ("ids", "refresh")

    @staticmethod
    def of(plan: EpochPlan, n: int) -> "HeldPlan":
        """Converts the plan of a method into this form.

        Args:
            plan: The plan, already checked by `EpochPlan.check`.
            n: Number of samples.
        """
        values = {
            field.name: getattr(plan, field.name) for field in fields(HeldPlan) if field.name != "n"
        }
        for name in ("refresh",) if plan.drawn else ("ids", "refresh"):
            if values[name] is not None:
                values[name] = torch.from_numpy(packed(values[name].numpy(), n))
        return HeldPlan(n, **values)

    def plan(self) -> EpochPlan:
        """Returns the plan with ids instead of bitmasks."""
        values = self.state_dict()
        del values["n"]
        for name in self._packed:
            if values[name] is not None:
                values[name] = ids_of(unpacked(values[name].numpy()))
        return EpochPlan(**values)

    def state_dict(self) -> dict[str, Any]:
        """Returns the fields as tensors and plain values; `HeldPlan(**state)` restores the plan."""
        # Not dataclasses.asdict, which would copy the tensors.
        return {field.name: getattr(self, field.name) for field in fields(self)} | {
            "facts": dict(self.facts)
        }

    @cached_property
    def rows(self) -> int:
        """Number of kept samples; in a drawn plan, a sample counts as often as it was drawn."""
        return len(self.ids) if self.drawn else number(self.ids.numpy())

    @cached_property
    def refreshed(self) -> int:
        """Number of samples that get a forward pass at the end of the epoch."""
        return 0 if self.refresh is None else number(self.refresh.numpy())

    @property
    def everything(self) -> bool:
        """Whether the plan keeps every sample exactly once."""
        return not self.drawn and self.rows == self.n

    @cached_property
    def _marks(self) -> Bitmask:
        return Bitmask(self.ids.numpy(), self.n)

    def keeps(self, ids: NDArray[np.int64]) -> Mask:
        """Returns whether the plan keeps each sample, shape (k,), bool.

        Args:
            ids: Ids, shape (k,), int64.
        """
        # Full training skips the lookup.
        return np.ones(len(ids), dtype=np.bool_) if self.everything else self._marks.of(ids)

    def weights_of(self, ids: NDArray[np.int64]) -> Tensor | None:
        """Returns the weights of kept samples, shape (k,), float32; None if the plan has none.

        Args:
            ids: Ids, shape (k,), int64.
        """
        # Weights are in the order of the kept ids, so the position of an id among these is the index of its weight.
        return None if self.weights is None else self.weights[torch.from_numpy(self._place(ids))]

    @cached_property
    def _place(self) -> Callable[[NDArray[Any]], NDArray[Any]]:
        """Function from ids to their positions among the kept ids."""
        if self.drawn:
            # Not initialized: only positions of drawn samples are looked up.
            place = torch.empty(self.n, dtype=torch.int32 if self.rows < 2**31 else torch.int64)
            place[self.ids] = torch.arange(
                self.rows, dtype=place.dtype
            )  # a sample that was drawn twice has one weight
            return place.numpy().take
        return (lambda ids: ids) if self.everything else self._marks.before

    def refreshing(self, rank: int = 0, size: int = 1) -> Callable[[int, int], NDArray[np.int64]]:
        """Returns the ids for which a process does the forward passes at the end of the epoch.

        Args:
            rank: Number of the process. Default: 0.
            size: Number of processes, each of which takes an equal part of the ids. Default: 1.

        Returns:
            Function `(first, last)` that returns the ids at positions first to last - 1 of the part of this process, ascending;
            fewer at the end of the part.
        """
        begin, end = equal_part(self.refreshed, rank, size)
        if self.refresh is None:
            return lambda first, last: np.empty(0, dtype=np.int64)
        marks = Bitmask(self.refresh.numpy(), self.n)
        return lambda first, last: marks.ids(min(begin + first, end), min(begin + last, end))


def equal_part(total: int, rank: int, size: int) -> tuple[int, int]:
    """Returns the part of one rank if `total` positions are divided equally: (first position, position after the last).

    Args:
        total: Number of positions. The sizes of the parts differ by one at most.
        rank: Number of the rank, within [0, size).
        size: Number of ranks.

    Example:
        >>> [equal_part(7, rank, 3) for rank in range(3)]
        [(0, 2), (2, 4), (4, 7)]
    """
    # With integer arithmetic, each position is in exactly one part, for any numbers.
    return total * rank // size, total * (rank + 1) // size
