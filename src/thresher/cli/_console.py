"""The console, and the tables that several commands print. Nothing heavy is imported before it is needed."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PLAIN_WIDTH = 120
"""Width in columns where the output is not a terminal."""

CAPTION = """\
cost and CPU time are shares of full training
controls, at the cost of the method above them: uniform@ trains on a random subset each epoch, shorter@ for fewer epochs,
smaller@ with smaller batches, and placebo@ as the method does, with its losses or scores permuted among samples
"""
"""Text below the table of a comparison."""


def open_console() -> "Console":
    """Returns a console as wide as the terminal, or `PLAIN_WIDTH` columns wide where there is none."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, PLAIN_WIDTH)
    return console


def percent(share: float) -> str:
    """Returns a share as percent with two decimals."""
    return f"{100 * share:.2f} %"


def summary_table(results: dict[str, Any]) -> "Table":
    """Returns the table of the summary in results.json.

    Args:
        results: Content of results.json.
    """
    from rich import box
    from rich.table import Table

    metric = results["runs"][0]["metric"]["name"]
    seeds = len({run["seed"] for run in results["runs"]})
    title = f"{results['task']}, {results['epochs']} epochs, {seeds} seed{'s' if seeds > 1 else ''}, {results['device']}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    named = [(_name_cell(row), word) for row in results["summary"] for word in row["method"].split()]
    table.add_column("\nmethod", width=max(len(word) + len(cell) - len(cell.lstrip()) for cell, word in named))
    for heading in (f"{metric},\n%", "difference to full\n[95 % interval]", "\ncost", "CPU\ntime"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("\nverdict", min_width=12)
    for row in results["summary"]:
        table.add_row(
            _name_cell(row),
            _mean_cell(row),
            _difference_cell(row),
            f"{row['cost_ratio']:.3f}",
            f"{row['cpu_ratio']:.2f}",
            row["verdict"],
        )
    return table


def targets_table(measured: dict[str, Any]) -> "Table":
    """Returns the table of cost and CPU time to each target, as shares of what full training took to the same target.

    Args:
        measured: Result of `comparison.time_to_target.measure`.
    """
    from rich import box
    from rich.table import Table

    table = Table(title="cost and CPU time to reach an error of", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("\nmethod", overflow="fold")
    table.add_column("error at\nthe end", justify="right", no_wrap=True)
    for target in measured["targets"]:
        table.add_column(f"{percent(target['error'])} ({target['factor']:g}x)\ncost, CPU, seeds", justify="right", no_wrap=True)
    for arm in measured["arms"]:
        cells = [_target_cell(reached) for reached in arm["reached"]]
        table.add_row(arm["method"], percent(arm["error"]), *cells)
    return table


def _target_cell(reached: dict[str, Any]) -> str:
    seeds = f"{reached['seeds']}/{reached['of']}"
    if reached["cost_to_full"] is None:
        return f"not reached, {seeds}"
    return f"{reached['cost_to_full']:.2f}, {reached['cpu_to_full']:.2f}, {seeds}"


def _name_cell(row: dict[str, Any]) -> str:
    return f"  {row['method']}" if row["control_of"] else row["method"]


def _mean_cell(row: dict[str, Any]) -> str:
    spread = "" if row["std"] is None else f" ± {100 * row['std']:.2f}"
    return f"{100 * row['mean']:.2f}{spread}"


def _difference_cell(row: dict[str, Any]) -> str:
    if row["difference"] is None:
        return ""
    bounds = "" if row["ci95"] is None else " [{:+.2f}, {:+.2f}]".format(*(100 * bound for bound in row["ci95"]))
    return f"{100 * row['difference']:+.2f}{bounds}"
