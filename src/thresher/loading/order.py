"""The batches of a map-style dataset in a run: composed for all processes together, then dealt to them."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from thresher.distributed.world import ALONE, World
from thresher.loading.epoch import ComposedEpoch, Epoch, LazyEpoch, ends_of_rank, small_dtype
from thresher.loading.packed_plan import PackedPlan
from thresher.loading.samplers import (
    check_unchanged,
    is_dealt_by_accelerate,
    is_seeded_by_epoch,
    share_states,
)
from thresher.samplers.epochs import EpochSampler
from thresher.samplers.weighted import WeightedSampler


def generators_of(sampler: Any, loader: Any) -> list[torch.Generator]:
    """Returns the generators of a loader and its sampler without duplicates; omits a generator that the sampler reseeds itself.

    Args:
        sampler: Sampler of the loader.
        loader: The user's loader.
    """
    if is_seeded_by_epoch(sampler):
        of_sampler = None
    else:
        of_sampler = getattr(sampler, "generator", None)
    candidates = [of_sampler, getattr(loader, "generator", None)]
    generators = [generator for generator in candidates if isinstance(generator, torch.Generator)]
    if len(generators) == 2 and generators[0] is generators[1]:
        return generators[:1]
    return generators


def _seed_of(sampler: Any) -> int:
    """Returns the seed of a sampler; 0 for one without any."""
    # The name in the SeedableRandomSampler of accelerate.
    return getattr(sampler, "initial_seed", getattr(sampler, "seed", 0))


class SamplerEpochs:
    """Keeps track of the epochs of a sampler whose order depends on the number of the epoch, also after a resume.

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
        """Epoch of a loader that accelerate prepared, when the epoch in progress began."""
        self._begun_epoch: int | None = None
        """Epoch in progress; None if the method drew its order."""
        self._loaded_epoch = 0
        """Next epoch of the sampler in the state that was loaded last."""
        self._begun_count = 0

    @property
    def now(self) -> int:
        """Number of the next epoch; for a sampler that does not number its epochs, the number of epochs begun."""
        return int(getattr(self._sampler, "epoch", self._begun_count))

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
        # Samplers of Thresher count on by themselves. The script, or accelerate, sets the epoch of others.
        counts_itself = isinstance(sampler, EpochSampler)
        if counts_itself and sampler.consumed:
            raise ValueError(
                f"{name}.set_epoch was called with consumed={sampler.consumed}, which is for loaders without a run. Load "
                "run.state_dict() of the interrupted run instead."
            )
        if drawn:
            self._begun_epoch = None
            return now
        if not resumed:
            self._begun_epoch = now
            self._begun_count += 1
            # The run computes the order itself and never iterates the sampler, which would otherwise count the epoch.
            if counts_itself:
                sampler.begin_pass()
            return now
        begun = self._begun_epoch
        # Loops call set_epoch before each epoch, and a resumed loop may count epochs from 0 again.
        allowed = {begun}
        # A sampler that counts by itself may also stand at the next epoch, as it does after its epoch has begun.
        if counts_itself or not hasattr(sampler, "epoch"):
            allowed.add(self._loaded_epoch)
        if begun is None or now not in allowed:
            raise RuntimeError(
                f"The run resumes in the middle of an epoch, in the order of epoch {begun} of its {name}, but the sampler is "
                f"now set to epoch {now}. Load the state again. Then call set_epoch({begun}) (on the loader, if accelerate "
                "prepared it), or do not call set_epoch before the end of this epoch."
            )
        if counts_itself:
            sampler.set_epoch(self._loaded_epoch)
        return begun

    def state_dict(self) -> dict[str, Any]:
        """Returns the values that determine the orders of this epoch and of later ones, as plain values."""
        sampler = self._sampler
        epoch = self.now
        if isinstance(sampler, EpochSampler):
            settings = sampler.state_at(epoch, 0)
        else:
            settings = {"seed": _seed_of(sampler), "samples": self._n, "epoch": epoch}
        position = {"begun": self._begun_epoch, "iteration": self._iteration}
        return {**settings, **position, "sampler": type(sampler).__name__}

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
        self._begun_epoch = state["begun"]
        iteration = state.get("iteration")
        if iteration is not None and hasattr(self._loader, "iteration"):
            self._loader.iteration = iteration + (not active)
        self._loaded_epoch = self._begun_count = state["epoch"]
        # An interrupted epoch is drawn again, so its sampler goes back to it. A sampler of Thresher goes back only if the loop
        # had no batch yet, when the epoch begins anew; otherwise `begin` is told that the epoch is resumed.
        goes_back = active and self._begun_epoch is not None
        if consumed and isinstance(sampler, EpochSampler):
            goes_back = False
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(state["begun"] if goes_back else self._loaded_epoch)


class Order(ABC):
    """What a plan keeps of a dataset, in the order and the batches of the user's loader.

    Args:
        loader: The user's loader; with several processes, already checked by `check_shared`.
        world: Processes among which the samples are divided. Default: one process.
        least: Least number of rows that the model trains on: 2 if it has BatchNorm. Default: 1.
        samples: Number of samples of full training, if pruning left some out. Default: those that the sampler yields.

    Attributes:
        sampler: Sampler that decides the order; a batch sampler that composes its batches.
        batch_size: Number of rows of a full batch of this process.
        drop_last: Whether full training leaves out a last batch that is not full.
        by_batches: Whether each process gets every W-th batch, rather than every W-th row.
    """

    sampler: Any
    batch_size: int
    drop_last: bool

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
        self._samples_after_pruning = samples
        self._epochs: SamplerEpochs | None = None
        # The plan and number of the epoch that was begun last. Weak: at 10^8 samples, a drawn plan would not fit in memory
        # beside the next one.
        self._begun: tuple[Callable[[], PackedPlan | None], int] = (lambda: None, 0)
        self.dataset: Any = loader.dataset
        self.n = len(self.dataset)
        self.by_batches = is_dealt_by_accelerate(self._batches)
        self._set_up()

    @abstractmethod
    def _set_up(self) -> None:
        """Sets what follows from the sampler of the loader."""

    @abstractmethod
    def lay_out(self, plan: PackedPlan, epoch: int) -> tuple[NDArray[np.int64], bool]:
        """Returns the ends of the batches of all processes, and whether they are dealt by rows, without random draws.

        Raises:
            SmallerBatchesError: There are fewer rows than the steps need, or their number is not known.
            TypeError: The number of rows is not known.
        """

    @abstractmethod
    def compose(self, plan: PackedPlan, epoch: int) -> ComposedEpoch:
        """Returns the batches of all processes. Every process must call it."""

    @abstractmethod
    def _check_sampler(self, plan: PackedPlan) -> None:
        """Checks that the sampler still yields the samples that it yielded when the run was attached."""

    def _lazy_epoch(self, plan: PackedPlan) -> LazyEpoch | None:
        """Returns an epoch with this plan whose ids are read batch by batch, if they must not be read in advance; else None."""
        return None

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

    def ends(self, plan: PackedPlan) -> NDArray[np.int64]:
        """Returns where each batch of this process ends in an epoch with this plan, after a leading 0; see `lay_out`."""
        begun_plan, epoch = self._begun
        # Within an epoch, its own number: the sampler already stands at the next one.
        if begun_plan() is not plan:
            epoch = self._next_epoch
        ends, by_rows = self.lay_out(plan, epoch)
        return self._ends_of_this_process(ends, by_rows=by_rows)

    @property
    def _next_epoch(self) -> int:
        return 0 if self._epochs is None else self._epochs.now

    def _ends_of_this_process(self, ends: NDArray[np.int64], *, by_rows: bool) -> NDArray[np.int64]:
        return ends_of_rank(ends, self._world.rank, self._world.size, by_rows=by_rows)

    def begin(self, plan: PackedPlan, *, resumed: bool) -> Callable[[], Epoch | LazyEpoch]:
        """Begins an epoch. Every process must call it.

        Args:
            plan: The plan of the epoch.
            resumed: Whether an interrupted epoch continues.

        Returns:
            A function that makes the epoch, which every process must call.

        Raises:
            RuntimeError: An interrupted epoch continues, but the sampler was set to another epoch.
            ValueError: The number of samples, or the ids of the sampler, have changed.
        """
        # Checked in each epoch, because an active-learning loop may have added samples.
        check_unchanged(self.dataset, self.n)
        if self._world.size > 1:
            # The loader of accelerate gives all processes the same random states when it is iterated, but the run does not
            # iterate it.
            share_states(self._loader)
        else:
            self._check_sampler(plan)
        epoch = 0
        if self._epochs is not None:
            epoch = self._epochs.begin(resumed=resumed, drawn=plan.drawn)
        self._begun = weakref.ref(plan), epoch
        lazy = self._lazy_epoch(plan)
        # The batches of an endless sampler, such as minGPT's of 10^10 draws, are too many to list.
        if lazy is None or plan.smaller:
            # Only for its errors, such as too few rows, which must come before any process draws.
            none_if_unknown(lambda: self.lay_out(plan, epoch))
        # The loader calls the result at its first batch, which is when the plain loader draws the order.
        if lazy is not None:
            return lambda: lazy
        return lambda: self._deal(plan, epoch)

    def _deal(self, plan: PackedPlan, epoch: int) -> Epoch:
        composed = self.compose(plan, epoch)
        ids = composed.deal(self._world.rank, self._world.size, dtype=small_dtype(self.n))
        ends = self._ends_of_this_process(composed.ends, by_rows=composed.by_rows)
        return Epoch(ids, ends, plan.weights_by_id(), composed.finish)


def none_if_unknown(count: Callable[[], Any]) -> Any:
    """Returns `count()`; None if it raises an error because a sampler or dataset does not know its length."""
    try:
        return count()
    # len() raises TypeError without __len__; a class with a __len__ that knows no length may raise NotImplementedError.
    except (TypeError, NotImplementedError):
        return None
