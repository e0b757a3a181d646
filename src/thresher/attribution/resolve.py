"""Which samples a loss belongs to: certain, or an error.

Two witnesses are asked. Targets: a tensor that shares storage with a batch that the loader yielded names its rows by
its element range. Outputs: what `run.model` returned for named inputs names the same rows. Storages are told apart by
the identity of their StorageImpl, which a weak reference keeps from being reused, never by an address. A tensor that
was changed in place is no witness.

Outside the promise: inputs permuted or mixed into new storage before `run.model` sees them while the original targets
are passed. Nothing tells that apart from a normalisation.
"""

from typing import Any

import torch
from torch import Tensor

from thresher.attribution.rows import Attribution, AttributionError, Batch, RowLayout, Rows, Witness, memory_layout
from thresher.attribution.tracker import Lookup, RowTracker
from thresher.loading.trees import leaves

WAYS_OUT = (
    "Ways out: pass the very tensors that the loader yielded (slices and views are fine), or say which samples the rows "
    "are with `ids=run.ids` (indexed as you indexed the batch); for data that is not of this run, such as validation, "
    "call it under torch.no_grad() or use your own criterion."
)


def certain_now(flag: Tensor) -> bool:
    """Whether a comparison can be read without waiting for a device."""
    return flag.device.type == "cpu"


class _Case:
    """One call of the criterion, heard out."""

    def __init__(self, witnesses: RowTracker, outputs: Any, targets: Any) -> None:
        self.outputs = [leaf for leaf in leaves(outputs) if leaf.dim()]
        self.targets = [leaf for leaf in leaves(targets) if leaf.dim()]
        self.output_sights = [witnesses.look(leaf) for leaf in self.outputs]
        self.target_sights = [witnesses.look(leaf) for leaf in self.targets]
        self.witnesses = witnesses

    def refuse(self, why: str) -> AttributionError:
        def tell(sights: list[Lookup]) -> str:
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

    def _agreed(self, sights: list[Lookup], name: str) -> Rows | None:
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


def attribute(
    witnesses: RowTracker, outputs: Any, targets: Any, ids: Tensor | None, *, n: int, recent: list[Batch]
) -> Attribution:
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
    return Attribution(rows.ids, rows.key, rows.batch, RowLayout(rows.n, rows.repeat), rows.positions(), flags)


def _stated(case: _Case, ids: Tensor, n: int, recent: list[Batch]) -> Attribution:
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
    group = RowLayout(len(ids), next((rows.repeat for rows in named), None))
    if own is not None:
        return Attribution(own.ids, own.key, own.batch, group, own.positions(), flags)
    latest = recent[-1] if recent else None
    device = ids.device if latest is None else latest.ids.device
    return Attribution(ids.to(device), None, latest, group, None, flags)


def _own_rows(ids: Tensor, recent: list[Batch]) -> Rows | None:
    """The rows that a view of a batch's own ids shows."""
    for batch in reversed(recent):
        layout = memory_layout(ids)
        if layout is not None and ids.untyped_storage()._cdata == batch.ids.untyped_storage()._cdata:
            witness = Witness.of(batch.ids, Rows(batch, 0, 1, len(batch.ids), 1))
            return None if witness is None else witness.locate(*layout)
    return None
