"""The first screen of the report: what to do, the numbers it rests on, the code, and a chart that needs no script."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from html import escape
from typing import Any

import numpy as np

from thresher import methods
from thresher_lab.comparison.controls import CONTROLS, SAME_TIME, kind_of
from thresher_lab.comparison.summary import (
    conclude,
    difference_text,
    forms,
    interval_sentences,
    is_share,
    time_of,
)
from thresher_lab.report.charts import INK, looks
from thresher_lab.report.loading import ResultsDict
from thresher_lab.training.specs import FORMATS, SCORES_SUFFIX

LOOP = "for x, y in run.loader:\n    run.criterion(run.model(x), y).backward()  # and your optimizer's step"
"""The loop with the objects of a run."""
ATTACHED = ("forward_passes", "spend", "stratify")
"""Settings in results.json that are arguments of `attach`, where they are no settings of the method."""
WITHOUT_CODE = FORMATS.keys() - set(ATTACHED)
"""Settings in results.json that no short code stands for, where they are no settings of the method."""
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
    match kind_of(row):
        case None:
            return _method_code(row["method"], settings, epochs)
        case "shorter" | "shorter@time":
            return _shorter_code(row["cost_ratio"] * epochs, epochs)
        case "uniform":
            return _code(f"thresher.UniformSubset(keep={settings['keep']:g})", {}, epochs)
        case "smaller":
            method = f"thresher.UniformSubset(keep={settings['keep']:g})"
            return _code(method, {"spend": "batches"}, epochs)
        case "fewer":
            method = f"thresher.UniformSubset(keep={settings['keep']:g}, fixed=True)"
            return _code(method, {}, epochs)
        case _:
            return None


def _shorter_code(wanted: float, epochs: int) -> str:
    whole = max(1, round(wanted))
    rounded = f", rounded from {wanted:.3g}" if abs(wanted - whole) > 0.05 else ""
    return f"epochs = {whole}  # instead of {epochs}{rounded}, with the schedule fitted to it"


def _method_code(label: str, settings: Mapping[str, Any], epochs: int) -> str | None:
    name = re.split("[: ]", label)[0]
    if "+" in label or name not in methods.names():
        return None
    kind = methods.load(name)
    if not is_dataclass(kind):
        return None
    known = {field.name: field for field in fields(kind) if field.init}
    changed = {
        key: value
        for key, value in settings.items()
        if key in known and not _is_default(known[key], value)
    }
    if any(key in settings and key not in known for key in WITHOUT_CODE) or any(
        not isinstance(value, bool | int | float | str | list | tuple) for value in changed.values()
    ):
        return None
    beside = {
        key: settings[key]
        for key in ATTACHED
        if key not in known and settings.get(key) not in AS_THE_DEFAULT
    }
    if settings.get("stratify", "auto") is None:
        beside["stratify"] = None
    call = f"thresher.{kind.__name__}({', '.join(f'{key}={_value(value)}' for key, value in changed.items())})"
    return _code(call, beside, epochs)


def _is_default(field: Any, value: Any) -> bool:
    return field.default is not MISSING and _plain(field.default) == _plain(value)


def _plain(value: Any) -> Any:
    """Returns tuples as lists, as JSON does."""
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value


def _value(value: Any) -> str:
    if isinstance(value, str) and value.endswith(SCORES_SUFFIX):
        return f'thresher.scores.Scores.load("{value}")'
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _code(method: str, beside: Mapping[str, Any], epochs: int) -> str:
    arguments = "loader=loader, criterion=criterion, model=model, optimizer=optimizer"
    more = "".join(f", {key}={_value(value)}" for key, value in beside.items())
    return (
        f"run = thresher.attach(\n    {method},\n    {arguments}, epochs={epochs}{more},\n)\n{LOOP}"
    )


WIDTH = 460
LEFT = 14
RIGHT = 14
TOP = 18
ROW = 38
BELOW = 50
"""Sizes of the chart: its width, the space beside and above the rows, the height of a row, and the space for the axis."""
LONGEST_LABEL = 34
"""Number of characters of a method's name that fit into a row of the chart."""
TICKS = 5
WIDEST = 4.0
"""Ends of the axis, in the largest difference or margin: a longer interval ends at the axis, with an arrow."""


def bottom_line(results: ResultsDict) -> dict[str, Any]:
    """Returns what the report says first.

    Args:
        results: Content of results.json.

    Returns:
        `sentences` (what to do, and why), `facts` (names and values of the numbers of the pick; empty without one), `code`
        (lines that train in this way; None if there are none) and `chart` (metric and cost, as SVG).
    """
    conclusion = conclude(results)
    facts: dict[str, str] = {}
    code = None
    if (pick := conclusion.pick) is not None:
        facts = _facts(pick, results)
        code = snippet(pick, _settings_of(pick, results), results["epochs"])
    return {
        "sentences": conclusion.sentences,
        "facts": facts,
        "code": code,
        "chart": chart(results),
    }


def _settings_of(row: Mapping[str, Any], results: ResultsDict) -> Mapping[str, Any]:
    """Returns the settings of the runs of a row."""
    # The label of a control has its cost: in the row the one that was counted, in a run the one that was wanted.
    name = kind_of(row) or row["method"]
    return next(
        run["settings"]
        for run in results["runs"]
        if run["control_of"] == row["control_of"] and name == (kind_of(run) or run["method"])
    )


def _facts(row: Mapping[str, Any], results: ResultsDict) -> dict[str, str]:
    metric = results["runs"][0]["metric"]["name"]
    full = next(row for row in results["summary"] if row["method"] == "full")
    show, signed = forms(results)
    unit = " %" if is_share(results["runs"]) else ""
    facts = {
        metric: f"{show(row['mean'])}{unit}, full training {show(full['mean'])}{unit}",
        "difference": difference_text(row, signed),
        "cost as counted": f"{row['cost_ratio']:.3f} of full training",
        "CPU time saved": _saved(row.get("cpu_ratio")),
        "memory of a step saved": _saved(row.get("memory_ratio")),
    }
    if row.get("rate", 1.0) != 1:
        facts["learning rate"] = f"{row['rate']:g} times that of the training"
    for kind, control in row.get("against", {}).items():
        facts[f"against {CONTROLS[kind].words}"] = difference_text(control, signed)
    return facts


def _saved(ratio: float | None) -> str:
    return "unknown" if ratio is None else f"{100 * (1 - ratio):.0f} %"


def chart(results: ResultsDict) -> str:
    """Returns a forest chart as SVG: the difference of every method and control to full training, with its 95 % interval.

    Full training is a band, which reaches down by the margin. A ring marks the pick if it is shown to be better than fewer epochs
    in the same time. Empty where nothing was compared with full training.

    Args:
        results: Content of results.json.
    """
    rows = [
        row
        for row in results["summary"]
        if row["method"] != "full" and row.get("difference") is not None
    ]
    if not rows:
        return ""
    scale = 100.0 if is_share(results["runs"]) else 1.0
    margin = results.get("margin") or 0.0
    low, high = _ends(rows, scale, margin)
    height = TOP + ROW * len(rows) + BELOW

    def at(value: float) -> float:
        return LEFT + (min(max(value, low), high) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    bottom = TOP + ROW * len(rows)
    parts = [
        f'<rect x="{at(-margin):.1f}" y="{TOP}" width="{at(0) - at(-margin):.1f}" height="{bottom - TOP}" class="margin"/>'
    ]
    for value in _ticks(low, high):
        parts.append(f'<path d="M{at(value):.1f} {TOP}V{bottom}" class="grid"/>')
        parts.append(
            f'<text x="{at(value):.1f}" y="{bottom + 14}" class="axis mid">{f"{value:+g}" if value else 0}</text>'
        )
    parts.append(f'<path d="M{at(0):.1f} {TOP}V{bottom}" class="full"/>')
    # Where the line is near an end, the words stand on its other side.
    side = "" if at(0) < 80 else "mid"
    if at(0) > WIDTH - 80:
        side = "end"
    parts.append(f'<text x="{at(0):.1f}" y="{TOP - 5}" class="axis {side}">full training</text>')
    pick = conclude(results).pick
    for number, row in enumerate(rows):
        in_time = row.get("against", {}).get(SAME_TIME, {})
        picked = row is pick and in_time.get("finding") == "better"
        parts += _forest_row(
            row, results, TOP + ROW * number, scale, (low, high), at, picked=picked
        )
    name = escape(results["runs"][0]["metric"]["name"])
    unit = " points" if scale == 100 else ""
    valid = "; bars are valid at every look" if interval_sentences(results) else ""
    legend = (
        f"{name}, difference from full training in{unit or ' its own unit'}; bars are 95 % intervals",
        f"band: at most {margin:g}{unit} below full training{valid}" if margin else "",
    )
    for number, line in enumerate(filter(None, legend)):
        parts.append(
            f'<text x="{WIDTH / 2}" y="{bottom + 30 + 15 * number}" class="axis mid">{line}</text>'
        )
    return f'<svg viewBox="0 0 {WIDTH} {height}" aria-hidden="true" focusable="false">{"".join(parts)}</svg>'


def _ends(rows: Sequence[Mapping[str, Any]], scale: float, margin: float) -> tuple[float, float]:
    """Returns the ends of the axis: all differences are inside, and intervals that are not far longer."""
    largest = WIDEST * max(margin, *(abs(scale * row["difference"]) for row in rows)) or 1.0
    ends = [scale * end for row in rows for end in (row["difference"], *(row["ci95"] or ()))]
    low = max(min(*ends, -margin, 0.0), -largest)
    high = min(max(*ends, 0.0), largest)
    space = 0.04 * (high - low) or 0.5
    return low - space, high + space


def _forest_row(
    row: Mapping[str, Any],
    results: ResultsDict,
    top: float,
    scale: float,
    ends: tuple[float, float],
    at: Callable[[float], float],
    *,
    picked: bool,
) -> list[str]:
    """Returns the parts of a row: its name, difference and time, its point, and its interval."""
    control = kind_of(row)
    color = "var(--quiet)" if control is not None else looks(results)[row["method"]].color
    color = "currentColor" if color == INK else color
    label = row["method"] if control is None else f"{CONTROLS[control].words}"
    shown = label if len(label) <= LONGEST_LABEL else f"{label[: LONGEST_LABEL - 1]}…"
    ratio, time = time_of(row, results)
    if ratio is None:
        cost = f"cost {row['cost_ratio']:.2f}"
    else:
        cost = f"{ratio:.2f} of the {time}"
    amount = f"{scale * row['difference']:{'+.2f' if scale == 100 else '+.3g'}}"
    x = at(scale * row["difference"])
    y = top + 27
    parts = [
        f'<text x="{LEFT if control is None else LEFT + 10}" y="{top + 13}" class="{"name" if control is None else "axis"}">'
        f"{escape(shown)}{' · our pick' * picked}<title>{escape(row['method'])}</title></text>",
        f'<text x="{WIDTH - RIGHT}" y="{top + 13}" class="axis end">{amount}, {cost}</text>',
    ]
    if row["ci95"] is not None:
        bounds = [scale * end for end in row["ci95"]]
        left, right = map(at, bounds)
        size = 4 if control is None else 3
        parts.append(
            f'<path d="M{left:.1f} {y}H{right:.1f}" stroke="{color}" stroke-width="2" fill="none"/>'
        )
        for end, bound, way in ((left, bounds[0], 1), (right, bounds[1], -1)):
            inside = end + way * size
            is_beyond = not ends[0] <= bound <= ends[1]
            arrow = f"M{inside:.1f} {y - size}L{end:.1f} {y}L{inside:.1f} {y + size}"
            tip = arrow if is_beyond else f"M{end:.1f} {y - size}V{y + size}"
            parts.append(
                f'<path d="{tip}" stroke="{color}" stroke-width="2" fill="none"><title>{bound:+.3g}</title></path>'
            )
    radius = 5 if control is None else 3.5
    parts.append(f'<circle cx="{x:.1f}" cy="{y}" r="{radius}" fill="{color}"/>')
    if picked:
        parts.append(
            f'<path d="M{x - 9:.1f} {y}a9 9 0 1 0 18 0a9 9 0 1 0 -18 0" class="pick"><title>our pick</title></path>'
        )
    return parts


def _ticks(low: float, high: float) -> list[float]:
    """Returns round numbers between two limits, about `TICKS` of them."""
    rough = (high - low) / TICKS
    size = 10.0 ** np.floor(np.log10(rough))
    step = min((one * size for one in (1, 2, 5, 10)), key=lambda one: abs(one - rough))
    return [
        round(float(number * step), 10)
        for number in range(int(np.ceil(low / step)), int(np.floor(high / step)) + 1)
    ]
