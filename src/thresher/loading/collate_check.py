"""Checks that row i of a batch is sample i, if the user's loader has a collate function of its own.

A collate function that sorts its samples, or that does mixup or CutMix, returns rows that are not the samples in order. The
loss of a row would be assigned to the wrong sample. So the values of a batch are compared with those of its samples. The check
does not call the collate function again, and changes no data of the user.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate, default_convert

from thresher.comparing import is_compared
from thresher.loading.row_buffer import rows_of, take_apart
from thresher.loading.tensor_loader import as_it_is
from thresher.trees import map_where
from thresher.warning import warn

# `attribution.resolve` looks for this text in the reason: it refuses even `run.ids` if rows are known to have moved.
MOVED = "sorts or mixes the samples of a batch"
CHANGED = (
    "changes every value of its samples, so it may sort or mix them. If row i of each batch is sample i, declare it: "
    "thresher.attach(collate_keeps_rows=True)"
)


class CheckedBatch(NamedTuple):
    """A batch and the result of comparing it with its samples.

    Attributes:
        batch: The batch, as the user's collate function returned it.
        reason: Reason why the rows are not the samples in order; None if no reason was found.
        unseen: Name of the collate function, if the values of the samples do not appear in the batch; else None.
    """

    batch: Any
    reason: str | None
    unseen: str | None


class UnknownRows:
    """Collects the results of the checks of all batches: whether row i is the i-th sample passed to the collate function.

    Args:
        collate_keeps_rows: Whether the user has declared that row i is sample i; None if the caller has no such argument, as
            when scores are computed.
    """

    def __init__(self, *, collate_keeps_rows: bool | None = False) -> None:
        self.collate_keeps_rows = collate_keeps_rows
        # No warning if the user has declared the rows, or has no argument to declare them.
        self._warned = collate_keeps_rows is not False

    reason: str | None = None
    """Reason why rows are not the samples in order; None as long as no batch showed one."""

    def open(self, batch: Any) -> Any:
        """Removes the result of the check from a batch, stores it, and returns the batch of the user."""
        if type(batch) is not CheckedBatch:
            return batch
        self.reason = self.reason or batch.reason
        if batch.unseen is not None and batch.reason is None and not self._warned:
            self._warned = True
            warn(
                f"collate_fn {batch.unseen} changes the values of samples, so a batch does not show which row is which sample. "
                "Thresher assumes that row i is sample i. If that is right, pass thresher.attach(collate_keeps_rows=True). If "
                "it sorts or mixes samples, return the index of each sample from the dataset and pass it as ids=. This warning "
                "is given once."
            )
        return batch.batch


def checked(loader: DataLoader[Any], *, collate_keeps_rows: bool | None = None) -> Any:
    """Returns the collate function of a loader, wrapped in a `CheckedCollate` if its rows have to be checked.

    They need no check if the user has declared that row i is sample i, or if the collate function is one of torch.

    Args:
        loader: The user's loader.
        collate_keeps_rows: Whether the user has declared that row i of each batch is sample i. Default None: not declared.
    """
    # The functions of torch stack samples in order: a check would cost time and never find anything.
    if collate_keeps_rows or loader.collate_fn in (default_collate, default_convert, as_it_is):
        return loader.collate_fn
    sizes: Any = loader.batch_sampler
    batched = getattr(loader.dataset, "__getitems__", None) is not None
    return CheckedCollate(loader.collate_fn, getattr(sizes, "batch_size", 0), batched=batched)


class CheckedCollate:
    """A collate function whose batches 0, 1, 2, 4, 8, ... are compared with their samples.

    Args:
        collate: Collate function of the user.
        batch_size: Number of samples of a batch.
        batched: Whether the dataset reads the samples of a batch together, by `__getitems__`.
    """

    def __init__(self, collate: Any, batch_size: int, *, batched: bool) -> None:
        self.collate = collate
        self.batch_size = batch_size
        self.batched = batched
        self.calls = 0

    def __call__(self, samples: Any) -> Any:
        """Returns the batch of the user's collate function, as a `CheckedBatch` if it was checked."""
        number = self.calls
        self.calls = self.calls + 1
        # Comparing takes longer than collating: at batches 0, 1, 2, 4, 8, ... it costs next to nothing over an epoch.
        # With fewer than two samples there is no order to check.
        if not is_compared(number) or (n := self._number_of(samples)) < 2:
            return self.collate(samples)
        # Copies, because a collate function may change its samples in place.
        parts = _parts_of_samples(copy_samples(samples), n)
        batch = self.collate(samples)
        name = getattr(self.collate, "__qualname__", type(self.collate).__name__)
        reason, seen = compare(parts, take_apart(batch, n)[0])
        return CheckedBatch(
            batch, None if reason is None else f"collate_fn {name} {reason}", None if seen else name
        )

    def _number_of(self, samples: Any) -> int:
        """Returns the number of samples; 0 if `samples` may be something other than one entry per sample."""
        if isinstance(samples, list):
            # A dataset with __getitems__ may return a list of columns, such as [inputs, labels]. A list of tuples or dicts, or
            # one with batch_size entries, is a list of samples.
            one_per_sample = len(samples) == self.batch_size or all(
                isinstance(sample, tuple | dict) for sample in samples
            )
            return len(samples) if not self.batched or one_per_sample else 0
        try:
            return rows_of(samples)
        except ValueError:
            return 0


def compare(parts: list[list[Any]], columns: list[Any]) -> tuple[str | None, bool]:
    """Compares a batch with its samples.

    Args:
        parts: Parts of the samples, such as [inputs, labels]: for each part a list of n arrays, one per sample.
        columns: Parts of the batch that have n entries.

    Returns:
        The reason why the rows are not the samples in order, or None; and whether the batch contains, in order, all parts that
        are arrays (at least one part of any kind).
    """
    n = len(parts[0]) if parts else 0
    parts_in_order = set[int]()
    unmatched = []
    for column in columns:
        rows = [as_array(column[i]) for i in range(n)]
        matches = {k for k, part in enumerate(parts) if all(map(_contains_part, rows, part))}
        parts_in_order |= matches
        if not matches:
            unmatched.append((column, rows))
    # A part that one column has in order was not moved. Another column with the same values in another order is additional,
    # such as the labels of the partners in mixup.
    missing = [part for k, part in enumerate(parts) if k not in parts_in_order]
    reasons = (_explain_move(column, rows, missing) for column, rows in unmatched)
    reason = next((reason for reason in reasons if reason is not None), None)
    arrays = {
        k
        for k, part in enumerate(parts)
        if any(isinstance(value, np.ndarray) and value.ndim for value in part)
    }
    # Mixup, for example, changes inputs and labels. If samples are only ids, by which the collate function reads the data,
    # there are no arrays, and nothing can be concluded.
    if columns and arrays and not parts_in_order and reason is None:
        reason = CHANGED
    return reason, bool(parts_in_order) and arrays <= parts_in_order


def as_array(value: Any) -> Any:
    """Returns a tensor, a number or a list of numbers as an array; other values unchanged."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        # NumPy has no bfloat16.
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    if isinstance(value, bool | int | float) or (
        isinstance(value, list | tuple)
        and value
        and all(isinstance(number, int | float) for number in value)
    ):
        return np.asarray(value)
    return value


def _contains_part(row: Any, part: Any) -> bool:
    """Whether a row of a batch has the values of a part of a sample, possibly padded and in another dtype."""
    if not isinstance(row, np.ndarray) or not isinstance(part, np.ndarray):
        return isinstance(row, str) and isinstance(part, str) and row == part
    if row.ndim != part.ndim or any(
        long < short for long, short in zip(row.shape, part.shape, strict=True)
    ):
        return False
    # A collate function may pad on the right or, as for generation with language models, on the left.
    first = row[tuple(slice(0, size) for size in part.shape)]
    last = row[
        tuple(slice(long - size, long) for long, size in zip(row.shape, part.shape, strict=True))
    ]
    return (
        _to_bytes(first) == (key := _to_bytes(part.astype(row.dtype, copy=False)))
        or _to_bytes(last) == key
    )


def _to_bytes(array: Any) -> bytes:
    # Bytes, because NaN then equals itself, and because a Counter needs hashable keys.
    # Indexing an array without dimensions gives a number, so it is converted to an array first.
    return np.asarray(array).tobytes()


def _explain_move(column: Any, rows: list[Any], parts: list[list[Any]]) -> str | None:
    """Returns the reason why a column of a batch is not in the order of the samples; None if there is no sign of that."""
    n = len(rows)
    if isinstance(column, Tensor) and column.dim() > 1 and column.shape[1] == n:
        # Time first, with as many steps as samples: either dimension may be that of the samples.
        second_dimension = [as_array(column[:, i]) for i in range(n)]
        if any(all(map(_contains_part, second_dimension, part)) for part in parts):
            return (
                f"puts the samples in the second dimension of a tensor of shape {tuple(column.shape)}, whose first dimension "
                "has the same size: put the samples first, or use another batch_size"
            )
    return MOVED if any(_is_moved(rows, part) for part in parts) else None


def _is_moved(rows: list[Any], part: list[Any]) -> bool:
    """Whether the rows of a batch have the values of the samples in another order.

    If two samples have equal values, as labels often do, the order cannot be read from them, and the result is False. A padded
    row is matched with the longest value of a sample that it begins with.
    """
    if not all(isinstance(value, np.ndarray) for value in (*rows, *part)):
        texts = all(isinstance(value, str) for value in (*rows, *part))
        return texts and len(set(part)) == len(part) and Counter(rows) == Counter(part)
    dtype = rows[0].dtype
    # Compared in the dtype of the batch, because a collate function may cast.
    wanted = Counter((value.shape, _to_bytes(value.astype(dtype, copy=False))) for value in part)
    if max(wanted.values()) > 1:
        return False
    # The longest first: a padded row may also begin with the value of a shorter sample.
    shapes = sorted({shape for shape, _ in wanted}, key=lambda shape: -int(np.prod(shape)))
    left = Counter(wanted)
    for row in rows:
        for shape in shapes:
            if row.ndim != len(shape) or any(
                long < short for long, short in zip(row.shape, shape, strict=True)
            ):
                continue
            unpadded = row[tuple(slice(0, size) for size in shape)]
            key = shape, _to_bytes(unpadded)
            if left[key] > 0:
                left[key] -= 1
                break
        else:
            return False
    return True


def _parts_of_samples(samples: Any, n: int) -> list[list[Any]]:
    """Returns the parts of the samples, such as [inputs, labels]: for each part a list of n arrays or other values."""
    if not isinstance(samples, list):
        return [[as_array(column[i]) for i in range(n)] for column in take_apart(samples, n)[0]]
    each = [list(_parts_of_sample(sample)) for sample in samples]
    return [list(part) for part in zip(*each, strict=False)]


def _parts_of_sample(sample: Any) -> Iterator[Any]:
    value = as_array(sample)
    if isinstance(value, np.ndarray | str):
        yield value
    elif isinstance(sample, Mapping | tuple | list):
        for part in sample.values() if isinstance(sample, Mapping) else sample:
            yield from _parts_of_sample(part)


def copy_samples(samples: Any) -> Any:
    """Copies the tensors, arrays and containers of samples, because a collate function may change them in place."""

    def copy_of(part: Any) -> Any:
        return part.clone() if isinstance(part, Tensor) else part.copy()

    return map_where(copy_of, samples, lambda part: isinstance(part, Tensor | np.ndarray))
