"""Which run an optimizer or a loader is attached to, so that two runs never share one."""

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
    """Checks that an object is not attached to another run.

    Args:
        argument: Name of the argument of `attach`, for the error message.
        kind: Name of the type of the argument, for the error message.
        things: The object and its parts, such as an optimizer inside another.

    Raises:
        ValueError: An object is attached to a run that was not detached.
    """
    if all(_owner(thing) is None for thing in things):
        return
    gc.collect()  # a run that nobody holds any more may be waiting for it
    if any(_owner(thing) is not None for thing in things):
        if argument == "optimizer":
            why = "two runs would act on its steps"
        else:
            why = "two runs would take samples from it"
        raise ValueError(
            f"`{argument}`: this {kind} still belongs to another run, and {why}. Call run.detach() on that run before you "
            f"create another one, or create a new {kind}."
        )


def claim(owner: Any, things: Iterable[Any]) -> None:
    """Notes that objects are attached to a run, as long as `owner`, a part of the run, exists."""
    for thing in things:
        _OWNERS[thing] = weakref.ref(owner)


def release(owner: Any) -> None:
    """Notes that a run was detached."""
    for thing in [thing for thing, one in _OWNERS.items() if one() is owner]:
        del _OWNERS[thing]
