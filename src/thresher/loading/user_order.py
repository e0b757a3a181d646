"""The order in which the user's loader reads its dataset, and the arrays of an epoch: what a plan keeps of this order."""

import operator
import reprlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
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

from thresher.distributed.world import ALONE, World, agree
from thresher.loading.epoch import (
    Epoch,
    Piece,
    choose,
    deal,
    do_nothing,
    full_batches,
    rows_dealt,
    small_dtype,
)
from thresher.loading.packed_plan import PackedPlan
from thresher.loading.samplers import (
    ONCE,
    check_unchanged,
    inner_sampler,
    is_dealt_by_accelerate,
    is_of_torchdata,
    is_seeded_by_epoch,
    share_states,
)
from thresher.loading.settings import checked_batch_size
from thresher.loading.smaller_batches import SmallerBatchesError, smaller_batches
from thresher.samplers.epochs import EpochSampler
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
    values: list[Any] = (
        numbers.tolist() if isinstance(numbers, Tensor | np.ndarray) else list(numbers)
    )
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


def generators_of(sampler: Any, loader: Any) -> list[torch.Generator]:
    """Returns the generators of a loader and its sampler without duplicates; omits a generator that the sampler reseeds itself.

    Args:
        sampler: Sampler of the loader.
        loader: The user's loader.
    """
    of_sampler = None if is_seeded_by_epoch(sampler) else getattr(sampler, "generator", None)
    candidates = [of_sampler, loader.generator]
    generators = [generator for generator in candidates if isinstance(generator, torch.Generator)]
    return generators[:1] if len(generators) == 2 and generators[0] is generators[1] else generators


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
    return type(inner_sampler(loader.batch_sampler)).__name__ in ONCE


def _seed_of(sampler: Any) -> int:
    """Returns the seed of a sampler; 0 for one without any."""
    # The name in the SeedableRandomSampler of accelerate.
    return getattr(sampler, "initial_seed", getattr(sampler, "seed", 0))


class SamplerEpochs:
    """The epochs of a sampler that numbers them itself, also after a resume.

    Args:
        sampler: The sampler. One without epochs is always in epoch 0.
        n: Number of samples of the dataset.
        loader: The user's loader.
    """

    def __init__(self, sampler: Any, n: int, loader: Any) -> None:
        self._sampler = sampler
        self._n = n
        self._loader = loader
        self._iteration: int | None = None
        self._begun: int | None = None
        self._next = 0
        self._counted = 0

    @property
    def now(self) -> int:
        """Number of the next epoch; of a sampler without numbers, the number of epochs that have begun."""
        return int(getattr(self._sampler, "epoch", self._counted))

    def begin(self, *, resumed: bool, drawn: bool) -> int:
        """Begins an epoch, and returns its number, which determines the order.

        Args:
            resumed: Whether an interrupted epoch continues.
            drawn: Whether the method drew the order, so that the sampler begins no epoch.

        Raises:
            RuntimeError: An interrupted epoch continues, but the sampler was set to another epoch.
            ValueError: The user called `sampler.set_epoch(epoch, consumed)`, which is for loaders without a run.
        """
        sampler = self._sampler
        name = type(sampler).__name__
        # A loader of accelerate sets the epoch of its sampler to this number, which it does not save.
        self._iteration = getattr(self._loader, "iteration", None)
        now = self.now
        counts = isinstance(sampler, EpochSampler)
        if counts and sampler.consumed:
            raise ValueError(
                f"{name}.set_epoch was called with consumed={sampler.consumed}, which is for loaders without a run. Load "
                "run.state_dict() of the interrupted run instead."
            )
        if drawn:
            self._begun = None
            return now
        if not resumed:
            self._begun = now
            self._counted += 1
            if counts:
                sampler.begin_pass()
            return now
        begun = self._begun
        # Loops call set_epoch before each epoch, and a resumed loop may count epochs from 0 again.
        allowed = (begun, self._next) if counts or not hasattr(sampler, "epoch") else (begun,)
        if begun is None or now not in allowed:
            raise RuntimeError(
                f"The run resumes in the middle of an epoch, in the order of epoch {begun} of its {name}, but the sampler is "
                f"now set to epoch {now}. Load the state again. Then call set_epoch({begun}) (on the loader, if accelerate "
                "prepared it), or do not call set_epoch before the end of this epoch."
            )
        if counts:
            sampler.set_epoch(self._next)
        return begun

    def state_dict(self) -> dict[str, Any]:
        """Returns the values that determine the orders of this epoch and of later ones, as plain values."""
        sampler = self._sampler
        epoch = self.now
        if isinstance(sampler, EpochSampler):
            settings = sampler.state_at(epoch, 0)
        else:
            settings = {"seed": _seed_of(sampler), "samples": self._n, "epoch": epoch}
        place = {"begun": self._begun, "iteration": self._iteration}
        return {**settings, **place, "sampler": type(sampler).__name__}

    def load_state_dict(self, state: Mapping[str, Any], *, active: bool, consumed: int) -> None:
        """Restores the sample order of a saved run. The next epochs continue from it.

        Args:
            state: State that `state_dict` returned.
            active: Whether an epoch was in progress.
            consumed: Number of rows of that epoch that were taken.
        """
        sampler = self._sampler
        if isinstance(sampler, WeightedSampler):
            sampler.restore_weights(state)
        self._begun = state["begun"]
        iteration = state.get("iteration")
        if iteration is not None and hasattr(self._loader, "iteration"):
            self._loader.iteration = iteration + (not active)
        self._next = self._counted = state["epoch"]
        # The interrupted epoch of other samplers is drawn again from their own epoch; if the loop has not got a batch of it
        # yet, so is that of ours.
        again = active and self._begun is not None
        if consumed and isinstance(sampler, EpochSampler):
            again = False
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(state["begun"] if again else self._next)


class UserOrder:
    """The order of the user's sampler for a map-style dataset, as far as Thresher knows it.

    Args:
        loader: The user's loader; with several processes, already checked by `check_shared`.
        world: Processes among which the samples are divided. Default: one process.
        least: Least number of rows that the model trains on: 2 if it has BatchNorm. Default: 1.
        samples: Number of samples of full training, if pruning left some out. Default: those that the sampler yields.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        world: World = ALONE,
        *,
        least: int = 1,
        samples: int | None = None,
    ) -> None:
        self._loader = loader
        self._batches: Any = loader.batch_sampler
        self._world = world
        self._least = least
        self._samples = samples
        self.dataset = loader.dataset
        self.n = len(self.dataset)  # pyright: ignore[reportArgumentType]
        self.by_batches = is_dealt_by_accelerate(self._batches)
        """Whether each process gets every W-th batch of the order, rather than every W-th row."""
        self.sampler: Any = inner_sampler(self._batches)
        several = world.size > 1
        # The reader checks before each epoch that the user has not changed it.
        self.batch_size = self._find_batch_size()
        """Number of rows of a full batch of this process."""
        self.some_ids = None if several else self._find_some_ids()
        """Ids that the sampler can yield, shape (K,), int64, ascending; None if these are all ids, or are not known."""
        own = type(self.sampler) in (Shuffle, WeightedSampler)
        numbered = several or own or is_seeded_by_epoch(self.sampler)
        self._epochs = SamplerEpochs(self.sampler, self.n, loader) if numbered else None

    # What does not depend on a plan

    def _find_batch_size(self) -> int:
        splits = getattr(self._batches, "split_batches", False)
        return checked_batch_size(self._batches) // (self._world.size if splits else 1)

    @property
    def full_batches(self) -> int:
        """Number of batches of this process in an epoch of full training."""
        rows = self.candidates
        # Full training does not train on a dropped last batch.
        return rows // self.batch_size if self.drop_last else -(-rows // self.batch_size)

    @property
    def drop_last(self) -> bool:
        """Whether the user's loader drops a last batch that is not full."""
        return self._batches.drop_last

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
        return (
            self._world.size > 1
            or self.is_known
            or shuffles_itself(self.sampler, self.n)
            or type(self.sampler) is DistributedSampler
            or type(self.sampler).__name__ in ONCE
            or (once and self.some_ids is not None and len(self.some_ids) == len(self.sampler))
        )

    def tokens(self) -> dict[str, Any]:
        """Returns `tokens` and `padded_tokens` of the epoch if the loader's batch sampler knows the lengths; else {}."""
        return {}

    @property
    def yields_once(self) -> bool:
        """Whether no sample comes twice in an epoch; some do if the first ids are repeated to give processes equal parts."""
        unit = self._world.size * (self.batch_size if self.by_batches else 1)
        return self._sampler_yields_once and (
            self._world.size == 1 or self._drops or self.n % unit == 0
        )

    @property
    def _drops(self) -> bool:
        """Whether rows are left out that cannot be divided equally among the processes."""
        dealer = self._batches if self.by_batches else self._batches.sampler
        return bool(getattr(dealer, "drop_last", False))

    @property
    def candidates(self) -> int:
        """Number of ids of this process in an epoch of full training."""
        if self._world.size > 1:
            return self._own_rows(self.n)
        return len(self.sampler) if hasattr(self.sampler, "__len__") else self.n

    def generators(self) -> list[torch.Generator]:
        """Returns the generators that the loader draws from."""
        return generators_of(self.sampler, self._loader)

    def state_dict(self) -> dict[str, Any] | None:
        """Returns the values that determine the orders of a sampler with epochs, as plain values; None for other samplers."""
        return None if self._epochs is None else self._epochs.state_dict()

    def load_state_dict(self, state: Any, *, active: bool, consumed: int) -> None:
        """Restores the sample order of a saved run; see `SamplerEpochs.load_state_dict`."""
        if self._epochs is not None and state is not None:
            self._epochs.load_state_dict(state, active=active, consumed=consumed)

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

    def ends(self, plan: PackedPlan) -> NDArray[np.int64]:
        """Returns where each batch of this process ends in an epoch with this plan, after a leading 0.

        Raises:
            SmallerBatchesError: There are fewer rows than the steps need, or their number is not known.
            TypeError: The number of rows is not known.
        """
        try:
            rows = self.rows_of(plan)
        except TypeError as error:
            if not plan.smaller:
                raise
            raise SmallerBatchesError(
                f"Smaller batches need the number of samples of an epoch, and {error}. Use spend='steps'."
            ) from None
        return self.ends_of(rows, everything=plan.everything, smaller=plan.smaller)

    def ends_of(self, rows: int, *, everything: bool, smaller: bool) -> NDArray[np.int64]:
        """Returns where each batch of this process ends, after a leading 0.

        Args:
            rows: Number of rows in all processes together.
            everything: Whether these are all samples, each once.
            smaller: Whether there are as many batches as in full training.

        Raises:
            SmallerBatchesError: There are fewer rows than the steps need.
        """
        size = self.batch_size
        if smaller:
            ends = smaller_batches(
                self._own_rows(rows, smaller=True),
                self.candidates if self._samples is None else self._own_rows(self._samples),
                size,
                drop_last=self.drop_last,
                least=self._least,
            )
            if ends is not None:
                return ends
        rows = self._own_rows(rows, smaller=smaller)
        # An epoch of less than one batch keeps it: with drop_last it would have no step.
        short = rows < size <= self.n and not everything
        # If samples are left out, an epoch may end with a batch of one row, on which BatchNorm cannot train. Full training and
        # an epoch of one row keep it, so that the model raises its own error.
        least = 1 if everything or rows < self._least else min(self._least, size)
        return full_batches(rows, size, drop_last=self.drop_last and not short, least=least)

    def deals_rows(self, rows: int, *, smaller: bool) -> bool:
        """Whether W processes get every W-th row of an order, rather than every W-th batch.

        Args:
            rows: Number of rows in all processes together.
            smaller: Whether the batches are smaller than in full training.
        """
        # accelerate divides an order by full batches. Smaller steps have other sizes, so their order is divided by rows; a plan
        # of less than one batch for each process, too, because otherwise no process would get any.
        short = self._drops and rows < self._world.size * self.batch_size <= self.n
        return not self.by_batches or smaller or short

    def remainder(self, plan: PackedPlan) -> int:
        """Returns how many rows the last step has in all processes without repeated ones, if these come last; else 0."""
        if not self.by_batches or self.drop_last or type(self) is not UserOrder:
            return 0  # composed batches may have other sizes
        rows = self.rows_of(plan)
        if self.deals_rows(rows, smaller=plan.smaller):
            return 0
        return rows % (self._world.size * self.batch_size)

    def _dealing(self, rows: int, *, smaller: bool) -> dict[str, Any]:
        """Returns the settings of `deal` and `rows_dealt` for an order of this many rows."""
        by_rows = self.deals_rows(rows, smaller=smaller)
        return {
            "size": self._world.size,
            "batch": 1 if by_rows else self.batch_size,
            "drop_last": self._drops and by_rows != self.by_batches,
        }

    def _own_rows(self, rows: int, *, smaller: bool = False) -> int:
        """Returns the number of rows of this process, if an order of so many rows is divided."""
        return rows_dealt(rows, **self._dealing(rows, smaller=smaller))

    # An epoch

    def begin(self, plan: PackedPlan, *, resumed: bool) -> Callable[[], Epoch] | Iterator[Tensor]:
        """Begins an epoch. Every process must call it.

        Args:
            plan: The plan of the epoch.
            resumed: Whether an interrupted epoch continues.

        Returns:
            A function that makes the epoch, which every process must call; or, for a plan with every sample and a sampler
            whose order is not known in advance, the ids in batches, as the sampler yields them.

        Raises:
            RuntimeError: An interrupted epoch continues, but the sampler was set to another epoch.
            ValueError: The number of samples, or the ids of the sampler, have changed.
        """
        # Checked in each epoch, because an active-learning loop may have added samples.
        check_unchanged(self.dataset, self.n)
        if self._world.size > 1:
            # The loader of accelerate gives all processes the same random states when it is iterated. The run does not iterate
            # it, so this is done here.
            share_states(self._loader)
        elif plan.rows != self.n:
            self._check_some_ids()
        if self._world.size == 1 and isinstance(self.sampler, EpochSampler):
            self.sampler.check_size(self.n)
        epoch = 0
        if self._epochs is not None:
            epoch = self._epochs.begin(resumed=resumed, drawn=plan.drawn)
        # The ids of other samplers are taken as the plain loader takes them: they may draw random numbers between two batches,
        # or have no end.
        if self._world.size == 1 and plan.everything and self._epochs is None and not self.is_known:
            return self._as_it_comes()
        # An error about the batches comes before any process draws.
        ends = known(lambda: self.ends(plan))
        return lambda: self._make(plan, epoch, ends)

    def _check_some_ids(self) -> None:
        if self.some_ids is None:
            return
        some_ids = self._find_some_ids()
        if some_ids is None or not torch.equal(some_ids, self.some_ids):
            raise ValueError(
                f"{type(self.sampler).__name__} yields other samples than when `attach` was called. Call run.detach() and "
                "attach again after the sampler has changed."
            )

    def _as_it_comes(self) -> Iterator[Tensor]:
        ids = iter(self._iterated())
        size = self.batch_size
        while len(batch := as_ids(islice(ids, size), self.sampler, self.n)):
            yield batch

    def _iterated(self) -> Iterable[int]:
        if is_of_torchdata(self.sampler, "RandomSampler") and self._loader.num_workers:
            # StatefulDataLoader with workers calls iter twice per epoch, and uses the second order.
            iter(self.sampler)
        return self.sampler

    def _make(self, plan: PackedPlan, epoch: int, ends: NDArray[np.int64] | None) -> Epoch:
        """Makes the epoch. Every process must call it."""
        finish: Callable[[], object] = do_nothing
        if plan.drawn:
            pieces: Iterable[Any] = [plan.ids.numpy()]
            rows = plan.rows
        else:
            piece, total, finish = self._draw(epoch)
            if plan.everything:
                pieces = (piece(part.start, part.stop) for part in chunks(total))
                rows = total
            elif self._sampler_yields_once:
                pieces = choose(piece, total, plan)
                rows = plan.rows
            else:
                pieces = [*choose(piece, total, plan)]
                rows = sum(map(len, pieces))
        if ends is None:
            ends = self.ends_of(rows, everything=False, smaller=False)
        dealing = self._dealing(rows, smaller=plan.smaller)
        ids = deal(pieces, rows, self._world.rank, dtype=small_dtype(self.n), **dealing)
        return Epoch(ids, ends, plan.weights_by_id(), finish)

    def _draw(self, epoch: int) -> tuple[Piece, int, Callable[[], object]]:
        """Returns the order of all samples in an epoch, its number of ids, and what the sampler draws at its end.

        Raises:
            DisagreementError: The samplers of the processes do not have the same order; all processes raise it.
        """
        sampler = self.sampler
        known = {"the epoch of the sampler, as `sampler.set_epoch` sets it": epoch}
        if type(sampler) in (Shuffle, WeightedSampler):
            # Their order depends on the seed and epoch only, so no process has to compute all ids for a checksum.
            agree(self._world, known)
            return sampler.order(epoch).piece, sampler.total, do_nothing
        ids, finish = self._all_ids()
        # A sampler may draw from a generator that differs between processes. These would then train on some samples twice and
        # on others never.
        if self._world.size > 1:
            checksum = zlib.crc32(np.ascontiguousarray(ids).data)
            agree(self._world, {**known, "the checksum of the order of the epoch": checksum})
        return lambda begin, end: ids[begin:end], len(ids), finish

    def _all_ids(self) -> tuple[NDArray[Any], Callable[[], object]]:
        """Returns the order of all samples as the sampler makes it, and what it draws at its end."""
        sampler = self.sampler
        # torch.randperm draws the same permutation for both, and int32 takes half of the memory.
        small = torch.int32 if self.n < 2**31 else torch.int64
        if type(sampler) is SequentialSampler and self.is_known:
            return np.arange(self.n, dtype=small_dtype(self.n)), do_nothing
        if type(sampler) is RandomSampler and self.is_known:
            own = sampler.generator
            # RandomSampler draws the seed of its permutation from the global state, and only when its first id is asked for.
            generator = own
            if own is None:
                seed = int(torch.empty((), dtype=torch.int64).random_().item())
                generator = torch.Generator().manual_seed(seed)
            ids = torch.randperm(self.n, generator=generator, dtype=small).numpy()
            # It draws a second permutation when its ids run out. Without a generator of the user, this has no effect.
            if own is None:
                return ids, do_nothing
            return ids, partial(torch.randperm, self.n, generator=own, dtype=small)
        if type(sampler) is DistributedSampler and self._world.size > 1:
            if not sampler.shuffle:
                return np.arange(self.n, dtype=small_dtype(self.n)), do_nothing
            # The order that DistributedSampler draws, before each rank takes every W-th id of it.
            generator = torch.Generator().manual_seed(sampler.seed + sampler.epoch)
            return torch.randperm(self.n, generator=generator, dtype=small).numpy(), do_nothing
        return as_ids(list(self._iterated()), sampler, self.n).numpy(), do_nothing


def known(number: Callable[[], Any]) -> Any:
    """Returns `number()`; None if it raises an error because a sampler or dataset does not know its length."""
    try:
        return number()
    # len() raises TypeError without __len__; a class with a __len__ that knows no length may raise NotImplementedError.
    except (TypeError, NotImplementedError):
        return None
