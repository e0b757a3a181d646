"""Methods that `attach` is given as a share of the cost, or by name."""

import inspect
from typing import Any

from thresher.methods import registry
from thresher.methods.winnow import Winnow


def method_of(given: Any) -> Any:
    """Returns the method that a share or a name stands for; anything else as it is.

    Args:
        given: Argument `method` of `attach`, or a list of such arguments: a number such as 0.5 or a text such as "50%" is
            `Winnow(share)`; another text is the name of a method with its default settings.

    Raises:
        ValueError: A share is outside (0, 1], no method has this name, or the method has settings without a default.
    """
    if isinstance(given, list | tuple):
        return [method_of(one) for one in given]
    if isinstance(given, bool) or not isinstance(given, int | float | str):
        return given
    if isinstance(given, str) and given[:1].isalpha() and not given.endswith("%"):
        return _by_name(given)
    return Winnow(share=_share_of(given))


def _share_of(given: float | str) -> float:
    share = _percent(given) if isinstance(given, str) else float(given)
    if not 0 < share <= 1:
        raise ValueError(
            f"`method`: the share of the cost of full training must be within (0, 1], such as 0.5 or '50%', got {given!r}"
        )
    return share


def _percent(given: str) -> float:
    """Returns the share that a percentage names; nan for another text."""
    try:
        return float(given.removesuffix("%")) / 100 if given.endswith("%") else float("nan")
    except ValueError:
        return float("nan")


def _by_name(name: str) -> Any:
    known, _, settings = name.partition(":")
    try:
        kind = registry.load(known)
    except ValueError as error:
        raise ValueError(f"`method`: {error}") from None
    if settings:
        raise ValueError(
            f"`method`: {name!r} is the form of the command line; write thresher.{kind.__name__}({settings.replace(':', ', ')})"
        )
    needed = [one.name for one in inspect.signature(kind).parameters.values() if one.default is one.empty]
    if needed:
        settings = ", ".join(f"{one}=..." for one in needed)
        raise ValueError(f"`method`: {name!r} has settings without a default; write thresher.{kind.__name__}({settings})")
    return kind()
