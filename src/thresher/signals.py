"""What one forward pass tells about a sample besides its loss: `correct`, `confidence`.

Dense and token outputs: a sample is right where at least `right_share` of its valid positions are, its confidence is
the mean over valid positions of the largest class probability. Several labels a sample: right where all are; the
confidence is the mean over labels of max(p, 1 - p). Soft targets: argmax against argmax.
"""

from typing import Literal

import torch
from torch import Tensor

Kind = Literal["classes", "labels", "values", "unknown"]
"""How outputs read: scores of classes along dimension 1, scores of independent labels, plain values, or not known."""


def _over_positions(right: Tensor, confidence: Tensor, valid: Tensor | None, n: int, share: float) -> dict[str, Tensor]:
    """Reduce per-position signals, samples first, to one value a sample."""
    if right.shape[0] == n and right.dim() == 1 and valid is None:
        return {"correct": right, "confidence": confidence}
    right, confidence = right.reshape(n, -1).float(), confidence.reshape(n, -1)
    if valid is None:
        return {"correct": right.mean(1) >= share, "confidence": confidence.mean(1)}
    weight = valid.reshape(n, -1).float()
    count = weight.sum(1).clamp(min=1)
    return {
        "correct": ((right * weight).sum(1) / count >= share) & (weight.sum(1) > 0),
        "confidence": (confidence * weight).sum(1) / count,
    }


def classes(
    log_probs: Tensor, targets: Tensor, *, n: int, ignore_index: int | None = None, right_share: float = 0.5
) -> dict[str, Tensor]:
    """Signals of outputs that score classes along dimension 1.

    Args:
        log_probs: Log-probabilities, shape (B, C, ...), float.
        targets: Class indices (B, ...), int64, or probabilities of the shape of `log_probs`.
        n: Number of samples; B is n, or n times the positions where samples were flattened.
        ignore_index: Target value of positions that do not count; None where there is none.
        right_share: Share of valid positions that must be right, in [0, 1].

    Returns:
        `correct` (n,) bool and `confidence` (n,) float in [0, 1].
    """
    top, predicted = log_probs.max(1)
    soft = targets.shape == log_probs.shape and targets.is_floating_point()
    right = predicted == (targets.argmax(1) if soft else targets)
    valid = None if soft or ignore_index is None else targets != ignore_index
    return _over_positions(right, top.exp(), valid, n, right_share)


def labels(probs: Tensor, targets: Tensor, *, n: int, right_share: float = 0.5) -> dict[str, Tensor]:
    """Signals of outputs that score independent labels (along dimension 1 where there is one).

    Args:
        probs: Probability of each label, shape (B,) or (B, L, ...).
        targets: Same shape, in [0, 1].
        n: Number of samples.
        right_share: Share of positions that must be right, in [0, 1].

    Returns:
        `correct` (n,) bool and `confidence` (n,) float in [0.5, 1].
    """
    right = (probs >= 0.5) == (targets >= 0.5)
    confidence = torch.maximum(probs, 1 - probs)
    if probs.dim() > 1:
        right, confidence = right.all(1), confidence.mean(1)
    return _over_positions(right, confidence, None, n, right_share)


def batch_confidence(outputs: Tensor, *, n: int) -> Tensor:
    """KAKURENBO's official confidence: softmax over the BATCH axis, then the largest class column of each sample."""
    return outputs.float().softmax(0).amax(1).reshape(n, -1).mean(1)
