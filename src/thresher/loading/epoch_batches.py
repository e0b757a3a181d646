"""The batches of a map-style dataset as the rebuilt loader reads them, each with its ids and the position after it."""

import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from thresher.loading.epoch import BETWEEN_BATCHES, Epoch, batch_at, do_nothing


class IdBatchSampler(Sampler[list[int]]):
    """The batch sampler inside the rebuilt loader. It yields the batches of ids that it was given last.

    Args:
        as_tensors: Whether the dataset takes the ids of a batch as a tensor. Default: False, as a list.
    """

    def __init__(self, *, as_tensors: bool = False) -> None:
        self._as_tensors = as_tensors
        self._batches: Iterator[Tensor] = iter(())
        self.count = 0
        """Number of batches that were yielded so far, in all epochs."""

    def set_batches(self, batches: Iterator[Tensor]) -> None:
        """Sets the batches of ids that the next iteration yields."""
        self._batches = batches

    # No generator function: a loader keeps its batches from `iter` on, even if others are set before it asks for one.
    def __iter__(self) -> Iterator[Any]:
        return map(self._convert, self._batches)

    def _convert(self, ids: Tensor) -> Any:
        self.count += 1
        return ids if self._as_tensors else ids.tolist()


class ArrayBatches:
    """Batches of an epoch whose arrays are made when the first batch is asked for.

    The plain loader draws the order of its sampler at that moment, after it has drawn the seed of its workers, perhaps from the
    same generator.

    Args:
        make: Function that makes the epoch.
        size: Number of rows of a full batch.
        candidates: Number of samples of an epoch of full training.
        smaller: Whether the epoch has as many batches as full training, with fewer rows.
        rows: Number of rows before the first batch to read. Default: 0.
    """

    def __init__(
        self,
        make: Callable[[], Epoch],
        *,
        size: int,
        candidates: int,
        smaller: bool = False,
        rows: int = 0,
    ) -> None:
        self._make = make
        self._epoch: Epoch | None = None
        self._size = size
        self._candidates = candidates
        self._smaller = smaller
        self._number = 0
        self._finished = False
        self._finish: Callable[[], object] = do_nothing
        self.rows = rows
        """Number of rows up to here."""
        self.progress = (0, 1)
        """Units of the epoch that are over, and all its units, 1 or more."""
        self.samples = 0
        """Number of samples that full training would have trained on up to here."""
        self.left: int | None = None
        """Number of rows that are still to come; None before the first batch."""
        self.weights: Tensor | None = None
        """Weights of the samples; see `Epoch`."""

    @property
    def epoch(self) -> Epoch:
        """The arrays of the epoch, made at the first call."""
        # Not a cached property: in Python 3.11 these share a lock, and ranks that are threads wait for each other here.
        if self._epoch is None:
            self._epoch = self._begin()
        return self._epoch

    def _begin(self) -> Epoch:
        epoch = self._make()
        self._finish = epoch.finish
        self._number = batch_at(epoch.ends, self.rows)
        if self.rows:
            self.left = int(epoch.ends[-1]) - self.rows
        self.weights = epoch.weights
        return epoch

    def ids(self) -> Iterator[Tensor]:
        """Yields the ids of each batch that is still to come, when it is asked for; workers ask ahead."""
        count = len(self.epoch)
        for number in range(self._number, count):
            ids = self.epoch.batch(number)
            # The batch sampler of torch meets the end of the ids as it fills a last batch that is not full.
            if number + 1 == count and len(ids) < self._size:
                self.finish()
            yield ids
        self.finish()

    def release(self) -> None:
        """Frees the arrays, because the epoch is over; a loader may still ask for a batch after the last one."""
        self._epoch = None

    def finish(self) -> None:
        """Draws, once, what the sampler draws at the end of its ids."""
        if not self._finished:
            self._finished = True
            self._finish()

    def open(self) -> None:
        """Makes the epoch now, because a resumed epoch is made from earlier random states."""
        self.epoch  # noqa: B018

    def take(self, loaded: Iterator[Any]) -> tuple[Any, Tensor]:
        """Returns the next batch and its ids.

        Args:
            loaded: Batches of the rebuilt loader. Only the iterator of the loop holds them, so that leaving it stops the workers.

        Raises:
            StopIteration: There is no further batch.
        """
        try:
            batch = next(loaded)
        # StopIteration is an Exception, but means that the loader is at its end, not that a batch failed.
        except StopIteration:
            raise
        except Exception:
            # The next batch that the loader yields is the one after the batch that failed.
            self._number += 1
            raise
        epoch = self.epoch
        ids = epoch.batch(self._number)
        number = self._number = self._number + 1
        self.rows = int(epoch.ends[number])
        whole = int(epoch.ends[-1])
        # Rows, so that a schedule does not depend on the batch size. After step i, smaller batches are where full training is.
        self.progress = (number, len(epoch)) if self._smaller else (self.rows, whole)
        self.samples = self.rows * self._candidates // whole
        self.left = whole - self.rows
        return batch, ids

    @property
    def checksum(self) -> int:
        """Checksum of the ids up to here."""
        return self.epoch.checksum(self.rows)


class SamplerBatches:
    """Batches of a plan with every sample, whose ids come as the sampler of the user yields them.

    Args:
        ids: Ids of each batch, as the sampler yields them.
        length: Number of rows of the epoch, as far as the sampler knows; None if it has no length.
        candidates: Number of samples of an epoch of full training.
        size: Number of rows of a batch.
        drop_last: Whether a last batch that is not full is left out.
        weights: Weights of the samples, shape (N,), float32; None if all are 1.
        rows: Number of rows that an interrupted epoch has consumed. They are drawn again. Default: 0.
    """

    def __init__(
        self,
        ids: Iterator[Tensor],
        *,
        length: int | None,
        candidates: int,
        size: int,
        drop_last: bool,
        weights: Tensor | None,
        rows: int = 0,
    ) -> None:
        self._source = ids
        self._length = length
        self._candidates = max(1, candidates)
        self._size = size
        self._drop_last = drop_last
        self.weights = weights
        self._again = rows
        self._ahead: deque[Tensor] = deque()
        self.rows = self.samples = rows
        self.progress = (min(rows, self._candidates), self._candidates)
        self.checksum = 0
        self.left = max(0, length - rows) if rows and length is not None else None

    def open(self) -> None:
        """Draws the ids again that an interrupted epoch has consumed, at the first call only.

        Raises:
            ValueError: No batch ends after the rows of the interrupted epoch.
        """
        while self._again > 0:
            ids = next(self._source, torch.empty(0, dtype=torch.int64))
            self.checksum = zlib.crc32(ids.numpy().tobytes(), self.checksum)
            self._again -= len(ids)
            if not len(ids):
                break
        if self._again:
            raise ValueError(BETWEEN_BATCHES.format(self.rows))

    def ids(self) -> Iterator[Tensor]:
        """Yields the ids of each batch that is still to come, when it is asked for; workers ask ahead."""
        self.open()
        for ids in self._source:
            if self._drop_last and len(ids) < self._size:
                return
            # Kept until the loop gets the batch.
            self._ahead.append(ids)
            yield ids

    def take(self, loaded: Iterator[Any]) -> tuple[Any, Tensor]:
        """Returns the next batch and its ids.

        Args:
            loaded: Batches of the rebuilt loader. Only the iterator of the loop holds them, so that leaving it stops the workers.

        Raises:
            StopIteration: There is no further batch.
        """
        try:
            batch = next(loaded)
        except StopIteration:
            raise
        except Exception:
            # The ids of the failed batch were drawn. Without this, the next batch would get them.
            if self._ahead:
                self._ahead.popleft()
            raise
        ids = self._ahead.popleft()
        self.rows = self.samples = self.rows + len(ids)
        self.progress = (min(self.rows, self._candidates), self._candidates)
        self.checksum = zlib.crc32(ids.numpy().tobytes(), self.checksum)
        if self._length is not None:
            self.left = max(0, self._length - self.rows)
        return batch, ids

    def finish(self) -> None:
        """Does nothing: the sampler itself meets the end of its ids."""
