"""Detects whether workers draw random numbers. A resumed run cannot repeat these."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from thresher import rng
from thresher.trees import differing_part
from thresher.warning import warn

CHECKED_BATCHES = 3
"""Number of batches per worker that are checked."""


class NotedBatch(NamedTuple):
    """A batch of a worker, with the result of the check.

    Attributes:
        batch: The batch, as the collate function returned it.
        drew: Whether the worker drew random numbers for this batch or one before it.
    """

    batch: Any
    drew: bool


class ResumedDraws:
    """Warns once if samples of a resumed run depend on random numbers that cannot be repeated.

    Args:
        workers: Number of worker processes.
        persistent: Whether the workers are persistent. Their random states continue from epoch to epoch, and cannot be saved.
    """

    def __init__(self, workers: int, *, persistent: bool = False) -> None:
        if workers:
            self._where = "in worker processes"
        else:
            self._where = "for selected samples that had not been trained on"
        if persistent:
            self._way_out = "save between epochs, and use persistent_workers=False"
        else:
            self._way_out = "save between epochs"
        self._warned = False

    def open(self, batch: NotedBatch) -> Any:
        """Returns the batch of the user's collate function; warns at the first one with random numbers."""
        if batch.drew and not self._warned:
            self._warned = True
            warn(
                "load_state_dict: the run continues where it was interrupted, and its dataset or collate_fn draws random "
                f"numbers {self._where}. These numbers differ from those of an uninterrupted run, so samples may be augmented "
                f"differently; their order, ids and weights are the same. For the same numbers, {self._way_out}. This warning "
                "is given once."
            )
        return batch.batch


class NotedCollate:
    """A collate function that reports, for the first batches of a worker, whether random numbers were drawn.

    Args:
        collate: Collate function of the user.
    """

    def __init__(self, collate: Any) -> None:
        self.collate = collate
        self.calls = 0
        self._states_after_last: rng.RandomStates | None = None

    def start(self) -> None:
        """Stores the current random states, with which those at the first batch are compared."""
        self._states_after_last = rng.capture(torch.device("cpu"))

    def __call__(self, samples: Any) -> Any:
        """Returns the batch of the user's collate function, as a `NotedBatch` if it was checked."""
        self.calls += 1
        if self.calls > CHECKED_BATCHES:
            return self.collate(samples)
        before = rng.capture(torch.device("cpu"))
        last = self._states_after_last
        # A worker has no earlier state at its first batch, but torch knows its seed, and so the state in which it started.
        fresh = torch.Generator().manual_seed(torch.initial_seed()).get_state()
        # Between two batches of a worker only the dataset draws, so a difference comes from reading the samples.
        if last is not None:
            drew = differing_part(before, last) is not None
        else:
            drew = not torch.equal(before["torch"], fresh)
        batch = self.collate(samples)
        self._states_after_last = rng.capture(torch.device("cpu"))
        return NotedBatch(
            batch, drew or differing_part(before, self._states_after_last) is not None
        )


def begin_noted(loader: Any) -> Iterator[Any]:
    """Begins a pass over a loader and starts its workers, which check whether they draw random numbers.

    Args:
        loader: DataLoader with workers. Persistent workers also check in later passes.
    """
    # Workers get a copy of the collate function when they start, so the loader can have its own back at once.
    collate = loader.collate_fn
    loader.collate_fn = NotedCollate(collate)
    try:
        return iter(loader)
    finally:
        loader.collate_fn = collate
