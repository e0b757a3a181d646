"""Measures what attaching costs: plans, starts of epochs, memory and the criterion, each with its limit.

`python -m benchmarks.overhead [--quick] [--device cuda] [--out FILE.json]`; exit code 1 where a limit is missed.
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, default_collate

import thresher
from benchmarks.measure import Row, Side, compare, judgment, lines, ratios_table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "overhead.json"
IMAGENET, TEN_MILLION = 1_281_167, 10_000_000
BATCH, CLASSES = 128, 10
EPOCHS = 1000
"""Epochs of the measured runs: enough that every start falls where the methods select their full fraction."""

METHODS: dict[str, Callable[[], Any]] = {
    "Kakurenbo": thresher.Kakurenbo,
    "InfoBatch": thresher.InfoBatch,
    "UniformSubset": lambda: thresher.UniformSubset(0.7),
    "FullData": thresher.FullData,
    "Winnow": thresher.Winnow,
}
OTHERS: dict[str, Callable[[], Any]] = {
    "ImportanceSampling": thresher.ImportanceSampling,
    "ImportanceSampling, unbiased": lambda: thresher.ImportanceSampling(weights="unbiased"),
    "EpochSelectiveBackprop": thresher.EpochSelectiveBackprop,
    "EpochSelectiveBackprop, rank": lambda: thresher.EpochSelectiveBackprop(percentile="rank"),
    "Forgetting": lambda: thresher.Forgetting(start=1),
    "Forgetting, once": lambda: thresher.Forgetting(start=1, hide="once"),
    "InfoBatch, target": lambda: thresher.InfoBatch(target=0.4),
    "SeTa": thresher.SeTa,
    "SeTa, target": lambda: thresher.SeTa(target=0.5),
    "OrderDp": thresher.OrderDp,
    "RePb": thresher.RePb,
    "RePb, target": lambda: thresher.RePb(target=0.5),
    "Ies": thresher.Ies,
    "Ies, target": lambda: thresher.Ies(target=0.4),
    "Ucb": thresher.Ucb,
    "Ucb, epsilon": lambda: thresher.Ucb(explore="epsilon"),
    "Rcap": thresher.Rcap,
    "Rs2": thresher.Rs2,
    "GradMatch, between selections": lambda: thresher.GradMatch(first=0),
}
"""The other methods that plan each epoch, of which only the plans are measured. A selection of GRAD-MATCH is not among them: it
is a search that takes far longer than a plan, see `benchmarks/grad_match`."""

DRAWING = ("ImportanceSampling", "ImportanceSampling, unbiased")
"""Those that draw with repetition."""

WEIGHED = (
    *DRAWING,
    *(
        name
        for name in OTHERS
        if name.split(",")[0] in ("SeTa", "OrderDp", "RePb", "Ies", "Ucb", "Rcap", "Rs2")
    ),
)
"""Those of which the memory is measured, beside the methods of the other tables."""

MIDDLE = {"Ies": 200, "Ies, target": 200}
"""Epochs of the plans that are measured; epoch 1 where none is named."""

PLAN_LIMITS = {"Kakurenbo": 2.0, "InfoBatch": 3.0, "Winnow": 2.5}
OTHERS_LIMIT = 6.0
"""Largest ratio for plans of `OTHERS` at ten million samples or more. A much shorter permutation fits into the cache, where it
takes a third of the time per id; there the ratio only informs."""
SECONDS_LIMIT = 2.0 / TEN_MILLION
"""Largest number of CPU seconds per sample of a plan of ImportanceSampling."""
START_LIMIT = 5.0
START_LIMITS = {"Winnow": 2.5}
"""Limits of starts of ten million samples or more other than `START_LIMIT`: this one has the order of stratified batches in it.

With fewer, `torch.randperm` takes a few milliseconds, as long as a cache holds it, and the ratio informs.
"""
RECORDS_LIMITS = {"Kakurenbo": 9.0, "InfoBatch": 8.0}
MEMORY_LIMIT = 24.0
BY_HAND_LIMIT = 0.9
"""Largest time of the criterion over that of a loop that does the same by hand. The ratio to the plain criterion alone only
informs: the writing of records is bound by memory and the criterion by the processor, so that it differs between machines."""


# Data and model


class CheapDataset(Dataset[Any]):
    """N samples that cost next to nothing; a batch is fetched in one call, already collated."""

    def __init__(self, n: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self._n = n
        self._inputs = torch.randn(997, CLASSES, generator=generator)
        self._targets = torch.randint(CLASSES, (997,), generator=generator)

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self._inputs[i % 997], self._targets[i % 997]

    def __getitems__(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        rows = torch.tensor(ids) % 997
        return self._inputs[rows], self._targets[rows]


def as_it_is(batch: Any) -> Any:
    """Collates: batches of CheapDataset stay as they are, single samples are stacked."""
    return batch if isinstance(batch, tuple) else default_collate(batch)


class Shift(nn.Module):
    """A model whose outputs are new tensors with gradient, at the cost of one addition."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.zeros(CLASSES))

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns inputs and outputs of shape (B, CLASSES)."""
        return inputs + self.by


def loader_of(n: int) -> DataLoader[Any]:
    """Returns a shuffling loader over a CheapDataset."""
    return DataLoader(CheapDataset(n), batch_size=BATCH, shuffle=True, collate_fn=as_it_is)


@dataclass(frozen=True)
class Attached:
    """A run and its optimizer."""

    run: thresher.Run
    optimizer: torch.optim.Optimizer


def attached(method: Any, n: int, device: torch.device) -> Attached:
    """Returns a run over n cheap samples."""
    model = Shift().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss()
    run = thresher.attach(
        method,
        loader=loader_of(n),
        criterion=criterion,
        model=model,
        optimizer=optimizer,
        epochs=EPOCHS,
    )
    return Attached(run, optimizer)


def fill(records: Mapping[str, Tensor], seed: int = 1) -> None:
    """Fills records with values as in training, in place: exponential losses and the confidences that belong to them.

    Samples are right where the confidence is above one half. Of the 30 % with the lowest losses, about half are confident
    enough for KAKURENBO; the others are moved back. Every fifth sample has a weight of GRAD-MATCH.
    """
    generator = torch.Generator(next(iter(records.values())).device).manual_seed(seed)
    for name, column in records.items():
        if name in ("loss", "grad_norm", "grad_norm_then"):
            column.exponential_(0.5, generator=generator)
        elif name in ("uncertainty", "credit"):
            column.uniform_(generator=generator)
        elif name == "forgetting":
            column.random_(0, 12, generator=generator)
        elif name in (
            "score",
            "batch_loss",
            "last",
            "slope",
            "bend",
            "bend_before",
            "mean",
            "variance",
        ):
            column.exponential_(0.5, generator=generator)
        elif name == "threshold":
            column.fill_(0.5)
        elif name == "label":
            column.random_(0, 1000, generator=generator)
        elif name not in ("confidence", "correct"):
            column.fill_(-1 if name == "epoch_then" else 0)
    if "weight" in records:
        records["weight"][::5] = 1
    if "confidence" in records:
        confidence = records["confidence"].copy_(records["loss"]).neg_().exp_()
        torch.gt(confidence, 0.5, out=records["correct"])


def start_epoch(run: thresher.Run) -> None:
    """Goes from the end of one epoch, which stopped after its first batch, to the first batch of the next.

    A step makes it an epoch: a pass in which nothing was trained begins again, with the same plan.
    """
    next(iter(run.loader))
    run._timeline.step_over()  # optimizer.step does this in an attached loop


def mid_training(method: Any, n: int, device: torch.device) -> Attached:
    """Returns a run that has losses of every sample and has finished its first epoch."""
    made = attached(method, n, device)
    start_epoch(made.run)
    fill(made.run.records)
    return made


# Times


def plan_times(
    names: Sequence[str], n: int, pairs: int, calls: int, device: torch.device
) -> list[Row]:
    """Times (a) plan_epoch over torch.randperm(N)."""

    def side(name: str) -> Side:
        method, records = filled(name, n, device)
        seeds = iter(range(10**9))

        def plan(_: None) -> None:
            generator = torch.Generator().manual_seed(next(seeds))
            method.plan_epoch(
                records, epoch=MIDDLE.get(name, 1), epochs=EPOCHS, generator=generator
            )

        seconds = (
            SECONDS_LIMIT * n
            if name.startswith("ImportanceSampling") and device.type == "cpu"
            else None
        )
        limit = OTHERS_LIMIT if name in OTHERS and n >= TEN_MILLION else PLAN_LIMITS.get(name)
        return Side(name, plan, limit=limit, limit_s=seconds)

    return compare(
        randperm(n), [side(name) for name in names], pairs=pairs, calls=calls, device=device
    )


def filled(name: str, n: int, device: torch.device) -> tuple[Any, dict[str, Tensor]]:
    """Returns a method, and its records as in training."""
    method = (METHODS | OTHERS)[name]()
    records = {
        key: torch.empty(n, dtype=column.dtype, device=device)
        for key, column in method.columns().items()
    }
    fill(records)
    return method, records


def start_limit(name: str, n: int) -> float | None:
    """Returns the limit of the start of an epoch over `torch.randperm`; None where it informs.

    Args:
        name: Name of the method in `METHODS`.
        n: Number of samples.
    """
    if name not in START_LIMITS:
        return START_LIMIT
    return START_LIMITS[name] if n >= TEN_MILLION else None


def start_times(n: int, pairs: int, calls: int, device: torch.device) -> list[Row]:
    """Times (b) plan, order and first batch over torch.randperm(N), beside order and first batch of an unattached loader."""

    def side(name: str) -> Side:
        run = mid_training(METHODS[name](), n, device).run
        return Side(name, lambda _: start_epoch(run), limit=start_limit(name, n))

    plain = loader_of(n)
    unattached = Side("unattached DataLoader", lambda _: next(iter(plain)))
    return compare(
        randperm(n), [*map(side, METHODS), unattached], pairs=pairs, calls=calls, device=device
    )


def randperm(n: int) -> Side:
    """Returns the baseline of plans and starts."""
    return Side("torch.randperm", lambda _: torch.randperm(n))


def batches(loader: Any) -> Iterator[Any]:
    """Yields the batches of epoch after epoch."""
    while True:
        yield from loader


def criterion_sides(n: int, device: torch.device) -> Iterator[tuple[str, Attached]]:
    """Yields the runs of tables (e) and (f) by name."""
    yield "Kakurenbo", attached(thresher.Kakurenbo(), n, device)
    yield "InfoBatch", attached(thresher.InfoBatch(), n, device)
    yield "InfoBatch, weighted", mid_training(thresher.InfoBatch(), n, device)
    yield "FullData", attached(thresher.FullData(), n, device)


WARM_UP = 100
"""Steps before the timing starts: a run times its own first steps, and compares own passes, in fewer than these."""


def criterion_times(
    n: int, pairs: int, calls: int, device: torch.device, *, backward: bool
) -> list[Row]:
    """Times (e) run.criterion and the writing of the records over nn.CrossEntropyLoss, outputs (BATCH, CLASSES).

    As in a training loop, each call has a batch that the loader has just yielded and outputs that the model has just
    returned. The times include the call, the recording of its losses at the end of the step and, at the end of a round, the
    writing of what is still pending.
    """

    def plain() -> Side:
        model, criterion, source = Shift().to(device), nn.CrossEntropyLoss(), batches(loader_of(n))

        def prepare() -> tuple[Tensor, Tensor]:
            model.zero_grad()
            inputs, targets = next(source)
            return model(inputs.to(device)), targets.to(device)

        def act(prepared: tuple[Tensor, Tensor]) -> None:
            loss = criterion(*prepared)
            if backward:
                loss.backward()

        return Side("nn.CrossEntropyLoss", act, prepare)

    sides = [
        criterion_side(name, made, backward=backward) for name, made in criterion_sides(n, device)
    ]
    return compare(plain(), sides, pairs=pairs, calls=calls, warm_up=WARM_UP, device=device)


def criterion_side(
    name: str, made: Attached, *, backward: bool, limit: float | None = None
) -> Side:
    """Returns a side that calls run.criterion, and at the end of a round writes what is still pending."""
    run, source = made.run, batches(made.run.loader)

    def prepare() -> tuple[Tensor, Tensor]:
        run._timeline.step_over()  # of the step before, for the count of steps
        made.optimizer.zero_grad()
        inputs, targets = next(source)
        return run.model(inputs), targets

    def act(prepared: tuple[Tensor, Tensor]) -> None:
        loss = run.criterion(*prepared)
        if backward:
            loss.backward()
        run._parts.accumulator.end_step()  # optimizer.step does this in an attached loop

    return Side(name, act, prepare, lambda: run.records, limit)


def by_hand_times(n: int, pairs: int, calls: int, device: torch.device) -> list[Row]:
    """Times (g) run.criterion over a loop that computes the same loss and writes the same records by hand in each step."""
    rows = []
    for name, made in criterion_sides(n, device):
        hand = by_hand(name, made.run.records, device)
        side = criterion_side(f"{name}, run.criterion", made, backward=False, limit=BY_HAND_LIMIT)
        rows += compare(hand, [side], pairs=pairs, calls=calls, warm_up=WARM_UP, device=device)
    return rows


def by_hand(name: str, records: Mapping[str, Tensor], device: torch.device) -> Side:
    """Returns a side that does by hand what `criterion_side` does; the batch brings ids and weights along, which are not timed.

    Args:
        name: Name in the table; one that ends with "weighted" has weights.
        records: Records that are written, of which copies are used: losses, and what KAKURENBO wants of the outputs.
        device: Device of the outputs.
    """
    table = {key: column.clone() for key, column in records.items()}
    n = len(next(iter(table.values())))
    trained = torch.zeros(n, dtype=torch.int32, device=device)
    weights = torch.rand(n, device=device) if name.endswith("weighted") else None
    model, source = Shift().to(device), batches(loader_of(n))
    generator = torch.Generator().manual_seed(1)

    def prepare() -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        model.zero_grad()
        inputs, targets = next(source)
        ids = torch.randint(n, (len(targets),), generator=generator).to(device)
        return (
            model(inputs.to(device)),
            targets.to(device),
            ids,
            None if weights is None else weights[ids],
        )

    return Side(
        f"{name}, by hand", lambda prepared: loss_by_hand(table, trained, *prepared), prepare
    )


def loss_by_hand(
    table: Mapping[str, Tensor],
    trained: Tensor,
    outputs: Tensor,
    targets: Tensor,
    ids: Tensor,
    weights: Tensor | None,
) -> Tensor:
    """Returns the mean loss, and writes the records and the counts of trainings of the samples.

    Args:
        table: Records by name, shape (N,).
        trained: Number of times that each sample was trained on, shape (N,), int32.
        outputs: Outputs of the model, shape (B, CLASSES).
        targets: Classes, shape (B,), int64.
        ids: Ids of the samples, shape (B,), int64.
        weights: Weights of the samples, shape (B,); None where all are 1.
    """
    losses = F.cross_entropy(outputs, targets, reduction="none")
    loss = (losses if weights is None else losses * weights).mean()
    with torch.no_grad():
        if "loss" in table:
            table["loss"][ids] = losses
        if "confidence" in table:
            confidence, predicted = outputs.softmax(1).max(1)
            table["confidence"][ids] = confidence
            table["correct"][ids] = predicted == targets
        trained[ids] += 1
    return loss


def step_times(n: int, pairs: int, calls: int, device: torch.device) -> list[Row]:
    """Times (f) a whole step, from the batch to optimizer.step, over that of the unattached loop; it computes little."""

    def side(
        name: str, loader: Any, model: Any, criterion: Any, optimizer: torch.optim.Optimizer
    ) -> Side:
        source = batches(loader)

        def step(_: None) -> None:
            inputs, targets = next(source)
            loss = criterion(model(inputs.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return Side(name, step)

    model = Shift().to(device)
    unattached = side(
        "unattached loop",
        loader_of(n),
        model,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(model.parameters(), lr=0.1),
    )
    sides = [
        side(name, made.run.loader, made.run.model, made.run.criterion, made.optimizer)
        for name, made in criterion_sides(n, device)
    ]
    return compare(unattached, sides, pairs=pairs, calls=calls, warm_up=WARM_UP, device=device)


# Memory


@dataclass(frozen=True)
class MemoryRow:
    """Bytes per sample.

    Attributes:
        name: Name of the method or the baseline.
        value: Bytes on the host and the device together, divided by N.
        limit: Largest value that passes; None where the row only informs.
        device: Part of `value` that is on the device; 0 where the device is the CPU.
    """

    name: str
    value: float
    limit: float | None = None
    device: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the value is within the limit, or there is none."""
        return self.limit is None or self.value <= self.limit

    def as_dict(self) -> dict[str, Any]:
        """Returns the values by name."""
        return {**vars(self), "ok": self.ok}


def records_bytes(n: int, device: torch.device) -> list[MemoryRow]:
    """Measures (c) the memory per sample between epochs: records, and the weights of the plan."""
    rows = []
    for name, make in METHODS.items():
        run = mid_training(make(), n, device).run
        start_epoch(run)
        weights = run.plan.weights
        tables = [*run.records.values(), *([] if weights is None else [weights])]
        held_bytes = sum(table.untyped_storage().nbytes() for table in tables) / n
        rows.append(MemoryRow(name, held_bytes, RECORDS_LIMITS.get(name)))
    return rows


def resident() -> tuple[int, int]:
    """Returns the resident set size of this process, now and at its largest, in bytes.

    Linux has both for this process image alone; `ru_maxrss` also counts what the parent process held before exec.
    """
    status = Path("/proc/self/status")
    if status.exists():
        parts = (line.partition(":") for line in status.read_text().splitlines())
        kilobytes = {name: int(rest.split()[0]) for name, _, rest in parts if "Vm" in name}
        return kilobytes["VmRSS"] * 1024, kilobytes["VmHWM"] * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak, peak


NOTHING, RANDPERM = "nothing (A/A)", "torch.randperm, known to be 8"


def measure_memory(name: str, n: int, device: torch.device) -> dict[str, int]:
    """Returns the peak bytes of three starts of an epoch beyond the run and its records; runs in a process of its own.

    Of `OTHERS` the peak is that of plan_epoch alone, with the plan that it returns.
    """
    torch.set_num_threads(1)
    if name in OTHERS:
        return measure_plan(name, n, device)
    method = METHODS.get(name, thresher.FullData)
    small = mid_training(method(), 1000, device).run
    for _ in range(3):
        start_epoch(small)
    run = attached(method(), n, device).run
    fill(run.records)
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    (before, _), on_device = resident(), torch.cuda.memory_allocated(device) if cuda else 0
    if name == RANDPERM:
        torch.randperm(n)
    elif name != NOTHING:
        for _ in range(3):
            start_epoch(run)
    extra_on_device = torch.cuda.max_memory_allocated(device) - on_device if cuda else 0
    return {"host": resident()[1] - before, "device": extra_on_device}


def measure_plan(name: str, n: int, device: torch.device) -> dict[str, int]:
    """Returns the peak bytes of a plan beyond the records, the plan included."""
    for size in (1000, n):  # the first plan loads what plans need
        method, records = filled(name, size, device)
        (before, _), generator = resident(), torch.Generator().manual_seed(1)
        method.plan_epoch(records, epoch=MIDDLE.get(name, 1), epochs=EPOCHS, generator=generator)
    return {"host": resident()[1] - before, "device": 0}


STARTED = (NOTHING, RANDPERM, *METHODS)


def plan_memory(n: int, device: torch.device, names: Sequence[str] = STARTED) -> list[MemoryRow]:
    """Measures (d) the peak extra memory of plan and order, in a new process for each method."""
    rows = []
    for name in names:
        command = [
            sys.executable,
            "-m",
            "benchmarks.overhead",
            "--memory-of",
            name,
            "--n",
            str(n),
            "--device",
            str(device),
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
        extra = json.loads(done.stdout)
        limited = (
            name in METHODS
            or name.startswith("ImportanceSampling")
            or (name in WEIGHED and name not in DRAWING)
        )
        limit = MEMORY_LIMIT if limited else None
        rows.append(
            MemoryRow(name, (extra["host"] + extra["device"]) / n, limit, extra["device"] / n)
        )
    return rows


def memory_table(rows: Sequence[MemoryRow]) -> str:
    """Returns the rows as text."""
    return lines(
        ("", "B/sample", "limit"),
        [(row.name, f"{row.value:.2f}", judgment(row.limit, row.ok)) for row in rows],
    )


# All together

FEW = 5
"""Number of pairs of the other plans."""

TABLES = ("plan", "other plans", "start", "records", "memory", "criterion", "by hand", "step")


@dataclass(frozen=True)
class Table:
    """The rows of one table, under a title."""

    name: str
    title: str
    n: int
    rows: Sequence[Row] | Sequence[MemoryRow]

    def __str__(self) -> str:
        ratios = [row for row in self.rows if isinstance(row, Row)]
        sizes = [row for row in self.rows if isinstance(row, MemoryRow)]
        return f"{self.title}\n{ratios_table(ratios) if ratios else memory_table(sizes)}\n"

    def as_dict(self) -> dict[str, Any]:
        """Returns the values by name."""
        return {
            "name": self.name,
            "title": self.title,
            "n": self.n,
            "rows": [row.as_dict() for row in self.rows],
        }


def tables(
    sizes: Sequence[int], memory_n: int, only: Sequence[str], device: torch.device, *, quick: bool
) -> Iterator[Table]:
    """Measures and yields one table after the other."""
    for n in sizes:
        # The shorter a call, the more calls are needed for a reliable time.
        pairs, calls = (21, 3) if n < TEN_MILLION / 2 else (11, 1)
        tail = f"over torch.randperm(N), N = {n:,}, {pairs} pairs of {calls} calls"
        if "plan" in only:
            rows = plan_times(("Kakurenbo", "InfoBatch", "UniformSubset"), n, pairs, calls, device)
            yield Table("plan", f"plan_epoch {tail}", n, rows)
        if "other plans" in only:
            title = f"plan_epoch of the other methods over torch.randperm(N), N = {n:,}, {FEW} pairs of 1 call"
            yield Table("other plans", title, n, plan_times(tuple(OTHERS), n, FEW, 1, device))
        if "start" in only:
            rows = start_times(n, pairs, calls, device)
            yield Table("start", f"start of an epoch (plan + order + first batch) {tail}", n, rows)
    n = memory_n
    if "records" in only:
        yield Table(
            "records", f"records and weights of the plan, N = {n:,}", n, records_bytes(n, device)
        )
    if "memory" in only:
        yield Table(
            "memory", f"peak extra memory of plan and order, N = {n:,}", n, plan_memory(n, device)
        )
    if "other plans" in only:
        title = f"peak extra memory of plan_epoch beside the records, its plan included, N = {n:,}"
        yield Table(
            "memory of draws", title, n, plan_memory(n, device, WEIGHED[:1] if quick else WEIGHED)
        )
    n, pairs, calls = sizes[0], 31 if quick else 101, 20
    tail = f"N = {n:,}, {pairs} pairs of {calls} calls"
    if "criterion" in only:
        shape = f"outputs ({BATCH}, {CLASSES})"
        title = f"criterion with attribution and recording over nn.CrossEntropyLoss (informs), {shape}, {tail}"
        yield Table("criterion", title, n, criterion_times(n, pairs, calls, device, backward=False))
        title = f"the same with backward (informs), {tail}"
        yield Table(
            "criterion with backward",
            title,
            n,
            criterion_times(n, pairs, calls, device, backward=True),
        )
    if "by hand" in only:
        title = f"the criterion over a loop that does the same by hand, {tail}"
        yield Table("by hand", title, n, by_hand_times(n, pairs, calls, device))
    if "step" in only:
        title = f"a whole step with nearly nothing to compute over that of the unattached loop (informs), {tail}"
        yield Table("step", title, n, step_times(n, pairs, calls, device))


def about(device: torch.device) -> dict[str, Any]:
    """Returns device and versions, for the results."""
    named = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "device": {"type": device.type, "name": named, "threads": 1},
        "versions": {
            "thresher": thresher.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and writes; returns 1 where a limit is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="measure at the smaller N only, with fewer pairs"
    )
    parser.add_argument(
        "--device",
        type=torch.device,
        default=torch.device("cpu"),
        help="device of the model and the records",
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="JSON file for the results (default: %(default)s)"
    )
    parser.add_argument("--only", nargs="+", choices=TABLES, default=TABLES, help="tables to make")
    parser.add_argument(
        "--n",
        type=int,
        nargs="+",
        help="sizes of the dataset, in ascending order, in place of the standard ones",
    )
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.memory_of is not None:
        print(json.dumps(measure_memory(given.memory_of, given.n[0], given.device)))
        return 0
    sizes = given.n or ([IMAGENET] if given.quick else [IMAGENET, TEN_MILLION])
    made: list[Table] = []
    for table in tables(
        sizes, (given.n or [TEN_MILLION])[-1], given.only, given.device, quick=given.quick
    ):
        print(table, flush=True)
        made.append(table)
    missed = [
        f"{table.name}, N = {table.n:,}: {row.name}"
        for table in made
        for row in table.rows
        if not row.ok
    ]
    results = {
        "benchmark": "overhead",
        "quick": given.quick,
        **about(given.device),
        "missed": missed,
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(
        json.dumps({**results, "tables": [table.as_dict() for table in made]}, indent=1) + "\n"
    )
    print(f"{len(missed)} limits missed" + "".join(f"\n  {one}" for one in missed))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
