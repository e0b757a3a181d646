"""The ids of an epoch in the order of the user's sampler, and the batch sampler that yields the chosen ids.

Orders of known samplers are computed as tensors, with the same random numbers. The ids of other samplers are filtered one by
one as they come.
"""

import operator
import reprlib
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Sampler

from thresher.distributed.order import Keeps, Piece
from thresher.loading.held_plan import HeldPlan
from thresher.loading.row_buffer import rows_of
from thresher.loading.samplers import is_seeded_by_epoch
from thresher.loading.settings import checked_batch_size
from thresher.loading.smaller_batches import StepSizes
from thresher.plans import BatchPlan
from thresher.trees import leaves


class OrderPlace(NamedTuple):
    """A position in the order of an epoch, between two batches.

    Attributes:
        consumed: Number of ids taken from the sampler so far; 0 at the beginning.
        stayed: Number of these ids that were chosen.
        checksum: Checksum of the chosen ids; for an IterableDataset, whose ids are positions, also of its first batch.
    """

    consumed: int = 0
    stayed: int = 0
    checksum: int = 0


class EpochScale(NamedTuple):
    """Size of an epoch. Converts a position in its order into progress: (units done, units in the whole epoch).

    A unit is a step of smaller batches, a chosen row or, if the number of chosen rows is unknown, any row of the order.

    Attributes:
        candidates: Number of samples in an epoch of full training; 0 for an IterableDataset of unknown length.
        rows: Number of rows that the epoch trains on; None if unknown.
        sizes: Sizes of smaller batches; None for full batches.

    Example:
        >>> EpochScale(candidates=100, rows=50).at(OrderPlace(consumed=70, stayed=20))
        (20, 50)
        >>> EpochScale(candidates=100).at(OrderPlace(consumed=70, stayed=20))
        (70, 100)
    """

    candidates: int = 0
    rows: int | None = None
    sizes: StepSizes | None = None

    def at(self, place: OrderPlace) -> tuple[int, int]:
        """Returns the progress at a position: (units done, units in the whole epoch, 1 or more).

        Args:
            place: Position in the order of the epoch.
        """
        if self.sizes is not None:
            return self.sizes.step_after(place.stayed), self.sizes.steps
        # A stream may yield more samples than its length says, and an unknown length is 0.
        done, of = (
            (place.consumed, self.candidates) if self.rows is None else (place.stayed, self.rows)
        )
        return min(done, of), max(1, of)

    def samples_at(self, place: OrderPlace, units: tuple[int, int]) -> int:
        """Returns how many samples full training would have trained on up to a position.

        Args:
            place: Position in the order of the epoch.
            units: Progress at this position, as `at` returns it.
        """
        # The number of consumed samples is exact. The length that a stream or sampler states may be wrong.
        if self.rows is None and self.sizes is None:
            return place.consumed
        done, of = units
        return done * self.candidates // of


class EpochControl(Protocol):
    """Interface of a run for its loader: the functions that the loader calls.

    A candidate batch is a batch of the user's loader before a batch method chooses some of its rows.
    """

    def begin(self) -> tuple[HeldPlan | None, OrderPlace]:
        """Begins an epoch, or continues an interrupted epoch.

        Returns:
            The plan of the epoch (its chosen samples), or None for an IterableDataset; and the position in the order at which
            the epoch begins.
        """
        ...

    @property
    def held(self) -> HeldPlan:
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
        self, batch: Any, ids: Tensor, place: OrderPlace, weights: Tensor | None, *, last: bool
    ) -> None:
        """Called before the loop gets a batch, with the ids and weights of its rows, and the position after it."""
        ...

    def on_loop_exit(self, *, exhausted: bool) -> None:
        """Called when the loop over the loader has ended, or its iterator was deleted."""
        ...


class Order(Protocol):
    """The ids of one epoch before samples are chosen, read in pieces."""

    def take(self, k: int) -> Tensor:
        """Returns the next `k` ids, int64; fewer when they run out. Draws random numbers when the user's loader would."""
        ...

    def skip(self, k: int) -> None:
        """Skips the next `k` ids. Draws the same random numbers as `take`."""
        ...


class TensorOrder:
    """Ids in a tensor, which is computed when the first id is needed.

    Args:
        make: Function that returns the ids, shape (N,), int32 or int64.
        finish: Function that is called once when the ids run out. Default: nothing.
    """

    def __init__(
        self, make: Callable[[], Tensor], finish: Callable[[], object] = lambda: None
    ) -> None:
        self._make = make
        self._finish = finish
        self._ids: Tensor | None = None
        self._position = 0

    def take(self, k: int) -> Tensor:
        """Returns the next `k` ids, int64; fewer when they run out."""
        if self._ids is None:
            self._ids = self._make()
        piece = self._ids[self._position : self._position + k]
        self._position += len(piece)
        if len(piece) < k:
            # As in the sampler, only an order that is read to its end draws the second permutation.
            self._finish()
            self._finish = lambda: None
        return piece.long()

    def skip(self, k: int) -> None:
        """Skips the next `k` ids. Draws the same random numbers as `take`."""
        self.take(k)


class PieceOrder:
    """Ids that can be computed between any two positions.

    Args:
        piece: Function of two positions that returns the ids between them; fewer when they run out.
    """

    def __init__(self, piece: Piece) -> None:
        self._piece = piece
        self._position = 0

    def take(self, k: int) -> Tensor:
        """Returns the next `k` ids, int64; fewer when they run out."""
        ids = torch.from_numpy(self._piece(self._position, self._position + k))
        self._position += len(ids)
        return ids

    def skip(self, k: int) -> None:
        """Skips the next `k` ids."""
        self._position += k


def sequential(n: int) -> PieceOrder:
    """Returns the ids 0, 1, 2, ... up to n, as SequentialSampler yields them."""
    return PieceOrder(lambda begin, end: np.arange(min(begin, n), min(end, n)))


def shuffled(n: int, generator: torch.Generator | None) -> TensorOrder:
    """Returns the order that RandomSampler without replacement yields. Draws the same random numbers.

    RandomSampler draws a second permutation when its ids run out. This function does the same if the user passed a generator,
    so the generator has the same state afterward.
    """
    # torch.randperm draws the same permutation for both, and int32 takes half of the memory.
    small = torch.int32 if n < 2**31 else torch.int64

    def permute() -> Tensor:
        # RandomSampler draws the seed of its permutation from the global state, and only when its first id is asked for.
        source = generator
        if source is None:
            source = torch.Generator()
            source.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        return torch.randperm(n, generator=source, dtype=small)

    # Without a generator of the user, RandomSampler creates a new one each epoch: its second permutation has no effect.
    if generator is None:
        return TensorOrder(permute)
    return TensorOrder(permute, finish=permute)


class SamplerOrder:
    """The ids of any other sampler. Takes no more ids from it than the user's loader would have taken."""

    def __init__(self, sampler: Any, n: int) -> None:
        self._sampler = sampler
        self._n = n
        self._ids: Iterator[int] | None = None

    def take(self, k: int) -> Tensor:
        """Returns the next `k` ids, int64; fewer when they run out."""
        if self._ids is None:
            self._ids = iter(self._sampler)
        return as_ids(islice(self._ids, k), self._sampler, self._n)

    def skip(self, k: int) -> None:
        """Skips the next `k` ids. Draws the same random numbers as `take`."""
        self.take(k)


def as_ids(numbers: Iterable[Any], sampler: Any, n: int) -> Tensor:
    """Converts ids that a sampler yields to a tensor, int64.

    Args:
        numbers: The ids.
        sampler: The sampler, for error messages.
        n: Number of samples of the dataset.

    Raises:
        TypeError: An id is not a whole number.
        IndexError: An id is outside the dataset.
    """
    values: list[Any] = (
        numbers.tolist() if isinstance(numbers, Tensor | np.ndarray) else list(numbers)
    )
    try:
        # operator.index takes integers of NumPy and tensors as well, and refuses floats, which int() would cut off.
        ids = torch.tensor([*map(operator.index, values)], dtype=torch.int64)
    except TypeError:
        raise TypeError(
            f"`loader` has a sampler, {type(sampler).__name__}, that yields {reprlib.repr(values[0])}, of type "
            f"{type(values[0]).__name__}. It must yield ids: whole numbers, the positions of samples in the dataset. Other "
            "properties of a sample, such as its size, must come from the dataset or the collate_fn."
        ) from None
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= n):
        raise IndexError(
            f"the sampler yielded an id outside the dataset's [0, {n}): {reprlib.repr(ids.tolist())}"
        )
    return ids


def generators_of(sampler: Any, loader: Any) -> list[torch.Generator]:
    """Returns the generators of a loader and its sampler without duplicates; omits a generator that the sampler reseeds itself.

    Args:
        sampler: Sampler of the loader.
        loader: The user's loader.
    """
    of_sampler = None if is_seeded_by_epoch(sampler) else getattr(sampler, "generator", None)
    candidates = [of_sampler, loader.generator]
    generators = [generator for generator in candidates if isinstance(generator, torch.Generator)]
    return generators[:1] if len(generators) == 2 and generators[0] is generators[1] else generators


@dataclass(frozen=True, kw_only=True, eq=False)
class EpochCursor:
    """What the loader needs to read one epoch: an order, the choice of its samples, and their number if it is known.

    If the number is known, the loader knows which batch is the last without drawing ids early.

    Attributes:
        order: Ids before samples are chosen.
        keeps: Function from ids to the mask of chosen ids; None if all are chosen.
        stayed: Number of chosen ids before the position of an interrupted epoch, if the order begins at this position; None if
            it begins with the first id.
        weights: Function from ids to the weights of these samples; None if all are 1.
        staying: Number of chosen ids in the whole epoch; None if unknown.
        drawn: Number of ids of the whole order; None if unknown.
        sizes: Sizes of smaller batches; None for full batches.
        least: Least number of rows of a last batch; a smaller last batch is left out.
        drops_last: Whether a last batch that is not full is left out.
    """

    order: Order
    keeps: Keeps | None = None
    stayed: int | None = None
    weights: Callable[[NDArray[np.int64]], Tensor | None] | None = None
    staying: int | None = None
    drawn: int | None = None
    sizes: StepSizes | None = None
    least: int = 1
    drops_last: bool = False

    def left(self, stayed: int, position: int) -> int | None:
        """Returns the number of chosen ids still to come; None if unknown.

        Args:
            stayed: Number of chosen ids so far.
            position: Number of ids of the order that have been drawn so far.
        """
        if self.staying is not None:
            return max(0, self.staying - stayed)
        return 0 if self.drawn is not None and position >= self.drawn else None


# A lookup has a fixed cost, so many ids are looked up at once rather than those of one batch.
LOOKED_UP = 2**13
"""Number of ids that are looked up in the plan at once, unless a batch has more."""


class IdBatchSampler(Sampler[list[int]]):
    """The batch sampler inside the rebuilt loader. It stores the ids of each batch until the training loop gets the batch.

    Args:
        sizes: Object with the attributes `batch_size` and `drop_last` of the user's loader. The user may change them.
        least: Least number of rows that the model trains on: 2 if it has BatchNorm. Default: 1.
        as_tensors: Whether the dataset takes the ids of a batch as a tensor. Default: False, as a list.
    """

    def __init__(self, sizes: Any, least: int = 1, *, as_tensors: bool = False) -> None:
        self._sizes = sizes
        self.least = least
        self._as_tensors = as_tensors
        self.size = checked_batch_size(sizes)
        """Batch size when the iteration began."""
        self.on_the_way: deque[tuple[Tensor, int, int, int | None]] = deque()
        """For each batch that was not yielded yet: its ids, the numbers of ids drawn and chosen up to its end, and the number
        of chosen ids that follow (None if unknown)."""
        self.served = 0
        self._batches: Iterator[list[int]] = iter(())
        self._cursor = EpochCursor(order=sequential(0))
        self._consumed = 0
        self._stayed = 0
        self.drops_last = sizes.drop_last
        """Whether a last batch that is not full is dropped in this iteration."""
        self._pieces: Iterator[tuple[Tensor, int]] = iter(())

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches

    @property
    def batch_size(self) -> int:
        """Batch size of the user's loader, as it is now."""
        return checked_batch_size(self._sizes)

    @property
    def drop_last(self) -> bool:
        """Whether the user's loader drops a last batch that is not full, as it is now."""
        return self._sizes.drop_last

    def least_of(self, plan: HeldPlan) -> int:
        """Returns the least number of rows of a last batch; a smaller one is left out.

        If the plan skips samples, an epoch may end with a batch of one row, on which BatchNorm cannot train. The result is 1 if
        the plan keeps all samples, as in full training, or only one sample, so that the model raises its own error.

        Args:
            plan: The plan of an epoch.
        """
        return 1 if plan.everything or plan.rows < self.least else min(self.least, self.batch_size)

    def served_of(self, plan: HeldPlan, rows: int) -> int:
        """Returns how many rows an epoch yields, without those of an incomplete last batch that is left out.

        Args:
            plan: The plan of the epoch.
            rows: Number of rows that the plan keeps.
        """
        rest = rows % self.batch_size
        return rows - rest if self.drops(plan, rows) or rest < self.least_of(plan) else rows

    def drops(self, plan: HeldPlan, rows: int | None) -> bool:
        """Returns whether an epoch leaves out a last batch that is not full.

        With `drop_last`, a plan of less than one batch would leave an epoch without a step: such a batch is kept.

        Args:
            plan: The plan of the epoch.
            rows: Number of rows that the plan keeps; None if unknown.
        """
        short = rows is not None and rows < self.batch_size <= plan.n and not plan.everything
        return self.drop_last and not short

    def serve(self, cursor: EpochCursor, *, consumed: int = 0) -> None:
        """Sets the epoch that the next iteration yields.

        Args:
            cursor: The rows of the epoch.
            consumed: Number of ids of the order that an interrupted epoch has consumed already. If the order begins with its
                first id, these ids are drawn again.
        """
        # Drops the ids of batches that an earlier pass has asked for and never yielded.
        self.on_the_way.clear()
        self._cursor = cursor
        self._stayed = cursor.stayed or 0
        self._consumed = consumed if cursor.stayed is None else 0
        self.replayed = torch.empty(0, dtype=torch.int64)
        self.size = self.batch_size
        self.drops_last = cursor.drops_last
        # Generators: no id is drawn before the first batch is asked for, which is when the plain loader draws.
        self._pieces = (
            self._kept_ids(consumed, repeat(self.size))
            if cursor.sizes is None
            else self._of_steps(cursor.sizes, consumed)
        )
        self._batches = self._iterate()

    def left_after(self, place: OrderPlace) -> int | None:
        """Returns the number of ids that are yielded after a position; None if unknown."""
        return self.in_batches(self._cursor.left(place.stayed, place.consumed))

    def in_batches(self, ids: int | None) -> int | None:
        """Returns how many of `ids` further ids are yielded: those of an incomplete last batch may be left out."""
        if ids is None or self._cursor.sizes is not None:
            return ids
        rest = ids % self.size
        return ids - rest if self.drops_last or rest < self._cursor.least else ids

    def replay(self) -> Tensor:
        """Draws the ids that an interrupted epoch has consumed, at the first call only. Returns the chosen ones among them."""
        consumed = self._consumed
        self._consumed = 0
        keeps = self._cursor.keeps
        if consumed:
            ids = self._cursor.order.take(consumed)
            self.replayed = ids if keeps is None else ids[torch.from_numpy(keeps(ids.numpy()))]
        return self.replayed

    def _iterate(self) -> Iterator[Any]:
        stayed = self._stayed + len(self.replay())
        for ids, position in self._pieces:
            # Incomplete batches are dropped here, not by the sampler, because the plan changes the number of ids.
            if len(ids) < (self.size if self.drops_last else self._cursor.least):
                return
            stayed += len(ids)
            # Workers ask for batches ahead of time, so ids are stored until their batch is yielded.
            self.on_the_way.append((ids, position, stayed, self._cursor.left(stayed, position)))
            self.served += 1
            yield ids if self._as_tensors else ids.tolist()

    def _of_steps(self, sizes: StepSizes, position: int) -> Iterator[tuple[Tensor, int]]:
        """Yields the ids of each step of smaller batches, and the number of ids drawn up to its end."""
        first = sizes.step_after(self._stayed + len(self.replayed))
        pieces = islice(self._kept_ids(position, sizes.parts(first)), max(0, sizes.steps - first))
        for ids, position in pieces:
            yield ids, position
        # Full training draws the rest of the order, and asks for one more id to see its end. Doing the same keeps the order of
        # later epochs as in full training.
        self._cursor.order.skip(max(0, (self._cursor.drawn or 0) - position) + 1)

    def _kept_ids(self, drawn: int, sizes: Iterator[int]) -> Iterator[tuple[Tensor, int]]:
        """Yields the next ids that the plan keeps, in pieces, and the number of ids drawn up to the end of each piece."""
        keeps = self._cursor.keeps
        return self._all(drawn, sizes) if keeps is None else self._staying(drawn, keeps, sizes)

    def _all(self, drawn: int, sizes: Iterator[int]) -> Iterator[tuple[Tensor, int]]:
        for size in sizes:
            ids = self._cursor.order.take(size)
            drawn += len(ids)
            if len(ids):
                yield ids, drawn
            if len(ids) < size:
                return

    def _staying(
        self, drawn: int, keeps: Keeps, sizes: Iterator[int]
    ) -> Iterator[tuple[Tensor, int]]:
        order = self._cursor.order
        exhausted = False
        kept = places = torch.empty(0, dtype=torch.int64)
        for size in sizes:
            while len(kept) < size and not exhausted:
                # From a sampler of unknown order, no id is taken early. Known orders are looked up many ids at a time.
                unknown = isinstance(order, SamplerOrder)
                wanted = max(size - len(kept), 0 if unknown else LOOKED_UP)
                piece = order.take(wanted)
                exhausted = len(piece) < wanted
                stays = torch.from_numpy(np.flatnonzero(keeps(piece.numpy())))
                # Positions of the kept ids in the order: an interrupted epoch continues after the last id that was yielded, not
                # after the last one that was looked up.
                kept = torch.cat([kept, piece[stays]])
                places = torch.cat([places, stays + drawn])
                drawn += len(piece)
            if len(kept) < size:
                break
            ids = kept[:size]
            kept = kept[size:]
            last = int(places[size - 1])
            places = places[size:]
            yield ids, last + 1
        if len(kept):
            yield kept, drawn


class MapStyleBatches:
    """Batches of a map-style dataset before rows are chosen, with the ids that the batch sampler drew.

    Args:
        batches: Batches of the rebuilt loader.
        ids: Batch sampler of that loader.
        ahead: Whether workers draw the ids of batches before these are yielded.
    """

    first = 0
    """Start value for the checksum of the ids."""

    def __init__(self, batches: Iterator[Any], ids: IdBatchSampler, *, ahead: bool) -> None:
        self._batches = batches
        self._ids = ids
        self._ahead = ahead

    def take(self) -> tuple[Any, Tensor, int, int, int | None]:
        """Returns the next batch.

        Returns:
            The batch; its ids; the number of ids drawn so far; the number of chosen ids so far; and the number of chosen ids
            still to come, or None if unknown.

        Raises:
            StopIteration: There is no further batch.
        """
        # Without workers, ids are drawn only when their batch is asked for: any that are left belong to a batch that failed.
        if not self._ahead:
            self._ids.on_the_way.clear()
        try:
            batch = next(self._batches)
        # StopIteration is an Exception, but means that the loader is at its end, not that a batch failed.
        except StopIteration:
            raise
        except Exception:
            # The ids of the failed batch were drawn. Without this, the next batch would get them.
            if self._ids.on_the_way:
                self._ids.on_the_way.popleft()
            raise
        return batch, *self._ids.on_the_way.popleft()


class StreamBatches:
    """Batches of an IterableDataset; the id of a sample is its position in this epoch.

    Args:
        batches: Batches of the loader.
        length: Expected number of samples of the dataset, which may be wrong; None if unknown.
    """

    def __init__(self, batches: Iterator[Any], length: int | None = None) -> None:
        self._batches = batches
        self._place = 0
        self._length = length
        self.first = 0
        """Checksum of the first batch, the start value for the checksum of the ids."""

    def take(self) -> tuple[Any, Tensor, int, int, int | None]:
        """Returns the next batch.

        Returns:
            The batch; its ids; the number of samples read so far, twice, as the numbers of drawn and of chosen ids; and the
            expected number of samples still to come, or None if unknown.

        Raises:
            StopIteration: The dataset has no more samples.
        """
        batch = next(self._batches)
        begin = self._place
        self._place = self._place + rows_of(batch)
        self.first = self.first if begin else _checksum_of(batch)
        # If a stream has yielded more samples than its length, nobody knows how many follow.
        left = (
            None
            if self._length is None or self._place > self._length
            else self._length - self._place
        )
        return batch, torch.arange(begin, self._place), self._place, self._place, left

    def skip(self, consumed: int, look: Callable[[Any, Tensor], None]) -> Tensor:
        """Reads the samples that an interrupted epoch has consumed, because a stream can only be read from its beginning.

        Args:
            consumed: Number of samples to read.
            look: Function that is called with every batch and its ids, for rows that are still needed.

        Returns:
            The ids, shape (consumed,), int64.

        Raises:
            RuntimeError: The stream has fewer than `consumed` samples.
        """
        while self._place < consumed:
            try:
                batch, ids, *_ = self.take()
            except StopIteration:
                raise RuntimeError(
                    f"The run resumes after {consumed} samples of an epoch, and the stream ends after {self._place}. "
                    f"{RESUMED_STREAM}"
                ) from None
            look(batch, ids)
        return torch.arange(self._place)


RESUMED_STREAM = (
    "A resumed run reads the stream from the beginning of the interrupted epoch. If the stream depends on the epoch, set it "
    "before the loop (such as stream.set_epoch(run.epoch)). Do not load a position within the epoch into the stream."
)


def _checksum_of(batch: Any) -> int:
    """Returns a checksum of the integer tensors of a batch on the host, such as labels and tokens; 1 if it has none."""
    # Floats are left out: when a stream is read again, augmentation may change the images, but not the labels.
    checksum = 1
    for leaf in leaves(batch):
        if (
            leaf.dtype in (torch.int64, torch.int32)
            and leaf.device.type == "cpu"
            and leaf.layout is torch.strided
        ):
            checksum = zlib.crc32(
                leaf.flatten().contiguous().view(torch.uint8).numpy().data, checksum
            )
    return checksum


def check_begins(stream: Any) -> None:
    """Checks, when a run resumes, that an IterableDataset of Hugging Face has not loaded a state of its own, too.

    Args:
        stream: Dataset of the loader. The run will skip what the interrupted epoch had read.

    Raises:
        ValueError: The dataset has loaded a state.
    """
    if getattr(stream, "_starting_state_dict", None) is not None:
        raise ValueError(
            f"The run resumes in the middle of an epoch, and its {type(stream).__name__} has loaded a state of its own, so "
            "samples would be skipped twice. Load only the state of the run, which reads the stream from its "
            "beginning."
        )
