"""`thresher prune`: writes the ids of the samples that pruning by a score keeps."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer

from thresher_lab.cli._console import ForceOption, check_new

KEPT = {
    "hard": "the hardest by {}, wrong labels among them",
    "easy": "the easiest by {}",
    "window": "a window of the hardest by {}",
}
"""What each choice keeps, in words."""


def prune(
    *,
    scores: Annotated[
        Path | None,
        typer.Argument(
            metavar="[SCORES]",
            help="File from `thresher score`, or map.parquet of `thresher observe`. Give either this or --from-run.",
        ),
    ] = None,
    from_run: Annotated[
        Path | None,
        typer.Option(
            help="Run of a comparison, DIR/runs/NAME.parquet. The score of a sample is how often the run trained on it."
        ),
    ] = None,
    keep: Annotated[float, typer.Option(help="Share of the samples to keep.")] = 0.75,
    which: Annotated[
        str,
        typer.Option(
            help="Which samples to keep: hard, and wrong labels with them; easy; or window (the hardest without the --offset "
            "hardest)."
        ),
    ] = "hard",
    offset: Annotated[
        float,
        typer.Option(
            help="Share of the samples that are dropped as too hard, with --which window."
        ),
    ] = 0.0,
    per_class_floor: Annotated[
        float, typer.Option(help="Smallest share to keep of each class.")
    ] = 0.0,
    out: Annotated[
        Path, typer.Option(help="File to write the ids to: .parquet, or .txt with one id per line.")
    ] = Path("kept.parquet"),
    force: ForceOption = False,
) -> None:
    """Write the ids of a fixed subset of the samples, to train on with any tool."""
    from thresher import Prune
    from thresher import scores as static
    from thresher.selection import share
    from thresher_lab.comparison.histories import run_named
    from thresher_lab.comparison.observing import read_scores
    from thresher_lab.comparison.scoring import check_export, export, kept_of_classes

    check_export(out)
    check_new(out, force=force)
    if from_run is not None and scores is None:
        table = static.from_run(run_named(from_run))
    elif scores is not None and from_run is None:
        if not scores.is_file():
            raise ValueError(
                f"{scores}: no such file; `thresher score` or `thresher observe` writes one"
            )
        table = read_scores(scores) or static.Scores.load(scores)
    else:
        raise typer.BadParameter("give either a file of scores or --from-run")
    method = Prune(table, keep=keep, which=which, offset=offset, per_class_floor=per_class_floor)  # pyright: ignore[reportArgumentType]
    kept = method.kept(table.samples)
    export(kept, out)
    beyond = len(kept) - max(1, share(keep, table.samples))
    floor = f", {beyond:,} of them for --per-class-floor, beyond --keep" * (beyond > 0)
    typer.echo(
        f"{out}: {len(kept):,} of {table.samples:,} samples kept: {KEPT[which].format(table.name)}{floor}"
    )
    for line in _of_classes(kept_of_classes(table, kept), keep):
        typer.echo(line)


def _of_classes(shares: Mapping[str, float], keep: float) -> Iterator[str]:
    """Yields what is kept of the classes, and which of them nearly vanish."""
    if not shares:
        return
    least = min(shares, key=shares.__getitem__)
    most = max(shares, key=shares.__getitem__)
    yield f"share kept per class: from {shares[least]:.0%} ({least}) to {shares[most]:.0%} ({most})"
    if few := [f"{label} ({share:.0%})" for label, share in shares.items() if share < keep / 4]:
        yield (
            f"These classes nearly vanish: {', '.join(few)}. `--per-class-floor {keep / 2:g}` keeps {keep / 2:.0%} of each "
            "class at least."
        )
