"""Checks of signals with several numbers per sample, which batch methods can choose by."""

from typing import Any

from torch import nn

from thresher.losses.signals import GIVEN_ONLY, WIDE_SIGNALS
from thresher.methods.contract import requirements_of, way_around
from thresher.passes.scoring import Scoring


def check_wide(method: Any, forward_passes: str, scoring: Scoring | None, model: Any, signals: Any) -> str:
    """Returns `forward_passes` as the signals of a batch method need it, after checking that these can be had.

    Args:
        method: The batch method; None where there is none.
        forward_passes: Argument of `attach`.
        scoring: Argument of `attach`.
        model: Argument of `attach`.
        signals: Argument of `attach`.

    Raises:
        ValueError: A signal cannot be had from the passes, the model or the function that were given.
    """
    wide = set() if method is None else WIDE_SIGNALS & {*requirements_of(method).signals}
    if not wide:
        return forward_passes
    name = type(method).__name__
    if lacking := sorted(wide & GIVEN_ONLY if signals is None else ()):
        raise ValueError(
            f"{name} needs {', '.join(lacking)}, which no criterion gives. Pass attach(signals=function) with "
            f"function(outputs, targets) -> {{'{lacking[0]}': (n, n) tensor}}{way_around(method, *lacking)}."
        )
    if "alignment" in requirements_of(method).signals and (scoring is None or scoring.validation is None):
        raise ValueError(
            f"{name} needs a validation batch: pass attach(scoring=thresher.Scoring(validation=function)) with a function that "
            "returns one, such as lambda: (inputs, targets)"
        )
    if scoring is not None and (scoring.every_epochs > 1 or scoring.losses is not None):
        raise ValueError(
            f"`scoring`: {name} chooses by {', '.join(sorted(wide))}, of which each sample has several numbers, and nothing of "
            "them is kept from epoch to epoch: use every_epochs=1 and no `losses`"
        )
    if "feature" not in wide:
        return forward_passes
    if forward_passes == "once":
        raise ValueError(
            f"{name} needs the input of the last nn.Linear, which the loop's own forward pass does not show: use "
            f"forward_passes='twice'{way_around(method, 'feature')}"
        )
    scored = model if scoring is None or scoring.model is None else scoring.model
    if isinstance(scored, nn.Module) and not any(isinstance(part, nn.Linear) for part in scored.modules()):
        raise ValueError(
            f"{name} needs the input of the last nn.Linear, and {type(scored).__name__} has none{way_around(method, 'feature')}"
        )
    return "twice"
