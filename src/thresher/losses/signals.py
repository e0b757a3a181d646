"""Signals of one forward pass besides the loss.

They are `correct`, `confidence`, `predicted`, `margin`, `entropy`, `uncertainty`, `el2n`, `grad_norm`, `label`, `stratum`,
`batch_loss`, `label_probability` and `logit_margin`.

With one label per sample, a sample is correct if the class with the largest probability is its label. `confidence` is that
probability, and `predicted` that class; -1 for a sample with several positions or labels. A position is one token or pixel.

- Dense and token outputs: a sample is correct if at least `right_share` of its valid positions are; its confidence is the
  mean over its valid positions.
- Several independent labels: a sample is correct if all labels are; its confidence is the mean over the labels of
  max(p, 1 - p).
- Probabilities as targets: the likeliest class of the targets is the label.

`el2n` (arXiv:2107.07075), `margin` and `entropy` need outputs that score classes. They are the means over the valid positions
of |p - y|, of the probability of the label minus the largest other probability, and of - sum(p log p). `uncertainty` is the
mean of 1 - sum(p^2), or of 2 p (1 - p) over independent labels: the chance that two labels drawn with the probabilities of the
model differ. `grad_norm` is the norm of the gradient of a sample's mean loss with respect to the model's outputs,
which bounds the norm of the whole gradient up to a constant (Katharopoulos & Fleuret, arXiv:1803.00942); `Criterion.errors`
computes it. `label` is the class of a sample with one label. `batch_loss` is the mean loss of the samples for which the loop
called the criterion together. `label_probability` is the probability of the label, and `logit_margin` its logit minus the
largest other one. For independent labels, they are means over the labels of p and of log(p / (1 - p)), where p is the
probability that the model assigns to the target.
"""

from collections.abc import Mapping, Set
from typing import Literal

import torch
from torch import Tensor

OutputKind = Literal["classes", "labels", "values", "unknown"]
"""Meaning of outputs: scores of classes along dimension 1, scores of independent labels, plain values, or not known."""

ABOUT_CLASSES = frozenset({"el2n", "margin", "entropy", "label"})
"""Signals that are defined only if the outputs score classes."""

OF_THE_LABEL = frozenset({"label_probability", "logit_margin"})
"""Signals that measure how far the model agrees with the label."""

PREDICTIONS = frozenset({"correct", "confidence", "predicted"})
"""Signals of the likeliest class or labels."""

NOT_OF_VALUES = PREDICTIONS | {"uncertainty"} | ABOUT_CLASSES | OF_THE_LABEL
"""Signals that are not defined for a regression."""

LEAST_LOG = 100.0
"""In margins, log-probabilities below -100 count as -100, so that sums of margins stay finite."""

OF_A_BATCH = frozenset({"batch_confidence", "batch_loss"})
"""Signals that depend on the other samples of the batch, so that batches cannot be read together."""

WIDE_SIGNALS = frozenset({"error", "feature"})
"""Signals with several numbers per sample, shape (n, ...). Methods choose rows of a batch by them; records never hold them.

`error` is the gradient of a sample's mean loss with respect to the model's outputs, and `feature` the input of the
`nn.Linear` that ran last.
"""


def narrow(signals: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the signals with one number per sample, by name, which records can hold.

    Args:
        signals: Signals by name, each of shape (n, ...).

    Example:
        >>> list(narrow({"loss": torch.zeros(2), "error": torch.zeros(2, 3)}))
        ['loss']
    """
    return {name: values for name, values in signals.items() if name not in WIDE_SIGNALS}


def classes(
    log_probs: Tensor,
    targets: Tensor,
    *,
    n: int,
    ignore_index: int | None = None,
    right_share: float = 0.5,
) -> dict[str, Tensor]:
    """Returns `correct`, `confidence` and `predicted` of outputs that score classes along dimension 1.

    Args:
        log_probs: Log-probabilities, shape (B, C, ...), float.
        targets: Class indices, shape (B, ...), int64; or probabilities of the shape of `log_probs`.
        n: Number of samples. B is n, or n times the number of positions if samples were flattened.
        ignore_index: Target value of positions that do not count; None if all count.
        right_share: Share of the valid positions that must be right, in [0, 1].

    Returns:
        `correct`, shape (n,), bool, `confidence`, shape (n,), float, in [0, 1], and `predicted`, shape (n,), int64.

    Example:
        >>> log_probs = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3]]).log()
        >>> signals = classes(log_probs, torch.tensor([0, 2]), n=2)
        >>> signals["correct"].tolist(), [round(value, 2) for value in signals["confidence"].tolist()]
        ([True, False], [0.7, 0.6])
    """
    top, predicted = log_probs.max(1)
    soft = targets.shape == log_probs.shape and targets.is_floating_point()
    right = predicted == (targets.argmax(1) if soft else targets)
    valid = None if soft or ignore_index is None else targets != ignore_index
    several = log_probs.dim() > 2 or len(log_probs) != n
    signals = _over_positions(right, top.exp(), valid, n, right_share)
    return signals | {"predicted": predicted.new_full((n,), -1) if several else predicted}


def labels(
    probs: Tensor, targets: Tensor, *, n: int, right_share: float = 0.5
) -> dict[str, Tensor]:
    """Returns `correct`, `confidence` and `predicted` of outputs that score independent labels.

    If a sample has several labels, they are along dimension 1.

    Args:
        probs: Probability of each label, shape (B,) or (B, L, ...), float.
        targets: Targets of the labels, same shape, in [0, 1]; from 0.5 on a label is present.
        n: Number of samples. B is n, or n times the number of positions if samples were flattened.
        right_share: Share of the positions that must be right, in [0, 1].

    Returns:
        `correct`, shape (n,), bool, `confidence`, shape (n,), float, in [0.5, 1], and `predicted`, shape (n,), which is -1.

    Example:
        >>> probs = torch.tensor([[0.9, 0.3], [0.8, 0.6]])
        >>> signals = labels(probs, torch.tensor([[1.0, 0.0], [1.0, 0.0]]), n=2)
        >>> signals["correct"].tolist(), [round(value, 2) for value in signals["confidence"].tolist()]
        ([True, False], [0.8, 0.7])
    """
    right = (probs >= 0.5) == (targets >= 0.5)
    confidence = torch.maximum(probs, 1 - probs)
    if probs.dim() > 1:
        right = right.all(1)
        confidence = confidence.mean(1)
    predicted = torch.full((n,), -1, dtype=torch.int64, device=probs.device)  # no single class
    return _over_positions(right, confidence, None, n, right_share) | {"predicted": predicted}


def _over_positions(
    right: Tensor, confidence: Tensor, valid: Tensor | None, n: int, share: float
) -> dict[str, Tensor]:
    """Reduces `correct` and `confidence` by position, samples first, to one value per sample."""
    # One label per sample, the most frequent case, needs no reduction and stays of dtype bool.
    if right.shape[0] == n and right.dim() == 1 and valid is None:
        return {"correct": right, "confidence": confidence}
    right = right.reshape(n, -1).float()
    confidence = confidence.reshape(n, -1)
    if valid is None:
        return {"correct": right.mean(1) >= share, "confidence": confidence.mean(1)}
    weight = valid.reshape(n, -1).float()
    count = weight.sum(1).clamp(min=1)
    return {
        "correct": ((right * weight).sum(1) / count >= share) & (weight.sum(1) > 0),
        "confidence": (confidence * weight).sum(1) / count,
    }


def of_classes(
    log_probs: Tensor, targets: Tensor, wanted: Set[str], *, n: int, valid: Tensor | None = None
) -> dict[str, Tensor]:
    """Returns the wanted signals among `el2n`, `margin`, `entropy`, `uncertainty`, `label_probability` and `logit_margin`.

    Args:
        log_probs: Log-probabilities, shape (B, C, ...), float.
        targets: Class indices, shape (B, ...), int64; or probabilities of the shape of `log_probs`, whose likeliest class is
            the label.
        wanted: Names of the signals.
        n: Number of samples. B is n, or n times the number of positions if samples were flattened.
        valid: Positions that count, shape (B, ...), bool; None if all count.

    Returns:
        Signals by name, each of shape (n,), float; 0 for a sample without a valid position.

    Example:
        >>> log_probs = torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.3, 0.2]]).log()
        >>> signals = of_classes(log_probs, torch.tensor([0, 0]), {"el2n", "margin"}, n=2)
        >>> {name: [round(value, 3) for value in values.tolist()] for name, values in signals.items()}
        {'el2n': [0.374, 0.616], 'margin': [0.5, 0.2]}
    """
    signals: dict[str, Tensor] = {}
    if "el2n" in wanted:
        signals["el2n"] = class_errors(log_probs, targets, valid=valid).norm(dim=1)
    if wanted & (OF_THE_LABEL | {"margin"}):
        # An ignored target such as -100 is no index: class 0 stands in for it, and `_mean_over` leaves the position out.
        if targets.is_floating_point():
            index = targets.argmax(1)
        else:
            index = targets if valid is None else targets.where(valid, 0)
        signals |= _of_the_label(log_probs, index.unsqueeze(1), wanted)
    if "entropy" in wanted:
        # xlogy is 0 where a probability is 0. The product of p and log p would be NaN there.
        signals["entropy"] = -torch.special.xlogy(probs := log_probs.exp(), probs).sum(1)
    if "uncertainty" in wanted:
        signals["uncertainty"] = (log_probs.exp() * -torch.expm1(log_probs)).sum(
            1
        )  # p (1 - p), exact even if p is nearly 1
    return {name: _mean_over(values, valid, n) for name, values in signals.items()}


def _of_the_label(log_probs: Tensor, index: Tensor, wanted: Set[str]) -> dict[str, Tensor]:
    """Returns the wanted signals among `margin`, `label_probability` and `logit_margin`, one value per position."""
    signals: dict[str, Tensor] = {}
    of_label = log_probs.gather(1, index).squeeze(1)
    if "label_probability" in wanted:
        signals["label_probability"] = of_label.exp().float()
    if "margin" in wanted:
        probs = log_probs.exp()
        others = probs.scatter(1, index, probs.new_full((), -1.0).expand(index.shape))
        # If there is only one class, there is no other: the -1 above must not count as its probability.
        signals["margin"] = (
            probs.gather(1, index).squeeze(1) - others.amax(1).clamp(min=0)
        ).float()
    if "logit_margin" in wanted:
        # Log-probabilities are logits less one number for all classes; that of a probability of 0 is bounded.
        others = log_probs.scatter(
            1, index, log_probs.new_full((), -torch.inf).expand(index.shape)
        ).amax(1)
        signals["logit_margin"] = (
            of_label.clamp(min=-LEAST_LOG) - others.clamp(min=-LEAST_LOG)
        ).float()
    return signals


def label_uncertainty(probs: Tensor, *, n: int) -> Tensor:
    """Returns `uncertainty` of outputs that score independent labels: the mean of 2 p (1 - p) over the labels.

    Args:
        probs: Probability of each label, shape (B,) or (B, L, ...), float.
        n: Number of samples. B is n, or n times the number of positions if samples were flattened.

    Returns:
        Shape (n,), float, in [0, 0.5].

    Example:
        >>> label_uncertainty(torch.tensor([[0.5, 1.0], [0.0, 1.0]]), n=2).tolist()
        [0.25, 0.0]
    """
    return (2 * probs * (1 - probs)).reshape(n, -1).mean(1)


def label_agreement(
    probs: Tensor, targets: Tensor, wanted: Set[str], *, n: int
) -> dict[str, Tensor]:
    """Returns `label_probability` and `logit_margin`, if wanted, of outputs that score independent labels.

    Args:
        probs: Probability of each label, shape (B,) or (B, L, ...), float.
        targets: Targets of the labels, same shape, in [0, 1]; from 0.5 on a label is present.
        wanted: Names of the signals.
        n: Number of samples.

    Returns:
        Signals by name, each of shape (n,), float.

    Example:
        >>> signals = label_agreement(torch.tensor([[0.75, 0.25]]), torch.tensor([[1.0, 0.0]]), {"label_probability"}, n=1)
        >>> signals["label_probability"].tolist()
        [0.75]
    """
    # The bound of `logit` keeps it finite for a probability of exactly 0 or 1, which a sigmoid in float32 reaches.
    right = torch.where(targets >= 0.5, probs, 1 - probs).float()
    signals = {"label_probability": right, "logit_margin": right.logit(1e-6)}
    return {
        name: values.reshape(n, -1).mean(1) for name, values in signals.items() if name in wanted
    }


def class_errors(
    log_probs: Tensor, targets: Tensor, *, valid: Tensor | None = None, smoothing: float = 0.0
) -> Tensor:
    """Returns the gradient p - y of cross-entropy with respect to the logits.

    Args:
        log_probs: Log-probabilities, shape (B, C, ...), float.
        targets: Class indices, shape (B, ...), int64; or probabilities of the shape of `log_probs`.
        valid: Positions that count, shape (B, ...), bool; None if all count. The others get 0.
        smoothing: Label smoothing, in [0, 1).

    Returns:
        The gradient of each position's loss, shape of `log_probs`.

    Example:
        >>> log_probs = torch.tensor([[0.7, 0.2, 0.1]]).log()
        >>> [round(value, 2) for value in class_errors(log_probs, torch.tensor([0]))[0].tolist()]
        [-0.3, 0.2, 0.1]
    """
    probs = log_probs.exp()
    if targets.is_floating_point():
        error = probs - targets * (1 - smoothing)
    else:
        index = (targets if valid is None else targets.where(valid, 0)).unsqueeze(1)
        error = probs.scatter_add(1, index, probs.new_full((), smoothing - 1).expand(index.shape))
    # In place from here on: both branches above made new memory, so the caller's log-probabilities stay as they are.
    if smoothing:
        error -= smoothing / log_probs.shape[1]
    if valid is None:
        return error
    return error.masked_fill_(~valid.unsqueeze(1), 0.0)


def _mean_over(values: Tensor, valid: Tensor | None, n: int) -> Tensor:
    """Returns the mean over the valid positions of each sample, shape (n,)."""
    values = values.reshape(n, -1)
    if valid is None:
        return values.mean(1)
    counts = valid.reshape(n, -1)
    return values.where(counts, 0.0).sum(1) / counts.sum(1).clamp(min=1)


def _are_probabilities(targets: Tensor) -> bool:
    """Whether no value is negative and the values of each sample add up to 1; several values of a regression do not."""
    sums = targets.float().sum(1)
    return bool((targets >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=1e-3)


def as_classes(targets: object, n: int) -> Tensor:
    """Returns the class of each sample, shape (n,), int64: its class index, or the class of the largest probability.

    Args:
        targets: Class indices, shape (n,), integers; or probabilities of the classes, shape (n, C), float.
        n: Number of samples.

    Raises:
        ValueError: `targets` are neither.

    Example:
        >>> as_classes(torch.tensor([[0.1, 0.9], [0.6, 0.4]]), 2).tolist()
        [1, 0]
    """
    if isinstance(targets, Tensor) and targets.shape[:1] == (n,):
        if targets.dim() == 1 and not targets.is_floating_point():
            return targets.long()
        if targets.dim() == 2 and targets.is_floating_point() and _are_probabilities(targets):
            return targets.argmax(1)
    if isinstance(targets, Tensor):
        got = f"shape {tuple(targets.shape)}, {targets.dtype}"
    else:
        got = type(targets).__name__
    raise ValueError(
        f"one class per sample is needed: targets of shape ({n},), int64, or probabilities of shape ({n}, C), got {got}"
    )


def strata(targets: object, n: int, *, of_classes: bool) -> Tensor:
    """Returns the class c of each sample, shape (n,), int64; -1 if it has no class, or several. Never waits for a device.

    Targets that are probabilities may be mixtures of labels: their likeliest class c becomes -2 - c, to tell it from a label.

    Args:
        targets: Targets of the criterion.
        n: Number of samples.
        of_classes: Whether the outputs score classes.

    Example:
        >>> strata(torch.tensor([2, 0]), 2, of_classes=True), strata(torch.tensor([[2, 1], [0, 1]]), 2, of_classes=True)
        (tensor([2, 0]), tensor([-1, -1]))
    """
    # Unlike `as_classes`, this looks at no values: to check probabilities would wait for the device in every step.
    if of_classes and isinstance(targets, Tensor) and targets.shape[:1] == (n,):
        if targets.dim() == 1 and not targets.is_floating_point():
            return targets.long()
        if targets.dim() == 2 and targets.is_floating_point():
            return -2 - targets.argmax(1)
    return torch.full(
        (n,), -1, dtype=torch.int64, device=targets.device if isinstance(targets, Tensor) else None
    )


def batch_confidence(outputs: Tensor, *, n: int) -> Tensor:
    """Returns the confidence of KAKURENBO's official code: softmax over the BATCH axis, then the largest class of each sample.

    Args:
        outputs: Scores of the classes, shape (B, C, ...), float.
        n: Number of samples. B is n, or n times the number of positions if samples were flattened.

    Returns:
        Shape (n,), float32, in [0, 1]; the mean over the positions of a sample.

    Example:
        A score is compared with the scores of the other samples, not with those of the other classes.

        >>> scores = torch.tensor([[3.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
        >>> [round(value, 2) for value in batch_confidence(scores, n=3).tolist()]
        [0.91, 0.33, 0.33]
    """
    # In float32: under autocast the scores are of half precision, and the sum is over all rows of a batch.
    return outputs.float().softmax(0).amax(1).reshape(n, -1).mean(1)


def batch_loss(loss: Tensor) -> Tensor:
    """Returns the mean loss of a batch, for each of its samples.

    Args:
        loss: Loss of each sample, shape (n,), float; -inf for a sample without a valid position, which does not count.

    Returns:
        Shape (n,), of the dtype of `loss`; never above the largest loss, so rounding cannot put it above all of several equal
        losses. NaN if no sample counts.

    Example:
        >>> batch_loss(torch.tensor([1.0, 3.0, 5.0])).tolist()
        [3.0, 3.0, 3.0]
    """
    counts = loss != -torch.inf
    # Rounding can put the mean of equal losses above each of them, hence the minimum below.
    mean = loss.where(counts, 0).sum() / counts.sum()
    if len(loss):
        return torch.minimum(mean, loss.amax()).expand_as(loss)
    return loss


def rows_in_order(signals: Mapping[str, Tensor], order: Tensor) -> dict[str, Tensor]:
    """Returns the signals of a batch with its rows in another order.

    Args:
        signals: Signals by name, each of shape (n, ...).
        order: Row indices, shape (n,), int64.

    Example:
        >>> rows_in_order({"loss": torch.tensor([0.5, 1.5])}, torch.tensor([1, 0]))["loss"]
        tensor([1.5000, 0.5000])
    """
    return {name: values.detach().index_select(0, order) for name, values in signals.items()}
