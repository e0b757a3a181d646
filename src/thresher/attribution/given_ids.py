"""Looks for evidence, in the values of targets, that the ids that a caller passes are wrong."""

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from thresher.attribution.rows import YieldedBatch

# Every batch is tested once, so the limit is far smaller than 1 / (number of batches in a long training).
LOG_CHANCE = math.log(1e-9)
"""Logarithm of a probability. Values of other samples in the targets that are less likely than this are no coincidence."""
NOT_MOVED = 7364136223846793005
"""Stands for values that were not moved; almost certainly not the hash of any value."""


class Suspicion:
    """Adds up, batch by batch, how unlikely it is that targets have the values of other samples by chance.

    Labels that a loop computes (flipped, noisy, remapped) can equal the labels of other rows by chance. With two classes,
    flipped labels do so in every batch that has as many samples of both. Labels that are a function of the yielded labels are
    therefore not evidence. Other labels are stronger evidence the less likely they are by chance.
    """

    def __init__(self) -> None:
        self._number = torch.tensor(-1)
        self._log_chance = torch.tensor(0.0, dtype=torch.float64)
        self._before: Tensor | None = None

    def grows(
        self, moved: Tensor, complete: Tensor, number: int, values: Tensor, few: Tensor
    ) -> Tensor:
        """Adds the evidence of one batch; returns whether chance is ruled out, shape (), bool. Never waits for the device.

        Args:
            moved: Whether the targets have the values of the samples at other rows, shape (), bool.
            complete: Whether all samples are in this batch, shape (), bool.
            number: Number of the batch; further losses of the same batch add nothing.
            values: Hashes of the yielded values and of the targets, one per sample, shape (2, n), int64.
            few: Whether the values can be labels of a few classes, shape (), bool.
        """
        # Branches would read flags on the device, and so wait for it in each step. Every case is a `where` for this reason.
        device = moved.device
        before = self._before
        last = self._number.to(device)
        total = self._log_chance.to(device)
        both = values if before is None else torch.cat([before.to(device), values], 1)
        more = total + _log_chance(values[0], values[1], few)
        grown = torch.where(last == number, total, torch.where(few & _is_function(both), 0.0, more))
        grown = torch.where(moved, grown, 0.0)
        self._log_chance = torch.where(complete, grown, total)
        self._number = torch.where(complete, number, last)
        same_size = before is not None and before.shape == values.shape
        if before is not None and same_size:
            self._before = torch.where(complete, values, before.to(device))
        else:
            self._before = values
        return moved & complete & (self._log_chance < LOG_CHANCE)


def _is_function(values: Tensor) -> Tensor:
    """Returns whether equal values have equal targets, and some values are equal, shape (), bool."""
    yielded, order = values[0].sort()
    same = yielded[1:] == yielded[:-1]
    targets = values[1][order]
    # Values that are all different are a function of anything, which is no sign of computed labels.
    return (~same | (targets[1:] == targets[:-1])).all() & same.any()


def _log_chance(yielded: Tensor, stated: Tensor, few: Tensor) -> Tensor:
    """Returns the log-probability that random labels have the counts of the labels of the moved rows, shape ().

    The random labels are drawn with replacement from the labels of these rows. The result is minus infinity if the values are
    all different and cannot be class labels.
    """
    values = yielded.masked_fill(yielded == stated, NOT_MOVED).sort().values
    moved = values != NOT_MOVED
    # The multinomial probability n! / prod(c!) * prod((c / n) ** c) of classes with counts c, with the term of each class
    # spread over its c rows: as many terms as rows keep the shapes fixed, which a device needs in order not to wait.
    counts = torch.searchsorted(values, values, right=True) - torch.searchsorted(values, values)
    number = moved.sum().double()
    each = counts.double().log() - number.clamp(min=1).log() - torch.lgamma(counts + 1.0) / counts
    chance = torch.lgamma(number + 1) + each.where(moved, 0.0).sum()
    distinct = (counts.where(moved, 1) == 1).all()
    return torch.where(few | ~distinct, chance, -torch.inf)


ODD = (-7046029254386353131, -4417276706812531889)
"""Odd factors that spread the bits of a value over 64 bits."""


def moved_among_samples(
    targets: Tensor, batches: Iterable[YieldedBatch], ids: Tensor, repeat: int, suspicion: Suspicion
) -> list[Tensor]:
    """Compares targets with the yielded targets of the samples that the caller names.

    Targets that the loop computed (soft, masked, remapped labels) are not evidence. Targets whose values all occur at the rows
    of other samples are evidence that rows were permuted, or that several rows per sample are in another order. If the values
    are all different, one batch is enough; labels of a few classes need several batches. Targets in the order of one tensor of
    the batch are right, even if another tensor has the same values in another order.

    Args:
        targets: Targets of the named samples, a tensor with unknown rows.
        batches: Batches that can contain the samples.
        ids: Ids of the samples, shape (n,), int64.
        repeat: Number of consecutive rows per sample.
        suspicion: Evidence of earlier batches; this call adds to it.

    Returns:
        One flag per compared batch, shape (), bool: True if the targets have the values of other samples.
    """
    flags = []
    for batch in batches:
        positions, missing = _positions(ids.to(batch.ids.device), batch.ids)
        missing = missing.to(targets.device)
        if missing.is_cpu and not missing:
            continue
        compared = list(_compared(targets, batch, positions, repeat))
        if compared:
            values, few = (torch.stack(parts) for parts in zip(*compared, strict=True))
            in_order = (values[:, 0] == values[:, 1]).all(1).any()
            there = values[:, 0].sum(1) == values[:, 1].sum(1)
            # The first tensor that has the values; a branch on the flags would wait for the device.
            origin = there.int().argmax().view(1)
            values = values.index_select(0, origin)[0]
            few = few.index_select(0, origin)[0]
            flags.append(
                suspicion.grows(there.any() & ~in_order, missing, batch.number, values, few)
            )
    return flags


def is_in_order(targets: Tensor, batch: YieldedBatch, repeat: int) -> bool:
    """Returns whether targets have the values of a tensor of a batch, sample by sample. Waits for the device."""
    rows = torch.arange(len(batch.ids), device=batch.ids.device)
    return any(torch.equal(*values) for values, _ in _compared(targets, batch, rows, repeat))


def _compared(
    targets: Tensor, batch: YieldedBatch, rows: Tensor, repeat: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields per-sample hashes of batch tensors and targets, shape (2, n), int64, and whether they can be class labels."""
    n = len(rows)
    if (
        targets.layout is not torch.strided
        or targets.is_complex()
        or targets.shape[0] not in (n, n * repeat)
    ):
        return
    size = targets.numel() // n
    for tensor, version in batch.marked:
        per_row = tensor.numel() // len(tensor)
        if (
            tensor._version != version
            or tensor.is_complex()
            or not size
            or size not in (per_row, per_row * repeat)
        ):
            continue
        # Converted to integers, floating-point inputs would often have the values of labels.
        if tensor.is_floating_point() and not targets.is_floating_point():
            dtype = tensor.dtype
        else:
            dtype = targets.dtype
        origin = tensor.detach().index_select(0, rows.to(tensor.device)).reshape(n, -1)
        stated = _per_sample(targets.detach().to(dtype).reshape(n, -1))
        # A label that was repeated for each token of its sample adds its hash that many times to the hash of the targets.
        yielded = _per_sample(origin.to(targets.device, dtype)) * (size // per_row)
        if per_row == 1:
            whole = targets.detach() == targets.detach().round()
        else:
            whole = torch.zeros(1, dtype=torch.float32, device=targets.device)
        yield torch.stack([yielded, stated]), whole.all()


def within(ids: Tensor, *batches: YieldedBatch) -> Tensor:
    """Returns whether each id occurs in one of the batches, shape (), bool, on the device of the batches' ids."""
    if len(batches) == 1:
        known = batches[0].ids
    else:
        known = torch.cat([batch.ids for batch in batches])
    return _positions(ids.to(known.device), known)[1]


def _positions(ids: Tensor, of: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rows of ids in a batch, shape (n,), and whether all were found, shape (). Never waits for the device."""
    ordered, order = of.sort()
    at = torch.searchsorted(ordered, ids).clamp(max=len(of) - 1)
    return order[at], (ordered[at] == ids).all()


def _per_sample(rows: Tensor) -> Tensor:
    """Returns a hash per row that does not depend on the order of its values, shape (n,), int64."""
    # Adding 0.0 makes -0.0 and 0.0 equal in their bits, as they are in value.
    if rows.is_floating_point():
        bits = (rows.double() + 0.0).view(torch.int64)
    else:
        bits = rows.long()
    # Each value is mixed before the sum: the plain sums of {1, 4} and {2, 3} are equal.
    mixed = (bits + 1) * ODD[0]
    mixed = (mixed ^ (mixed >> 31)) * ODD[1]
    return (mixed ^ (mixed >> 29)).sum(1)
