"""The results of a method: the samples or rows to train on, and corrections for leaving out the others."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor


def _plain(value: Any) -> float:
    """Converts a NumPy or torch scalar to a Python number, so that saved histories have plain values only."""
    return value.item() if hasattr(value, "item") else value


def _check_numbers(name: str, tensor: Tensor, hint: str) -> None:
    """Checks that ids or row numbers have one dimension and dtype int64. Reads no values, which would wait for the device."""
    if tensor.dtype != torch.int64:
        raise TypeError(f"{name} must be int64, got {tensor.dtype}: {hint}")
    if tensor.dim() != 1:
        raise ValueError(f"{name} must have one dimension, got shape {tuple(tensor.shape)}")


def _check_weights(plan: str, weights: Tensor, name: str, numbers: Tensor) -> None:
    """Checks that there is one float32 weight per id or row number. Reads no values, which would wait for the device."""
    if weights.dtype != torch.float32:
        raise TypeError(f"{plan}: `weights` must be float32, got {weights.dtype}")
    if weights.shape != numbers.shape:
        raise ValueError(
            f"{plan}: `weights` must be aligned with `{name}`, got shapes {tuple(weights.shape)} and {tuple(numbers.shape)}"
        )


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """The plan of an epoch: the samples to train on, and their weights in the loss.

    Args:
        ids: Sample ids, shape (K,), int64; ascending, or in training order if `drawn` is True. At least one.
        weights: Factors on the losses of the samples, shape (K,), float32, aligned with `ids`; None means 1 for all.
        refresh: Ids of the samples that get one forward pass without gradients at the end of the epoch, shape (R,), int64,
            ascending; None means no sample.
        lr_scale: Factor on the learning rate of each step of the epoch, > 0.
        drawn: Whether `ids` is an order of training, drawn at random, which may repeat samples.
        facts: Scalars for the history by name, such as the scheduled and the actual fraction.
        remember: Values to store for each sample, shape (N,), by the name of a column with merge="plan".
        smaller_batches: Whether the epoch has as many steps as full training, each with a smaller batch, rather than fewer
            steps with full batches. Batch sizes differ by one at most; samples that are left out are not loaded.
        note: Warning for the user, a whole sentence; the run gives each warning once. Default "": none.

    Raises:
        TypeError: A tensor has the wrong dtype.
        ValueError: A tensor has the wrong shape, or a number is out of its range.

    Example:
        Three of six samples are kept, and each of them counts twice.

        >>> plan = EpochPlan(torch.tensor([0, 2, 5]), weights=torch.full((3,), 2.0), facts={"fraction": 0.5})
        >>> plan.check(6)
        >>> len(plan.ids), plan.lr_scale, plan.facts
        (3, 1.0, {'fraction': 0.5})

        >>> EpochPlan(torch.tensor([0.0, 2.0]))
        Traceback (most recent call last):
        TypeError: EpochPlan: `ids` must be int64, got torch.float32: ids are never floats
    """

    ids: Tensor
    weights: Tensor | None = None
    refresh: Tensor | None = None
    lr_scale: float = 1.0
    drawn: bool = False
    facts: Mapping[str, float] = field(default_factory=dict)
    remember: Mapping[str, Tensor] = field(default_factory=dict)
    smaller_batches: bool = False
    note: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "lr_scale", float(self.lr_scale))
        object.__setattr__(
            self, "facts", {name: _plain(value) for name, value in self.facts.items()}
        )
        for name, tensor in (("ids", self.ids), ("refresh", self.refresh)):
            if tensor is not None:
                _check_numbers(f"EpochPlan: `{name}`", tensor, "ids are never floats")
        if self.weights is not None:
            _check_weights("EpochPlan", self.weights, "ids", self.ids)
        if not (0 < self.lr_scale < float("inf")):
            raise ValueError(
                f"EpochPlan: `lr_scale` must be a positive number, got {self.lr_scale}"
            )

    def check(self, n: int) -> None:
        """Checks the plan against a dataset.

        Args:
            n: Number of samples of the dataset.

        Raises:
            ValueError: The plan is empty, an id is outside the dataset, or ids that must be ascending are not.
        """
        if not len(self.ids):
            raise ValueError("EpochPlan: `ids` is empty; an epoch needs at least one sample")
        for name, tensor, ordered in (
            ("ids", self.ids, not self.drawn),
            ("refresh", self.refresh, True),
        ):
            if tensor is None or not tensor.numel():
                continue
            ids = tensor.numpy()
            if ordered and not bool(np.all(ids[1:] > ids[:-1])):
                raise ValueError(f"EpochPlan: `{name}` must be ascending without repeats")
            low, high = (ids[0], ids[-1]) if ordered else (ids.min(), ids.max())
            if low < 0 or high >= n:
                raise ValueError(
                    f"EpochPlan: `{name}` must be within [0, {n}), got {low} to {high}"
                )


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """The plan of a batch: the rows to train on, and their weights in the loss.

    A method creates it within a training step, so creating it must not wait for the device.

    Args:
        rows: Row numbers in the batch, shape (K,), int64, ascending, on the device of the signals; K may be 0.
        weights: Factors on the losses of the rows, shape (K,), float32, aligned with `rows`; None means 1 for all.
        facts: Scalars for the history by name, such as the scheduled and the actual fraction; no tensors.
        drawn: Whether `rows` was drawn at random and may repeat rows.

    Raises:
        TypeError: A tensor has the wrong dtype, or a fact is a tensor.
        ValueError: A tensor has the wrong shape.

    Example:
        >>> losses = torch.tensor([0.2, 1.5, 0.1, 0.9])
        >>> plan = BatchPlan(losses.topk(2).indices.sort().values)
        >>> plan.rows.tolist()
        [1, 3]
        >>> BatchPlan(losses > 0.5)
        Traceback (most recent call last):
        TypeError: BatchPlan: `rows` must be int64, got torch.bool: for a mask, pass mask.nonzero().flatten()
    """

    rows: Tensor
    weights: Tensor | None = None
    facts: Mapping[str, float] = field(default_factory=dict)
    drawn: bool = False

    def __post_init__(self) -> None:
        for name, value in self.facts.items():
            if isinstance(value, Tensor):
                raise TypeError(
                    f"BatchPlan: `facts` must be plain numbers, got a tensor for {name!r}: reading it would wait for the device"
                )
        object.__setattr__(
            self, "facts", {name: _plain(value) for name, value in self.facts.items()}
        )
        _check_numbers("BatchPlan: `rows`", self.rows, "for a mask, pass mask.nonzero().flatten()")
        if self.weights is not None:
            _check_weights("BatchPlan", self.weights, "rows", self.rows)
