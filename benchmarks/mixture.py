"""Shares of four sources of text: in proportion to their sizes, equal, in between, or by loss progress.

`python -m benchmarks.mixture [--minutes M]` trains the arms, and adds a line to a file of JSON lines for each training. It goes
on where it was stopped.

The small GPT of benchmarks.composition reads blocks of 96 bytes of Python code (160 KB), docstrings (80 KB), C++ headers (40 KB)
and descriptions of packages of Debian (20 KB). Each batch of 16 blocks has the shares of its arm; fractions of a row are carried
over. Each block of a source comes once before any comes again, with a random shift. The score is minus the loss on other
documents, as the mean of the four sources.

- `proportional`: shares in proportion to the sizes.
- `square root`: shares in proportion to the square roots of the sizes (temperature 2).
- `equal`: equal shares.
- `loss progress`: equal shares at first. Every 25 steps, the shares follow the recent decrease of the training loss of each
  source, smoothed; each source keeps a share of at least 0.1. The idea is the learning progress of Graves et al. (2017,
  arXiv:1704.03003), who draw one source per step with Exp3.S. The rule here is simpler: it sets the shares of each batch.

Decided before the first counted training: arms, rates and the number of seeds. Each arm takes the best of its rates, by one
training with a seed that is not counted (10,000). All arms have the same number of steps. CPU time is that of the training loop
on one thread.
"""

import argparse
import ast
import json
import math
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.composition import LOOK, PACKAGES, Gpt, Job, docstrings, linear, load
from benchmarks.kept import add_line, pack
from benchmarks.marks import between_marks
from thresher_lab.comparison.statistics import Paired
from thresher_lab.training.files import markdown_table

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "benchmarks" / "results" / "mixture-runs.jsonl.gz"
RESULTS = RUNS.with_name("mixture.json")
PAGE = ROOT / "docs" / "composition.md"
MARKS = "<!-- table of benchmarks.mixture -->", "<!-- end of the table of mixture -->"
SIZES = {"code": 160_000, "docstrings": 80_000, "headers": 40_000, "packages": 20_000}
"""Bytes of each source for training."""
HELD_OUT = 25_000
"""Bytes of each source for the score."""
ARMS = ("proportional", "square root", "equal", "loss progress")
RATES = (4e-3, 8e-3, 1.6e-2)
SEEDS = 5
STEPS = 400
ROWS = 16
WINDOW = 25
"""Steps between two changes of the shares by loss progress."""
LEAST = 0.1
"""Least share of a source by loss progress."""

Done = Mapping[Job, Mapping[str, Any]]


# Sources


def code() -> list[str]:
    """Returns functions of installed packages, without docstrings."""
    root = Path(sysconfig.get_paths()["purelib"])
    texts = []
    for package in ("networkx", "sympy", "sklearn"):
        for path in sorted((root / package).rglob("*.py"))[::8]:
            text = path.read_text(encoding="utf-8")
            texts += [
                ast.get_source_segment(text, node) or ""
                for node in ast.parse(text).body
                if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is None
            ]
    return texts


def headers() -> list[str]:
    """Returns C++ headers of torch."""
    root = Path(torch.__file__).parent / "include" / "ATen"
    paths = [path for path in sorted(root.rglob("*.h")) if "ops" not in path.parts]
    return [path.read_text(encoding="utf-8")[:4_000] for path in paths]


def packages() -> list[str]:
    """Returns one-line descriptions of packages of Debian."""
    command = ["apt-cache", "dumpavail"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = listed.splitlines()
    begin = "Description: "
    return sorted({line.removeprefix(begin) for line in lines if line.startswith(begin)})


@cache
def sources() -> tuple[list[Tensor], list[Tensor]]:
    """Returns the bytes of each source for training, and those of other documents for the score."""
    train, held = [], []
    found = {
        "code": code(),
        "docstrings": [text for package in PACKAGES for text in docstrings(package)[:200]],
        "headers": headers(),
        "packages": packages(),
    }
    for name, size in SIZES.items():
        texts = found[name]
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(1)).tolist()
        parts: tuple[list[bytes], list[bytes]] = [], []
        sizes = [0, 0]
        for i in order:
            part = int(sizes[0] >= size)
            if sizes[1] >= HELD_OUT:
                break
            parts[part].append(texts[i].encode() + b"\0")
            sizes[part] += len(parts[part][-1])
        if sizes[1] < HELD_OUT:
            raise ValueError(f"{name}: {sum(sizes)} bytes are too few")
        for to, of, cut in ((train, parts[0], size), (held, parts[1], HELD_OUT)):
            to.append(torch.frombuffer(bytearray(b"".join(of)), dtype=torch.uint8)[:cut].long())
    return train, held


# Training


class Shares:
    """Shares of the sources in each batch, as whole numbers of rows that add up exactly over time.

    Args:
        arm: Name of the arm.
    """

    def __init__(self, arm: str) -> None:
        sizes = torch.tensor([*SIZES.values()], dtype=torch.float64)
        power = {"proportional": 1.0, "square root": 0.5}.get(arm, 0.0)
        self.shares = sizes**power / (sizes**power).sum()
        self.owed = torch.zeros(len(sizes), dtype=torch.float64)
        self.adapts = arm == "loss progress"
        self.progress = torch.zeros(len(sizes), dtype=torch.float64)
        self.windows: list[Tensor] = []
        self.sums = torch.zeros(2, len(sizes), dtype=torch.float64)

    def counts(self) -> list[int]:
        """Returns the number of rows of each source in the next batch: those that are owed, the largest remainders first."""
        self.owed += self.shares * ROWS
        counts = self.owed.floor().clamp(min=0)
        rest = ROWS - int(counts.sum())
        counts[(self.owed - counts).argsort(descending=True, stable=True)[:rest]] += 1
        self.owed -= counts
        return [int(count) for count in counts]

    def observe(self, losses: Tensor, source: Tensor, step: int) -> None:
        """Adds the losses of the rows of a batch, and changes the shares after each window.

        Args:
            losses: Mean loss of each row, shape (ROWS,).
            source: Number of the source of each row.
            step: Number of the step, 0 or more.
        """
        if not self.adapts:
            return
        self.sums[0].index_add_(0, source, losses.double())
        self.sums[1].index_add_(0, source, torch.ones_like(losses).double())
        if (step + 1) % WINDOW:
            return
        self.windows.append(self.sums[0] / self.sums[1])
        self.sums.zero_()
        if len(self.windows) < 2:
            return
        decrease = (self.windows[-2] - self.windows[-1]).clamp(min=0)
        self.progress = (self.progress + decrease) / 2 if len(self.windows) > 2 else decrease
        total = float(self.progress.sum())
        if total > 0:
            free = 1 - LEAST * len(self.shares)
            self.shares = LEAST + free * self.progress / total


def blocks_in_turn(stream: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
    """Yields blocks of a stream with the byte after them, each once before any comes again, with a random shift."""
    size = Gpt.BLOCK
    count = len(stream) // size
    while True:
        shift = int(torch.randint(size, (), generator=generator))
        turned = stream.roll(-shift)
        turned = torch.cat([turned, turned[:1]])
        for number in torch.randperm(count, generator=generator).tolist():
            yield turned[number * size : (number + 1) * size + 1]


def train(job: Job) -> dict[str, Any]:
    """Trains an arm; see the module."""
    streams, held = sources()
    torch.manual_seed(job.seed)
    model = Gpt()
    generator = torch.Generator().manual_seed(job.seed)
    blocks = [blocks_in_turn(stream, generator) for stream in streams]
    shares = Shares(job.arm)
    optimizer = torch.optim.AdamW(model.parameters(), job.rate, weight_decay=0.1)
    schedule = linear(optimizer, STEPS)
    rows = torch.zeros(len(streams), dtype=torch.int64)
    began = time.process_time()
    for step in range(STEPS):
        counts = shares.counts()
        batch = torch.stack(
            [next(part) for part, k in zip(blocks, counts, strict=True) for _ in range(k)]
        )
        source = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        optimizer.zero_grad()
        logits = model(batch[:, :-1]).transpose(1, 2)
        losses = F.cross_entropy(logits, batch[:, 1:], reduction="none").mean(1)
        losses.mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        shares.observe(losses.detach(), source, step)
        rows += torch.tensor(counts)
    spent = time.process_time() - began
    model.eval()
    by_source = {}
    with torch.inference_mode():
        for name, stream in zip(SIZES, held, strict=True):
            size = Gpt.BLOCK
            found = []
            for batch in stream.unfold(0, size + 1, size).split(ROWS):
                logits = model(batch[:, :-1]).transpose(1, 2)
                found += F.cross_entropy(logits, batch[:, 1:], reduction="none").mean(1).tolist()
            by_source[name] = fmean(found)
    drawn = {
        f"share of {name}": k / (STEPS * ROWS) for name, k in zip(SIZES, rows.tolist(), strict=True)
    }
    return {"score": -fmean(by_source.values()), **by_source, **drawn, "cpu_s": spent}


# What is trained


def chosen(arm: str, done: Done) -> Job:
    """Returns the job of the look with the best rate of an arm."""
    looks = [Job("mixture", arm, rate, LOOK) for rate in RATES]
    return max(looks, key=lambda job: done[job]["score"])


def planned(done: Done) -> Iterator[Job]:
    """Yields all jobs: the looks, then those that count, with the chosen rates.

    Args:
        done: Results, to which the caller adds each yielded job before it asks for the next.
    """
    for arm in ARMS:
        for rate in RATES:
            yield Job("mixture", arm, rate, LOOK)
    rates = {arm: chosen(arm, done).rate for arm in ARMS}
    for seed in range(SEEDS):
        for arm in ARMS:
            yield Job("mixture", arm, rates[arm], seed)


def measure(path: Path, minutes: float) -> None:
    """Runs the trainings that a file of JSON lines lacks, and adds a line for each.

    Args:
        path: The file.
        minutes: Minutes after which no training begins.
    """
    done = load(path)
    end = time.monotonic() + 60 * minutes
    for job in planned(done):
        if job in done:
            continue
        if time.monotonic() > end:
            return
        result = {name: round(value, 5) for name, value in train(job).items()}
        done[job] = result
        add_line(path, {"job": asdict(job), "result": result})
        print(job, result, file=sys.stderr, flush=True)


def results(done: Done) -> dict[str, Any]:
    """Returns the content of mixture.json: means of each arm, and differences with 95 % intervals.

    Args:
        done: Results of all jobs.
    """
    jobs = [job for job in planned(done) if job.seed != LOOK]
    found = {arm: [done[job] for job in jobs if job.arm == arm] for arm in ARMS}
    rates = {job.arm: job.rate for job in jobs}
    arms = []
    for arm, runs in found.items():
        row: dict[str, Any] = {"arm": arm, "rate": rates[arm]}
        row |= {name: round(fmean(run[name] for run in runs), 4) for name in runs[0]}
        for name in SIZES:
            pairs = zip(runs, found[ARMS[0]], strict=True)
            row[f"change of {name}"] = _interval([a[name] - b[name] for a, b in pairs])
        for base in ARMS[:3]:
            pairs = zip(runs, found[base], strict=True)
            row[f"gain over {base}"] = _interval([a["score"] - b["score"] for a, b in pairs])
        arms.append(row)
    return {"seeds": SEEDS, "steps": STEPS, "rates": RATES, "arms": arms}


def _interval(values: Sequence[float]) -> list[float | None]:
    paired = Paired.of(values)
    return [
        None if end is None else round(end, 4) for end in (paired.mean, paired.low, paired.high)
    ]


def table(found: Mapping[str, Any]) -> str:
    """Returns the table in Markdown.

    Args:
        found: Content of mixture.json.
    """
    rows = []
    for arm in found["arms"]:
        gain = "{:+.3f} [{:+.3f}, {:+.3f}]".format(*arm[f"gain over {ARMS[0]}"])
        shares = " / ".join(f"{100 * arm[f'share of {name}']:.0f}" for name in SIZES)
        losses = [f"{arm[name]:.3f}" for name in SIZES]
        perplexity = f"{math.exp(-arm['score']):.2f}"
        mean = f"{-arm['score']:.3f}"
        gain = "" if arm["arm"] == ARMS[0] else gain
        rows.append((arm["arm"], shares, *losses, mean, perplexity, gain, f"{arm['cpu_s']:.0f} s"))
    header = (
        "mixture",
        "shares, %",
        *SIZES,
        "mean",
        "perplexity",
        "gain over proportional",
        "CPU time",
    )
    return markdown_table(header, rows)


def page(found: Mapping[str, Any]) -> str:
    """Returns the page with the table.

    Args:
        found: Content of mixture.json.
    """
    return between_marks(PAGE.read_text(), *MARKS, table(found))


def main() -> None:
    """Runs what is missing, and writes mixture.json and the table of docs/composition.md."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mixture")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="Default: no limit.")
    parser.add_argument("--runs", type=Path, default=RUNS, help="JSON lines of the trainings.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    measure(given.runs, given.minutes)
    if given.runs == RUNS:
        pack(RUNS)
        found = results(load(RUNS))
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        PAGE.write_text(page(found))


if __name__ == "__main__":
    main()
