"""Batches that are collated and on the device before a clock starts, so that only computing takes time."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from thresher.experiments.training.loop import sizes_of
from thresher.loading.trees import to_device


class PreparedBatch(NamedTuple):
    """A batch that is already collated."""

    batch: Any


class PreparedBatches(Dataset[Any]):
    """A dataset of samples whose batches are already collated and on the device.

    Args:
        samples: Samples of the user's dataset.
        batches: Batches of all samples, in order.
        size: Number of samples of each batch.

    Attributes:
        times: Number of times that the same samples come, one after the other. Default: 1.
    """

    def __init__(self, samples: Sequence[Any], batches: Sequence[Any], size: int) -> None:
        self._samples, self._batches, self._size = samples, batches, size
        self.times = 1

    def __len__(self) -> int:
        return self.times * len(self._samples)

    def __getitem__(self, i: int) -> Any:
        return self._samples[i % len(self._samples)]

    def __getitems__(self, ids: Sequence[int]) -> PreparedBatch:
        """Returns the batch that begins with the first of the ids."""
        return PreparedBatch(self._batches[ids[0] % len(self._samples) // self._size])


def prepared_loader(
    loader: DataLoader[Any], batches: int, device: torch.device, seed: int, *, halves: bool = False
) -> DataLoader[Any]:
    """Returns a loader of `PreparedBatches`, made of random samples of another loader's dataset.

    Args:
        loader: The loader whose dataset, batch size and collate function are used.
        batches: Number of batches at most; one batch of all samples where there are fewer than a batch.
        device: Device that the batches are moved to.
        seed: Random seed that decides which samples are taken.
        halves: Whether batches have half of the size. Default: False.
    """
    dataset: Any = loader.dataset
    size = min(sizes_of(loader)[1], len(dataset)) // (1 + halves)
    wanted = min(batches, len(dataset) // size) * size
    ids = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))[:wanted].tolist()
    samples, collate = [dataset[i] for i in ids], loader.collate_fn
    made = [to_device(collate(samples[i : i + size]), device) for i in range(0, wanted, size)]

    def collate_or_unwrap(found: Any) -> Any:
        return found.batch if isinstance(found, PreparedBatch) else collate(found)

    return DataLoader(PreparedBatches(samples, made, size), batch_size=size, collate_fn=collate_or_unwrap)
