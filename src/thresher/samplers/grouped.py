"""`Grouped`: batches of samples of similar lengths, with a fixed number of rows or a maximum number of tokens."""

import math
import zlib
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from thresher.permutation import Permutation
from thresher.samplers.epochs import BatchOrder, EpochSampler
from thresher.samplers.stratified import shuffled_within


class Grouped(EpochSampler):
    """Sampler of batches of samples of similar lengths, so that little of a batch is padding.

    Use it as `DataLoader(dataset, batch_sampler=Grouped(lengths, max_tokens=4096))`. Every sample comes once an epoch. The
    samples are sorted by length and cut into windows of `window` batches. In each epoch, the samples of a window are
    distributed over its batches at random, and the batches of all windows come in random order. Larger windows mean more random
    batches and more padding. All epochs have the same number of batches.

    With W processes, each process gets every W-th batch; if the number of batches is not divisible by W, the first batches come
    again. The batches are the same for any W.

    Args:
        lengths: Length of each sample, such as its number of tokens, shape (N,): list, array or tensor of numbers above 0.
        batch_size: Number of rows of a batch, 1 or more. Pass either this or `max_tokens`.
        max_tokens: Largest number of tokens of a batch with padding, computed as its rows times the largest length in its
            window.
        window: Number of batches over which samples of similar lengths are distributed at random, 1 or more. Default: a third
            of the square root of the number of batches, but at least 2 and at most 50.
        seed: Random seed. Default: 0.
        num_replicas: Number of processes that share the batches. Default: the world size of torch.distributed if it is
            initialized, else 1. Pass num_replicas=1, rank=0 if other code divides the data among processes, such as
            `accelerator.prepare`.
        rank: Number of this process, within [0, num_replicas). Default: the rank in torch.distributed, or 0.
        drop_last: Whether to leave out the last batches, instead of repeating the first, if the processes cannot get equally
            many. Default: False.

    Attributes:
        epoch: Number of the next epoch, which the next loop over the sampler yields.

    Raises:
        TypeError: A number is not an integer.
        ValueError: A number is out of its range, both or none of `batch_size` and `max_tokens` are given, or a sample has more
            than `max_tokens`.

    Example:
        >>> lengths = np.array([9, 1, 2, 8, 1, 7])
        >>> sorted(sorted(lengths[batch].tolist()) for batch in Grouped(lengths, max_tokens=18, window=1))
        [[1, 1], [2, 7], [8, 9]]
    """

    def __init__(
        self,
        lengths: ArrayLike | Tensor,
        batch_size: int | None = None,
        *,
        max_tokens: int | None = None,
        window: int | None = None,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        drop_last: bool = False,
    ) -> None:
        super().__init__(
            seed,
            num_replicas,
            rank,
            drop_last,
            batch_size=batch_size,
            max_tokens=max_tokens,
            window=window,
        )
        if (batch_size is None) == (max_tokens is None):
            raise ValueError(
                f"Grouped: give either `batch_size` or `max_tokens`, got {batch_size} and {max_tokens}"
            )
        values = torch.as_tensor(lengths).detach().cpu().numpy()
        if values.ndim != 1 or not len(values) or not values.min() > 0:
            raise ValueError(
                f"Grouped: `lengths` must have shape (N,), and each must be above 0, got {values!r:.60}"
            )
        if max_tokens is not None and values.max() > max_tokens:
            raise ValueError(
                f"Grouped: sample {values.argmax()} has length {values.max()}, above max_tokens={max_tokens}"
            )
        if window is None:
            batches = (
                len(values) / batch_size
                if batch_size
                else values.sum(dtype=np.float64) / (max_tokens or 1)
            )
            window = min(max(2, int(math.sqrt(batches) / 3)), 50)
        self._settings = {"batch_size": batch_size, "max_tokens": max_tokens, "window": window}
        self._settings["lengths"] = zlib.crc32(values.astype(np.float64).data)
        self._sorted = np.argsort(-values.astype(np.float64), kind="stable").astype(
            np.min_scalar_type(len(values))
        )
        ends = [0]
        sizes = []
        while ends[-1] < len(values):
            rows = batch_size or int((max_tokens or 0) // values[self._sorted[ends[-1]]])
            count = min(rows * window, len(values) - ends[-1])
            ends.append(ends[-1] + count)
            sizes.append(np.diff(np.append(np.arange(0, count, rows), count)))
        self._ends = np.array(ends)
        self._sizes = np.concatenate(sizes)

    @property
    def samples(self) -> int:
        """Number of samples of the dataset."""
        return len(self._sorted)

    @property
    def total(self) -> int:
        """Number of batches of an epoch."""
        return len(self._sizes)

    def order(self, epoch: int) -> BatchOrder:
        """Returns the batches of an epoch, as `BatchOrder`.

        Args:
            epoch: Number of the epoch, 0 or more.
        """
        rows = shuffled_within(
            self._sorted, self._ends, np.random.default_rng((self.seed, epoch, 3))
        )
        return BatchOrder(rows, self._sizes, Permutation(self.total, self.seed, epoch))

    def settings(self) -> dict[str, Any]:
        """Returns the settings that determine the order, as plain values; for the lengths a checksum."""
        return super().settings() | self._settings
