"""Gathers the chosen rows of several batches until a batch is full."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from thresher.distributed.world import ALONE, World
from thresher.plans import BatchPlan
from thresher.trees import differing_part, leaves, map_where


def rows_of(batch: Any) -> int:
    """Returns the number of samples in a batch: the first dimension of its first tensor, else the length of its first list.

    Raises:
        ValueError: The batch has neither.
    """
    for leaf in leaves(batch):
        if leaf.dim():
            return len(leaf)
    if isinstance(batch, list | tuple) and batch and isinstance(batch[0], list):
        return len(batch[0])
    raise ValueError(
        f"a batch of {type(batch).__name__} has no tensor with a sample dimension: its rows cannot be chosen"
    )


def is_per_sample(tree: Any, n: int) -> bool:
    """Whether a part of a batch has one entry for each of its n samples: a tensor, an array, or a list, for example of texts.

    A list of n entries has one entry per sample, unless its tensors have n rows each: with n = 2, `[x, y]` may be a pair of
    inputs and labels.
    """
    if isinstance(tree, Tensor | np.ndarray):
        return tree.ndim > 0 and len(tree) == n
    # Exactly these types: a named tuple is a batch of fields, however many there are.
    if type(tree) not in (list, tuple) or len(tree) != n:
        return False
    has_n_rows = [leaf.dim() > 0 and len(leaf) == n for leaf in leaves(tree)]
    if not any(has_n_rows):
        return True
    # If all tensors have n rows, the entries are fields, such as the pair [x, y] of two samples. If only some have, the entries
    # can still be samples of different lengths, one of which happens to be n. Then they are of one kind; fields mostly are not.
    kinds = {(item.dtype, item.dim()) if isinstance(item, Tensor) else type(item) for item in tree}
    return len(kinds) == 1 and not all(has_n_rows)


HOLE = object()
"""Placeholder in a batch for a part with one entry per sample that was taken out."""


def select(batch: Any, rows: Tensor, n: int) -> Any:
    """Returns a batch with only some of its rows. Parts without one entry for each of the n samples are passed through."""
    columns, _, rebuild = take_apart(batch, n)
    return rebuild(take_rows(columns, rows))


def take_apart(batch: Any, n: int) -> tuple[list[Any], Any, Callable[[list[Any]], Any]]:
    """Separates the parts of a batch that have one entry per sample, the columns, from the rest.

    Returns:
        The columns; the batch with `HOLE` in their places; and a function that puts other columns in these places.
    """
    columns: list[Any] = []

    def take_out(column: Any) -> Any:
        columns.append(column)
        return HOLE

    rest = map_where(take_out, batch, lambda part: is_per_sample(part, n))

    # `map_where` visits the parts in the order in which `take_out` was called.
    def rebuild(new_columns: list[Any]) -> Any:
        remaining = iter(new_columns)
        return map_where(lambda _: next(remaining), rest, lambda part: part is HOLE)

    return columns, rest, rebuild


def take_rows(columns: list[Any], rows: Tensor) -> list[Any]:
    """Returns the same rows of several columns."""
    numbers: list[int] | None = None
    taken = []
    for column in columns:
        if isinstance(column, Tensor):
            taken.append(column.index_select(0, rows.to(column.device, non_blocking=True)))
            continue
        # Only lists and arrays need the row numbers on the host. If all columns are tensors, nothing waits for the device.
        numbers = rows.tolist() if numbers is None else numbers
        taken.append(
            column[numbers]
            if isinstance(column, np.ndarray)
            else type(column)(column[i] for i in numbers)
        )
    return taken


def join_columns(parts: Sequence[Any]) -> Any:
    """Concatenates tensors, arrays or lists along the first dimension.

    Raises:
        ValueError: The tensors have different shapes.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if not isinstance(first, Tensor | np.ndarray):
        return type(first)(item for part in parts for item in part)
    if len({part.shape[1:] for part in parts}) > 1:
        raise ValueError(
            f"Selected rows of several batches cannot be joined: shapes {[tuple(part.shape) for part in parts]}. Pad all "
            "batches to one shape, or use spend='batches' or, except in SFTTrainer, forward_passes='once'."
        )
    if isinstance(first, Tensor):
        return torch.cat(list(parts))
    return np.concatenate(parts)


class Part(NamedTuple):
    """Chosen rows of one candidate batch.

    Attributes:
        columns: Parts of the batch with one entry per row, for the chosen rows.
        rebuild: Function that makes a batch from such columns.
        ids: Ids of all samples of the candidate batch, on the host.
        rows: Numbers of the chosen rows in the candidate batch, shape (n,), int64, on the device; None means all rows.
        weights: Weights of the rows, shape (n,); None if all are 1.
    """

    columns: list[Any]
    rebuild: Callable[[list[Any]], Any]
    ids: Tensor
    rows: Tensor | None
    weights: Tensor | None

    @property
    def n(self) -> int:
        """Number of rows."""
        return len(self.ids if self.rows is None else self.rows)

    def between(self, start: int, stop: int) -> "Part":
        """Returns the rows from `start` to `stop`."""
        # Copies, because a view has another memory alignment, with which kernels add in another order.
        columns = [
            x[start:stop].clone() if isinstance(x, Tensor) else x[start:stop] for x in self.columns
        ]
        ids, rows = (
            (self.ids[start:stop], None) if self.rows is None else (self.ids, self.rows[start:stop])
        )
        return Part(
            columns,
            self.rebuild,
            ids,
            rows,
            None if self.weights is None else self.weights[start:stop],
        )


def ids_and_weights(parts: Sequence[Part]) -> tuple[Tensor, Tensor | None]:
    """Returns the ids of all rows, shape (n,), int64, and their weights, on the host; None if all weights are 1.

    The row numbers and weights of all parts are copied to the host together, because each copy waits for the device.
    """
    # In float64, which represents row numbers up to 2**53 and float32 weights exactly, so that one tensor can hold both.
    on_device = [
        values.double()
        for part in parts
        for values in (part.rows, part.weights)
        if values is not None
    ]
    if not on_device:
        return torch.cat([torch.empty(0, dtype=torch.int64), *(part.ids for part in parts)]), None
    joint = torch.cat(
        [values.to(on_device[0].device, non_blocking=True) for values in on_device]
    ).cpu()
    # Taken below in the order in which they were listed: of each part the row numbers, then the weights.
    on_host = iter(joint.split([len(values) for values in on_device]))
    ids = list[Tensor]()
    weights = list[Tensor]()
    for part in parts:
        ids.append(part.ids if part.rows is None else part.ids[next(on_host).long()])
        weights.append(
            torch.ones(part.n, dtype=torch.float32)
            if part.weights is None
            else next(on_host).float()
        )
    return torch.cat(ids), torch.cat(weights) if any(
        part.weights is not None for part in parts
    ) else None


class RowBuffer:
    """Stores the chosen rows of candidate batches until there are enough for a full batch.

    Several processes may choose different numbers of rows. All of them add the same number of candidate batches and take
    batches of the same size: a process that has a full batch waits until every other process has one.

    Args:
        size: Number of rows of a full batch; None if the chosen rows of each candidate batch make a batch of their own.
        world: The processes, if they may choose different numbers of rows. Default: only this process, also right if all
            processes choose the same number.
    """

    def __init__(self, size: int | None, world: World = ALONE) -> None:
        self.size = size
        self._world = world
        self._parts: list[Part] = []
        self._column_types: list[type] | None = None
        self._first_rest: Any = None
        self._varying_part: str | None = None
        self.rows = 0
        """Number of rows that every process has. If this process has more, the others wait for a later batch."""

    @property
    def full(self) -> bool:
        """Whether every process has enough rows for a batch."""
        return self.rows >= (self.size or 1)

    @property
    def waiting(self) -> tuple[Tensor, Tensor | None]:
        """Ids of the rows in the buffer, shape (k,), int64, and their weights, shape (k,); None if all weights are 1."""
        return ids_and_weights(self._parts)

    def add(self, batch: Any, ids: Tensor, plan: BatchPlan) -> None:
        """Adds the chosen rows of a candidate batch. All processes must call it together, even if they chose no rows.

        Args:
            batch: Candidate batch, on the device.
            ids: Ids of its rows, shape (n,), int64, on the host.
            plan: Rows that the method chose.
        """
        if len(plan.rows):
            chosen = self._part(batch, ids, plan.weights)
            # If all rows are chosen, the tensors need no copy.
            entire = len(plan.rows) == len(ids) and not plan.drawn
            if not entire:
                chosen = chosen._replace(
                    columns=take_rows(chosen.columns, plan.rows), rows=plan.rows
                )
            self._put(chosen, entire=entire)
        self.count()

    def put(self, batch: Any, ids: Tensor, weights: Tensor | None) -> None:
        """Adds all rows of a batch without counting them, so one process may call it alone."""
        self._put(self._part(batch, ids, weights), entire=True)

    def count(self) -> None:
        """Updates `rows`, the number of rows that every process has. All processes must call it together."""
        rows = sum(part.n for part in self._parts)
        # All ranks decide by this number alone, so no rank asks for a batch that another rank cannot make.
        self.rows = int(self._world.gather(np.array([rows])).min())

    def _part(self, batch: Any, ids: Tensor, weights: Tensor | None) -> Part:
        columns, rest, rebuild = take_apart(batch, len(ids))
        kinds = [type(column) for column in columns]
        if not kinds or kinds != (self._column_types or kinds):
            now, before = (
                ", ".join(kind.__name__ for kind in some) or "none"
                for some in (kinds, self._column_types or ())
            )
            raise ValueError(
                f"a batch of {len(ids)} samples has these parts with one entry for each sample: {now}"
                + (f"; others before it had {before}" if kinds else "")
                + ". Rows cannot be chosen from it: collate to tensors, arrays or lists with one entry per sample."
            )
        # A part without one entry per sample, such as a graph or a padding length, can be passed on only if it is the same in
        # all batches.
        if not self._column_types:
            self._column_types = kinds
            self._first_rest = rest
        elif self._varying_part is None and (varies := differing_part(self._first_rest, rest)):
            self._first_rest = None
            self._varying_part = varies
        return Part(columns, rebuild, ids, None, weights)

    def _put(self, part: Part, *, entire: bool) -> None:
        if self._varying_part is not None and (self._parts or not entire):
            raise ValueError(
                f"The part {self._varying_part} of a batch does not have one entry for each sample in its first dimension, and it is "
                "not the same in every batch: its samples cannot be chosen, nor joined with those of other batches. Collate "
                "with the samples in the first dimension (batch_first=True; padded tensors instead of packed sequences), or, "
                "with a method that chooses by losses, use forward_passes='once'."
            )
        self._parts.append(part)

    def take(self) -> tuple[Any, Tensor, Tensor | None]:
        """Removes the oldest rows from the buffer, the same number in each process. Returns their batch, ids and weights."""
        size = self.rows if self.size is None else min(self.size, self.rows)
        parts: list[Part] = []
        wanted = size
        while wanted:
            part = self._parts.pop(0)
            n = part.n
            # Rows that do not fit stay in the buffer, in their order.
            if n > wanted:
                self._parts.insert(0, part.between(wanted, n))
                part = part.between(0, wanted)
            wanted -= part.n
            parts.append(part)
        self.rows -= size
        columns = [
            join_columns(column) for column in zip(*(part.columns for part in parts), strict=True)
        ]
        # `_put` refuses to join batches whose other parts differ, so the other parts of any batch are right for all rows.
        return parts[-1].rebuild(columns), *ids_and_weights(parts)

    def clear(self) -> None:
        """Removes all rows."""
        self._parts = []
        self.rows = 0
