"""`thresher train`: a recipe, at full size or as a smoke test."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

RECIPE = "One of `thresher recipes`, or a FILE.yaml of your own."
DATA = "Folder with the recipe's data. `thresher recipes NAME` says which."


def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE|FILE.yaml", help=RECIPE)],
    data: Annotated[Path | None, typer.Option(help=DATA)] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="Try it out: reduced sizes, on data that is made up.")] = False,
    method: Annotated[str | None, typer.Option(help="As of compare, one. Default: the recipe's.", show_default=False)] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Fewer or more than the recipe's; its schedules go faster or slower.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, order and draws.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder of results.json and model.pt. Default: runs/RECIPE.")] = None,
    weights: Annotated[Path | None, typer.Option(help="Weights to start from: model.pt of the recipe that it names.")] = None,
    loaders: Annotated[
        int | None, typer.Option(min=0, help="Processes that load data. Default: one a core; none with --smoke.")
    ] = None,
) -> None:
    """Train one of the papers' experiments; ACCELERATE_MIXED_PRECISION=bf16 or `accelerate config` set the precision.

    After an interruption the same command goes on after the last whole epoch.
    """
    out = out or Path("runs") / (Path(recipe).stem + "-smoke" * smoke)
    many = 0 if smoke else (os.cpu_count() or 1)
    results = trained(
        recipe, out, data=data, smoke=smoke, method=method, epochs=epochs, seed=seed, weights=weights,
        loaders=many if loaders is None else loaders,
    )  # fmt: skip
    metric, cost = results["runs"][0]["metric"], results["runs"][0]["cost"]["ratio"]
    typer.echo(f"\n{metric['name']} {metric['value']:.4f} at {cost:.3f} of the cost of full training")
    for one in () if smoke else results["published"]:
        typer.echo(f"published: {one['what']} {one['value']} ({one['where']})")
    typer.echo(out / "results.json")


def trained(
    recipe: str,
    out: Path,
    *,
    data: Path | None = None,
    smoke: bool = False,
    method: str | None = None,
    epochs: int | None = None,
    seed: int = 0,
    weights: Path | None = None,
    loaders: int = 0,
) -> dict[str, Any]:
    """What the command does; see `experiments.recipes.running.run`."""
    from thresher.experiments.recipes.running import CHECKPOINT, run
    from thresher.experiments.recipes.smoke import SmokeTask
    from thresher.experiments.recipes.task import RecipeTask

    options = {"weights": weights, "loaders": loaders} | ({} if epochs is None else {"shortened": epochs})
    task = SmokeTask.at(recipe, out / "made-up", **options) if smoke else RecipeTask.of(recipe, **options)
    spec = task.spec(method)
    typer.echo(f"{task.settings.title}: {spec.label}, {task.epochs} epochs", err=True)
    if (out / CHECKPOINT).is_file():
        typer.echo(f"goes on from {out / CHECKPOINT}", err=True)

    def say(done: int, metric: float) -> None:
        typer.echo(f"[{done}/{task.epochs}] {task.settings.metric} {metric:.4f}", err=True)

    return run(task, spec, out=out, data=data, seed=seed, progress=say)
