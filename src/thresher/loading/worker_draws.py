"""Whether workers draw random numbers, which an epoch that is resumed in its middle cannot repeat."""

import warnings
from typing import Any, NamedTuple

import torch

from thresher import rng
from thresher.loading.constants import differing_part

NOTED = 3
"""Number of batches of a worker that are looked at."""


class NotedBatch(NamedTuple):
    """A batch on its way from a worker.

    Attributes:
        batch: The batch, as the collate function returned it.
        drew: Whether the worker drew random numbers for this batch or one before it.
    """

    batch: Any
    drew: bool


class ResumedDraws:
    """Warns once where samples of a resumed epoch depend on random numbers that cannot be repeated.

    Args:
        workers: Number of worker processes.
    """

    def __init__(self, workers: int) -> None:
        self._where = "in worker processes" if workers else "for selected samples that had not been trained on"
        self._warned = False

    def open(self, batch: Any) -> Any:
        """Returns the batch that the collate function returned."""
        if type(batch) is not NotedBatch:
            return batch
        if batch.drew and not self._warned:
            self._warned = True
            warnings.warn(
                "load_state_dict: the run goes on in the middle of an epoch, and its dataset or collate_fn draws random "
                f"numbers {self._where}. They are not those that a run without the interruption draws, so the samples that are "
                "read now may be augmented in another way; their order, ids and weights are the same. For the same numbers, "
                "save between epochs. This is said once.",
                stacklevel=6,
            )
        return batch.batch


class NotedCollate:
    """A collate function that notes, for the first batches of a worker, whether random numbers were drawn.

    Args:
        collate: Collate function.
    """

    def __init__(self, collate: Any) -> None:
        self.collate = collate
        self.calls = 0
        self._last: rng.RandomStates | None = None

    def start(self) -> None:
        """Compares the first samples with the random states as they are now."""
        self._last = rng.capture(torch.device("cpu"))

    def __call__(self, samples: Any) -> Any:
        """Returns the batch, as a `NotedBatch` while batches are looked at."""
        self.calls += 1
        if self.calls > NOTED:
            return self.collate(samples)
        before, last = rng.capture(torch.device("cpu")), self._last
        # The seed of a worker is known for torch alone: the first samples are compared with what follows from it.
        fresh = torch.Generator().manual_seed(torch.initial_seed()).get_state()
        drew = differing_part(before, last) is not None if last is not None else not torch.equal(before["torch"], fresh)
        batch = self.collate(samples)
        self._last = rng.capture(torch.device("cpu"))
        return NotedBatch(batch, drew or differing_part(before, self._last) is not None)
