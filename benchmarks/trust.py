"""How far the suspicions of a data map can be trusted: how well it finds planted wrong labels, by what the network knows.

`python -m benchmarks.trust [--minutes M]` trains on data some of whose labels were replaced, with `thresher.observe`, and reads
`run.data_map()` after the first epoch, a quarter, half and all of the epochs. The learning rate is constant, so the first part
of a training is what a shorter training with the same seed would be, bit for bit. A reading has the AUROC of `suspicion` (the
chance that a wrong label is more suspicious than a right one), its precision at 100, and the accuracy on validation samples
whose labels are right: every fifth sample, which is not trained on.

With two classes, guessing has one half and more. So the two tasks with two classes are trained a second time, slowly, to pass
through that range.

Labels are replaced by a random other class (symmetric), or by the class that is next in number (pairs). With two classes, both
are the same, and only the first is measured.

Decided before the first counted training: the tasks, shares, lengths and five seeds; and the rule, at least three visits and a
validation accuracy of at least one half. What it promises was left to the measurement. The slow tasks came later, and with them
the part of the rule about the largest class: its two fifths were chosen after a trial with two of the five seeds.
Numbers of epochs were chosen after one
training of each task (seed 0, 10 %, symmetric), which is counted, too.
"""

import argparse
import csv
import inspect
import json
import math
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from benchmarks.kept import add_line, pack, read_lines
from benchmarks.marks import between_marks
from benchmarks.observe import PROBLEMS, Problem, with_wrong_labels
from thresher.observation import LEAST_AGREEMENT, LEAST_GAIN, LEAST_VISITS, least_agreement
from thresher_lab.comparison.statistics import Paired
from thresher_lab.tasks import TASKS, built_in
from thresher_lab.tasks.base import accuracy, find_in_package
from thresher_lab.tasks.networks import perceptron, small_cnn
from thresher_lab.training.files import markdown_table

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "benchmarks" / "results" / "trust-runs.jsonl.gz"
RESULTS = RUNS.with_name("trust.json")
OBSERVE = ROOT / "docs" / "observe.md"
EVIDENCE = ROOT / "docs" / "evidence" / "wrong-labels.md"
MARKS = "<!-- tables of benchmarks.trust -->", "<!-- end of the tables of trust -->"
SHARES = (10, 2, 20, 5)
"""Percent of the labels that are replaced, in the order in which they are measured."""
KINDS = ("symmetric", "pairs")
SEEDS = 5
COUNT = 100
"""Number of suspects whose precision is measured."""
BANDS = (0.5, 0.7, 0.9, 1.01)
"""Ends of the bands of validation accuracy."""
MODULES = ("argparse", "ast", "asyncio.base_events", "_pydecimal", "email.message", "http.client", "inspect", "logging",
           "tarfile", "typing")  # fmt: skip
"""Modules of the standard library, pieces of which are the samples of two tasks."""
CNN = partial(small_cnn, 28, width=8)
OF_TWO_CLASSES = (
    "table, breast cancer",
    "table, orange juice",
    "table, breast cancer, slowly",
    "table, orange juice, slowly",
)
SLOWER = 30
"""The slow tasks have the learning rate divided by this."""
SECTIONS = 12
"""Number of sections of Debian among which the task of descriptions tells apart."""


def hashed_counts(texts: Sequence[bytes], width: int = 1024) -> Tensor:
    """Returns square roots of the counts of hashed groups of three bytes, shape (N, width)."""
    rows = []
    for text in texts:
        piece = np.frombuffer(text, dtype=np.uint8).astype(np.int64)
        groups = (piece[:-2] * 65_599 + piece[1:-1] * 257 + piece[2:]) % width
        rows.append(np.bincount(groups, minlength=width))
    return torch.tensor(np.array(rows), dtype=torch.float32).sqrt()


def _descriptions(samples: int = 4000) -> tuple[Tensor, Tensor]:
    """One-line descriptions of packages of Debian, one of each source, and their sections."""
    command = ["apt-cache", "dumpavail"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    sources: dict[str, tuple[str, str]] = {}
    for stanza in listed.split("\n\n"):
        lines = (line.split(": ", 1) for line in stanza.splitlines() if ": " in line)
        fields = {line[0]: line[1] for line in lines}
        source = fields.get("Source", fields.get("Package", "")).split(" ")[0]
        text = fields.get("Description", "")
        if len(text) > 10 and fields.get("Section"):
            sources.setdefault(source, (fields["Section"], text))
    counts = Counter(section for section, _ in sources.values())
    names = sorted(name for name, _ in counts.most_common(SECTIONS))
    rows = [sources[source] for source in sorted(sources) if sources[source][0] in names]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:samples]
    chosen = [rows[i] for i in order.tolist()]
    inputs = hashed_counts([text.lower().encode() for _, text in chosen])
    return inputs, torch.tensor([names.index(section) for section, _ in chosen])


def _table(name: str, target: str, unused: Sequence[str], samples: int) -> tuple[Tensor, Tensor]:
    """Rows of a table of the package ISLP: numbers are scaled, other columns become a 0 or 1 for each value."""
    path = find_in_package(name, "ISLP", "data", f"{name}.csv")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:samples]
    columns = {key: [rows[i][key] for i in order.tolist()] for key in rows[0]}
    inputs = []
    for key, values in columns.items():
        if key == target or key in unused:
            continue
        try:
            inputs.append(np.array(values, dtype=np.float64))
        except ValueError:
            known = sorted(set(values))
            inputs += [np.array([value == one for value in values]) * 1.0 for one in known]
    table = np.stack(inputs, 1)
    table = (table - table.mean(0)) / np.maximum(table.std(0), 1e-6)
    classes = sorted(set(columns[target]))
    labels = torch.tensor([classes.index(value) for value in columns[target]])
    return torch.tensor(table, dtype=torch.float32), labels


def _images(name: str) -> tuple[Tensor, Tensor]:
    task = built_in(name)
    inputs, targets = task.load(task.find(None)).train.tensors
    return inputs, targets.long()


def _pieces(length: int, each: int = 280) -> tuple[Tensor, Tensor]:
    """Pieces of modules of the standard library, evenly spaced, as counts of groups of bytes."""
    texts: list[bytes] = []
    for name in MODULES:
        text = inspect.getsource(import_module(name)).encode()
        starts = np.linspace(0, len(text) - length, each, dtype=int)
        texts += [text[start : start + length] for start in starts]
    return hashed_counts(texts), torch.arange(len(MODULES)).repeat_interleave(each)


def _of_observe(name: str, epochs: int, lr: float) -> Problem:
    return replace(PROBLEMS[name], epochs=epochs, lr=lr)


TASKS_TRAINED = {
    "digits, 1,797 images of 8 x 8": _of_observe("digits, 1,797 images of 8 x 8", 12, 0.02),
    "MNIST, 2,000 images": Problem(partial(_images, "mnist-5k@2000"), CNN, 8, 0.01),
    "MNIST, 2,000 images, turned and shifted": Problem(
        partial(_images, "mnist-5k@2000"), TASKS["mnist-5k-hard"].network, 8, 0.01
    ),
    "Fashion-MNIST, 4,000 images": Problem(partial(_images, "fashion-mnist@4000"), CNN, 8, 0.01),
    "Fashion-MNIST, 1,000 images, perceptron": Problem(
        partial(_images, "fashion-mnist@1000"), partial(perceptron, 784), 40, 0.02
    ),
    "texts, modules of Python, 160 bytes": Problem(
        partial(_pieces, 160), partial(perceptron, 1024), 16, 0.02
    ),
    "texts, modules of Python, 40 bytes": Problem(
        partial(_pieces, 40), partial(perceptron, 1024), 40, 0.02
    ),
    "texts, sections of Debian": Problem(
        _descriptions, partial(perceptron, 1024, classes=SECTIONS), 24, 0.02
    ),
    "table, breast cancer": _of_observe("table, breast cancer", 20, 0.02),
    "table, orange juice": Problem(
        partial(_table, "OJ", "Purchase", (), 1070), partial(perceptron, 18, classes=2), 20, 0.02
    ),
    "table, wages": Problem(
        partial(_table, "Wage", "education", (), 3000), partial(perceptron, 20, classes=5), 40, 0.02
    ),
    "table, bicycles": Problem(
        partial(_table, "Bikeshare", "season", ("mnth", "day"), 4000),
        partial(perceptron, 15, classes=4),
        20,
        0.02,
    ),
}
for _slow in OF_TWO_CLASSES[2:]:
    _fast = TASKS_TRAINED[_slow.removesuffix(", slowly")]
    TASKS_TRAINED[_slow] = replace(_fast, lr=_fast.lr / SLOWER)


@dataclass(frozen=True)
class Job:
    """A training.

    Args:
        task: Name of the task.
        kind: One of `KINDS`.
        share: Percent of the labels that are replaced.
        seed: Seed of the wrong labels, the network and the batches.
    """

    task: str
    kind: str
    share: int
    seed: int


@cache
def _loaded(task: str) -> tuple[Tensor, Tensor]:
    return TASKS_TRAINED[task].data()


def reading(found: Any, wrong: NDArray[np.bool_]) -> dict[str, float]:
    """Returns how well a data map finds the wrong labels, and what it shows without knowing them.

    Args:
        found: The data map; every sample was seen.
        wrong: Which labels are wrong, shape (N,).
    """
    return {
        "auroc": float(roc_auc_score(wrong, found["suspicion"])),
        "precision": float(wrong[found.suspects(COUNT)].mean()),
        "wrong": int(wrong.sum()),
        "visits": int(found["times_seen"].min()),
        "agreement": float((found["learned_at"] > 0).mean()),
        "largest": float(np.bincount(found["label"]).max() / len(wrong)),
        "learned": float((found["learned_at"] / found["times_seen"]).mean()),
        "forgetting": float(found["forgetting"].mean()),
        "confidence": float(found["confidence"].mean()),
        "variability": float(found["variability"].mean()),
        "aum": float((found["aum"] > 0).mean()),
    }


def readings(problem: Problem, job: Job, data: tuple[Tensor, Tensor]) -> Iterator[dict[str, float]]:
    """Trains a network, and yields the reading of each length, the shortest first.

    Args:
        problem: The task.
        job: The training.
        data: Inputs, shape (N, ...), and right classes, shape (N,).
    """
    inputs, right = data
    held = torch.arange(len(right)) % 5 == 4
    noise = f"{job.share} %, next" if job.kind == "pairs" else f"{job.share} %"
    labels, wrong = with_wrong_labels(right[~held], noise, 1000 + job.seed)
    torch.manual_seed(job.seed)
    model = problem.network()
    optimizer = torch.optim.SGD(model.parameters(), problem.lr, momentum=0.9, weight_decay=5e-4)
    run: Any = thresher.observe(
        loader=DataLoader(TensorDataset(inputs[~held], labels), problem.batch_size, shuffle=True),
        criterion=nn.CrossEntropyLoss(),
        model=model,
        optimizer=optimizer,
        epochs=problem.epochs,
    )
    lengths = {1, problem.epochs // 4, problem.epochs // 2, problem.epochs}
    for epoch in range(1, problem.epochs + 1):
        for x, y in run.loader:
            optimizer.zero_grad()
            run.criterion(run.model(x), y).backward()
            optimizer.step()
        if epoch in lengths:
            right_share = accuracy(model, [(inputs[held], right[held])])
            yield {"accuracy": right_share, **reading(run.data_map(), wrong)}


def train(job: Job) -> dict[str, Any]:
    """Returns the readings of a training, and its CPU time."""
    data = _loaded(job.task)
    began = time.process_time()
    found = [
        {name: round(value, 4) for name, value in one.items()}
        for one in readings(TASKS_TRAINED[job.task], job, data)
    ]
    return {"cpu_s": round(time.process_time() - began, 2), "readings": found}


def planned() -> list[Job]:
    """Returns all trainings, a whole share of every task after the other."""
    return [
        Job(task, kind, share, seed)
        for share in SHARES
        for kind in KINDS
        for seed in range(SEEDS)
        for task in TASKS_TRAINED
        if kind == "symmetric" or task not in OF_TWO_CLASSES
    ]


def load(path: Path) -> dict[Job, dict[str, Any]]:
    """Returns the trainings in a file of JSON lines; {} if there is no such file."""
    return {Job(**line["job"]): line["result"] for line in read_lines(path)}


Done = Mapping[Job, Mapping[str, Any]]


def measure(path: Path, minutes: float) -> None:
    """Runs the trainings that a file of JSON lines lacks, and adds a line for each.

    Args:
        path: The file.
        minutes: Minutes after which no training begins.
    """
    done = load(path)
    end = time.monotonic() + 60 * minutes
    for job in planned():
        if job not in done and time.monotonic() < end:
            add_line(path, {"job": asdict(job), "result": train(job)})


def cells_of(done: Done) -> dict[tuple[str, str, int, int], list[dict[str, float]]]:
    """Returns the readings of all seeds by task, kind, share and number of visits."""
    found = defaultdict(list)
    for job in planned():
        for one in done.get(job, {"readings": ()})["readings"]:
            found[job.task, job.kind, job.share, int(one["visits"])].append(one)
    return dict(found)


def interval(values: Sequence[float]) -> dict[str, Any]:
    """Returns the mean of values, and its 95 % interval; both ends are None for one value."""
    paired = Paired.of(values)
    ends = {"low": paired.low, "high": paired.high}
    return {name: None if end is None else round(end, 4) for name, end in ends.items()} | {
        "mean": round(paired.mean, 4),
        "n": paired.n,
    }


Row = Mapping[str, Any]


def summary(done: Done) -> list[Row]:
    """Returns a row for each task, kind, share and number of visits: means over the seeds, with intervals.

    `precision` is a share of the largest one that is possible with the number of wrong labels.
    """
    rows: list[Row] = []
    for (task, kind, share, visits), readings_of_seeds in cells_of(done).items():
        row: dict[str, Any] = {"task": task, "kind": kind, "share": share, "visits": visits}
        for name in ("accuracy", "agreement", "largest", "auroc"):
            row[name] = interval([one[name] for one in readings_of_seeds])
        possible = min(1, readings_of_seeds[0]["wrong"] / COUNT)
        row["precision"] = interval([one["precision"] / possible for one in readings_of_seeds])
        row["in_rule"] = visits >= LEAST_VISITS and _reaches(row, "accuracy")
        rows.append(row)
    return rows


def _reaches(row: Row, name: str) -> bool:
    """Returns whether a share of right predictions is large enough for the rule."""
    return row[name]["mean"] >= least_agreement(row["largest"]["mean"])


def bands(rows: Sequence[Row]) -> list[Row]:
    """Returns a row for each kind and band of accuracy, with intervals over the means of the tasks.

    Cases whose accuracy is too low for the rule have a band of their own.

    Args:
        rows: Rows of `summary`.
    """
    found = []
    for kind in KINDS:
        of_kind = [row for row in rows if row["kind"] == kind]
        few = [row for row in of_kind if row["visits"] < LEAST_VISITS]
        enough = [row for row in of_kind if row["visits"] >= LEAST_VISITS]
        within = [row for row in enough if row["in_rule"]]
        parts = {
            f"any, fewer than {LEAST_VISITS} visits": few,
            "too low": [row for row in enough if not row["in_rule"]],
        }
        for low, high in pairwise(BANDS):
            name = f"{low:g} to {high:g}"
            parts[name] = [row for row in within if low <= row["accuracy"]["mean"] < high]
        found += [{"kind": kind, "accuracy": name, **_over_tasks(of)} for name, of in parts.items()]
    return found


def shares(rows: Sequence[Row]) -> list[Row]:
    """Returns a row for each kind and share, of what is within the rule, as `bands` does."""
    return [
        {"kind": kind, "share": share, **_over_tasks(of)}
        for kind in KINDS
        for share in sorted(SHARES)
        if (of := [row for row in rows if row["in_rule"] and _is_of(row, kind, share)])
    ]


def _is_of(row: Row, kind: str, share: int) -> bool:
    return row["kind"] == kind and row["share"] == share


def _over_tasks(rows: Sequence[Row]) -> dict[str, Any]:
    if not rows:
        return {"rows": 0}
    tasks = sorted({row["task"] for row in rows})
    found: dict[str, Any] = {"rows": len(rows)}
    for name in ("auroc", "precision"):
        means = [fmean(row[name]["mean"] for row in rows if row["task"] == task) for task in tasks]
        found[name] = interval(means)
    least = min(rows, key=lambda row: row["auroc"]["mean"])
    return found | {"least": least["auroc"]["mean"], "least_task": least["task"]}


def rule(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns what the rule promises, what is outside of it, and how often the line of a data map tells which.

    Args:
        rows: Rows of `summary`.
    """
    found: dict[str, Any] = {
        "visits": LEAST_VISITS,
        "accuracy": LEAST_AGREEMENT,
        "gain": LEAST_GAIN,
    }
    for kind in KINDS:
        for name, in_rule in (("within", True), ("outside", False)):
            of = [row for row in rows if row["kind"] == kind and row["in_rule"] is in_rule]
            found[f"{kind}, {name}"] = _over_tasks(of)
    enough = [row for row in rows if row["visits"] >= LEAST_VISITS]
    low = [row for row in enough if not row["in_rule"]]
    found["low_accuracy"] = len(low)
    found["low_accuracy_shown"] = sum(_shows_line(row) for row in low)
    found["within"] = sum(row["in_rule"] for row in rows)
    found["within_shown"] = sum(_shows_line(row) for row in rows if row["in_rule"])
    columns = [[row[name]["mean"] for row in enough] for name in ("accuracy", "auroc")]
    ranks: Any = spearmanr(np.array(columns), axis=1)
    return found | {"rows": len(enough), "spearman": round(float(ranks.statistic), 2)}


def changes(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Returns, for each kind, the change from the smallest to the largest share after all epochs, with intervals over tasks.

    Args:
        rows: Rows of `summary`.
    """
    ends = {(row["task"], row["kind"], row["share"]): row for row in rows}
    few, many = min(SHARES), max(SHARES)
    found: dict[str, dict[str, Any]] = {}
    for kind in KINDS:
        pairs = [
            (ends[task, kind, few], ends[task, kind, many])
            for task in TASKS_TRAINED
            if {(task, kind, few), (task, kind, many)} <= ends.keys()
        ]
        for name in ("auroc", "precision"):
            differences = [last[name]["mean"] - first[name]["mean"] for first, last in pairs]
            if differences:
                found.setdefault(kind, {})[name] = interval(differences)
    return found


def _shows_line(row: Row) -> bool:
    """Returns whether a data map with these means would show its line."""
    return row["visits"] < LEAST_VISITS or not _reaches(row, "agreement")


def results(done: Done) -> dict[str, Any]:
    """Returns the content of trust.json."""
    rows = summary(done)
    cpu = round(sum(one["cpu_s"] for one in done.values()) / 60, 1)
    about = {"trainings": len(done), "planned": len(planned()), "cpu_minutes": cpu}
    return about | {
        "rule": rule(rows),
        "by_accuracy": bands(rows),
        "by_share": shares(rows),
        "changes": changes(rows),
        "rows": rows,
    }


def _cell(value: Mapping[str, Any], digits: int = 2) -> str:
    mean = f"{value['mean']:.{digits}f}"
    if value["low"] is None:
        return mean
    return f"{mean} [{max(0, value['low']):.{digits}f}, {min(1, value['high']):.{digits}f}]"


def promised(least: float) -> float:
    """Returns the lowest of measured values, rounded down to two digits."""
    return math.floor(100 * least) / 100


def verdict(found: Mapping[str, Any]) -> str:
    """Returns the rule in words, what falls short first.

    Args:
        found: Content of trust.json.
    """
    of = found["rule"]
    outside, inside = ([of[f"{kind}, {name}"] for kind in KINDS] for name in ("outside", "within"))
    return (
        f"**Before the third visit, or with a validation accuracy that is too low, do not rely on the suspicions**: the AUROC was as "
        f"low as {min(part['least'] for part in outside):.2f} (0.5 is guessing). Measure the accuracy on samples that are not trained "
        f"on: a network that has learned its labels by heart agrees with the wrong ones, too. Too low is less than one half and, with "
        f"classes of unlike sizes or few of them, less than p + {of['gain']:g} (1 - p), where p is the share of the largest class: "
        f"{least_agreement(0.5):.2g} with two classes of the same size. `print(found)` adds a line of caution if half of the samples "
        f"or more were seen fewer than {of['visits']} times, or if the share of labels that the last predictions agree with is too "
        f"low in this sense. The line is not enough: of {of['low_accuracy']} cases with {of['visits']} visits or more and a "
        f"validation accuracy that is too low, it appears in {of['low_accuracy_shown']}.\n\n"
        f"**The rule**: with at least {of['visits']} visits and a validation accuracy that is not too low, the AUROC "
        f"(the mean of five seeds) was at least "
        f"{promised(inside[0]['least']):.2f} on each of {inside[0]['auroc']['n']} tasks if a wrong label can be any other class "
        f"(symmetric), and at least {promised(inside[1]['least']):.2f} on each of {inside[1]['auroc']['n']} tasks if each class is "
        f"mistaken for one other class (pairs). The line appears in {of['within_shown']} of these {of['within']} cases. Over all "
        f"{of['rows']} cases with {of['visits']} visits or more, the rank correlation of validation accuracy and AUROC is "
        f"{of['spearman']:.2f}."
    )


def of_changes(found: Mapping[str, Any]) -> str:
    """Returns what the share of wrong labels changes, in words."""
    parts = []
    for kind, by_name in found["changes"].items():
        for name, title in (("auroc", "AUROC"), ("precision", "precision")):
            of = by_name[name]
            ends = "" if of["low"] is None else f" [{of['low']:+.2f}, {of['high']:+.2f}]"
            parts.append(f"{title} {of['mean']:+.2f}{ends} ({kind}, {of['n']} tasks)")
    return f"From {min(SHARES)} % to {max(SHARES)} % of wrong labels, the mean changes after all epochs are: {'; '.join(parts)}."


def table_of_bands(found: Mapping[str, Any]) -> str:
    """Returns the table of `bands` in Markdown."""
    header = ("wrong labels", "validation accuracy", "tasks", "AUROC", "lowest AUROC", "precision")
    rows = []
    for row in found["by_accuracy"]:
        if row["rows"]:
            name = row["accuracy"].replace("0.9 to 1.01", "0.9 or more")
            ends = (_cell(row["auroc"]), f"{row['least']:.3f}", _cell(row["precision"]))
            rows.append((row["kind"], name, str(row["auroc"]["n"]), *ends))
    return markdown_table(header, rows)


def table_of_shares(found: Mapping[str, Any]) -> str:
    """Returns the table of `shares` in Markdown."""
    header = ("wrong labels", "share", "tasks", "AUROC", "lowest AUROC", "precision")
    rows = []
    for row in found["by_share"]:
        ends = (_cell(row["auroc"]), f"{row['least']:.3f}", _cell(row["precision"]))
        rows.append((row["kind"], f"{row['share']} %", str(row["auroc"]["n"]), *ends))
    return markdown_table(header, rows)


def table_of_tasks(found: Mapping[str, Any], share: int) -> str:
    """Returns a row for each task and length in Markdown, at one share."""
    by_key = {
        (row["task"], row["visits"], row["kind"]): row
        for row in found["rows"]
        if row["share"] == share
    }
    rows = []
    for task, visits, kind in by_key:
        if kind != "symmetric":
            continue
        of = by_key[task, visits, "symmetric"]
        cells = [task, str(visits), _cell(of["accuracy"]), f"{of['agreement']['mean']:.2f}"]
        for other in KINDS:
            row = by_key.get((task, visits, other))
            cells += (
                ["", ""]
                if row is None
                else [_cell(row[name], 3) for name in ("auroc", "precision")]
            )
        rows.append(cells)
    columns = [f"{name}, {kind}" for kind in KINDS for name in ("AUROC", "precision")]
    header = ("task", "visits", "validation accuracy", "agreement with labels", *columns)
    return markdown_table(header, rows)


def table_of_ends(found: Mapping[str, Any]) -> str:
    """Returns a row for each task after all epochs in Markdown, with a column for each kind and share."""
    ends = {(row["task"], row["kind"], row["share"]): row for row in found["rows"]}
    columns = [(kind, share) for kind in KINDS for share in sorted(SHARES)]
    rows = []
    for task in TASKS_TRAINED:
        row = [task]
        for kind, share in columns:
            of = ends.get((task, kind, share))
            pair = [] if of is None else [of[name]["mean"] for name in ("auroc", "precision")]
            row.append("{:.3f} ({:.2f})".format(*pair) if pair else "")
        rows.append(row)
    header = ("task", *(f"{kind}, {share} %" for kind, share in columns))
    return markdown_table(header, rows)


def pages(found: Mapping[str, Any]) -> dict[Path, str]:
    """Returns each page with its tables.

    Args:
        found: Content of trust.json.
    """
    evidence = (
        table_of_tasks(found, SHARES[0]),
        "After all epochs, by the share of wrong labels: AUROC (precision).",
        table_of_ends(found),
        f"{of_changes(found)} Of the cases within [the rule](../observe.md#how-far-to-trust-the-suspicions):",
        table_of_shares(found),
    )
    texts = {
        OBSERVE: f"{verdict(found)}\n\n{table_of_bands(found)}",
        EVIDENCE: "\n\n".join(evidence),
    }
    return {path: between_marks(path.read_text(), *MARKS, text) for path, text in texts.items()}


def main() -> None:
    """Runs what is missing, and writes trust.json and the tables. It goes on where it was stopped."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trust", description=main.__doc__)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="Default: no limit.")
    parser.add_argument(
        "--runs",
        type=Path,
        default=RUNS,
        help="JSON lines of the trainings. Other files than the default are only added to.",
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    measure(given.runs, given.minutes)
    if given.runs == RUNS:
        pack(RUNS)
        found = results(load(RUNS))
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        for path, text in pages(found).items():
            path.write_text(text)


if __name__ == "__main__":
    main()
