"""`thresher train`: trains a recipe at full size, or tries it out in seconds."""

import os
from pathlib import Path
from typing import Annotated

import typer

from thresher_lab.cli._console import AccumulateOption, BatchSizeOption, QuietOption

RECIPE_HELP = "Name of a recipe, as listed by `thresher recipes`, or your own FILE.yaml."
DATA_HELP = "Folder with the data of the recipe; `thresher recipes NAME` says which data it needs."


def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE|FILE.yaml", help=RECIPE_HELP)],
    data: Annotated[Path | None, typer.Option(help=DATA_HELP)] = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Try it out: a small network and few samples, made up.")
    ] = False,
    method: Annotated[
        str | None,
        typer.Option(help="One method, as in `thresher compare`. Default: the recipe's."),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Number of epochs; the schedules are stretched to it.")
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            min=0, help="Random seed for weight initialization, sample order and selection."
        ),
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for results.json and model.pt. Default: runs/RECIPE."),
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="model.pt to start from, of the recipe that this one names.")
    ] = None,
    batch_size: BatchSizeOption = None,
    accumulate: AccumulateOption = None,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Processes that load data. Default: one per CPU core.")
    ] = None,
    quiet: QuietOption = False,
) -> None:
    """Train one of the papers' experiments. If training is interrupted, the same command continues after the last full epoch.

    ACCELERATE_MIXED_PRECISION=bf16 or `accelerate config` set the precision. Started by torchrun or accelerate launch
    (`torchrun --nproc-per-node 8 -m thresher train ...`), all processes train together with the batch size of the recipe, or
    that of --batch-size.
    """
    from thresher_lab.recipes.batches import rate_note
    from thresher_lab.recipes.running import CHECKPOINT, SmokeTask, run
    from thresher_lab.recipes.task import RecipeTask

    out = out or Path("runs") / (Path(recipe).stem + "-smoke" * smoke)
    if smoke:
        many = 0
    else:
        many = max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    options = {"weights": weights, "workers": many if workers is None else workers}
    options |= {} if epochs is None else {"shortened": epochs}
    if smoke:
        named = SmokeTask.at(recipe, out / "made-up", **options)
    else:
        named = RecipeTask.of(recipe, **options)
    task = named.batched(batch_size, accumulate)
    spec = task.spec(method)

    def report(text: str) -> None:
        if not quiet:
            typer.echo(text, err=True)

    if note := rate_note(named.settings, task.settings):
        typer.echo(note, err=True)  # also with --quiet: it is no progress
    report(f"{task.settings.title}: {spec.label}, {task.epochs} epochs")
    if (out / CHECKPOINT).is_file():
        report(f"continues from {out / CHECKPOINT}")

    def print_epoch(done: int, metric: float) -> None:
        report(f"[{done}/{task.epochs}] {task.settings.metric} {metric:.4f}")

    results = run(task, spec, out=out, data=data, seed=seed, progress=print_epoch)
    metric = results["runs"][0]["metric"]
    cost = results["runs"][0]["cost"]["ratio"]
    typer.echo(
        f"\n{metric['name']} {metric['value']:.4f} at {cost:.3f} of the cost of full training"
    )
    for one in () if smoke else results["published"]:
        typer.echo(f"published: {one['what']} {one['value']} ({one['where']})")
    typer.echo(out / "results.json")
