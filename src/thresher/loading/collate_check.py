"""Checks that row i of a batch is sample i, for a collate function that is not one of torch."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate, default_convert

from thresher import rng
from thresher.loading.trees import leaves

SEEDS = 4
SAMPLES = 8


def collate_mixes(loader: DataLoader[Any], generators: list[torch.Generator]) -> str | None:
    """Collates the same samples in two orders, and compares the rows.

    Sorting, mixup and CutMix in a collate function give rows that are not the samples in order; a loss would then be
    credited to another sample. Reads a few samples of the dataset; no random state is disturbed.

    Args:
        loader: The user's loader.
        generators: Generators that the loader draws from.

    Returns:
        The reason why rows cannot be credited to samples, or None.
    """
    collate = loader.collate_fn
    if collate in (default_collate, default_convert):
        return None
    dataset: Any = loader.dataset
    name = getattr(collate, "__qualname__", type(collate).__name__)
    device = torch.device("cpu")
    with rng.undisturbed(device, generators):
        try:
            n = len(dataset)
            spread = sorted({i * (n - 1) // (SAMPLES - 1) for i in range(SAMPLES)})
            samples = [dataset[i] for i in spread]
            for _ in range(SEEDS):
                if not _rows_follow(collate, samples, _shuffled(len(samples))):
                    return f"collate_fn {name} sorts or mixes the samples of a batch, or draws random numbers for them"
        except Exception as error:
            return f"collate_fn {name} could not be tried out on {SAMPLES} samples ({type(error).__name__}: {error})"
    return None


def _shuffled(n: int) -> list[int]:
    """Returns an order that neither keeps nor mirrors neighbours: the last two, and the first and third, change places."""
    order = list(range(n))
    order[-2:] = order[:-3:-1] if n > 1 else order
    if n > 5:
        order[0], order[2] = order[2], order[0]
    return order


def _rows_follow(collate: Any, samples: list[Any], order: list[int]) -> bool:
    """Whether the rows of the collated samples change places as the samples do, under the same random numbers."""
    state = rng.capture(torch.device("cpu"))
    straight = _rows(collate(list(samples)), len(samples))
    after = rng.capture(torch.device("cpu"))
    rng.restore(state, torch.device("cpu"))
    moved = _rows(collate([samples[i] for i in order]), len(samples))
    rng.restore(after, torch.device("cpu"))
    return len(straight) == len(moved) and all(_equal(a[order], b) for a, b in zip(straight, moved, strict=True))


def _rows(batch: Any, n: int) -> list[Tensor]:
    return [leaf for leaf in leaves(batch) if leaf.dim() and len(leaf) == n]


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
