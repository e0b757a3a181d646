"""What a collate function draws from and remembers: saved and put back, so that a second call leaves no trace."""

import random
from collections.abc import Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch

from thresher import rng
from thresher.loading.held_state import held_state, is_empty, put_back
from thresher.loading.trees import differing_part


class CollateState:
    """The random states that a collate function can draw from, and what it remembers between calls.

    Generators of the function itself are found where it keeps them: in attributes, closures, arguments of a partial, and global
    variables that it names.

    Args:
        collate: The collate function.
    """

    def __init__(self, collate: Any) -> None:
        self._collate = collate
        found = {id(one): one for part in _parts_of(collate) for one in _values_of(part)}
        self._sources = [one for one in found.values() if _is_source(one)]
        # Workers were forked and have no device; a collate function in the main process may use it.
        used = torch.cuda.is_initialized()
        self._device = torch.device("cuda", torch.cuda.current_device()) if used else torch.device("cpu")

    def capture(self) -> dict[str, Any]:
        """Returns everything as it is now."""
        return {
            "global": rng.capture(self._device),
            "sources": [_state_of(source) for source in self._sources],
            "held": held_state(self._collate),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Puts everything back as it was."""
        rng.restore(state["global"], self._device)
        for source, saved in zip(self._sources, state["sources"], strict=True):
            _set_state(source, saved)
        put_back(state["held"])

    @staticmethod
    def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
        """Whether no random number was drawn between two captures."""
        return all(differing_part(one[name], other[name]) is None for name in ("global", "sources"))


def _parts_of(collate: Any) -> Iterator[Any]:
    """Yields a callable and what it consists of: the function and arguments of a partial, the object of a method."""
    yield collate
    if isinstance(collate, partial):
        yield from _parts_of(collate.func)
        yield from (*collate.args, *collate.keywords.values())
    elif isinstance(collate, MethodType):
        yield from (collate.__func__, collate.__self__)
    elif not isinstance(collate, FunctionType | type) and isinstance(
        call := type(collate).__dict__.get("__call__"), FunctionType
    ):
        yield call


def _values_of(part: Any) -> Iterator[Any]:
    """Yields what a callable or an object keeps."""
    yield part
    if isinstance(part, FunctionType):
        yield from (cell.cell_contents for cell in part.__closure__ or () if not is_empty(cell))
        yield from part.__defaults__ or ()
        yield from (part.__kwdefaults__ or {}).values()
        yield from (part.__globals__[name] for name in part.__code__.co_names if name in part.__globals__)
    elif hasattr(part, "__dict__"):
        yield from vars(part).values()


def _is_source(value: Any) -> bool:
    return isinstance(value, torch.Generator | np.random.Generator | np.random.RandomState | random.Random)


def _state_of(source: Any) -> Any:
    if isinstance(source, np.random.Generator):
        return source.bit_generator.state
    return source.getstate() if isinstance(source, random.Random) else source.get_state()


def _set_state(source: Any, state: Any) -> None:
    if isinstance(source, np.random.Generator):
        source.bit_generator.state = state
    elif isinstance(source, random.Random):
        source.setstate(state)
    else:
        source.set_state(state)
