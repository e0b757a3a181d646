"""The random states a training loop draws from: taken, put back, and kept from being disturbed."""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

State = dict[str, Any]


def capture(device: torch.device, generators: Iterable[torch.Generator] = ()) -> State:
    """Take the global random states (torch, the device, Python, NumPy) and those of `generators`.

    Returns:
        Tensors and plain values only, so the state loads with `weights_only=True`.
    """
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002
    state: State = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
        "generators": [generator.get_state() for generator in generators],
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore(state: State, device: torch.device, generators: Iterable[torch.Generator] = ()) -> None:
    """Put back what `capture` took."""
    torch.set_rng_state(state["torch"].cpu())
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.cpu().numpy().astype(np.uint32), *rest))  # noqa: NPY002
    for generator, saved in zip(generators, state["generators"], strict=True):
        generator.set_state(saved.cpu())
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)


@contextmanager
def undisturbed(device: torch.device, generators: Iterable[torch.Generator] = ()) -> Iterator[None]:
    """Whatever is drawn inside leaves no trace outside."""
    generators = list(generators)
    state = capture(device, generators)
    try:
        yield
    finally:
        restore(state, device, generators)


def seeds(count: int, *key: int) -> list[int]:
    """Seeds for generators that depend on `key` alone, such as (seed, epoch)."""
    words = np.random.SeedSequence([k % 2**64 for k in key]).generate_state(count, np.uint64)
    return (words & np.uint64(2**63 - 1)).tolist()


def seeded(*key: int) -> torch.Generator:
    """A CPU generator that depends on `key` alone."""
    return torch.Generator().manual_seed(seeds(1, *key)[0])
