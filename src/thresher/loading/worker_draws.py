"""Whether workers draw random numbers, which a run that was interrupted cannot repeat."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from thresher import rng
from thresher.trees import differing_part
from thresher.warning import warn

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
    """Warns once if samples of a resumed run depend on random numbers that cannot be repeated.

    Args:
        workers: Number of worker processes.
        stay: Whether these are persistent: their random numbers go on from epoch to epoch, and no state has them.
    """

    def __init__(self, workers: int, *, stay: bool = False) -> None:
        self._where = "in worker processes" if workers else "for selected samples that had not been trained on"
        self._way_out = "save between epochs, and use persistent_workers=False" if stay else "save between epochs"
        self._warned = False

    def open(self, batch: NotedBatch) -> Any:
        """Returns the batch that the collate function returned."""
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
        # Between two batches of a worker nothing else draws: a difference is of reading the samples.
        drew = differing_part(before, last) is not None if last is not None else not torch.equal(before["torch"], fresh)
        batch = self.collate(samples)
        self._last = rng.capture(torch.device("cpu"))
        return NotedBatch(batch, drew or differing_part(before, self._last) is not None)


def begin_noted(loader: Any) -> Iterator[Any]:
    """Begins a pass over a loader whose workers are new, and note whether they draw random numbers.

    Args:
        loader: DataLoader with workers; persistent ones go on to note it in later passes.
    """
    # The workers get a copy of the collate function when they start; the loader has its own back at once.
    collate = loader.collate_fn
    loader.collate_fn = NotedCollate(collate)
    try:
        return iter(loader)
    finally:
        loader.collate_fn = collate
