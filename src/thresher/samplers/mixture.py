"""`Mixture`: batches with fixed shares of several sources, exactly."""

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from thresher.samplers.balanced import ClassBatchSampler
from thresher.samplers.stratified import values_of

AHEAD = 4
"""Number of deadlines by which sources are compared."""


def next_extras(rests: list[int], unit: int, taken: list[int], batch: int) -> list[int]:
    """Returns the sources that get a row more than the whole part of their rows per batch.

    A source is eligible if it has fewer extra rows than it should have after the batch. Eligible sources with the earliest
    deadlines are chosen; then those whose next row may come in the same batch, with the earliest deadline of that row, and so
    on: the algorithm PF of Baruah et al. (1996, "Proportionate Progress"), which keeps each source within one row.

    Args:
        rests: Fraction of a row per batch of each source, as a numerator; they add up to whole rows.
        unit: Denominator of the fractions.
        taken: Number of extra rows of each source in earlier batches.
        batch: Number of the batch over all epochs.

    Example:
        >>> next_extras([1, 3], 4, [0, 0], 0)
        [1]
    """

    def urgency(source: int) -> list[int]:
        rest = rests[source]
        # Eligible sources first.
        key = [int(taken[source] * unit >= rest * (batch + 1))]
        for row in range(taken[source] + 1, taken[source] + 1 + AHEAD):
            # The batch by which the source should have this row. If the next row falls due within that batch, too, it is 0.
            key += [-(-row * unit // rest), int(row * unit % rest == 0)]
        return key

    sources = [source for source, rest in enumerate(rests) if rest]
    return sorted(sources, key=urgency)[: sum(rests) // unit]


class Mixture(ClassBatchSampler):
    """Sampler of batches with a fixed share of each source, such as code and text, whatever the sizes of the sources.

    Use it as `DataLoader(dataset, batch_sampler=Mixture(sources, 64, {"code": 3, "text": 1}))`. If the share of a source times
    the batch size is a whole number, each batch has exactly so many of its rows. Otherwise batches have this number rounded up
    or down, and the sum over all batches so far, across epochs, is within one row of the share.

    Every sample of a source comes once before any sample of that source comes again, across epochs. So samples of a source with
    a large share come more often, and an epoch has only a part of a source with a small share. An epoch has ceil(N / B)
    batches; with `drop_last`, floor(N / B). Each loop over the sampler yields the next epoch, as with `Shuffle`. Global random
    states are not used.

    With W processes, each process gets every W-th batch. The batches are the same for any W. If their number is not divisible
    by W, the first batches come again.

    Args:
        sources: Source of each sample: list, array or tensor of numbers or strings, shape (N,).
        batch_size: Number of rows of a batch (of one process), B, 1 or more.
        weights: Weight of each source, above 0. The share of a source is its weight divided by the sum of all weights.
            Default: its number of samples.
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
        TypeError: `seed` or `batch_size` is not an integer.
        ValueError: `weights` are not a positive number for each source, or another argument is out of its range.

    Example:
        >>> sources = np.array(["code"] * 2 + ["text"] * 6)
        >>> for batch in Mixture(sources, 4, {"code": 3, "text": 1}):
        ...     print(sorted(sources[batch].tolist()))
        ['code', 'code', 'code', 'text']
        ['code', 'code', 'code', 'text']
    """

    def __init__(
        self,
        sources: ArrayLike | Tensor,
        batch_size: int,
        weights: Mapping[Any, float] | None = None,
        *,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        drop_last: bool = False,
    ) -> None:
        super().__init__(sources, seed, num_replicas, rank, drop_last, batch_size=batch_size)
        self.batch_size = self._rows_per_item = batch_size
        values = values_of(sources)
        if values.ndim != 1:
            raise ValueError(f"Mixture: `sources` must have shape (N,), got {values.shape}")
        names = np.unique(values).tolist()
        if weights is None:
            weights = dict(zip(names, self._sizes.tolist(), strict=True))
        known = isinstance(weights, Mapping) and {*weights} == {*names}
        if not known or not all(0 < weight < math.inf for weight in weights.values()):
            raise ValueError(
                f"Mixture: `weights` must have a finite number above 0 for each of the sources {names}, got {weights}"
            )
        # The shortest decimals of floats, so that 0.7 of 10 rows are exactly 7.
        parts = [Fraction(repr(float(weights[name]))) for name in names]
        rows = [batch_size * part / sum(parts) for part in parts]
        self._unit = math.lcm(*(row.denominator for row in rows))
        self._quotas = [int(row * self._unit) for row in rows]
        """Rows of each source per batch, as numerators of `_unit`."""
        self._before: tuple[int, list[int]] = (0, [0] * len(names))
        """Epoch, and the extra rows of each source before that epoch."""

    def _extras(self, epoch: int, total: int, taken: list[int]) -> NDArray[np.int64]:
        """Returns which sources have an extra row in each batch of an epoch, 0 or 1, shape (total, k), and adds to `taken`."""
        extras = np.zeros((total, len(taken)), dtype=np.int64)
        rests = [quota % self._unit for quota in self._quotas]
        if any(rests):
            for number in range(total):
                chosen = next_extras(rests, self._unit, taken, epoch * self.total + number)
                extras[number, chosen] = 1
                for source in chosen:
                    taken[source] += 1
        return extras

    def _taken(self, epoch: int) -> list[int]:
        """Returns the extra rows of each source before an epoch."""
        # Epochs mostly come in ascending order, so only those since the last call are counted.
        first, taken = self._before if self._before[0] <= epoch else (0, [0] * len(self._quotas))
        taken = taken.copy()
        for past in range(first, epoch):
            self._extras(past, self.total, taken)
        self._before = epoch, taken
        return taken

    def _classes_of_rows(self, epoch: int, total: int) -> NDArray[np.int64]:
        # A copy, because `_extras` adds to it.
        counts = self._extras(epoch, total, self._taken(epoch).copy())
        counts += np.array([quota // self._unit for quota in self._quotas])
        classes = np.tile(np.arange(len(self._quotas)), total)
        return classes.repeat(counts.ravel()).reshape(total, self.batch_size)

    def _begins(self, epoch: int) -> list[int]:
        batches = epoch * self.total
        taken = self._taken(epoch)
        return [
            quota // self._unit * batches + extra
            for quota, extra in zip(self._quotas, taken, strict=True)
        ]

    def settings(self) -> dict[str, Any]:
        """Returns the settings that determine the order, as plain values; for the sources a checksum."""
        return super().settings() | {"quotas": self._quotas}
