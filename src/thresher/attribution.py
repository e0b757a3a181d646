"""Which samples a loss belongs to: certain, or an error.

Two witnesses are asked. Targets: a tensor that shares storage with a batch that the loader yielded names its rows by
its element range. Outputs: what `run.model` returned for named inputs names the same rows. Storages are told apart by
the identity of their StorageImpl, which a weak reference keeps from being reused, never by an address. A tensor that
was changed in place is no witness.

Outside the promise: inputs permuted or mixed into new storage before `run.model` sees them while the original targets
are passed. Nothing tells that apart from a normalisation.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from thresher.trees import leaves

WAYS_OUT = (
    "Ways out: pass the very tensors that the loader yielded (slices and views are fine), or say which samples the rows "
    "are with `ids=run.ids` (indexed as you indexed the batch); for data that is not of this run, such as validation, "
    "call it under torch.no_grad() or use your own criterion."
)


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
    whole: "Credit | None" = None
    credited: bool = False

    def forget(self) -> None:
        """Let go of the tensors."""
        self.tensors, self.marked = (), ()


class Group(NamedTuple):
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


class Credit(NamedTuple):
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
    group: Group
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
        layout = _layout(tensor)
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


@dataclass(frozen=True, slots=True)
class Sight:
    """What one tensor tells: its rows, or why it tells nothing; `refuse` where it speaks against crediting at all."""

    rows: Rows | None
    seen: str
    refuse: bool = False
    changed: Rows | None = None
    """The rows it showed before it was changed in place."""


UNSEEN = Sight(None, "a tensor that this run did not yield")


def _layout(tensor: Tensor) -> tuple[int, int, int, int] | None:
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


class Witnesses:
    """The tensors of one run whose rows are known, found again by storage."""

    def __init__(self) -> None:
        self._by_storage: dict[int, list[Witness]] = {}
        self._limit = 64
        self._returned: tuple[weakref.ref[Tensor], int, Batch] | None = None

    def remember_batch(self, batch: Batch, tensors: Iterable[Tensor]) -> None:
        """Take the tensors of a yielded batch whose first dimension is the samples'."""
        n = len(batch.ids)
        rows = Rows(batch, 0, 1, n, 1)
        batch.tensors = tuple(tensor for tensor in tensors if tensor.dim() and tensor.shape[0] == n)
        batch.marked = tuple((tensor, tensor._version) for tensor in reversed(batch.tensors) if not tensor.is_inference())
        batch.whole = Credit(batch.ids, rows.key, batch, Group(n), rows.positions())
        for tensor in batch.tensors:
            self._remember(tensor, rows, None)
        self._forget_the_dead()

    def remember_outputs(self, outputs: Any, inputs: Sight) -> None:
        """Take what the model returned for inputs that were seen as `inputs`."""
        if inputs.rows is None:
            return
        batch, start, step, count, repeat = inputs.rows
        whole = isinstance(outputs, Tensor) and not inputs.refuse and batch.unknown is None
        if whole and repeat == 1 and count == len(batch.ids) == len(outputs) and step == 1:
            self._returned = weakref.ref(outputs), outputs._version, batch
        for tensor in leaves(outputs):
            if tensor.dim() and tensor.shape[0] == count * repeat:
                self._remember(tensor, Rows(batch, start, step, count, repeat), inputs.seen if inputs.refuse else None)

    def untouched(self, outputs: Any, targets: Any) -> Credit | None:
        """The common case, told at a glance: what the model returned for a whole batch, and a tensor of that batch.

        Returns:
            None where a closer look is needed.
        """
        if self._returned is None:
            return None
        returned, version, batch = self._returned
        if returned() is not outputs or outputs._version != version:
            return None
        for tensor, then in batch.marked:
            if tensor is targets:
                return batch.whole if tensor._version == then else None
        return None

    def _remember(self, tensor: Tensor, rows: Rows, changed: str | None) -> None:
        witness = Witness.of(tensor, rows, changed)
        if witness is None:
            return
        known = self._by_storage.setdefault(witness.storage.cdata, [])
        known[:] = [w for w in known if w.place != witness.place]
        known.append(witness)

    def _forget_the_dead(self) -> None:
        if len(self._by_storage) > self._limit:
            alive = {key: known for key, known in self._by_storage.items() if not known[0].storage.expired()}
            self._by_storage = alive
            self._limit = max(64, 2 * len(alive))

    def look(self, tensor: Tensor) -> Sight:
        """What `tensor` tells about its rows."""
        if tensor.layout is not torch.strided or tensor.is_inference():
            return UNSEEN
        known = self._by_storage.get(tensor.untyped_storage()._cdata)
        layout = _layout(tensor)
        if known is None or layout is None:
            return UNSEEN
        found, changed = None, None
        for witness in reversed(known):
            rows = witness.locate(*layout)
            if rows is None:
                continue
            if witness.version != tensor._version:
                changed = rows
            elif found is None:
                found = Sight(rows, witness.changed or "", refuse=witness.changed is not None)
            elif found.rows is not None and rows.key != found.rows.key and not rows.batch.credited:
                return Sight(None, "a tensor that two yielded batches share")
        if found is not None:
            return found
        if changed is not None:
            return Sight(None, "a tensor of the batch that was changed in place since the loader yielded it", changed=changed)
        return Sight(None, "a view of a batch that does not show whole rows")

    def look_inputs(self, tree: Any) -> Sight:
        """What the inputs of a model tell together; `remember_outputs` takes the answer."""
        sights = [self.look(leaf) for leaf in leaves(tree)]
        changed = next((sight.changed for sight in sights if sight.changed is not None), None)
        if changed is not None:
            return Sight(changed, "outputs of the model for inputs that were changed in place", refuse=True)
        named = [sight for sight in sights if sight.rows is not None]
        if len({sight.rows.key for sight in named if sight.rows is not None}) > 1:
            return Sight(named[0].rows, "outputs of the model for inputs from different rows", refuse=True)
        return next((sight for sight in named if sight.refuse), named[0] if named else UNSEEN)

    def reordered_by(self, outputs: Tensor) -> str | None:
        """Name of an operation between what the model returned and `outputs` that can move rows, if there is one."""
        sequences = {w.sequence for known in self._by_storage.values() for w in known if w.sequence is not None}
        if outputs.grad_fn is None or not sequences:
            return None
        oldest = min(sequences)
        todo: list[tuple[Any, str | None]] = [(outputs.grad_fn, None)]
        for _ in range(MOST_OPERATIONS):
            if not todo:
                break
            node, moved = todo.pop()
            if node._sequence_nr() in sequences:
                if moved is not None:
                    return moved
                continue
            moved = moved or (node.name() if _moves_rows(node) else None)
            parents = (parent for parent, _ in node.next_functions if parent is not None)
            todo += [(parent, moved) for parent in parents if parent._sequence_nr() >= oldest]
        return None


MOST_OPERATIONS = 256


def _moves_rows(node: Any) -> bool:
    """Whether an autograd node can take rows out of their order."""
    kind = node.name().split("Backward")[0]
    if kind in {"IndexSelect", "Gather", "Sort", "Flip", "Roll"}:
        dims = node._saved_dims if kind in {"Flip", "Roll"} else (node._saved_dim,)
        wrap = 2**64 - len(node._input_metadata[0].shape)  # a negative dim is saved as an unsigned number
        return not dims or any(dim in {0, wrap} for dim in dims)
    if kind == "Index":
        first = node._saved_indices[0] if node._saved_indices else None
        in_order = first is None or (first.device.type == "cpu" and torch.equal(first, torch.arange(len(first))))
        return not in_order
    return kind in {"Take", "MaskedSelect"}


def certain_now(flag: Tensor) -> bool:
    """Whether a comparison can be read without waiting for a device."""
    return flag.device.type == "cpu"


class _Case:
    """One call of the criterion, heard out."""

    def __init__(self, witnesses: Witnesses, outputs: Any, targets: Any) -> None:
        self.outputs = [leaf for leaf in leaves(outputs) if leaf.dim()]
        self.targets = [leaf for leaf in leaves(targets) if leaf.dim()]
        self.output_sights = [witnesses.look(leaf) for leaf in self.outputs]
        self.target_sights = [witnesses.look(leaf) for leaf in self.targets]
        self.witnesses = witnesses

    def refuse(self, why: str) -> AttributionError:
        def tell(sights: list[Sight]) -> str:
            if not sights:
                return "no tensor"
            return "; ".join(
                f"rows {s.rows.start}:{s.rows.start + s.rows.step * s.rows.n}:{s.rows.step} of batch {s.rows.batch.number}"
                f"{f' ({s.seen})' if s.seen else ''}"
                if s.rows is not None
                else s.seen
                for s in sights
            )

        return AttributionError(
            f"{why}. Saw outputs: {tell(self.output_sights)}. Saw targets: {tell(self.target_sights)}. "
            f"Nothing was recorded or counted. {WAYS_OUT}"
        )

    def verdict(self) -> tuple[Rows | None, tuple[Tensor, ...]]:
        """Rows that the witnesses agree on, None where there is no witness, and device flags still open."""
        for sight in (*self.output_sights, *self.target_sights):
            if sight.refuse:
                raise self.refuse(f"Cannot tell which samples this loss belongs to: {sight.seen}")
        by_output = self._agreed(self.output_sights, "outputs")
        by_target = self._agreed(self.target_sights, "targets")
        if by_output is not None and by_target is not None and by_output.key != by_target.key:
            raise self.refuse("Outputs and targets belong to different rows")
        rows = by_target or by_output
        if rows is None:
            return None, ()
        targets = zip(self.targets, self.target_sights, strict=True)
        unknown = [leaf for leaf, sight in targets if sight.rows is None and len(leaf) >= rows.n]
        if rows.batch.unknown is not None:
            raise self.refuse(f"The rows of a batch are not its samples in order: {rows.batch.unknown}")
        unnamed = (leaf for leaf, sight in zip(self.outputs, self.output_sights, strict=True) if sight.rows is None)
        moved = next((m for leaf in unnamed if (m := self.witnesses.reordered_by(leaf))), None)
        if moved is not None:
            raise self.refuse(f"Outputs went through {moved}, which can move rows, after the model returned them")
        if by_output is None:
            if unknown:
                raise self.refuse("Some targets are of a known batch, others are not")
            return rows, ()
        flags = tuple(self._same_values(leaf, by_output) for leaf in unknown)
        open_flags = tuple(flag for flag in flags if not certain_now(flag))
        if not all(bool(flag) for flag in flags if certain_now(flag)):
            raise self.refuse(
                "Targets are new tensors whose values are not the yielded targets of the rows that the outputs name"
            )
        return rows, open_flags

    def _agreed(self, sights: list[Sight], name: str) -> Rows | None:
        named = [sight.rows for sight in sights if sight.rows is not None]
        if len({rows.key for rows in named}) > 1:
            raise self.refuse(f"The {name} belong to different rows")
        return named[0] if named else None

    def _same_values(self, target: Tensor, rows: Rows) -> Tensor:
        """Whether `target` holds the values of some unchanged tensor of the batch, cast, moved or reshaped at most."""
        flat = target.detach().reshape(rows.n, -1) if target.shape[0] % rows.n == 0 else None
        same = torch.zeros((), dtype=torch.bool, device=target.device)
        if flat is None:
            return same
        for tensor in rows.batch.tensors:
            sight = self.witnesses.look(tensor)
            if sight.rows is None or tensor.numel() // len(tensor) != flat.shape[1]:
                continue
            stop = rows.start + rows.step * rows.n
            yielded = tensor.detach()[rows.start : stop : rows.step].reshape(rows.n, -1)
            same = same | (yielded.to(target.device) == flat).all()
        return same


def attribute(witnesses: Witnesses, outputs: Any, targets: Any, ids: Tensor | None, *, n: int, recent: list[Batch]) -> Credit:
    """Find the samples that outputs and targets belong to.

    Args:
        witnesses: What the run knows.
        outputs: What the criterion was called with, any nesting.
        targets: Likewise; None where there are none.
        ids: What the caller says the rows are, shape (rows,), int64; None to let the witnesses speak.
        n: Number of samples of the dataset.
        recent: The batches last yielded, the latest at the end; whose ids the caller may have.

    Raises:
        AttributionError: No witness, a witness that contradicts, or values that differ.
        TypeError: `ids` is not an int64 tensor.
        ValueError: `ids` out of range or not one-dimensional.
    """
    glance = witnesses.untouched(outputs, targets) if ids is None else None
    if glance is not None:
        return glance
    case = _Case(witnesses, outputs, targets)
    if ids is not None:
        return _stated(case, ids, n, recent)
    rows, flags = case.verdict()
    if rows is None:
        raise case.refuse("Cannot tell which samples this loss belongs to")
    return Credit(rows.ids, rows.key, rows.batch, Group(rows.n, rows.repeat), rows.positions(), flags)


def _stated(case: _Case, ids: Tensor, n: int, recent: list[Batch]) -> Credit:
    """The caller's word, held against the witnesses where there are any."""
    if not isinstance(ids, Tensor) or ids.dtype != torch.int64:
        got = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"`ids` must be an int64 tensor of sample positions, got {got}")
    if ids.dim() != 1 or not ids.numel():
        raise ValueError(f"`ids` must have shape (rows,) with at least one row, got {tuple(ids.shape)}")
    if ids.device.type == "cpu" and (int(ids.min()) < 0 or int(ids.max()) >= n):
        raise ValueError(
            f"`ids` must be positions in the loader's dataset, within [0, {n}), got {int(ids.min())} to {int(ids.max())}"
        )
    own = _own_rows(ids, recent)
    flags: tuple[Tensor, ...] = ()
    named = [s.rows for s in (*case.output_sights, *case.target_sights) if s.rows is not None and not s.refuse]
    for rows in named:
        if rows.batch.unknown is not None or (own is not None and own.key == rows.key):
            continue
        if rows.n != len(ids):
            raise case.refuse(f"`ids` names {len(ids)} rows, a witness {rows.n}")
        same = (rows.ids == ids.to(rows.ids.device)).all()
        if not certain_now(same):
            flags += (same,)
        elif not bool(same):
            raise case.refuse("`ids` contradicts the rows that outputs or targets name")
    group = Group(len(ids), next((rows.repeat for rows in named), None))
    if own is not None:
        return Credit(own.ids, own.key, own.batch, group, own.positions(), flags)
    latest = recent[-1] if recent else None
    device = ids.device if latest is None else latest.ids.device
    return Credit(ids.to(device), None, latest, group, None, flags)


def _own_rows(ids: Tensor, recent: list[Batch]) -> Rows | None:
    """The rows that a view of a batch's own ids shows."""
    for batch in reversed(recent):
        layout = _layout(ids)
        if layout is not None and ids.untyped_storage()._cdata == batch.ids.untyped_storage()._cdata:
            witness = Witness.of(batch.ids, Rows(batch, 0, 1, len(batch.ids), 1))
            return None if witness is None else witness.locate(*layout)
    return None
