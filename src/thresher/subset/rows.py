"""Rows of tensors: where the batch is in a tensor's shape, and taking some of its rows without changing the memory layout."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Where the samples of a batch of n are in a tensor.

    Args:
        axis: The dimension, which has n * per entries.
        per: Entries a sample: more than 1 where positions were merged into the batch.
        inner: Entry i belongs to sample i % n (positions first) instead of i // per (samples first).
    """

    axis: int
    per: int = 1
    inner: bool = False

    def split(self, value: Tensor, n: int) -> tuple[Tensor, int]:
        """A view with a dimension of n, and which dimension that is."""
        if self.per == 1:
            return value, self.axis
        sizes = (self.per, n) if self.inner else (n, self.per)
        return value.unflatten(self.axis, sizes), self.axis + self.inner

    def take(self, value: Tensor, rows: Tensor, n: int) -> Tensor:
        """The entries of some samples, in the memory format of the whole."""
        if value.stride(self.axis) == 0:
            return value.narrow(self.axis, 0, len(rows) * self.per)
        parts, axis = self.split(value, n)
        strides = parts.stride()
        order = sorted(range(parts.dim()), key=lambda d: -strides[d])
        taken = parts.permute(order).index_select(order.index(axis), rows)
        taken = taken.permute([order.index(d) for d in range(parts.dim())])
        return taken if self.per == 1 else taken.flatten(self.axis, self.axis + 1)

    def put(self, value: Tensor, rows: Tensor, n: int) -> Tensor:
        """The inverse of `take`: zeros for the samples that were not taken, sums for those taken several times."""
        parts, axis = self.split(value, len(rows))
        shape = list(parts.shape)
        shape[axis] = n
        whole = parts.new_zeros(shape).index_add_(axis, rows, parts)
        return whole if self.per == 1 else whole.flatten(self.axis, self.axis + 1)

    def carries(self, value: Tensor, n: int) -> Tensor:
        """Which samples have an entry that is not zero, shape (n,), bool."""
        if not value.numel() or value.is_complex():
            return self.any(value != 0, n)
        parts, axis = self.split(value, n)
        flat = parts.movedim(axis, 0).reshape(n, -1)
        return (flat.amax(1) != 0) | (flat.amin(1) != 0)  # a tenth of what comparing every entry takes

    def any(self, flags: Tensor, n: int) -> Tensor:
        """Which samples have an entry that is true, shape (n,)."""
        parts, axis = self.split(flags, n)
        return parts.movedim(axis, 0).reshape(n, flags.numel() // n).any(1)

    def labels(self, value: Tensor, n: int) -> Tensor:
        """The sample that each entry of a tensor belongs to, in its shape."""
        parts, axis = self.split(value, n)
        sample = torch.arange(n, device=value.device).view([n if d == axis else 1 for d in range(parts.dim())])
        return sample.expand(parts.shape).reshape(value.shape)


class Taker:
    """Takes the same rows of many tensors; memory that several of them show is taken once."""

    def __init__(self, rows: Tensor, n: int) -> None:
        self.rows, self.n = rows, n
        self._taken: dict[tuple[int, torch.dtype, int], Tensor] = {}

    def __call__(self, value: Tensor, layout: Layout) -> Tensor:
        """The rows of one tensor."""
        if layout.axis or layout.inner or not value.numel() or not value.is_contiguous():
            return layout.take(value, self.rows, self.n)
        key = (value.data_ptr(), value.dtype, value.numel())
        flat = self._taken.get(key)
        if flat is None:
            flat = self._taken[key] = value.view(self.n, -1).index_select(0, self.rows)
        return flat.view(len(self.rows) * layout.per, *value.shape[1:])
