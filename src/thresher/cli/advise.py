"""`thresher advise`: what selection could save on a training, from a probe of a minute or two."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thresher.cli.compare import PLAIN_WIDTH, DataOption, console_of

if TYPE_CHECKING:
    from rich.table import Table

METHODS = (
    "kakurenbo,infobatch,uniform:keep=0.7,selective_backprop:keep=0.33:forward_passes=once,"
    "selective_backprop:keep=0.33:forward_passes=twice,random_backprop:keep=0.33"
)
"""Every method once, and what selects in the batch by its losses with one forward pass and with two."""

TRAINING = "A task, as of compare --task, or your own training as FILE.py:FUNCTION, see `thresher init`."


def advise(
    training: Annotated[str, typer.Argument(metavar="TASK|FILE.py:FUNCTION", help=TRAINING)],
    methods: Annotated[
        str, typer.Option(help="As of compare. Default: every method, at common settings.", show_default=False)
    ] = METHODS,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of the training that you mean to do.")] = 20,
    seconds: Annotated[float, typer.Option(help="Of the probe's training at most: three epochs, or so long.")] = 60.0,
    json: Annotated[Path | None, typer.Option(help="Where all figures go, as JSON.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Of torch; compare trains with one.")] = 1,
    data: DataOption = None,
) -> None:
    """Try a training out for a short while, and say what share of its time each method could save."""
    from thresher.experiments.advise.advise import advise
    from thresher.experiments.training.specs import parse_methods
    from thresher.experiments.training.store import write_json

    specs = [spec for spec in parse_methods(methods) if spec.name != "full"]
    advice = advise(training, specs, epochs=epochs, data=data, seconds=seconds, threads=threads)
    console = console_of(PLAIN_WIDTH)
    console.print(table_of(advice))
    for sentence in advice["sentences"]:
        console.print(sentence, markup=False, highlight=False)
    if json is not None:
        write_json(json, advice)
        typer.echo(f"\n{json}")


def table_of(advice: dict[str, Any]) -> "Table":
    """What each method saves, in percent of the time of full training."""
    from rich import box
    from rich.table import Table

    title = f"{advice['task']}, {advice['epochs']} epochs, {advice['device']}: time saved, % of full training"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("\nmethod", overflow="fold")
    for heading in ("samples\nleft out", "by the\nlosses", "were all\nlearnt"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in advice["methods"]:
        if row["refused"] is not None:
            table.add_row(row["method"], "", "", "not possible")
        else:
            table.add_row(row["method"], *(_percent(row[name]) for name in ("left_out", "saves", "at_most")))
    return table


def _percent(share: float | None) -> str:
    return "" if share is None else f"{round(100 * share)}"
