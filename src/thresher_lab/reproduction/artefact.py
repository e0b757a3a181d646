"""A table or figure of a paper at the scale of two CPU cores: what is trained, and how its claims are judged."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from pydantic import ConfigDict

from thresher import methods
from thresher_lab.comparison.compare import compare
from thresher_lab.comparison.controls import Control, kind_of
from thresher_lab.comparison.scoring import make_scores
from thresher_lab.comparison.statistics import NO_SPREAD, Paired
from thresher_lab.comparison.summary import RowDict, RunDict
from thresher_lab.training.processes import of_first, once_per_machine, own_rank
from thresher_lab.training.specs import Spec, parse_methods

RunsByRow = Mapping[str, Mapping[int, RunDict]]
"""Runs by the name of their row and by their seed; the row of full training is `FULL_ROW`."""
RunsByPart = Mapping[str, RunsByRow]
"""Runs by the name of the part that they belong to."""
SeedValue = Callable[[RunsByPart, int], float]
"""Function that returns a number of the runs with one seed."""
Verdict = Literal["reproduced", "not reproduced", "cannot tell", "not tested"]
CountedVerdict = Literal["holds by count", "fails by count"]
"""Verdict on a claim whose number is the same with every seed because it is counted; it decides no table or figure."""

VERDICTS: tuple[Verdict, ...] = ("not reproduced", "cannot tell", "reproduced", "not tested")
"""Verdicts from the worst; what cannot be tested hides nothing that can."""
FULL_ROW = "full"
POINTS = "points"
FAR = 0.05
"""Distance from the limit at which a claim is decided although all seeds give the same number."""
FIVE_SEEDS = (0, 1, 2, 3, 4)
LEAST_RATIO = 1.7
"""Least cost of a backward pass, in forward passes, at which a claim about time can fail: selection saves backward passes."""


STRICT = ConfigDict(extra="forbid")
"""For the TOML files of the papers: a key that no field has is an error."""


@dataclass(frozen=True)
class ArtefactPart:
    """Runs of one task that are compared with each other.

    Args:
        name: Name on the page and in claims.
        task: Name of the task, see `recipes.running.task_of`.
        epochs: Number of epochs of every run.
        rows: Method of each row, as on the command line, by the name of the row in the paper's words; full training is always a
            row, `full`. `{scores}` stands for a file of scores, see `scores`, and `{epoch}` for the share of an epoch in all.
        published: Numbers of the paper by row, as it prints them.
        scores: Arguments of `thresher score`, which is run before: name of the score, number of models, number of epochs.
        score_sets: Whether each seed has a set of scores, by models with seeds of their own, so that statements about scores
            have a spread; `{scores}` stands for those of the first seed. Default False: one set of scores.
        controls: Kinds of controls that are trained for every row, at its cost.
        batch: Factor on the batch of a recipe at full size, and with it on the learning rate. Default: 1.
    """

    __pydantic_config__ = STRICT

    name: str
    task: str
    epochs: int
    rows: Mapping[str, str]
    published: Mapping[str, str] = field(default_factory=dict)
    scores: tuple[str, int, int] | None = None
    score_sets: bool = False
    controls: tuple[Control, ...] = ()
    batch: int = 1


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper, as a number of each seed that should be above a limit.

    Args:
        text: Measured quantity, in one sentence; it begins with the name of a part and a colon if it is about one of several.
        value: Function that returns the number of one seed.
        above: Limit that the number should exceed. Default: 0.
        scale: Factor of the numbers on the page. Default: 100, for points; a part whose metric is a loss has 1.
        counted: Whether the number is made of counted passes and steps, so that it may be the same with every seed.
        says: Statement of the paper, in our words, with the place. Default "": a condition that our setup must meet before the
            claims mean anything. Claims with the same statement are a row of the paper's page.
        timed: Whether the number is made of CPU times: if it fails where a backward pass costs less than `LEAST_RATIO`, it is
            "not tested". Default False.
        note: Remark that stands with the verdict. Default: none.
        unit: Unit of the numbers on the page. Default: "points", in which a part whose metric is a loss is not measured.
    """

    __pydantic_config__ = STRICT

    text: str
    value: SeedValue
    above: float = 0.0
    scale: float = 100.0
    counted: bool = False
    says: str = ""
    timed: bool = False
    note: str = ""
    unit: str = POINTS

    def part_of(self, parts: Collection[str]) -> str:
        """Returns the name of the part that the claim is about, of those of its table; "" for all of several together."""
        name = self.text.partition(": ")[0]
        if name in parts:
            return name
        return next(iter(parts)) if len(parts) == 1 else ""

    def judge(self, measured: RunsByPart, seeds: Sequence[int]) -> dict[str, Any]:
        """Judges the claim by the runs of some seeds.

        Returns:
            claim (its text), says, mean, ci95, above, scale, unit, note, seeds_needed and verdict; "cannot tell" where a
            value is not finite, and where all are the same and close to the limit: an interval without width is None. Counts are
            then judged as such.
        """
        values = [self.value(measured, seed) for seed in seeds]
        result: dict[str, Any] = {
            "claim": self.text,
            "says": self.says,
            "above": self.above,
            "scale": self.scale,
            "unit": self.unit,
            "note": self.note,
        }
        if not all(map(math.isfinite, values)):
            return {**result, "mean": None, "ci95": None, "verdict": "cannot tell"}
        paired = Paired.of(values)
        has_width = paired.spread is not None and paired.spread > NO_SPREAD
        verdict: Verdict | CountedVerdict = judged(paired, self.above)
        if self.counted and not has_width:
            verdict = "holds by count" if paired.mean > self.above else "fails by count"
        elif not has_width and len(values) >= 3 and abs(paired.mean - self.above) >= FAR:
            verdict = "reproduced" if paired.mean > self.above else "not reproduced"
        ends = [paired.low, paired.high] if has_width else None
        result |= {"mean": paired.mean, "ci95": ends, "verdict": verdict}
        if verdict == "cannot tell":
            result["seeds_needed"] = paired.seeds_for(abs(paired.mean - self.above))
        if self.timed:
            full = [
                next(iter(runs[FULL_ROW].values()))
                for part, runs in measured.items()
                if self.part_of(measured) in ("", part)
            ]
            ratio = min(run["cost"]["backward_to_forward"] for run in full)
            if ratio < LEAST_RATIO and verdict == "not reproduced":
                result["verdict"] = "not tested"
            passes = f"backward pass: {ratio:.2f} forward passes"
            result["note"] = f"{self.note}; {passes}" if self.note else passes
        return result


def judged(paired: Paired, above: float) -> Verdict:
    """Returns "reproduced" where the whole 95 % interval is above the limit, "not reproduced" where all of it is below.

    Fewer than three seeds, and an interval without width, cannot tell.
    """
    if not paired.decides or paired.low is None or paired.high is None:
        return "cannot tell"
    if paired.low > above:
        return "reproduced"
    return "not reproduced" if paired.high < above else "cannot tell"


@dataclass(frozen=True)
class PageTable:
    """A table of the page.

    Args:
        title: Text above the table.
        header: Names of the columns.
        rows: Cells of the rows, as they are printed.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class TableChart:
    """How the tables of an artefact are drawn: one picture with a panel per table.

    Args:
        kind: "lines": a line per column over the first column; "rows": a line per row over the numbers in the header; "bars": a
            group of bars per row, a bar per column; "points": a point per row at its cost, with the spread over the seeds.
        y: Title of the y axis.
        x: Title of the x axis. Default "": the name of the first column.
        columns: Names of the columns that are drawn. Default: all but the first.
        over: Names of the columns with the x of each of `columns`, for lines. Default: the first column for all.
        tables: Positions of the tables that are drawn. Default: all.
    """

    __pydantic_config__ = STRICT

    kind: Literal["lines", "rows", "bars", "points"]
    y: str
    x: str = ""
    columns: Sequence[str] = ()
    over: Sequence[str] = ()
    tables: Sequence[int] = ()


MakePictures = Callable[[RunsByPart], dict[str, str]]
"""Function that returns the pictures of an artefact from its runs: PNG files in base64, by the text above each."""
PartResults = Mapping[str, Any]
"""Results of `compare` by part."""
MakeTables = Callable[[RunsByPart, PartResults], Sequence[PageTable]]
"""Function that returns the tables of an artefact, from its runs and results."""


@dataclass(frozen=True)
class Artefact:
    """One table or figure of a paper.

    Args:
        name: Name on the command line.
        paper: The paper and the place in it.
        shows: Subject of the table or figure, in a few words.
        here: Models and data that are trained in place of the paper's.
        parts: The runs.
        claims: The claims that are judged.
        tables: Function that makes the tables of the page. Default: one table per part, see `tables_of_parts`.
        pictures: Function that makes pictures of samples. Default: none.
        chart: How the tables are drawn. Default: not at all.
        seeds: Distinct random seeds, at least three. Default: `FIVE_SEEDS`.
        beside: Remark for the reader, as a sentence in Markdown, such as a result that contradicts it.
        recipes: Names of the recipes that train parts at full size, with the name of the part, or the names of several; see
            `full_size.at_full_size`.
        epochs_on_task: Number of epochs on another task, see `full_size.on_task`. Default: 20.
        command: Command that makes it. Default: `thresher reproduce` with its name.
        remark: Function that makes the sentence with which the page of its paper begins, from its tables. Default: none.
    """

    __pydantic_config__ = STRICT

    name: str
    paper: str
    shows: str
    here: str
    parts: Sequence[ArtefactPart]
    claims: Sequence[Claim]
    tables: MakeTables | None = None
    pictures: MakePictures | None = None
    chart: TableChart | None = None
    seeds: Sequence[int] = FIVE_SEEDS
    beside: str = ""
    recipes: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    epochs_on_task: int = 20
    command: str = ""
    remark: Callable[[Sequence[Mapping[str, Any]]], str] | None = None


def judge_all(
    claims: Sequence[Claim], measured: RunsByPart, seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """Judges claims; those about a part are "not tested" where a condition on it, or on all parts together, does not hold."""
    results = [claim.judge(measured, seeds) for claim in claims]
    parts = [claim.part_of(measured) for claim in claims]
    unmet = {
        part
        for part, result in zip(parts, results, strict=True)
        if not result["says"] and result["verdict"] != "reproduced"
    }
    if "" in unmet:
        unmet.update(parts)
    elif unmet:
        unmet.add("")  # what is about all parts together needs the conditions of each
    reason = "a condition of the setup does not hold"
    return [
        untested([result], reason)[0] if part in unmet else result
        for part, result in zip(parts, results, strict=True)
    ]


def untested(claims: Sequence[Mapping[str, Any]], note: str) -> list[dict[str, Any]]:
    """Returns judged claims, those of the paper as not tested, with the reason as a clause."""
    return [
        {**claim, "verdict": "not tested", "note": note} if claim["says"] else {**claim}
        for claim in claims
    ]


def overall(claims: Sequence[Mapping[str, Any]]) -> Verdict:
    """Returns the verdict on several claims: "reproduced" if all are, "not reproduced" if at least one is not.

    Conditions of the setup, verdicts by count and claims that were not tested decide nothing beside others; "cannot tell" where
    there are only counts, "not tested" without a claim of the paper.

    Args:
        claims: Results of `Claim.judge`.
    """
    verdicts = [claim["verdict"] for claim in claims if claim["says"]]
    if not verdicts:
        return "not tested"
    present: list[Verdict] = [verdict for verdict in VERDICTS if verdict in verdicts]
    return present[0] if present else "cannot tell"


def numbered_rows(columns: Iterable[Sequence[float]], form: str, first: int = 0) -> list[list[str]]:
    """Returns rows of cells that begin with a number, such as that of an epoch.

    Args:
        columns: Values of each further column.
        form: Format of the values.
        first: Number of the first row. Default: 0.
    """
    return [
        [str(number), *(format(value, form) for value in values)]
        for number, values in enumerate(zip(*columns, strict=True), first)
    ]


def tables_of_parts(artefact: Artefact, results: PartResults) -> list[PageTable]:
    """Returns one table per part, which compares each row with full training, its controls and the paper's number."""
    return [_table_of_part(part, results[part.name]) for part in artefact.parts]


def _table_of_part(part: ArtefactPart, results: Mapping[str, Any]) -> PageTable:
    labels = {label: row for row, label in results["labels"].items()}
    methods_rows = [row for row in results["summary"] if row["control_of"] is None]
    controls = {
        row["control_of"]: row for row in results["summary"] if row["control_of"] is not None
    }
    batches = results.get("batches", {})
    scale = units_of(results["metric"])
    header = [
        "",
        f"{results['metric']} here",
        "difference to full [95 % interval]",
        *COST_COLUMNS,
        "in the paper",
    ]
    rows = []
    for found in methods_rows:
        row = labels[found["method"]]
        rows.append(
            [
                row,
                *_summary_cells(found, batches.get(found["method"], ""), scale),
                part.published.get(row, ""),
            ]
        )
        if found["method"] in controls:
            cells = _summary_cells(controls[found["method"]], FULL_BATCHES, scale)
            rows.append([f"  random samples at the cost of {row}", *cells, ""])
    # A recipe has its own name.
    title = part.task if ":" in part.task else f"{part.name}: {part.task}"
    return PageTable(f"{title}, {part.epochs} epochs", header, rows)


FULL_BATCHES = "full"
FILLED_BATCHES = "filled up"
SMALLER_BATCHES = "as selected"
"""Kinds of training batches: of an epoch's samples; of the rows kept of several batches; of the rows kept of one batch, which
takes as many steps as full training."""
COST_COLUMNS = ("cost", "CPU time", "steps", "batches")


def _summary_cells(row: Mapping[str, Any], batches: str, scale: float) -> list[str]:
    """Returns mean and spread, difference to full training with interval, and the cells of `COST_COLUMNS`."""
    return [
        with_spread(row["mean"], row["std"], scale),
        "" if row["difference"] is None else with_interval(row["difference"], row["ci95"], scale),
        f"{row['cost_ratio']:.3f}",
        f"{row['cpu_ratio']:.2f}",
        f"{row['steps']:.0f}",
        batches,
    ]


def units_of(metric: str) -> float:
    """Returns the factor of a metric on the page: 100 for points, 1 for a loss."""
    return 1.0 if metric == "-loss" else 100.0


def with_spread(mean: float, std: float | None, scale: float) -> str:
    """Returns a number with its standard deviation, both multiplied by `scale`."""
    digits = _digits(mean, scale)
    return f"{scale * mean:.{digits}f}" + ("" if std is None else f" ± {scale * std:.{digits}f}")


def with_interval(mean: float, ci95: Sequence[float] | None, scale: float = 100) -> str:
    """Returns a signed number with its interval, both multiplied by `scale`."""
    low_and_high = ci95 or ()
    digits = _digits(mean, scale)
    ends = ", ".join(f"{scale * end:+.{digits}f}" for end in low_and_high)
    return f"{scale * mean:+.{digits}f}" + (f" [{ends}]" if ends else "")


def _digits(mean: float, scale: float) -> int:
    return 4 if scale == 1 and abs(mean) < 0.1 else 2


def reproduce(
    artefact: Artefact, work: Path, *, data: Path | None = None, **options: Any
) -> dict[str, Any]:
    """Trains the runs that are not finished yet, and judges the claims.

    Runs are kept in `work`, those of one task and number of epochs together; tables and figures share runs that they both need.

    Args:
        artefact: The table or figure.
        work: Folder of the runs.
        data: Folder with the data, for tasks that take one.
        options: `jobs`, `watcher` and `cluster` of `compare`.

    Returns:
        name, paper, shows, here, beside, seeds, device, versions, verdict, claims (see `Claim.judge`), remark, tables
        (title, header, rows), pictures (title, png) and parts (name, task, epochs, metric, backward_to_forward and summary, see
        `summary.summarize`); nothing in all but the first of several processes that train together.

    Raises:
        ValueError: An argument is not possible, see `compare`.
        FileNotFoundError: The data is missing.
        RunError: A run failed.
    """
    results = {
        part.name: _compared(artefact, part, work, data=data, **options) for part in artefact.parts
    }
    if own_rank():
        return {}
    measured = {name: _by_row(found) for name, found in results.items()}
    scales = {name: units_of(found["metric"]) for name, found in results.items()}
    claims = [
        replace(one, scale=1.0, unit="of loss")
        if one.unit == POINTS and scales.get(one.part_of(scales)) == 1
        else one
        for one in artefact.claims
    ]
    claims = judge_all(claims, measured, artefact.seeds)
    make = artefact.tables
    tables = [
        asdict(one)
        for one in (tables_of_parts(artefact, results) if make is None else make(measured, results))
    ]
    pictures = artefact.pictures(measured) if artefact.pictures else {}
    first = next(iter(results.values()))
    names = ("name", "task", "epochs", "metric", "backward_to_forward", "summary")
    return {
        **{
            name: getattr(artefact, name)
            for name in ("name", "paper", "shows", "here", "beside", "command")
        },
        "seeds": list(artefact.seeds),
        "device": first["device"],
        "versions": first["versions"],
        "verdict": overall(claims),
        "claims": claims,
        "tables": tables,
        "remark": artefact.remark(tables) if artefact.remark else "",
        "pictures": [{"title": title, "png": png} for title, png in pictures.items()],
        "parts": [{name: part[name] for name in names} for part in results.values()],
    }


def runs_folder(work: Path, part: ArtefactPart) -> Path:
    """Returns the folder of the runs of a part, which parts of one task share."""
    return work / f"{part.task.replace(':', '-')}-{part.epochs}"


def _compared(artefact: Artefact, part: ArtefactPart, work: Path, **options: Any) -> dict[str, Any]:
    """Returns the results of a part; `labels` has the label of each row's method, and runs name the files of their scores."""
    folder = runs_folder(work, part)
    sets = _scores_files(part, work, options["data"], len(artefact.seeds))
    specs = specs_of(part, sets[0] if sets else None)
    found = compare(
        part.task,
        list(specs.values()),
        artefact.seeds,
        part.epochs,
        folder,
        controls=part.controls,
        **options,
    )
    if own_rank():
        return {}  # the first process has the files of samples
    labels = {FULL_ROW: FULL_ROW, **{row: spec.label for row, spec in specs.items()}}
    batches = {FULL_ROW: FULL_BATCHES, **{spec.label: batches_of(spec) for spec in specs.values()}}
    first = found["runs"][0]
    ratio = first["cost"]["backward_to_forward"]
    name = first["metric"]["name"]
    for run in found["runs"]:
        at = artefact.seeds.index(run["seed"]) if part.score_sets else 0
        run |= {"scores": str(sets[at]) if sets else None}
        if "samples" in run:
            run["samples"] = str(folder / run["samples"])
    found["summary"] = with_steps(found["summary"], found["runs"])
    return {
        **found,
        "name": part.name,
        "labels": labels,
        "batches": batches,
        "metric": name,
        "backward_to_forward": ratio,
    }


def with_steps(summary: Sequence[RowDict], runs: Sequence[RunDict]) -> list[RowDict]:
    """Returns the rows of a summary with the mean number of optimizer steps of the runs of each, as `steps`."""
    counts: dict[tuple[str | None, str], list[int]] = {}
    for run in runs:
        counts.setdefault((run["control_of"], kind_of(run) or run["method"]), []).append(
            run["cost"]["steps"]
        )
    return [
        row | {"steps": fmean(counts[row["control_of"], kind_of(row) or row["method"]])}
        for row in summary
    ]


def batches_of(spec: Spec) -> str:
    """Returns the kind of the training batches of a method: full, filled up, or as selected."""
    in_batch = [part for part in spec.parts if methods.load(part.name).stage == "batch"]
    if not in_batch:
        return FULL_BATCHES
    batch = in_batch[0].batch
    if batch.get("forward_passes") == "twice" and batch.get("spend") != "batches":
        return FILLED_BATCHES
    return SMALLER_BATCHES


def specs_of(part: ArtefactPart, scores: Path | None) -> dict[str, Spec]:
    """Returns the methods of the rows, with the path of the scores in place of `{scores}`, and with `{epoch}` filled in."""
    epoch = str(1 / part.epochs)
    return {
        row: parse_methods(text.replace("{scores}", str(scores)).replace("{epoch}", epoch))[0]
        for row, text in part.rows.items()
    }


def _scores_files(part: ArtefactPart, work: Path, data: Path | None, seeds: int) -> list[Path]:
    """Returns the files of a part's scores, which are made where they do not exist; [] where the part needs none."""
    if part.scores is None:
        return []
    name, models, epochs = part.scores
    stem = f"{part.task.replace(':', '-')}-{name}-{models}x{epochs}"
    paths = [
        work / "scores" / f"{stem}{f'-{number}' if number else ''}.parquet"
        for number in range(seeds)
    ]
    paths = paths if part.score_sets else paths[:1]
    for number, path in enumerate(paths):
        if not of_first(path.exists()):
            scores = make_scores(
                part.task, name, models=models, epochs=epochs, seed=number * models, data=data
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            once_per_machine(partial(scores.save, path))
    return paths


def _by_row(results: Mapping[str, Any]) -> dict[str, dict[int, Any]]:
    runs = [run for run in results["runs"] if run["control_of"] is None]
    return {
        row: {run["seed"]: run for run in runs if run["method"] == label}
        for row, label in results["labels"].items()
    }
