"""The order in which the user's loader reads its dataset."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from thresher.loading.epoch_order import (
    EpochCursor,
    IdBatchSampler,
    Order,
    OrderPlace,
    SamplerOrder,
    TensorOrder,
    as_ids,
    generators_of,
    sequential,
    shuffled,
)
from thresher.loading.held_plan import HeldPlan
from thresher.loading.samplers import check_unchanged, is_of_torchdata, is_seeded_by_epoch
from thresher.loading.smaller_batches import StepSizes, smaller_sizes
from thresher.samplers.epochs import EpochIds
from thresher.samplers.shuffle import Shuffle
from thresher.samplers.weighted import WeightedSampler

KNOWN = (RandomSampler, SequentialSampler, Shuffle)
"""Samplers whose order can be reproduced with tensors."""

# Compared by name, because the library need not be installed.
ONCE = ("LengthGroupedSampler",)
"""Names of sampler classes of other libraries that yield each id once: the one of `group_by_length` of Transformers."""


class ShufflePasses:
    """Chooses the epoch of a `Shuffle` or `WeightedSampler` for each pass, and the position at which a resumed pass begins.

    Args:
        shuffle: The sampler of the user's loader.
    """

    def __init__(self, shuffle: Shuffle | WeightedSampler) -> None:
        self._shuffle = shuffle
        self._ids = EpochIds(shuffle)
        self._next = 0

    def order(self, consumed: int) -> EpochIds:
        """Returns the ids of the next pass.

        Args:
            consumed: Number of ids of the order that an interrupted epoch has consumed already; 0 for a new epoch.

        Raises:
            RuntimeError: The user called `set_epoch` with another epoch than the interrupted one.
            ValueError: The user called `sampler.set_epoch(epoch, consumed)`, which is for loaders without a run.
        """
        if self._shuffle.consumed:
            raise ValueError(
                f"{type(self._shuffle).__name__}.set_epoch was called with consumed={self._shuffle.consumed}, which is for "
                "loaders without a run. Load run.state_dict() of the interrupted run instead."
            )
        if not consumed:
            self._ids = EpochIds(self._shuffle)
            return self._ids
        if self._shuffle.epoch not in (self._ids.epoch, self._next):
            raise RuntimeError(
                f"The run resumes in the middle of an epoch, in the order of epoch {self._ids.epoch} of its sampler, but "
                f"set_epoch({self._shuffle.epoch}) was called. Load the state again. Then call "
                f"set_epoch({self._ids.epoch}) (on the loader, if accelerate prepared it), or do not call set_epoch before the "
                "end of this epoch."
            )
        self._shuffle.set_epoch(self._next, consumed=0)
        self._ids = EpochIds(self._shuffle, self._ids.epoch, consumed)
        return self._ids

    def state_dict(self) -> dict[str, Any]:
        """Returns the values that determine the orders of this pass and of later ones, as plain values."""
        shuffle = self._shuffle
        return {
            **shuffle.state_at(shuffle.epoch, 0),
            "sampler": type(shuffle).__name__,
            "begun": self._ids.epoch,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, active: bool, consumed: int) -> None:
        """Restores the sample order of a saved run. The next epochs continue from it.

        Args:
            state: State that `state_dict` returned.
            active: Whether an epoch was in progress.
            consumed: Number of ids of that epoch that had been taken from the sampler.
        """
        if isinstance(self._shuffle, WeightedSampler):
            self._shuffle.restore_weights(state)
        begun = state["begun"]
        self._next = state["epoch"]
        self._ids = EpochIds(self._shuffle, begun)
        # If the loop has not got a batch of the epoch yet, the epoch begins again.
        if begun is None or consumed or not active:
            begun = self._next
        self._shuffle.set_epoch(begun, consumed=0)


class UserOrder:
    """The order of the user's sampler, as far as Thresher knows it.

    Args:
        loader: The user's loader.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self.dataset = loader.dataset
        self.streams = isinstance(self.dataset, IterableDataset)
        self.n = 0 if self.streams else len(self.dataset)  # pyright: ignore[reportArgumentType]
        self.sampler: Any = None if self.streams else loader.batch_sampler.sampler  # pyright: ignore
        self.some_ids = None if self.streams else self._find_some_ids()
        """Ids that the sampler can yield, shape (K,), int64, ascending; None if these are all ids, or are not known."""
        self.passes = (
            ShufflePasses(self.sampler)
            if type(self.sampler) in (Shuffle, WeightedSampler)
            else None
        )
        """Chooses the epoch of each pass over a `Shuffle` or `WeightedSampler`; None for other samplers."""

    @property
    def is_known(self) -> bool:
        """Whether the sampler yields every id once, in an order that tensors can reproduce with the same random numbers."""
        # Exactly these classes: a subclass may yield another order.
        return type(self.sampler) in KNOWN and self._has_all_once()

    def _has_all_once(self) -> bool:
        draws = hasattr(self.sampler, "replacement")
        # The draws of a RandomSampler with replacement or num_samples are not reproduced with tensors.
        once = not draws or (not self.sampler.replacement and self.sampler.num_samples == self.n)
        return once and len(self.sampler.data_source) == self.n

    @property
    def _shuffles_itself(self) -> bool:
        """Whether the order is a plain shuffle that the sampler makes itself."""
        shuffles = is_seeded_by_epoch(self.sampler) or is_of_torchdata(
            self.sampler, "RandomSampler"
        )
        return shuffles and self._has_all_once()

    def _find_some_ids(self) -> Tensor | None:
        sampler = self.sampler
        kind = type(self.sampler)
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
            not self.streams
            and self.some_ids is None
            and type(self.sampler) not in draws
            and self.candidates(0) < self.n
        ):
            raise ValueError(
                f"`loader` has a sampler, {type(self.sampler).__name__}, that yields {len(self.sampler)} of the {self.n} "
                "samples of the dataset, and Thresher cannot find out which, so it cannot choose a share of them. Pass a "
                "loader over torch.utils.data.Subset(dataset, ids) with shuffle=True, or a SubsetRandomSampler(ids)."
            )
        return self.some_ids

    @property
    def yields_once(self) -> bool:
        """Whether the sampler yields each of its ids once."""
        once = self.some_ids is not None and not getattr(self.sampler, "replacement", False)
        return (
            self.is_known
            or self._shuffles_itself
            or type(self.sampler) is DistributedSampler
            or type(self.sampler).__name__ in ONCE
            or (once and self.some_ids is not None and len(self.some_ids) == len(self.sampler))
        )

    @property
    def sizes(self) -> Any:
        """Batch size and `drop_last` of the user's loader, as attributes of an object."""
        return self._loader.batch_sampler

    def state_dict(self) -> dict[str, Any] | None:
        """Returns the values that determine the orders of `passes`, as plain values and tensors; None for other samplers."""
        return None if self.passes is None else self.passes.state_dict()

    def load_state_dict(self, state: Any, *, active: bool, consumed: int) -> None:
        """Restores the sample order of a saved run. The next epochs continue from it.

        Args:
            state: State that `state_dict` returned.
            active: Whether an epoch was in progress.
            consumed: Number of ids of that epoch that had been taken from the sampler.
        """
        if self.passes is not None and state is not None:
            self.passes.load_state_dict(state, active=active, consumed=consumed)

    def check_unchanged(self, *, ids: bool) -> None:
        """Checks that the dataset and, if `ids` is True, the sampler have the same samples as when the run was attached.

        Args:
            ids: Whether the plans depend on the ids that the sampler yields.

        Raises:
            ValueError: The number of samples, or the ids of the sampler, have changed.
        """
        check_unchanged(self.dataset, self.n)
        if ids and self.some_ids is not None:
            some_ids = self._find_some_ids()
            if some_ids is None or not torch.equal(some_ids, self.some_ids):
                raise ValueError(
                    f"{type(self.sampler).__name__} yields other samples than when `attach` was called. Call run.detach() and "
                    "attach again after the sampler has changed."
                )

    @property
    def is_free(self) -> bool:
        """Whether the order is a plain shuffle, which a method may replace by another order."""
        return self._shuffles_itself or (
            self.is_known and isinstance(self.sampler, RandomSampler | Shuffle)
        )

    def generators(self) -> list[torch.Generator]:
        """Returns the generators that the loader draws from."""
        return generators_of(self.sampler, self._loader)

    def step_sizes(
        self, plan: HeldPlan, sizes: IdBatchSampler, everything: int | None, seen: int
    ) -> StepSizes | None:
        """Returns the sizes of the smaller batches of an epoch; None if its batches are full.

        Args:
            plan: Choice of samples for the epoch.
            sizes: Batch size, and whether an incomplete last batch is dropped.
            everything: Number of samples in an epoch of full training; None for the number of ids that the sampler yields.
            seen: Number of samples in the previous epoch of an IterableDataset.

        Raises:
            ValueError: There are fewer rows than the steps need, or the number of ids that the sampler yields is unknown.
        """
        if not plan.smaller_batches:
            return None
        everything = self.candidates(seen) if everything is None else everything
        ids = partial(self.samples_of, plan)
        size = sizes.batch_size
        drop_last = sizes.drop_last
        return smaller_sizes(ids, everything, size, drop_last, least=sizes.least)

    def cursor(
        self, plan: HeldPlan, place: OrderPlace, sizes: IdBatchSampler, everything: int | None
    ) -> EpochCursor:
        """Returns the rows of an epoch: the order of the sampler, and which of its ids the plan keeps.

        Args:
            plan: The plan of the epoch.
            place: Position that an interrupted epoch has reached.
            sizes: Batch size, and whether an incomplete last batch is dropped.
            everything: Number of samples in an epoch of full training; None for the number of ids that the sampler yields.
        """
        order, stayed = self._order_of(plan, place)
        smaller = self.step_sizes(plan, sizes, everything, 0)
        rows = _known(lambda: self.samples_of(plan))
        return EpochCursor(
            order=order,
            keeps=None if plan.drawn or plan.everything else plan.keeps,
            stayed=stayed,
            weights=None if plan.weights is None else plan.weights_of,
            staying=rows if smaller is None else smaller.rows,
            drops_last=smaller is None and sizes.drops(plan, rows),
            drawn=_known(lambda: len(self.sampler)),
            sizes=smaller,
            # `smaller_sizes` has refused steps with too few rows.
            least=1 if smaller is not None else sizes.least_of(plan),
        )

    def _order_of(self, plan: HeldPlan, place: OrderPlace) -> tuple[Order, int | None]:
        """Returns the ids of an epoch before its plan leaves samples out, and the value for `EpochCursor.stayed`."""
        # Checked in each epoch, because an active-learning loop may have added samples.
        self.check_unchanged(ids=plan.rows != self.n)
        # A Shuffle can begin at any position. Other orders reach a position only by drawing the ids before it again.
        if self.passes is None:
            return self._from_start(plan), None
        self.sampler.check_size(self.n)
        ids = self.passes.order(0 if plan.drawn else place.consumed)
        return (self._from_start(plan), None) if plan.drawn else (ids, place.stayed)

    def _from_start(self, plan: HeldPlan) -> Order:
        if plan.drawn:
            return TensorOrder(lambda: plan.ids)
        # The ids of other samplers are taken one by one, when the plain loader would take them.
        if not self.is_known:
            if is_of_torchdata(self.sampler, "RandomSampler") and self._loader.num_workers:
                iter(
                    self.sampler
                )  # StatefulDataLoader with workers calls iter twice per epoch, and uses the second order
            return SamplerOrder(self.sampler, self.n)
        if isinstance(self.sampler, SequentialSampler):
            return sequential(self.n)
        return shuffled(self.n, self.sampler.generator)

    def candidates(self, seen: int) -> int:
        """Returns the number of ids per epoch of full training.

        Args:
            seen: Number of samples in the previous epoch of an IterableDataset; 0 for the length that it states, if any.
        """
        if not self.streams:
            return len(self.sampler) if hasattr(self.sampler, "__len__") else self.n
        return seen or self.length_of_stream(0) or 0

    def length_of_stream(self, seen: int) -> int | None:
        """Returns the expected number of samples of an IterableDataset; None if it states no length.

        Args:
            seen: Number of samples in its previous epoch; 0 if there was none, for the length that it states.
        """
        length = _known(lambda: len(self.dataset))  # pyright: ignore[reportArgumentType]
        return length and (seen or length)

    def samples_of(self, plan: HeldPlan) -> int:
        """Returns the number of samples in an epoch with this plan.

        Raises:
            TypeError: The plan leaves out samples, but the sampler may repeat or skip ids, or has no length.
            ValueError: The plan leaves out samples, and the dataset has another number of samples than at `attach`.
        """
        if plan.everything:
            return len(self.sampler)
        # A sampler of a dataset that has grown yields more ids than it did, which looks like repeated ids.
        check_unchanged(self.dataset, self.n)
        if plan.drawn or self.yields_once:
            return plan.rows
        raise TypeError(
            f"the length of this epoch is not known before its end, because {type(self.sampler).__name__} may repeat or skip "
            "ids, and the method skips samples"
        )


def _known(number: Callable[[], int]) -> int | None:
    """Returns `number()`; None if it raises an error because a sampler or dataset does not know its length."""
    try:
        return number()
    # len() raises TypeError without __len__; a class with a __len__ that knows no length may raise NotImplementedError.
    except (TypeError, NotImplementedError):
        return None
