"""The figure of docs/winnow.md: accuracy over CPU time, for ways to spend a part of the cost of full training.

`python -m benchmarks.winnow.figure` writes docs/figures/accuracy-over-time.svg from benchmarks/results/winnow-second.json.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.drawn import svg
from benchmarks.winnow.second import AT_OTHER_SHARES, TITLES

ROOT = Path(__file__).resolve().parents[2]
RESULTS, FIGURE = (
    ROOT / "benchmarks" / "results" / "winnow-second.json",
    ROOT / "docs" / "figures" / "accuracy-over-time.svg",
)
ARMS = {
    "second version": ("Winnow", "#0072b2"),
    "in fewer steps": ("Winnow, in fewer steps", "#56b4e9"),
    "smaller batches": ("smaller batches", "#d55e00"),
    "fewer epochs": ("fewer epochs", "#8e8e93"),
    "full": ("full training", "#1c1d21"),
}
"""Ways to train: the name and the color of each."""
SHARES = (0.35, 0.5, 0.7)


def points_of(tables: Mapping[str, Any], task: str, arm: str) -> list[tuple[float, float]]:
    """Returns the CPU time, as a share of full training, and the metric of a way at each share that it was trained at.

    Args:
        tables: Tables of the results, by task and share.
        task: Name of the task.
        arm: Name of the way.
    """
    shares = (0.5,) if arm == "full" else SHARES
    rows = [tables.get(f"{task} at {share:g}", {}).get(arm) for share in shares]
    return [(row["cpu"], row["metric"]) for row in rows if row is not None]


def figure(found: Mapping[str, Any]) -> bytes:
    """Returns the figure as SVG: a panel for each task, with a line for each way, over its shares of the cost.

    Args:
        found: Content of benchmarks/results/winnow-second.json.
    """

    def draw(drawn: Any) -> None:
        panels = drawn.subplots(1, len(AT_OTHER_SHARES))
        for axes, task in zip(panels, AT_OTHER_SHARES, strict=True):
            axes.set(title=TITLES[task], xlabel="CPU time over full training", xlim=(0, 1.05))
            axes.grid(visible=True)
            for arm, (name, color) in ARMS.items():
                # In the order of the shares: a smaller share can have taken longer, where the machine was busy.
                times, metrics = zip(*points_of(found["tables"], task, arm), strict=True)
                axes.plot(times, metrics, marker="o", color=color, label=name)
        handles, names = panels[0].get_legend_handles_labels()
        drawn.legend(handles, names, loc="outside upper left", ncols=len(ARMS), frameon=False)

    return svg(draw, 9.4, 3.4)


def main() -> None:
    """Writes the figure."""
    FIGURE.write_bytes(figure(json.loads(RESULTS.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
