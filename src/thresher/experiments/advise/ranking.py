"""Which methods are worth a comparison, by what was measured of them before time; and the command that compares them."""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thresher.experiments.advise.findings import STANDINGS
from thresher.experiments.advise.outlook import Outlook
from thresher.experiments.training.specs import Spec

WORTHWHILE = 0.05
"""Share of the time below which a saving is not worth the trouble."""
AT_RANDOM = ("uniform", "random_backprop")
"""Methods that choose samples at random: they are controls, and what they save is not recommended."""
RANDOM_HALF = "uniform:keep=0.5"
"""Method to compare where no choice of samples is recommended: half of the samples of each epoch, at random."""
MOST_NAMED = 2
"""Largest number of methods in the next command: each of them is trained with its controls."""


def worth_trying(rows: Sequence[Mapping[str, Any]], outlook: Outlook) -> list[Mapping[str, Any]]:
    """Returns the methods that are worth a comparison, the best first.

    Those come first that were better than controls of the same cost where they were measured, then those of which it is not
    decided, and then those that were not measured; those that were worse are not named. Among equals, time decides.

    Args:
        rows: Entries of `methods` in the advice.
        outlook: Numbers of the probe about any choice of samples.
    """
    if outlook.alike:
        return []
    saving = [row for row in rows if row["refused"] is None and row["at_most"] >= WORTHWHILE]
    chosen = [row for row in saving if not draws_blindly(row) and row["record"]["standing"] != "behind"]
    return sorted(chosen, key=lambda row: (STANDINGS.index(row["record"]["standing"]), -row["at_most"]))


def draws_blindly(row: Mapping[str, Any]) -> bool:
    """Returns whether a method chooses at random: always, or for want of a signal.

    Args:
        row: Entry of `methods` in the advice.
    """
    return row["method"].startswith(AT_RANDOM) or bool(row["missing"])


def named_methods(worth: Sequence[str], specs: Sequence[Spec]) -> list[str]:
    """Returns the recommended methods that the next command has, as on the command line.

    Args:
        worth: Labels of the recommended methods, the best first.
        specs: All methods that were asked for.
    """
    texts = {spec.label: spec.text for spec in specs}
    return [texts[name] for name in worth[:MOST_NAMED]]


def next_command(
    task: str, methods: Sequence[str], *, epochs: int, data: Path | None = None, budget: Sequence[float] = ()
) -> str:
    """Returns the command that compares methods on a training, as a shell reads it.

    Args:
        task: Name of the training.
        methods: Methods as on the command line; without any, and without a budget, a random half of the samples is compared.
        epochs: Number of epochs of the planned training.
        data: Folder with the data that was given. Default: none.
        budget: Shares of the cost of full training that Winnow is compared at, too. Default: none.

    Example:
        >>> next_command("fashion-mnist@20000", ["winnow:share=0.5", "infobatch"], epochs=10)
        'thresher compare fashion-mnist@20000 --methods winnow:share=0.5,infobatch --epochs 10 --out runs/fashion-mnist-20000'
    """
    named = re.split(r"[\\/]", task)[-1].partition(".py:")[0]
    folder = f"runs/{re.sub(r'[^A-Za-z0-9_]+', '-', named).strip('-') or 'training'}"
    arms = ["--methods", ",".join(methods) or RANDOM_HALF] if methods or not budget else []
    return _command("compare", task, [*arms, *_budget_option(budget)], epochs, data, "--out", folder)


def larger_budget_command(task: str, share: float, *, epochs: int, data: Path | None = None) -> str:
    """Returns the command that tries a budget halfway from a share to the whole cost in short runs.

    Args:
        task: Name of the training.
        share: Share of the cost that was too small.
        epochs: Number of epochs of the planned training.
        data: Folder with the data that was given. Default: none.

    Example:
        >>> larger_budget_command("digits", 0.5, epochs=20)
        'thresher advise digits --budget 0.75 --epochs 20'
    """
    return _command("advise", task, _budget_option([(1 + share) / 2]), epochs, data)


def _budget_option(shares: Sequence[float]) -> list[str]:
    return ["--budget", ",".join(f"{share:.12g}" for share in shares)] if shares else []


def _command(name: str, task: str, arms: Sequence[str], epochs: int, data: Path | None, *more: str) -> str:
    given = [] if data is None else ["--data", str(data)]
    return shlex.join(["thresher", name, task, *arms, "--epochs", str(epochs), *given, *more])
