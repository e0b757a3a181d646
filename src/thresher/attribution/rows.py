"""Rows of tensors as samples: what a batch holds, which rows a tensor shows, and which samples a loss belongs to.

The rows of a tensor are known by its memory: its storage, and its element range within that storage. A storage is identified by
its StorageImpl, which a weak reference keeps from being reused. A memory address may be reused at once: it identifies nothing.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

# 8,192 labels of int64. LABELS_AHEAD in attributor.py holds 16 such batches, so at most 1 MiB for each tensor of labels.
LABEL_BYTES = 2**16
"""Largest size, in bytes, of the labels of a batch that are held for a loop that is far behind its loader."""


class AttributionError(RuntimeError):
    """Raised if the run cannot tell which samples a loss belongs to; nothing was recorded.

    Example:
        >>> import torch, thresher
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> loader = DataLoader(TensorDataset(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1])), batch_size=4)
        >>> model = torch.nn.Linear(2, 2)
        >>> run = thresher.attach(
        ...     thresher.FullData(), loader=loader, criterion=torch.nn.CrossEntropyLoss(), model=model, epochs=1
        ... )
        >>> inputs, targets = next(iter(run.loader))
        >>> order = torch.tensor([3, 2, 1, 0])
        >>> try:
        ...     loss = run.criterion(run.model(inputs[order]), targets[order])
        ... except thresher.AttributionError as error:
        ...     print(str(error).split(".")[0])
        Cannot tell which samples this loss belongs to
        >>> loss = run.criterion(run.model(inputs[order]), targets[order], ids=run.ids[order])
    """


# Compared and hashed by identity: batches are members of sets, and == of tensors has no truth value.
@dataclass(eq=False, slots=True)
class YieldedBatch:
    """A yielded batch: its ids and, until it has a loss, its tensors.

    Attributes:
        ids: Sample ids of the rows, shape (B,), int64.
        number: Number of the batch, counted from the start of the run.
        unknown: Reason why the rows of the batch are not its samples in order; None if they are.
        all_count: Whether it is certain that the criterion ignores no label of the batch.
        weights: Plan weights of the rows, shape (B,), float32; None if all are 1.
        weights_over_n: `weights / B`, computed once.
        tensors: Tensors of the batch whose first dimension is that of the samples.
        marked: The tensors with their versions when they were yielded, in reverse order, because targets come last.
        credited: Whether a loss was assigned to samples of this batch.
        credited_rows: Number of rows that a loss was assigned to, summed over all steps.
        returned_ids: Copy of `ids` that `run.ids_of` returned for this batch; None if the loop did not call it.
        chosen_by_caller: Whether the loop called `run.ids_of` for this batch since its last loss.
    """

    ids: Tensor
    number: int
    unknown: str | None = None
    all_count: bool = False
    weights: Tensor | None = None
    weights_over_n: Tensor | None = None
    tensors: tuple[Tensor, ...] = ()
    marked: tuple[tuple[Tensor, int], ...] = ()
    credited: bool = False
    credited_rows: int = 0
    returned_ids: Tensor | None = None
    chosen_by_caller: bool = False

    def forget(self) -> None:
        """Releases the tensors."""
        self.tensors = ()
        self.marked = ()

    def forget_all_but_labels(self) -> None:
        """Releases all tensors but small ones that can be labels."""
        # Labels that the loop casts later are new tensors, which must still be compared with those that were yielded.
        self.tensors = tuple(tensor for tensor in self.tensors if _can_be_labels(tensor))
        self.marked = tuple(
            (tensor, version) for tensor, version in self.marked if _can_be_labels(tensor)
        )


def _can_be_labels(tensor: Tensor) -> bool:
    return (
        tensor.dim() == 1 or not tensor.is_floating_point()
    ) and tensor.numel() * tensor.element_size() <= LABEL_BYTES


class RowLayout(NamedTuple):
    """How the rows of a tensor are laid out as samples.

    Attributes:
        n: Number of samples.
        repeat: Number of consecutive rows per sample, as in flattened tokens; None if unknown.
    """

    n: int
    repeat: int | None = 1

    def rows(self, positions: Tensor) -> Tensor:
        """Reshapes losses to one row per sample.

        Args:
            positions: Losses by position, shape (n, ...) or (n * repeat, ...).

        Returns:
            The same losses, shape (n, positions per sample).

        Raises:
            AttributionError: There are several losses per sample, and nothing tells which losses belong to which sample.
            ValueError: The first dimension is not that of the samples.
        """
        leading = positions.shape[0] if positions.dim() else 0
        if self.repeat:
            known = leading in (self.n, self.n * self.repeat)
        else:
            known = leading and leading % self.n == 0
        if not known:
            if leading and leading % self.n == 0:
                raise AttributionError(
                    f"Losses of shape {tuple(positions.shape)} for {self.n} samples: cannot tell which losses belong to which "
                    "sample. Pass ids= with one id per row to run.criterion or run.reduce; or, if each sample has consecutive "
                    f"rows, ids= with one id per sample, and repeat={leading // self.n}. A function given as attach(forward=) "
                    "must return outputs with the samples in dimension 0. Nothing was recorded."
                )
            raise ValueError(
                f"Losses of shape {tuple(positions.shape)} for {self.n} samples: the first dimension must be the samples'. "
                "Return losses before they are averaged, or use run.reduce(losses, ids=...)."
            )
        return positions.reshape(self.n, -1)


class Attribution(NamedTuple):
    """The samples that a loss belongs to.

    Attributes:
        ids: Sample ids, shape (n,), int64, on the device of the records.
        key: Identity of the rows, equal for equal rows of one batch; None for ids that are a tensor of the caller.
        batch: Batch of the rows; for ids that are a tensor of the caller, the batch that is taken to contain them.
        layout: Layout of the rows as samples.
        positions: Row numbers within the batch; None if unknown.
        holds: Results of comparisons on a device, shape (), bool. They are read at the end of the epoch; all must be true.
        all_count: Whether these are all rows of a batch, and it is certain that the criterion ignores no label of it.
    """

    ids: Tensor
    key: tuple[int, int, int, int] | None
    batch: YieldedBatch | None
    layout: RowLayout
    positions: range | None = None
    holds: tuple[Tensor, ...] = ()
    all_count: bool = False


class Rows(NamedTuple):
    """The rows `start`, `start + step`, ... of a batch, `n` in all, of which a tensor was found to be a part.

    In this tensor, each row has `repeat` consecutive entries.
    """

    batch: YieldedBatch
    start: int
    step: int
    n: int
    repeat: int

    @property
    def key(self) -> tuple[int, int, int, int]:
        """Identity of the rows: equal for the same rows of the same batch, whatever the layout of the tensor."""
        return self.batch.number, self.start, self.step, self.n

    @property
    def ids(self) -> Tensor:
        """Sample ids of the rows, shape (n,), int64."""
        return self.batch.ids[self.start : self.start + self.step * self.n : self.step]

    def hand_out_ids(self) -> Tensor:
        """Returns the ids of the rows for `run.ids_of`, shape (n,), int64, and marks this batch as the one the caller chose."""
        # A copy, because ids are recognized by memory: `run.ids` is of the batch yielded last, these are of any batch.
        batch = self.batch
        batch.chosen_by_caller = True
        if batch.returned_ids is None:
            batch.returned_ids = batch.ids.clone()
        return batch.returned_ids[self.start : self.start + self.step * self.n : self.step]

    def positions(self) -> range:
        """Returns the row numbers within the batch."""
        return range(self.start, self.start + self.step * self.n, self.step)


class TrackedTensor(NamedTuple):
    """A tensor with known rows, and the place of each row in its storage.

    Attributes:
        storage: Weak reference to the storage.
        version: Version of the tensor when it was recorded; a change in place increases it.
        offset: Start of the first row, in bytes.
        stride: Distance from one row to the next, in bytes.
        span: Length of one row, in bytes.
        rows: The rows that the tensor shows.
        changed: Description of inputs that were changed or mixed, so the tensor does not show the samples; None for others.
        place: Sequence number of its autograd node, and its number among the results of the node; None without a node.
    """

    storage: StorageWeakRef
    version: int
    offset: int
    stride: int
    span: int
    rows: Rows
    changed: str | None
    place: tuple[int, int] | None

    @classmethod
    def of(cls, tensor: Tensor, rows: Rows, changed: str | None = None) -> "TrackedTensor | None":
        """Returns the record of a tensor with known rows; None if its rows interleave in memory."""
        # A sparse tensor has no element range, and an inference tensor no version that would show a change in place.
        if tensor.layout is not torch.strided or tensor.is_inference():
            return None
        layout = memory_layout(tensor)
        if layout is None:
            return None
        offset, _, stride, span = layout
        # From the entries of the first dimension to rows of samples, each of which is `repeat` entries long. The stride of a
        # dimension with one entry is arbitrary in torch, so a single row has its own length as its stride.
        span += (rows.repeat - 1) * stride
        stride = stride * rows.repeat if rows.n > 1 else span
        # The rows of a transposed tensor interleave: a range of memory does not name one of them.
        if span > stride:
            return None
        node = tensor.grad_fn
        place = None if node is None else (node._sequence_nr(), tensor.output_nr)
        storage = StorageWeakRef(tensor.untyped_storage())
        return cls(storage, tensor._version, offset, stride, span, rows, changed, place)

    @property
    def lies(self) -> tuple[int, int, int]:
        """Position of the rows within the storage."""
        return self.offset, self.stride, self.rows.n

    def locate(self, offset: int, size: int, stride: int, span: int) -> Rows | None:
        """Finds the rows that a view of the same storage shows.

        Args:
            offset: Start of the view, in bytes.
            size: Size of the first dimension of the view.
            stride: Stride of the first dimension, in bytes.
            span: Length of one entry of the first dimension, in bytes.

        Returns:
            The rows; None if the view is not made of whole rows, the same part of each row, or flattened whole rows.
        """
        first, inside = divmod(offset - self.offset, self.stride)
        batch, start, step, count, _ = self.rows
        if first < 0 or first >= count or size == 0:
            return None
        # Whole rows or the same columns of each, as in x[2:6:2] or labels[:, 1:].
        if size == 1 or (stride and stride % self.stride == 0):
            jump = 1 if size == 1 else stride // self.stride
            if inside + span <= self.span and first + jump * (size - 1) < count:
                return Rows(batch, start + step * first, step * jump, size, 1)
        # Flattened, as tokens are for a loss: several entries per row, from the beginning of a row to the end of one.
        if stride and self.stride % stride == 0:
            repeat = self.stride // stride
            whole = inside == 0 and size % repeat == 0 and (repeat - 1) * stride + span <= self.span
            if whole and first + size // repeat <= count:
                return Rows(batch, start + step * first, step, size // repeat, repeat)
        return None


def memory_layout(tensor: Tensor) -> tuple[int, int, int, int] | None:
    """Returns the place of the rows of a tensor in its storage.

    Args:
        tensor: A strided tensor.

    Returns:
        The offset in bytes, the size and the stride in bytes of the first dimension, and the number of bytes from the first
        to the last element of one row. None for a tensor without dimensions or with empty rows.
    """
    shape = tensor.shape
    if not shape:
        return None
    # In bytes, because a view can have another dtype than the tensor that it is taken of.
    item = tensor.element_size()
    strides = tensor.stride()
    span = 1
    for size, stride in zip(shape[1:], strides[1:], strict=True):
        if size == 0:
            return None
        span += (size - 1) * stride
    return (
        int(tensor.storage_offset()) * item,
        int(shape[0]),
        int(strides[0]) * item,
        int(span) * item,
    )
