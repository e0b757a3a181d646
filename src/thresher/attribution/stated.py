"""Evidence against the ids that a caller states: values of a batch that are found again at the rows of other samples."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from thresher.attribution.rows import YieldedBatch
from thresher.attribution.suspicion import Suspicion

ODD = (-7046029254386353131, -4417276706812531889)
"""Odd factors that spread the bits of a value over 64 bits."""


def moved_among_samples(
    targets: Tensor, batches: Iterable[YieldedBatch], ids: Tensor, repeat: int, suspicion: Suspicion
) -> list[Tensor]:
    """Compares targets with those that were yielded for the stated samples.

    Targets that the loop computed (soft, masked, remapped labels) are no evidence against anything. Targets that are all
    there, at the rows of other samples, are as far as this is no chance: the rows were permuted, or several rows per sample are
    in another order. Values that are all different are certain at once, labels of a few classes after several batches. Where
    one tensor of the batch has them in order, it does not matter that another has the same values in another order.

    Args:
        targets: Targets of the stated samples, a tensor with unknown rows.
        batches: Batches that the samples may belong to.
        ids: Ids of the samples, shape (n,), int64.
        repeat: Number of consecutive rows per sample.
        suspicion: Evidence of earlier batches, which this call adds to.

    Returns:
        Flags, shape () and bool, that are true where the targets are at the rows of other samples; empty where there is
        nothing to compare.
    """
    flags = []
    for batch in batches:
        positions, found = _positions(ids.to(batch.ids.device), batch.ids)
        found = found.to(targets.device)
        if found.is_cpu and not found:
            continue
        compared = list(_compared(targets, batch, positions, repeat))
        if compared:
            values, few = (torch.stack(parts) for parts in zip(*compared, strict=True))
            in_order = (values[:, 0] == values[:, 1]).all(1).any()
            there = values[:, 0].sum(1) == values[:, 1].sum(1)
            origin = there.int().argmax().view(1)
            values, few = values.index_select(0, origin)[0], few.index_select(0, origin)[0]
            flags.append(suspicion.grows(there.any() & ~in_order, found, batch.number, values, few))
    return flags


def is_in_order(targets: Tensor, batch: YieldedBatch, repeat: int) -> bool:
    """Returns whether targets have the values of a tensor of a batch, sample by sample; waits for the device."""
    rows = torch.arange(len(batch.ids), device=batch.ids.device)
    return any(torch.equal(*values) for values, _ in _compared(targets, batch, rows, repeat))


def _compared(targets: Tensor, batch: YieldedBatch, rows: Tensor, repeat: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields what can be compared with each tensor of a batch that can have been the origin of the targets.

    It is a number per sample for the tensor, and one for the targets, shape (2, n), int64; and whether the values can be those
    of a few classes: one whole number per sample, shape (), bool.

    Args:
        targets: A tensor with `repeat` consecutive entries per sample, or one.
        batch: A batch; its tensors that were changed in place are left out.
        rows: Rows of the samples in the batch, shape (n,), int64.
        repeat: Number of consecutive rows per sample.
    """
    n = len(rows)
    if targets.layout is not torch.strided or targets.is_complex() or targets.shape[0] not in (n, n * repeat):
        return
    size = targets.numel() // n
    for tensor, version in batch.marked:
        per_row = tensor.numel() // len(tensor)
        if tensor._version != version or tensor.is_complex() or not size or size not in (per_row, per_row * repeat):
            continue
        # As integers, floating-point inputs would often have the values of labels.
        dtype = tensor.dtype if tensor.is_floating_point() and not targets.is_floating_point() else targets.dtype
        origin = tensor.detach().index_select(0, rows.to(tensor.device)).reshape(n, -1)
        stated = _per_sample(targets.detach().to(dtype).reshape(n, -1))
        yielded = _per_sample(origin.to(targets.device, dtype)) * (size // per_row)
        whole = targets.detach() == targets.detach().round() if per_row == 1 else torch.zeros(1, device=targets.device)
        yield torch.stack([yielded, stated]), whole.all()


def within(ids: Tensor, *batches: YieldedBatch) -> Tensor:
    """Returns whether all ids are those of some batches, shape (), bool, on the device of the batches' ids."""
    known = batches[0].ids if len(batches) == 1 else torch.cat([batch.ids for batch in batches])
    return _positions(ids.to(known.device), known)[1]


def _positions(ids: Tensor, of: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rows of ids in a batch, shape (n,), and whether all were found, shape (); without waiting for a device."""
    ordered, order = of.sort()
    at = torch.searchsorted(ordered, ids).clamp(max=len(of) - 1)
    return order[at], (ordered[at] == ids).all()


def _per_sample(rows: Tensor) -> Tensor:
    """Returns a number per row that depends on its values but not on their order, shape (n,), int64."""
    bits = (rows.double() + 0.0).view(torch.int64) if rows.is_floating_point() else rows.long()
    mixed = (bits + 1) * ODD[0]
    mixed = (mixed ^ (mixed >> 31)) * ODD[1]
    return (mixed ^ (mixed >> 29)).sum(1)
