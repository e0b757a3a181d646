"""The figure of docs/winnow.md: accuracy over CPU time, for ways to spend a part of the cost of full training.

`python -m benchmarks.winnow.figure` writes docs/figures/accuracy-over-time.svg from benchmarks/results/winnow-second.json.
"""

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

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
WIDTH, HEIGHT, PANEL, LEFT, TOP, BOTTOM = 900, 330, 300, 44, 86, 44
LARGEST_TIME = 1.05
LINES = 5
"""Number of lines of a grid."""


def figure(found: Mapping[str, Any]) -> str:
    """Returns the figure as SVG: a panel for each task, with a line for each way, over its shares of the cost.

    Args:
        found: Content of benchmarks/results/winnow-second.json.
    """
    panels = [
        _panel(found["tables"], task, PANEL * number) for number, task in enumerate(AT_OTHER_SHARES)
    ]
    label = f"Metric over CPU time at {len(SHARES)} shares of the cost, on {len(panels)} tasks; the tables have the numbers"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#1c1d21">'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>{_legend()}{"".join(panels)}</svg>\n'
    )


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


def _panel(tables: Mapping[str, Any], task: str, left: int) -> str:
    points = {arm: points_of(tables, task, arm) for arm in ARMS}
    metrics = [metric for line in points.values() for _, metric in line]
    low, high = min(metrics), max(metrics)
    low, high = low - 0.05 * (high - low), high + 0.05 * (high - low)

    def x(time: float) -> float:
        return left + LEFT + time / LARGEST_TIME * (PANEL - LEFT - 10)

    def y(metric: float) -> float:
        return TOP + (high - metric) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<text x="{left + LEFT}" y="{TOP - 14}" font-weight="600">{escape(TITLES[task])}</text>'
    ]
    for number in range(LINES):
        metric = low + (high - low) * number / (LINES - 1)
        parts.append(
            f'<path d="M{x(0):.1f} {y(metric):.1f}H{x(LARGEST_TIME):.1f}" stroke="#dcdce1"/>'
        )
        parts.append(
            f'<text x="{left + LEFT - 6}" y="{y(metric) + 4:.1f}" text-anchor="end">{metric:.1f}</text>'
        )
    parts += [
        f'<text x="{x(time):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{time:g}</text>'
        for time in (0, 0.5, 1)
    ]
    parts.append(
        f'<text x="{x(0.5):.1f}" y="{HEIGHT - 8}" text-anchor="middle">CPU time over full training</text>'
    )
    return "".join(parts) + "".join(
        _line(points[arm], color, x, y) for arm, (_, color) in ARMS.items()
    )


def _line(points: Sequence[tuple[float, float]], color: str, x: Any, y: Any) -> str:
    # In the order of the shares: a smaller share can have taken longer, where the machine was busy.
    path = "L".join(f"{x(time):.1f} {y(metric):.1f}" for time, metric in points)
    dots = [
        f'<circle cx="{x(time):.1f}" cy="{y(metric):.1f}" r="4" fill="{color}"/>'
        for time, metric in points
    ]
    return f'<path d="M{path}" stroke="{color}" stroke-width="2" fill="none"/>{"".join(dots)}'


def _legend() -> str:
    shares = ", ".join(f"{share:g}" for share in SHARES)
    parts, at = (
        [
            f'<text x="12" y="22" font-weight="600">Accuracy over time, at {shares} of the cost</text>'
        ],
        12,
    )
    for name, color in ARMS.values():
        parts.append(
            f'<circle cx="{at + 6}" cy="44" r="5" fill="{color}"/><text x="{at + 16}" y="48">{name}</text>'
        )
        at += 50 + 7 * len(name)
    return "".join(parts)


def main() -> None:
    """Writes the figure."""
    FIGURE.write_text(figure(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
