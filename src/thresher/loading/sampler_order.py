"""The order of a sampler of the user, cut into batches of one size: what a plan keeps of it."""

import operator
import reprlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from thresher.distributed.world import agree
from thresher.loading.epoch import (
    ComposedEpoch,
    LazyEpoch,
    Piece,
    choose,
    do_nothing,
    pad,
    small_dtype,
)
from thresher.loading.order import Order, SamplerEpochs, none_if_unknown
from thresher.loading.packed_plan import PackedPlan
from thresher.loading.samplers import (
    YIELD_ONCE,
    check_unchanged,
    inner_sampler,
    is_of_torchdata,
    is_seeded_by_epoch,
)
from thresher.loading.settings import checked_batch_size
from thresher.loading.smaller_batches import SmallerBatchesError, smaller_batches
from thresher.samplers.epochs import EpochSampler, cut
from thresher.samplers.shuffle import Shuffle
from thresher.samplers.weighted import WeightedSampler
from thresher.selection import chunks

KNOWN = (RandomSampler, SequentialSampler, Shuffle)
"""Samplers whose order can be reproduced with arrays."""


def as_ids(numbers: Iterable[Any], sampler: Any, n: int) -> Tensor:
    """Converts ids that a sampler yields to a tensor, int64.

    Args:
        numbers: The ids.
        sampler: The sampler, for error messages.
        n: Number of samples of the dataset.

    Raises:
        TypeError: An id is not a whole number.
        IndexError: An id is outside the dataset.
    """
    if isinstance(numbers, Tensor | np.ndarray):
        values: list[Any] = numbers.tolist()
    else:
        values = list(numbers)
    try:
        # operator.index takes integers of NumPy and tensors as well, and refuses floats, which int() would cut off.
        ids = torch.tensor([*map(operator.index, values)], dtype=torch.int64)
    except TypeError:
        raise TypeError(
            f"`loader` has a sampler, {type(sampler).__name__}, that yields {reprlib.repr(values[0])}, of type "
            f"{type(values[0]).__name__}. It must yield ids: whole numbers, the positions of samples in the dataset. Other "
            "properties of a sample, such as its size, must come from the dataset or the collate_fn."
        ) from None
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= n):
        raise IndexError(
            f"the sampler yielded an id outside the dataset's [0, {n}): {reprlib.repr(ids.tolist())}"
        )
    return ids


def has_all_once(sampler: Any, n: int) -> bool:
    """Whether a shuffling or sequential sampler yields each of n ids once.

    Args:
        sampler: Sampler with a `data_source`.
        n: Number of samples of the dataset.
    """
    draws = hasattr(sampler, "replacement")
    once = not draws or (not sampler.replacement and sampler.num_samples == n)
    return once and len(sampler.data_source) == n


def shuffles_itself(sampler: Any, n: int) -> bool:
    """Whether a sampler is one of accelerate or torchdata that makes a plain shuffle itself."""
    shuffles = is_seeded_by_epoch(sampler) or is_of_torchdata(sampler, "RandomSampler")
    return shuffles and has_all_once(sampler, n)


def is_free(loader: DataLoader[Any]) -> bool:
    """Whether the order of a map-style loader is a plain shuffle, which a method may replace by another order.

    Args:
        loader: The user's loader.
    """
    sampler = inner_sampler(loader.batch_sampler)
    if type(sampler) is DistributedSampler:
        return sampler.shuffle and sampler.num_replicas > 1
    n = len(loader.dataset)  # pyright: ignore[reportArgumentType]
    known = type(sampler) in (RandomSampler, Shuffle) and has_all_once(sampler, n)
    return known or shuffles_itself(sampler, n)


def groups_by_length(loader: DataLoader[Any]) -> bool:
    """Whether the order of a loader is that of `group_by_length` of Transformers."""
    return type(inner_sampler(loader.batch_sampler)).__name__ in YIELD_ONCE


class SamplerOrder(Order):
    """The order of the user's sampler, as far as Thresher knows it, cut into batches of one size; see `Order`."""

    def _set_up(self) -> None:
        self.sampler = inner_sampler(self._batches)
        processes = self._world.size
        # accelerate with split_batches=True divides each batch of the user's loader among the processes.
        splits = getattr(self._batches, "split_batches", False)
        # The reader checks before each epoch that the user has not changed it.
        self.batch_size = checked_batch_size(self._batches) // (processes if splits else 1)
        self.drop_last = self._batches.drop_last
        self.some_ids = None if processes > 1 else self._find_some_ids()
        """Ids that the sampler can yield, shape (K,), int64, ascending; None if these are all ids, or are not known."""
        numbered = type(self.sampler) in (Shuffle, WeightedSampler)
        if processes > 1 or numbered or is_seeded_by_epoch(self.sampler):
            self._epochs = SamplerEpochs(self.sampler, self.n, self._loader)

    # What does not depend on a plan

    @property
    def full_batches(self) -> int:
        """Number of batches of this process in an epoch of full training."""
        rows = self.candidates
        # Full training does not train on a dropped last batch.
        if self.drop_last:
            return rows // self.batch_size
        return -(-rows // self.batch_size)

    @property
    def is_known(self) -> bool:
        """Whether the sampler yields every id once, in an order that arrays can reproduce with the same random numbers."""
        # Exactly these classes: a subclass may yield another order.
        return type(self.sampler) in KNOWN and has_all_once(self.sampler, self.n)

    def _find_some_ids(self) -> Tensor | None:
        sampler = self.sampler
        kind = type(sampler)
        # Plans must choose among the samples that the sampler yields: of a plan for all samples, too few would be kept.
        if kind is SubsetRandomSampler:
            ids = as_ids(sampler.indices, sampler, self.n)
        elif kind is WeightedRandomSampler:
            # A sample of weight 0 is never drawn.
            ids = sampler.weights.nonzero().flatten().cpu()
        elif kind is WeightedSampler:
            ids = torch.from_numpy(sampler.weights.nonzero()[0])
        elif kind in KNOWN:
            # A sampler over a smaller data source than the dataset yields the positions 0, 1, ... of this source.
            size = len(sampler.data_source)
            return None if size >= self.n else torch.arange(size)
        elif isinstance(sampler, list | tuple | range | Tensor):
            ids = as_ids(sampler, sampler, self.n)
        else:
            return None
        ids = ids.unique()
        return None if len(ids) >= self.n else ids

    def ids_of_sampler(self) -> Tensor | None:
        """Returns the ids that the sampler can yield, shape (K,), int64, ascending; None if these are all ids.

        Raises:
            ValueError: The sampler yields fewer ids than the dataset has, and Thresher cannot find out which.
        """
        # A sampler that is shorter than the dataset may yield a fixed part of it, which is not known, or may draw from all ids
        # each time, as these three do.
        draws = (RandomSampler, WeightedRandomSampler, WeightedSampler)
        if (
            self._world.size == 1
            and self.some_ids is None
            and type(self.sampler) not in draws
            and self.candidates < self.n
        ):
            raise ValueError(
                f"`loader` has a sampler, {type(self.sampler).__name__}, that yields {len(self.sampler)} of the {self.n} "
                "samples of the dataset, and Thresher cannot find out which, so it cannot choose a share of them. Pass a "
                "loader over torch.utils.data.Subset(dataset, ids) with shuffle=True, or a SubsetRandomSampler(ids)."
            )
        return self.some_ids

    @property
    def _sampler_yields_once(self) -> bool:
        """Whether the sampler yields each of its ids once."""
        once = self.some_ids is not None and not getattr(self.sampler, "replacement", False)
        # In several processes, `check_shared` has refused all other samplers.
        return (
            self._world.size > 1
            or self.is_known
            or shuffles_itself(self.sampler, self.n)
            or type(self.sampler) is DistributedSampler
            or type(self.sampler).__name__ in YIELD_ONCE
            or (once and self.some_ids is not None and len(self.some_ids) == len(self.sampler))
        )

    def tokens(self) -> dict[str, Any]:
        """Returns {}: no lengths are known."""
        return {}

    @property
    def yields_once(self) -> bool:
        """Whether no sample comes twice in an epoch; some do if the first ids are repeated to give processes equal parts."""
        unit = self._world.size * (self.batch_size if self.by_batches else 1)
        return self._sampler_yields_once and (
            self._world.size == 1 or self._drops_remainder or self.n % unit == 0
        )

    @property
    def _drops_remainder(self) -> bool:
        """Whether rows are left out that cannot be divided equally among the processes."""
        dealer = self._batches if self.by_batches else self._batches.sampler
        return bool(getattr(dealer, "drop_last", False))

    @property
    def candidates(self) -> int:
        """Number of ids of this process in an epoch of full training."""
        if self._world.size > 1:
            return self._rows_per_process(self.n)
        if hasattr(self.sampler, "__len__"):
            return len(self.sampler)
        return self.n

    # The plan of an epoch

    def rows_of(self, plan: PackedPlan) -> int:
        """Returns the number of rows of an epoch with this plan, in all processes together.

        Raises:
            TypeError: The plan leaves out samples, but the sampler may repeat or skip ids, or has no length.
            ValueError: The plan leaves out samples, and the dataset has another number of samples than at `attach`.
        """
        if plan.everything and self._world.size == 1:
            return len(self.sampler)
        # A sampler of a dataset that has grown yields more ids than it did, which looks like repeated ids.
        check_unchanged(self.dataset, self.n)
        if plan.drawn or self._sampler_yields_once:
            return plan.rows
        raise TypeError(
            f"the length of this epoch is not known before its end, because {type(self.sampler).__name__} may repeat or skip "
            "ids, and the method skips samples"
        )

    def lay_out(self, plan: PackedPlan, epoch: int) -> tuple[NDArray[np.int64], bool]:
        """Returns the ends of the batches of all processes, and whether they are dealt by rows; see `Order.lay_out`."""
        try:
            rows = self.rows_of(plan)
        except TypeError as error:
            if not plan.smaller:
                raise
            raise SmallerBatchesError(
                f"Smaller batches need the number of samples of an epoch, and {error}. Use spend='steps'."
            ) from None
        return self.cut(rows, everything=plan.everything, smaller=plan.smaller)

    def cut(self, rows: int, *, everything: bool, smaller: bool) -> tuple[NDArray[np.int64], bool]:
        """Returns the ends of the batches of all processes, and whether they are dealt by rows.

        Args:
            rows: Number of rows in all processes together.
            everything: Whether these are all samples, each once.
            smaller: Whether there are as many batches as in full training.

        Raises:
            SmallerBatchesError: There are fewer rows than the steps need.
        """
        processes = self._world.size
        by_rows = self._deals_by_rows(rows, smaller=smaller)
        ends = self._cut_one_process(rows, everything=everything, smaller=smaller)
        if by_rows:
            return ends * processes, True
        return np.append(0, np.diff(ends).repeat(processes).cumsum()), False

    def _cut_one_process(self, rows: int, *, everything: bool, smaller: bool) -> NDArray[np.int64]:
        """Returns where each batch of this process ends."""
        size = self.batch_size
        own_rows = self._rows_per_process(rows, smaller=smaller)
        if smaller:
            if self._samples_after_pruning is None:
                full_rows = self.candidates
            else:
                full_rows = self._rows_per_process(self._samples_after_pruning)
            ends = smaller_batches(
                own_rows, full_rows, size, drop_last=self.drop_last, least=self._least
            )
            if ends is not None:
                return ends
        # An epoch of less than one batch keeps it: with drop_last it would have no step.
        short = own_rows < size <= self.n and not everything
        # If samples are left out, an epoch may end with a batch of one row, on which BatchNorm cannot train. Full training and
        # an epoch of one row keep it, so that the model raises its own error.
        least = 1 if everything or own_rows < self._least else min(self._least, size)
        return cut(own_rows, size, drop_last=self.drop_last and not short, least=least)

    def _deals_by_rows(self, rows: int, *, smaller: bool) -> bool:
        """Returns whether W processes get every W-th row of an order, rather than every W-th batch."""
        # accelerate divides an order by full batches. Smaller steps have other sizes, so their order is divided by rows; a plan
        # of less than one batch for each process, too, because otherwise no process would get any.
        short = self._drops_remainder and rows < self._world.size * self.batch_size <= self.n
        return not self.by_batches or smaller or short

    def _rows_per_process(self, rows: int, *, smaller: bool = False) -> int:
        """Returns the number of rows that each process gets of an order of `rows` rows."""
        processes = self._world.size
        by_rows = self._deals_by_rows(rows, smaller=smaller)
        unit = processes if by_rows else processes * self.batch_size
        # The drop_last of accelerate is about batches, so it drops none of the rows that are dealt instead.
        drops = self._drops_remainder and by_rows != self.by_batches
        return pad(rows, unit, drop_last=drops) // processes

    def remainder(self, plan: PackedPlan) -> int:
        """Returns the number of rows of the last step, in all processes, before padding; 0 if it has no padding at its end."""
        if not self.by_batches or self.drop_last:
            return 0
        rows = self.rows_of(plan)
        if self._deals_by_rows(rows, smaller=plan.smaller):
            return 0
        return rows % (self._world.size * self.batch_size)

    # An epoch

    def _check_sampler(self, plan: PackedPlan) -> None:
        if isinstance(self.sampler, EpochSampler):
            self.sampler.check_size(self.n)
        if plan.rows == self.n or self.some_ids is None:
            return
        some_ids = self._find_some_ids()
        if some_ids is None or not torch.equal(some_ids, self.some_ids):
            raise ValueError(
                f"{type(self.sampler).__name__} yields other samples than when `attach` was called. Call run.detach() and "
                "attach again after the sampler has changed."
            )

    def _lazy_epoch(self, plan: PackedPlan) -> LazyEpoch | None:
        # The ids of other samplers are taken as the plain loader takes them: they may draw random numbers between two batches,
        # or have no end.
        if self._world.size > 1 or self._epochs is not None or self.is_known or not plan.everything:
            return None
        rows = none_if_unknown(lambda: self.rows_of(plan))
        if rows is not None and self.drop_last:
            rows -= rows % self.batch_size
        return LazyEpoch(self._lazy_batches(), rows, plan.weights, drop_last=self.drop_last)

    def _lazy_batches(self) -> Iterator[Tensor]:
        ids = iter(self._begin_sampler())
        size = self.batch_size
        while len(batch := as_ids(islice(ids, size), self.sampler, self.n)):
            yield batch

    def _begin_sampler(self) -> Iterable[int]:
        """Returns the sampler, ready to be iterated with the random draws of the user's loader."""
        # StatefulDataLoader with workers calls iter twice per epoch, and uses the second order.
        if is_of_torchdata(self.sampler, "RandomSampler") and self._loader.num_workers:
            iter(self.sampler)
        return self.sampler

    def compose(self, plan: PackedPlan, epoch: int) -> ComposedEpoch:
        """Returns the batches of all processes; see `Order.compose`."""
        finish: Callable[[], object] = do_nothing
        if plan.drawn:
            pieces: Iterable[Any] = [plan.ids.numpy()]
            rows = plan.rows
        else:
            piece, total, finish = self._draw(epoch)
            if plan.everything:
                pieces = (piece(part.start, part.stop) for part in chunks(total))
                rows = total
            else:
                pieces = choose(piece, total, plan)
                rows = plan.rows
                # A sampler that repeats or skips ids yields another number of rows than the plan keeps, so they are counted.
                if not self._sampler_yields_once:
                    pieces = [*pieces]
                    rows = sum(map(len, pieces))
        ends, by_rows = self.cut(rows, everything=plan.everything, smaller=plan.smaller)
        return ComposedEpoch(pieces, rows, ends, by_rows, finish)

    def _draw(self, epoch: int) -> tuple[Piece, int, Callable[[], object]]:
        """Returns the order of all samples in an epoch, its number of ids, and what the sampler draws at its end.

        Raises:
            DisagreementError: The samplers of the processes do not have the same order; all processes raise it.
        """
        sampler = self.sampler
        facts = {"the epoch of the sampler, as `sampler.set_epoch` sets it": epoch}
        if type(sampler) in (Shuffle, WeightedSampler):
            # Their order depends on the seed and epoch only, so no process has to compute all ids for a checksum.
            agree(self._world, facts)
            return sampler.order(epoch).piece, sampler.total, do_nothing
        ids, finish = self._all_ids()
        # A sampler may draw from a generator that differs between processes. These would then train on some samples twice and
        # on others never.
        if self._world.size > 1:
            checksum = zlib.crc32(np.ascontiguousarray(ids).data)
            agree(self._world, {**facts, "the checksum of the order of the epoch": checksum})
        return lambda begin, end: ids[begin:end], len(ids), finish

    def _all_ids(self) -> tuple[NDArray[Any], Callable[[], object]]:
        """Returns the order of all samples as the sampler makes it, and a function that draws what it draws at its end."""
        sampler = self.sampler
        # torch.randperm draws the same permutation for both, and int32 takes half of the memory.
        dtype = torch.int32 if self.n < 2**31 else torch.int64
        if type(sampler) is SequentialSampler and self.is_known:
            return np.arange(self.n, dtype=small_dtype(self.n)), do_nothing
        if type(sampler) is RandomSampler and self.is_known:
            of_user = sampler.generator
            generator = of_user
            # As RandomSampler.__iter__ does: without a generator, it draws a seed from the global random state.
            if of_user is None:
                seed = int(torch.empty((), dtype=torch.int64).random_().item())
                generator = torch.Generator().manual_seed(seed)
            ids = torch.randperm(self.n, generator=generator, dtype=dtype).numpy()
            # It draws a second permutation when its ids run out. Without a generator of the user, this has no effect.
            if of_user is None:
                return ids, do_nothing
            return ids, partial(torch.randperm, self.n, generator=of_user, dtype=dtype)
        if type(sampler) is DistributedSampler and self._world.size > 1:
            if not sampler.shuffle:
                return np.arange(self.n, dtype=small_dtype(self.n)), do_nothing
            # The order that DistributedSampler draws, before each rank takes every W-th id of it.
            generator = torch.Generator().manual_seed(sampler.seed + sampler.epoch)
            return torch.randperm(self.n, generator=generator, dtype=dtype).numpy(), do_nothing
        return as_ids(list(self._begin_sampler()), sampler, self.n).numpy(), do_nothing
