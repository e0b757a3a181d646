"""What one forward pass tells about a sample besides its loss: `correct`, `confidence`, `grad_norm`, `el2n`, ...

Dense and token outputs: a sample is right where at least `right_share` of its valid positions are, its confidence is
the mean over valid positions of the largest class probability. Several labels a sample: right where all are; the
confidence is the mean over labels of max(p, 1 - p). Soft targets: argmax against argmax.

`grad_norm` is the norm of the gradient of the sample's mean loss with respect to the model's outputs, which bounds the norm
of the whole gradient up to a constant (Katharopoulos & Fleuret, arXiv:1803.00942). `el2n` (arXiv:2107.07075), `margin` and
`entropy` are of classes: means over the valid positions of |p - y|, of p at the label less the largest other, and of
- sum(p log p).
"""

from collections.abc import Set
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


ABOUT_CLASSES = frozenset({"el2n", "margin", "entropy"})
"""Signals that outputs must score classes for."""


def class_errors(log_probs: Tensor, targets: Tensor, *, valid: Tensor | None = None, smoothing: float = 0.0) -> Tensor:
    """The gradient p - y of cross-entropy with respect to what the softmax was taken of.

    Args:
        log_probs: Log-probabilities, shape (B, C, ...), float.
        targets: Class indices (B, ...), int64, or probabilities of the shape of `log_probs`.
        valid: Positions that count, shape (B, ...), bool; None where all do. The others get 0.
        smoothing: Label smoothing, [0, 1).

    Returns:
        Shape of `log_probs`.
    """
    probs = log_probs.exp()
    if targets.is_floating_point():
        error = probs - targets * (1 - smoothing)
    else:
        index = (targets if valid is None else targets.where(valid, 0)).unsqueeze(1)
        error = probs.scatter_add(1, index, probs.new_full((), smoothing - 1).expand(index.shape))
    if smoothing:
        error -= smoothing / log_probs.shape[1]
    return error if valid is None else error.masked_fill_(~valid.unsqueeze(1), 0.0)


def of_classes(
    log_probs: Tensor, targets: Tensor, wanted: Set[str], *, n: int, valid: Tensor | None = None
) -> dict[str, Tensor]:
    """The wanted ones of `el2n`, `margin` and `entropy`.

    Args:
        log_probs: Log-probabilities, shape (B, C, ...), float.
        targets: Class indices (B, ...), int64, or probabilities of the shape of `log_probs`, whose label is the likeliest.
        wanted: Names.
        n: Number of samples; B is n, or n times the positions where samples were flattened.
        valid: Positions that count, shape (B, ...), bool; None where all do.

    Returns:
        Each (n,) float; 0 for a sample without a valid position.
    """
    found: dict[str, Tensor] = {}
    if "el2n" in wanted:
        found["el2n"] = class_errors(log_probs, targets, valid=valid).norm(dim=1)
    if "margin" in wanted:
        index = targets.argmax(1) if targets.is_floating_point() else targets if valid is None else targets.where(valid, 0)
        probs, index = log_probs.exp(), index.unsqueeze(1)
        others = probs.scatter(1, index, probs.new_full((), -1.0).expand(index.shape))
        found["margin"] = (probs.gather(1, index).squeeze(1) - others.amax(1).clamp(min=0)).float()
    if "entropy" in wanted:
        found["entropy"] = -torch.special.xlogy(probs := log_probs.exp(), probs).sum(1)
    return {name: _mean_over(values, valid, n) for name, values in found.items()}


def _mean_over(values: Tensor, valid: Tensor | None, n: int) -> Tensor:
    """Means over the valid positions of each sample."""
    values = values.reshape(n, -1)
    if valid is None:
        return values.mean(1)
    counts = valid.reshape(n, -1)
    return values.where(counts, 0.0).sum(1) / counts.sum(1).clamp(min=1)


def labels_of(targets: object, n: int) -> Tensor:
    """The class of each sample, shape (n,), int64: its index, or where its probabilities are largest.

    Raises:
        ValueError: Targets that are neither.
    """
    if isinstance(targets, Tensor) and targets.shape[:1] == (n,):
        if targets.dim() == 1 and not targets.is_floating_point():
            return targets.long()
        if targets.dim() == 2 and targets.is_floating_point():
            return targets.argmax(1)
    got = f"shape {tuple(targets.shape)}, {targets.dtype}" if isinstance(targets, Tensor) else type(targets).__name__
    raise ValueError(f"one class a sample is needed: targets of shape ({n},), int64, or ({n}, C), floating point, got {got}")


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
