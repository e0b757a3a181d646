"""The first screen of the report: what to do, the numbers it rests on, the code, and a chart that needs no script."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from html import escape
from typing import Any

import numpy as np

from thresher import methods
from thresher_lab.comparison.controls import CONTROLS
from thresher_lab.comparison.summary import conclude, is_share, kind_of, time_beside_cost
from thresher_lab.report.charts import INK, looks
from thresher_lab.report.loading import ResultsDict
from thresher_lab.training.specs import SCORES_SUFFIX

LOOP = "for x, y in run.loader:\n    run.criterion(run.model(x), y).backward()  # and your optimizer's step"
"""The loop with the objects of a run."""
ATTACHED = ("forward_passes", "spend")
"""Settings in results.json that are arguments of `attach`, where they are no settings of the method."""
AS_THE_DEFAULT = (None, "auto")


def snippet(row: Mapping[str, Any], settings: Mapping[str, Any], epochs: int) -> str | None:
    """Returns code that trains as a row of a comparison did.

    Args:
        row: Row of the summary in results.json.
        settings: Settings of its runs, as in results.json.
        epochs: Number of epochs of the comparison.

    Returns:
        The call of `attach` and the loop; for the control with fewer epochs, the number of epochs; None where the method is
        not registered here, or has settings that no code can be written for, such as several methods in one.
    """
    kind, _, cost = row["method"].partition("@")
    if row["control_of"] is not None:
        if kind == "shorter":
            return f"epochs = {max(1, round(float(cost) * epochs))}  # instead of {epochs}, with the schedule fitted to it"
        if kind not in ("uniform", "smaller"):
            return None
        beside = {"spend": "batches"} if kind == "smaller" else {}
        return _code(f"thresher.UniformSubset(keep={float(cost):g})", beside, epochs)
    name = re.split("[: ]", row["method"])[0]
    if "+" in row["method"] or name not in methods.names():
        return None
    made = methods.load(name)
    if not is_dataclass(made):
        return None
    own = {field.name: field for field in fields(made) if field.init}
    given = {key: value for key, value in settings.items() if key in own and not _is_default(own[key], value)}
    if any(not isinstance(value, bool | int | float | str | list | tuple) for value in given.values()):
        return None
    beside = {key: settings[key] for key in ATTACHED if key not in own and settings.get(key) not in AS_THE_DEFAULT}
    call = f"thresher.{made.__name__}({', '.join(f'{key}={_value(value)}' for key, value in given.items())})"
    return _code(call, beside, epochs)


def _is_default(field: Any, value: Any) -> bool:
    return field.default is not MISSING and _plain(field.default) == _plain(value)


def _plain(value: Any) -> Any:
    """Returns tuples as lists, as JSON does."""
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _value(value: Any) -> str:
    if isinstance(value, str) and value.endswith(SCORES_SUFFIX):
        return f'thresher.scores.Scores.load("{value}")'
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _code(method: str, beside: Mapping[str, Any], epochs: int) -> str:
    arguments = "loader=loader, criterion=criterion, model=model, optimizer=optimizer"
    more = "".join(f', {key}="{value}"' for key, value in beside.items())
    return f"run = thresher.attach(\n    {method},\n    {arguments}, epochs={epochs}{more},\n)\n{LOOP}"


WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 14, 40
"""Margins of the chart, for its axes."""
TICKS = 5


@dataclass(frozen=True)
class BottomLine:
    """What the report says first.

    Args:
        sentences: Advice on what to do, with the reason.
        facts: Names and values of the numbers of the pick; empty without one.
        code: Lines that train in this way; None where there are none.
        chart: Chart of metric and cost, as SVG.
    """

    sentences: list[str]
    facts: list[tuple[str, str]]
    code: str | None
    chart: str


def bottom_line(results: ResultsDict) -> BottomLine:
    """Returns what the report says first.

    Args:
        results: Content of results.json.
    """
    found = conclude(results)
    facts = [] if found.pick is None else _facts(found.pick, results)
    code = None if found.pick is None else snippet(found.pick, _settings_of(found.pick, results), results["epochs"])
    return BottomLine([*found.sentences, *time_beside_cost(results)], facts, code, chart(results))


def _settings_of(row: Mapping[str, Any], results: ResultsDict) -> Mapping[str, Any]:
    return next((run["settings"] for run in results["runs"] if run["method"] == row["method"]), {})


def _facts(row: Mapping[str, Any], results: ResultsDict) -> list[tuple[str, str]]:
    metric, full = results["runs"][0]["metric"]["name"], next(row for row in results["summary"] if row["method"] == "full")
    show, signed = _forms(results)
    unit = " %" if is_share(results["runs"]) else ""
    interval = "" if row["ci95"] is None else " [{}, {}]".format(*map(signed, row["ci95"]))
    facts = [
        (metric, f"{show(row['mean'])}{unit}, full training {show(full['mean'])}{unit}"),
        ("difference", f"{signed(row['difference'])}{interval}"),
        ("cost as counted", f"{row['cost_ratio']:.3f} of full training"),
        ("CPU time saved", _saved(row.get("cpu_ratio"))),
        *([("learning rate", f"{row['rate']:g} of that of the training")] if row.get("rate", 1.0) != 1 else []),
        ("memory of a step saved", _saved(row.get("memory_ratio"))),
    ]
    against = row.get("against") or {}
    return facts + [(f"against {CONTROLS[kind].words}", _against(one, signed)) for kind, one in against.items()]


def _saved(ratio: float | None) -> str:
    return "unknown" if ratio is None else f"{100 * (1 - ratio):.0f} %"


def _against(one: Mapping[str, Any], signed: Callable[[float], str]) -> str:
    bounds = "" if one["ci95"] is None else " [{}, {}]".format(*map(signed, one["ci95"]))
    return f"{signed(one['difference'])}{bounds}"


def _forms(results: ResultsDict) -> tuple[Callable[[float], str], Callable[[float], str]]:
    if is_share(results["runs"]):
        return (lambda value: f"{100 * value:.2f}"), (lambda value: f"{100 * value:+.2f}")
    return (lambda value: f"{value:.4g}"), (lambda value: f"{value:+.3g}")


def chart(results: ResultsDict) -> str:
    """Returns a chart of the metric against the cost as SVG: methods by name, controls as small grey points.

    Bars are the 95 % intervals of the differences to full training, whose level is the dotted line.

    Args:
        results: Content of results.json.
    """
    rows = [row for row in results["summary"] if row.get("cost_ratio") is not None]
    scale = 100.0 if is_share(results["runs"]) else 1.0
    full = next((row["mean"] for row in rows if row["method"] == "full"), None)
    bars = {id(row): _bar(row, scale) for row in rows}
    ends = [scale * row["mean"] for row in rows] + [end for bar in bars.values() if bar for end in bar]
    if scale == 100.0:
        ends = [min(max(end, 0.0), 100.0) for end in ends]
    low, high = _padded(ends)
    most = max(1.0, *(row["cost_ratio"] for row in rows))

    def place(cost: float, value: float) -> tuple[float, float]:
        across, up = cost / (1.04 * most), (value - low) / (high - low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = [*_axes(low, high, 1.04 * most, place)]
    if full is not None:
        (x, y), (end, _) = place(0, scale * full), place(1.04 * most, scale * full)
        parts.append(f'<path d="M{x:.1f} {y:.1f}H{end:.1f}" class="full"/>')
    for row in sorted(rows, key=lambda row: row["control_of"] is None):
        parts += _point(row, scale, bars[id(row)], place, results)
    metric = escape(results["runs"][0]["metric"]["name"]) + (", %" if scale == 100 else "")
    parts.append(f'<text x="{LEFT}" y="11" class="axis">{metric}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" class="axis end">cost as counted, share of full training</text>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" aria-hidden="true" focusable="false">{"".join(parts)}</svg>'


def _bar(row: Mapping[str, Any], scale: float) -> tuple[float, float] | None:
    """Returns the interval around the mean of a row; None where there is none."""
    if row["ci95"] is None or row["difference"] is None:
        return None
    middle = row["mean"] - row["difference"]
    return scale * (middle + row["ci95"][0]), scale * (middle + row["ci95"][1])


def _padded(ends: Sequence[float]) -> tuple[float, float]:
    low, high = min(ends), max(ends)
    space = 0.06 * (high - low) or 0.5
    return low - space, high + space


def _axes(low: float, high: float, most: float, place: Callable[[float, float], tuple[float, float]]) -> list[str]:
    parts = []
    for value in _ticks(low, high):
        x, y = place(0, value)
        parts.append(f'<path d="M{x:.1f} {y:.1f}H{WIDTH - RIGHT}" class="grid"/>')
        parts.append(f'<text x="{x - 6:.1f}" y="{y + 4:.1f}" class="axis end">{value:g}</text>')
    for value in _ticks(0, most):
        x, y = place(value, low)
        parts.append(f'<text x="{x:.1f}" y="{y + 15:.1f}" class="axis mid">{value:g}</text>')
    return parts


def _ticks(low: float, high: float) -> list[float]:
    """Returns round numbers between two limits, about `TICKS` of them."""
    rough = (high - low) / TICKS
    size = 10.0 ** np.floor(np.log10(rough))
    step = min((one * size for one in (1, 2, 5, 10)), key=lambda one: abs(one - rough))
    return [round(float(number * step), 10) for number in range(int(np.ceil(low / step)), int(np.floor(high / step)) + 1)]


def _point(
    row: Mapping[str, Any],
    scale: float,
    bar: tuple[float, float] | None,
    place: Callable[[float, float], tuple[float, float]],
    results: ResultsDict,
) -> list[str]:
    x, y = place(row["cost_ratio"], scale * row["mean"])
    if kind_of({"control_of": row["control_of"], "method": row["method"]}) is not None:
        return [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" class="control"/>']
    of = looks(results)[row["method"]].colour
    colour = "currentColor" if of == INK else of
    parts = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="{colour}"/>']
    if bar is not None:
        (_, below), (_, above) = place(0, bar[0]), place(0, bar[1])
        parts.append(f'<path d="M{x:.1f} {below:.1f}V{above:.1f}" stroke="{colour}" stroke-width="2"/>')
    left = x > WIDTH / 2
    at = f'x="{x - 10 if left else x + 10:.1f}" y="{y - 8:.1f}"'
    return [*parts, f'<text {at} class="name{" end" if left else ""}">{escape(row["method"])}</text>']
