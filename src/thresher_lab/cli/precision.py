"""`thresher precision`: estimates how many labels are wrong from a person's answers."""

from pathlib import Path
from typing import Annotated

import typer


def precision(
    *,
    table: Annotated[
        Path, typer.Argument(help="map.parquet of `thresher observe`, or a file of `to_parquet`.")
    ],
    answers: Annotated[Path, typer.Argument(help="File that the page review.html saves.")],
) -> None:
    """Estimate how many labels are wrong, from answers about samples of review.html, which `thresher observe` writes."""
    from thresher_lab.comparison.observing import read_table

    for path in (table, answers):
        if not path.is_file():
            raise ValueError(f"{path}: no such file")
    found = read_table(table)
    if found is None:
        raise ValueError(f"{table} is no table of `thresher observe`: it has no column suspicion")
    typer.echo(repr(found.precision(answers)))
