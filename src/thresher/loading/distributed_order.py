"""Divides the order of the chosen samples among several processes, in the same way as the user's loader."""

import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from thresher.distributed.order import KeptOrder, Piece, RankBatches, RankOrder
from thresher.distributed.world import World, agree
from thresher.loading.epoch_order import (
    EpochCursor,
    IdBatchSampler,
    OrderPlace,
    as_ids,
    generators_of,
)
from thresher.loading.held_plan import HeldPlan
from thresher.loading.samplers import (
    check_unchanged,
    inner_sampler,
    is_dealt_by_accelerate,
    share_states,
)
from thresher.loading.smaller_batches import StepSizes, smaller_sizes
from thresher.permutation import Permutation
from thresher.samplers.shuffle import Shuffle


class SharedSampler:
    """The user's sampler in distributed training: each process gets a part of its order.

    Args:
        loader: The user's loader, already checked by `check_shared`.
        world: The processes.

    Attributes:
        n: Number of samples of the dataset.
        sampler: The sampler, without the wrappers of accelerate.
    """

    def __init__(self, loader: DataLoader[Any], world: World) -> None:
        self._loader = loader
        self._dataset = loader.dataset
        self._world = world
        self._place = world.rank, world.size
        self.n = len(self._dataset)  # pyright: ignore[reportArgumentType]
        self._batches: Any = loader.batch_sampler
        self.by_batches = is_dealt_by_accelerate(self._batches)
        """Whether each process gets every W-th batch of the order, rather than every W-th row."""
        self.sampler = inner_sampler(self._batches)
        self._epoch: int | None = None

    @property
    def drop_last(self) -> bool:
        """Whether the user's loader drops a last batch that is not full."""
        return self._batches.drop_last

    @property
    def batch_size(self) -> int:
        """Number of rows of a batch of this process."""
        split = getattr(self._batches, "split_batches", False)
        return self._batches.batch_size // self._world.size if split else self._batches.batch_size

    @property
    def yields_once(self) -> bool:
        """Whether no sample comes twice in an epoch; some do if the first ids are repeated to give processes equal parts."""
        return (
            self._drops
            or self.n % (self._world.size * (self.batch_size if self.by_batches else 1)) == 0
        )

    @property
    def _drops(self) -> bool:
        return bool(
            self._batches.drop_last
            if self.by_batches
            else getattr(self._batches.sampler, "drop_last", False)
        )

    def generators(self) -> list[torch.Generator]:
        """Returns the generators that the loader draws from."""
        return generators_of(self.sampler, self._loader)

    def rows_of(self, total: int) -> int:
        """Returns the number of rows per process, if an order of `total` ids is divided.

        Args:
            total: Number of ids of the order.
        """
        return 0 if total == 0 else len(self.dealt(np.arange, total))

    def dealt(self, piece: Piece, total: int, *, by_rows: bool = False) -> RankOrder | RankBatches:
        """Returns the part of an order that this process gets.

        Args:
            piece: Function of two positions that returns the ids of the whole order between them.
            total: Number of ids of the order.
            by_rows: Whether each of W processes gets every W-th row, even if the loader divides whole batches.
        """
        # A plan of less than one batch for each process is shared by rows: otherwise no process would get any.
        short = self._drops and total < self._world.size * self.batch_size <= self.n
        if self.by_batches and not by_rows and not short:
            return RankBatches(
                piece, total, *self._place, batch=self.batch_size, drop_last=self._drops
            )
        return RankOrder(piece, total, *self._place, drop_last=self._drops and not self.by_batches)

    def state_dict(self) -> dict[str, Any]:
        """Returns the settings that determine the order of this and later epochs, as plain values."""
        seed, epoch = (getattr(self.sampler, name, 0) for name in ("seed", "epoch"))
        name = type(self.sampler).__name__
        return {
            "sampler": name,
            "seed": seed,
            "samples": self.n,
            "epoch": epoch,
            "begun": self._epoch,
        }

    def load_state_dict(self, state: Any, *, active: bool, consumed: int) -> None:
        """Restores the sample order of a saved run. The next epochs continue from it.

        Args:
            state: State that `state_dict` returned.
            active: Whether an epoch was in progress.
            consumed: Number of ids of that epoch that had been taken from the sampler.
        """
        self._epoch = state["begun"]
        # If the method drew the order of the epoch, the sampler did not begin an epoch, and `_epoch` is None.
        epoch = self._epoch if active and consumed and self._epoch is not None else state["epoch"]
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def begin(self, place: OrderPlace, *, drawn: bool = False) -> int:
        """Begins an epoch, and returns the epoch number of the sampler, which determines the order.

        Args:
            place: Position that an interrupted epoch has reached.
            drawn: Whether the method drew the order; the order of the sampler is then not used. Default: False.

        Raises:
            RuntimeError: An interrupted epoch continues, but the sampler was set to another epoch.
            ValueError: The number of samples has changed.
        """
        check_unchanged(self._dataset, self.n)
        # The loader of accelerate gives all processes the same random states when it is iterated. The run does not iterate it,
        # so this is done here.
        share_states(self._loader)
        sampler = self.sampler
        epoch = int(getattr(self.sampler, "epoch", 0))
        if drawn:
            self._epoch = None
            return epoch
        # Loops call set_epoch before each epoch, and a resumed loop may count epochs from 0 again.
        if place.consumed and epoch != self._epoch:
            raise RuntimeError(
                f"The run resumes in the middle of an epoch, in the order of epoch {self._epoch} of its "
                f"{type(sampler).__name__}, but the sampler is now set to epoch {epoch}. Call set_epoch({self._epoch}) on it "
                "before this epoch."
            )
        self._epoch = epoch
        if isinstance(sampler, Shuffle):
            sampler.begin_pass()
        return epoch

    def order(self, epoch: int) -> Piece:
        """Returns the order of all samples in an epoch, before the method chooses. Every process must call it.

        Args:
            epoch: Number of the epoch, as `begin` returned it.

        Raises:
            DisagreementError: The samplers of the processes do not have the same order; all processes raise it.
        """
        sampler = self.sampler
        known = {"the epoch of the sampler, as `sampler.set_epoch` sets it": epoch}
        if isinstance(sampler, Shuffle):
            # Its order depends on the seed and epoch only, so no process has to compute all ids for a checksum.
            agree(self._world, known)
            return Permutation(self.n, sampler.seed, epoch).piece
        # A sampler may draw from a generator that differs between processes. These would then train on some samples twice and
        # on others never.
        ids = self._all_ids()
        agree(
            self._world,
            {**known, "the checksum of the order of the epoch": zlib.crc32(ids.tobytes())},
        )
        return lambda begin, end: ids[begin:end].astype(np.int64, copy=False)

    def _all_ids(self) -> NDArray[Any]:
        """Returns the order of the epoch as the sampler makes it, for all processes alike."""
        sampler = self.sampler
        if type(sampler) is DistributedSampler:
            if not sampler.shuffle:
                return np.arange(self.n)
            # The order that DistributedSampler draws, before each rank takes every W-th id of it.
            generator = torch.Generator().manual_seed(sampler.seed + sampler.epoch)
            return torch.randperm(self.n, generator=generator).numpy()
        return as_ids(list(sampler), sampler, self.n).numpy()


class OwnRows:
    """The rows of this process with their weights, read in pieces.

    The rows are computed only when the first one is needed: a loader draws the seed of its workers before the sampler draws the
    order, perhaps from the same generator.

    Args:
        make: Function that computes the rows; every process must call it.
        place: Number of rows that were already taken.
        plan: The plan.
    """

    def __init__(
        self, make: Callable[[], RankOrder | RankBatches], place: int, plan: HeldPlan
    ) -> None:
        self._make = make
        self._place = place
        self._plan = plan
        self._made: RankOrder | RankBatches | None = None

    @property
    def _rows(self) -> RankOrder | RankBatches:
        if self._made is None:
            self._made = self._make()
        return self._made

    def take(self, k: int) -> Tensor:
        """Returns the next `k` ids, int64; fewer when they run out."""
        ids = torch.from_numpy(self._rows.take(self._place, self._place + k))
        self._place += len(ids)
        return ids

    def skip(self, k: int) -> None:
        """Leaves out the next `k` ids."""
        self._place = min(self._place + k, len(self._rows))

    def weights(self, ids: NDArray[np.int64]) -> Tensor | None:
        """Returns the weights of rows that were taken, shape (k,), float32; None if all are 1.

        Args:
            ids: Ids to look up, shape (k,), int64.
        """
        return self._plan.weights_of(ids)


class SharedOrder:
    """The order of samples with several processes; `UserOrder` is the same for one process.

    Args:
        loader: The user's loader, already checked by `check_shared`.
        world: The processes.
    """

    streams = False

    def __init__(self, loader: DataLoader[Any], world: World) -> None:
        self.sizes = sampler = SharedSampler(loader, world)
        self.n = sampler.n
        self.sampler = sampler.sampler
        self._world = world
        self.generators = sampler.generators
        self.state_dict = sampler.state_dict
        self.load_state_dict = sampler.load_state_dict

    # What does not depend on the plan

    @property
    def is_free(self) -> bool:
        """Whether the order is a plain shuffle, which a method may replace by another order."""
        sampler = self.sampler
        return (
            sampler.shuffle
            if isinstance(sampler, DistributedSampler)
            else isinstance(sampler, RandomSampler | Shuffle)
        )

    @property
    def yields_once(self) -> bool:
        """Whether no sample comes twice in an epoch; some do if the first ids are repeated to give processes equal parts."""
        return self.sizes.yields_once

    def ids_of_sampler(self) -> None:
        """Returns None, which means all ids of the dataset."""

    def candidates(self, seen: int) -> int:
        """Returns the number of ids that this process has in an epoch of full training."""
        return self.sizes.rows_of(self.n)

    def length_of_stream(self, seen: int) -> None:
        """Returns None: an IterableDataset is not supported with several processes."""

    # The plan of an epoch

    def samples_of(self, plan: HeldPlan) -> int:
        """Returns the number of rows of this process in an epoch with this plan."""
        return self.sizes.rows_of(plan.rows)

    def step_sizes(
        self, plan: HeldPlan, sizes: IdBatchSampler, everything: int | None, seen: int
    ) -> StepSizes | None:
        """Returns the sizes of the smaller batches of this process; None if an epoch has full batches.

        Args:
            plan: The plan of an epoch.
            sizes: Batch size, and whether a last batch that is not full is dropped.
            everything: Number of samples in an epoch of full training, in all processes; None for the number of ids of the
                sampler.
            seen: Ignored; `UserOrder` needs it for an IterableDataset.

        Raises:
            ValueError: There are too few rows for the steps.
        """
        if not plan.smaller_batches:
            return None
        full = self.n if everything is None else everything
        staying = self.sizes.rows_of(plan.rows)
        everything = self.sizes.rows_of(full)
        size = sizes.batch_size
        drop_last = sizes.drop_last
        return smaller_sizes(lambda: staying, everything, size, drop_last, least=sizes.least)

    # An epoch

    def cursor(
        self, plan: HeldPlan, place: OrderPlace, sizes: IdBatchSampler, everything: int | None
    ) -> EpochCursor:
        """Returns the rows of this process in an epoch. Every process must call it.

        Args:
            plan: The plan of the epoch.
            place: Position that an interrupted epoch has reached.
            sizes: Batch size, and whether a last batch that is not full is dropped.
            everything: Number of samples in an epoch of full training, in all processes; None for the number of ids of the
                sampler.

        Raises:
            DisagreementError: The samplers of the processes do not have the same order; all processes raise it.
            RuntimeError: An interrupted epoch continues, but the sampler was set to another epoch.
            ValueError: The interrupted epoch had steps of other sizes, so its position is not between two steps.
        """
        epoch = self.sizes.begin(place, drawn=plan.drawn)
        smaller = self.step_sizes(plan, sizes, everything, 0)
        # An error here comes before any process draws. An epoch can only be resumed between two steps.
        if smaller is not None:
            smaller.step_at(place.stayed)
        # accelerate divides an order by full batches. Smaller steps have other sizes, so their order is divided by single rows.
        rows = OwnRows(
            partial(self._make, plan, epoch, by_rows=smaller is not None), place.stayed, plan
        )
        return EpochCursor(
            order=rows,
            stayed=place.stayed,
            weights=None if plan.weights is None else rows.weights,
            staying=self.samples_of(plan) if smaller is None else smaller.rows,
            drops_last=smaller is None and sizes.drops(plan, self.samples_of(plan)),
            sizes=smaller,
            least=1 if smaller is not None else sizes.least_of(plan),
        )

    def _make(self, plan: HeldPlan, epoch: int, *, by_rows: bool) -> RankOrder | RankBatches:
        """Returns the rows of this process in an epoch. Every process must call it."""
        if plan.drawn:
            ids = plan.ids.numpy()

            def between(begin: int, end: int) -> NDArray[np.int64]:
                return ids[begin:end]

            piece = between
            total = plan.rows
        elif plan.everything:
            piece = self.sizes.order(epoch)
            total = self.n
        else:
            kept = KeptOrder(self.sizes.order(epoch), self.n, plan.keeps, self._world)
            piece = kept.take
            total = len(kept)
        return self.sizes.dealt(piece, total, by_rows=by_rows)
