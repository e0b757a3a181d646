"""The lines of code that attach a method of a comparison to a training."""

import re
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from thresher import methods
from thresher.experiments.training.specs import SCORES_SUFFIX

LOOP = "for x, y in run.loader:\n    run.criterion(run.model(x), y).backward()  # and your optimizer's step"
"""The loop with the objects of a run."""
ATTACHED = ("forward_passes", "spend")
"""Settings in results.json that are arguments of `attach`, where they are no settings of the method."""
AS_THE_DEFAULT = (None, "auto")


def snippet(row: Mapping[str, Any], settings: Mapping[str, Any], epochs: int) -> str | None:
    """Returns code that trains as a row of a comparison did.

    Args:
        row: Row of the summary in results.json.
        settings: Settings of its runs, as in results.json.
        epochs: Number of epochs of the comparison.

    Returns:
        The call of `attach` and the loop; for the control with fewer epochs, the number of epochs; None where the method is
        not registered here, or has settings that no code can be written for, such as several methods in one.
    """
    kind, _, cost = row["method"].partition("@")
    if row["control_of"] is not None:
        if kind == "shorter":
            return f"epochs = {max(1, round(float(cost) * epochs))}  # instead of {epochs}, with the schedule fitted to it"
        if kind not in ("uniform", "smaller"):
            return None
        beside = {"spend": "batches"} if kind == "smaller" else {}
        return _code(f"thresher.UniformSubset(keep={float(cost):g})", beside, epochs)
    name = re.split("[: ]", row["method"])[0]
    if "+" in row["method"] or name not in methods.names():
        return None
    made = methods.load(name)
    if not is_dataclass(made):
        return None
    own = {field.name: field for field in fields(made) if field.init}
    given = {key: value for key, value in settings.items() if key in own and not _is_default(own[key], value)}
    if any(not isinstance(value, bool | int | float | str | list | tuple) for value in given.values()):
        return None
    beside = {key: settings[key] for key in ATTACHED if key not in own and settings.get(key) not in AS_THE_DEFAULT}
    call = f"thresher.{made.__name__}({', '.join(f'{key}={_value(value)}' for key, value in given.items())})"
    return _code(call, beside, epochs)


def _is_default(field: Any, value: Any) -> bool:
    return field.default is not MISSING and _plain(field.default) == _plain(value)


def _plain(value: Any) -> Any:
    """Returns tuples as lists, as JSON does."""
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _value(value: Any) -> str:
    if isinstance(value, str) and value.endswith(SCORES_SUFFIX):
        return f'thresher.scores.Scores.load("{value}")'
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _code(method: str, beside: Mapping[str, Any], epochs: int) -> str:
    arguments = "loader=loader, criterion=criterion, model=model, optimizer=optimizer"
    more = "".join(f', {key}="{value}"' for key, value in beside.items())
    return f"run = thresher.attach(\n    {method},\n    {arguments}, epochs={epochs}{more},\n)\n{LOOP}"
