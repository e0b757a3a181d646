"""`Grouped`: batches of samples of similar lengths, with a fixed number of rows or a maximum number of tokens."""

import math
import zlib
from bisect import bisect_left
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from thresher.permutation import Permutation
from thresher.samplers.epochs import BatchComposer, cut, permute_batches
from thresher.samplers.stratified import shuffle_within


class Grouped(BatchComposer):
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
        balance: Whether the batches of all processes in a step have nearly equal numbers of tokens, so that none waits for
            another; or the number of processes, if other code divides the data among them. Default: False.

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
        balance: bool | int = False,
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
        if isinstance(lengths, Tensor):
            lengths = lengths.detach().cpu().numpy()
        values = np.asarray(lengths)
        if values.ndim != 1 or not len(values) or not values.min() > 0:
            raise ValueError(
                f"Grouped: `lengths` must have shape (N,), and each must be above 0, got {values!r:.60}"
            )
        if max_tokens is not None and values.max() > max_tokens:
            raise ValueError(
                f"Grouped: sample {values.argmax()} has length {values.max()}, above max_tokens={max_tokens}"
            )
        if window is None:
            if batch_size:
                batches = len(values) / batch_size
            else:
                batches = values.sum(dtype=np.float64) / (max_tokens or 1)
            window = min(max(2, int(math.sqrt(batches) / 3)), 50)
        self._settings = {"batch_size": batch_size, "max_tokens": max_tokens, "window": window}
        self._balance = balance
        if balance is not False:
            self._settings["balance"] = balance
        self._settings["lengths"] = zlib.crc32(values.astype(np.float64).data)
        # Ids by descending length: the first sample of a window has its largest length, which sets the number of rows.
        self._sorted = np.argsort(-values.astype(np.float64), kind="stable").astype(
            np.min_scalar_type(len(values))
        )
        self._lengths = values[self._sorted]
        self._window = window
        self._rows = batch_size
        self._budget = max_tokens or 0
        self._total = len(self._cut(self._lengths, self._budget)[1]) - 1

    def _cut(
        self, lengths: NDArray[Any], budget: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Cuts samples into windows and batches.

        Args:
            lengths: Lengths of the samples, shape (k,), descending.
            budget: Largest number of tokens of a batch, if `batch_size` was not given.

        Returns:
            Ends of the windows and of the batches, each after a leading 0.
        """
        begin = 0
        windows = [0]
        ends = [np.zeros(1, dtype=np.int64)]
        while begin < len(lengths):
            rows = self._rows or int(budget // lengths[begin])
            count = min(rows * self._window, len(lengths) - begin)
            ends.append(begin + cut(count, rows)[1:])
            begin += count
            windows.append(begin)
        return np.array(windows), np.concatenate(ends)

    def _cut_smaller(
        self, lengths: NDArray[Any], batches: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Cuts samples into a given number of batches: with equal rows, or with as few tokens in the largest as possible."""
        if self._rows is not None:
            ends = cut(len(lengths), self._rows, batches=batches)
        else:
            # The smallest budget with at most so many batches. Their number falls as the budget rises, and `bisect_left` needs
            # ascending keys, so they are negative.
            budget = bisect_left(
                range(self._budget),
                -batches,
                lo=int(np.ceil(lengths[0])),
                key=lambda budget: 1 - len(self._cut(lengths, budget)[1]),
            )
            sizes = np.diff(self._cut(lengths, budget)[1])
            # If no budget gives exactly so many batches, the largest ones are halved.
            while len(sizes) < batches:
                largest = int(sizes.argmax())
                half = sizes[largest] // 2
                sizes = np.insert(sizes, largest, half)
                sizes[largest + 1] -= half
            ends = np.append(0, sizes.cumsum())
        windows = ends[:: self._window]
        return (windows if windows[-1] == ends[-1] else np.append(windows, ends[-1])), ends

    @property
    def samples(self) -> int:
        """Number of samples of the dataset."""
        return len(self._sorted)

    @property
    def lengths(self) -> NDArray[Any]:
        """Length of each sample, shape (N,)."""
        by_id = np.empty_like(self._lengths)
        by_id[self._sorted] = self._lengths
        return by_id

    @property
    def total(self) -> int:
        """Number of batches of an epoch."""
        return self._total

    def compose(
        self, ids: NDArray[np.int64], epoch: int, batches: int | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the batches of an epoch; see `BatchComposer.compose`."""
        wanted = np.zeros(self.samples, dtype=np.bool_)
        wanted[ids] = True
        # Filtering keeps the order by length, so nothing is sorted again.
        kept = wanted[self._sorted]
        rows = self._sorted[kept]
        lengths = self._lengths[kept]
        if batches is None:
            windows, ends = self._cut(lengths, self._budget)
        else:
            windows, ends = self._cut_smaller(lengths, batches)
        shuffle_within(rows, windows, np.random.default_rng((self.seed, epoch, 3)))
        order = Permutation(len(ends) - 1, self.seed, epoch).piece(0, len(ends) - 1)
        together = self.dealing()[0] if self._balance is True else int(self._balance)
        if together > 1:
            # The first row of a batch has the largest length before the rows are shuffled within their window.
            longest = lengths[ends[:-1]]
            order = self._balanced(np.diff(ends) * longest, together, epoch)
        return permute_batches(rows, ends, order)

    def _balanced(self, tokens: NDArray[Any], together: int, epoch: int) -> NDArray[np.int64]:
        """Returns an order of batches in which those of each step have nearly equal numbers of tokens."""
        generator = np.random.default_rng((self.seed, epoch, 5))
        by_tokens = np.argsort(tokens, kind="stable")
        whole = len(by_tokens) // together * together
        # Batches that do not fill a step come last, padded with the first batches. Which ones is drawn, so that they are not
        # always the longest.
        first = int(generator.integers(len(by_tokens) - whole + 1))
        # Neighbors by tokens make a step.
        steps = by_tokens[first : first + whole].reshape(-1, together)
        rest = np.delete(by_tokens, np.arange(first, first + whole))
        steps = generator.permuted(generator.permutation(steps), axis=1)
        return np.append(steps.ravel(), rest)

    def settings(self) -> dict[str, Any]:
        """Returns the settings that determine the order, as plain values; for the lengths a checksum."""
        return super().settings() | self._settings
