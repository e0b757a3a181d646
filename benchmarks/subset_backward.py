"""Times steps in which `subset_backward` leaves rows out of the backward pass, beside the smallest possible time.

`python -m benchmarks.subset_backward [--quick] [--only MODEL ...] [--device cuda] [--dtype bfloat16] [--out FILE.json]
[--figure FILE.html] [--markdown]`; exit code 1 where a limit is missed.
"""

import argparse
import ctypes
import gc
import itertools
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "KINETO_LOG_LEVEL", "99"
)  # the profiler, which counts memory, says when it starts and stops
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import thresher
from benchmarks.measure import Interval, Side, judgment, lines, median_interval, seconds_in_turns
from benchmarks.overhead import ROOT, about
from thresher.subset import kept_rows
from thresher_lab.advise.pace import torch_threads
from thresher_lab.report.panels import Curve, Panel, check_figure_path, write_panels
from thresher_lab.tasks import vision

RESULTS = ROOT / "benchmarks" / "results" / "subset_backward.json"
BATCH, CLASSES, SIZE = 128, 10, 32
KEEP = (1.0, 0.75, 0.5, 0.33, 0.25, 0.1)
FORWARD, FULL, AGAIN = "forward", "full", "full again (A/A)"
BINDING = "kept_rows"
FORMS = (BINDING, "subset", "masking", "twice")
"""`kept_rows`: the criterion on the kept rows alone. `subset`: the losses of the batch, then `losses[kept].mean()`. `masking`:
the same without `subset_backward`. `twice`: a forward of the batch without gradients, then forward and backward of the rows."""
MEMORY_LIMIT = 1.1


def time_limit(keep: float, *, small: bool = False) -> float:
    """Returns the largest ratio of a step to its ideal that passes.

    Args:
        keep: Share of the rows that is kept.
        small: Whether calling the operations takes a large part of the time. Default: False.
    """
    if small and keep < 1:
        return 1.15
    return 1.08 if keep <= 0.5 else 1.1 if keep < 1 else 1.05


# Models


def conv_gn() -> nn.Module:
    """Returns a network of three convolutions with group normalization."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 128, 3, padding=1), nn.GroupNorm(8, 128), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES)),
    )


class Block(nn.Module):
    """Two convolutions with batch normalization around a short cut without parameters (He et al. 2015, option A)."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.stride, self.more = (1, 0) if before == after else (2, after - before)
        self.conv1 = nn.Conv2d(before, after, 3, self.stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)

    def forward(self, x: Tensor) -> Tensor:
        """Maps shape (B, before, h, w) to (B, after, h / stride, w / stride)."""
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        short = (
            F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more))
            if self.more
            else x
        )
        return torch.relu(y + short)


def resnet20() -> nn.Module:
    """Returns ResNet-20 for 32 x 32 images, with batch normalization by batch statistics."""
    widths = [16, *[16] * 3, *[32] * 3, *[64] * 3]
    blocks = [Block(before, after) for before, after in itertools.pairwise(widths)]
    stem = (nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    return nn.Sequential(
        *stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES)
    )


class Layer(nn.Module):
    """A transformer layer, normalized before each part."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps shape (B, T, width) to the same shape."""
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        attended = F.scaled_dot_product_attention(*qkv.unbind(2), is_causal=self.causal)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """A small vision transformer: patches of 4 x 4, classified by their mean."""

    def __init__(self, width: int = 96, heads: int = 3, depth: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.positions = nn.Parameter(0.02 * torch.randn((SIZE // 4) ** 2, width))
        self.layers = nn.Sequential(*(Layer(width, heads, causal=False) for _ in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        """Maps shape (B, 3, SIZE, SIZE) to (B, CLASSES)."""
        patches = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.layers(patches).mean(1))


VOCABULARY, CONTEXT = 256, 64


class LM(nn.Module):
    """A small causal language model."""

    def __init__(self, width: int = 96, heads: int = 3, depth: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        self.layers = nn.Sequential(*(Layer(width, heads, causal=True) for _ in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps shape (B, T) to (B, T, VOCABULARY)."""
        return self.head(self.layers(self.tokens(tokens) + self.positions))


class Encoder(nn.Module):
    """Two layers of `nn.TransformerEncoderLayer` with their defaults: dropout .1, ReLU, normalized after each part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.layers, self.head = (
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            nn.Linear(width, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps shape (B, T, width) to (B, CLASSES)."""
        return self.head(self.layers(x).mean(1))


class HuggingFace(nn.Module):
    """The scores of a model of Transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps shape (B, T) to (B, CLASSES), or to (B, T, VOCABULARY) for a language model."""
        return self.model(tokens).logits


def bert(width: int = 128) -> nn.Module:
    """Returns a small BERT of Transformers with a head for classes."""
    vision.prepare()
    from transformers import BertConfig, BertForSequenceClassification

    sizes: dict[str, Any] = {
        "num_labels": CLASSES,
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 4 * width,
    }
    return HuggingFace(BertForSequenceClassification(BertConfig(**sizes)))


def gpt2(width: int = 128) -> nn.Module:
    """Returns a small GPT-2 of Transformers."""
    vision.prepare()
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "use_cache": False,
        "n_positions": CONTEXT,
        "n_embd": width,
        "n_layer": 2,
        "n_head": 4,
    }
    return HuggingFace(GPT2LMHeadModel(GPT2Config(**sizes)))


def double(before: int, after: int) -> nn.Module:
    """Returns two convolutions with group normalization."""
    return nn.Sequential(
        *(nn.Conv2d(before, after, 3, padding=1, bias=False), nn.GroupNorm(4, after), nn.ReLU()),
        *(nn.Conv2d(after, after, 3, padding=1, bias=False), nn.GroupNorm(4, after), nn.ReLU()),
    )


class UNet(nn.Module):
    """A U-Net of two levels that predicts a class for every pixel."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = (
            double(3, width),
            double(width, 2 * width),
            double(2 * width, 4 * width),
        )
        self.up2, self.up1 = (
            nn.ConvTranspose2d(4 * width, 2 * width, 2, 2),
            nn.ConvTranspose2d(2 * width, width, 2, 2),
        )
        self.join2, self.join1 = double(4 * width, 2 * width), double(2 * width, width)
        self.head = nn.Conv2d(width, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Maps shape (B, 3, SIZE, SIZE) to (B, CLASSES, SIZE, SIZE)."""
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        three = self.bottom(F.max_pool2d(two, 2))
        two = self.join2(torch.cat([two, self.up2(three)], 1))
        return self.head(self.join1(torch.cat([one, self.up1(two)], 1)))


def losses_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the cross-entropy, samples first."""
    return F.cross_entropy(outputs, targets, reduction="none")


def losses_of_tokens(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the cross-entropy, shape (B, T), where the classes come last."""
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none").view_as(
        targets
    )


@dataclass(frozen=True)
class Task:
    """A model and its data.

    Attributes:
        title: Name in tables.
        model: Function that makes the model.
        batch: Function that returns inputs and targets of n samples.
        losses: Function that returns the losses of outputs and targets, samples first.
        small: Whether its operations are so small that calling them takes a large part of the time; the limit is then 1.15.
    """

    title: str
    model: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    losses: Callable[[Tensor, Tensor], Tensor] = losses_of
    small: bool = False


def images(n: int) -> tuple[Tensor, Tensor]:
    """Returns n random images with a class for each."""
    return torch.randn(n, 3, SIZE, SIZE), torch.randint(CLASSES, (n,))


def dense(n: int) -> tuple[Tensor, Tensor]:
    """Returns n random images with a class for every pixel."""
    return torch.randn(n, 3, SIZE, SIZE), torch.randint(CLASSES, (n, SIZE, SIZE))


def texts(n: int) -> tuple[Tensor, Tensor]:
    """Returns n random token sequences with the next token for every token."""
    tokens = torch.randint(VOCABULARY, (n, CONTEXT + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def sequences(width: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Returns a function of n that returns n random sequences of 32 vectors with a class for each."""
    return lambda n: (torch.randn(n, 32, width), torch.randint(CLASSES, (n,)))


def tokens(n: int) -> tuple[Tensor, Tensor]:
    """Returns n random token sequences with a class for each."""
    return torch.randint(VOCABULARY, (n, CONTEXT)), torch.randint(CLASSES, (n,))


TASKS = {
    "conv-gn": Task("conv net, GroupNorm", conv_gn, images),
    "resnet20": Task("ResNet-20, BatchNorm", resnet20, images),
    "vit": Task("ViT", ViT, images),
    "lm": Task("causal LM", LM, texts, losses_of_tokens),
    "unet": Task("U-Net, dense loss", UNet, dense),
    "encoder-64": Task(
        "nn.TransformerEncoder, width 64", lambda: Encoder(64), sequences(64), small=True
    ),
    "encoder-128": Task("nn.TransformerEncoder, width 128", lambda: Encoder(128), sequences(128)),
    "encoder-256": Task("nn.TransformerEncoder, width 256", lambda: Encoder(256), sequences(256)),
    "bert": Task("BERT of Transformers", bert, tokens),
    "gpt2": Task("GPT-2 of Transformers", gpt2, texts, losses_of_tokens),
}


# Steps

Step = Callable[[Tensor], object]


def steps_of(task: Task, batch: int, device: torch.device, dtype: torch.dtype) -> dict[str, Step]:
    """Returns the timed functions by name; their argument is the rows to keep. A step is forward, loss, backward, zero_grad."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, (inputs, targets) = task.model().to(device), task.batch(batch)
    subset = thresher.subset_backward(model, strict=True)
    x, y = inputs.to(device), targets.to(device)

    def precision() -> AbstractContextManager[Any]:
        return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)

    def finish(loss: Tensor) -> None:
        loss.backward()
        model.zero_grad(set_to_none=True)

    def forward(_: Tensor) -> object:
        with precision():
            return model(x)

    def full(_: Tensor) -> None:
        with precision():
            loss = task.losses(model(x), y).mean()
        finish(loss)

    def loop(network: nn.Module) -> Step:
        def step(kept: Tensor) -> None:
            with precision():
                losses = task.losses(network(x), y)
            finish(losses[kept].mean())

        return step

    def criterion_on_kept(kept: Tensor) -> None:
        with precision():
            loss = task.losses(kept_rows(subset(x), kept), y[kept]).mean()
        finish(loss)

    def twice(kept: Tensor) -> None:
        with precision():
            with torch.no_grad():
                model(x)
            loss = task.losses(model(x[kept]), y[kept]).mean()
        finish(loss)

    forms = dict(zip(FORMS, (criterion_on_kept, loop(subset), loop(model), twice), strict=True))
    return {FORWARD: forward, FULL: full, AGAIN: full, **forms}


def rows_of(keep: float, batch: int, device: torch.device) -> Callable[[], Tensor]:
    """Returns a function that draws the rows to keep in one round after the other; all such functions draw the same rows."""
    seeds, k = itertools.count(), round(keep * batch)

    def draw() -> Tensor:
        generator = torch.Generator().manual_seed(next(seeds))
        return torch.randperm(batch, generator=generator)[:k].sort().values.to(device)

    return draw


def peak_memory(step: Step, kept: Tensor) -> int:
    """Returns the largest number of bytes that a step allocates at one time."""
    if kept.device.type == "cuda":
        step(kept)
        torch.cuda.synchronize(kept.device)
        torch.cuda.reset_peak_memory_stats(kept.device)
        before = torch.cuda.memory_allocated(kept.device)
        step(kept)
        return torch.cuda.max_memory_allocated(kept.device) - before
    gc.collect()  # memory of an earlier step could otherwise be freed, and counted, in this one
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step(kept)
    recorded: Any = profile.profiler
    changes = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in changes))


@dataclass(frozen=True)
class Row:
    """A form of step at one share of kept rows.

    Attributes:
        keep: Share of the rows to keep.
        kept: Number of rows kept.
        form: Name of the form, one of FORMS.
        over_ideal: Step time over that of the ideal step, forward + kept / batch * (full step - forward).
        over_full: Step time over that of the full step.
        seconds: Median seconds of a step.
        memory: Peak memory over that of the full step.
        limit: Largest `over_ideal` that passes; None where the row only informs.
    """

    keep: float
    kept: int
    form: str
    over_ideal: Interval
    over_full: Interval
    seconds: float
    memory: float
    limit: float | None

    @property
    def time_ok(self) -> bool:
        """Whether the time is within the limit, or there is none."""
        return self.limit is None or self.over_ideal.median <= self.limit

    @property
    def memory_ok(self) -> bool:
        """Whether the memory is within the limit, or there is none."""
        return self.limit is None or self.memory <= MEMORY_LIMIT

    def as_dict(self) -> dict[str, Any]:
        """Returns the values by name."""
        return {**asdict(self), "time_ok": self.time_ok, "memory_ok": self.memory_ok}


@dataclass(frozen=True)
class Table:
    """All rows of one model.

    Attributes:
        name: Name of the model.
        title: Description of the measurement.
        full_s: Median seconds of a full step.
        full_bytes: Peak memory of a full step.
        forward: Share of the full step that the forward takes.
        again: The full step over itself (A/A).
        rows: The rows, by share kept, then by form.
    """

    name: str
    title: str
    full_s: float
    full_bytes: int
    forward: Interval
    again: Interval
    rows: Sequence[Row]

    def __str__(self) -> str:
        full = f"full step {self.full_s * 1e3:.1f} ms, peak memory {self.full_bytes / 2**20:.1f} MiB; forward {self.forward} of it"
        header = (
            "keep",
            "time:",
            BINDING,
            "limit",
            *FORMS[1:],
            "memory:",
            BINDING,
            "limit",
            *FORMS[1:],
        )
        body = []
        for _, group in itertools.groupby(self.rows, lambda row: row.keep):
            row = {one.form: one for one in group}
            bound = row[BINDING]
            times, sizes = (
                [str(row[form].over_ideal) for form in FORMS],
                [f"{row[form].memory:.3f}" for form in FORMS],
            )
            limits = judgment(bound.limit, bound.time_ok), judgment(MEMORY_LIMIT, bound.memory_ok)
            body.append(
                (
                    f"{bound.keep:g}",
                    "",
                    times[0],
                    limits[0],
                    *times[1:],
                    "",
                    sizes[0],
                    limits[1],
                    *sizes[1:],
                )
            )
        return f"{self.title}\n{full}; {AGAIN} {self.again}\n{lines(header, body)}\n"

    def missed(self) -> list[str]:
        """Returns the names of the rows that are over their limits."""
        bound = [row for row in self.rows if row.limit is not None]
        times = [
            f"{self.name}, keep {row.keep:g}: time {row.over_ideal.median:.3f}"
            for row in bound
            if not row.time_ok
        ]
        return times + [
            f"{self.name}, keep {row.keep:g}: memory {row.memory:.3f}"
            for row in bound
            if not row.memory_ok
        ]

    def as_dict(self) -> dict[str, Any]:
        """Returns the values by name."""
        return {**asdict(self), "rows": [row.as_dict() for row in self.rows]}


def measure(
    name: str,
    keeps: Sequence[float],
    rounds: int,
    batch: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Table:
    """Times all shares and forms of one model; a round times all of them, and the full step and the forward pass."""
    task = TASKS[name]
    steps = steps_of(task, batch, device, dtype)
    every = rows_of(1.0, batch, device)
    cases = [(keep, form) for keep in keeps for form in FORMS]
    alone = [Side(form, steps[form], every) for form in (FORWARD, FULL, AGAIN)]
    sides = [
        *alone,
        *(
            Side(f"{form} {keep}", steps[form], rows_of(keep, batch, device))
            for keep, form in cases
        ),
    ]
    cpu, wall = seconds_in_turns(sides, pairs=rounds, device=device)
    forward, full, again, *others = cpu if device.type == "cpu" else wall
    with torch_threads(1):
        full_bytes = peak_memory(steps[FULL], every())
        bytes_of = {
            (keep, form): peak_memory(steps[form], rows_of(keep, batch, device)())
            for keep, form in cases
        }
    rows = []
    for (keep, form), seconds in zip(cases, others, strict=True):
        kept = round(keep * batch)
        ideal = [f + kept / batch * (t - f) for f, t in zip(forward, full, strict=True)]
        rows.append(
            Row(
                keep=keep,
                kept=kept,
                form=form,
                over_ideal=median_interval(
                    [s / least for s, least in zip(seconds, ideal, strict=True)]
                ),
                over_full=median_interval(
                    [s / whole for s, whole in zip(seconds, full, strict=True)]
                ),
                seconds=statistics.median(seconds),
                memory=bytes_of[keep, form] / full_bytes,
                limit=time_limit(keep, small=task.small) if form == BINDING else None,
            )
        )
    return Table(
        name=name,
        title=f"{task.title}: step over ideal step, batch {batch}, {str(dtype).removeprefix('torch.')}, {rounds} rounds",
        full_s=statistics.median(full),
        full_bytes=full_bytes,
        forward=median_interval([f / whole for f, whole in zip(forward, full, strict=True)]),
        again=median_interval([a / whole for a, whole in zip(again, full, strict=True)]),
        rows=rows,
    )


def keep_memory() -> None:
    """Makes glibc keep freed memory for this process.

    Memory that is returned to the system at the end of a step is mapped again, page by page, in the next one. The amount
    depends on the place of blocks, and changes a step of 150 ms by a tenth, whatever runs in it.
    """
    adjust = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if adjust is not None:
        never_trim, never_map = (-1, -1), (-4, 0)
        adjust(*never_trim)
        adjust(*never_map)


def tables(names: Sequence[str], *settings: Any) -> Iterator[Table]:
    """Measures and yields the table of one model after the other."""
    for name in names:
        yield measure(name, *settings)


def step_time_panel(table: Mapping[str, Any], batch: int) -> Panel:
    """The panel of step times of one model.

    Args:
        table: Entry of `tables` in the results.
        batch: Number of rows of a batch.
    """
    curves = []
    for form in FORMS:
        rows = [row for row in table["rows"] if row["form"] == form]
        points = [
            (row["kept"] / batch, *(row["over_full"][end] for end in ("median", "low", "high")))
            for row in rows
        ]
        curves.append(Curve(form, points))
    forward = table["forward"]
    ends = [
        [forward[end] + x * (1 - forward[end]) for end in ("median", "low", "high")]
        for x, *_ in curves[0].points
    ]
    ideal = Curve("ideal", [(x, *at) for (x, *_), at in zip(curves[0].points, ends, strict=True)])
    return Panel(
        TASKS[table["name"]].title, "share of rows kept", "step time / full step", [ideal, *curves]
    )


def markdown(results: Mapping[str, Any]) -> str:
    """Returns the table of docs/evidence/subset-backward.md."""
    header = ("model", "keep", "`kept_rows`", "`subset`", "`masking`", "`twice`", "memory")
    body = [header, tuple("---" for _ in header)]
    for table in results["tables"]:
        for keep, group in itertools.groupby(table["rows"], lambda row: row["keep"]):
            row = {one["form"]: one for one in group}
            at = row[BINDING]["over_ideal"]
            bound = f"{at['median']:.3f} [{at['low']:.3f}, {at['high']:.3f}]"
            others = [f"{row[form]['over_ideal']['median']:.3f}" for form in FORMS[1:]]
            body.append(
                (
                    TASKS[table["name"]].title,
                    f"{keep:g}",
                    bound,
                    *others,
                    f"{row[BINDING]['memory']:.3f}",
                )
            )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in body)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and writes; returns 1 where a limit is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.subset_backward", description=__doc__
    )
    parser.add_argument("--quick", action="store_true", help="measure a few rounds only")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=TASKS,
        default=list(TASKS),
        metavar="MODEL",
        help="models to measure, out of %(choices)s",
    )
    parser.add_argument(
        "--keep", nargs="+", type=float, default=KEEP, choices=KEEP, help="shares of rows to keep"
    )
    parser.add_argument(
        "--rounds", type=int, help="number of rounds (default: 21, or 5 with --quick)"
    )
    parser.add_argument(
        "--batch",
        type=int,
        default=BATCH,
        help="number of samples of a batch (default: %(default)s)",
    )
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="data type of autocast",
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="JSON file for the results (default: %(default)s)"
    )
    parser.add_argument(
        "--figure", type=Path, help="file for a chart of the step times: .html, .svg or .png"
    )
    parser.add_argument(
        "--markdown",
        action="store_true",
        help="also print the table of docs/evidence/subset-backward.md",
    )
    given = parser.parse_args(arguments)
    rounds, dtype = given.rounds or (5 if given.quick else 21), getattr(torch, given.dtype)
    if given.figure is not None:
        check_figure_path(given.figure)
    made: list[Table] = []
    keep_memory()
    for table in tables(given.only, given.keep, rounds, given.batch, given.device, dtype):
        print(table, flush=True)
        made.append(table)
    missed = [one for table in made for one in table.missed()]
    settings = {
        "batch": given.batch,
        "dtype": given.dtype,
        "rounds": rounds,
        "memory_limit": MEMORY_LIMIT,
    }
    results = {
        "benchmark": "subset_backward",
        "quick": given.quick,
        **about(given.device),
        **settings,
        "missed": missed,
    }
    results["tables"] = [table.as_dict() for table in made]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(results, indent=1) + "\n")
    if given.figure is not None:
        write_panels(
            [step_time_panel(table, given.batch) for table in results["tables"]], given.figure
        )
    if given.markdown:
        print(markdown(results), end="\n\n")
    print(f"{len(missed)} limits missed" + "".join(f"\n  {one}" for one in missed))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
