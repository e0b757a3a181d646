"""A comparison that adds seeds until its verdicts are decided."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thresher.experiments.comparison.compare import compare
from thresher.experiments.training.specs import Spec

GROWTH = 1.5
"""Factor by which the number of seeds grows from one look to the next."""


def look_sizes(first: int, most: int) -> list[int]:
    """Returns the numbers of seeds after which the verdicts are looked at: few looks, because each of them costs power.

    Args:
        first: Number of seeds at the first look, 1 or more.
        most: Largest number of seeds.

    Example:
        >>> look_sizes(3, 12)
        [3, 5, 8, 12]
    """
    sizes = [min(first, most)]
    while sizes[-1] < most:
        sizes.append(min(most, max(sizes[-1] + 1, math.ceil(GROWTH * sizes[-1]))))
    return sizes


def undecided(results: dict[str, Any]) -> list[str]:
    """Returns the methods of which a verdict is not decided, against full training or against a control.

    Args:
        results: Content of results.json.
    """
    methods = [row for row in results["summary"] if row["control_of"] is None and row["finding"] is not None]
    return [
        row["method"] for row in methods if "unclear" in (row["finding"], *(one["finding"] for one in row["against"].values()))
    ]


def compare_until_decided(
    task: str, methods: Sequence[Spec], seeds: Sequence[int], epochs: int, out: Path, *, most: int, **options: Any
) -> dict[str, Any]:
    """Compares with more and more seeds until every verdict is decided, or until there are as many seeds as allowed.

    Looking several times finds differences by chance more often than looking once. So the verdicts are corrected for the number
    of looks, which is fixed beforehand.

    Args:
        task: Name of the task, see `compare`.
        methods: Methods to compare.
        seeds: Seeds of the first look; the smallest numbers that are not among them are added.
        epochs: Number of epochs of every run.
        out: Folder of the comparison.
        most: Largest number of seeds, at least as many as `seeds`.
        options: Further arguments of `compare`.

    Returns:
        The content of results.json after the last look.

    Raises:
        ValueError: `most` is smaller than the number of seeds, or an argument of `compare` is not possible.
    """
    if most < len(seeds):
        raise ValueError(f"--max-seeds {most} is less than the {len(seeds)} seeds of --seeds; give at least as many")
    sizes = look_sizes(len(seeds), most)
    more = [number for number in range(most + len(seeds)) if number not in seeds]
    results: dict[str, Any] = {}
    for size in sizes:
        now = [*seeds, *more][:size]
        results = compare(task, methods, now, epochs, out, looks=sizes, **options)
        if not undecided(results):
            break
    return results
