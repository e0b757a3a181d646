"""Is a method better than what could be done instead, over all tasks together? What fresh seeds are asked.

`python -m benchmarks.league.pooled` writes how often the answer is right in simulated leagues to benchmarks/results/league-power.json.

Written before the first training of the fresh seeds. The unit is the task: the mean of the differences paired by seed, in units of
the standard deviation of full training between its seeds on the task. Tasks are a random sample, so the interval is that of the t
distribution over tasks. Holm's correction is over the methods, for each question by itself. The first question decides whether a
method is worth its cost; trainings that fail (`failures`) leave the task out, with their number.

Tasks differ far more than seeds: in the trainings with the first five seeds, which suggested the seven methods and decide nothing,
the mean of a method has a standard deviation of 2 to 5 between tasks (and above 20 for methods that fail on one), and the paired
difference of two trainings one of 1.9. More seeds cannot help against that; more tasks can.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Any

import numpy as np

from benchmarks.kept import RESULTS
from thresher_lab.comparison.controls import SAME_TIME
from thresher_lab.comparison.statistics import ALPHA, Paired, holm

POWER_FILE = RESULTS / "league-power.json"
QUESTIONS = (SAME_TIME, "smaller", "full", "placebo")
METHODS = ("winnow", "kakurenbo", "infobatch", "seta", "ies", "repb", "importance_sampling")
"""The seven methods that lose on the fewest tasks with the first five seeds."""
FRESH_SEEDS = range(5, 10)
Trainings = Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]
"""Counted trainings by seed, by task and arm."""
BETWEEN_SEEDS = 1.9
"""Standard deviation of a paired difference, in those of full training."""


def standardized(held: Trainings, task: str, method: str, control: str) -> float | None:
    """Returns the mean difference of a method from a control on a task, in standard deviations of full training.

    Args:
        held: Counted trainings by task and arm.
        task: Name of the task.
        method: Name of the method.
        control: Name of the arm that is its control.

    Returns:
        None if a training of one of them failed, or one is missing.
    """
    arms = [(task, method), (task, control), (task, "full")]
    if not set(arms) <= set(held) or any(failures(held, *arm) for arm in arms):
        return None
    own, other, full = ([run["metric"] for run in held[place]] for place in arms)
    return fmean(a - b for a, b in zip(own, other, strict=True)) / stdev(full)


def failures(held: Trainings, task: str, name: str) -> int:
    """Returns how many trainings of an arm came to less than half of the median of full training.

    Args:
        held: Counted trainings by task and arm.
        task: Name of the task.
        name: Name of the arm.
    """
    least = median(run["metric"] for run in held[task, "full"]) / 2
    return sum(run["metric"] < least for run in held[task, name])


def answers(by_method: Mapping[str, Sequence[float]]) -> dict[str, tuple[Paired, str]]:
    """Returns the mean over tasks of each method with its interval, and what it shows: "better", "worse" or "not decided".

    Args:
        by_method: Values of `standardized` by method, one for each task.
    """
    pooled = {method: Paired.of(values) for method, values in by_method.items()}
    above = holm({method: paired.chance(0) for method, paired in pooled.items()})
    below = holm({method: paired.chance_below(0) for method, paired in pooled.items()})
    words = {
        method: next(
            (
                word
                for word, chance in (("better", above), ("worse", below))
                if chance[method] <= ALPHA
            ),
            "not decided",
        )
        for method in pooled
    }
    return {method: (paired, words[method]) for method, paired in pooled.items()}


def simulated(
    effects: Sequence[float], tasks: int, seeds: int, between: float, rounds: int, seed: int = 0
) -> dict[str, Any]:
    """Returns how often simulated methods are shown to be better, by their effect.

    Args:
        effects: Mean difference of each method, in standard deviations of full training.
        tasks: Number of tasks.
        seeds: Number of seeds.
        between: Standard deviation of the difference between tasks.
        rounds: Number of leagues.
        seed: Random seed.

    Returns:
        `better`, the share for each effect, and `error`, the share of leagues in which a method without an effect is shown to be
        better or worse.
    """
    generator = np.random.default_rng(seed)
    better = dict.fromkeys(effects, 0.0)
    errors = 0
    for _ in range(rounds):
        found = answers(_league(generator, effects, tasks, seeds, between))
        wrong = False
        for number, effect in enumerate(effects):
            word = found[str(number)][1]
            better[effect] += (word == "better") / rounds / effects.count(effect)
            wrong |= effect == 0 and word != "not decided"
        errors += wrong
    return {
        "better": {str(effect): round(share, 3) for effect, share in better.items()},
        "error": round(errors / rounds, 3),
    }


def _league(
    generator: np.random.Generator, effects: Sequence[float], tasks: int, seeds: int, between: float
) -> dict[str, list[float]]:
    """Returns standardized differences of a simulated league, by number of the method; full training has few seeds, too."""
    full = generator.chisquare(seeds - 1, tasks) / (seeds - 1)
    means = np.array(effects)[:, None] + between * generator.standard_normal((len(effects), tasks))
    noise = BETWEEN_SEEDS / math.sqrt(seeds) * generator.standard_normal(means.shape)
    return {
        str(number): row for number, row in enumerate(((means + noise) / np.sqrt(full)).tolist())
    }


def power(rounds: int) -> list[dict[str, Any]]:
    """Returns the simulations: of seven methods, two each have an effect, and three have none."""
    return [
        {"tasks": tasks, "seeds": seeds, "between": between, "effects": effects}
        | simulated(
            [0, 0, 0, effects[0], effects[0], effects[1], effects[1]], tasks, seeds, between, rounds
        )
        for between, effects in ((0.0, (0.2, 0.5)), (1.0, (1.0, 2.0)), (3.0, (2.0, 4.0)))
        for tasks in (8, 16)
        for seeds in (5, 10, 40)
    ]


def main() -> None:
    """Simulates leagues, and writes how often their answers are right."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.league.pooled", description=main.__doc__
    )
    parser.add_argument("--rounds", type=int, default=1000)
    rows = power(parser.parse_args().rounds)
    POWER_FILE.write_text(json.dumps({"simulations": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
