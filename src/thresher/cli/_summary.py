"""The result of a comparison on a terminal of any width: a table where it fits, else one block per method."""

from collections.abc import Callable, Iterator
from textwrap import wrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

LEAST_VERDICT = 30
"""Columns that a verdict needs beside the numbers; where there are fewer, it stands below them."""
GAPS = 2 * 6

CAPTION = """\
Cost, CPU time and the peak memory of a step are shares of full training; "?" is not known. Controls, at the cost of the \
method above them: uniform@ trains on a random subset each epoch, shorter@ for fewer epochs, smaller@ with smaller batches, \
and placebo@ as the method does, with its losses or scores permuted among samples. Intervals are for \
one comparison; verdicts are corrected for their number, and may be open although an interval excludes 0."""
"""Text below the result of a comparison."""

TWO_LINES = ("difference to full\n[95 % interval]", "\ncost", "CPU\ntime", "step\nmemory")
"""Headings of the table after that of the metric."""
NUMBERS = 15, 24, 7, 6, 6
"""Columns of the numbers in a block."""


def print_summary(console: "Console", results: dict[str, Any]) -> None:
    """Prints the verdicts of a comparison with their numbers, each in full, and what to do.

    Args:
        console: Console to print to, 60 columns wide or more.
        results: Content of results.json.
    """
    from thresher.experiments.comparison.closing import closing, time_beside_cost
    from thresher.experiments.comparison.rates import rates_sentences

    if _table_width(results) <= console.width:
        console.print(summary_table(results))
    else:
        for line in _blocks(results, console.width):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        console.print()
    for sentence in closing(results) + time_beside_cost(results) + rates_sentences(results):
        console.print(sentence, markup=False, highlight=False)
    console.print(f"\n{CAPTION}\n", markup=False, highlight=False)


def summary_table(results: dict[str, Any]) -> "Table":
    """Returns the table of the summary in results.json.

    Args:
        results: Content of results.json.
    """
    from rich import box
    from rich.table import Table

    table = Table(title=_title(results), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("\nmethod", width=_name_width(results))
    for heading in (f"{_metric(results)},\n%" if _whole(results) else f"\n{_metric(results)}", *TWO_LINES):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("\nverdict", min_width=LEAST_VERDICT)
    for row in results["summary"]:
        table.add_row(_name_cell(row), *_numbers(row, results), row["verdict"])
    return table


def _table_width(results: dict[str, Any]) -> int:
    cells = [_numbers(row, results) for row in results["summary"]]
    headings = [len(_metric(results)) + 1, 18, 5, 4, 6]
    widths = [max(wide, *(len(row[place]) for row in cells)) for place, wide in enumerate(headings)]
    return _name_width(results) + sum(widths) + LEAST_VERDICT + GAPS


def _blocks(results: dict[str, Any], width: int) -> Iterator[str]:
    """Yields lines: for each method its name, its numbers below each other, and its verdict, wrapped."""
    yield from wrap(_title(results), width)
    unit = ", %" if _whole(results) else ""
    yield from wrap(f"{_metric(results)}{unit}; difference to full [95 % interval]; cost; CPU time; memory of a step", width)
    for row in results["summary"]:
        yield ""
        indent = "  " if row["control_of"] else ""
        yield from wrap(row["method"], width, initial_indent=indent, subsequent_indent=indent + "    ")
        cells = zip(_numbers(row, results), NUMBERS, strict=True)
        yield (indent + "".join(cell.rjust(wide) for cell, wide in cells)).rstrip()
        yield from wrap(row["verdict"], width, initial_indent=indent + "    ", subsequent_indent=indent + "    ")


def _title(results: dict[str, Any]) -> str:
    seeds = len({run["seed"] for run in results["runs"]})
    return f"{results['task']}, {results['epochs']} epochs, {seeds} seed{'s' if seeds > 1 else ''}, {results['device']}"


def _metric(results: dict[str, Any]) -> str:
    return results["runs"][0]["metric"]["name"]


def _whole(results: dict[str, Any]) -> bool:
    from thresher.experiments.comparison.summary import is_share

    return is_share(results["runs"])


def _name_width(results: dict[str, Any]) -> int:
    named = [(_name_cell(row), word) for row in results["summary"] for word in row["method"].split()]
    return max(len(word) + len(cell) - len(cell.lstrip()) for cell, word in named)


def _name_cell(row: dict[str, Any]) -> str:
    return f"  {row['method']}" if row["control_of"] else row["method"]


def _numbers(row: dict[str, Any], results: dict[str, Any]) -> tuple[str, ...]:
    show, signed = _forms(_whole(results))
    spread = "" if row["std"] is None else f" ± {show(row['std'])}"
    bounds = "" if row["ci95"] is None else " [{}, {}]".format(*map(signed, row["ci95"]))
    difference = "" if row["difference"] is None else f"{signed(row['difference'])}{bounds}"
    memory = "?" if row.get("memory_ratio") is None else f"{row['memory_ratio']:.2f}"
    return f"{show(row['mean'])}{spread}", difference, f"{row['cost_ratio']:.3f}", f"{row['cpu_ratio']:.2f}", memory


def _forms(whole: bool) -> tuple[Callable[[float], str], Callable[[float], str]]:
    """Returns how values and differences are written: in percent and points where the metric is a share."""
    if whole:
        return (lambda value: f"{100 * value:.2f}"), (lambda value: f"{100 * value:+.2f}")
    return (lambda value: f"{value:.4g}"), (lambda value: f"{value:+.3g}")
