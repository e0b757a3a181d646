"""The ids of an epoch in the order of the user's sampler, and the batch sampler that serves those which the plan keeps.

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
from torch import Tensor
from torch.utils.data import Sampler

from thresher.distributed.order import Keeps, Piece
from thresher.loading.control import OrderPlace
from thresher.loading.dealing import Deal
from thresher.loading.live_settings import checked_batch_size
from thresher.loading.prepared import is_seeded_by_epoch


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
"""KnownEnd of an order of which nothing is known."""

LOOKED_UP = 2**13
"""Number of ids that are looked up in the plan at once, unless a batch has more."""


class IdBatchSampler(Sampler[list[int]]):
    """The batch sampler inside the rebuilt loader; it remembers the ids of every batch that is on its way.

    Args:
        sizes: Batch size and `drop_last` of the user's loader, which may change, as attributes of an object.
    """

    def __init__(self, sizes: Any) -> None:
        self._sizes = sizes
        self.size = sizes.batch_size
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
        # As in a BatchSampler, whose batch size is read for each batch, or at the beginning where the last one is dropped.
        return self._pieces(drawn, repeat(self.size) if self.drops_last else self._live_sizes())

    def _live_sizes(self) -> Iterator[int]:
        while True:
            yield self.batch_size

    def _dealt(self, deal: Deal, position: int) -> Iterator[tuple[Tensor, int]]:
        """Yields the rows of each step, and how many ids were drawn by then."""
        first = deal.step_after(self._stayed)
        candidates = self._pieces(position, deal.sizes(deal.candidates, first))
        for rows, (ids, position) in zip(deal.sizes(deal.rows, first), candidates, strict=False):
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
