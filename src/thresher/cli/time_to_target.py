"""`thresher time-to-target`: how soon methods reach an error, by counted cost and by CPU time."""

from pathlib import Path
from typing import Annotated

import typer

from thresher.cli.compare import (
    PLAIN_WIDTH,
    DataOption,
    EpochsOption,
    JobsOption,
    OutOption,
    SeedsOption,
    TaskOption,
    console_of,
    trained,
)

METHODS = ",".join(
    f"selective_backprop:beta={settings}"
    for settings in (
        "1:forward_passes=once",
        "2:forward_passes=once",
        "1:forward_passes=twice",
        "1:forward_passes=twice:score_every=3",
    )
)
"""Selective-Backprop as its paper runs it: two strengths of selection, paid once or twice, and with stale losses."""

MEASURED = "time-to-target.json"
FIGURE = "time-to-target.html"


def time_to_target(
    task: TaskOption,
    epochs: EpochsOption,
    out: OutOption,
    methods: Annotated[
        str, typer.Option(help="As of compare. Default: Selective-Backprop once, twice and stale.", show_default=False)
    ] = METHODS,
    seeds: SeedsOption = "0,1,2",
    data: DataOption = None,
    jobs: JobsOption = 2,
    results: Annotated[Path | None, typer.Option(help=f"Where the figures go. Default: {MEASURED} in the folder.")] = None,
    figure: Annotated[Path | None, typer.Option(help=f"Where the drawing goes. Default: {FIGURE} in the folder.")] = None,
) -> None:
    """Train every method and full training, and measure cost and CPU time until 1.4, 1.2 and 1.1 times the error of full."""
    from thresher.cli.display import targets_table
    from thresher.experiments.comparison.time_to_target import measure
    from thresher.experiments.training.store import write_json
    from thresher.report.panels import check_figure_path, draw, error_panels, write_figure

    results, figure = results or out / MEASURED, figure or out / FIGURE
    check_figure_path(figure)
    console = console_of(PLAIN_WIDTH)
    compared = trained(console, task, methods, seeds, epochs, out, data=data, jobs=jobs, controls=())
    measured = measure(compared)
    write_json(results, measured)
    write_figure(draw(error_panels(measured)), figure)
    console.print(targets_table(measured))
    typer.echo(f"cost, CPU: shares of what full training took to the same error, medians over the seeds\n\n{results}\n{figure}")
