"""What a run says of itself on a screen: a few lines of text, or a table in a notebook."""

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from html import escape
from typing import Any

from thresher.cost import Cost

Facts = list[tuple[str, str]]
"""Names and values of what a summary says."""


def as_written(method: Any) -> str:
    """Returns a method as it is written in code, with its first setting and those that differ from the defaults."""
    if not is_dataclass(method):
        return repr(method)
    given = [(one, getattr(method, one.name)) for one in fields(method) if one.repr and one.init]
    differs = [place == 0 or one.default is MISSING or value != one.default for place, (one, value) in enumerate(given)]
    shown = (f"{one.name}={value!r}" for (one, value), differing in zip(given, differs, strict=True) if differing)
    return f"{type(method).__name__}({', '.join(shown)})"


def facts(method: Any, epochs: str, samples: int | None, entry: Mapping[str, Any] | None, cost: Cost) -> Facts:
    """Returns what a summary says of a run.

    Args:
        method: The method of the run.
        epochs: How many epochs are over.
        samples: Number of samples of the dataset; None for a stream.
        entry: Entry of `run.history` for the last epoch that is over; None before there is one.
        cost: Cost of the run by now.
    """
    found = [("method", as_written(method)), ("epochs", epochs)]
    found.append(("samples", "a stream" if samples is None else f"{samples:,}"))
    if entry is not None:
        found.append(("last epoch", _epoch(entry, samples)))
    return found + _costs(cost)


def as_text(found: Facts) -> str:
    """Returns one line per fact, the values below each other."""
    width = max(len(name) for name, _ in found)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in found)


def as_html(found: Facts) -> str:
    """Returns a table with one row per fact."""
    rows = "".join(f"<tr><th scope='row' style='text-align:left'>{escape(n)}</th>{_cell(v)}</tr>" for n, v in found)
    return f"<table>{rows}</table>"


def _cell(value: str) -> str:
    return f"<td style='text-align:left'>{escape(value)}</td>"


def _epoch(entry: Mapping[str, Any], samples: int | None) -> str:
    parts = []
    if samples:
        parts.append(f"planned {entry['kept']:,} samples, {entry['kept'] / samples:.1%}")
    if "steps" in entry:
        parts.append(f"{entry['backward']:,} went backward in {entry['steps']:,} steps")
    if entry.get("lr_scale", 1.0) != 1.0:
        parts.append(f"learning rate times {entry['lr_scale']:.3g}")
    if entry.get("nonfinite"):
        parts.append(f"{entry['nonfinite']:,} losses not finite")
    return "; ".join(parts) or "nothing was counted"


def _costs(cost: Cost) -> Facts:
    known = cost.to_dict()
    if known["ratio"] is None:
        return [("cost", str(cost))]
    own = known["measured_ratio"]
    passes = (
        f"forward {cost.forward:,} of {cost.full_forward:,} samples, backward {cost.backward:,} of {cost.full_backward:,}, "
        f"{cost.steps:,} steps"
    )
    ratio = f"{known['ratio']:.3f} of full training at 2 forwards a backward"
    saved = "unknown: too few steps were timed to know how long a backward pass takes"
    if own is not None:
        less, by = "less" if own <= 1 else "more", f"{cost.backward_to_forward:.2f} forwards a backward"
        saved = (
            f"{abs(known['time_saved']):.1%} {less} if it goes by the samples, with the measured {by}; small steps save less"
        )
    return [("passes", passes), ("cost", ratio), ("time in the model", saved)]


def numbers_of(entries: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the numbers among some values by name; later entries win. What is unknown, a text or a list is left out."""
    found = {name: value for entry in entries for name, value in entry.items()}
    return {name: value for name, value in found.items() if isinstance(value, int | float) and not isinstance(value, bool)}
