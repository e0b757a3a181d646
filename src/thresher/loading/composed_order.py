"""The batches of a sampler that composes them, such as batches by length: of the samples that a plan keeps, in every epoch."""

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thresher.loading.epoch import ComposedEpoch, pad
from thresher.loading.order import Order, SamplerEpochs
from thresher.loading.packed_plan import PackedPlan
from thresher.loading.samplers import inner_batches
from thresher.loading.smaller_batches import SmallerBatchesError, too_few
from thresher.samplers.epochs import scale

Composed = tuple[NDArray[np.int64], NDArray[np.int64]]


class ComposedOrder(Order):
    """The order of a batch sampler with a function `compose`, as `thresher.samplers.BatchComposer` describes it; see `Order`."""

    drop_last = False  # the composer itself leaves rows out

    def _set_up(self) -> None:
        self.sampler = inner_batches(self._batches)
        self.batch_size = int(np.diff(self._full_ends).max())
        self._epochs = SamplerEpochs(self.sampler, self.n, self._loader)
        self._composed: tuple[PackedPlan | None, int, Composed] = (
            None,
            0,
            (self._full_ends, self._full_ends),
        )

    @cached_property
    def _full_ends(self) -> NDArray[np.int64]:
        """Ends of the batches of all processes in an epoch of full training."""
        return self.sampler.compose(np.arange(self.n), 0)[1]

    @property
    def full_batches(self) -> int:
        """Number of batches of this process in an epoch of full training."""
        return self._pad_to_processes(len(self._full_ends) - 1) // self._world.size

    @property
    def candidates(self) -> int:
        """Number of rows of this process in an epoch of full training, with those dropped; the mean of all processes."""
        return max(self.n, int(self._full_ends[-1])) // self._world.size

    @property
    def yields_once(self) -> bool:
        """Whether no sample comes twice in an epoch."""
        whole = len(self._full_ends) - 1
        once = getattr(self.sampler, "once", False)
        return (
            once and self._pad_to_processes(whole) <= whole and int(self._full_ends[-1]) <= self.n
        )

    def _pad_to_processes(self, batches: int) -> int:
        """Returns the number of batches of all processes together, so that each process gets equally many."""
        dealer = self._batches if self.by_batches else self.sampler
        drops = getattr(dealer, "drop_last", False)
        return pad(batches, self._world.size, drop_last=drops)

    def ids_of_sampler(self) -> None:
        """Returns None: a composer gets all ids."""

    def remainder(self, plan: PackedPlan) -> int:
        """Returns 0: composed batches may have other sizes."""
        return 0

    def _check_sampler(self, plan: PackedPlan) -> None:
        """Does nothing: `compose` is checked in each epoch."""

    def tokens(self) -> dict[str, Any]:
        """Returns the tokens of the last composed batches of all processes, without and with padding. {} if they are unknown."""
        lengths = getattr(self.sampler, "lengths", None)
        plan, _, (order, ends) = self._composed
        if lengths is None or plan is None or not len(order):
            return {}
        of_rows = np.asarray(lengths)[order]
        # The largest length in each batch, to which its rows are padded.
        longest = np.maximum.reduceat(of_rows, ends[:-1])
        return {
            "tokens": of_rows.sum().item(),
            "padded_tokens": (longest * np.diff(ends)).sum().item(),
        }

    def lay_out(self, plan: PackedPlan, epoch: int) -> tuple[NDArray[np.int64], bool]:
        """Returns the ends of the batches of all processes, and False: whole batches are dealt; see `Order.lay_out`.

        Raises:
            SmallerBatchesError: A batch has fewer rows than the model needs, or the composer makes no smaller batches.
        """
        _, ends = self._compose(plan, epoch)
        # With fewer batches than processes, or too few for the last step, the first batches come again: `resize` repeats
        # from the start.
        sizes = np.resize(np.diff(ends), self._pad_to_processes(len(ends) - 1))
        return np.append(0, sizes.cumsum()), False

    def compose(self, plan: PackedPlan, epoch: int) -> ComposedEpoch:
        """Returns the batches of all processes; see `Order.compose`."""
        order, _ = self._compose(plan, epoch)
        return ComposedEpoch([order], len(order), *self.lay_out(plan, epoch))

    def _compose(self, plan: PackedPlan, epoch: int) -> Composed:
        """Returns the batches of all processes; kept, because frameworks ask for their number before the epoch."""
        if self._composed[0] is plan and self._composed[1] == epoch:
            return self._composed[2]
        ids = plan.unpacked().ids.numpy()
        if plan.smaller:
            batches = len(self._full_ends) - 1
            # Pruning shortens the epochs that smaller batches are compared with, with a composer as without one.
            if self._samples_after_pruning is not None:
                batches = -(-batches * self._samples_after_pruning // self.n)
            rows = scale(len(ids), min(int(self._full_ends[-1]), self.n), self.n)
            if rows < self._least * batches:
                raise SmallerBatchesError(
                    f"An epoch has {batches} batches, and {rows} samples are chosen, {too_few(self._least)}. Give the "
                    "loader larger batches, raise the share, or leave out whole steps (spend='steps')."
                )
            try:
                composed = self.sampler.compose(ids, epoch, batches)
            except ValueError as error:
                raise SmallerBatchesError(str(error)) from error
        else:
            composed = self.sampler.compose(ids, epoch)
        order, ends = map(np.asarray, composed)
        self._check(plan, order, ends)
        if not plan.everything and not plan.smaller:
            # Batches with too few rows are left out, with a composer as without one: BatchNorm cannot train on a single row.
            sizes = np.diff(ends)
            enough = sizes >= self._least
            if enough.any():
                order = order[enough.repeat(sizes)]
                ends = np.append(0, sizes[enough].cumsum())
        self._composed = plan, epoch, (order, ends)
        return order, ends

    def _check(self, plan: PackedPlan, order: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        name = f"{type(self.sampler).__name__}.compose"
        sizes = np.diff(ends)
        if not len(ends) or ends[0] or ends[-1] != len(order) or (sizes < 1).any():
            raise ValueError(
                f"{name} must return ids and the ascending ends of their batches, from 0 to {len(order)}, got ends {ends!r:.60}"
            )
        inside = not len(order) or (order.min() >= 0 and order.max() < self.n)
        if not inside or not plan.keeps(order).all():
            raise ValueError(f"{name} must return some of the ids that it was given, got others")
