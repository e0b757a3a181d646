"""`thresher score`: how hard each sample is, from models trained for a few epochs."""

from pathlib import Path
from typing import Annotated

import typer

from thresher.cli.compare import TASK, DataOption

SCORE = (
    "el2n, grand, grand_all, forgetting, prototypes, memorisation, entropy, mutual_information, variation_ratio or irreducible."
)


def score(
    *,
    script: Annotated[
        str | None, typer.Argument(metavar="[FILE.py:FUNCTION]", help="Your own training, see `thresher init`; or --task.")
    ] = None,
    task: Annotated[str | None, TASK] = None,
    score: Annotated[str, typer.Option(help=SCORE)] = "el2n",
    models: Annotated[int, typer.Option(min=1, help="Trained for it; of irreducible, pairs with half of the data each.")] = 3,
    epochs: Annotated[int, typer.Option(min=1, help="That each is trained for.")] = 2,
    out: Annotated[Path, typer.Option(help="The Parquet file to write.")] = Path("scores.parquet"),
    seed: Annotated[int, typer.Option(min=0, help="Of the first model; the others have those after it.")] = 0,
    data: DataOption = None,
    clusters: Annotated[int | None, typer.Option(min=1, help="Of prototypes. Default: as many as classes.")] = None,
) -> None:
    """Train models and score every training sample by them, for `thresher prune` and the method prune."""
    from thresher.experiments.comparison.scoring import in_epochs, make_scores

    trained_on = script or task
    if trained_on is None or (script and task):
        raise typer.BadParameter("give either --task or your own training as FILE.py:FUNCTION")
    if script and not (script.partition(":")[2] and script.partition(":")[0].endswith(".py")):
        raise typer.BadParameter(f"write your own training as FILE.py:FUNCTION, such as my_training.py:build; got {script}")
    table = make_scores(trained_on, score, models=models, epochs=epochs, seed=seed, data=data, clusters=clusters, progress=_say)
    table.save(out)
    cost = (
        f"took what {in_epochs(table):.2f} epochs of full training do ({table.forward:,} forward, {table.backward:,} backward)"
    )
    typer.echo(f"{out}: {table.name} of {len(table):,} samples; {cost}")


def _say(done: int, of: int) -> None:
    typer.echo(f"[{done}/{of}] trained", err=True)
