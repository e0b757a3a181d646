"""Training what a table or figure needs, judging its claims, and the JSON that the page is made of."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from thresher.experiments.comparison.compare import Watcher, compare
from thresher.experiments.comparison.scoring import make_scores
from thresher.experiments.reproduction.artefact import FULL, Artefact, Part, overall, tables_of_parts
from thresher.experiments.training.specs import Spec, parse_methods

Results = dict[str, Any]


def reproduce(
    artefact: Artefact, work: Path, *, data: Path | None = None, jobs: int = 2, watcher: Watcher | None = None
) -> Results:
    """Train what is not trained yet, and judge.

    Runs are kept in `work`, those of one task and number of epochs together: tables and figures that need the same share them.

    Args:
        artefact: What to reproduce.
        work: Folder of the runs.
        data: A folder with the data, for tasks that take one.
        jobs: Processes side by side, one torch thread each.
        watcher: Told what happens.

    Returns:
        name, paper, shows, here, seeds, device, versions, verdict, claims (see `Claim.judge`), tables (title, header, rows) and
        parts (name, task, epochs, metric, backward_to_forward and summary, see `summary.summarise`).

    Raises:
        ValueError: See `comparison.compare`.
        FileNotFoundError: Likewise.
        RunError: Likewise.
    """
    results = {part.name: _compared(artefact, part, work, data=data, jobs=jobs, watcher=watcher) for part in artefact.parts}
    measured = {name: _by_row(found) for name, found in results.items()}
    claims = [claim.judge(measured, artefact.seeds) for claim in artefact.claims]
    make = artefact.tables
    tables = tables_of_parts(artefact, results) if make is None else make(measured, results)
    some = next(iter(results.values()))
    kept = ("name", "task", "epochs", "metric", "backward_to_forward", "summary")
    return {
        **{name: getattr(artefact, name) for name in ("name", "paper", "shows", "here")},
        "seeds": list(artefact.seeds),
        "device": some["device"],
        "versions": some["versions"],
        "verdict": overall([claim["verdict"] for claim in claims]),
        "claims": claims,
        "tables": [asdict(table) for table in tables],
        "parts": [{name: found[name] for name in kept} for found in results.values()],
    }


def _compared(artefact: Artefact, part: Part, work: Path, **options: Any) -> Results:
    """Results of a part with `labels`: the label of the method of each row. Runs say where samples and scores are."""
    folder = work / f"{part.task}-{part.epochs}"
    scores = _scores(part, work, options["data"])
    specs = specs_of(part, scores)
    found = compare(part.task, list(specs.values()), artefact.seeds, part.epochs, folder, controls=part.controls, **options)
    labels = {FULL: FULL, **{row: spec.label for row, spec in specs.items()}}
    first = found["runs"][0]
    ratio, name = first["cost"]["backward_to_forward"], first["metric"]["name"]
    for run in found["runs"]:
        run |= {"scores": None if scores is None else str(scores)}
        if "samples" in run:
            run["samples"] = str(folder / run["samples"])
    return {**found, "name": part.name, "labels": labels, "metric": name, "backward_to_forward": ratio}


def specs_of(part: Part, scores: Path | None) -> dict[str, Spec]:
    """The methods of the rows; `scores` is the file that `{scores}` stands for."""
    return {row: parse_methods(text.replace("{scores}", str(scores)))[0] for row, text in part.rows.items()}


def _scores(part: Part, work: Path, data: Path | None) -> Path | None:
    """A part's file of scores, made where it is not there."""
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
