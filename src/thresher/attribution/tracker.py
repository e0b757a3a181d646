"""Remembers the tensors with known rows: batches that the loader yielded, and outputs that the model returned for them."""

import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from thresher.attribution.given_ids import Suspicion
from thresher.attribution.rows import (
    Attribution,
    AttributionError,
    RowLayout,
    Rows,
    TrackedTensor,
    YieldedBatch,
    memory_layout,
)
from thresher.loading.uncopied import Uncopied
from thresher.trees import leaves


class SampleDimension:
    """Learns the dimension of the samples from the shapes of batches.

    A batch of n samples of shape (T, n) looks like one of shape (n, T) if T equals n. One batch with another T shows the
    dimension for all batches.
    """

    def __init__(self) -> None:
        self._is_first: dict[tuple[int, int, int], bool] = {}
        self.unclear: tuple[int, ...] | None = None
        """Shape of a tensor of the last batch whose dimension of the samples is uncertain; None if all are certain."""

    @property
    def may_be_second(self) -> bool:
        """Whether samples can be along the second dimension of a tensor of the batches."""
        return self.unclear is not None or not all(self._is_first.values())

    def with_samples_first(self, tensors: list[Tensor], n: int) -> list[Tensor]:
        """Returns the tensors of a batch whose first dimension is known to be that of the samples.

        A shape of which only one dimension fits is remembered for later batches. `unclear` becomes the shape of a tensor of which
        both dimensions fit, if nothing was remembered that decides between them.

        Args:
            tensors: All tensors of a batch, in the order of the batch.
            n: Number of samples in the batch.
        """
        self.unclear = None
        kept = []
        for place, tensor in enumerate(tensors):
            # The place in the batch is a part of the key, because inputs can have the time first and labels the samples.
            key = (len(tensors), place, tensor.dim())
            shape = tensor.shape
            first_fits = tensor.dim() > 0 and shape[0] == n
            second_fits = tensor.dim() > 1 and shape[1] == n
            # A batch of one sample shows nothing: any dimension can have size 1.
            if tensor.dim() > 1 and first_fits != second_fits and n > 1:
                self._is_first[key] = first_fits
            if first_fits and (n == 1 or not second_fits or self._is_first.get(key, False)):
                kept.append(tensor)
            elif first_fits and key not in self._is_first:
                self.unclear = tuple(shape)
        return kept


class LossDimension:
    """Learns whether samples are along the first dimension of losses, from losses whose first two sizes are different."""

    def __init__(self) -> None:
        self._is_first: set[int] = set()

    def check(self, losses: Tensor, n: int) -> None:
        """Checks that the samples of some losses are known to be along the first dimension.

        Args:
            losses: Losses before they are averaged, shape (rows, ...).
            n: Number of samples.

        Raises:
            AttributionError: The first two dimensions are both n, and no other shape has shown that the samples come first.
        """
        if losses.dim() < 2 or n < 2 or losses.shape[0] != n:
            return
        if losses.shape[1] != n:
            self._is_first.add(losses.dim())
        elif losses.dim() not in self._is_first:
            raise AttributionError(
                f"run.reduce: losses of shape {tuple(losses.shape)} for {n} samples: the samples can be along the first "
                "dimension or along the second, as in time-first outputs of an RNN. Nothing was recorded. If they are along "
                "the first, pass ids=run.ids, repeat=1; else transpose the losses and masks first."
            )


@dataclass(frozen=True, slots=True)
class Lookup:
    """The result of looking up a tensor.

    Attributes:
        rows: Rows that the tensor shows; None if unknown.
        description: Description of the tensor for error messages.
        refuse: Whether a loss with this tensor is refused unless the caller gives the ids.
        changed: Rows of the tensor before it was changed in place; None if it was not changed.
        is_whole: For the inputs of a model, whether the rows of all tensors are known.
    """

    rows: Rows | None
    description: str
    refuse: bool = False
    changed: Rows | None = None
    is_whole: bool = True


CHANGED_INPUTS = (
    "outputs of the model for inputs that were changed in place (a normalization keeps the rows, CutMix mixes them, and both "
    "look the same: change a copy, as in x = x - mean, or pass ids=run.ids)"
)
NOT_YIELDED = Lookup(None, "a tensor that this run did not yield")


def _join_rows(known: list[tuple[Lookup, Rows, Tensor]]) -> Lookup | None:
    """Joins single rows of a tensor in its order, as detection models get them in `list(images)`; None for other rows."""
    singles = [single for single in known if single[1].n == 1]
    if len(singles) < 2:
        return None
    lookup, first, tensor = singles[0]
    joined = first._replace(step=1, n=len(singles))
    in_order = all(
        rows.batch is first.batch
        and rows.start == first.start + place
        and leaf.untyped_storage()._cdata == tensor.untyped_storage()._cdata
        for place, (_, rows, leaf) in enumerate(singles)
    )
    alike = all(rows.key == joined.key for _, rows, _ in known if rows.n != 1)
    return replace(lookup, rows=joined) if in_order and alike else None


class RowTracker(Uncopied):
    """Finds the rows of a tensor by the storage that it shares with a tensor of known rows.

    Args:
        sample_dimension: Finds the dimension of the samples. Default: the first dimension is that of the samples.
    """

    def __init__(self, sample_dimension: SampleDimension | None = None) -> None:
        self._by_storage: dict[int, list[TrackedTensor]] = {}
        self._limit = 64
        self.sample_dimension = sample_dimension
        self.suspicion = Suspicion()
        """Evidence of the latest targets against the ids that the loop passes."""
        self.latest: YieldedBatch | None = None
        """The batch remembered last; None before the first."""
        self._returned: tuple[weakref.ref[Tensor], int, Attribution] | None = None

    def remember_batch(self, batch: YieldedBatch, tensors: list[Tensor]) -> None:
        """Records the tensors of a batch that the loader yields.

        Args:
            batch: The batch, with its ids.
            tensors: All tensors of the batch; tensors without a certain dimension of the samples are left out.
        """
        n = len(batch.ids)
        self.latest = batch
        rows = Rows(batch, 0, 1, n, 1)
        if self.sample_dimension is None:
            batch.tensors = tuple(
                [tensor for tensor in tensors if tensor.dim() and tensor.shape[0] == n]
            )
        else:
            batch.tensors = tuple(self.sample_dimension.with_samples_first(tensors, n))
        batch.marked = tuple(
            [
                (tensor, tensor._version)
                for tensor in reversed(batch.tensors)
                if not tensor.is_inference()
            ]
        )
        for tensor in batch.tensors:
            self._remember(tensor, rows, None)
        self._forget_the_dead()

    def remember_outputs(self, outputs: Any, inputs: Lookup) -> None:
        """Remembers which samples the tensors returned by the model belong to.

        Args:
            outputs: Return value of the model, with any nesting.
            inputs: Samples in the inputs of that call, as `look_inputs` found them.
        """
        if inputs.rows is None:
            return
        batch, start, step, count, repeat = inputs.rows
        if self.sample_dimension is not None and self.sample_dimension.may_be_second:
            # The outputs of a model with the time first, such as nn.LSTM, can have as many time steps as samples: their
            # first dimension does not show rows.
            outputs = [leaf for leaf in leaves(outputs) if leaf.dim() < 2 or leaf.shape[1] != count]
        # Held weakly: outputs hold the graph of the whole step, which must be freed when the loop releases it.
        whole = isinstance(outputs, Tensor) and not inputs.refuse and batch.unknown is None
        whole = whole and repeat == step == 1 and outputs.shape[:1] == (len(batch.ids),) == (count,)
        if whole:
            rows = Rows(batch, 0, 1, count, 1)
            # Not stored in the batch, which it refers to: without a cycle, a batch is freed as soon as nothing uses it.
            of_all = Attribution(
                batch.ids, rows.key, batch, RowLayout(count), rows.positions(), (), batch.all_count
            )
            self._returned = weakref.ref(outputs), outputs._version, of_all
        changed = inputs.description if inputs.refuse else None
        for tensor in leaves(outputs):
            if tensor.dim() and tensor.shape[0] == count * repeat:
                self._remember(tensor, Rows(batch, start, step, count, repeat), changed)

    def untouched(self, outputs: Any, targets: Any) -> Attribution | None:
        """Attributes a loss in the most common case: outputs of the model for a whole batch, and a tensor of that batch.

        Args:
            outputs: First argument of the criterion.
            targets: Second argument of the criterion.

        Returns:
            The attribution; None if `thresher.attribution.resolve.attribute` must decide.
        """
        if self._returned is None:
            return None
        returned, version, of_all = self._returned
        # By object and version alone: this runs in every step, and neither reads values nor looks up memory.
        if returned() is not outputs or outputs._version != version:
            return None
        assert of_all.batch is not None
        for tensor, then in of_all.batch.marked:
            if tensor is targets:
                return of_all if tensor._version == then else None
        return None

    def look(self, tensor: Tensor) -> Lookup:
        """Looks up the rows of a tensor."""
        if tensor.layout is not torch.strided or tensor.is_inference():
            return NOT_YIELDED
        known = self._by_storage.get(tensor.untyped_storage()._cdata)
        layout = memory_layout(tensor)
        if known is None or layout is None:
            return NOT_YIELDED
        # Several batches lie in one storage if a collate_fn returns views of one big tensor. If two of them can be meant,
        # nothing is certain; a batch that has its loss, as one of the epoch before, does not count.
        lookup = None
        changed = None
        for tracked in reversed(known):
            rows = tracked.locate(*layout)
            if rows is None:
                continue
            # Views share the version counter of their base, so a change through any of them shows in all.
            if tracked.version != tensor._version:
                changed = rows
            elif lookup is None:
                lookup = Lookup(rows, tracked.changed or "", refuse=tracked.changed is not None)
            elif (
                lookup.rows is not None and rows.key != lookup.rows.key and not rows.batch.credited
            ):
                return Lookup(None, "a tensor that two yielded batches share")
        if lookup is not None:
            return lookup
        if changed is not None:
            return Lookup(
                None,
                "a tensor of the batch that was changed in place since the loader yielded it",
                changed=changed,
            )
        return Lookup(None, "a view of a batch that has only parts of rows")

    def look_inputs(self, tree: Any) -> Lookup:
        """Looks up the rows of all inputs of the model together.

        Args:
            tree: All arguments of the model, with any nesting.

        Returns:
            The samples that the inputs belong to, for the argument `inputs` of `remember_outputs`.
        """
        known: list[tuple[Lookup, Rows, Tensor]] = []
        tensors = leaves(tree)
        for leaf in tensors:
            lookup = self.look(leaf)
            # A change in place can be CutMix, which mixes rows, or a normalization, which keeps them: nothing shows which.
            if lookup.changed is not None:
                return Lookup(lookup.changed, CHANGED_INPUTS, refuse=True)
            if lookup.rows is not None:
                known.append((lookup, lookup.rows, leaf))
        if not known:
            return NOT_YIELDED
        chosen, first, _ = known[0]
        for lookup, rows, _ in known[1:]:
            if rows.key != first.key:
                return _join_rows(known) or Lookup(
                    first, "outputs of the model for inputs from different rows", refuse=True
                )
            if lookup.refuse and not chosen.refuse:
                chosen = lookup
        if len(known) == len(tensors):
            return chosen
        return replace(chosen, is_whole=False)

    def places(self) -> dict[tuple[int, int], TrackedTensor]:
        """Returns the tensors with known rows by their place in the autograd graph."""
        return {
            tracked.place: tracked
            for known in self._by_storage.values()
            for tracked in known
            if tracked.place is not None
        }

    def _remember(self, tensor: Tensor, rows: Rows, changed: str | None) -> None:
        tracked = TrackedTensor.of(tensor, rows, changed)
        if tracked is None:
            return
        known = self._by_storage.setdefault(tracked.storage.cdata, [])
        if known:
            # A storage that a collate_fn fills again for the next batch shows the rows of the later batch only.
            known[:] = [old for old in known if old.lies != tracked.lies]
        known.append(tracked)

    def _forget_the_dead(self) -> None:
        # The limit grows with what is alive, so that the sweep costs a constant time per batch.
        if len(self._by_storage) > self._limit:
            # All tensors of a key share one storage. The weak references keep its number from being used again until this
            # sweep.
            alive = {
                key: known
                for key, known in self._by_storage.items()
                if not known[0].storage.expired()
            }
            self._by_storage = alive
            self._limit = max(64, 2 * len(alive))
