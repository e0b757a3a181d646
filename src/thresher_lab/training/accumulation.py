"""Gradient accumulation: steps of the optimizer with the gradients of several batches, each with its share of the samples."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import find_batch_size
from torch import Tensor, nn

from thresher_lab.training.processes import number_of_processes


class Groups:
    """The batches of an epoch in groups; the last group may be smaller.

    The end of the epoch is not asked for before the step of the last group, where the number of batches is known: the step is
    then one of the epoch that it belongs to.

    Args:
        batches: Batches of the epoch.
        size: Number of batches of a group.
        total: Number of batches of the epoch; None where it is not known before the epoch is over.
    """

    def __init__(self, batches: Iterator[Any], size: int, total: int | None) -> None:
        self._batches = batches
        self._size = size
        self._left = total

    def next_group(self) -> Iterator[tuple[Any, bool]]:
        """Yields the batches of the next group, each with whether there may be none after it in the group."""
        here = self._size if not self._left else min(self._size, self._left)
        for number, batch in enumerate(islice(self._batches, here), start=1):
            if self._left:
                self._left -= 1
            yield batch, self._left is None or number == here


def share_of(criterion: Any, targets: Any) -> Tensor | float:
    """Returns the weight of a batch's mean loss beside those of other batches: its number of samples.

    Where a cross-entropy has class weights, or leaves some targets out, its mean divides by the weights of the targets. The
    number of samples is then multiplied by the mean of these weights.

    Args:
        criterion: Loss function, which returns a mean.
        targets: Targets of the batch, in any nesting; the first dimension is that of samples.

    Example:
        >>> share_of(torch.nn.CrossEntropyLoss(torch.tensor([1.0, 3.0])), torch.tensor([0, 1, 1, -100])).item()
        7.0
    """
    are_classes = isinstance(targets, Tensor) and not targets.is_floating_point()
    if not isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss) or not are_classes:
        return float(find_batch_size(targets))
    counts = targets != criterion.ignore_index
    if criterion.weight is None:
        weights = counts
    else:
        weights = criterion.weight[(targets * counts).to(criterion.weight.device)]
    return (weights * counts.to(weights.device)).sum() * (len(targets) / targets.numel())


class GradientSum:
    """Adds up the gradients of batches to that of the mean loss over all their samples.

    What the batches of a step have together is known after the last one only. The losses are therefore divided by the number
    of samples of full batches, and the gradients are corrected before the step.

    Args:
        accelerator: Accelerator of the training.
        model: Prepared model.
        criterion: Loss function of the training.
        samples: Number of samples of a step with full batches, of all processes together.
    """

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, criterion: Any, samples: int
    ) -> None:
        self._accelerator = accelerator
        self._model = model
        self._criterion = criterion
        self._samples = samples
        self._seen: Tensor | float = 0.0

    def waiting(self, *, last: bool) -> AbstractContextManager[Any]:
        """Returns a context for the passes of a batch; before the last batch, processes do not exchange their gradients.

        Args:
            last: Whether the batch may be the last one of the step.
        """
        if last:
            return nullcontext()
        return self._accelerator.no_sync(self._model)

    def weighted(self, loss: Tensor, targets: Any) -> Tensor:
        """Returns a mean loss times the share of its samples in a step with full batches.

        Args:
            loss: Mean loss of the part of a batch that this process has.
            targets: Targets of that part.
        """
        share = share_of(self._criterion, targets)
        self._seen = self._seen + share
        # DistributedDataParallel divides by their number.
        return loss * (number_of_processes() / self._samples) * share

    def correct(self) -> None:
        """Scales the gradients to what the batches really had; all processes call it together."""
        seen: Any = self._seen
        if number_of_processes() > 1:  # they may differ in their parts, and must not in the factor
            seen = self._accelerator.reduce(
                torch.as_tensor(seen, device=self._accelerator.device), reduction="sum"
            )
        self._seen = 0.0
        if (factor := self._samples / float(seen)) != 1:
            for one in self._model.parameters():
                if one.grad is not None:
                    one.grad.mul_(factor)
