"""The same look at learning rates for every arm of a comparison, before the runs that count."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from thresher.experiments.comparison.compare import compare
from thresher.experiments.comparison.rates import Arm, Rates
from thresher.experiments.comparison.summary import kind_of
from thresher.experiments.comparison.workers import RunValueError
from thresher.experiments.training.specs import Spec
from thresher.experiments.training.store import LOOKS

LOOK_SEEDS = (10_000, 10_001)
"""Seeds of the runs that rates are chosen by, and that do not count."""


def chosen_rates(
    task: str, methods: Sequence[Spec], seeds: Sequence[int], epochs: int, out: Path, factors: Sequence[float], **options: Any
) -> Rates:
    """Tries every arm of a comparison with the same factors on its learning rate, and returns the best factor of each.

    A control is tried at the cost of its method, and a placebo is not tried: it has the rate of its method. Where two factors
    are equally good, the one nearer to 1 is chosen.

    Args:
        task: Name of the task, see `compare`.
        methods: Methods to compare.
        seeds: Seeds that count.
        epochs: Number of epochs of every run.
        out: Folder of the comparison; the runs are in its folder `LOOKS`.
        factors: Factors on the learning rate.
        options: Further arguments of `compare`.

    Raises:
        ValueError: A seed that counts is one of `LOOK_SEEDS`, a factor makes a training fail, or an argument of `compare` is
            not possible.
    """
    if shared := sorted({*seeds} & {*LOOK_SEEDS}):
        raise ValueError(
            f"--rates: tries rates with the seeds {LOOK_SEEDS}, which must not count; leave {shared} out of --seeds"
        )
    found: dict[Arm, dict[float, list[float]]] = {}
    for factor in factors:
        try:
            results = compare(task, methods, LOOK_SEEDS, epochs, out / LOOKS, rates=Rates(everywhere=factor), **options)
        except RunValueError as error:
            raise ValueError(
                f"--rates: with the factor {factor:g}, {error}. Leave this factor out, if it is the reason."
            ) from error
        for run in results["runs"]:
            arm: Any = (run["control_of"] or run["method"], kind_of(run))
            found.setdefault(arm, {}).setdefault(factor, []).append(run["metric"]["value"])
    chosen = {
        arm: max(tried, key=lambda factor, tried=tried: (mean(tried[factor]), -abs(factor - 1))) for arm, tried in found.items()
    }
    return Rates(chosen, factors, LOOK_SEEDS)
