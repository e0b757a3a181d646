"""Which run an optimizer or a loader belongs to, so that no two runs have one."""

import gc
import weakref
from collections.abc import Iterable
from typing import Any

# Weak on both sides: this table keeps neither an optimizer nor a run alive.
_OWNERS: "weakref.WeakKeyDictionary[Any, weakref.ref[Any]]" = weakref.WeakKeyDictionary()


def _owner(thing: Any) -> Any:
    owner = _OWNERS.get(thing)
    return None if owner is None else owner()


def check_free(argument: str, kind: str, things: Iterable[Any]) -> None:
    """Refuses an object that a run still has.

    Args:
        argument: Name of the argument of `attach`, for the message.
        kind: Name of the type of what was given, for the message.
        things: The object and its parts, as an optimizer that holds another.

    Raises:
        ValueError: A run that was not detached has one of them.
    """
    if all(_owner(thing) is None for thing in things):
        return
    gc.collect()  # a run that nobody holds any more may be waiting for it
    if any(_owner(thing) is not None for thing in things):
        why = "its learning rate would be scaled twice" if argument == "optimizer" else "two runs would take samples from it"
        raise ValueError(
            f"`{argument}`: this {kind} is still attached to another run, and {why}. Call run.detach() on that run before you "
            f"attach again, or create a new {kind}."
        )


def claim(owner: Any, things: Iterable[Any]) -> None:
    """Notes that objects belong to a run, as long as something holds `owner`, a part of the run."""
    for thing in things:
        _OWNERS[thing] = weakref.ref(owner)


def release(owner: Any) -> None:
    """Notes that nothing belongs to a run any more."""
    for thing in [thing for thing, one in _OWNERS.items() if one() is owner]:
        del _OWNERS[thing]
