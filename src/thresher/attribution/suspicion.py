"""How much several batches say together against stated ids, where the labels of one batch say too little."""

import math

import torch
from torch import Tensor

LOG_CHANCE = math.log(1e-9)
"""Logarithm of the chance below which labels that a loop computed do not have the values of the batch at other rows."""
NOT_MOVED = 7364136223846793005
"""Takes the place of the values that were not moved; far from the mixed bits of any value with all but certainty."""


class Suspicion:
    """Adds up, batch by batch, how unlikely it is that targets have the values of other samples by chance.

    Labels that a loop computes (flipped, noisy, remapped) can have the values of the batch at other rows, too: those of two
    classes that are flipped, in every batch with as many of both. Labels that are a function of those that were yielded are
    no evidence for that reason; others are as much as they are unlikely.
    """

    def __init__(self) -> None:
        self._number, self._log_chance = torch.tensor(-1), torch.tensor(0.0, dtype=torch.float64)
        self._before: Tensor | None = None

    def grows(self, moved: Tensor, found: Tensor, number: int, values: Tensor, few: Tensor) -> Tensor:
        """Adds the targets of one batch; returns whether chance is excluded, shape () and bool, without waiting for a device.

        Args:
            moved: Whether the targets have the values of the samples at other rows, shape (), bool.
            found: Whether the samples are of this batch, shape (), bool.
            number: Number of the batch; a further loss of it adds nothing.
            values: A number per sample for what was yielded, and one for its target, shape (2, n), int64.
            few: Whether the values can be those of classes, of which there are few, shape (), bool.
        """
        device, before = moved.device, self._before
        last, total = self._number.to(device), self._log_chance.to(device)
        both = values if before is None else torch.cat([before.to(device), values], 1)
        more = total + _log_chance(values[0], values[1], few)
        grown = torch.where(last == number, total, torch.where(few & _is_function(both), 0.0, more))
        grown = torch.where(moved, grown, 0.0)
        self._log_chance, self._number = torch.where(found, grown, total), torch.where(found, number, last)
        same_size = before is not None and before.shape == values.shape
        self._before = torch.where(found, values, before.to(device)) if before is not None and same_size else values
        return moved & found & (self._log_chance < LOG_CHANCE)


def _is_function(values: Tensor) -> Tensor:
    """Returns whether equal values became equal targets, and some values are equal; shape (), bool."""
    yielded, order = values[0].sort()
    same = yielded[1:] == yielded[:-1]
    targets = values[1][order]
    return (~same | (targets[1:] == targets[:-1])).all() & same.any()


def _log_chance(yielded: Tensor, stated: Tensor, few: Tensor) -> Tensor:
    """Returns the logarithm of the chance that labels drawn anew from those of the moved rows are the same ones; shape ()."""
    values = yielded.masked_fill(yielded == stated, NOT_MOVED).sort().values
    moved = values != NOT_MOVED
    counts = torch.searchsorted(values, values, right=True) - torch.searchsorted(values, values)
    number = moved.sum().double()
    each = counts.double().log() - number.clamp(min=1).log() - torch.lgamma(counts + 1.0) / counts
    chance = torch.lgamma(number + 1) + each.where(moved, 0.0).sum()
    distinct = (counts.where(moved, 1) == 1).all()
    return torch.where(few | ~distinct, chance, -torch.inf)
