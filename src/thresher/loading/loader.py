"""The loader of a run: the user's DataLoader, rebuilt such that it yields only the chosen samples.

The user's sampler decides the order, and the plan decides which samples stay. RandomSampler, SequentialSampler and
Shuffle have a fast path on tensors that draws the same random numbers; the ids of any other sampler are filtered as they come.
"""

import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from thresher.distributed.world import ALONE, World
from thresher.loading.batch_reader import NO_ROWS, Reader
from thresher.loading.collate_check import UnknownRows
from thresher.loading.distributed_order import SharedOrder
from thresher.loading.epoch_order import (
    RESUMED_STREAM,
    EpochControl,
    EpochCursor,
    EpochScale,
    IdBatchSampler,
    MapStyleBatches,
    Order,
    OrderPlace,
    StreamBatches,
)
from thresher.loading.held_plan import HeldPlan
from thresher.loading.row_buffer import RowBuffer, select
from thresher.loading.samplers import PreparedLoader
from thresher.loading.settings import OfUser
from thresher.loading.smaller_batches import StepSizes
from thresher.loading.tensor_loader import TensorRows
from thresher.loading.user_order import UserOrder
from thresher.timing import ATTRIBUTION, LOADING, Timing
from thresher.warning import warn

Device = torch.device | None
NONE_WAIT: tuple[Tensor, Tensor | None] = (torch.empty(0, dtype=torch.int64), None)


class SelectedLoader(OfUser):
    """`run.loader`: iterate over it instead of your DataLoader. Other attributes are read from your DataLoader.

    Args:
        loader: The user's DataLoader.
        device: Device that batches are moved to; None leaves them where they are.
        kept: Ids of the samples that pruning kept. Default: all ids that the sampler yields.
        world: Processes among which the samples are divided. Default: one process.
        collate_keeps_rows: Whether the user has declared that row i of each batch is sample i.
        timing: Records how the time of the run is spent. Default: not recorded.
        least: Least number of rows that the model trains on: 2 if it has BatchNorm. Default: 1.
    """

    control: EpochControl
    """The run, as the loader sees it."""

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
    ) -> None:
        self.timing = timing or Timing()
        self._user, self._samples, self._world = loader, None if kept is None else len(kept), world
        self.row_buffer: RowBuffer | None = None
        """Rows that were selected and not yielded yet; None if batches go to the loop as they are."""
        self._waiting: tuple[Tensor, Tensor | None] = NONE_WAIT
        self._seen = 0
        self.order: UserOrder | SharedOrder = UserOrder(loader) if world.size == 1 else SharedOrder(loader, world)
        """The order of the user's loader."""
        self.n = self.order.n
        self.saved: Any = None
        """Saves and loads the run that the loader belongs to."""
        self.device = device or torch.device("cpu")
        """Device on which the loop draws random numbers."""
        self.ids = IdBatchSampler(self.order.sizes, least, as_tensors=isinstance(loader.dataset, TensorRows))
        self.reader = Reader(
            loader,
            self.ids,
            device=device,
            generators=self.order.generators,
            streams=self.streams,
            collate_keeps_rows=collate_keeps_rows,
        )
        """Reads the batches."""
        self.current: Callable[[], EpochIterator | None] = lambda: None
        """Returns the iterator that has the epoch; weak, so that breaking out of the loop lets the workers go at once."""
        self.prepared = PreparedLoader(loader)
        """The end of an epoch, as accelerate reads it."""

    @property
    def streams(self) -> bool:
        """Whether the dataset is an IterableDataset."""
        return self.order.streams

    @property
    def unknown_rows(self) -> UnknownRows:
        """What the checks of batches have shown: why rows are not the samples in order."""
        return self.reader.unknown_rows

    def generators(self) -> list[torch.Generator]:
        """Returns the generators that the loader draws from."""
        return self.order.generators()

    def passes(self, order: Order) -> Iterator[tuple[Any, Tensor]]:
        """Yields the batches of some samples, in order and on the device, with their ids, for the run's own forward passes."""
        return self.reader.passes(order)

    @property
    def yields_once(self) -> bool:
        """Whether no sample can come twice in an epoch."""
        return self.order.yields_once

    @property
    def candidates(self) -> int:
        """Number of ids that the user's sampler yields per epoch, without a dropped last batch.

        0 for an IterableDataset of unknown length, until an epoch of it is over.
        """
        # A last batch that is dropped is no part of full training, either.
        total = self.order.candidates(self._seen)
        return total - total % self.ids.batch_size if self.ids.drop_last else total

    def __len__(self) -> int:
        """Returns the number of batches in the epoch in progress or, between epochs, in the next one.

        Raises:
            TypeError: The number is not known: a sampler of unknown order, an IterableDataset, or a batch method that keeps a
                random number of rows and gathers them into full batches.
        """
        sizes = None if self.streams else self.step_sizes(self.control.held)
        if sizes is not None:
            return sizes.steps
        stream: Any = self._user.dataset
        samples = (
            len(stream) if self.streams else self.ids.served_of(self.control.held, self.order.samples_of(self.control.held))
        )
        # Rows that a batch method keeps of the last, smaller candidate batch count as well.
        full, rest = divmod(samples, self.ids.batch_size)
        rest = 0 if self.ids.drop_last else rest
        if self.row_buffer is None or (self.row_buffer.size is None and self.control.keeps_a_row):
            return full + bool(rest)
        rows = _rows_of(full * self.ids.batch_size + rest, self.ids.batch_size, self.control)
        if rows is None:
            raise TypeError(
                "the length of this epoch is not known before its end: how many rows are kept depends on the losses. Use a "
                "method with a fixed `keep`."
            )
        full, rest = divmod(rows, self.ids.batch_size)
        return full + bool(rest and not self.ids.drop_last)

    def step_sizes(self, plan: HeldPlan) -> StepSizes | None:
        """Returns the sizes of the smaller batches of a plan; None if an epoch has full batches.

        Args:
            plan: The plan of an epoch.

        Raises:
            ValueError: There are too few rows for the steps, or it is not known how many ids the order has.
        """
        return self.order.step_sizes(plan, self.ids, self._samples, self._seen)

    def scale_of(self, plan: HeldPlan | None) -> EpochScale:
        """Returns the size of an epoch, by which positions are converted into progress.

        Args:
            plan: Chosen samples of the epoch; None for an IterableDataset.
        """
        if plan is None:
            return EpochScale(self.candidates)
        try:
            rows = self.ids.served_of(plan, self.order.samples_of(plan))
        except (TypeError, NotImplementedError):  # a sampler of the user without a length, or with an order that is not known
            rows = None
        return EpochScale(self.candidates, rows, self.step_sizes(plan))

    def rows_of_steps(self, plan: HeldPlan) -> tuple[NDArray[np.int64], bool]:
        """Returns the rows per step of this process in an epoch, and whether processes get every W-th row.

        Args:
            plan: The plan of an epoch.

        Raises:
            ValueError: There are too few rows for the steps of smaller batches.
        """
        sizes = self.step_sizes(plan)
        if sizes is not None:
            return np.diff(sizes.ends()), True
        rows = self.order.samples_of(plan)
        rows -= 0 if rows % self.ids.batch_size >= self.ids.least_of(plan) else rows % self.ids.batch_size
        ends = np.append(np.arange(0, rows, self.ids.batch_size), rows)
        return np.diff(ends), not getattr(self.order.sizes, "by_batches", False)

    def __iter__(self) -> "EpochIterator":
        if self.reader.closed:
            raise RuntimeError(
                "run.loader was closed by run.detach(). Use your own DataLoader, or attach again and use the new run.loader."
            )
        self.timing.switch(LOADING)  # workers start
        self.reader.check()  # before the pass in progress ends: a refused setting leaves it as it is
        self.stop()
        # The run first: it ends the epoch before, which may make passes over this very loader, and makes the plan.
        plan, place = self.control.begin()
        self.prepared.begin()
        # The order comes before the workers: a sampler of several processes is refused before any of them waits for a batch.
        cursor = None if plan is None else self.order.cursor(plan, place, self.ids, self._samples)
        resumes = place.consumed and self.reader.epoch_start is not None
        candidates = self._resume(cursor, place) if resumes else self._start(cursor)
        iterator = EpochIterator(self, candidates, cursor or NO_ROWS, place)
        # An iterator that is gone tells the run that the loop has left its pass; a strong reference would keep the run alive.
        control = weakref.ref(self.control)
        self.current = weakref.ref(iterator, lambda _: _gone(control()))
        return iterator

    def _start(self, cursor: EpochCursor | None) -> MapStyleBatches | StreamBatches:
        """Begins an epoch with its first batch."""
        self._begin_with(NONE_WAIT)
        return self.reader.start(cursor, self.order.length_of_stream(self._seen))

    def _resume(self, cursor: EpochCursor | None, place: OrderPlace) -> MapStyleBatches | StreamBatches:
        """Goes on with an interrupted epoch."""
        # Before the replay, which sets the random states back to the beginning of the epoch.
        now = self.reader.random_states()
        candidates = self.reader.resume(cursor, place.consumed, self.order.length_of_stream(self._seen))
        # Taken out first, because the next line clears what waits.
        waiting = self._waiting
        self._begin_with(NONE_WAIT)
        if isinstance(candidates, StreamBatches):
            replayed = candidates.skip(place.consumed, self._keep_waiting(waiting))
        else:
            replayed = self.ids.replay()
        # The loader's generators stay as replayed: the loop's own random numbers go on where they were.
        self.reader.put_back(now)
        # An order that begins at the place replays nothing, so there is no checksum to compare.
        checksum = zlib.crc32(replayed.numpy().tobytes(), candidates.first)
        if self.streams and checksum != place.checksum:
            warn(f"The stream begins with another batch than when the epoch was interrupted. {RESUMED_STREAM}")
        elif (cursor is None or cursor.stayed is None) and checksum != place.checksum:
            raise RuntimeError(
                f"{type(self.order.sampler).__name__} did not repeat the order of the interrupted epoch: it "
                "must depend only on the global random states and its `generator`. Resume between epochs, or give it a "
                "generator."
            )
        if self.row_buffer is not None:
            if cursor is not None and len(waiting[0]):  # rows that were selected and not trained on are read again
                self.row_buffer.put(self.reader.read_again(waiting[0]), *waiting)
            # All processes count together, also one of which no row waited.
            self.row_buffer.count()
        return candidates

    def last_yielded(self, seen: int) -> None:
        """Drops buffered rows after the last batch of an epoch, which had `seen` samples."""
        self._seen = seen
        if self.row_buffer is not None:
            self.row_buffer.clear()

    def select_before_loop(self, fills: bool | None, *, by_chance: bool = False) -> None:
        """Turns the choice of rows before the loop gets a batch on or off, from the next batch on.

        Args:
            fills: Whether chosen rows of several batches are gathered into full batches; None for no choice before the loop.
            by_chance: Whether processes keep different numbers of rows. Default: False.
        """
        # A fixed number of rows needs no call of all ranks per candidate batch.
        world = self._world if by_chance else ALONE
        self.row_buffer = None if fills is None else RowBuffer(self.ids.batch_size if fills else None, world)

    def state_dict(self) -> dict[str, Any]:
        """Returns `run.state_dict()`, so that scripts that save the state of their loader save the run."""
        return self.saved.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state as `run.load_state_dict` does."""
        self.saved.load_state_dict(state_dict, restore_rng=True)

    def state_of_pass(self) -> dict[str, Any]:
        """Returns chosen rows that were not yielded yet, and how the epoch began, as tensors and plain values."""
        # Rows that were loaded with a state, and not read again yet, are saved as they are.
        unbuffered = self.row_buffer is None or len(self._waiting[0])
        ids, weights = self._waiting if unbuffered or self.row_buffer is None else self.row_buffer.waiting
        return {
            "waiting": {"ids": ids, "weights": weights},
            "seen": self._seen,
            "epoch_start": self.reader.epoch_start,
            "shuffle": self.order.state_dict(),
        }

    def load_state_of_pass(self, state: Mapping[str, Any]) -> None:
        """Loads the state of a saved epoch, which continues at the next `iter`."""
        self.stop()
        self._begin_with((state["waiting"]["ids"].clone(), state["waiting"]["weights"]))
        self._seen = state["seen"]
        self.reader.load(state["epoch_start"], between_epochs=not state["active"])
        self.order.load_state_dict(state["shuffle"], active=state["active"], consumed=state["consumed"])

    def _begin_with(self, waiting: tuple[Tensor, Tensor | None]) -> None:
        """Sets the rows that the next pass begins with: those that waited when the epoch was interrupted."""
        self._waiting = waiting
        if self.row_buffer is not None:
            self.row_buffer.clear()

    def _keep_waiting(self, waiting: tuple[Tensor, Tensor | None]) -> Callable[[Any, Tensor], None]:
        """Returns a function that takes the rows that waited from each batch."""
        wanted, weights = waiting

        def look(batch: Any, ids: Tensor) -> None:
            here = torch.isin(wanted, ids)
            if self.row_buffer is None or not bool(here.any()):
                return
            rows = wanted[here] - ids[0]
            part = select(self.reader.moved(batch), rows, len(ids))
            self.row_buffer.put(part, wanted[here], None if weights is None else weights[here])

        return look

    def stop(self) -> None:
        """Ends the iterator of the current epoch."""
        self.current = lambda: None

    def close(self) -> None:
        """Releases the data and persistent workers."""
        self.stop()
        self.reader.close()


class EpochIterator:
    """Iterator over one epoch of a `SelectedLoader`.

    Args:
        loader: The loader.
        candidates: Batches before rows are chosen, with their ids.
        cursor: The rows of the epoch.
        place: Position in the order of the epoch at which the iterator begins.
    """

    def __init__(
        self,
        loader: SelectedLoader,
        candidates: MapStyleBatches | StreamBatches,
        cursor: EpochCursor,
        place: OrderPlace,
    ) -> None:
        self._loader, self._control, self._candidates = loader, loader.control, candidates
        self._cursor, self._place, self._sizes = cursor, place, loader.ids
        self._left = self._sizes.left_after(place) if place.consumed else None
        self._exhausted = self._done = False

    def __iter__(self) -> "EpochIterator":
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        if self._done:
            raise StopIteration
        # Two passes at once would share one order, and each would get a part of its ids.
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
            self._yield(batch, ids, None, last=self._left == 0)
            return batch
        # From here on rows are chosen before the loop sees a batch.
        self._fill(row_buffer)
        # The rest of an epoch is a smaller batch, as in the plain loop, or is dropped with drop_last.
        if not row_buffer.rows or (not row_buffer.full and self._sizes.drop_last):
            self._end()
            raise StopIteration
        batch, ids, weights = row_buffer.take()
        self._yield(batch, ids, weights, last=self._leaves_nothing(row_buffer))
        return batch

    def _yield(self, batch: Any, ids: Tensor, weights: Tensor | None, *, last: bool) -> None:
        if self._loader.prepared.in_use:
            self._loader.prepared.yielded(len(ids), last=last)
        # A stream may go on after the batch that is the last by its length.
        if last and not self._loader.streams:
            self._loader.last_yielded(self._place.consumed)
        if self._cursor.weights is not None:  # those of the plan, besides those of a batch method
            # Both weights correct for a selection of their own, so they are multiplied.
            planned = self._cursor.weights(ids.numpy())
            weights = weights if planned is None else planned if weights is None else planned * weights
        self._control.on_batch(batch, ids, self._place, weights, last=last)

    def _leaves_nothing(self, row_buffer: RowBuffer) -> bool:
        """Whether the rows that wait and those of the candidates to come make no further batch, as far as it is known."""
        left, size = self._left, row_buffer.size
        if left is None or size is None or not self._sizes.drop_last:
            return left == 0 and not row_buffer.rows
        chosen = _rows_of(left, self._sizes.batch_size, self._control)
        return row_buffer.rows + chosen < size if chosen is not None else left == 0 and not row_buffer.full

    def _next_candidate(self) -> tuple[Any, Tensor]:
        timing, on_host = self._loader.timing, self._loader.device.type == "cpu"
        before = timing.switch(LOADING)
        batch, ids, drawn, stayed, left = self._candidates.take()
        if on_host:
            timing.switch(before)
            batch = self._loader.reader.moved(batch)
        else:  # the loop would have moved the batch by itself
            batch = self._loader.reader.moved(batch)
            timing.switch(before)
        # Known when the batch is yielded, so that accelerate learns which is the last, and the epoch ends with its step.
        self._left = self._sizes.in_batches(left)
        checksum = self._place.checksum if self._place.consumed else self._candidates.first
        self._place = OrderPlace(drawn, stayed, zlib.crc32(ids.numpy().tobytes(), checksum))
        return batch, ids

    def _fill(self, row_buffer: RowBuffer) -> None:
        """Selects from candidate batches until there is a full batch, or no candidate is left."""
        # A stream is read to its end: it may have more samples than its length.
        while not (row_buffer.full or self._exhausted or (not self._loader.streams and self._leaves_nothing(row_buffer))):
            try:
                batch, ids = self._next_candidate()
            except StopIteration:
                self._exhausted = True
            else:
                row_buffer.add(batch, ids, self._control.choose(batch, ids))

    def _end(self) -> None:
        self._done = True
        # Workers that are not persistent end here, and not when the loop lets go of its iterator.
        self._candidates = StreamBatches(iter(()))
        self._loader.last_yielded(self._place.consumed)
        self._loader.prepared.end(whole=True)
        self._control.on_loop_exit(exhausted=True)


def _gone(control: EpochControl | None) -> None:
    """Notes that the iterator of a pass is gone."""
    # None if the run was collected together with its loader.
    if control is not None:
        control.on_loop_exit(exhausted=False)


def _rows_of(candidates: int, size: int, control: EpochControl) -> int | None:
    """Returns how many rows are chosen of so many candidates, in batches of a size and a rest; None if it is not known."""
    full, rest = divmod(candidates, size)
    of_full, of_rest = control.count(size), control.count(rest) if rest else 0
    return None if of_full is None or of_rest is None else full * of_full + of_rest
