"""What the JSON files of comparisons hold, checked when they are read, tables in Markdown, and lists in sentences."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

MOST_PROBLEMS = 3
"""Number of wrong fields that one message names."""
OWN_LISTS = ("loss_histogram", "hidden_by_class")
"""Entries of the history that are lists, of one length in all epochs."""

Value = float | bool | str | None | list[Any] | dict[str, Any]
Judgment = Literal["not reproduced", "cannot tell", "not tested", "reproduced"]
CountedJudgment = Literal["holds by count", "fails by count"]


class JsonFile(BaseModel):
    """Fields of a file, or of a part of one."""

    model_config = ConfigDict(extra="allow", strict=True)


class HistoryEntry(JsonFile):
    """An entry of the history of a run.

    Attributes:
        epoch: Number of the epoch, from 0.
        actual_fraction: Share of the samples that was left out, without those in `dropped_fraction`.
        dropped_fraction: Share of the samples that was given up as noise.
        scheduled_fraction: Largest share that the method would have left out.
        cost: Cost until the end of the epoch, as a share of full training.
        cpu_s: CPU seconds until the end of the epoch.
        wall_s: Seconds until the end of the epoch.
        step_s: Seconds per step.
        step_memory: Bytes that its second step took at its peak, above those held before; None if not measured.
        easy_share: Share of the samples with small losses.
        loss_histogram: Counts of the losses.
        hidden_by_class: Number of samples of each class that were left out.
    """

    __pydantic_extra__: dict[str, Value]  # pyright: ignore[reportIncompatibleVariableOverride]

    epoch: int
    actual_fraction: float | None = None
    dropped_fraction: float = 0.0
    scheduled_fraction: float | None = None
    cost: float | None = None
    cpu_s: float | None = None
    wall_s: float | None = None
    step_s: float | None = None
    step_memory: int | None = None
    easy_share: float | None = None
    loss_histogram: list[int] | None = None
    hidden_by_class: list[int] | None = None


class JsonRun(JsonFile):
    """A run of a comparison, as in DIR/runs.

    Attributes:
        method: Label of the method.
        settings: Settings of the method by name.
        seed: Random seed.
        rate: Factor on the learning rate.
        classes: Names of the classes; None where they have numbers alone.
        confusion: How often each class is taken for each other one, rows by the right class; None where it is not known.
        history: One entry per epoch.
    """

    method: str
    settings: dict[str, Any]
    seed: int
    rate: float = 1.0
    classes: list[str] | None = None
    confusion: list[list[int]] | None = None
    history: list[HistoryEntry]

    @model_validator(mode="after")
    def check_confusion(self) -> "JsonRun":
        """Checks that the counts of the classes are square."""
        if self.confusion is not None and {len(self.confusion)} != {
            len(row) for row in self.confusion
        }:
            raise ValueError("`confusion` must have as many columns as rows")
        return self

    @model_validator(mode="after")
    def check_lists(self) -> "JsonRun":
        """Checks that lists have one length in all epochs."""
        for name in OWN_LISTS:
            if (
                len(
                    {
                        len(found)
                        for epoch in self.history
                        if (found := getattr(epoch, name)) is not None
                    }
                )
                > 1
            ):
                raise ValueError(f"`{name}` must have the same length in all epochs of the history")
        return self


class Metric(JsonFile):
    """The final value of the metric.

    Attributes:
        name: Name of the metric.
        value: Value after the last epoch.
    """

    name: str
    value: float


class RunCost(JsonFile):
    """The cost of a run.

    Attributes:
        ratio: Share of the cost of full training.
        backward_to_forward: Cost of a backward pass in forward passes.
        scores_ratio: Part of `ratio` that was spent on scores before the run; None where it is not known.
    """

    __pydantic_extra__: dict[str, float | None]  # pyright: ignore[reportIncompatibleVariableOverride]

    ratio: float
    backward_to_forward: float | None
    scores_ratio: float | None = None


class ComparedRun(JsonRun):
    """A run as it stands in results.json.

    Attributes:
        control_of: Label of the method that the run is a control of; None where it is none.
        metric: Final value of the metric.
        cost: Cost of the run.
        cpu_s: CPU seconds.
        wall_s: Seconds.
        busy: Whether the machine was busy at the begin or end; None where that is not known.
        other_runs: Mean number of other runs of the comparison in progress beside it; None if not known.
        step_memory: Bytes that a step took at most, above those held before; None where that is not known.
        samples: Path of the history of the samples, relative to the folder; None where there is no such file.
        shown: Path of the file with what samples look like, relative to the folder; None where there is none.
    """

    control_of: str | None
    metric: Metric
    cost: RunCost
    cpu_s: float
    wall_s: float
    busy: bool | None = None
    other_runs: float | None = None
    step_memory: int | None = None
    samples: str | None = None
    shown: str | None = None

    @model_validator(mode="after")
    def check_metric(self) -> "ComparedRun":
        """Checks that what is drawn over the epochs, the metric and weights, is a number wherever the history has it."""
        for place, epoch in enumerate(self.history):
            for name, value in (epoch.model_extra or {}).items():
                drawn = name == self.metric.name or name.startswith("weight_")
                if drawn and (isinstance(value, bool) or not isinstance(value, int | float | None)):
                    raise ValueError(
                        f"`history.{place}.{name}` must be a number, got {value!r:.40}"
                    )
        return self


class StoredEpoch(HistoryEntry):
    """An entry of the history of a stored run.

    Attributes:
        forward: Number of samples that went through a forward pass.
        backward: Number of samples that went through a backward pass.
    """

    forward: int
    backward: int


class StoredCost(RunCost):
    """The cost of a stored run.

    Attributes:
        forward: Number of samples that went through a forward pass.
        backward: Number of samples that went through a backward pass.
        full_forward: The same for full training.
        full_backward: The same for full training.
    """

    forward: int
    backward: int
    full_forward: int
    full_backward: int


class StoredRun(ComparedRun):
    """A run as it stands in DIR/runs.

    Attributes:
        device: Name of the device.
        cost: Cost with its counts.
        history: One entry per epoch, with its counts.
    """

    device: str
    cost: StoredCost  # pyright: ignore[reportIncompatibleVariableOverride]
    history: list[StoredEpoch]  # pyright: ignore[reportIncompatibleVariableOverride]


class SummaryRow(JsonFile):
    """A row of the summary.

    Attributes:
        method: Label of the method.
        control_of: Label of the method that the row is a control of; None where it is none.
        mean: Mean of the metric over the seeds.
        std: Standard deviation over the seeds; None with one seed.
        difference: Difference to full training; None for full training.
        ci95: Interval of the difference.
        cost_ratio: Cost as a share of full training.
        cpu_ratio: CPU time as a share of full training.
        wall_ratio: Time as a share of full training; None if not comparable.
        rate: Factor on the learning rate.
        memory_ratio: Peak memory of a step as a share of full training; None where it is not known.
        verdict: Judgment in words.
    """

    method: str
    control_of: str | None
    mean: float
    std: float | None
    difference: float | None
    ci95: list[float] | None = Field(min_length=2, max_length=2)
    cost_ratio: float
    cpu_ratio: float | None = None
    wall_ratio: float | None = None
    rate: float = 1.0
    memory_ratio: float | None = None
    verdict: str


class LeftOutControl(JsonFile):
    """A control that was not trained for a method.

    Attributes:
        method: Label of the method.
        control: Kind of the control.
        why: Reason, as a sentence.
    """

    method: str
    control: str
    why: str


class Results(JsonFile):
    """The content of results.json.

    Attributes:
        task: Name of the task.
        epochs: Number of epochs of every run.
        device: Name of the device.
        processes: Number of processes that trained each run together.
        versions: Versions of the software by name.
        margin: Loss of the metric that does not matter.
        loss_bins: Edges of the bins of the losses.
        classes: Names of the classes; None where they have numbers alone.
        left_out: Controls that were not trained.
        runs: Runs, at least one.
        summary: Rows of the summary, at least one.
    """

    task: str
    epochs: int
    device: str
    processes: int = 1
    versions: dict[str, str]
    margin: float | None = None
    loss_bins: list[float] | None = None
    classes: list[str] | None = None
    left_out: list[LeftOutControl] = []
    runs: list[ComparedRun] = Field(min_length=1)
    summary: list[SummaryRow] = Field(min_length=1)

    @model_validator(mode="after")
    def check_methods(self) -> "Results":
        """Checks that the summary and the runs are of the same methods, with full training among them."""
        methods_of_runs = {run.method for run in self.runs if run.control_of is None}
        summed = {row.method for row in self.summary if row.control_of is None}
        if methods_of_runs != summed or "full" not in methods_of_runs:
            raise ValueError(
                f"`runs` has the methods {sorted(methods_of_runs)}, `summary` {sorted(summed)}; both must have 'full' and agree"
            )
        return self


class ShownSample(JsonFile):
    """What a sample looks like.

    Attributes:
        png: Content of a PNG file, in base64; None for a text.
        text: Text; None for a picture.
    """

    png: str | None = None
    text: str | None = None


class ShownSamples(JsonFile):
    """The content of the file with what samples of a run look like.

    Attributes:
        shown: Samples by their ids.
    """

    shown: dict[Annotated[str, Field(pattern=r"^[0-9]{1,18}$")], ShownSample]


class JudgedClaim(JsonFile):
    """A claim of a paper.

    Attributes:
        claim: Measured quantity, in one sentence.
        says: Statement of the paper, with the place; "" for a condition of the setup.
        mean: Mean over the seeds; None where it is not known.
        ci95: Interval of the mean.
        above: Limit that the mean should exceed.
        scale: Factor of the numbers on the page.
        verdict: Judgment on the claim.
        seeds_needed: Number of seeds that would decide a claim that these seeds cannot; None where more than 1,000 would.
        note: Condition of the setup that the claim depends on, as a clause; "" if there is none.
        unit: Unit of the numbers on the page.
    """

    claim: str
    says: str = ""
    mean: float | None
    ci95: list[float] | None = Field(min_length=2, max_length=2)
    above: float
    scale: float
    verdict: Judgment | CountedJudgment
    seeds_needed: int | None = None
    note: str = ""
    unit: str = ""


class Picture(JsonFile):
    """A picture of the page.

    Attributes:
        title: Text above the picture.
        png: Content of a PNG file, in base64.
    """

    title: str
    png: str


class Table(JsonFile):
    """A table of the page.

    Attributes:
        title: Text above the table.
        header: Names of the columns.
        rows: Cells.
    """

    title: str
    header: list[str]
    rows: list[list[str]]


class Reproduced(JsonFile):
    """The content of the file of one table or figure.

    Attributes:
        name: Name on the command line.
        paper: The paper and the place in it.
        shows: Subject of the table or figure.
        here: Models and data that stand for those of the paper.
        seeds: Random seeds.
        verdict: Judgment on all claims.
        claims: The claims.
        tables: The tables.
        pictures: The pictures.
        beside: Remark for the reader, as a sentence in Markdown.
        remark: Sentence with which the page of the paper begins; "" if there is none.
        outdated: Reason why the runs must be trained anew, as a sentence; None where they are those that the command makes now.
    """

    name: str
    paper: str
    shows: str
    here: str
    seeds: list[int]
    verdict: Judgment
    claims: list[JudgedClaim]
    tables: list[Table]
    pictures: list[Picture] = []
    beside: str = ""
    remark: str = ""
    outdated: str | None = None


class Manifest(JsonFile):
    """The content of comparison.json.

    Attributes:
        backward_to_forward: Cost of a backward pass in forward passes; None before it is measured.
        task: Name of the task.
        epochs: Number of epochs of every run.
        looked_at: Numbers of seeds at which the verdicts of the folder were looked at, or were planned to be.
        lengths: Length of the control in the same time by the label of its method: share of the epochs, clock and seeds.
    """

    backward_to_forward: float | None
    task: str
    epochs: int
    looked_at: list[int] = []
    lengths: dict[str, dict[str, Any]] = {}


Kind = TypeVar("Kind", bound=BaseModel)


def read_checked(path: Path, kind: type[Kind], remedy: str) -> Any:
    """Reads a JSON file, and checks the fields that are used later.

    Args:
        path: Path of the file.
        kind: Model of the content.
        remedy: Advice at the end of the message, a clause.

    Returns:
        The content as it is in the file.

    Raises:
        ValueError: The file is damaged, or a field is missing or wrong; the message has the file, the fields, and the advice.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged ({error}); delete it, and the same command makes it again"
        ) from error
    try:
        TypeAdapter(kind).validate_python(content)
    except ValidationError as error:
        problems = [_problem(one) for one in error.errors(include_url=False)]
        if len(problems) > MOST_PROBLEMS:
            more = f"; and {len(problems) - MOST_PROBLEMS} more"
        else:
            more = ""
        raise ValueError(f"{path}: {'; '.join(problems[:MOST_PROBLEMS])}{more}. {remedy}") from None
    return content


def _problem(error: Any) -> str:
    place = ".".join(map(str, error["loc"]))
    if error["type"] == "missing":
        return f"the field `{place}` is missing"
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if error["type"] == "model_type":
        message = "should be an object with fields"
    if error["type"] == "value_error":
        return f"in `{place}`, {message}" if place else message
    if place:
        return f"`{place}` {message}, got {error['input']!r:.40}"
    return f"the content {message}, got {error['input']!r:.40}"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown.

    Args:
        header: Titles of the columns.
        rows: Cells of each row, as many as there are columns.

    Example:
        >>> print(markdown_table(["a", "b"], [["1", "2"]]))
        | a | b |
        | --- | --- |
        | 1 | 2 |
    """
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        "| " + " | ".join(cell.strip().replace("|", r"\|") for cell in line) + " |"
        for line in lines
    )


def listed(names: Sequence[str]) -> str:
    """Returns words as a list in a sentence.

    Args:
        names: Words, at least one.

    Example:
        >>> listed(["random", "fewer epochs", "smaller batches"])
        'random, fewer epochs and smaller batches'
    """
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
