"""The figure of the README: what half of the cost loses on each task, with Winnow and with two plain ways to spend less.

`python -m benchmarks.winnow.figure` writes docs/figures/half-the-cost.svg from benchmarks/results/winnow.json.
"""

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.winnow.table import TITLES

ROOT = Path(__file__).resolve().parents[2]
RESULTS, FIGURE = ROOT / "benchmarks" / "results" / "winnow.json", ROOT / "docs" / "figures" / "half-the-cost.svg"
ARMS = {"winnow": ("Winnow", "#0072b2"), "smaller": ("smaller batches", "#d55e00"), "shorter": ("fewer epochs", "#8e8e93")}
"""Ways to spend half of the cost: the name and the colour of each."""
WIDTH, LEFT, RIGHT, TOP, ROW = 860, 360, 20, 56, 34
APART = 8
"""Distance between the points of one task."""
STEP = 2
"""Points between two lines of the grid."""


def figure(found: Mapping[str, Any]) -> str:
    """Returns the figure as SVG: for each task the differences to full training in points, with their 95 % intervals.

    Args:
        found: Content of benchmarks/results/winnow.json.
    """
    tasks = found["shares"]["0.5"]["tasks"]
    order = sorted(tasks, key=lambda task: tasks[task]["winnow"]["to_full"]["mean"])
    ends = [one[end] for task in order for one in _differences(tasks[task]).values() for end in ("low", "high")]
    low, high = STEP * (min(ends) // STEP), -STEP * (-max(ends) // STEP)
    height = TOP + ROW * len(order) + 34

    def x(points: float) -> float:
        return LEFT + (points - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    parts = [_grid(low, high, x, height), _legend()]
    for number, task in enumerate(order):
        y = TOP + ROW * (number + 0.5)
        title = f"{TITLES.get(task, task)}"
        parts.append(f'<text x="{LEFT - 12}" y="{y + 4:.1f}" text-anchor="end">{escape(title)}</text>')
        for place, (arm, one) in enumerate(_differences(tasks[task]).items()):
            parts.append(_point(one, ARMS[arm][1], x, y + APART * (place - 1)))
    label = f"Difference to full training in points at half of the cost, on {len(order)} tasks; the table has the numbers"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}" '
        'font-family="system-ui, sans-serif" font-size="13" fill="#1c1d21">'
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>{"".join(parts)}</svg>\n'
    )


def _differences(arms: Mapping[str, Any]) -> dict[str, Mapping[str, float]]:
    return {arm: arms[arm]["to_full"] for arm in ARMS}


def _grid(low: float, high: float, x: Any, height: int) -> str:
    lines = []
    for points in range(round(low), round(high) + 1, STEP):
        strong = "#1c1d21" if points == 0 else "#dcdce1"
        lines.append(f'<path d="M{x(points):.1f} {TOP - 6}V{height - 30}" stroke="{strong}"/>')
        lines.append(f'<text x="{x(points):.1f}" y="{height - 12}" text-anchor="middle">{points:+d}</text>'.replace("+0", "0"))
    return "".join(lines)


def _legend() -> str:
    parts, at = (
        ['<text x="12" y="24" font-weight="600">Half of the cost: points lost or won against full training</text>'],
        LEFT,
    )
    for name, colour in ARMS.values():
        parts.append(f'<circle cx="{at + 6}" cy="42" r="5" fill="{colour}"/><text x="{at + 16}" y="46">{name}</text>')
        at += 130
    return "".join(parts)


def _point(one: Mapping[str, float], colour: str, x: Any, y: float) -> str:
    return (
        f'<path d="M{x(one["low"]):.1f} {y:.1f}H{x(one["high"]):.1f}" stroke="{colour}" stroke-width="2"/>'
        f'<circle cx="{x(one["mean"]):.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>'
    )


def main() -> None:
    """Writes the figure."""
    FIGURE.write_text(figure(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
