"""Trains what a table or figure needs, and judges its claims."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from thresher.experiments.comparison.compare import Watcher, compare
from thresher.experiments.comparison.scoring import make_scores
from thresher.experiments.reproduction.artefact import FULL_ROW, Artefact, ArtefactPart, overall, tables_of_parts
from thresher.experiments.training.specs import Spec, parse_methods


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
        name, paper, shows, here, seeds, device, versions, verdict, claims (see `Claim.judge`), tables (title, header, rows) and
        parts (name, task, epochs, metric, backward_to_forward and summary, see `summary.summarise`).

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
        "parts": [{name: found[name] for name in names} for found in results.values()],
    }


def _compared(artefact: Artefact, part: ArtefactPart, work: Path, **options: Any) -> dict[str, Any]:
    """Returns the results of a part; `labels` has the label of each row's method, and runs name the files of their scores."""
    folder = work / f"{part.task}-{part.epochs}"
    scores = _scores_file(part, work, options["data"])
    specs = specs_of(part, scores)
    found = compare(part.task, list(specs.values()), artefact.seeds, part.epochs, folder, controls=part.controls, **options)
    labels = {FULL_ROW: FULL_ROW, **{row: spec.label for row, spec in specs.items()}}
    first = found["runs"][0]
    ratio, name = first["cost"]["backward_to_forward"], first["metric"]["name"]
    for run in found["runs"]:
        run |= {"scores": None if scores is None else str(scores)}
        if "samples" in run:
            run["samples"] = str(folder / run["samples"])
    return {**found, "name": part.name, "labels": labels, "metric": name, "backward_to_forward": ratio}


def specs_of(part: ArtefactPart, scores: Path | None) -> dict[str, Spec]:
    """Returns the methods of the rows, with the path of the scores in place of `{scores}`."""
    return {row: parse_methods(text.replace("{scores}", str(scores)))[0] for row, text in part.rows.items()}


def _scores_file(part: ArtefactPart, work: Path, data: Path | None) -> Path | None:
    """Returns the file of a part's scores, which is made where it does not exist; None where the part needs none."""
    if part.scores is None:
        return None
    name, models, epochs = part.scores
    path = work / "scores" / f"{part.task}-{name}-{models}x{epochs}.parquet"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        make_scores(part.task, name, models=models, epochs=epochs, data=data).save(path)
    return path


def _by_row(results: Mapping[str, Any]) -> dict[str, dict[int, Any]]:
    runs = [run for run in results["runs"] if run["control_of"] is None]
    return {row: {run["seed"]: run for run in runs if run["method"] == label} for row, label in results["labels"].items()}
