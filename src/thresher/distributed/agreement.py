"""Whether all ranks were started alike: where they were not, every rank raises the same error before anything begins."""

import hashlib
import json
from collections.abc import Mapping, Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thresher.shards import World

PLAIN = (bool, int, float, str, type(None))
OWN = frozenset({"rank"})
"""Attributes of a sampler that differ from rank to rank."""

LONGEST = 200
"""Number of characters after which a value is cut off in a message."""


class DisagreementError(RuntimeError):
    """The ranks of a training were started with different settings; the message names them, on every rank."""


def agree(world: World, facts: Mapping[str, Any]) -> None:
    """Checks that all ranks have the same settings; it costs 16 bytes per rank where they have.

    Args:
        world: The ranks.
        facts: Settings by name: plain values, tensors, generators, or objects whose `repr` says what they are.

    Raises:
        DisagreementError: A setting differs; all ranks raise it.

    Example:
        >>> from thresher.distributed.threads import on_ranks
        >>> on_ranks(2, lambda world: agree(world, {"seed": 0, "epochs": 5 + world.rank}))
        Traceback (most recent call last):
        thresher.distributed.agreement.DisagreementError: The processes of this training were started with different settings:
          epochs is 5 on rank 0, and 6 on rank 1.
        Start all of them with the same settings.
    """
    own = json.dumps({name: described(value) for name, value in facts.items()}, sort_keys=True).encode()
    digest = np.frombuffer(hashlib.sha256(own).digest()[:8], dtype=np.int64)
    found = world.gather(np.append(digest, len(own)))
    if (found == found[0]).all():
        return
    ends = np.cumsum(found[:, 1]).tolist()
    texts = np.split(world.join(np.frombuffer(own, dtype=np.uint8)), ends[:-1])
    every = [json.loads(text.tobytes()) for text in texts]
    names = [*facts, *sorted({name for one in every for name in one} - set(facts))]
    lines = [f"  {_difference(name, [one.get(name, 'missing') for one in every])}" for name in names]
    raise DisagreementError(
        "The processes of this training were started with different settings:\n"
        + "\n".join(line for line in lines if line.strip())
        + "\nStart all of them with the same settings."
    )


def _difference(name: str, values: Sequence[str]) -> str:
    """Returns which ranks have which value of a setting; "" where all have the same."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    if len(ranks) == 1:
        return ""
    parts = [f"{value[:LONGEST]} on {_named(those)}" for value, those in ranks.items()]
    return f"{name} is {', and '.join(parts)}."


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}{', ...' if len(ranks) > 8 else ''}"


def described(value: Any) -> str:
    """Returns a text that is equal for equal values.

    Args:
        value: A plain value, a tensor or array, a generator, a sequence or mapping of these, or an object with a `repr` of its
            own; of other objects the class.

    Example:
        >>> described(torch.arange(3)), described(object())
        ('int64 of shape (3,), ab25350e', 'object')
    """
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, torch.Generator):
        return f"Generator, {_digest(value.get_state().numpy())}"
    if isinstance(value, Tensor | np.ndarray):
        array = value.detach().cpu().numpy() if isinstance(value, Tensor) else value
        return f"{array.dtype} of shape {array.shape}, {_digest(array)}"
    if isinstance(value, Mapping):
        return repr({str(name): described(one) for name, one in value.items()})
    if isinstance(value, list | tuple | range):
        if len(value) > 8:
            return f"{type(value).__name__} of {len(value)}, {_digest(np.frombuffer(repr(value).encode(), dtype=np.uint8))}"
        return repr([described(one) for one in value])
    return type(value).__name__ if type(value).__repr__ is object.__repr__ else repr(value)


def _digest(array: np.ndarray[Any, Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:8]


def sampler_facts(sampler: Any) -> dict[str, Any]:
    """Returns what the order of a sampler depends on, for `agree`; the rank is left out.

    Args:
        sampler: Sampler of a DataLoader.

    Example:
        >>> from torch.utils.data import DistributedSampler
        >>> facts = sampler_facts(DistributedSampler(range(10), num_replicas=2, rank=1, seed=3))
        >>> facts["sampler"], facts["sampler.seed"], facts["sampler.dataset"], "sampler.rank" in facts
        ('DistributedSampler', 3, 10, False)
    """
    facts: dict[str, Any] = {"sampler": type(sampler).__name__}
    for name, value in sorted(getattr(sampler, "__dict__", {}).items()):
        if name.strip("_") in OWN:
            continue
        known = isinstance(value, (*PLAIN, torch.Generator, Tensor, np.ndarray, list, tuple, Mapping))
        if known or isinstance(value, Sized):
            facts[f"sampler.{name}"] = value if known else len(value)
    return facts
