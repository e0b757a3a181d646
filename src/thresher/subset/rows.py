"""Rows of tensors: where the samples of a batch are in a tensor, and how to select some of them."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Where the samples of a batch of n are in a tensor.

    Args:
        axis: Dimension that holds the samples; it has n * per entries.
        per: Number of entries per sample: more than 1 where positions were merged into the batch, 0 where their number is
            another one in each call, so that only the tensor shows it. Default: 1.
        inner: Whether entry i belongs to sample i % n (positions first) instead of i // per (samples first). Default: False.

    Example:
        >>> values = torch.arange(6.0)  # three samples with two entries each
        >>> Layout(0, per=2).take(values, torch.tensor([0, 2]), 3)
        tensor([0., 1., 4., 5.])
    """

    axis: int
    per: int = 1
    inner: bool = False

    def entries(self, size: int, n: int) -> int:
        """Returns the number of entries per sample where n samples have so many entries."""
        return self.per or size // n

    def split(self, value: Tensor, n: int) -> tuple[Tensor, int]:
        """Returns a view with a dimension of n entries, and the position of that dimension."""
        if self.per == 1:
            return value, self.axis
        per = self.entries(value.shape[self.axis], n)
        sizes = (per, n) if self.inner else (n, per)
        return value.unflatten(self.axis, sizes), self.axis + self.inner

    def take(self, value: Tensor, rows: Tensor, n: int) -> Tensor:
        """Returns the entries of some samples, in the memory format of the whole tensor.

        Args:
            value: Tensor that holds n samples.
            rows: Positions of the samples in the batch, shape (k,), int64.
            n: Number of samples in the batch.
        """
        if value.stride(self.axis) == 0:
            return value.narrow(self.axis, 0, len(rows) * self.entries(value.shape[self.axis], n))
        parts, axis = self.split(value, n)
        strides = parts.stride()
        order = sorted(range(parts.dim()), key=lambda d: -strides[d])
        selected = parts.permute(order).index_select(order.index(axis), rows)
        selected = selected.permute([order.index(d) for d in range(parts.dim())])
        return selected if self.per == 1 else selected.flatten(self.axis, self.axis + 1)

    def put(self, value: Tensor, rows: Tensor, n: int) -> Tensor:
        """Returns the inverse of `take`: zeros for the samples that `rows` lacks, sums for those that it repeats.

        Args:
            value: Tensor that holds the samples at `rows` only.
            rows: Positions of these samples in the batch, shape (k,), int64.
            n: Number of samples in the batch.
        """
        parts, axis = self.split(value, len(rows))
        shape = list(parts.shape)
        shape[axis] = n
        whole = parts.new_zeros(shape).index_add_(axis, rows, parts)
        return whole if self.per == 1 else whole.flatten(self.axis, self.axis + 1)

    def carries(self, value: Tensor, n: int) -> Tensor:
        """Returns which samples have an entry that is not zero, shape (n,), bool."""
        if not value.numel() or value.is_complex():
            return self.any(value != 0, n)
        parts, axis = self.split(value, n)
        flat = parts.movedim(axis, 0).reshape(n, -1)
        return (flat.amax(1) != 0) | (flat.amin(1) != 0)  # takes a tenth of the time of comparing every entry

    def any(self, flags: Tensor, n: int) -> Tensor:
        """Returns which samples have an entry that is true, shape (n,), bool."""
        parts, axis = self.split(flags, n)
        return parts.movedim(axis, 0).reshape(n, flags.numel() // n).any(1)

    def labels(self, value: Tensor, n: int) -> Tensor:
        """Returns the number of the sample that each entry of a tensor belongs to, in the shape of the tensor, int64."""
        parts, axis = self.split(value, n)
        sample = torch.arange(n, device=value.device).view([n if d == axis else 1 for d in range(parts.dim())])
        return sample.expand(parts.shape).reshape(value.shape)


class Taker:
    """Selects the same rows of many tensors; memory that several tensors share is copied once.

    Args:
        rows: Positions of the samples in the batch, shape (k,), int64.
        n: Number of samples in the batch.
    """

    def __init__(self, rows: Tensor, n: int) -> None:
        self.rows, self.n = rows, n
        self._selected: dict[tuple[int, torch.dtype, int], Tensor] = {}

    def __call__(self, value: Tensor, layout: Layout) -> Tensor:
        """Returns the rows of one tensor.

        Args:
            value: Tensor that holds n samples.
            layout: Place of the samples in `value`.
        """
        if layout.axis or layout.inner or not value.numel() or not value.is_contiguous():
            return layout.take(value, self.rows, self.n)
        key = (value.data_ptr(), value.dtype, value.numel())
        flat = self._selected.get(key)
        if flat is None:
            flat = self._selected[key] = value.view(self.n, -1).index_select(0, self.rows)
        return flat.view(len(self.rows) * layout.entries(len(value), self.n), *value.shape[1:])
