"""Trains what a table or figure needs, and judges its claims."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from thresher import methods
from thresher.experiments.comparison.compare import Watcher, compare
from thresher.experiments.comparison.scoring import make_scores
from thresher.experiments.comparison.summary import RowDict, RunDict, kind_of
from thresher.experiments.reproduction.artefact import (
    FILLED_BATCHES,
    FULL_BATCHES,
    FULL_ROW,
    SMALLER_BATCHES,
    Artefact,
    ArtefactPart,
    overall,
    tables_of_parts,
)
from thresher.experiments.training.specs import Composition, Spec, parse_methods


def reproduce(
    artefact: Artefact, work: Path, *, data: Path | None = None, jobs: int = 2, watcher: Watcher | None = None
) -> dict[str, Any]:
    """Trains the runs that are not finished yet, and judges the claims.

    Runs are kept in `work`, those of one task and number of epochs together; tables and figures share runs that they both need.

    Args:
        artefact: The table or figure.
        work: Folder of the runs.
        data: Folder with the data, for tasks that take one.
        jobs: Number of processes that train side by side, with one torch thread each.
        watcher: Object whose functions are called as runs proceed.

    Returns:
        name, paper, shows, here, seeds, device, versions, verdict, claims (see `Claim.judge`), tables (title, header, rows),
        pictures (title, png) and parts (name, task, epochs, metric, backward_to_forward and summary, see `summary.summarise`).

    Raises:
        ValueError: An argument is not possible, see `compare`.
        FileNotFoundError: The data is missing.
        RunError: A run failed.
    """
    results = {part.name: _compared(artefact, part, work, data=data, jobs=jobs, watcher=watcher) for part in artefact.parts}
    measured = {name: _by_row(found) for name, found in results.items()}
    claims = [claim.judge(measured, artefact.seeds) for claim in artefact.claims]
    make = artefact.tables
    tables = tables_of_parts(artefact, results) if make is None else make(measured, results)
    first = next(iter(results.values()))
    names = ("name", "task", "epochs", "metric", "backward_to_forward", "summary")
    return {
        **{name: getattr(artefact, name) for name in ("name", "paper", "shows", "here")},
        "seeds": list(artefact.seeds),
        "device": first["device"],
        "versions": first["versions"],
        "verdict": overall([claim["verdict"] for claim in claims]),
        "claims": claims,
        "tables": [asdict(table) for table in tables],
        "pictures": [asdict(picture) for picture in (artefact.pictures(measured) if artefact.pictures else ())],
        "parts": [{name: found[name] for name in names} for found in results.values()],
    }


def _compared(artefact: Artefact, part: ArtefactPart, work: Path, **options: Any) -> dict[str, Any]:
    """Returns the results of a part; `labels` has the label of each row's method, and runs name the files of their scores."""
    folder = work / f"{part.task}-{part.epochs}"
    sets = _scores_files(part, work, options["data"], len(artefact.seeds))
    specs = specs_of(part, sets[0] if sets else None)
    found = compare(part.task, list(specs.values()), artefact.seeds, part.epochs, folder, controls=part.controls, **options)
    labels = {FULL_ROW: FULL_ROW, **{row: spec.label for row, spec in specs.items()}}
    batches = {FULL_ROW: FULL_BATCHES, **{spec.label: batches_of(spec) for spec in specs.values()}}
    first = found["runs"][0]
    ratio, name = first["cost"]["backward_to_forward"], first["metric"]["name"]
    for run in found["runs"]:
        at = artefact.seeds.index(run["seed"]) if part.score_sets else 0
        run |= {"scores": str(sets[at]) if sets else None}
        if "samples" in run:
            run["samples"] = str(folder / run["samples"])
    found["summary"] = with_steps(found["summary"], found["runs"])
    return {**found, "name": part.name, "labels": labels, "batches": batches, "metric": name, "backward_to_forward": ratio}


def with_steps(summary: Sequence[RowDict], runs: Sequence[RunDict]) -> list[RowDict]:
    """Returns the rows of a summary with the mean number of optimizer steps of the runs of each, as `steps`."""
    counts: dict[tuple[str | None, str], list[int]] = {}
    for run in runs:
        counts.setdefault((run["control_of"], kind_of(run) or run["method"]), []).append(run["cost"]["steps"])
    return [row | {"steps": fmean(counts[row["control_of"], kind_of(row) or row["method"]])} for row in summary]


def batches_of(spec: Spec) -> str:
    """Returns the kind of the training batches of a method: full, filled up, or as selected."""
    parts = spec.parts if isinstance(spec, Composition) else (spec,)
    in_batch = [part for part in parts if methods.load(part.name).stage == "batch"]
    if not in_batch:
        return FULL_BATCHES
    return FILLED_BATCHES if in_batch[0].batch.get("forward_passes") == "twice" else SMALLER_BATCHES


def specs_of(part: ArtefactPart, scores: Path | None) -> dict[str, Spec]:
    """Returns the methods of the rows, with the path of the scores in place of `{scores}`."""
    return {row: parse_methods(text.replace("{scores}", str(scores)))[0] for row, text in part.rows.items()}


def _scores_files(part: ArtefactPart, work: Path, data: Path | None, seeds: int) -> list[Path]:
    """Returns the files of a part's scores, which are made where they do not exist; [] where the part needs none."""
    if part.scores is None:
        return []
    name, models, epochs = part.scores
    stem = f"{part.task}-{name}-{models}x{epochs}"
    paths = [work / "scores" / f"{stem}{f'-{number}' if number else ''}.parquet" for number in range(seeds)]
    paths = paths if part.score_sets else paths[:1]
    for number, path in enumerate(paths):
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            make_scores(part.task, name, models=models, epochs=epochs, seed=number * models, data=data).save(path)
    return paths


def _by_row(results: Mapping[str, Any]) -> dict[str, dict[int, Any]]:
    runs = [run for run in results["runs"] if run["control_of"] is None]
    return {row: {run["seed"]: run for run in runs if run["method"] == label} for row, label in results["labels"].items()}
