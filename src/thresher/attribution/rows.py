"""Which samples a loss belongs to: certain, or an error.

Two witnesses are asked. Targets: a tensor that shares storage with a batch that the loader yielded names its rows by
its element range. Outputs: what `run.model` returned for named inputs names the same rows. Storages are told apart by
the identity of their StorageImpl, which a weak reference keeps from being reused, never by an address. A tensor that
was changed in place is no witness.

Outside the promise: inputs permuted or mixed into new storage before `run.model` sees them while the original targets
are passed. Nothing tells that apart from a normalisation.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class AttributionError(RuntimeError):
    """A loss could not be credited to samples with certainty; nothing was recorded or counted."""


@dataclass(eq=False, slots=True)
class Batch:
    """A batch that the loader yielded: its ids and, until its loss was credited, its tensors."""

    ids: Tensor
    number: int
    unknown: str | None = None
    """Why the rows of this batch are not the samples in order, where that is so."""
    all_count: bool = False
    """Whether it is known that no label of the batch is an ignored one."""
    weights: Tensor | None = None
    weights_over_n: Tensor | None = None
    tensors: tuple[Tensor, ...] = ()
    marked: tuple[tuple[Tensor, int], ...] = ()
    """The tensors with their versions when they were yielded, the last first: that is where targets are."""
    whole: "Attribution | None" = None
    credited: bool = False

    def forget(self) -> None:
        """Let go of the tensors."""
        self.tensors, self.marked = (), ()


class RowLayout(NamedTuple):
    """How rows of tensors are samples: `n` of them, each `repeat` consecutive rows; None where only `n` is known."""

    n: int
    repeat: int | None = 1

    def rows(self, positions: Tensor) -> Tensor:
        """Losses by position as (n, positions of a sample).

        Raises:
            ValueError: The first dimension is not the samples'.
        """
        leading = positions.shape[0] if positions.dim() else 0
        known = leading in (self.n, self.n * self.repeat) if self.repeat else leading and leading % self.n == 0
        if not known:
            raise ValueError(
                f"Losses of shape {tuple(positions.shape)} for {self.n} samples: the first dimension must be the samples'. "
                "Return losses before they are averaged, or use run.reduce(losses, ids=...)."
            )
        return positions.reshape(self.n, -1)


class Attribution(NamedTuple):
    """Whom a loss is credited to.

    Attributes:
        ids: Shape (n,), int64, on the device of the records.
        key: Equal for equal rows of one batch; None where the caller gave the ids.
        batch: The batch they belong to; the latest where the caller gave the ids.
        group: How rows of the tensors seen are samples.
        positions: Row numbers within the batch.
        holds: Device flags that must all be true, checked when the epoch ends; empty where everything is certain now.
    """

    ids: Tensor
    key: tuple[int, int, int, int] | None
    batch: Batch | None
    group: RowLayout
    positions: range | None = None
    holds: tuple[Tensor, ...] = ()

    @property
    def all_count(self) -> bool:
        """Whether these are all rows of a batch of which it is known that no label is an ignored one."""
        return self.batch is not None and self is self.batch.whole and self.batch.all_count


class Rows(NamedTuple):
    """Rows start, start + step, ... of a batch, each standing for `repeat` consecutive entries of the tensor seen."""

    batch: Batch
    start: int
    step: int
    n: int
    repeat: int

    @property
    def key(self) -> tuple[int, int, int, int]:
        """Equal for the same rows of the same batch, however the tensor was laid out."""
        return self.batch.number, self.start, self.step, self.n

    @property
    def ids(self) -> Tensor:
        """Ids of the rows, shape (n,)."""
        return self.batch.ids[self.start : self.start + self.step * self.n : self.step]

    def positions(self) -> range:
        """Row numbers within the batch."""
        return range(self.start, self.start + self.step * self.n, self.step)


class Witness(NamedTuple):
    """A tensor whose rows are known: where its samples lie in its storage, in bytes."""

    storage: StorageWeakRef
    version: int
    offset: int
    stride: int
    span: int
    rows: Rows
    changed: str | None
    sequence: int | None

    @classmethod
    def of(cls, tensor: Tensor, rows: Rows, changed: str | None = None) -> "Witness | None":
        """A tensor as witness of its rows; None where rows interleave in memory."""
        if tensor.layout is not torch.strided or tensor.is_inference():
            return None
        layout = memory_layout(tensor)
        if layout is None:
            return None
        offset, _, stride, span = layout
        span += (rows.repeat - 1) * stride
        stride = stride * rows.repeat if rows.n > 1 else span
        if span > stride:
            return None
        node = tensor.grad_fn
        sequence = None if node is None else node._sequence_nr()
        storage = StorageWeakRef(tensor.untyped_storage())
        return cls(storage, tensor._version, offset, stride, span, rows, changed, sequence)

    @property
    def place(self) -> tuple[int, int, int]:
        """Equal for tensors that lie alike in one storage."""
        return self.offset, self.stride, self.rows.n

    def locate(self, offset: int, size: int, stride: int, span: int) -> Rows | None:
        """Rows that a view with this layout (bytes; size and stride of its first dimension) shows, if whole rows it is."""
        first, inside = divmod(offset - self.offset, self.stride)
        batch, start, step, count, _ = self.rows
        if first < 0 or first >= count or size == 0:
            return None
        if size == 1 or (stride and stride % self.stride == 0):
            jump = 1 if size == 1 else stride // self.stride
            if inside + span <= self.span and first + jump * (size - 1) < count:
                return Rows(batch, start + step * first, step * jump, size, 1)
        if stride and self.stride % stride == 0:
            repeat = self.stride // stride
            whole = inside == 0 and size % repeat == 0 and (repeat - 1) * stride + span <= self.span
            if whole and first + size // repeat <= count:
                return Rows(batch, start + step * first, step, size // repeat, repeat)
        return None


def memory_layout(tensor: Tensor) -> tuple[int, int, int, int] | None:
    """Offset, size and stride of the first dimension, and bytes one row spans; None where rows interleave."""
    shape = tensor.shape
    if not shape:
        return None
    item = tensor.element_size()
    strides = tensor.stride()
    span = 1
    for size, stride in zip(shape[1:], strides[1:], strict=True):
        if size == 0:
            return None
        span += (size - 1) * stride
    return int(tensor.storage_offset()) * item, int(shape[0]), int(strides[0]) * item, int(span) * item
