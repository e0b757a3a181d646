"""`thresher time-to-target`: measures how soon methods reach an error, by counted cost and by CPU time."""

from pathlib import Path
from typing import Annotated

import typer

from thresher_lab.cli._console import (
    CpusOption,
    DataOption,
    EpochsOption,
    GpusOption,
    JobsOption,
    OptionalTaskOption,
    OutOption,
    QuietOption,
    RayOption,
    ScriptArgument,
    SeedsOption,
    training_of,
)

TIMED_METHODS = ",".join(
    f"selective_backprop:beta={settings}"
    for settings in (
        "1:forward_passes=once",
        "2:forward_passes=once",
        "1:forward_passes=twice",
        "1:forward_passes=twice:score_every=3",
    )
)
"""Selective-Backprop as in its paper: two strengths of selection, one or two forward passes, and with stale losses."""

MEASURED = "time-to-target.json"
FIGURE = "time-to-target.html"
TIMED_METHODS_HELP = (
    "Methods in the same form as in `thresher compare`. Default: Selective-Backprop with one forward pass, with two, and with "
    "stale losses."
)


def time_to_target(
    *,
    script: ScriptArgument = None,
    task: OptionalTaskOption = None,
    epochs: EpochsOption,
    out: OutOption,
    methods: Annotated[
        str, typer.Option(help=TIMED_METHODS_HELP, show_default=False)
    ] = TIMED_METHODS,
    seeds: SeedsOption = "0,1,2",
    data: DataOption = None,
    jobs: JobsOption = 2,
    ray: RayOption = None,
    gpus_per_run: GpusOption = 0.0,
    cpus_per_run: CpusOption = 1,
    results: Annotated[
        Path | None,
        typer.Option(
            help=f"File to write the numbers to. Default: {MEASURED} in the --out folder."
        ),
    ] = None,
    figure: Annotated[
        Path | None,
        typer.Option(
            help=f"File to write the figure to: .html, .svg or .png. Default: {FIGURE} in the --out folder."
        ),
    ] = None,
    quiet: QuietOption = False,
) -> None:
    """Measure cost and CPU time until each method reaches 1.4, 1.2 and 1.1 times the final error of full training."""
    from thresher_lab.cli._comparison import cluster_of, run_with_progress
    from thresher_lab.cli._console import open_console, print_table, targets_table
    from thresher_lab.comparison.time_to_target import measure
    from thresher_lab.report.panels import check_figure_path, error_panels, write_panels
    from thresher_lab.training.store import write_json

    training = training_of(script, task)
    results = results or out / MEASURED
    figure = figure or out / FIGURE
    check_figure_path(figure)
    console = open_console()
    cluster = cluster_of(ray, gpus_per_run, cpus_per_run, here=False)
    options = {"data": data, "jobs": jobs, "controls": (), "cluster": cluster}
    compared = run_with_progress(
        console, training, methods, seeds, epochs, out, quiet=quiet, **options
    )
    measured = measure(compared)
    write_json(results, measured)
    write_panels(error_panels(measured), figure)
    print_table(console, targets_table(measured))
    typer.echo(
        "Cost and CPU time are shares of what full training took to reach the same error, medians over the seeds.\n"
        f"\n{results}\n{figure}"
    )
