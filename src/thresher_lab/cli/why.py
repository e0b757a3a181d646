"""`thresher why`: shows the history of one sample in one run."""

from pathlib import Path
from typing import Annotated

import typer

from thresher_lab.cli._console import JsonOption


def why(
    run: Annotated[
        Path,
        typer.Argument(
            help="A run of a comparison: DIR/runs/NAME, or the beginning of NAME, such as kakurenbo-seed0."
        ),
    ],
    sample: Annotated[
        int,
        typer.Argument(
            metavar="ID", help="Id of the sample: its position in the dataset, from 0.", min=0
        ),
    ],
    json: JsonOption = None,
) -> None:
    """Show when a sample was trained on, when it was left out, and by which rule."""
    from rich.table import Table

    from thresher_lab.cli._console import open_console, print_table, write_result
    from thresher_lab.comparison.histories import history_of

    sample_history = history_of(run, sample)
    if json is not None:
        write_result(json, sample_history)
        return
    table = Table("epoch", "loss after it", "times trained", box=None, pad_edge=False)
    table.add_column("why not", min_width=20)
    said = ""
    for entry in sample_history["epochs"]:
        loss = "not seen yet" if entry["loss"] == float("-inf") else f"{entry['loss']:.4g}"
        rule = "as above" if entry["rule"] and entry["rule"] == said else entry["rule"]
        table.add_row(str(entry["epoch"]), loss, str(entry["trained"]), rule)
        said = entry["rule"] or said
    console = open_console()
    console.print(sample_history["title"], markup=False, highlight=False)
    print_table(console, table)
