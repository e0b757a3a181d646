"""How the tensors of the library's own forward passes are laid out as samples, where a user's function made them."""

from typing import Any

import torch
from torch import Tensor

from thresher.attribution.rows import AttributionError, RowLayout, YieldedBatch
from thresher.attribution.stated import is_in_order, moved_among_samples
from thresher.attribution.suspicion import Suspicion
from thresher.attribution.tracker import RowTracker
from thresher.loading.trees import leaves

WAY_OUT = (
    "`forward` must return outputs and targets whose row i is sample i of the batch. Let the samples be their first dimension, "
    "as in outputs.unflatten(0, (len(x), -1)) for flattened tokens; or return the very targets of the batch, or views of them."
)


def layout_of(batch: Any, n: int, targets: Any) -> RowLayout:
    """Finds the layout of the tensors that `forward` returned for a batch.

    Args:
        batch: The batch that `forward` was called with.
        n: Number of samples in it.
        targets: Targets that `forward` returned, in any nesting.

    Raises:
        AttributionError: The targets are in another order than the samples, or their rows are not known.
    """
    tracker, known = RowTracker(), [leaf for leaf in leaves(batch) if leaf.dim() and len(leaf) == n]
    ids = torch.arange(n, device=known[0].device if known else None)
    record = YieldedBatch(ids, 0)
    tracker.remember_batch(record, known)
    repeats = [_repeat_of(leaf, n, tracker, record) for leaf in leaves(targets) if leaf.dim() and len(leaf) % n == 0]
    return RowLayout(n, max(repeats, default=1))


def _repeat_of(targets: Tensor, n: int, tracker: RowTracker, record: YieldedBatch) -> int:
    lookup = tracker.look(targets)
    if lookup.rows is not None:
        if (lookup.rows.start, lookup.rows.step, lookup.rows.n) != (0, 1, n):
            raise AttributionError(f"forward= returned targets of some rows only of a batch of {n} samples. {WAY_OUT}")
        return lookup.rows.repeat
    repeat = len(targets) // n
    if any(bool(flag) for flag in moved_among_samples(targets, [record], record.ids, repeat, Suspicion())):
        raise AttributionError(f"forward= returned the targets of the batch in another order of samples. {WAY_OUT}")
    if repeat > 1 and not is_in_order(targets, record, repeat):
        raise AttributionError(
            f"forward= returned targets of shape {tuple(targets.shape)} for {n} samples: it is not certain which rows belong "
            f"to which sample. {WAY_OUT}"
        )
    return max(repeat, 1)
