"""Batches of an IterableDataset: its samples have no ids, so their positions in the epoch stand for them."""

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from thresher.loading.order import generators_of, none_if_unknown
from thresher.loading.row_buffer import rows_of
from thresher.loading.settings import checked_batch_size
from thresher.trees import leaves

RESUMED_STREAM = (
    "A resumed run reads the stream from the beginning of the interrupted epoch. If the stream depends on the epoch, set it "
    "before the loop (such as stream.set_epoch(run.epoch)). Do not load a position within the epoch into the stream."
)


class StreamOrder:
    """The order of an IterableDataset, which cannot be chosen; `Order` is the same for a map-style dataset.

    Args:
        loader: The user's loader.
    """

    n = 0
    sampler = None
    yields_once = False

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self.dataset: Any = loader.dataset
        self.seen = 0
        """Number of samples of the last epoch; 0 before its end."""

        self.batch_size = checked_batch_size(loader.batch_sampler)

    @property
    def drop_last(self) -> bool:
        """Whether the user's loader drops a last batch that is not full."""
        return self._loader.drop_last

    @property
    def length(self) -> int | None:
        """Expected number of samples; None if the dataset states no length."""
        length = none_if_unknown(lambda: len(self.dataset))
        # What the last epoch had is more reliable than the length that a dataset states.
        return length and (self.seen or length)

    @property
    def candidates(self) -> int:
        """Number of samples per epoch; 0 if it is unknown."""
        return self.seen or self.length or 0

    @property
    def full_batches(self) -> int:
        """Number of batches per epoch; 0 if it is unknown."""
        rows = self.candidates
        if self.drop_last:
            return rows // self.batch_size
        return -(-rows // self.batch_size)

    def ids_of_sampler(self) -> None:
        """Returns None: there are no ids."""

    def generators(self) -> list[torch.Generator]:
        """Returns the generators that the loader draws from."""
        return generators_of(None, self._loader)

    def state_dict(self) -> None:
        """Returns None: the run does not save the state of a stream."""

    def load_state_dict(self, state: Any, *, active: bool, consumed: int) -> None:
        """Does nothing."""


class StreamBatches:
    """Batches of an IterableDataset; the id of a sample is its position in this epoch.

    Args:
        length: Expected number of samples of the dataset, which may be wrong; None if unknown.
        candidates: Number of samples of an epoch of full training; 0 if unknown.
    """

    weights = None

    def __init__(self, length: int | None, candidates: int) -> None:
        self._length = length
        self._candidates = candidates
        self.rows = self.samples = 0
        self.progress = (0, max(1, candidates))
        self.checksum = 0
        """Checksum of the first batch."""
        self.left: int | None = None
        """Expected number of rows that are still to come; None if unknown."""

    def take(self, loaded: Iterator[Any]) -> tuple[Any, Tensor]:
        """Returns the next batch, and the positions of its samples.

        Args:
            loaded: Batches of the user's loader.

        Raises:
            StopIteration: The dataset has no more samples.
        """
        batch = next(loaded)
        begin = self.rows
        if not begin:
            self.checksum = _checksum_of(batch)
        self.rows = self.samples = begin + rows_of(batch)
        # A stream may yield more samples than its length says, and an unknown length is 0.
        self.progress = (min(self.rows, self._candidates), max(1, self._candidates))
        # If a stream has yielded more samples than its length, nobody knows how many follow.
        self.left = None
        if self._length is not None and self.rows <= self._length:
            self.left = self._length - self.rows
        return batch, torch.arange(begin, self.rows)

    def finish(self) -> None:
        """Does nothing: a stream has no order that is drawn."""

    def skip(self, loaded: Iterator[Any], rows: int, look: Callable[[Any, Tensor], None]) -> None:
        """Reads the samples that an interrupted epoch has consumed, because a stream can only be read from its beginning.

        Args:
            loaded: Batches of the user's loader.
            rows: Number of samples to read.
            look: Function that is called with every batch and its ids, for rows that are still needed.

        Raises:
            RuntimeError: The stream has fewer samples.
        """
        while self.rows < rows:
            try:
                batch, ids = self.take(loaded)
            except StopIteration:
                raise RuntimeError(
                    f"The run resumes after {rows} samples of an epoch, and the stream ends after {self.rows}. {RESUMED_STREAM}"
                ) from None
            look(batch, ids)


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
