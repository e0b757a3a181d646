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
from typing import Any

import torch
from torch import Tensor

from thresher.attribution.rows import Attribution, Batch, RowLayout, Rows, Witness, memory_layout
from thresher.loading.trees import leaves


@dataclass(frozen=True, slots=True)
class Lookup:
    """What one tensor tells: its rows, or why it tells nothing; `refuse` where it speaks against crediting at all."""

    rows: Rows | None
    seen: str
    refuse: bool = False
    changed: Rows | None = None
    """The rows it showed before it was changed in place."""


UNSEEN = Lookup(None, "a tensor that this run did not yield")


class RowTracker:
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
        batch.whole = Attribution(batch.ids, rows.key, batch, RowLayout(n), rows.positions())
        for tensor in batch.tensors:
            self._remember(tensor, rows, None)
        self._forget_the_dead()

    def remember_outputs(self, outputs: Any, inputs: Lookup) -> None:
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

    def untouched(self, outputs: Any, targets: Any) -> Attribution | None:
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

    def look(self, tensor: Tensor) -> Lookup:
        """What `tensor` tells about its rows."""
        if tensor.layout is not torch.strided or tensor.is_inference():
            return UNSEEN
        known = self._by_storage.get(tensor.untyped_storage()._cdata)
        layout = memory_layout(tensor)
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
                found = Lookup(rows, witness.changed or "", refuse=witness.changed is not None)
            elif found.rows is not None and rows.key != found.rows.key and not rows.batch.credited:
                return Lookup(None, "a tensor that two yielded batches share")
        if found is not None:
            return found
        if changed is not None:
            return Lookup(None, "a tensor of the batch that was changed in place since the loader yielded it", changed=changed)
        return Lookup(None, "a view of a batch that does not show whole rows")

    def look_inputs(self, tree: Any) -> Lookup:
        """What the inputs of a model tell together; `remember_outputs` takes the answer."""
        sights = [self.look(leaf) for leaf in leaves(tree)]
        changed = next((sight.changed for sight in sights if sight.changed is not None), None)
        if changed is not None:
            return Lookup(changed, "outputs of the model for inputs that were changed in place", refuse=True)
        named = [sight for sight in sights if sight.rows is not None]
        if len({sight.rows.key for sight in named if sight.rows is not None}) > 1:
            return Lookup(named[0].rows, "outputs of the model for inputs from different rows", refuse=True)
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
