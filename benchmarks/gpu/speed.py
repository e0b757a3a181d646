"""Times steps on a device: what the library adds to one, what smaller batches and backward passes of some rows save.

The arms of a measurement take turns. Each turn is a block of steps, before which the device is idle; nothing waits for it
inside. `host_ms` is the time until the host has handed a step over, `device_ms` that between two events around it (on a CPU,
both are the time of the step). Values are medians over rounds.
"""

import contextlib
import gc
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import thresher
from benchmarks.gpu.json_lines import JsonLines, print_table
from benchmarks.gpu.networks import BlockStack, Gpt2, VisionTransformer, resnet
from thresher.subset import kept_rows, subset_backward

KEEP = 0.33
SHARES = (1.0, 0.5, 0.33, 0.1)
ROWS = (64, 128, 256, 512, 1024, 2048)
COMPARED_STEPS = 9
"""Steps before a measurement: a trace is compared with its model in calls 1, 2, 4, 8, ..."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements.

    Attributes:
        rounds: Number of turns of each arm.
        block: Number of steps of a turn.
        planned: Numbers of samples to plan for.
        rows: Numbers of rows of whole batches.
        small: Whether networks are tiny.
    """

    rounds: int
    block: int
    planned: tuple[int, ...]
    rows: tuple[int, ...]
    small: bool


LARGE = Sizes(rounds=15, block=4, planned=(10**7, 10**8), rows=ROWS, small=False)
SMALL = Sizes(rounds=2, block=1, planned=(10**4,), rows=(4, 8), small=True)


@dataclass(frozen=True)
class Case:
    """A network with batches for it.

    Attributes:
        make: Function that returns the network.
        shape: Shape of an input without its batch dimension.
        classes: Number of classes, or of tokens.
        half: Whether it computes under autocast to bfloat16.
        batch: Number of rows of a batch.
        tokens: Whether inputs are tokens, each of which has a target.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    batch: int
    half: bool = True
    tokens: bool = False

    def data(self, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns random inputs and targets of n samples, as they lie in memory best."""
        if self.tokens:
            ids = torch.randint(self.classes, (n, *self.shape), device=device)
            return ids, ids.roll(-1, 1)
        x = torch.randn(n, *self.shape, device=device)
        x = x.to(memory_format=torch.channels_last) if x.dim() == 4 else x
        return x, torch.randint(self.classes, (n,), device=device)

    def network(self, device: torch.device) -> nn.Module:
        """Returns the network on a device; its images have the channels last."""
        torch.manual_seed(0)
        model = self.make().to(device)
        return model.to(memory_format=torch.channels_last) if len(self.shape) == 3 else model  # pyright: ignore[reportCallIssue]

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Returns the context of a forward pass."""
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.half)


def mlp(width: int) -> nn.Module:
    """Returns a network that computes next to nothing."""
    return nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 10))


def cases(sizes: Sizes) -> dict[str, Case]:
    """Returns the networks by name: of usual shapes, or tiny."""
    if sizes.small:
        tiny = {"width": 16, "heads": 2, "layers": 1}
        return {
            "mlp": Case(lambda: mlp(8), (32,), 10, 8, half=False),
            "resnet18, 64 px": Case(
                lambda: resnet((1, 1), width=8, classes=10), (3, 16, 16), 10, 8
            ),
            "blocks, 64": Case(lambda: BlockStack(**tiny, classes=10), (4, 16), 10, 8),
            "resnet18": Case(lambda: resnet((1, 1), width=8, classes=10), (3, 16, 16), 10, 12),
            "resnet50": Case(
                lambda: resnet((1, 1), width=4, bottleneck=True, classes=10), (3, 16, 16), 10, 12
            ),
            "vit_b": Case(
                lambda: VisionTransformer(size=16, patch=8, **tiny, classes=10), (3, 16, 16), 10, 12
            ),
            "gpt2": Case(lambda: Gpt2(**tiny, vocabulary=50, length=8), (8,), 50, 12, tokens=True),
        }
    eighteen, fifty = (2, 2, 2, 2), (3, 4, 6, 3)
    return {
        "mlp": Case(lambda: mlp(64), (32,), 10, 1024, half=False),
        "resnet18, 64 px": Case(lambda: resnet(eighteen), (3, 64, 64), 1000, 512),
        "blocks, 64": Case(BlockStack, (64, 768), 1000, 128),
        "resnet18": Case(lambda: resnet(eighteen), (3, 224, 224), 1000, 256),
        "resnet50": Case(lambda: resnet(fifty, bottleneck=True), (3, 224, 224), 1000, 128),
        "vit_b": Case(VisionTransformer, (3, 224, 224), 1000, 64),
        "gpt2": Case(Gpt2, (256,), 50257, 64, tokens=True),
    }


# Time


@dataclass
class Spent:
    """Times of blocks of steps of one arm, in milliseconds a step.

    Attributes:
        host: Times until the host has handed the steps over.
        device: Times between events around the steps.
    """

    host: list[float]
    device: list[float]

    def medians(self) -> dict[str, float]:
        """Returns the median times."""
        return {
            "host_ms": statistics.median(self.host),
            "device_ms": statistics.median(self.device),
        }


def wait(device: torch.device) -> None:
    """Waits until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def in_turns(
    arms: Mapping[str, Callable[[], Any]], sizes: Sizes, device: torch.device
) -> dict[str, Spent]:
    """Times the arms, which take turns in an order that is drawn anew in each round.

    Args:
        arms: Functions that make one step each.
        sizes: Number of rounds and steps.
        device: Device of the steps.
    """
    order, blocks = random.Random(0), []
    for step in arms.values():  # what a first step makes is no part of another
        for _ in range(2 if sizes.small else COMPARED_STEPS):
            step()
    gc.collect()
    for _ in range(sizes.rounds):
        for name in order.sample(list(arms), len(arms)):
            wait(device)
            events = (
                [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                if device.type == "cuda"
                else []
            )
            began = time.perf_counter()
            if events:
                events[0].record()
            for _ in range(sizes.block):
                arms[name]()
            if events:
                events[1].record()
            blocks.append((name, time.perf_counter() - began, events))
    wait(device)
    spent = {name: Spent([], []) for name in arms}
    for name, seconds, events in blocks:
        spent[name].host.append(1e3 * seconds / sizes.block)
        spent[name].device.append(
            (events[0].elapsed_time(events[1]) if events else 1e3 * seconds) / sizes.block
        )
    return spent


# What the library adds to a step

ARMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "FullData": (thresher.FullData(), {}),
    "0.5": (0.5, {}),
    "observe": (thresher.FullData(), {"observe": True}),
    "once": (thresher.SelectiveBackprop(keep=KEEP), {"forward_passes": "once"}),
    "twice": (thresher.SelectiveBackprop(keep=KEEP), {"forward_passes": "twice"}),
}


def steps_of(
    case: Case, data: tuple[Tensor, ...], device: torch.device, arm: str, *, batch: int
) -> Iterator[None]:
    """Trains a network of its own, one step per turn.

    Args:
        case: The network.
        data: Tensors of the samples.
        device: Their device.
        arm: Name in `ARMS`; another one trains without the library.
        batch: Number of rows of a batch.
    """
    model, criterion = case.network(device), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    loader: Any = thresher.TensorLoader(*data, batch_size=batch, drop_last=True)
    call: Any = model
    loss_of: Any = criterion
    if arm in ARMS:
        method, settings = ARMS[arm]
        given = {"loader": loader, "criterion": criterion, "model": model, "optimizer": optimizer}
        run = thresher.attach(method, epochs=10**6, **given, **settings)
        loader, call, loss_of = run.loader, run.model, run.criterion
    for _ in itertools.count():
        for x, y in loader:
            with case.autocast(device):
                loss = loss_of(call(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            yield


def overhead(case: Case, sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Times steps of each arm and of the plain loop, with whole and with half batches."""
    data = case.data(case.batch * (8 if sizes.small else 32), device)
    arms = {
        "plain": case.batch,
        "plain, half batches": case.batch // 2,
        **dict.fromkeys(ARMS, case.batch),
    }
    steps = {name: steps_of(case, data, device, name, batch=batch) for name, batch in arms.items()}
    turns = in_turns({name: _next_of(iterator) for name, iterator in steps.items()}, sizes, device)
    medians = {name: spent.medians() for name, spent in turns.items()}
    for name, found in medians.items():
        plain = medians["plain, half batches" if name == "0.5" else "plain"]
        found["added_host_ms"], found["added_ms"] = (
            found[key] - plain[key] for key in ("host_ms", "device_ms")
        )
    return {"batch": case.batch, "arms": medians, "loader_batches_per_step": {"twice": 1 / KEEP}}


def _next_of(iterator: Iterator[None]) -> Callable[[], None]:
    return lambda: next(iterator)


# What smaller batches save


def half_batches(case: Case, sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Times steps of the plain loop with whole and with half batches, of several sizes."""
    found: dict[str, Any] = {}
    for rows in sizes.rows:
        try:
            data = case.data(2 * rows, device)
            arms = {
                name: _next_of(steps_of(case, data, device, "plain", batch=batch))
                for name, batch in (("whole", rows), ("half", rows // 2))
            }
            spent = {name: each.medians() for name, each in in_turns(arms, sizes, device).items()}
        except torch.OutOfMemoryError:
            found[str(rows)] = "out of memory"
            continue
        finally:
            _free(device)
        found[str(rows)] = {
            **spent,
            "half_over_whole": spent["half"]["device_ms"] / spent["whole"]["device_ms"],
        }
    return {"rows": found}


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# What a backward pass of some rows costs


def subset(case: Case, sizes: Sizes, device: torch.device, *, compiled: bool) -> dict[str, Any]:
    """Times steps without optimizer that keep some rows, over the limit: the forward pass and that share of the backward pass.

    Args:
        case: The network.
        sizes: Sizes of the measurement.
        device: Device.
        compiled: Whether the network is compiled, with and without `subset_backward`.
    """
    model = case.network(device)
    plain: Any = torch.compile(model) if compiled else model
    fast: Any = subset_backward(model, strict=True, compile=compiled)
    x, y = case.data(case.batch, device)

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())

    def forward() -> None:
        with case.autocast(device):
            loss_of(plain(x), y)

    def full() -> None:
        with case.autocast(device):
            loss = loss_of(plain(x), y)
        loss.backward()
        model.zero_grad(set_to_none=True)

    def keep(share: float) -> Callable[[], None]:
        rows = torch.arange(max(1, round(share * case.batch)), device=device)

        def step() -> None:
            with case.autocast(device):
                loss = loss_of(kept_rows(fast(x), rows), y[rows])
            loss.backward()
            model.zero_grad(set_to_none=True)

        return step

    arms = {"forward": forward, "full": full, **{str(share): keep(share) for share in SHARES}}
    spent = {name: each.medians() for name, each in in_turns(arms, sizes, device).items()}
    first, whole, over = spent["forward"]["device_ms"], spent["full"]["device_ms"], {}
    for share in SHARES:
        rows = max(1, round(share * case.batch))
        over[str(share)] = spent[str(share)]["device_ms"] / (
            first + rows / case.batch * (whole - first)
        )
    return {
        "batch": case.batch,
        "arms": spent,
        "over_limit": over,
        "tracing_s": fast.tracing_s,
        "fallback": fast.fallback,
    }


# Plans


def planning(name: str, n: int, sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Times plans of an epoch, with records on the device.

    Args:
        name: Name of the method.
        n: Number of samples.
        sizes: Number of rounds.
        device: Device of the records.
    """
    method: Any = {"winnow": thresher.Winnow(), "kakurenbo": thresher.Kakurenbo()}[name]
    records, generator = {}, torch.Generator(device).manual_seed(0)
    for column, kind in method.columns().items():
        values = torch.rand(n, generator=generator, device=device)
        records[column] = (
            (values > 0.3).to(kind.dtype) if kind.dtype is torch.bool else values.to(kind.dtype)
        )
    seconds = []
    for turn in range(min(sizes.rounds, 3)):
        wait(device)
        began = time.perf_counter()
        method.plan_epoch(
            records, epoch=5, epochs=10, generator=torch.Generator().manual_seed(turn)
        )
        wait(device)
        seconds.append(time.perf_counter() - began)
    return {"samples": n, "seconds": statistics.median(seconds)}


# All of it


def measurements(sizes: Sizes, device: torch.device) -> dict[str, Callable[[], dict[str, Any]]]:
    """Returns functions that measure, by name, in the order in which they matter."""
    known = cases(sizes)
    made: dict[str, Callable[[], dict[str, Any]]] = {}
    for name in ("mlp", "resnet18, 64 px", "blocks, 64"):
        made[f"overhead: {name}"] = lambda case=known[name]: overhead(case, sizes, device)
    for name in ("gpt2", "vit_b", "resnet50", "resnet18"):
        made[f"subset: {name}"] = lambda case=known[name]: subset(
            case, sizes, device, compiled=False
        )
    for n in sizes.planned:
        for name in ("winnow", "kakurenbo"):
            made[f"planning: {name}, {n:,}"] = lambda name=name, n=n: planning(
                name, n, sizes, device
            )
    for name in ("resnet18, 64 px", "blocks, 64"):
        made[f"half batches: {name}"] = lambda case=known[name]: half_batches(case, sizes, device)
    if not sizes.small:  # compiling takes as long for a tiny network
        made["subset: vit_b, compiled"] = lambda: subset(
            known["vit_b"], sizes, device, compiled=True
        )
    return made


def run(lines: JsonLines, device: torch.device, *, until: float, smoke: bool) -> int:
    """Makes the measurements that have no result yet, and prints a table of all; returns 1 if one failed.

    Args:
        lines: Results.
        device: Device.
        until: Time after which no measurement begins.
        smoke: Whether networks are tiny.
    """
    for name, measure in measurements(SMALL if smoke else LARGE, device).items():
        if name in lines.names():
            continue
        if time.time() > until:
            print("the minutes are over")
            break
        began = time.time()
        try:
            found = measure()
        except Exception as error:  # the others are measured all the same
            found = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        _free(device)
        lines.add(name, **found, seconds_taken=round(time.time() - began, 1))
        print(f"{name}: {time.time() - began:.1f} s", flush=True)
    results = lines.results()
    show(results)
    return int(any("error" in result for result in results))


def show(results: list[dict[str, Any]]) -> None:
    """Prints the results in tables.

    Args:
        results: Lines of the file.
    """
    steps, shares, halves, plans, errors = [], [], [], [], []
    for result in results:
        name = result["name"]
        if "error" in result:
            errors.append((name, result["error"][:120]))
        elif name.startswith("overhead"):
            keys = ("host_ms", "device_ms", "added_host_ms", "added_ms")
            steps += [
                (name, arm, *(found[key] for key in keys)) for arm, found in result["arms"].items()
            ]
        elif name.startswith("subset"):
            over = result["over_limit"]
            shares.append(
                (
                    name,
                    result["batch"],
                    result["arms"]["full"]["device_ms"],
                    *over.values(),
                    result["tracing_s"],
                )
            )
        elif name.startswith("half"):
            for rows, found in result["rows"].items():
                cells = (
                    [found] * 3
                    if isinstance(found, str)
                    else [found["whole"]["device_ms"], found["half"]["device_ms"]]
                )
                halves.append(
                    (
                        name,
                        rows,
                        *cells[:2],
                        found if isinstance(found, str) else found["half_over_whole"],
                    )
                )
        else:
            plans.append((name, result["seconds"]))
    print_table(("", "arm", "host ms", "device ms", "host ms added", "device ms added"), steps)
    print_table(
        (
            "time over the limit",
            "rows",
            "full ms",
            *(f"keep {share:g}" for share in SHARES),
            "tracing s",
        ),
        shares,
    )
    print_table(("", "rows", "whole ms", "half ms", "half over whole"), halves)
    print_table(("", "s"), plans)
    print_table(("failed", "error"), errors)
