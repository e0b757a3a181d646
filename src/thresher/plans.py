"""What a method answers: the samples of the next epoch, and what corrects for leaving the others out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor


def _plain(value: Any) -> float:
    """A Python number from a NumPy or torch scalar, so that histories save as plain values."""
    return value.item() if hasattr(value, "item") else value


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """The samples one epoch trains on.

    Args:
        ids: Kept samples, shape (K,), int64, K >= 1; ascending, or in training order where `drawn`.
        weights: Factor on each kept sample's loss, shape (K,), float32, aligned with `ids`; None means 1 for all.
        refresh: Samples that get one forward-only pass when the epoch is over, shape (R,), int64, ascending.
        lr_scale: Factor on the learning rate of each step of the epoch, > 0.
        drawn: `ids` was drawn: it is the order of training and may repeat samples.
        facts: Scalars for the history, such as the scheduled and the actual fraction.

    Raises:
        TypeError: A tensor of the wrong dtype.
        ValueError: Wrong shapes, an empty plan, or a learning-rate scale that is not a positive number.
    """

    ids: Tensor
    weights: Tensor | None = None
    refresh: Tensor | None = None
    lr_scale: float = 1.0
    drawn: bool = False
    facts: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lr_scale", float(self.lr_scale))
        object.__setattr__(self, "facts", {name: _plain(value) for name, value in self.facts.items()})
        for name, tensor in (("ids", self.ids), ("refresh", self.refresh)):
            if tensor is None:
                continue
            if tensor.dtype != torch.int64:
                raise TypeError(f"EpochPlan: `{name}` must be int64, got {tensor.dtype}: ids are never floats")
            if tensor.dim() != 1:
                raise ValueError(f"EpochPlan: `{name}` must have one dimension, got shape {tuple(tensor.shape)}")
        if self.ids.numel() == 0:
            raise ValueError("EpochPlan: `ids` is empty: an epoch needs at least one sample")
        if self.weights is not None:
            if self.weights.dtype != torch.float32:
                raise TypeError(f"EpochPlan: `weights` must be float32, got {self.weights.dtype}")
            if self.weights.shape != self.ids.shape:
                raise ValueError(
                    f"EpochPlan: `weights` must be aligned with `ids`, got shapes {tuple(self.weights.shape)} "
                    f"and {tuple(self.ids.shape)}"
                )
        if not (0 < self.lr_scale < float("inf")):
            raise ValueError(f"EpochPlan: `lr_scale` must be a positive number, got {self.lr_scale}")

    def check(self, n: int) -> None:
        """Hold the plan against a dataset of `n` samples.

        Raises:
            ValueError: An id outside [0, n), or ids that are not ascending.
        """
        for name, tensor, ordered in (("ids", self.ids, not self.drawn), ("refresh", self.refresh, True)):
            if tensor is None or not tensor.numel():
                continue
            ids = tensor.numpy()
            low, high = (ids[0], ids[-1]) if ordered else (ids.min(), ids.max())
            if ordered and not bool(np.all(ids[1:] > ids[:-1])):
                raise ValueError(f"EpochPlan: `{name}` must be ascending without repeats")
            if low < 0 or high >= n:
                raise ValueError(f"EpochPlan: `{name}` must be within [0, {n}), got {low} to {high}")
