"""`thresher observe`: trains once, and shows what the training knows of its samples."""

from pathlib import Path
from typing import Annotated

import typer

from thresher_lab.cli._console import (
    DataOption,
    DeviceOption,
    ForceOption,
    OptionalTaskOption,
    QuietOption,
    ScriptArgument,
    announcer,
    check_new,
    training_of,
    use_device,
)


def observe(
    *,
    script: ScriptArgument = None,
    task: OptionalTaskOption = None,
    epochs: Annotated[int, typer.Option(min=1, help="Number of epochs of the training.")] = 10,
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for map.html, the page, map.parquet, the table, and review.html, samples to check."
        ),
    ] = Path("observed"),
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the training.")] = 0,
    data: DataOption = None,
    device: DeviceOption = None,
    force: ForceOption = False,
    quiet: QuietOption = False,
) -> None:
    """Train once on everything, and write which samples are hard, forgotten, or likely to have a wrong label."""
    from thresher_lab.comparison.observing import observed, write_table
    from thresher_lab.report.observed import write_observed, write_review

    use_device(device)
    training_name = training_of(script, task)
    page = out / "map.html"
    table = out / "map.parquet"
    review = out / "review.html"
    for path in (page, table, review):
        check_new(path, force=force)
    says = announcer("observe", quiet=quiet)
    found, training = observed(
        training_name,
        epochs=epochs,
        seed=seed,
        data=data,
        progress=lambda done: says(f"epoch {done} of {epochs} is trained"),
    )
    out.mkdir(parents=True, exist_ok=True)
    write_table(found, training.classes, table)
    write_observed(
        page,
        found,
        task=training_name,
        epochs=epochs,
        seed=seed,
        parquet=table.name,
        classes=training.classes,
        show=training.show,
    )
    write_review(review, found, classes=training.classes, show=training.show)
    suspects = ", ".join(map(str, found.suspects(8)))
    typer.echo(
        f"{page} and {table}: {len(found['id']):,} samples; the likeliest wrong labels are of the samples {suspects}\n"
        f"To see how many labels are wrong, answer in {review}, save the answers, and run:\n"
        f"  thresher precision {table} answers.csv"
    )
