"""The plan of an epoch as a run stores, sends and saves it: one bit per sample, and the weights of the chosen samples."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thresher.plans import EpochPlan
from thresher.selection import Mask, chunks


def pack(ids: NDArray[np.int64], n: int) -> NDArray[np.uint8]:
    """Returns a bitmask in which the bits of the given ids are 1.

    Args:
        ids: Ids of the samples to mark, shape (K,), ascending, within [0, n).
        n: Number of samples.

    Returns:
        Bits, lowest id first, shape (ceil(n / 8),), uint8; bits beyond n are 0.

    Example:
        >>> pack(np.array([1, 2, 10]), 12)
        array([6, 4], dtype=uint8)
    """
    bits = np.zeros(-(-n // 8), dtype=np.uint8)
    # In parts, because a mask of all samples would take a byte per sample. Each part begins at the first bit of a byte.
    for part in chunks(n):
        low, high = np.searchsorted(ids, (part.start, part.stop))
        mask = np.zeros(part.stop - part.start, dtype=np.bool_)
        mask[ids[low:high] - part.start] = True
        bits[part.start // 8 : -(-part.stop // 8)] = np.packbits(mask, bitorder="little")
    return bits


def unpack(bits: NDArray[np.uint8]) -> Tensor:
    """Returns the ids of the samples whose bits are 1, shape (K,), int64, ascending.

    Args:
        bits: Bits, lowest id first, uint8.
    """
    ids = np.empty(int(np.bitwise_count(bits).sum(dtype=np.int64)), dtype=np.int64)
    begin = 0
    # In parts, because a mask of all samples would take a byte per sample.
    for part in chunks(len(bits)):
        positions = np.flatnonzero(np.unpackbits(bits[part], bitorder="little"))
        ids[begin : begin + len(positions)] = positions + 8 * part.start
        begin += len(positions)
    return torch.from_numpy(ids)


def count(bits: Tensor) -> int:
    """Returns the number of bits that are 1.

    Args:
        bits: Bits, uint8.
    """
    return int(np.bitwise_count(bits.numpy()).sum(dtype=np.int64))


# Compared by identity, because == of tensors has no truth value.
@dataclass(frozen=True, eq=False)
class PackedPlan:
    """An `EpochPlan` with bitmasks instead of ids, and without `remember`. All processes have the same one.

    Args:
        n: Number of samples.
        ids: Bits of the kept samples, lowest id first, shape (ceil(n / 8),), uint8; bits beyond n are 0. If `drawn` is True,
            the ids in the order of training, shape (K,), int64.
        weights: Factors on the losses of the kept samples in the order of their ids, shape (K,), float32; None means 1 for all.
        refresh: Bits of the samples that get one forward pass without gradients at the end of the epoch; None means none.
        lr_scale: Factor on the learning rate of each step of the epoch.
        drawn: Whether `ids` is an order of training, drawn at random, which may repeat samples.
        facts: Scalars for the history by name.
        smaller_batches: Whether the epoch has as many steps as full training, each with a smaller batch.
        note: Warning for the user, a whole sentence.

    Raises:
        ValueError: A bitmask does not have one bit per sample.

    Example:
        >>> plan = PackedPlan.of(EpochPlan(torch.tensor([1, 3, 4]), refresh=torch.tensor([0])), 5)
        >>> plan.ids, plan.rows, plan.refreshed, plan.unpacked().ids
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
    def of(plan: EpochPlan, n: int) -> "PackedPlan":
        """Packs the plan of a method.

        Args:
            plan: The plan, already checked by `EpochPlan.check`.
            n: Number of samples.
        """
        values = {
            field.name: getattr(plan, field.name)
            for field in fields(PackedPlan)
            if field.name != "n"
        }
        for name in ("refresh",) if plan.drawn else ("ids", "refresh"):
            if values[name] is not None:
                values[name] = torch.from_numpy(pack(values[name].numpy(), n))
        return PackedPlan(n, **values)

    def unpacked(self) -> EpochPlan:
        """Returns the plan with ids instead of bitmasks."""
        values = self.state_dict()
        del values["n"]
        for name in self._packed:
            if values[name] is not None:
                values[name] = unpack(values[name].numpy())
        return EpochPlan(**values)

    def state_dict(self) -> dict[str, Any]:
        """Returns the fields as tensors and plain values; `PackedPlan(**state)` restores the plan."""
        # Not dataclasses.asdict, which would copy the tensors.
        return {field.name: getattr(self, field.name) for field in fields(self)} | {
            "facts": dict(self.facts)
        }

    @cached_property
    def rows(self) -> int:
        """Number of kept samples; in a drawn plan, a sample counts as often as it was drawn."""
        return len(self.ids) if self.drawn else count(self.ids)

    @cached_property
    def refreshed(self) -> int:
        """Number of samples that get a forward pass at the end of the epoch."""
        return 0 if self.refresh is None else count(self.refresh)

    @property
    def everything(self) -> bool:
        """Whether the plan keeps every sample exactly once."""
        return not self.drawn and self.rows == self.n

    @property
    def smaller(self) -> bool:
        """Whether the epoch has as many batches as full training, with fewer samples."""
        return self.smaller_batches and not self.everything

    def keeps(self, ids: NDArray[Any]) -> Mask:
        """Returns whether the plan, which is not drawn, keeps each sample, shape (k,), bool.

        Args:
            ids: Ids, shape (k,), integers.
        """
        # Without unpacking: id i is bit i % 8 of byte i // 8.
        bits = self.ids.numpy()
        return (bits[ids >> 3] >> (ids & 7).astype(np.uint8)) & 1 != 0

    def weights_by_id(self) -> Tensor | None:
        """Returns the weights, shape (N,), float32, set for kept samples only; None if all are 1."""
        if self.weights is None or self.everything:
            return self.weights
        # A sample that was drawn twice has one weight.
        by_id = torch.empty(self.n, dtype=torch.float32)
        by_id[self.ids if self.drawn else unpack(self.ids.numpy())] = self.weights
        return by_id

    def refresh_ids(self, rank: int = 0, size: int = 1) -> Tensor:
        """Returns the ids for which a process does the forward passes at the end of the epoch, int64, ascending.

        Args:
            rank: Number of the process. Default: 0.
            size: Number of processes, each of which takes an equal part of the ids. Default: 1.
        """
        if self.refresh is None:
            return torch.empty(0, dtype=torch.int64)
        begin, end = equal_part(self.refreshed, rank, size)
        return unpack(self.refresh.numpy())[begin:end]


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
