"""Checks that row i of a batch is sample i, for a collate function that is not one of torch.

Sorting, mixup and CutMix in a collate function give rows that are not the samples in order; a loss would then be credited to
another sample. The check is made where batches are made, on the samples of real batches: no sample is read for it.
"""

import random
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate, default_convert

from thresher.loading.collate_state import CollateState
from thresher.loading.held_state import held_iterator
from thresher.loading.row_buffer import rows_of, select, take_apart, take_rows
from thresher.loading.trees import differing_part, map_where

DRAWS = 8
"""Number of random states under which a collate function is tried that draws random numbers."""
ORDER_SEED = 15
"""Seed with which no order of 4 samples or more changes places with mirroring or turning a batch, which would hide them."""

MIXES = "sorts or mixes the samples of a batch, or draws random numbers for them"
IF_MASKING = (
    "If it only draws for each row by itself, as one that masks tokens, declare it: thresher.attach(collate_keeps_rows=True)"
)


class CheckedBatch(NamedTuple):
    """A batch on its way from a collate function, with the result of the check.

    Attributes:
        batch: The batch, as the user's collate function returned it.
        reason: Reason why its rows are not its samples in order; None where they are.
    """

    batch: Any
    reason: str | None


class UnknownRows:
    """Whether the rows of batches are their samples in order, as far as batches were checked.

    Args:
        declared: Whether the user has declared that they are.
    """

    def __init__(self, *, declared: bool = False) -> None:
        self.declared = declared

    reason: str | None = None
    """Reason why they are not; None where no batch had one."""

    def open(self, batch: Any) -> Any:
        """Returns the user's batch, and notes what the check of it found."""
        if type(batch) is not CheckedBatch:
            return batch
        self.reason = self.reason or batch.reason
        return batch.batch


def checked(loader: DataLoader[Any], *, declared: bool | None = None) -> Any:
    """Returns the collate function of a loader, with the check if it is not one of torch.

    Args:
        loader: The user's loader.
        declared: Whether the user has declared that row i of each batch is sample i; None where this cannot be declared.
    """
    if loader.collate_fn in (default_collate, default_convert):
        return loader.collate_fn
    sizes: Any = loader.batch_sampler
    batched = getattr(loader.dataset, "__getitems__", None) is not None
    return CheckedCollate(loader.collate_fn, sizes.batch_size, batched=batched, declared=declared)


class CheckedCollate:
    """A collate function that collates the samples of some batches a second time, in another order.

    The rows of the two batches must have changed places as the samples did, under the same random numbers. Batches 0, 1, 2, 4,
    8, ... are checked. Random states, and what the collate function remembers, are then as if it had been called once.

    Rows that depend on random numbers never follow their samples, as where tokens are masked: the numbers are drawn by the
    place in the batch. Where the user has declared that each row is its sample all the same, only the parts of a batch are
    compared that are the same whatever is drawn.

    Args:
        collate: Collate function of the user.
        batch_size: Number of samples of a batch.
        batched: Whether the dataset reads the samples of a batch together, in a form of its own.
        declared: Whether the user has declared that row i of each batch is sample i; None where this cannot be declared.
    """

    def __init__(self, collate: Any, batch_size: int, *, batched: bool, declared: bool | None = None) -> None:
        self.collate, self.batch_size, self.batched, self.declared = collate, batch_size, batched, declared
        self.calls = 0

    def __call__(self, samples: Any) -> Any:
        """Returns the batch of the user's collate function, as a `CheckedBatch` where it was checked."""
        number, self.calls = self.calls, self.calls + 1
        if number & (number - 1) or not self._can_be_moved(samples):
            return self.collate(samples)
        name = getattr(self.collate, "__qualname__", type(self.collate).__name__)
        iterator = held_iterator(self.collate)
        if iterator is not None and self.declared:
            return self.collate(samples)
        if iterator is not None:
            reason = (
                f"may sort or mix its samples: it keeps an iterator ({type(iterator).__name__}), so that it could not be "
                "called a second time for a comparison without changing what it returns next. Keep the position as a number"
            )
            return CheckedBatch(self.collate(samples), f"collate_fn {name} {reason}")
        copies, state = copied(samples), CollateState(self.collate)
        before = state.capture()
        batch = self.collate(samples)
        after = state.capture()
        draws = 1 if state.same(before, after) else DRAWS
        try:
            state.restore(before)
            reason = self._reason(batch, copies, state, draws)
        except Exception as error:
            text = f"could not be called again with the same samples in another order ({type(error).__name__}: {error})"
            reason = None if self.declared else text
        finally:
            state.restore(after)
        if reason is not None and draws > 1 and self.declared is False:
            reason += f". {IF_MASKING}"
        return CheckedBatch(batch, None if reason is None else f"collate_fn {name} {reason}")

    def _can_be_moved(self, samples: Any) -> bool:
        """Whether the samples can be put in another order: there are two, and it is known where each of them is."""
        if isinstance(samples, list):
            # A dataset that fetches whole batches may return its columns; a smaller batch of samples has tuples or dicts.
            whole = len(samples) == self.batch_size or all(isinstance(sample, tuple | dict) for sample in samples)
            return len(samples) > 1 and (not self.batched or whole)
        try:
            return rows_of(samples) > 1
        except ValueError:
            return False

    def _reason(self, batch: Any, samples: Any, state: CollateState, draws: int) -> str | None:
        """Returns the reason why rows do not follow the samples; random states are those before the batch was made."""
        n = len(samples) if isinstance(samples, list) else rows_of(samples)
        order = torch.tensor(moved_order(n))
        pairs = self._pairs(batch, samples, state, order, draws)
        if self.declared and draws > 1:
            return _why_not_declared(pairs, order)
        reasons = (why_rows_do_not_follow(*pair, order) for pair in pairs)
        return next((reason for reason in reasons if reason is not None), None)

    def _pairs(self, batch: Any, samples: Any, state: CollateState, order: Tensor, draws: int) -> Iterator[tuple[Any, Any]]:
        """Yields batches of the samples, each with one of the samples in another order under the same random numbers."""
        for draw in range(draws):
            if draw:
                now = state.capture()
                batch = self.collate(copied(samples))
                state.restore(now)
            others = copied(samples)
            moved = [others[i] for i in order.tolist()] if isinstance(others, list) else select(others, order, len(order))
            yield batch, self.collate(moved)


@cache
def moved_order(n: int) -> list[int]:
    """Returns a random order of n > 1 samples, always the same one, in which each of more than three has another place."""
    if n == 3:
        return [0, 2, 1]  # in the two orders that move all three, turning the batch would be hidden
    order, generator = list(range(n)), random.Random(ORDER_SEED)
    while any(place == sample for place, sample in enumerate(order)):
        generator.shuffle(order)
    return order


def why_rows_do_not_follow(batch: Any, moved: Any, order: Tensor) -> str | None:
    """Compares two batches of the same samples.

    Args:
        batch: Batch of the samples.
        moved: Batch of the samples in another order.
        order: Order of the samples in `moved`, shape (n,), int64.

    Returns:
        Reason why the rows of the batches did not change places as the samples did; None where they did.
    """
    columns, others = (take_apart(one, len(order))[0] for one in (batch, moved))
    if len(columns) != len(others):
        return MIXES
    return _why_columns_do_not_follow(columns, others, order)


def _why_not_declared(pairs: Iterable[tuple[Any, Any]], order: Tensor) -> str | None:
    """Returns the reason why rows do not follow, by the parts of batches that are the same whatever random numbers are drawn.

    Args:
        pairs: Batches of the same samples under other random numbers, each with one of the samples in another order.
        order: Order of the samples in the second batches, shape (n,), int64.
    """
    first: list[list[Any]] = []
    fixed: list[int] = []
    for pair in pairs:
        both = [take_apart(one, len(order))[0] for one in pair]
        if not first:
            first, fixed = both, [*range(len(both[0]))] if len(both[0]) == len(both[1]) else []
        whole = [len(one) for one in both] == [len(one) for one in first]
        fixed = [i for i in fixed if whole and all(_is_same(one[i], other[i]) for one, other in zip(both, first, strict=True))]
    columns, others = ([one[i] for i in fixed] for one in first)
    reason = _why_columns_do_not_follow(columns, others, order)
    return None if reason is None else f"does not keep its rows, as collate_keeps_rows=True declares: it {reason}"


def _is_same(one: Any, other: Any) -> bool:
    return differing_part(one, other) is None


def _why_columns_do_not_follow(columns: list[Any], others: list[Any], order: Tensor) -> str | None:
    """Compares the parts of two batches that have one entry for each sample; see `why_rows_do_not_follow`."""
    n = len(order)
    for column, expected, other in zip(columns, take_rows(columns, order), others, strict=True):
        if differing_part(expected, other) is None:
            continue
        second = isinstance(column, Tensor) and column.dim() > 1 and column.shape[1] == n
        if second and differing_part(column.index_select(1, order.to(column.device)), other) is None:
            return (
                f"puts the samples in the second dimension of a tensor of shape {tuple(column.shape)}, whose first dimension "
                "has the same size: put the samples first, or use another batch_size"
            )
        if isinstance(column, Tensor) and column.dim() > 1 and column.shape[1] == n and differing_part(column, other) is None:
            return (
                f"sorts the samples of a batch, or makes a part of shape {tuple(column.shape)} that has as many entries as the "
                "batch has samples without being of them: use another batch_size"
            )
        return MIXES
    return None


def copied(samples: Any) -> Any:
    """Returns samples with tensors, arrays and containers of their own, which a collate function may change in place."""

    def copy_of(part: Any) -> Any:
        return part.clone() if isinstance(part, Tensor) else part.copy()

    return map_where(copy_of, samples, lambda part: isinstance(part, Tensor | np.ndarray))
