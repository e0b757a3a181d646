"""What was measured of a method: tables from the results of comparisons, of `thresher reproduce` and of benchmarks."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from thresher.experiments.comparison.rates import rates_sentences
from thresher.experiments.training.tables import markdown_table

REPRODUCED = "reproduce"
"""Folder of the results of `thresher reproduce`, within that of the comparisons."""
NOT_MEASURED = "Not measured yet."
LEGEND = (
    "Each row gives the mean ± standard deviation over the seeds, the difference to full training (paired by seed, "
    "with its 95 % interval), and the counted cost and the CPU time as shares of full training. Batches are filled up with the "
    "rows that are kept where a method is followed by `twice`. The rows with an @ are controls at the cost of the method above "
    "them: uniform@ (a random subset each epoch), shorter@ (full data for fewer epochs), smaller@ (as many steps, with smaller "
    "batches) and placebo@ (the method with its losses or scores permuted)."
)

Row = dict[str, Any]


@dataclass(frozen=True)
class MeasuredComparison:
    """A comparison of methods on one task.

    Args:
        source: Path of the file that it is from, as the page names it.
        task: Name of the task.
        epochs: Number of epochs of full training.
        seeds: Number of seeds.
        metric: Name of the metric.
        device: Name of the device.
        share: Whether the metric is a share, which is shown in percent.
        summary: Rows of the summary.
        looked: Learning rates that every arm was tried with, as in a results.json. Default: none.
    """

    source: str
    task: str
    epochs: int
    seeds: int
    metric: str
    device: str
    share: bool
    summary: Sequence[Row]
    looked: Mapping[str, Any] | None = None


def measurements(name: str, folder: Path) -> str:
    """Returns the results of a method in the files of a folder, beside full training and the method's controls.

    Args:
        name: Name of the method.
        folder: Folder with results.json files of comparisons under any name, with files that have `pairs`, a grid of tasks and
            shares as `benchmarks.winnow` writes it, or `families` as `benchmarks.league` does, and with the results of
            `thresher reproduce` in a subfolder.

    Returns:
        Sections in Markdown; one sentence where there are none.
    """
    sections, shown = [], set[tuple[Any, ...]]()
    for found in (*_compared(folder), *(() if name == "full" else _reproduced(folder))):
        rows = method_rows(name, found.summary)
        key = (found.task, found.epochs, found.seeds)
        if any(
            (*key, row["method"], row["control_of"]) not in shown for row in rows if name == "full" or row["method"] != "full"
        ):
            sections.append(_section(found, rows))
        shown |= {(*key, row["method"], row["control_of"]) for row in rows}
    sections = [LEGEND, *sections] if sections else []
    sections += [section for read in (_of_pairs, _of_grids, _of_leagues) for section in read(name, folder)]
    return "\n\n".join(sections) or NOT_MEASURED


def _read(folder: Path) -> Iterator[tuple[Path, Any]]:
    for path in sorted(folder.glob("*.json")):
        yield path, _content(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=64)
def _content(path: Path, _changed: int) -> Any:
    """Returns the content of a file, which the pages of all methods read, as it was at a time."""
    return json.loads(path.read_text(encoding="utf-8"))


def _compared(folder: Path) -> Iterator[MeasuredComparison]:
    """Yields the comparisons of `thresher compare`."""
    for path, found in _read(folder):
        if "summary" in found:
            runs = found["runs"]
            share = all(0 <= run["metric"]["value"] <= 1 for run in runs if run["method"] == "full")
            seeds, metric = len({run["seed"] for run in runs}), runs[0]["metric"]["name"]
            of = (path.name, found["task"], found["epochs"], seeds, metric, found["device"], share)
            yield MeasuredComparison(*of, found["summary"], found.get("rates"))


def _reproduced(folder: Path) -> Iterator[MeasuredComparison]:
    """Yields the parts of the tables and figures of `thresher reproduce`."""
    for path, found in _read(folder / REPRODUCED):
        for part in found["parts"]:
            share = all(0 <= row["mean"] <= 1 for row in part["summary"] if row["method"] == "full")
            source, metric = f"{REPRODUCED}/{path.name}", part["metric"]
            of = (source, part["task"], part["epochs"], len(found["seeds"]), metric, found["device"], share)
            yield MeasuredComparison(*of, part["summary"])


def method_rows(name: str, summary: Sequence[Row]) -> list[Row]:
    """Returns the rows of a method with any settings, each followed by its controls; full training comes first.

    Args:
        name: Name of the method.
        summary: Rows of the "summary" in a results.json.

    Example:
        >>> rows = [{"method": name, "control_of": None} for name in ("full", "uniform:keep=0.3", "infobatch")]
        >>> [row["method"] for row in method_rows("uniform", rows)]
        ['full', 'uniform:keep=0.3']
    """
    labels = {row["method"] for row in summary if row["control_of"] is None and _method_of(row["method"]) == name}
    rows = [row for row in summary if (row["control_of"] or row["method"]) in labels]
    full = [row for row in summary if row["method"] == "full" and "full" not in labels]
    return [*full, *rows] if rows else []


def _method_of(label: str) -> str:
    """Returns the method's name in a label such as `name:setting=value once`."""
    return re.split("[: ]", label)[0]


def _section(found: MeasuredComparison, rows: Sequence[Row]) -> str:
    seeds = f"{found.seeds} seed{'s' * (found.seeds > 1)}"
    header = ("", f"{found.metric}, %" if found.share else found.metric, "difference to full", "cost", "CPU time", "verdict")
    table = markdown_table(header, [result_cells(row, share=found.share) for row in rows])
    said = " ".join([f"From `{found.source}`.", *rates_sentences({"rates": found.looked, "summary": rows})])
    return f"### `{found.task}`, {found.epochs} epochs, {seeds}, {found.device}\n\n{said}\n\n{table}"


def result_cells(row: Row, *, share: bool) -> tuple[str, ...]:
    """Returns the cells of a row of a summary: name, metric, difference to full training, cost, CPU time and verdict.

    Args:
        row: Row of the "summary" in a results.json.
        share: Whether the metric is a share, which is shown in percent.
    """
    scale, digits = (100, 2) if share else (1, 4)
    spread = "" if row["std"] is None else f" ± {scale * row['std']:.{digits}f}"
    difference = "" if row["difference"] is None else f"{scale * row['difference']:+.{digits}f}"
    between = "" if row["ci95"] is None else " [{}, {}]".format(*(f"{scale * bound:+.{digits}f}" for bound in row["ci95"]))
    cpu = "" if row.get("cpu_ratio") is None else f"{row['cpu_ratio']:.2f}"
    name = f"`{row['method']}`" if row["control_of"] is None else row["method"]
    mean, cost = f"{scale * row['mean']:.{digits}f}{spread}", f"{row['cost_ratio']:.3f}"
    return name, mean, f"{difference}{between}", cost, cpu, row["verdict"]


def _of_pairs(name: str, folder: Path) -> Iterator[str]:
    """Yields the tables of methods that were compared in pairs, with as many optimizer steps."""
    for path, found in _read(folder):
        pairs = [pair for pair in found.get("pairs", ()) if name in (_method_of(pair["method"]), _method_of(pair["other"]))]
        if pairs:
            header = ("task", "method", "metric", "beside", "metric", "difference", "steps", "seeds")
            table = markdown_table(header, [_pair_cells(pair) for pair in pairs])
            yield f"### In pairs with as many optimizer steps\n\nFrom `{path.name}`; metrics in hundredths.\n\n{table}"


def _pair_cells(pair: Mapping[str, Any]) -> tuple[str, ...]:
    low, high = pair["ci95"]
    return (
        f"`{pair['task']}`",
        f"`{pair['method']}`",
        f"{pair['mean']:.2f}",
        f"`{pair['other']}`",
        f"{pair['other_mean']:.2f}",
        f"{pair['difference']:+.2f} [{low:+.2f}, {high:+.2f}]",
        str(pair["steps"]),
        str(pair["seeds"]),
    )


def _of_grids(name: str, folder: Path) -> Iterator[str]:
    """Yields the tables of methods at a share of the cost, each with the best learning rate of a grid that all arms look at."""
    for path, found in _read(folder):
        for share, at_share in found.get("shares", {}).items():
            held = [(task, arms) for task, arms in at_share["tasks"].items() if {"full", name} <= set(arms)]
            rows = [_grid_cells(task, arms["full"], arms[name]) for task, arms in held]
            if rows and name != "full":
                header = ("task", "metric, hundredths", "full", "difference to full", "to smaller batches", "cost", "seeds")
                title = f"### At a share of {share}, each arm with its own learning rate"
                yield f"{title}\n\nFrom `{path.name}`.\n\n{markdown_table(header, rows)}"


def _grid_cells(task: str, full: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[str, ...]:
    between = [
        "" if paired is None else f"{paired['mean']:+.2f} [{paired['low']:+.2f}, {paired['high']:+.2f}]"
        for paired in (own["to_full"], own["to_smaller"])
    ]
    return f"`{task}`", f"{own['metric']:.2f}", f"{full['metric']:.2f}", *between, f"{own['cost']:.3f}", str(own["n"])


def _of_leagues(name: str, folder: Path) -> Iterator[str]:
    """Yields the tables of methods that were compared one a family, each with the best learning rate of a grid."""
    for path, found in _read(folder):
        rows = [row for row in found.get("rows", ()) if "families" in found and row["method"] == name]
        if rows:
            full = {one["task"]: one["metric"] for one in found["controls"] if one["arm"] == "full"}
            columns = ("difference to full", "to smaller batches", "to its placebo")
            header = ("task", "metric, hundredths", "full", *columns, "cost", "seeds")
            table = markdown_table(header, [_league_cells(row, full[row["task"]]) for row in rows])
            title = f"### One method a family, `{found['settings'][name]}`"
            yield f"{title}\n\nFrom `{path.name}`; verdicts are corrected over all methods and tasks.\n\n{table}"


def _league_cells(row: Mapping[str, Any], full: float) -> tuple[str, ...]:
    against = [row["to_full"] | {"finding": row["finding"]}, *(row["against"].get(kind) for kind in ("smaller", "placebo"))]
    between = ["" if one is None else _with_finding(one) for one in against]
    return f"`{row['task']}`", f"{row['metric']:.2f}", f"{full:.2f}", *between, f"{row['cost']:.3f}", str(row["to_full"]["n"])


def _with_finding(one: Mapping[str, Any]) -> str:
    said = "cannot tell" if one["finding"] == "unclear" else one["finding"]
    return f"{one['mean']:+.2f} [{one['low']:+.2f}, {one['high']:+.2f}], {said}"
