"""Reduces losses that the loop computed itself: which of them count, and what their sum is divided by."""

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from thresher.attribution.rows import RowLayout
from thresher.losses.base import as_measured
from thresher.records import NEVER_SEEN


class GivenLosses:
    """Reduces losses that the loop computed itself to a scalar.

    A position is one entry of the losses, such as one token or one pixel of a sample.

    Without `valid` and `total` the scalar is the mean over the samples of their mean losses, each times its weight. Otherwise
    it is sum(v s m) / total, where m is the mean loss of a sample over its valid positions, s their number, v the weight of
    the sample, and total the sum of s unless it is given. With weights of positions, m is the weighted mean and s their sum.

    If only some rows are trained on, they stand for the whole batch: the scalar is their sum(v s m) / sum(s), times the valid
    positions of the batch / `total`. So the scalars of several micro-batches add up to one mean, in which each micro-batch
    counts by all its valid positions, not only by those of the kept rows; `total` stays the number that the loop knows.
    In the same way, the positions of `keep` stand for all valid ones.

    Nothing waits for a device: a `valid` below 0, or a `total` that is not positive, is an error on the CPU, and makes the
    scalar NaN on a device.

    Args:
        losses: Losses by position, shape (rows, ...), with gradient.
        valid: Mask of the positions that count, or their weights, >= 0, in any dtype, broadcastable to the shape of `losses`;
            None if all count.
        total: Number that the sum of the losses is divided by, > 0: a number or a tensor of shape (); None for the number of
            valid positions, or the sum of their weights.
        keep: Mask of the positions that are trained on, in the same form as `valid`; None for all valid ones.
        by_row: Whether the loop has stated how many rows a sample has, so rows are along the first dimension. Default: False.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: A shape or a device does not fit, or a value is out of its range.

    Example:
        >>> values, valid = torch.tensor([[1.0, 2.0], [6.0, 9.0]]), torch.tensor([[True, True], [True, False]])
        >>> losses = GivenLosses(values, valid)
        >>> losses.plain(), losses.means(RowLayout(2))
        (tensor(3.), tensor([1.5000, 6.0000]))
    """

    def __init__(
        self,
        losses: Any,
        valid: Any = None,
        total: Any = None,
        keep: Any = None,
        *,
        by_row: bool = False,
    ) -> None:
        if not isinstance(losses, Tensor):
            raise TypeError(
                f"run.reduce: `per_sample_losses` must be a tensor, got {type(losses).__name__}"
            )
        if not losses.dim():
            raise ValueError(
                "run.reduce: `per_sample_losses` is a scalar; pass one loss per sample, before averaging"
            )
        self.losses = losses
        self.by_row = by_row
        self._on_device = list[Tensor]()
        self._mask = None if valid is None else self._mask_of(valid, "valid")
        kept = None if keep is None else self._mask_of(keep, "keep")
        self._kept = kept if kept is None or self._mask is None else self._mask * kept
        self.total = None if total is None else self._check_total(total)
        """Number that the sum is divided by, if the loop passed it. It may count several batches or processes."""

    @property
    def all_count(self) -> bool:
        """Whether all positions count, because `valid` was not passed."""
        return self._mask is None

    @property
    def of_samples(self) -> bool:
        """Whether the scalar is the mean over the samples of their mean losses: no `valid`, `total` or `keep` was passed."""
        return self._mask is None and self.total is None and self._kept is None

    def _mask_of(self, mask: Any, name: str) -> Tensor:
        if not isinstance(mask, Tensor) or mask.is_complex():
            got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise TypeError(
                f"run.reduce: `{name}` must be a tensor: a mask (bool) or weights (numbers), got {got}"
            )
        if mask.requires_grad:
            raise ValueError(
                f"run.reduce: `{name}` requires a gradient, but is only a mask. Multiply the losses by learned weights instead"
            )
        if mask.device != self.losses.device:
            raise ValueError(
                f"run.reduce: `{name}` is on {mask.device} and the losses are on {self.losses.device}. Make the mask from a "
                "tensor on the device of the losses, or move it there"
            )
        self._check_shape(mask.shape, name)
        if mask.dtype == torch.bool:
            # A mask of bool has no values to check.
            return mask.expand(self.losses.shape)
        # Reading this flag would wait for a device. It is kept there, and makes the scalar NaN in `_divide` if it is false.
        weights = mask.to(torch.promote_types(self.losses.dtype, torch.float32))
        known = ((weights >= 0) & weights.isfinite()).all()
        if not mask.is_cpu:
            self._on_device.append(known)
        elif not known:
            raise ValueError(
                f"run.reduce: `{name}` has numbers below 0, or not finite. Give a mask such as labels != -100, or weights"
            )
        return weights.expand(self.losses.shape)

    def _check_shape(self, shape: torch.Size, name: str) -> None:
        known = tuple(self.losses.shape)
        has = tuple(shape)
        missing = len(known) - len(has)
        fits = missing >= 0 and all(
            one in (1, size) for one, size in zip(has, known[missing:], strict=True)
        )
        if not fits:
            raise ValueError(
                f"run.reduce: `{name}` of shape {has} does not fit losses of shape {known}. Give one entry per loss, or size 1 "
                "for a dimension along which all entries are equal"
            )
        # Broadcasting would silently take it per position, but a mask per row is as likely for losses of shape (5, 5).
        if missing and has[:1] == known[:1] != (1,):
            raise ValueError(
                f"run.reduce: `{name}` of shape {has} can be per row or per position of the losses of shape {known}, whose "
                f"sizes are equal. Give it {len(known)} dimensions, such as {name}[:, None] or {name}[None]"
            )

    def _check_total(self, total: Any) -> float | Tensor:
        if isinstance(total, Tensor):
            if (
                total.dim()
                or total.is_complex()
                or total.dtype == torch.bool
                or total.requires_grad
            ):
                raise ValueError(
                    f"run.reduce: `total` must be a number, or a tensor of shape () without gradient, got {total.dtype} of "
                    f"shape {tuple(total.shape)}{' with gradient' if total.requires_grad else ''}"
                )
            if not total.is_cpu:
                if total.device != self.losses.device:
                    raise ValueError(
                        f"run.reduce: `total` is on {total.device}, but the losses are on {self.losses.device}. "
                        "Compute it on the device of the losses or on the CPU: copying it would wait for the device"
                    )
                self._on_device.append((total > 0) & total.isfinite())
                return total
            # A tensor on the CPU, so reading it waits for nothing.
            total = total.item()
        if isinstance(total, bool) or not isinstance(total, Real):
            raise TypeError(
                f"run.reduce: `total` must be a number or a tensor of shape (), got {type(total).__name__}"
            )
        number = float(total)
        if not 0 < number < math.inf:
            raise ValueError(f"run.reduce: `total` must be finite and above 0, got {total}")
        return number

    def means(self, layout: RowLayout) -> Tensor:
        """Returns the loss of each sample, shape (n,), detached; `NEVER_SEEN` for a sample without a valid position.

        Args:
            layout: Layout of the rows as samples.
        """
        rows = layout.rows(self.losses.detach())
        if self._mask is None:
            return as_measured(rows.mean(1))
        mask = layout.rows(self._mask)
        counts = mask.sum(1)
        return as_measured(_sums(rows, mask) / counts).where(counts > 0, NEVER_SEEN)

    def plain(self) -> Tensor:
        """Returns the scalar without weights, shape ()."""
        if self.of_samples:
            return self.losses.mean()
        return self._divide(lambda positions: positions.reshape(1, -1), None, None)

    def value(
        self, layout: RowLayout, weights: Tensor | None = None, chosen: Tensor | None = None
    ) -> Tensor:
        """Returns the scalar for the loop, shape ().

        Args:
            layout: Layout of the rows as samples.
            weights: Weights of the samples, shape (n,), or of the chosen ones, shape (k,); None if all are 1.
            chosen: Indices of the samples that are trained on, shape (k,), int64; None for all.
        """
        if not self.of_samples:
            return self._divide(layout.rows, weights, chosen)
        rows = layout.rows(self.losses)
        if chosen is not None:
            rows = rows.index_select(0, chosen)
        # The mean of no rows is NaN. This sum is 0 and still has a gradient, for which the other processes of DDP wait.
        if not len(rows):
            return rows.sum()
        if weights is None:
            # The mean of the losses as the loop has them: over rearranged rows it could differ in the last bit.
            return self.losses.mean() if chosen is None else rows.mean()
        return (rows.mean(1) * weights.to(rows.dtype)).mean()

    def counts(self, layout: RowLayout) -> Tensor | None:
        """Returns how many positions of each sample are trained on, or the sum of their weights, shape (n,); None for all.

        Args:
            layout: Layout of the rows as samples.
        """
        trained = self._mask if self._kept is None else self._kept
        return None if trained is None else layout.rows(trained).sum(1)

    def part(self, layout: RowLayout, chosen: Tensor) -> Tensor | float:
        """Returns the share of the batch's valid positions that belongs to some samples, within [0, 1].

        Args:
            layout: Layout of the rows as samples.
            chosen: Indices of the samples, shape (k,), int64.
        """
        counts = self.counts(layout)
        if counts is None:
            return len(chosen) / layout.n
        return counts.index_select(0, chosen).sum() / counts.sum()

    def _divide(
        self, by_sample: Callable[[Tensor], Tensor], weights: Tensor | None, chosen: Tensor | None
    ) -> Tensor:
        """Returns sum(v s m) / total; `by_sample` gives positions the shape (n, positions)."""
        rows = by_sample(self.losses)
        trained = self._mask if self._kept is None else self._kept
        mask = None if trained is None else by_sample(trained)
        sums = _sums(rows, mask)
        # In the dtype of the sums: bfloat16 would count 300 positions as 256.
        if mask is None:
            counts = sums.new_full((len(rows),), rows.shape[1])
        else:
            counts = mask.sum(1)
        batch = counts.sum()
        total = batch if self.total is None else self.total
        if self._kept is not None and self.total is not None:
            counted = rows.numel() if self._mask is None else self._mask.sum()
            # `torch.where`, because a branch on the number of kept positions would wait for the device.
            total = torch.where(
                batch > 0, total * (batch.to(sums.dtype) / counted), total
            )  # else the sum is 0
        if chosen is not None:
            sums = sums.index_select(0, chosen)
            kept = counts.index_select(0, chosen).sum()
            total = torch.where(
                kept > 0, total * (kept.to(sums.dtype) / batch), total
            )  # else the sum is 0
        for flag in self._on_device:
            total = torch.where(flag, total, torch.nan)
        return ((sums if weights is None else sums * weights.to(sums.dtype)).sum() / total).to(
            rows.dtype
        )


def _sums(rows: Tensor, mask: Tensor | None) -> Tensor:
    """Returns the sums of losses over the valid positions, shape (n,), in float32 or better."""
    # Not the product alone: 0 times an infinite loss, where it does not count, would be NaN. Not in half precision: a sum
    # of 80,000 would be infinite in float16.
    counted = rows if mask is None else rows.where(mask != 0, 0) * mask
    return counted.sum(1, dtype=torch.promote_types(rows.dtype, torch.float32))
