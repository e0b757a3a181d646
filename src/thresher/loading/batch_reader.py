"""The user's DataLoader, rebuilt to read batches in any order, with the random numbers that the original would draw.

Persistent workers draw their seed when they start, each epoch draws a seed, and the sampler draws last. To resume an
interrupted epoch, the reader restores the random states of its beginning and draws the ids that it had consumed again.
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from thresher import rng
from thresher.loading.collate_check import CheckedBatch, CheckedCollate, UnknownRows
from thresher.loading.epoch import Epoch
from thresher.loading.epoch_batches import IdBatchSampler, OrderedBatches
from thresher.loading.settings import SettingsAtAttach, loader_settings
from thresher.loading.stream import StreamBatches
from thresher.loading.worker_draws import NotedBatch, NotedCollate, ResumedDraws, begin_noted
from thresher.samplers.epochs import cut
from thresher.trees import to_device

Batches = OrderedBatches | StreamBatches
"""The batches of an epoch, and the position in it."""

WITH_WORKERS: weakref.WeakSet[Any] = weakref.WeakSet()
"""User loaders for which a run has started persistent workers. A later run starts its workers without drawing a seed."""


class Reader:
    """Reads batches with the settings of the user's loader.

    Args:
        loader: The user's DataLoader.
        ids: Batch sampler that yields the ids to read.
        device: Device to which batches are moved; None leaves them where they are.
        generators: Function that returns the generators that the loader draws from.
        streams: Whether the dataset is an IterableDataset.
        collate_keeps_rows: Whether the user has declared that row i of each batch is sample i.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        ids: IdBatchSampler,
        *,
        device: torch.device | None,
        generators: Callable[[], list[torch.Generator]],
        streams: bool,
        collate_keeps_rows: bool,
    ) -> None:
        self._user = loader
        self._id_batches = ids
        self._device = device
        self._generators = generators
        self._rng_device = device or torch.device("cpu")
        self.unknown_rows = UnknownRows(collate_keeps_rows=collate_keeps_rows)
        """Result of comparing batches with their samples: the reason if row i of a batch is not sample i."""
        self._resumed_draws = ResumedDraws(loader.num_workers, persistent=loader.persistent_workers)
        self._settings = None if streams else SettingsAtAttach(loader, self.unknown_rows)
        self.loader = loader if self._settings is None else self._settings.rebuilt(ids)
        """The rebuilt loader; for an IterableDataset, the user's loader itself."""
        # A run is part of a reference cycle, which Python collects in no fixed order, and then workers do not stop cleanly. The
        # registry of `finalize` refers to the loader from outside the cycle, and so keeps it until the cycle is gone.
        self._loader_guard = weakref.finalize(self, lambda _: None, self.loader)
        self._loader_guard.atexit = False
        self.closed = False
        self._workers_ran = False
        """Whether persistent workers of this run have started."""
        self._resumed_between_epochs = False
        """Whether a state that was saved between epochs was loaded, and no epoch has begun since then."""
        self.epoch_start: rng.RandomStates | None = None
        """Random states at the beginning of the epoch in progress; to resume it, its ids are drawn again from these states."""

    def check(self) -> None:
        """Checks that settings were not changed since the run was attached."""
        if self._settings is not None:
            self._settings.check()
        # Frees the last order before the plan is made: at 10^9 samples both would not fit in memory.
        self._id_batches.set_batches(iter(()))
        # Each worker counts batches in its own copy of the collate function, and ends with its epoch. The workers of the next
        # epoch get a copy of this one, so the count goes on.
        collate = self.loader.collate_fn
        workers = self._user.num_workers
        if isinstance(collate, CheckedCollate) and workers:
            collate.calls = self._id_batches.count // workers

    def start(self, batches: Batches) -> Iterator[Any]:
        """Begins an epoch at its first batch, and returns an iterator over the loaded batches.

        Args:
            batches: Batches of the epoch.
        """
        loader: Any = self._user
        persistent = loader.persistent_workers
        # A loader draws a seed for persistent workers only when it starts them. If the user's loader already started its
        # workers, the workers of the run start here without a draw, so the order of the epoch is that of the plain loop.
        if persistent and (
            self._resumed_between_epochs or loader in WITH_WORKERS or loader._iterator is not None
        ):
            self._start_workers()
        self._resumed_between_epochs = False
        self.epoch_start = {
            **rng.capture(self._rng_device, self._generators()),
            "workers_ran": self._workers_ran,
        }
        loaded = self._iterate(batches, iter)
        self._workers_ran = persistent
        if persistent:
            WITH_WORKERS.add(loader)
        return loaded

    def resume(self, batches: Batches) -> Iterator[Any]:
        """Continues an interrupted epoch from the random states of its beginning.

        The caller draws the consumed ids again, and then restores the states of the training loop with `put_back`.

        Args:
            batches: Batches of the epoch.
        """
        epoch_start = self.epoch_start
        assert epoch_start is not None
        self._resumed_between_epochs = False
        # The interrupted epoch drew no seed for persistent workers that an earlier epoch had started.
        if epoch_start["workers_ran"]:
            self._start_workers()
        rng.restore(epoch_start, self._rng_device, self._generators())
        loaded = self._iterate(batches, begin_noted if self._user.num_workers else iter)
        self._workers_ran = self._user.persistent_workers
        return loaded

    def random_states(self) -> rng.RandomStates:
        """Returns the random states that the loader draws from."""
        return rng.capture(self._rng_device, self._generators())

    def put_back(self, states: rng.RandomStates) -> None:
        """Restores the random states that the training loop uses, but not those of the loader's generators.

        Args:
            states: Random states that `random_states` returned.
        """
        rng.restore({**states, "generators": []}, self._rng_device)

    def load(self, epoch_start: rng.RandomStates | None, *, between_epochs: bool) -> None:
        """Loads the random states of a saved run.

        Args:
            epoch_start: Random states at the beginning of the saved epoch.
            between_epochs: Whether the run was saved between two epochs.
        """
        self.epoch_start = epoch_start
        self._resumed_between_epochs = epoch_start is not None and between_epochs

    def _iterate(self, batches: Batches, begin: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
        """Starts an iteration over the loader."""
        if isinstance(batches, StreamBatches):
            return map(self._without_checks, iter(self.loader))
        self._id_batches.set_batches(batches.ids())
        return begin(self.loader)

    def read_again(self, ids: Tensor) -> Any:
        """Reads some samples again as a batch, without drawing random numbers in this process.

        Args:
            ids: Ids of the samples, shape (k,), int64.
        """
        settings = loader_settings(self.loader)
        # Reading samples a second time draws new random numbers for augmentation. The collate function notes whether any are
        # drawn.
        noted = NotedCollate(self._user.collate_fn)
        settings |= {"collate_fn": noted, "persistent_workers": False}
        with rng.undisturbed(self._rng_device, self._generators()):
            # Workers read if there are any: a file that the dataset opens in this process would be shared with later workers.
            batches = iter(DataLoader(self._user.dataset, batch_sampler=[ids.tolist()], **settings))
            # After `iter`, which draws a seed itself.
            if not self._user.num_workers:
                noted.start()
            batch = next(batches)
        return self.on_device(batch)

    def _start_workers(self) -> None:
        """Starts persistent workers unless they are running, without advancing the random states of this process."""
        if not self._workers_ran:
            with rng.undisturbed(self._rng_device, self._generators()):
                # A loader with workers asks for its first batches as soon as it is iterated: here there are none.
                self._id_batches.set_batches(iter(()))
                begin_noted(self.loader)
            self._workers_ran = self._user.persistent_workers

    def passes(self, ids: Tensor, size: int) -> Iterator[tuple[Any, Tensor]]:
        """Yields the batches of some samples on the device, with their ids, for the run's own forward passes.

        Args:
            ids: Ids of the samples, shape (k,), int64.
            size: Number of rows of a batch.
        """
        # These passes read every one of the samples, even if the user's loader drops an incomplete last batch.
        epoch = Epoch(ids.numpy(), cut(len(ids), size))
        self._id_batches.set_batches(map(epoch.batch, range(len(epoch))))
        for number, batch in enumerate(iter(self.loader)):
            self._workers_ran = self._user.persistent_workers
            yield self.on_device(batch), epoch.batch(number)

    def on_device(self, batch: Any) -> Any:
        """Returns the batch of the user's collate function, on the device of the model."""
        batch = self._without_checks(batch)
        if self._device is None:
            return batch
        return to_device(batch, self._device)

    def _without_checks(self, batch: Any) -> Any:
        """Returns the batch of the user's collate function, without the results of checks that are attached to it."""
        if type(batch) is NotedBatch:
            batch = self._resumed_draws.open(batch)
        if type(batch) is CheckedBatch:
            return self.unknown_rows.open(batch)
        return batch

    def close(self) -> None:
        """Releases the data and persistent workers."""
        self.closed = True
        self._loader_guard()
        # Frees the dataset and its workers. Attributes of the loader can still be read.
        self.loader = DataLoader((), batch_sampler=self._id_batches)  # pyright: ignore[reportArgumentType]
