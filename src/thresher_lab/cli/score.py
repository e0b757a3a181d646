"""`thresher score`: computes how hard each sample is, from models trained for a few epochs."""

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

SCORE_HELP = (
    "Name of the score: el2n, grand, grand_all, forgetting, prototypes, memorisation, entropy, mutual_information, "
    "variation_ratio, irreducible, aum, dyn_unc, dual, tdds or d2. The last five and forgetting look at every epoch."
)
MODELS_HELP = "Number of models to train for the score. For irreducible: number of pairs, whose models train on half of the data."


def score(
    *,
    script: ScriptArgument = None,
    task: OptionalTaskOption = None,
    score: Annotated[str, typer.Option(help=SCORE_HELP)] = "el2n",
    models: Annotated[int, typer.Option(min=1, help=MODELS_HELP)] = 3,
    epochs: Annotated[
        int, typer.Option(min=1, help="Number of epochs that each model is trained for.")
    ] = 2,
    out: Annotated[Path, typer.Option(help="Parquet file to write the scores to.")] = Path(
        "scores.parquet"
    ),
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            help="Random seed of the first model. The other models take the seeds that follow it.",
        ),
    ] = 0,
    data: DataOption = None,
    device: DeviceOption = None,
    clusters: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of clusters of the score prototypes. Default: the number of classes.",
        ),
    ] = None,
    window: Annotated[
        int,
        typer.Option(
            min=2,
            help="Number of epochs of a window of the scores dyn_unc, dual and tdds, as published.",
        ),
    ] = 10,
    force: ForceOption = False,
    quiet: QuietOption = False,
) -> None:
    """Train models and score every training sample with them, for `thresher prune` and the method prune."""
    from thresher_lab.comparison.scoring import in_epochs, make_scores

    use_device(device)
    training = training_of(script, task)
    check_new(out, force=force)
    says = announcer("score", quiet=quiet)
    table = make_scores(
        training,
        score,
        models=models,
        epochs=epochs,
        seed=seed,
        data=data,
        clusters=clusters,
        window=window,
        progress=lambda model, of, epoch: says(
            f"model {model} of {of}: epoch {epoch} of {epochs} is trained"
        ),
    )
    table.save(out)
    cost = f"cost as much as {in_epochs(table):.2f} epochs of full training"
    typer.echo(
        f"{out}: {table.name} of {len(table):,} samples; {cost} ({table.forward:,} forward, {table.backward:,} backward)"
    )
