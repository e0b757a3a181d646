"""The batches of a sampler that composes them, such as batches by length: of the samples that a plan keeps, in every epoch."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from thresher.distributed.world import ALONE, World
from thresher.loading.epoch import Epoch, small_dtype
from thresher.loading.packed_plan import PackedPlan
from thresher.loading.samplers import check_unchanged, inner_batches
from thresher.loading.smaller_batches import SmallerBatchesError, too_few
from thresher.loading.user_order import SamplerEpochs, UserOrder

Composed = tuple[NDArray[np.int64], NDArray[np.int64]]


class ComposedOrder(UserOrder):
    """The order of a batch sampler with a function `compose`, as `thresher.samplers.BatchComposer` describes it.

    Args:
        loader: The user's loader; with several processes, already checked by `check_shared`.
        world: Processes, each of which gets every W-th batch. Default: one process.
        least: Least number of rows that the model trains on: 2 if it has BatchNorm. Default: 1.
        samples: Number of samples of full training, if pruning left some out. Default: those of the dataset.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        world: World = ALONE,
        *,
        least: int = 1,
        samples: int | None = None,
    ) -> None:
        self._composer = inner_batches(loader.batch_sampler)
        super().__init__(loader, world, least=least, samples=samples)
        self.sampler = self._composer
        self.some_ids = None
        self._epochs = SamplerEpochs(self._composer, self.n, loader)
        self._last: tuple[PackedPlan, int, Composed] | None = None

    @property
    def drop_last(self) -> bool:
        """Returns False: what the composer leaves out is in none of its batches."""
        return False

    def _find_batch_size(self) -> int:
        """Returns the largest number of rows of a batch of full training."""
        return int(np.diff(self._full).max())

    @cached_property
    def _full(self) -> NDArray[np.int64]:
        """Ends of the batches of all processes in an epoch of full training."""
        return self._composer.compose(np.arange(len(self._loader.dataset)), 0)[1]  # pyright: ignore

    @property
    def full_batches(self) -> int:
        """Number of batches of this process in an epoch of full training."""
        return len(self._own(len(self._full) - 1))

    @property
    def candidates(self) -> int:
        """Number of rows of this process in an epoch of full training, with those dropped; the mean of all processes."""
        return max(self.n, int(self._full[-1])) // self._world.size

    @property
    def yields_once(self) -> bool:
        """Whether no sample comes twice in an epoch."""
        whole = len(self._full) - 1
        divided = whole % self._world.size == 0 or self._drops
        return divided and int(self._full[-1]) <= self.n and getattr(self._composer, "once", False)

    @property
    def _drops(self) -> bool:
        dealer = self._batches if self.by_batches else self._composer
        return bool(getattr(dealer, "drop_last", False))

    def _own(self, batches: int) -> NDArray[np.int64]:
        """Returns the numbers of the batches of this process: every W-th one, the first again if some process lacks one."""
        size = self._world.size
        steps = batches // size if self._drops else -(-batches // size)
        return (np.arange(steps) * size + self._world.rank) % max(1, batches)

    def ends(self, plan: PackedPlan) -> NDArray[np.int64]:
        """Returns where each batch of this process ends in an epoch with this plan, after a leading 0.

        Raises:
            SmallerBatchesError: A batch has fewer rows than the model needs, or the composer makes no smaller batches.
        """
        assert self._epochs is not None
        # Within the epoch of this plan, and not of the one that the sampler begins next.
        known = self._last is not None and self._last[0] is plan
        epoch = self._last[1] if known and self._last is not None else self._epochs.now
        _, ends = self._compose(plan, epoch)
        return np.append(0, np.diff(ends)[self._own(len(ends) - 1)].cumsum())

    def begin(self, plan: PackedPlan, *, resumed: bool) -> Callable[[], Epoch]:
        """Begins an epoch, and returns a function that makes it; see `UserOrder.begin`."""
        check_unchanged(self.dataset, self.n)
        assert self._epochs is not None
        epoch = self._epochs.begin(resumed=resumed, drawn=False)
        return lambda: self._make_composed(plan, epoch)

    def tokens(self) -> dict[str, Any]:
        """Returns the tokens of the last composed batches of all processes, without and with padding; see `UserOrder.tokens`."""
        lengths = getattr(self._composer, "lengths", None)
        if lengths is None or self._last is None:
            return {}
        order, ends = self._last[2]
        if not len(order):
            return {}
        of_rows = np.asarray(lengths)[order]
        longest = np.maximum.reduceat(of_rows, ends[:-1])
        return {
            "tokens": of_rows.sum().item(),
            "padded_tokens": (longest * np.diff(ends)).sum().item(),
        }

    def _make_composed(self, plan: PackedPlan, epoch: int) -> Epoch:
        order, ends = self._compose(plan, epoch)
        own = self._own(len(ends) - 1)
        ids = [order[ends[number] : ends[number + 1]] for number in own.tolist()]
        sizes = np.diff(ends)[own]
        rows = np.concatenate([np.empty(0, dtype=np.int64), *ids])
        own_ends = np.append(0, sizes.cumsum())
        return Epoch(rows.astype(small_dtype(self.n)), own_ends, plan.weights_by_id())

    def _compose(self, plan: PackedPlan, epoch: int) -> Composed:
        """Returns the batches of all processes; kept, because frameworks ask for their number before the epoch."""
        if self._last is not None and self._last[0] is plan and self._last[1] == epoch:
            return self._last[2]
        ids = plan.unpacked().ids.numpy()
        if plan.smaller:
            batches = len(self._full) - 1
            # As without a composer: pruning shortens the epochs that smaller batches are compared with.
            if self._samples is not None:
                batches = -(-batches * self._samples // self.n)
            rows = round(len(ids) * min(1, self._full[-1] / self.n))
            if rows < self._least * batches:
                raise SmallerBatchesError(
                    f"An epoch has {batches} batches, and {rows} samples are chosen, {too_few(self._least)}. Give the "
                    "loader larger batches, raise the share, or leave out whole steps (spend='steps')."
                )
            try:
                found = self._composer.compose(ids, epoch, batches)
            except ValueError as error:
                raise SmallerBatchesError(str(error)) from error
        else:
            found = self._composer.compose(ids, epoch)
        order, ends = map(np.asarray, found)
        self._check(plan, order, ends)
        if not plan.everything and not plan.smaller:
            # As without a composer: BatchNorm cannot train on a single row that is left over.
            sizes = np.diff(ends)
            enough = sizes >= self._least
            if enough.any():
                order = order[enough.repeat(sizes)]
                ends = np.append(0, sizes[enough].cumsum())
        self._last = plan, epoch, (order, ends)
        return order, ends

    def _check(self, plan: PackedPlan, order: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        name = f"{type(self._composer).__name__}.compose"
        sizes = np.diff(ends)
        if not len(ends) or ends[0] or ends[-1] != len(order) or (sizes < 1).any():
            raise ValueError(
                f"{name} must return ids and the ascending ends of their batches, from 0 to {len(order)}, got ends {ends!r:.60}"
            )
        inside = not len(order) or (order.min() >= 0 and order.max() < self.n)
        if not inside or not plan.keeps(order).all():
            raise ValueError(f"{name} must return some of the ids that it was given, got others")
