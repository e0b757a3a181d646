"""The ids of an epoch in the order of the user's sampler, and the batch sampler that serves those that the plan keeps.

Orders that are known come in tensors, with the same random numbers drawn; the ids of any other sampler are filtered as they
come.
"""

import operator
import reprlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, repeat
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Sampler

from thresher.distributed.order import Keeps, Piece
from thresher.distributed.plan import HeldPlan
from thresher.loading.row_buffer import rows_of
from thresher.loading.samplers import is_seeded_by_epoch
from thresher.loading.settings import checked_batch_size
from thresher.loading.smaller_batches import Deal
from thresher.plans import BatchPlan


class OrderPlace(NamedTuple):
    """A place in the order of an epoch, between two batches.

    Attributes:
        consumed: Number of ids of the order that come before it; 0 at the beginning.
        stayed: Number of these that the plan let stay.
        checksum: Checksum of those that stayed.
    """

    consumed: int = 0
    stayed: int = 0
    checksum: int = 0


class EpochStart(NamedTuple):
    """Where an epoch begins.

    Attributes:
        plan: The plan of the epoch; None for a stream.
        place: Where in its order the epoch begins; an interrupted epoch goes on where it stopped.
    """

    plan: HeldPlan | None
    place: OrderPlace


class EpochControl(Protocol):
    """What a loader asks of the run that it belongs to, and reports to it."""

    def begin(self) -> EpochStart:
        """Begins an epoch, or goes on with an interrupted one."""
        ...

    @property
    def held(self) -> HeldPlan:
        """Returns the plan of the epoch in progress or, between epochs, of the one that comes next."""
        ...

    def choose(self, batch: Any, ids: Tensor) -> BatchPlan:
        """Returns the rows of a candidate batch that the loop sees."""
        ...

    def count(self, n: int) -> int | None:
        """Returns how many rows of a candidate batch of n stay; None where that is not known."""
        ...

    def yielded(self, batch: Any, ids: Tensor, place: OrderPlace, weights: Tensor | None, *, last: bool) -> None:
        """Notes a batch on the device, the ids of its rows, the place after it, weights, and whether it is the last one."""
        ...

    def left(self, *, exhausted: bool) -> None:
        """Notes that the loop has left the pass: all batches were asked for, or its iterator is gone."""
        ...


class Order(Protocol):
    """The ids of one epoch before the plan is applied, in pieces."""

    def take(self, k: int) -> Tensor:
        """Returns the next `k` ids, int64; fewer when they run out. Random numbers are drawn when the user's loader would."""
        ...

    def skip(self, k: int) -> None:
        """Leaves out the next `k` ids, with the same random numbers drawn."""
        ...


class SequentialOrder:
    """The ids 0, 1, 2, ... as SequentialSampler yields them."""

    def __init__(self, n: int) -> None:
        self._n, self._position = n, 0

    def take(self, k: int) -> Tensor:
        """Returns the next `k` ids, int64; fewer when they run out."""
        begin = self._position
        self.skip(k)
        return torch.arange(begin, self._position)

    def skip(self, k: int) -> None:
        """Leaves out the next `k` ids."""
        self._position = min(self._position + k, self._n)


class TensorOrder:
    """Ids in a tensor, which is made when the first of them is needed.

    Args:
        make: Function that returns the ids, shape (N,), int32 or int64.
        finish: Function that is called once when the ids run out. Default: nothing.
    """

    def __init__(self, make: Callable[[], Tensor], finish: Callable[[], object] = lambda: None) -> None:
        self._make, self._finish = make, finish
        self._ids: Tensor | None = None
        self._position = 0

    def take(self, k: int) -> Tensor:
        """Returns the next `k` ids, int64; fewer when they run out."""
        if self._ids is None:
            self._ids = self._make()
        piece = self._ids[self._position : self._position + k]
        self._position += len(piece)
        if len(piece) < k:
            self._finish()
            self._finish = lambda: None
        return piece.long()

    def skip(self, k: int) -> None:
        """Leaves out the next `k` ids, with the same random numbers drawn."""
        self.take(k)


class PieceOrder:
    """Ids that can be made between any two places.

    Args:
        piece: Function of two places, from one to another, that returns the ids between them; fewer where they end.
    """

    def __init__(self, piece: Piece) -> None:
        self._piece, self._position = piece, 0

    def take(self, k: int) -> Tensor:
        """Returns the next `k` ids, int64; fewer when they run out."""
        ids = torch.from_numpy(self._piece(self._position, self._position + k))
        self._position += len(ids)
        return ids

    def skip(self, k: int) -> None:
        """Leaves out the next `k` ids."""
        self._position += k


def shuffled(n: int, generator: torch.Generator | None) -> TensorOrder:
    """Returns the order that RandomSampler without replacement yields, with the same draws.

    RandomSampler draws a second permutation when it runs out; a generator of the user must be advanced by that, too.
    """
    small = torch.int32 if n < 2**31 else torch.int64

    def permute() -> Tensor:
        own = generator
        if own is None:
            own = torch.Generator()
            own.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        return torch.randperm(n, generator=own, dtype=small)

    if generator is None:
        return TensorOrder(permute)
    return TensorOrder(permute, finish=permute)


class SamplerOrder:
    """The ids of any other sampler, from which no more ids are taken than the user's own loader would have taken."""

    def __init__(self, sampler: Any, n: int) -> None:
        self._sampler, self._n = sampler, n
        self._ids: Iterator[int] | None = None

    def take(self, k: int) -> Tensor:
        """Returns the next `k` ids, int64; fewer when they run out."""
        if self._ids is None:
            self._ids = iter(self._sampler)
        return as_ids(islice(self._ids, k), self._sampler, self._n)

    def skip(self, k: int) -> None:
        """Leaves out the next `k` ids, with the same random numbers drawn."""
        self.take(k)


def as_ids(numbers: Iterable[Any], sampler: Any, n: int) -> Tensor:
    """Returns ids that a sampler yields as a tensor, int64.

    Args:
        numbers: The ids.
        sampler: The sampler, for messages.
        n: Number of samples of the dataset.

    Raises:
        TypeError: One of them is not a whole number.
        IndexError: One of them is outside the dataset.
    """
    found: list[Any] = numbers.tolist() if isinstance(numbers, Tensor | np.ndarray) else list(numbers)
    try:
        ids = torch.tensor([*map(operator.index, found)], dtype=torch.int64)
    except TypeError:
        raise TypeError(
            f"`loader` has a sampler, {type(sampler).__name__}, that yields {reprlib.repr(found[0])}, of type "
            f"{type(found[0]).__name__}. It must yield ids: whole numbers, the positions of samples in the dataset. Let the "
            "dataset or the collate_fn decide what else a sample depends on, such as its size."
        ) from None
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= n):
        raise IndexError(f"the sampler yielded an id outside the dataset's [0, {n}): {reprlib.repr(ids.tolist())}")
    return ids


def generators_of(sampler: Any, loader: Any) -> list[torch.Generator]:
    """Returns the generators that a loader and its sampler draw from and do not seed themselves, each once.

    Args:
        sampler: Sampler of the loader.
        loader: The user's loader.
    """
    of_sampler = None if is_seeded_by_epoch(sampler) else getattr(sampler, "generator", None)
    found = [of_sampler, loader.generator]
    own = [generator for generator in found if isinstance(generator, torch.Generator)]
    return own[:1] if len(own) == 2 and own[0] is own[1] else own


class KnownEnd(NamedTuple):
    """What is known of the end of an order before it is reached, so that no id has to be drawn early.

    Attributes:
        staying: Number of ids that the plan lets stay; None where it is not known.
        drawn: Number of ids of the whole order; None where it is not known.
    """

    staying: int | None = None
    drawn: int | None = None

    def left(self, stayed: int, position: int) -> int | None:
        """Returns the number of ids still to come; None where it is not known.

        Args:
            stayed: Number of ids that have stayed so far.
            position: Number of ids of the order that have been drawn so far.
        """
        if self.staying is not None:
            return max(0, self.staying - stayed)
        return 0 if self.drawn is not None and position >= self.drawn else None


UNKNOWN_END = KnownEnd()
"""The epoch's end is not known in advance."""

LOOKED_UP = 2**13
"""Number of ids that are looked up in the plan at once, unless a batch has more."""


class IdBatchSampler(Sampler[list[int]]):
    """The batch sampler inside the rebuilt loader; it remembers the ids of every batch that is on its way.

    Args:
        sizes: Batch size and `drop_last` of the user's loader, which may change, as attributes of an object.
    """

    def __init__(self, sizes: Any) -> None:
        self._sizes = sizes
        self.size = checked_batch_size(sizes)
        """Batch size when the iteration began."""
        self.on_the_way: deque[tuple[Tensor, int, int, int | None]] = deque()
        """Ids of batches, how many ids of the order were drawn and had stayed by then, and how many come; None: not known."""
        self.served = 0
        self._batches: Iterator[list[int]] = iter(())
        self._order: Order = SequentialOrder(0)
        self._keeps: Keeps | None = None
        self._consumed, self._stayed = 0, 0
        self.drops_last = sizes.drop_last
        """Whether a last batch that is not full is dropped in this iteration."""
        self._found: Iterator[tuple[Tensor, int]] = iter(())

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

    def serve(
        self,
        order: Order,
        keeps: Keeps | None,
        *,
        consumed: int = 0,
        stayed: int | None = None,
        drop_last: bool | None = None,
        length: KnownEnd = UNKNOWN_END,
        deal: Deal | None = None,
    ) -> None:
        """Prepares the next iteration.

        Args:
            order: Ids before the plan is applied.
            keeps: Function of ids that returns which of them stay; None where all do.
            consumed: Number of ids of the order that an interrupted epoch has consumed already.
            stayed: Number of these that stayed, where the order begins after them. Default: they are drawn again.
            drop_last: Whether a last batch that is not full is dropped; None: as the user's loader does.
            length: Known end of the order.
            deal: How smaller batches are made; None for full batches.
        """
        self.on_the_way.clear()
        drawn = 0 if stayed is None else consumed
        self._order, self._keeps, self._consumed, self._stayed = order, keeps, consumed - drawn, stayed or 0
        self.replayed = torch.empty(0, dtype=torch.int64)
        self._length, self.size = length, self.batch_size
        self.drops_last = deal is None and (self.drop_last if drop_last is None else drop_last)
        self._found = self._full(consumed) if deal is None else self._dealt(deal, drawn)
        self._deal = deal
        self._batches = self._iterate()

    def left_after(self, place: OrderPlace) -> int | None:
        """Returns the number of ids that come in batches after a place of the order that is served; None: not known."""
        return self.in_batches(self._length.left(place.stayed, place.consumed))

    def in_batches(self, ids: int | None) -> int | None:
        """Returns how many of so many further ids come in batches, where a last batch that is not full is dropped."""
        return ids - ids % self.size if ids is not None and self.drops_last else ids

    def replay(self) -> Tensor:
        """Draws the ids that an interrupted epoch has consumed, once, and returns those that were trained on."""
        consumed, self._consumed = self._consumed, 0
        if consumed and self._deal is None:
            ids = self._order.take(consumed)
            self.replayed = ids if self._keeps is None else ids[torch.from_numpy(self._keeps(ids.numpy()))]
        elif consumed:
            batches, position = [], 0
            while position < consumed:
                ids, position = next(self._found)
                batches.append(ids)
            self.replayed = torch.cat(batches)
        return self.replayed

    def _iterate(self) -> Iterator[list[int]]:
        stayed = self._stayed + len(self.replay())
        for ids, position in self._found:
            if self.drops_last and len(ids) < self.size:
                return
            stayed += len(ids)
            self.on_the_way.append((ids, position, stayed, self._length.left(stayed, position)))
            self.served += 1
            yield ids.tolist()

    def _full(self, drawn: int) -> Iterator[tuple[Tensor, int]]:
        return self._pieces(drawn, repeat(self.size))

    def _dealt(self, deal: Deal, position: int) -> Iterator[tuple[Tensor, int]]:
        """Yields the rows of each step, and how many ids were drawn by then."""
        sizes = deal.sizes
        first = sizes.step_after(self._stayed, deal.rows)
        candidates = self._pieces(position, sizes.parts(deal.candidates, first))
        for rows, (ids, position) in zip(sizes.parts(deal.rows, first), candidates, strict=False):
            yield deal.draw(ids, rows), position
        # Later epochs have the order that they have in full training, which draws the rest and one more.
        self._order.skip(max(0, (self._length.drawn or 0) - position) + 1)

    def _pieces(self, drawn: int, sizes: Iterator[int]) -> Iterator[tuple[Tensor, int]]:
        """Yields the next ids that the plan keeps, in pieces, and how many ids were drawn by then."""
        return self._all(drawn, sizes) if self._keeps is None else self._staying(drawn, self._keeps, sizes)

    def _all(self, drawn: int, sizes: Iterator[int]) -> Iterator[tuple[Tensor, int]]:
        for size in sizes:
            ids = self._order.take(size)
            drawn += len(ids)
            if len(ids):
                yield ids, drawn
            if len(ids) < size:
                return

    def _staying(self, drawn: int, keeps: Keeps, sizes: Iterator[int]) -> Iterator[tuple[Tensor, int]]:
        found = places = torch.empty(0, dtype=torch.int64)
        exhausted = False
        for size in sizes:
            while len(found) < size and not exhausted:
                # No id is taken early from a sampler of the user; known orders are looked up in the plan many at a time.
                unknown = isinstance(self._order, SamplerOrder)
                wanted = max(size - len(found), 0 if unknown else LOOKED_UP)
                piece = self._order.take(wanted)
                exhausted = len(piece) < wanted
                stays = torch.from_numpy(np.flatnonzero(keeps(piece.numpy())))
                found, places = torch.cat([found, piece[stays]]), torch.cat([places, stays + drawn])
                drawn += len(piece)
            if len(found) < size:
                break
            ids, found = found[:size], found[size:]
            last, places = int(places[size - 1]), places[size:]
            yield ids, last + 1
        if len(found):
            yield found, drawn


class MapStyleBatches:
    """Candidate batches of a map-style dataset, with the ids that the batch sampler drew.

    Args:
        batches: Batches of the rebuilt loader.
        ids: Batch sampler of that loader.
        ahead: Whether workers draw the ids of batches before these are yielded.
    """

    def __init__(self, batches: Iterator[Any], ids: IdBatchSampler, *, ahead: bool) -> None:
        self._batches, self._ids, self._ahead = batches, ids, ahead

    def take(self) -> tuple[Any, Tensor, int, int, int | None]:
        """Returns the next batch, its ids, how many ids were drawn and had stayed by then, and how many come; None: not known.

        Raises:
            StopIteration: There is no further batch.
        """
        if not self._ahead:
            self._ids.on_the_way.clear()
        try:
            batch = next(self._batches)
        except StopIteration:
            raise
        except Exception:
            # The ids of the failed batch were drawn; they must not be taken for those of the next batch.
            if self._ids.on_the_way:
                self._ids.on_the_way.popleft()
            raise
        return batch, *self._ids.on_the_way.popleft()


class StreamBatches:
    """Batches of an iterable dataset; the id of a sample is its place in the stream of this epoch.

    Args:
        batches: Batches of the loader.
        length: Number of samples of the stream; None where it is not known.
    """

    def __init__(self, batches: Iterator[Any], length: int | None = None) -> None:
        self._batches, self._place, self._length = batches, 0, length

    def take(self) -> tuple[Any, Tensor, int, int, int | None]:
        """Returns the next batch, its places, the place after it twice, and how many samples come; None: not known.

        Raises:
            StopIteration: The stream is over.
        """
        batch = next(self._batches)
        begin, self._place = self._place, self._place + rows_of(batch)
        left = None if self._length is None else max(0, self._length - self._place)
        return batch, torch.arange(begin, self._place), self._place, self._place, left

    def skip(self, consumed: int, look: Callable[[Any, Tensor], None]) -> Tensor:
        """Reads again what an interrupted epoch consumed.

        Args:
            consumed: Number of samples to read.
            look: Function that is called with every batch and its ids.

        Returns:
            The ids, shape (consumed,), int64.
        """
        while self._place < consumed:
            batch, ids, *_ = self.take()
            look(batch, ids)
        return torch.arange(self._place)


def check_begins(stream: Any) -> None:
    """Refuses a stream of Hugging Face `datasets` that a state of its own has put into the middle, where a run is resumed.

    Args:
        stream: Dataset of the loader; the run is about to skip what the interrupted epoch had read of it.

    Raises:
        ValueError: The stream has loaded a state.
    """
    if getattr(stream, "_starting_state_dict", None) is not None:
        raise ValueError(
            f"The run goes on in the middle of an epoch, and so does its {type(stream).__name__}, which has loaded a state of "
            "its own: samples would be skipped twice. Load the state of the run alone, which reads the stream from its "
            "beginning."
        )


class Weights(Protocol):
    """The weights that the plan of an epoch gives to samples."""

    def weights(self, ids: NDArray[np.int64]) -> Tensor | None:
        """Returns the weights of samples of the epoch, shape (k,), float32; None where all are 1."""
        ...


class EpochRows(NamedTuple):
    """The rows of an epoch.

    Attributes:
        order: Ids of the epoch.
        keeps: Function of ids that returns which of them stay; None where all do.
        stayed: Number of ids that stayed before the place that an interrupted epoch has reached, where the order begins at the
            place; None where it begins with the first id.
        weights: Weights of the samples.
    """

    order: Order
    keeps: Keeps | None
    stayed: int | None
    weights: Weights


class EpochOrders(Protocol):
    """The orders of the user's sampler; `UserOrder` in one process, `SharedOrder` in several."""

    n: int
    sampler: Any
    streams: bool

    @property
    def is_free(self) -> bool:
        """Whether the order is a plain shuffle, which a plan with an order of its own may replace."""
        ...

    @property
    def yields_once(self) -> bool:
        """Whether no sample can come twice in an epoch."""
        ...

    @property
    def sizes(self) -> Any:
        """Batch size and `drop_last`, as attributes of an object."""
        ...

    def ids_of_sampler(self) -> Tensor | None:
        """Returns the ids that the sampler can yield, shape (K,), int64, ascending; None where these are all ids."""
        ...

    def generators(self) -> list[torch.Generator]:
        """Returns the generators that the loader draws from."""
        ...

    def candidates(self, seen: int) -> int:
        """Returns the number of ids per epoch of full training; for a stream without a length `seen`."""
        ...

    def samples_of(self, plan: HeldPlan) -> int:
        """Returns the number of samples in an epoch that follows a plan; it raises TypeError where that is not known."""
        ...

    def length(self, plan: HeldPlan | None) -> KnownEnd:
        """Returns what is known of the end of an epoch before it is reached."""
        ...

    def deal(self, plan: HeldPlan, sizes: IdBatchSampler, everything: int | None, seen: int, *, least: int = 1) -> Deal | None:
        """Returns how the smaller batches of a plan are made; None where an epoch has full batches."""
        ...

    def of_epoch(self, plan: HeldPlan, place: OrderPlace, sizes: IdBatchSampler, everything: int | None) -> EpochRows:
        """Returns the rows of an epoch."""
        ...

    def consumed_at(self, drawn: int, stayed: int, deal: Deal | None) -> int:
        """Returns how many ids of full training were consumed at a place of an epoch's order."""
        ...

    def state_dict(self) -> dict[str, Any] | None:
        """Returns what the orders of the sampler depend on, as plain values; None where that need not be saved."""
        ...

    def load_state_dict(self, state: Any, *, active: bool, consumed: int) -> None:
        """Goes on with the orders of a run that was saved."""
        ...
