"""Candidate batches with the ids of their rows, from a map-style dataset or from a stream."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from thresher.loading.order import IdBatchSampler
from thresher.loading.row_buffer import rows_of


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
