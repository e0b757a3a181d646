"""The sampler of a loader that deals out its samples to several processes: its orders, and how it deals them."""

import zlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from thresher.distributed.agreement import agree
from thresher.distributed.order import Piece, RankBatches, RankOrder
from thresher.loading.checks import check_unchanged
from thresher.loading.control import OrderPlace
from thresher.loading.order import as_ids, generators_of
from thresher.loading.prepared import inner_sampler, is_shard_of_accelerate, share_states
from thresher.loading.shuffle import Shuffle
from thresher.permutation import Permutation
from thresher.shards import World


class SharedSampler:
    """The user's sampler, of which each process has a part.

    Args:
        loader: The user's loader, which `check_shared` has let pass.
        world: The processes.

    Attributes:
        n: Number of samples of the dataset.
        sampler: The sampler, inside of a batch sampler of accelerate and of `DealtRows`.
    """

    def __init__(self, loader: DataLoader[Any], world: World) -> None:
        self._loader, self._dataset, self._world = loader, loader.dataset, world
        self.n = len(self._dataset)  # pyright: ignore[reportArgumentType]
        self._batches: Any = loader.batch_sampler
        self._by_batches = is_shard_of_accelerate(self._batches)
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
        """Whether no sample can come twice in an epoch, as it does where the order is continued with its beginning."""
        return self._drops or self.n % (self._world.size * (self.batch_size if self._by_batches else 1)) == 0

    @property
    def _drops(self) -> bool:
        return bool(self._batches.drop_last if self._by_batches else getattr(self._batches.sampler, "drop_last", False))

    def generators(self) -> list[torch.Generator]:
        """Returns the generators that the loader draws from."""
        return generators_of(self.sampler, self._loader)

    def rows_of(self, total: int) -> int:
        """Returns how many rows each process has of an order.

        Args:
            total: Number of ids of the order.
        """
        return 0 if total == 0 else len(self.dealt(np.arange, total))

    def dealt(self, piece: Piece, total: int, *, by_rows: bool = False) -> RankOrder | RankBatches:
        """Returns the rows of this process among those of an order.

        Args:
            piece: The order.
            total: Number of its ids.
            by_rows: Whether every W-th row is dealt to a process also where the loader deals every W-th batch.
        """
        if self._by_batches and not by_rows:
            return RankBatches(piece, total, self._world, self.batch_size, drop_last=self._drops)
        return RankOrder(piece, total, self._world, drop_last=self._drops)

    def state_dict(self) -> dict[str, Any]:
        """Returns what the order of the epoch in progress and those of later ones depend on, as plain values."""
        seed, epoch = (getattr(self.sampler, name, 0) for name in ("seed", "epoch"))
        name = type(self.sampler).__name__
        return {"sampler": name, "seed": seed, "samples": self.n, "epoch": epoch, "begun": self._epoch}

    def load_state_dict(self, state: Any, *, active: bool, consumed: int) -> None:
        """Goes on with the orders of a run that was saved.

        Args:
            state: Result of `state_dict`.
            active: Whether an epoch was in progress.
            consumed: Number of ids of its order that were consumed.
        """
        self._epoch = state["begun"]
        epoch = self._epoch if active and consumed else state["epoch"]
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def begin(self, place: OrderPlace) -> int:
        """Begins a pass, and returns the number of the epoch whose order it has.

        Args:
            place: Place that an interrupted epoch has reached.

        Raises:
            RuntimeError: An interrupted epoch goes on, and the sampler was set to another epoch.
            ValueError: The number of samples has changed.
        """
        check_unchanged(self._dataset, self.n)
        share_states(self._loader)
        sampler, epoch = self.sampler, int(getattr(self.sampler, "epoch", 0))
        if place.consumed and epoch != self._epoch:
            raise RuntimeError(
                f"The run goes on in the middle of an epoch whose order is that of epoch {self._epoch} of its "
                f"{type(sampler).__name__}, whose epoch is {epoch} now. Call set_epoch({self._epoch}) before this epoch."
            )
        self._epoch = epoch
        if isinstance(sampler, Shuffle):
            sampler.begin_pass()
        return epoch

    def order(self, epoch: int) -> Piece:
        """Returns the order of an epoch before the plan; all processes call it together.

        Args:
            epoch: Result of `begin`.

        Raises:
            DisagreementError: The samplers of the processes do not have the same order; all processes raise it.
        """
        sampler, known = self.sampler, {"the epoch of the sampler, as `sampler.set_epoch` sets it": epoch}
        if isinstance(sampler, Shuffle):
            agree(self._world, known)
            return Permutation(self.n, sampler.seed, epoch).piece
        ids = self._all_ids()
        agree(self._world, {**known, "the checksum of the order of the epoch": zlib.crc32(ids.tobytes())})
        return lambda begin, end: ids[begin:end].astype(np.int64, copy=False)

    def _all_ids(self) -> NDArray[Any]:
        """Returns the order of the epoch as the sampler makes it, for all processes alike."""
        sampler = self.sampler
        if type(sampler) is DistributedSampler:
            if not sampler.shuffle:
                return np.arange(self.n)
            generator = torch.Generator().manual_seed(sampler.seed + sampler.epoch)
            return torch.randperm(self.n, generator=generator).numpy()
        return as_ids(list(sampler), sampler, self.n).numpy()
