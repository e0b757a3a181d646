"""Random states of a training loop: saved, restored and left undisturbed; and random numbers that depend on a key alone."""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

RandomStates = dict[str, Any]
"""Random states by the name of their source, as tensors and plain values."""


def capture(device: torch.device, generators: Iterable[torch.Generator] = ()) -> RandomStates:
    """Returns the global random states (torch, the device, Python, NumPy) and those of generators.

    Args:
        device: Device whose random state is included if it is a CUDA device.
        generators: Generators whose states are included. Default: none.

    Returns:
        Tensors and plain values only, which torch.load reads with `weights_only=True`.

    Example:
        >>> cpu = torch.device("cpu")
        >>> states = capture(cpu)
        >>> first = torch.rand(3)
        >>> restore(states, cpu)
        >>> torch.equal(torch.rand(3), first)
        True
    """
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002
    state: RandomStates = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (
            name,
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            position,
            has_gauss,
            gauss,
        ),
        "generators": [generator.get_state() for generator in generators],
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def equal(one: RandomStates, other: RandomStates) -> bool:
    """Returns whether nothing was drawn between two results of `capture` for the same device and without generators.

    Args:
        one: Result of `capture`.
        other: A later one.

    Example:
        >>> before = capture(torch.device("cpu"))
        >>> equal(before, capture(torch.device("cpu")))
        True
    """
    *_, keys, position, _, _ = one["numpy"]
    *_, other_keys, other_position, _, _ = other["numpy"]
    same = (
        one["python"] == other["python"]
        and position == other_position
        and torch.equal(keys, other_keys)
    )
    return same and all(
        torch.equal(one[name], other[name]) for name in ("torch", "cuda") if name in one
    )


def restore(
    state: RandomStates, device: torch.device, generators: Iterable[torch.Generator] = ()
) -> None:
    """Restores random states.

    Args:
        state: Result of `capture`.
        device: Device whose random state is restored if it is a CUDA device.
        generators: Generators to restore, as many as `capture` was given and in the same order.

    Raises:
        ValueError: There are more or fewer generators than saved states.

    Example:
        >>> generator = torch.Generator().manual_seed(1)
        >>> states = capture(torch.device("cpu"), [generator])
        >>> first = torch.rand(3, generator=generator)
        >>> restore(states, torch.device("cpu"), [generator])
        >>> torch.equal(torch.rand(3, generator=generator), first)
        True
    """
    torch.set_rng_state(state["torch"].cpu())
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.cpu().numpy().astype(np.uint32), *rest))  # noqa: NPY002
    for generator, saved in zip(generators, state["generators"], strict=True):
        generator.set_state(saved.cpu())
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)


def check_states(
    state: RandomStates, device: torch.device, generators: Iterable[torch.Generator] = ()
) -> None:
    """Checks that `restore` will accept random states, without changing any random state.

    Args:
        state: Result of `capture`.
        device: Device whose random state would be restored if it is a CUDA device.
        generators: Generators that would be restored.

    Raises:
        TypeError: A state has the wrong type.
        ValueError: A state has the wrong length or version, or there are more or fewer generators than saved states.
        RuntimeError: A state has the wrong size.

    Example:
        >>> states = capture(torch.device("cpu"))
        >>> check_states(states, torch.device("cpu"))
        >>> check_states({**states, "python": (1, *states["python"][1:])}, torch.device("cpu"))
        Traceback (most recent call last):
        ValueError: state with version 1 passed to Random.setstate() of version 3
    """
    torch.Generator().set_state(state["torch"].cpu())
    version, internal, gauss = state["python"]
    random.Random().setstate((version, tuple(internal), gauss))
    name, keys, position, *rest = state["numpy"]
    np.random.RandomState().set_state((name, keys.cpu().numpy().astype(np.uint32), position, *rest))
    if not 0 <= position <= len(keys):
        raise ValueError(
            f"the position of the NumPy generator is {position}, outside [0, {len(keys)}]"
        )
    for generator, saved in zip(generators, state["generators"], strict=True):
        torch.Generator(generator.device).set_state(saved.cpu())
    if "cuda" in state and device.type == "cuda":
        torch.Generator(device).set_state(state["cuda"].cpu())


@contextmanager
def undisturbed(device: torch.device, generators: Iterable[torch.Generator] = ()) -> Iterator[None]:
    """Restores all random states when the block ends, even by an error. Draws inside the block have no effect outside.

    Args:
        device: Device whose random state is restored if it is a CUDA device.
        generators: Generators to restore in addition to the global random states. Default: none.

    Example:
        >>> before = torch.get_rng_state()
        >>> with undisturbed(torch.device("cpu")):
        ...     noise = torch.rand(100)
        >>> torch.equal(torch.get_rng_state(), before)
        True
    """
    generators = list(generators)
    state = capture(device, generators)
    try:
        yield
    finally:
        restore(state, device, generators)


def seeds(count: int, *key: int) -> list[int]:
    """Returns seeds that depend on a key alone. Different keys give independent seeds.

    Args:
        count: Number of seeds.
        *key: Integers, such as the seed of the run and the number of the epoch.

    Returns:
        Seeds for `torch.Generator.manual_seed`, each in [0, 2**63).

    Example:
        >>> seeds(2, 0, 7) == seeds(2, 0, 7), seeds(1, 0, 7) == seeds(1, 7, 0)
        (True, False)
    """
    words = np.random.SeedSequence([k % 2**64 for k in key]).generate_state(count, np.uint64)
    return (words & np.uint64(2**63 - 1)).tolist()


def seeded(*key: int) -> torch.Generator:
    """Returns a CPU generator whose draws depend on a key alone.

    Args:
        *key: Integers, such as the seed of the run and the number of the epoch.

    Example:
        >>> torch.equal(torch.rand(3, generator=seeded(0, 7)), torch.rand(3, generator=seeded(0, 7)))
        True
    """
    return torch.Generator().manual_seed(seeds(1, *key)[0])


CHUNK = 2**16
"""Number of random numbers that are computed at once; they fit in the cache."""


def lots(base: int, ids: range | NDArray[np.int64]) -> NDArray[np.uint32]:
    """Returns one random number per id, its lot, which depends on nothing but `base` and the id.

    Args:
        base: Number within [0, 2**63), another one for each draw.
        ids: Ids, 0 or more: an array of shape (n,), or a range with step 1.

    Returns:
        Random numbers, shape (n,), uniform over all 2**32 values.

    Example:
        >>> lots(7, range(3)).tolist(), lots(7, np.array([2])).tolist()
        ([1674306020, 72105175, 3868737664], [3868737664])
    """
    drawn = np.empty(len(ids), dtype=np.uint32)
    for first in range(0, len(ids), CHUNK):
        part = ids[first : first + CHUNK]
        if isinstance(part, range):
            bits = np.arange(part.start, part.stop, dtype=np.uint64)
        else:
            bits = part.astype(np.uint64)
        bits += np.uint64(1)
        bits *= np.uint64(0x9E3779B97F4A7C15)
        bits += np.uint64(base)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            bits ^= bits >> np.uint64(shift)
            bits *= np.uint64(factor)
        bits ^= bits >> np.uint64(31)
        bits >>= np.uint64(32)
        drawn[first : first + CHUNK] = bits
    return drawn


def uniform(base: int, ids: range) -> NDArray[np.float32]:
    """Returns one random number in (0, 1) for each id, which depends on nothing but `base` and the id.

    Args:
        base: Number within [0, 2**63), another one for each epoch.
        ids: Ids.

    Returns:
        Random numbers, shape (len(ids),), float32.

    Example:
        >>> uniform(7, range(2))
        array([0.3898297, 0.0167883], dtype=float32)
    """
    return ((lots(base, ids) >> np.uint32(9)).astype(np.float32) + np.float32(0.5)) * np.float32(
        2**-23
    )
