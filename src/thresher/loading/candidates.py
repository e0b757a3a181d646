"""Candidate batches with the ids of their rows, from a map-style dataset or from a stream."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from thresher.loading.order import IdBatchSampler
from thresher.loading.row_buffer import rows_of


class MapStyleBatches:
    """Candidate batches of a map-style dataset: the ids were drawn here, the samples come from the loader."""

    def __init__(self, batches: Iterator[Any], ids: IdBatchSampler, *, ahead: bool) -> None:
        self._batches, self._ids, self._ahead = batches, ids, ahead

    def take(self) -> tuple[Any, Tensor, int]:
        """The next batch, its ids, and how many ids are drawn by then.

        Raises:
            StopIteration: There is none.
        """
        if not self._ahead:
            self._ids.on_the_way.clear()
        try:
            batch = next(self._batches)
        except StopIteration:
            raise
        except Exception:
            # The failed batch was drawn; the ids of the next one must not be taken for its own.
            if self._ids.on_the_way:
                self._ids.on_the_way.popleft()
            raise
        return batch, *self._ids.on_the_way.popleft()


class StreamBatches:
    """Batches of an iterable dataset; a sample's id is its place in this epoch's stream."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches, self._place = batches, 0

    def take(self) -> tuple[Any, Tensor, int]:
        """The next batch, the places of its rows, and where the stream is after it.

        Raises:
            StopIteration: The stream is over.
        """
        batch = next(self._batches)
        begin, self._place = self._place, self._place + rows_of(batch)
        return batch, torch.arange(begin, self._place), self._place

    def skip(self, consumed: int, look: Callable[[Any, Tensor], None]) -> Tensor:
        """Read again what an interrupted epoch consumed; `look` is shown every batch of it. Returns its ids."""
        while self._place < consumed:
            batch, ids, _ = self.take()
            look(batch, ids)
        return torch.arange(self._place)
