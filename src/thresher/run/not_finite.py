"""Losses that are not finite, looked for without a table of all samples."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LOOKED_AT = 2**20
"""Number of losses that are looked at together."""

NAMED = 5
"""Number of samples that are named."""


def not_finite(losses: Tensor) -> tuple[int, NDArray[np.int64]]:
    """Returns how many losses are NaN or +inf, and the first places where they are; it waits for the device once, or twice.

    Args:
        losses: Last loss of each sample, shape (N,), on any device; -inf stands for a sample that was never seen.

    Example:
        >>> not_finite(torch.tensor([0.5, float("nan"), float("-inf"), float("inf")]))
        (2, array([1, 3]))
    """
    pieces = losses.split(LOOKED_AT)
    counts = torch.stack([len(piece) - (piece < torch.inf).sum() for piece in pieces]).tolist()
    first = [np.empty(0, dtype=np.int64)]
    for number, piece in enumerate(pieces):
        if counts[number] and sum(map(len, first)) < NAMED:
            first.append((piece < torch.inf).logical_not_().nonzero().flatten()[:NAMED].cpu().numpy() + number * LOOKED_AT)
    return sum(counts), np.concatenate(first)[:NAMED]
