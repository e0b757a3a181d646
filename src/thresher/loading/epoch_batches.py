"""The batches of a map-style dataset as the rebuilt loader reads them, each with its ids and the position after it."""

import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import Sampler

from thresher.loading.epoch import BETWEEN_BATCHES, Epoch, LazyEpoch


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

    # Not a generator function, which would read `_batches` only at the first batch: a loader must keep the batches that were
    # set when it was iterated, even if others are set before it asks for one.
    def __iter__(self) -> Iterator[Any]:
        return map(self._convert, self._batches)

    def _convert(self, ids: Tensor) -> Any:
        self.count += 1
        return ids if self._as_tensors else ids.tolist()


class OrderedBatches:
    """Batches of an epoch that is made when the first batch is asked for.

    The plain loader draws the order of its sampler at that moment, after it has drawn the seed of its workers, perhaps from the
    same generator.

    Args:
        make: Function that makes the epoch.
        size: Number of rows of a full batch.
        candidates: Number of samples of an epoch of full training.
        smaller: Whether the epoch has as many batches as full training, with fewer rows. Default: False.
        rows: Number of rows that an interrupted epoch has consumed. Default: 0.
    """

    def __init__(
        self,
        make: Callable[[], Epoch | LazyEpoch],
        *,
        size: int,
        candidates: int,
        smaller: bool = False,
        rows: int = 0,
    ) -> None:
        self._make = make
        self._size = size
        self._candidates = candidates
        self._smaller = smaller
        self._number = 0
        # Workers request batches ahead of the loop, so the position may only advance when the loop gets a batch.
        self._requested: deque[Tensor] = deque()
        self._id_batches: Iterator[Tensor] | None = None
        self._epoch: Epoch | LazyEpoch | None = None
        self.rows = rows
        """Number of rows up to here."""
        self.progress = (0, 1)
        """Units of the epoch that are over, and all its units, 1 or more."""
        self.samples = 0
        """Number of samples that full training would have trained on up to here."""
        self.left: int | None = None
        """Number of rows that are still to come; None before the first batch, or if it is unknown."""
        self.weights: Tensor | None = None
        """Weights of the samples; see `Epoch`."""
        self.checksum = 0
        """Checksum of the ids up to here."""

    def open(self) -> None:
        """Makes the epoch, at the first call, and draws the ids again that an interrupted epoch has consumed.

        Raises:
            ValueError: No batch ends after the rows of the interrupted epoch.
        """
        if self._id_batches is not None:
            return
        epoch = self._epoch = self._make()
        self.weights = epoch.weights
        self._id_batches = epoch.batches(self._size)
        consumed = self.rows
        self.rows = 0
        while self.rows < consumed and (ids := next(self._id_batches, None)) is not None:
            self._advance(ids)
        if self.rows != consumed:
            raise ValueError(BETWEEN_BATCHES.format(consumed))

    def ids(self) -> Iterator[Tensor]:
        """Yields the ids of each remaining batch, made when it is requested; workers request several batches ahead."""
        self.open()
        # None after `release`: a loader may still ask for a batch after the last one.
        while self._id_batches is not None and (ids := next(self._id_batches, None)) is not None:
            self._requested.append(ids)
            yield ids

    def release(self) -> None:
        """Frees the arrays, because the epoch is over."""
        self._id_batches = self._epoch = None

    def finish(self) -> None:
        """Draws, once, what the sampler draws at the end of its ids."""
        if self._epoch is not None:
            self._epoch.finish()

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
            # A DataLoader goes on after a sample that cannot be read: its next batch is the one after the batch that failed.
            if self._requested:
                self._advance(self._requested.popleft())
            raise
        ids = self._requested.popleft()
        self._advance(ids)
        return batch, ids

    def _advance(self, ids: Tensor) -> None:
        """Advances the position by one batch."""
        epoch = self._epoch
        assert epoch is not None
        self._number += 1
        self.rows += len(ids)
        self.checksum = zlib.crc32(ids.numpy().data, self.checksum)
        if isinstance(epoch, Epoch):
            total_rows = int(epoch.ends[-1])
        else:
            # Only an expectation: a sampler may yield more ids than its length.
            total_rows = max(1, self._candidates)
        # In rows, so that a schedule does not depend on the batch size.
        self.progress = (min(self.rows, total_rows), total_rows)
        # In batches, so that after step i of smaller batches a schedule is where it is after step i of full training.
        if self._smaller and isinstance(epoch, Epoch):
            self.progress = (self._number, len(epoch))
        self.samples = self.rows * self._candidates // total_rows
        if epoch.rows is not None:
            self.left = max(0, epoch.rows - self.rows)
