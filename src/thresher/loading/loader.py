"""The loader of a run: the user's DataLoader, rebuilt such that it yields only the chosen samples.

The user's sampler decides the order, and the plan decides which samples are kept. Both make an `Epoch`: arrays of ids and of the
ends of batches. Only a plan that keeps every sample takes the ids of an unknown sampler as they come.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from thresher.distributed.world import ALONE, World
from thresher.loading.batch_reader import Batches, Reader
from thresher.loading.collate_check import UnknownRows
from thresher.loading.composed_order import ComposedOrder
from thresher.loading.epoch_batches import IdBatchSampler, OrderedBatches
from thresher.loading.order import Order
from thresher.loading.packed_plan import PackedPlan
from thresher.loading.row_buffer import RowBuffer, select
from thresher.loading.sampler_order import SamplerOrder
from thresher.loading.samplers import PreparedLoader
from thresher.loading.settings import OfUser
from thresher.loading.stream import RESUMED_STREAM, StreamBatches, StreamOrder
from thresher.loading.tensor_loader import TensorRows
from thresher.plans import BatchPlan
from thresher.timing import ATTRIBUTION, LOADING, Timing
from thresher.warning import warn

Device = torch.device | None


class EpochControl(Protocol):
    """Interface of a run for its loader: the functions that the loader calls.

    A candidate batch is a batch of the user's loader before a batch method chooses some of its rows.
    """

    def begin(self) -> tuple[PackedPlan | None, int]:
        """Begins an epoch, or continues an interrupted epoch.

        Returns:
            The plan of the epoch, or None for an IterableDataset; and the number of rows that an interrupted epoch has read.
        """
        ...

    @property
    def plan(self) -> PackedPlan:
        """Returns the plan of the current epoch or, between epochs, of the next epoch."""
        ...

    @property
    def keeps_a_row(self) -> bool:
        """Whether the method keeps at least one row of every candidate batch."""
        ...

    def choose(self, batch: Any, ids: Tensor) -> BatchPlan:
        """Chooses the rows of a candidate batch that the training loop gets."""
        ...

    def count(self, n: int) -> int | None:
        """Returns how many rows of a candidate batch of n rows are chosen; None if unknown."""
        ...

    def on_batch(
        self, batch: Any, ids: Tensor, weights: Tensor | None, candidates: Batches, *, last: bool
    ) -> None:
        """Called before the loop gets a batch, with the ids and weights of its rows, and the candidates read so far."""
        ...

    def on_loop_exit(self, *, exhausted: bool) -> None:
        """Called when the loop over the loader has ended, or its iterator was deleted."""
        ...


NO_ROWS: tuple[Tensor, Tensor | None] = (torch.empty(0, dtype=torch.int64), None)
"""Ids and weights of no rows."""


class SelectedLoader(OfUser):
    """`run.loader`: iterate over it instead of your DataLoader. Other attributes are read from your DataLoader.

    Args:
        loader: The user's DataLoader.
        device: Device that batches are moved to; None leaves them where they are.
        kept: Ids of the samples that pruning before training has kept. Default: all ids that the sampler yields.
        world: Processes among which the samples are divided. Default: one process.
        collate_keeps_rows: Whether the user has declared that row i of each batch is sample i.
        timing: Records how the time of the run is spent. Default: not recorded.
        least: Least number of rows that the model trains on: 2 if it has BatchNorm. Default: 1.
        composes: Whether the batch sampler composes the batches of each epoch. Default: False.
    """

    control: EpochControl
    """The run, which plans the epochs of this loader."""

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        device: Device,
        kept: Tensor | None = None,
        world: World = ALONE,
        collate_keeps_rows: bool = False,
        timing: Timing | None = None,
        least: int = 1,
        composes: bool = False,
    ) -> None:
        self.timing = timing or Timing()
        self._user = loader
        self._world = world
        self.row_buffer: RowBuffer | None = None
        """Rows that a batch method chose and that were not yielded yet; None if no rows are chosen before the loop."""
        # Ids and weights from a loaded state: rows that were chosen, but not yielded when the epoch was interrupted.
        self._rows_to_restore: tuple[Tensor, Tensor | None] = NO_ROWS
        self.streams = isinstance(loader.dataset, IterableDataset)
        """Whether the dataset is an IterableDataset."""
        self.order: SamplerOrder | ComposedOrder | StreamOrder
        """The order in which the user's loader reads the dataset."""
        if self.streams:
            self.order = StreamOrder(loader)
        else:
            kind = ComposedOrder if composes else SamplerOrder
            samples = None if kept is None else len(kept)
            self.order = kind(loader, world, least=least, samples=samples)
        self.n = self.order.n
        self.batches: Batches | None = None
        """Batches of the epoch in progress, and the position in it."""
        self._checksum = 0
        self.saved: Any = None
        """Object whose `state_dict` and `load_state_dict` save and load the run of this loader."""
        self.device = device or torch.device("cpu")
        """Device on which the training loop draws random numbers."""
        self.reader = Reader(
            loader,
            IdBatchSampler(as_tensors=isinstance(loader.dataset, TensorRows)),
            device=device,
            generators=self.order.generators,
            streams=self.streams,
            collate_keeps_rows=collate_keeps_rows,
        )
        """Reads the batches."""
        self.current: Callable[[], EpochIterator | None] = lambda: None
        """Returns the iterator over the current epoch. The reference is weak, so breaking out of the loop ends the workers."""
        self._deleted: weakref.finalize[..., EpochIterator] | None = None
        self.prepared = PreparedLoader(loader)
        """Shows accelerate where an epoch begins and ends."""

    @property
    def unknown_rows(self) -> UnknownRows:
        """Results of comparing batches with their samples: the reason if row i of a batch is not sample i."""
        return self.reader.unknown_rows

    def generators(self) -> list[torch.Generator]:
        """Returns the generators that the loader draws from."""
        return self.order.generators()

    def passes(self, ids: Tensor) -> Iterator[tuple[Any, Tensor]]:
        """Yields the batches of some samples, in order and on the device, with their ids, for the run's own forward passes."""
        return self.reader.passes(ids, self.order.batch_size)

    @property
    def yields_once(self) -> bool:
        """Whether no sample can come twice in an epoch."""
        return self.order.yields_once

    @property
    def candidates(self) -> int:
        """Number of ids that the user's sampler yields per epoch, without a dropped last batch.

        For an IterableDataset of unknown length, 0 until the first epoch is over.
        """
        # Full training does not train on a dropped last batch, either.
        order = self.order
        return min(order.candidates, order.full_batches * order.batch_size)

    def __len__(self) -> int:
        """Returns the number of batches in the epoch in progress or, between epochs, in the next one.

        Raises:
            TypeError: The number is not known: the sampler may repeat or skip ids, the dataset is an IterableDataset without a
                length, or a batch method keeps a random number of rows and gathers them into full batches.
        """
        size = self.order.batch_size
        if isinstance(self.order, StreamOrder):
            rows = len(self.order.dataset)
            rows -= rows % size if self.order.drop_last else 0
            batches = -(-rows // size)
        else:
            ends = self.ends(self.control.plan)
            rows = int(ends[-1])
            batches = len(ends) - 1
        buffer = self.row_buffer
        # Without gathering, each candidate batch from which a row is kept becomes one batch.
        if buffer is None or (buffer.size is None and self.control.keeps_a_row):
            return batches
        chosen = _count_chosen(rows, size, self.control)
        if chosen is None:
            raise TypeError(
                "the length of this epoch is not known before its end: how many rows are kept depends on the losses. Use a "
                "method with a fixed `keep`."
            )
        full, rest = divmod(chosen, size)
        return full + bool(rest and not (self.order.drop_last and full))

    def tokens(self) -> dict[str, Any]:
        """Returns the numbers of tokens of the epoch, without and with padding; {} if they are unknown."""
        if isinstance(self.order, StreamOrder):
            return {}
        return self.order.tokens()

    def ends(self, plan: PackedPlan) -> NDArray[np.int64]:
        """Returns where each batch of an epoch with this plan ends, after a leading 0; see `Order.ends`."""
        assert isinstance(self.order, Order)
        return self.order.ends(plan)

    def __iter__(self) -> "EpochIterator":
        if self.reader.closed:
            raise RuntimeError(
                "run.loader was closed by run.detach(). Use your own DataLoader, or attach again and use the new run.loader."
            )
        self.timing.switch(LOADING)  # starting workers counts as loading
        self.reader.check()  # first, so that an error about a changed setting leaves the pass in progress as it is
        self.stop()
        self.batches = None
        # Before the order: `begin` ends the previous epoch, which may make passes over this loader, and plans the next one.
        plan, consumed = self.control.begin()
        self.prepared.begin(remainder=self._remainder(plan))
        resumes = consumed > 0 and self.reader.epoch_start is not None
        # Before workers start: if a sampler is refused, no process is left waiting for a batch.
        batches = self.batches = self._batches_of(plan, consumed if resumes else 0)
        if resumes:
            loaded = self._resume(batches, consumed)
        else:
            self._set_rows_to_restore(NO_ROWS)
            loaded = self.reader.start(batches)
        iterator = EpochIterator(self, batches, loaded)
        self.current = weakref.ref(iterator)
        # A loop that breaks out only deletes its iterator, which tells the run that the epoch is over. The reference to the
        # run is weak: a strong one would keep the run alive.
        self._deleted = weakref.finalize(iterator, _report_deletion, weakref.ref(self.control))
        # When the interpreter exits, the parts of the run may be gone already.
        self._deleted.atexit = False
        return iterator

    def _remainder(self, plan: PackedPlan | None) -> int:
        """Returns how many rows the last step has in all processes before the first ids are repeated to fill it; 0 if full."""
        # A batch method chooses among the rows, the repeated ones too.
        if plan is None or isinstance(self.order, StreamOrder) or self.row_buffer is not None:
            return 0
        return self.order.remainder(plan)

    def _batches_of(self, plan: PackedPlan | None, rows: int) -> Batches:
        """Returns the batches of an epoch after the first `rows` rows."""
        order = self.order
        if isinstance(order, StreamOrder):
            return StreamBatches(order.length, self.candidates)
        assert plan is not None
        return OrderedBatches(
            order.begin(plan, resumed=rows > 0),
            size=order.batch_size,
            candidates=self.candidates,
            smaller=plan.smaller,
            rows=rows,
        )

    def _resume(self, batches: Batches, rows: int) -> Iterator[Any]:
        """Continues an interrupted epoch after its first `rows` rows."""
        # Read before `resume`, which restores the random states of the beginning of the epoch.
        states_of_loop = self.reader.random_states()
        loaded = self.reader.resume(batches)
        # Kept in a variable, because the next line clears it.
        unyielded = self._rows_to_restore
        self._set_rows_to_restore(NO_ROWS)
        if isinstance(batches, StreamBatches):
            batches.skip(loaded, rows, self._restoring_rows(unyielded))
        else:
            batches.open()
        # The random states of the training loop are restored. The generators of the loader stay as after drawing the ids again.
        self.reader.put_back(states_of_loop)
        self._check_alike(batches)
        if self.row_buffer is not None:
            # Rows that were selected and not trained on are read again; `skip` has already buffered those of a stream.
            if not self.streams and len(unyielded[0]):
                self.row_buffer.put(self.reader.read_again(unyielded[0]), *unyielded)
            # All processes must call this together, also those that have no rows in the buffer.
            self.row_buffer.count()
        return loaded

    def _check_alike(self, batches: Batches) -> None:
        """Checks that the first batches of an interrupted epoch have the same ids as before, or the same labels in a stream."""
        if self._checksum is None or batches.checksum == self._checksum:
            return
        if self.streams:
            warn(
                f"The stream begins with another batch than when the epoch was interrupted. {RESUMED_STREAM}"
            )
            return
        raise RuntimeError(
            f"{type(self.order.sampler).__name__} did not repeat the order of the interrupted epoch. The order must depend only "
            "on the global random states and the `generator` of the sampler. Pass it a generator (to Trainer: "
            "TrainingArguments(data_seed=...)), or resume from a state that was saved between epochs."
        )

    def end_epoch(self) -> None:
        """Frees the arrays of an epoch that is over, before its refresh."""
        if isinstance(self.batches, OrderedBatches):
            self.batches.release()
        self.batches = None
        self._checksum = 0

    def last_yielded(self, seen: int) -> None:
        """Drops the rows that are still buffered after the last batch of an epoch of `seen` samples."""
        # The only way to learn the length of a stream, for the next epoch.
        if isinstance(self.order, StreamOrder):
            self.order.seen = seen
        if self.row_buffer is not None:
            self.row_buffer.clear()

    def select_before_loop(self, fills: bool | None, *, by_chance: bool = False) -> None:
        """Sets whether rows are chosen before the training loop gets a batch, from the next batch on.

        Args:
            fills: Whether chosen rows of several batches are gathered into full batches; None if no rows are chosen before the
                loop.
            by_chance: Whether processes may keep different numbers of rows. Default: False.
        """
        # If all processes keep the same number of rows, they need not exchange the numbers for each batch.
        world = self._world if by_chance else ALONE
        if fills is None:
            self.row_buffer = None
        else:
            self.row_buffer = RowBuffer(self.order.batch_size if fills else None, world)

    def state_dict(self) -> dict[str, Any]:
        """Returns `run.state_dict()`: a script that saves the state of its loader then saves the run."""
        return self.saved.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state as `run.load_state_dict` does."""
        self.saved.load_state_dict(state_dict, restore_rng=True)

    def pass_state_dict(self) -> dict[str, Any]:
        """Returns the chosen rows not yielded yet, and the random and sampler states at the start of the epoch."""
        # A loaded state may be saved again before the epoch continues, so its rows are not in the buffer yet.
        if self.row_buffer is None or len(self._rows_to_restore[0]):
            ids, weights = self._rows_to_restore
        else:
            ids, weights = self.row_buffer.waiting
        return {
            "waiting": {"ids": ids, "weights": weights},
            "seen": self.order.seen if isinstance(self.order, StreamOrder) else 0,
            "checksum": self._checksum if self.batches is None else self.batches.checksum,
            "epoch_start": self.reader.epoch_start,
            "shuffle": self.order.state_dict(),
        }

    def load_pass_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the state of a saved epoch, which continues at the next `iter`."""
        self.stop()
        self._set_rows_to_restore((state["waiting"]["ids"].clone(), state["waiting"]["weights"]))
        if isinstance(self.order, StreamOrder):
            self.order.seen = state["seen"]
        self.batches = None
        self._checksum = state["checksum"]
        self.reader.load(state["epoch_start"], between_epochs=not state["active"])
        self.order.load_state_dict(state["shuffle"], active=state["active"], consumed=state["rows"])

    def _set_rows_to_restore(self, unyielded: tuple[Tensor, Tensor | None]) -> None:
        """Sets the rows that the next epoch begins with, and empties the buffer."""
        self._rows_to_restore = unyielded
        if self.row_buffer is not None:
            self.row_buffer.clear()

    def _restoring_rows(
        self, unyielded: tuple[Tensor, Tensor | None]
    ) -> Callable[[Any, Tensor], None]:
        """Returns a function that puts the rows of `unyielded` into the buffer when their batch of a stream is read again."""
        wanted, weights = unyielded

        def restore_rows(batch: Any, ids: Tensor) -> None:
            in_batch = torch.isin(wanted, ids)
            if self.row_buffer is None or not bool(in_batch.any()):
                return
            # The ids of a stream are consecutive positions.
            rows = wanted[in_batch] - ids[0]
            part = select(self.reader.on_device(batch), rows, len(ids))
            self.row_buffer.put(
                part, wanted[in_batch], None if weights is None else weights[in_batch]
            )

        return restore_rows

    def stop(self) -> None:
        """Ends the iterator of the current epoch."""
        self.current = lambda: None
        if self._deleted is not None:
            self._deleted.detach()

    def close(self) -> None:
        """Releases the data and persistent workers."""
        self.stop()
        self.reader.close()


class EpochIterator:
    """Iterator over one epoch of a `SelectedLoader`.

    Args:
        loader: The loader.
        candidates: Ids of the batches before rows are chosen, and the position in the epoch.
        loaded: These batches, from the rebuilt loader.
    """

    def __init__(self, loader: SelectedLoader, candidates: Batches, loaded: Iterator[Any]) -> None:
        self._loader = loader
        self._control = loader.control
        self._candidates = candidates
        self._loaded = loaded
        self._order = loader.order
        self._exhausted = self._done = False
        # Despite drop_last, until there is a full batch: an epoch of less than one would have no step.
        self._keeps_partial_batch = not candidates.rows

    def __iter__(self) -> "EpochIterator":
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        if self._done:
            raise StopIteration
        # Two iterators at once would share one order, and each would get only a part of the ids.
        if self._loader.current() is not self:
            raise RuntimeError(
                "this iterator over run.loader was ended by a newer one; use the newer one. To read data within an epoch, as "
                "for statistics or evaluation, use another DataLoader."
            )
        self._loader.timing.switch(ATTRIBUTION)
        row_buffer = self._loader.row_buffer
        if row_buffer is None:
            try:
                batch, ids = self._next_candidate()
            except StopIteration:
                self._end()
                raise
            self._yield(batch, ids, None, last=self._candidates.left == 0)
            return batch
        # A batch method chooses among the rows of one or more candidate batches.
        self._fill_buffer(row_buffer)
        # The last rows of an epoch make a smaller batch, or are dropped with drop_last, as in the plain loop.
        if not row_buffer.rows or (not row_buffer.full and self._drops_partial_batch):
            self._end()
            raise StopIteration
        batch, ids, weights = row_buffer.take()
        self._keeps_partial_batch = False
        self._yield(batch, ids, weights, last=self._is_last(row_buffer))
        return batch

    def _yield(self, batch: Any, ids: Tensor, weights: Tensor | None, *, last: bool) -> None:
        # Before the loop gets the batch: `Accelerator.accumulate` asks whether it is the last one.
        if self._loader.prepared.in_use:
            self._loader.prepared.yielded(last=last)
        # Now, because a loop may break at the last batch. A stream may have more samples than its length says.
        if last and not self._loader.streams:
            self._loader.last_yielded(self._candidates.rows)
        planned = self._candidates.weights
        if planned is not None:
            # The epoch plan and the batch method each correct for their own selection, so their weights are multiplied.
            of_plan = planned[ids]
            weights = of_plan if weights is None else of_plan * weights
        self._control.on_batch(batch, ids, weights, self._candidates, last=last)

    @property
    def _drops_partial_batch(self) -> bool:
        return self._order.drop_last and not self._keeps_partial_batch

    def _is_last(self, row_buffer: RowBuffer) -> bool:
        """Whether no batch follows, neither of buffered rows nor of candidates to come. False if this is not known."""
        left = self._candidates.left
        size = row_buffer.size
        if left is None or size is None or not self._drops_partial_batch:
            return left == 0 and not row_buffer.rows
        chosen = _count_chosen(left, self._order.batch_size, self._control)
        # With drop_last, candidates may remain that cannot fill another batch.
        if chosen is not None:
            return row_buffer.rows + chosen < size
        return left == 0 and not row_buffer.full

    def _next_candidate(self) -> tuple[Any, Tensor]:
        timing = self._loader.timing
        on_host = self._loader.device.type == "cpu"
        before = timing.switch(LOADING)
        batch, ids = self._candidates.take(self._loaded)
        if on_host:
            timing.switch(before)
            batch = self._loader.reader.on_device(batch)
        else:  # counted as loading time: in the user's own loop, moving the batch would be a part of loading
            batch = self._loader.reader.on_device(batch)
            timing.switch(before)
        return batch, ids

    def _fill_buffer(self, row_buffer: RowBuffer) -> None:
        """Selects from candidate batches until there is a full batch, or no candidate is left."""
        # A stream is read to its end, because it may have more samples than its length says.
        while not (
            row_buffer.full
            or self._exhausted
            or (not self._loader.streams and self._is_last(row_buffer))
        ):
            try:
                batch, ids = self._next_candidate()
            except StopIteration:
                self._exhausted = True
            else:
                row_buffer.add(batch, ids, self._control.choose(batch, ids))

    def _end(self) -> None:
        self._done = True
        # Ends workers that are not persistent now, rather than when the loop deletes its iterator.
        self._loaded = iter(())
        # If the last rows came from the buffer, the sampler was not asked for its end, at which RandomSampler draws once more.
        self._candidates.finish()
        self._loader.last_yielded(self._candidates.rows)
        self._loader.prepared.end(whole=True)
        self._control.on_loop_exit(exhausted=True)


def _report_deletion(control: "weakref.ref[EpochControl]") -> None:
    """Reports to the run that an iterator was deleted."""
    run = control()
    # None if the run was deleted together with its loader.
    if run is not None:
        run.on_loop_exit(exhausted=False)


def _count_chosen(candidates: int, size: int, control: EpochControl) -> int | None:
    """Returns how many of `candidates` rows are chosen, in batches of `size` rows and a smaller last one; None if unknown."""
    full, rest = divmod(candidates, size)
    of_full = control.count(size)
    of_rest = control.count(rest) if rest else 0
    if of_full is None or of_rest is None:
        return None
    return full * of_full + of_rest
