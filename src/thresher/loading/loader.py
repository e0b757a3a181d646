"""The loader of a run: the user's DataLoader, rebuilt such that it yields only the chosen samples.

The user's sampler decides the order, and the plan decides which samples are kept. The orders of RandomSampler,
SequentialSampler and Shuffle are computed as tensors, with the same random numbers. The ids of any other sampler are filtered
as they come.
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
        kept: Ids of the samples that pruning before training has kept. Default: all ids that the sampler yields.
        world: Processes among which the samples are divided. Default: one process.
        collate_keeps_rows: Whether the user has declared that row i of each batch is sample i.
        timing: Records how the time of the run is spent. Default: not recorded.
        least: Least number of rows that the model trains on: 2 if it has BatchNorm. Default: 1.
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
    ) -> None:
        self.timing = timing or Timing()
        self._user = loader
        self._samples = None if kept is None else len(kept)
        self._world = world
        self.row_buffer: RowBuffer | None = None
        """Rows that a batch method chose and that were not yielded yet; None if no rows are chosen before the loop."""
        self._waiting: tuple[Tensor, Tensor | None] = NONE_WAIT
        self._seen = 0
        self.order: UserOrder | SharedOrder = (
            UserOrder(loader) if world.size == 1 else SharedOrder(loader, world)
        )
        """The order in which the user's loader reads the dataset."""
        self.n = self.order.n
        self.saved: Any = None
        """Object whose `state_dict` and `load_state_dict` save and load the run of this loader."""
        self.device = device or torch.device("cpu")
        """Device on which the training loop draws random numbers."""
        self.ids = IdBatchSampler(
            self.order.sizes, least, as_tensors=isinstance(loader.dataset, TensorRows)
        )
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
        """Returns the iterator over the current epoch. The reference is weak, so breaking out of the loop ends the workers."""
        self.prepared = PreparedLoader(loader)
        """Shows accelerate where an epoch begins and ends."""

    @property
    def streams(self) -> bool:
        """Whether the dataset is an IterableDataset."""
        return self.order.streams

    @property
    def unknown_rows(self) -> UnknownRows:
        """Results of comparing batches with their samples: the reason if row i of a batch is not sample i."""
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

        For an IterableDataset of unknown length, 0 until the first epoch is over.
        """
        # Full training does not train on a dropped last batch, either.
        total = self.order.candidates(self._seen)
        return total - total % self.ids.batch_size if self.ids.drop_last else total

    def __len__(self) -> int:
        """Returns the number of batches in the epoch in progress or, between epochs, in the next one.

        Raises:
            TypeError: The number is not known: the sampler may repeat or skip ids, the dataset is an IterableDataset without a
                length, or a batch method keeps a random number of rows and gathers them into full batches.
        """
        sizes = None if self.streams else self.step_sizes(self.control.held)
        if sizes is not None:
            return sizes.steps
        stream: Any = self._user.dataset
        samples = (
            len(stream)
            if self.streams
            else self.ids.served_of(self.control.held, self.order.samples_of(self.control.held))
        )
        # A batch method also chooses rows of the last batch, which may be smaller.
        full, rest = divmod(samples, self.ids.batch_size)
        rest = 0 if self.streams and self.ids.drop_last else rest
        if self.row_buffer is None or (self.row_buffer.size is None and self.control.keeps_a_row):
            return full + bool(rest)
        rows = _rows_of(full * self.ids.batch_size + rest, self.ids.batch_size, self.control)
        if rows is None:
            raise TypeError(
                "the length of this epoch is not known before its end: how many rows are kept depends on the losses. Use a "
                "method with a fixed `keep`."
            )
        full, rest = divmod(rows, self.ids.batch_size)
        return full + bool(rest and not (self.ids.drop_last and full))

    def step_sizes(self, plan: HeldPlan) -> StepSizes | None:
        """Returns the sizes of the smaller batches of a plan; None if an epoch has full batches.

        Args:
            plan: The plan of an epoch.

        Raises:
            ValueError: There are fewer rows than the steps need, or it is not known how many ids the order has.
        """
        return self.order.step_sizes(plan, self.ids, self._samples, self._seen)

    def scale_of(self, plan: HeldPlan | None) -> EpochScale:
        """Returns the size of an epoch, which converts positions in its order into progress.

        Args:
            plan: Chosen samples of the epoch; None for an IterableDataset.
        """
        if plan is None:
            return EpochScale(self.candidates)
        try:
            rows = self.ids.served_of(plan, self.order.samples_of(plan))
        except (
            TypeError,
            NotImplementedError,
        ):  # a sampler of the user without a length, or with an order that is not known
            rows = None
        return EpochScale(self.candidates, rows, self.step_sizes(plan))

    def rows_of_steps(self, plan: HeldPlan) -> tuple[NDArray[np.int64], bool]:
        """Returns how the rows of an epoch are divided into steps and among processes.

        Args:
            plan: The plan of an epoch.

        Returns:
            The number of rows of each step of this process, shape (steps,); and whether W processes get every W-th row of the
            order (True) or every W-th batch (False).

        Raises:
            ValueError: There are fewer rows than the steps of smaller batches need.
        """
        sizes = self.step_sizes(plan)
        if sizes is not None:
            return np.diff(sizes.ends()), True
        rows = self.order.samples_of(plan)
        rows -= (
            0
            if rows % self.ids.batch_size >= self.ids.least_of(plan)
            else rows % self.ids.batch_size
        )
        ends = np.append(np.arange(0, rows, self.ids.batch_size), rows)
        return np.diff(ends), not getattr(self.order.sizes, "by_batches", False)

    def __iter__(self) -> "EpochIterator":
        if self.reader.closed:
            raise RuntimeError(
                "run.loader was closed by run.detach(). Use your own DataLoader, or attach again and use the new run.loader."
            )
        self.timing.switch(LOADING)  # workers start
        self.reader.check()  # first, so that an error about a changed setting leaves the pass in progress as it is
        self.stop()
        # Before the order: `begin` ends the previous epoch, which may make passes over this loader, and plans the next one.
        plan, place = self.control.begin()
        self.prepared.begin()
        # Before workers start: if a sampler is refused, no process is left waiting for a batch.
        cursor = None if plan is None else self.order.cursor(plan, place, self.ids, self._samples)
        resumes = place.consumed and self.reader.epoch_start is not None
        candidates = self._resume(cursor, place) if resumes else self._start(cursor)
        iterator = EpochIterator(self, candidates, cursor or NO_ROWS, place)
        # When the iterator is deleted, the run learns that the loop has left the epoch. The reference to the run is weak: a
        # strong one would keep the run alive.
        control = weakref.ref(self.control)
        self.current = weakref.ref(iterator, lambda _: _gone(control()))
        return iterator

    def _start(self, cursor: EpochCursor | None) -> MapStyleBatches | StreamBatches:
        """Begins an epoch with its first batch."""
        self._begin_with(NONE_WAIT)
        return self.reader.start(cursor, self.order.length_of_stream(self._seen))

    def _resume(
        self, cursor: EpochCursor | None, place: OrderPlace
    ) -> MapStyleBatches | StreamBatches:
        """Continues an interrupted epoch."""
        # Read before `resume`, which restores the random states of the beginning of the epoch.
        now = self.reader.random_states()
        candidates = self.reader.resume(
            cursor, place.consumed, self.order.length_of_stream(self._seen)
        )
        # Kept in a variable, because the next line clears it.
        waiting = self._waiting
        self._begin_with(NONE_WAIT)
        if isinstance(candidates, StreamBatches):
            replayed = candidates.skip(place.consumed, self._keep_waiting(waiting))
        else:
            replayed = self.ids.replay()
        # The random states of the training loop are restored. The generators of the loader stay as after drawing the ids again.
        self.reader.put_back(now)
        # An order that begins at the position of the interruption draws no ids again, so there is no checksum to compare.
        checksum = zlib.crc32(replayed.numpy().tobytes(), candidates.first)
        if self.streams and checksum != place.checksum:
            warn(
                f"The stream begins with another batch than when the epoch was interrupted. {RESUMED_STREAM}"
            )
        elif (cursor is None or cursor.stayed is None) and checksum != place.checksum:
            raise RuntimeError(
                f"{type(self.order.sampler).__name__} did not repeat the order of the interrupted epoch. The order must "
                "depend only on the global random states and the `generator` of the sampler. Pass it a generator (to "
                "Trainer: TrainingArguments(data_seed=...)), or resume from a state that was saved between epochs."
            )
        if self.row_buffer is not None:
            if cursor is not None and len(
                waiting[0]
            ):  # rows that were selected and not trained on are read again
                self.row_buffer.put(self.reader.read_again(waiting[0]), *waiting)
            # All processes must call this together, also those that have no rows in the buffer.
            self.row_buffer.count()
        return candidates

    def last_yielded(self, seen: int) -> None:
        """Drops buffered rows after the last batch of an epoch, which had `seen` samples."""
        self._seen = seen
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
        self.row_buffer = (
            None if fills is None else RowBuffer(self.ids.batch_size if fills else None, world)
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns `run.state_dict()`: a script that saves the state of its loader then saves the run."""
        return self.saved.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state as `run.load_state_dict` does."""
        self.saved.load_state_dict(state_dict, restore_rng=True)

    def state_of_pass(self) -> dict[str, Any]:
        """Returns the chosen rows not yielded yet, and the random and sampler states at the start of the epoch."""
        # Rows that came with a loaded state and were not read again yet are in `_waiting`.
        unbuffered = self.row_buffer is None or len(self._waiting[0])
        ids, weights = (
            self._waiting if unbuffered or self.row_buffer is None else self.row_buffer.waiting
        )
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
        self.order.load_state_dict(
            state["shuffle"], active=state["active"], consumed=state["consumed"]
        )

    def _begin_with(self, waiting: tuple[Tensor, Tensor | None]) -> None:
        """Sets the rows that the next pass begins with: those chosen but not yielded when the epoch was interrupted."""
        self._waiting = waiting
        if self.row_buffer is not None:
            self.row_buffer.clear()

    def _keep_waiting(self, waiting: tuple[Tensor, Tensor | None]) -> Callable[[Any, Tensor], None]:
        """Returns a function that moves the rows of `waiting` from a batch that is read again into the buffer."""
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
        self._loader = loader
        self._control = loader.control
        self._candidates = candidates
        self._cursor = cursor
        self._place = place
        self._sizes = loader.ids
        self._left = self._sizes.left_after(place) if place.consumed else None
        self._exhausted = self._done = False
        # An epoch of less than one full batch is kept, because otherwise it would have no step.
        self._keeps_short = not place.consumed

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
            self._yield(batch, ids, None, last=self._left == 0)
            return batch
        # From here on rows are chosen before the loop sees a batch.
        self._fill(row_buffer)
        # As in the plain loop, the last rows of an epoch make a smaller batch, or are dropped with drop_last.
        if not row_buffer.rows or (not row_buffer.full and self._drops_rest):
            self._end()
            raise StopIteration
        batch, ids, weights = row_buffer.take()
        self._keeps_short = False
        self._yield(batch, ids, weights, last=self._leaves_nothing(row_buffer))
        return batch

    def _yield(self, batch: Any, ids: Tensor, weights: Tensor | None, *, last: bool) -> None:
        if self._loader.prepared.in_use:
            self._loader.prepared.yielded(len(ids), last=last)
        # A stream may have more samples than its length says.
        if last and not self._loader.streams:
            self._loader.last_yielded(self._place.consumed)
        if self._cursor.weights is not None:
            # The epoch plan and the batch method each correct for their own selection, so their weights are multiplied.
            planned = self._cursor.weights(ids.numpy())
            if planned is not None:
                weights = planned if weights is None else planned * weights
        self._control.on_batch(batch, ids, self._place, weights, last=last)

    @property
    def _drops_rest(self) -> bool:
        return self._sizes.drop_last and not self._keeps_short

    def _leaves_nothing(self, row_buffer: RowBuffer) -> bool:
        """Whether no further batch follows: neither from rows in the buffer nor from candidates to come, as far as is known."""
        left = self._left
        size = row_buffer.size
        if left is None or size is None or not self._drops_rest:
            return left == 0 and not row_buffer.rows
        chosen = _rows_of(left, self._sizes.batch_size, self._control)
        return (
            row_buffer.rows + chosen < size
            if chosen is not None
            else left == 0 and not row_buffer.full
        )

    def _next_candidate(self) -> tuple[Any, Tensor]:
        timing = self._loader.timing
        on_host = self._loader.device.type == "cpu"
        before = timing.switch(LOADING)
        batch, ids, drawn, stayed, left = self._candidates.take()
        if on_host:
            timing.switch(before)
            batch = self._loader.reader.moved(batch)
        else:  # counted as loading time: in the user's own loop, moving the batch would be a part of loading
            batch = self._loader.reader.moved(batch)
            timing.switch(before)
        # Needed when the batch is yielded: accelerate must learn which batch is the last, and the epoch ends with its step.
        self._left = self._sizes.in_batches(left)
        checksum = self._place.checksum if self._place.consumed else self._candidates.first
        self._place = OrderPlace(drawn, stayed, zlib.crc32(ids.numpy().tobytes(), checksum))
        return batch, ids

    def _fill(self, row_buffer: RowBuffer) -> None:
        """Selects from candidate batches until there is a full batch, or no candidate is left."""
        # A stream is read to its end, because it may have more samples than its length says.
        while not (
            row_buffer.full
            or self._exhausted
            or (not self._loader.streams and self._leaves_nothing(row_buffer))
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
        self._candidates = StreamBatches(iter(()))
        self._loader.last_yielded(self._place.consumed)
        self._loader.prepared.end(whole=True)
        self._control.on_loop_exit(exhausted=True)


def _gone(control: EpochControl | None) -> None:
    """Reports to the run that an iterator was deleted."""
    # None if the run was deleted together with its loader.
    if control is not None:
        control.on_loop_exit(exhausted=False)


def _rows_of(candidates: int, size: int, control: EpochControl) -> int | None:
    """Returns how many of `candidates` rows are chosen, in batches of `size` rows and a smaller last one; None if unknown."""
    full, rest = divmod(candidates, size)
    of_full = control.count(size)
    of_rest = control.count(rest) if rest else 0
    return None if of_full is None or of_rest is None else full * of_full + of_rest
