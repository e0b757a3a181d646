"""`BalancedBatchSampler`: batches with equal shares of all classes, or with K samples of each of P classes."""

import zlib
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from thresher.samplers.epochs import BatchComposer
from thresher.samplers.stratified import codes_of

IntArray = NDArray[np.int64]


def in_turn(
    members: IntArray, begin: int, batches: IntArray, generator: np.random.Generator
) -> IntArray:
    """Returns members in random rounds: each member comes once before any member comes again.

    A round that starts within a batch starts with members that are not in the batch yet.

    Args:
        members: Members, shape (n,). If earlier calls stopped within a round, the first begin % n members were taken in it.
        begin: Number of members taken in earlier calls.
        batches: For each member to take, the number of its batch, shape (k,), ascending.
        generator: Random generator.

    Example:
        >>> in_turn(np.arange(3), 2, np.array([0, 0, 1, 1, 2]), np.random.default_rng(0)).tolist()
        [2, 0, 1, 2, 0]
    """
    n = len(members)
    k = len(batches)
    # The rest of a round that an earlier call began, whole rounds, and the beginning of a round that the next call ends.
    left = members[begin % n :][:k] if begin % n else members[:0]
    rounds, rest = divmod(k - len(left), n)
    whole = generator.permuted(np.tile(members, (rounds, 1)), axis=1).ravel()
    taken = np.concatenate(
        [generator.permutation(left), whole, generator.permutation(members[:rest])]
    )
    # A single member comes again in any case.
    starts = np.arange(len(left), k, n if n > 1 else k + 1)
    begins_of_batch = np.searchsorted(batches, batches[starts])
    for in_batch, start in zip(begins_of_batch.tolist(), starts.tolist(), strict=True):
        repeated = np.isin(taken[start : start + n], taken[in_batch:start])
        # Members that the batch has already move to the end of the round; the others keep their random order.
        if repeated.any():
            taken[start : start + n] = taken[start : start + n][np.argsort(repeated, kind="stable")]
    return taken


class ClassBatchSampler(BatchComposer):
    """Base of samplers of batches with given numbers of rows of each class, whose samples come in turn.

    Subclasses implement `_classes_of_rows`, with the same result in all processes, and `_begins`.

    Args:
        labels: Class of each sample, as for `BalancedBatchSampler`.
        seed: Random seed.
        num_replicas: Number of processes, as for `EpochSampler`.
        rank: Number of this process.
        drop_last: Whether to leave out the last batches.
        **counts: Further arguments that `EpochSampler` checks.

    Raises:
        TypeError: As for `EpochSampler`.
        ValueError: As for `EpochSampler`, or `labels` are not classes.
    """

    batch_size: int
    once = False
    _mixed = True
    """Whether the rows of a batch are in random order; otherwise in the order of `_classes_of_rows`."""

    def __init__(
        self,
        labels: ArrayLike | Tensor,
        seed: int,
        num_replicas: int | None,
        rank: int | None,
        drop_last: bool,
        **counts: int | None,
    ) -> None:
        super().__init__(seed, num_replicas, rank, drop_last, **counts)
        _, codes = np.unique(codes_of(labels), return_inverse=True)
        self._sizes = np.bincount(codes)
        self._checksum = zlib.crc32(codes.data)
        order = np.random.default_rng((seed, 0)).permutation(len(codes))
        # A stable sort leaves the random order within each class.
        members = order[np.argsort(codes[order], kind="stable")]
        self._members = np.split(members, self._sizes.cumsum()[:-1])
        """Ids of the samples of each class, in random order within a class."""

    @property
    def samples(self) -> int:
        """Number of samples of the dataset."""
        return int(self._sizes.sum())

    def _classes_of_rows(self, epoch: int, total: int) -> IntArray:
        """Returns the class of each row of each batch of an epoch, shape (total, batch_size)."""
        raise NotImplementedError

    def _begins(self, epoch: int) -> list[int]:
        """Returns how many samples of each class were taken before an epoch."""
        raise NotImplementedError

    def compose(
        self, ids: IntArray, epoch: int, batches: int | None = None
    ) -> tuple[IntArray, IntArray]:
        """Returns the batches of an epoch; see `BatchComposer.compose`.

        Raises:
            ValueError: `batches` was given, or a class has no sample.
        """
        if batches is not None:
            raise ValueError(
                f"{type(self).__name__} has batches of one size, so a method must leave out whole steps (spend='steps')."
            )
        wanted = np.zeros(self.samples, dtype=np.bool_)
        wanted[ids] = True
        of_classes = [members[wanted[members]] for members in self._members]
        if not all(map(len, of_classes)):
            raise ValueError(
                f"{type(self).__name__}: every class needs a sample in each epoch, and the method keeps none of one class"
            )
        total = len(self._cut_rows(len(ids))) - 1
        classes = self._classes_of_rows(epoch, total)
        # For each class, the positions of its rows in the epoch, ascending.
        places = np.split(
            np.argsort(classes, axis=None, kind="stable"),
            np.bincount(classes.ravel(), minlength=len(self._sizes)).cumsum()[:-1],
        )
        taken = np.empty(classes.size, dtype=np.int64)
        # The last number sets these draws apart from those of the classes of an epoch, which have 1.
        generator = np.random.default_rng((self.seed, epoch, 2))
        for members, begin, place in zip(of_classes, self._begins(epoch), places, strict=True):
            if len(place):
                taken[place] = in_turn(members, begin, place // self.batch_size, generator)
        if self._mixed:
            taken = generator.permuted(taken.reshape(total, self.batch_size), axis=1).ravel()
        return taken, np.arange(total + 1) * self.batch_size

    def settings(self) -> dict[str, Any]:
        """Returns the settings that determine the order, as plain values; for the labels a checksum."""
        return super().settings() | {"labels": self._checksum}


class BalancedBatchSampler(ClassBatchSampler):
    """Sampler of batches with equal shares of all classes, or with K samples of each of P classes.

    Use it as `DataLoader(dataset, batch_sampler=BalancedBatchSampler(labels, 64))`. Every sample of a class comes once before
    any sample of that class comes again, across epochs. So samples of small classes come more often, and an epoch has only a
    part of a large class.

    - `batch_size=B` alone: a batch has B / C rows of each of the C classes, rounded up or down.
    - `classes_per_batch=P, samples_per_class=K`: a batch has P different classes with K rows each, next to each other, as
    losses on pairs and triplets need. Pass any two of these and `batch_size`. A class with fewer than K samples repeats
    samples.

    In an epoch, all classes come equally often, to within one batch. An epoch has ceil(N / B) batches; with `drop_last`,
    floor(N / B). Each loop over the sampler yields the next epoch, as with `Shuffle`. Global random states are not used.

    With W processes, each process gets every W-th batch; if the number of batches is not divisible by W, the first batches come
    again.

    Args:
        labels: Class of each sample: list, array or tensor of numbers or strings, shape (N,), or of several columns, shape
            (N, columns), where each combination of values is a class. See `labels_of`.
        batch_size: Number of rows of a batch (of one process), 1 or more.
        classes_per_batch: Number of classes of a batch, 1 to C. Default: all, or as many as there are rows.
        samples_per_class: Number of rows of each class of a batch, 1 or more.
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
        TypeError: `seed` is not an integer.
        ValueError: A number is out of its range, the numbers do not fit together, or `labels` are not classes.

    Example:
        >>> labels = np.array(["cat"] * 2 + ["dog"] * 6)
        >>> [sorted(labels[batch].tolist()) for batch in BalancedBatchSampler(labels, 4)]
        [['cat', 'cat', 'dog', 'dog'], ['cat', 'cat', 'dog', 'dog']]
        >>> len(BalancedBatchSampler(labels, classes_per_batch=2, samples_per_class=1))
        4
    """

    def __init__(
        self,
        labels: ArrayLike | Tensor,
        batch_size: int | None = None,
        *,
        classes_per_batch: int | None = None,
        samples_per_class: int | None = None,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        drop_last: bool = False,
    ) -> None:
        settings = {
            "batch_size": batch_size,
            "classes_per_batch": classes_per_batch,
            "samples_per_class": samples_per_class,
        }
        super().__init__(labels, seed, num_replicas, rank, drop_last, **settings)
        self._mixed = classes_per_batch is None and samples_per_class is None
        if sum(value is not None for value in settings.values()) < (1 if self._mixed else 2):
            raise ValueError(
                "BalancedBatchSampler: give `batch_size`, or two of `batch_size`, `classes_per_batch` and `samples_per_class`"
            )
        self._rows = samples_per_class or (
            1 if self._mixed or not batch_size else batch_size // (classes_per_batch or 1)
        )
        self._classes = classes_per_batch or (batch_size or 0) // self._rows
        # With `batch_size` alone, every row counts as one class, so `_classes` may exceed the number of different classes.
        self.batch_size = self._rows_per_item = self._rows * self._classes
        if batch_size not in (None, self.batch_size) or not self.batch_size:
            raise ValueError(
                f"BalancedBatchSampler: `batch_size` must be classes_per_batch * samples_per_class, got {batch_size}, "
                f"{classes_per_batch} and {samples_per_class}"
            )
        if not self._mixed and self._classes > len(self._sizes):
            raise ValueError(
                f"BalancedBatchSampler: `labels` have {len(self._sizes)} classes, but a batch should have {self._classes}: "
                "pass a smaller `classes_per_batch`, or `batch_size` alone"
            )
        self._before: tuple[int, IntArray] = (0, np.zeros(len(self._sizes), dtype=np.int64))
        """Epoch, and how often each class was one of the classes of `_further_classes` before that epoch."""

    def _further_classes(self, epoch: int, total: int) -> IntArray:
        """Returns the classes of each batch of an epoch in addition to those that every batch has, shape (total, k)."""
        count = len(self._sizes)
        k = self._classes % count
        if not k:
            return np.empty((total, 0), dtype=np.int64)
        # The last round is computed whole, and cut afterwards, so that it can begin with any class.
        batches = np.arange(-(-total * k // count) * count) // k
        taken = in_turn(np.arange(count), 0, batches, np.random.default_rng((self.seed, epoch, 1)))
        return taken[: total * k].reshape(total, k)

    def _begins(self, epoch: int) -> list[int]:
        """Returns how many samples of each class were taken before an epoch."""
        count = len(self._sizes)
        # Epochs mostly come in ascending order, so only those since the last call are counted.
        first, before = self._before
        if first > epoch:
            first = 0
            before = np.zeros(count, dtype=np.int64)
        for past in range(first, epoch):
            taken = self._further_classes(past, self.total).ravel()
            before = before + np.bincount(taken, minlength=count)
        self._before = epoch, before
        every = self._classes // count
        return (self._rows * (every * self.total * epoch + before)).tolist()

    def _classes_of_rows(self, epoch: int, total: int) -> IntArray:
        count = len(self._sizes)
        in_each = np.tile(np.arange(count), (total, self._classes // count))
        classes = np.concatenate([in_each, self._further_classes(epoch, total)], axis=1)
        return classes.repeat(self._rows, axis=1)

    def settings(self) -> dict[str, Any]:
        """Returns the settings that determine the order, as plain values; for the labels a checksum."""
        return super().settings() | {"classes_per_batch": self._classes, "mixed": self._mixed}
