"""Line charts side by side as one SVG, drawn by hand: no plotting library, no browser."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
"""Okabe and Ito's, which can be told apart with any colour vision."""

WIDTH, HEIGHT = 400, 300
LEFT, TOP, BETWEEN, BELOW, ROW = 56, 34, 70, 52, 18

Point = tuple[float, float, float, float]


@dataclass(frozen=True)
class Line:
    """A line with a band.

    Args:
        name: In the legend.
        points: x, y, and the lowest and highest y there.
    """

    name: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Panel:
    """One chart; y is logarithmic.

    Args:
        title: Above it.
        x_label: Below it.
        y_label: Beside it.
        lines: In the order of the legend.
        marks: Names and values of y that get a dashed line.
    """

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    marks: Sequence[tuple[str, float]] = ()


def draw(panels: Sequence[Panel]) -> str:
    """The SVG of panels that share a legend, which is that of the first."""
    names = [line.name for line in panels[0].lines]
    width = LEFT + len(panels) * (WIDTH + BETWEEN)
    height = TOP + HEIGHT + BELOW + ROW * len(names)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, panel in enumerate(panels):
        parts += [f'<g transform="translate({LEFT + number * (WIDTH + BETWEEN)},{TOP})">', *_panel(panel), "</g>"]
    for number, name in enumerate(names):
        y = TOP + HEIGHT + BELOW + ROW * number
        parts.append(f'<line x1="{LEFT}" y1="{y}" x2="{LEFT + 24}" y2="{y}" stroke="{_colour(number)}" stroke-width="2"/>')
        parts.append(_text(LEFT + 32, y + 4, name))
    return "\n".join([*parts, "</svg>", ""])


def ticks(most: float, wanted: int = 6) -> list[float]:
    """Round numbers from 0 to `most`, about as many as wanted."""
    step = 10 ** math.floor(math.log10(most / wanted))
    step *= next((factor for factor in (1, 2, 5) if most / (factor * step) <= wanted), 10)
    return [number * step for number in range(int(most / step + 1e-9) + 1)]


def log_ticks(least: float, most: float) -> list[float]:
    """Round numbers from `least` to `most` for a logarithmic axis, eight at most."""
    for mantissas in ((1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9), (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1,)):
        powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
        found = [m * 10**power for power in powers for m in mantissas if least <= m * 10**power <= most]
        if len(found) <= 8:
            return found
    return found


def _panel(panel: Panel) -> list[str]:
    points = [point for line in panel.lines for point in line.points]
    right = 1.02 * max(point[0] for point in points)
    ends = [value for point in points for value in point[1:] if value > 0] + [value for _, value in panel.marks]
    low, high = 0.97 * min(ends), 1.03 * max(ends)

    def x_of(x: float) -> float:
        return round(WIDTH * x / right, 2)

    def y_of(y: float) -> float:
        return round(HEIGHT * math.log(high / max(y, low)) / math.log(high / low), 2)

    parts = [_text(0, -14, panel.title), _text(WIDTH / 2, HEIGHT + 34, panel.x_label, "middle")]
    parts.append(
        f'<text transform="translate(-42,{HEIGHT / 2}) rotate(-90)" text-anchor="middle">{escape(panel.y_label)}</text>'
    )
    for x in ticks(right):
        parts.append(f'<line x1="{x_of(x)}" y1="0" x2="{x_of(x)}" y2="{HEIGHT}" stroke="#eee"/>')
        parts.append(_text(x_of(x), HEIGHT + 16, f"{x:g}", "middle"))
    for y in log_ticks(low, high):
        parts.append(f'<line x1="0" y1="{y_of(y)}" x2="{WIDTH}" y2="{y_of(y)}" stroke="#eee"/>')
        parts.append(_text(-6, y_of(y) + 4, f"{y:g}", "end"))
    for name, y in panel.marks:
        parts.append(f'<line x1="0" y1="{y_of(y)}" x2="{WIDTH}" y2="{y_of(y)}" stroke="#888" stroke-dasharray="4 4"/>')
        parts.append(_text(WIDTH + 4, y_of(y) + 4, name))
    for number, line in enumerate(panel.lines):
        lowest = [(x_of(x), y_of(least)) for x, _, least, _ in line.points]
        highest = [(x_of(x), y_of(most)) for x, _, _, most in line.points]
        middle = [(x_of(x), y_of(y)) for x, y, _, _ in line.points]
        colour = _colour(number)
        parts.append(f'<polygon points="{_path([*lowest, *highest[::-1]])}" fill="{colour}" opacity="0.12"/>')
        parts.append(f'<polyline points="{_path(middle)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>' for x, y in middle]
    parts.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#444"/>')
    return parts


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x},{y}" for x, y in points)


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]
