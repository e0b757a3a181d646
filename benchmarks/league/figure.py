"""The figure of the league: the advantage over fewer epochs in the same time, by method and task."""

from collections.abc import Mapping
from typing import Any

from benchmarks.drawn import svg
from benchmarks.league.table import ASKED
from thresher_lab.comparison.controls import SAME_TIME

TICKS = (-100, -30, -10, -4, -2, 0, 2, 4, 10)


def figure(found: Mapping[str, Any]) -> bytes:
    """Returns the figure as SVG: a row for each method with fresh seeds, a dot for each task, the mean with its interval.

    Args:
        found: Result of `table.results`.
    """
    asked = {row["method"]: row["against"].get(SAME_TIME) for row in found["methods"]}
    rows = {name: row for name, row in asked.items() if row and row["answer"] != "first seeds"}

    def draw(drawn: Any) -> None:
        axes = drawn.add_subplot()
        # Tasks on which a method is far off would squeeze all others, so that the axis is linear in its middle only.
        axes.set_xscale("symlog", linthresh=4)
        axes.set_xticks(TICKS, TICKS)
        axes.set_xticks([], minor=True)
        axes.axvline(0, color="#444444", linewidth=0.8)
        for height, row in enumerate(reversed(rows.values())):
            tasks = list(row["by_task"].values())
            axes.scatter(tasks, [height] * len(tasks), s=14, color="#56b4e9", zorder=2)
            axes.plot([row["low"], row["high"]], [height, height], color="#1c1d21", zorder=3)
            axes.scatter([row["mean"]], [height], s=30, color="#1c1d21", zorder=4)
        axes.set_yticks(range(len(rows)), reversed(rows))
        axes.set_xlabel(
            f"to {ASKED[SAME_TIME]}, standard deviations of full training between seeds"
        )

    return svg(draw, 7.5, 0.4 * len(rows) + 1)
