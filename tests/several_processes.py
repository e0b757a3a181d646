"""What `integration/test_several_processes.py` runs in two processes; one start of them is enough for all cases."""

import copy
import datetime
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from subset_cases import conv_net, distance, numbers, trace_once_per_architecture
from thresher.losses.adapters import adapt
from thresher.methods.big_loss import BigLoss
from thresher.plans import BatchPlan
from thresher.run.attach import build_run
from thresher.run.parts import Arguments, RunConfig, SelectionMode
from thresher.run.run import Run
from thresher.run.trained_model import TrainedModel
from thresher.subset import SubsetBackward, kept_rows, subset_backward

WORLD, STEPS, BATCH, KEPT, CLASSES = 2, 6, 12, 4, 5


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(2, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x)))


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem, self.first, self.second = (
            nn.Conv2d(3, width, 3, padding=1),
            Block(width),
            Block(width),
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(self.stem(x))).mean((2, 3)))


def fresh(kind: type[nn.Module] = Net) -> Any:
    torch.manual_seed(3)
    return kind()


def sharded(model: Any) -> Any:
    return fully_shard(subset_backward(model))


def sharded_by_blocks(model: Any) -> Any:
    for name in ("first", "second"):
        setattr(model, name, fully_shard(subset_backward(getattr(model, name))))
    return fully_shard(model)


X = numbers(STEPS, WORLD * BATCH, 3, 8, 8, seed=7, dtype=torch.float32)
Y = torch.randint(CLASSES, (STEPS, WORLD * BATCH), generator=torch.Generator().manual_seed(8))


def kept_by(rank: int, step: int, losses: Tensor) -> Tensor:
    """A third of the rows, with the largest losses; none in the first process at steps 0 and 3, in the other at 1, 3 and 4."""
    k = 0 if step in ((1, 3, 4) if rank else (0, 3)) else KEPT
    return losses.detach().topk(k).indices.sort().values


class Kept(BigLoss):
    """The batch method that keeps these rows."""

    def __init__(self, rank: int) -> None:
        super().__init__(keep=KEPT / BATCH)
        self.__dict__["rank"] = rank

    def plan_batch(self, signals: Any, state: Any, *, step: int, generator: torch.Generator) -> Any:
        return BatchPlan(kept_by(self.__dict__["rank"], step, signals["loss"])), dict(state)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def in_one_process(*, every: int = 1) -> dict[str, Tensor]:
    """Weights after the same training in one process: a mean over the processes of the means of the rows that they keep."""
    model = fresh()
    optimizer = sgd(model)
    for step in range(STEPS):
        losses = F.cross_entropy(model(X[step]), Y[step], reduction="none").chunk(WORLD)
        kept = [own[kept_by(rank, step, own)] for rank, own in enumerate(losses)]
        (sum(own.sum() / max(1, len(own)) for own in kept) / WORLD).backward()
        if (step + 1) % every == 0:
            optimizer.step()
            optimizer.zero_grad()
    return weights_of(model)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by the names that they have in `Net`, as whole tensors."""
    found = {
        name.removeprefix("module."): parameter.detach()
        for name, parameter in model.named_parameters()
    }
    return {
        name: getattr(found[name], "full_tensor", found[name].clone)() for name in sorted(found)
    }


def train(model: Any, rank: int, *, attach: bool, every: int = 1) -> dict[str, Any]:
    """Trains by hand or with `attach`, and compares the weights with those of one process.

    Args:
        model: The model of this process.
        rank: Number of this process.
        attach: Whether to train with `attach`.
        every: Number of batches whose gradients are added up for a step.
    """
    optimizer, flops = sgd(model), 0
    run = attached(model, optimizer, Kept(rank), rank) if attach else None
    mine = slice(rank * BATCH, (rank + 1) * BATCH)
    for step, (x, y) in enumerate(
        zip(X[:, mine], Y[:, mine], strict=True) if run is None else run.loader
    ):
        steps = (step + 1) % every == 0
        with nullcontext() if steps else model.no_sync():
            if run is None:
                losses = F.cross_entropy(model(x), y, reduction="none")
                kept = losses[kept_by(rank, step, losses)]
                loss = kept.sum() / max(1, len(kept))
            else:
                loss = run.criterion(run.model(x), y)
            with FlopCounterMode(display=False) as counter:
                loss.backward()
        flops = counter.get_total_flops()
        if steps:
            optimizer.step()
            optimizer.zero_grad()
    found = weights_of(model)
    others = {name: value.clone() for name, value in found.items()}
    for value in others.values():
        distributed.broadcast(value, 0)
    return {
        "difference": distance(found, in_one_process(every=every)),
        "apart": distance(found, others),
        "flops": flops / flops_of_all_rows(),
        "fallbacks": [
            part.fallback for part in model.modules() if isinstance(part, SubsetBackward)
        ],
        "cost": None if run is None else (run.cost.backward, run.cost.forward, run.cost.unknown),
    }


def attached(
    model: nn.Module,
    optimizer: Any,
    method: Any,
    rank: int,
    *,
    samples: Any = None,
    batch: int = BATCH,
) -> Run:
    """`attach` for the samples of this process; the checks of its arguments are not of interest here."""
    mine = slice(rank * BATCH, (rank + 1) * BATCH)
    data = TensorDataset(*(samples or (X[:, mine].flatten(0, 1), Y[:, mine].flatten())))
    loader, criterion = DataLoader(data, batch), nn.CrossEntropyLoss()
    given = {
        "method": method,
        "loader": loader,
        "criterion": criterion,
        "model": model,
        "optimizer": optimizer,
        "epochs": 2,
    }
    made = {
        "batch_method": method,
        "adapter": adapt(criterion),
        "samples": len(data),
        "mode": SelectionMode.IN_FORWARD,
    }
    return build_run(RunConfig(given=Arguments(**given, forward_passes="once"), **made))


def flops_of_all_rows() -> int:
    model = fresh()
    loss = F.cross_entropy(model(X[0, :BATCH]), Y[0, :BATCH])
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    return counter.get_total_flops()


# Cases; each runs in both processes and returns plain values


def orders(rank: int) -> dict[str, Any]:
    """What the wrappers make of the rows that each process keeps."""
    models: dict[str, tuple[Callable[[], nn.Module], bool]] = {
        "DDP(subset_backward)": (lambda: DistributedDataParallel(subset_backward(fresh())), False),
        "attach(DDP)": (lambda: DistributedDataParallel(fresh()), True),
        "attach(DDP(subset_backward))": (
            lambda: DistributedDataParallel(subset_backward(fresh())),
            True,
        ),
        "fully_shard(subset_backward)": (lambda: sharded(fresh()), False),
        "attach(fully_shard(subset_backward))": (lambda: sharded(fresh()), True),
        "fully_shard by blocks": (lambda: sharded_by_blocks(fresh()), False),
        "attach(fully_shard by blocks)": (lambda: sharded_by_blocks(fresh()), True),
    }
    for name in ("find_unused_parameters", "static_graph", "gradient_as_bucket_view"):
        models[f"attach(DDP), {name}"] = (
            (lambda name=name: DistributedDataParallel(fresh(), **{name: True})),
            True,
        )
    return {name: train(make(), rank, attach=attach) for name, (make, attach) in models.items()}


def no_sync(rank: int) -> dict[str, Any]:
    """Gradients of three batches are added up before a step."""
    return {
        "DDP(subset_backward)": train(
            DistributedDataParallel(subset_backward(fresh())), rank, attach=False, every=3
        ),
        "attach(DDP)": train(DistributedDataParallel(fresh()), rank, attach=True, every=3),
    }


def noted(buckets: list[int], bucket: distributed.GradBucket) -> torch.futures.Future[Tensor]:
    buckets.append(bucket.buffer().numel())
    return allreduce_hook(None, bucket)


def reducer(rank: int) -> dict[str, Any]:
    """Numbers of the gradients that were averaged, each time that some were, and their number in a step."""
    found = {}
    for attach in (False, True):
        model, buckets = (
            DistributedDataParallel(fresh() if attach else subset_backward(fresh())),
            list[int](),
        )
        model.register_comm_hook(buckets, noted)
        train(model, rank, attach=attach)
        found[f"attach={attach}"] = (
            buckets,
            sum(parameter.numel() for parameter in model.parameters()),
        )
    return found


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(6, 4), nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])

    def forward(self, x: Tensor) -> list[Tensor]:
        hidden = self.body(x).tanh()
        return [head(hidden) for head in self.heads]


def heads(rank: int) -> float:
    """Each process uses another of two outputs, and later both the same one."""
    found = []
    for wrap in (lambda model: model, lambda model: subset_backward(model, strict=True)):
        model = DistributedDataParallel(wrap(fresh(TwoHeads)), find_unused_parameters=True)
        gradients = {}
        for step, head in enumerate((rank, 0, 1 - rank)):
            model.zero_grad()
            model(numbers(6, 6, seed=rank, dtype=torch.float32))[head][
                [1, 4]
            ].square().sum().backward()
            gradients |= {f"{name} {step}": p.grad for name, p in model.named_parameters()}
        found.append(gradients)
    return distance(*found)


def gradients(rank: int) -> list[float]:
    """Gradients in float64 of the same rows, named to `kept_rows` or found."""
    plain = conv_net(4).double()
    wrapped = subset_backward(copy.deepcopy(plain), strict=True)
    x, rows, found = numbers(6, 3, 8, 8, seed=rank), torch.tensor([0, 3] if rank else [1, 2, 5]), []
    for find_unused in (False, True):
        pair = []
        for model in (plain, wrapped):
            parallel = DistributedDataParallel(model, find_unused_parameters=find_unused)
            for _ in range(2):
                parallel.zero_grad()
                out = parallel(x)
                (
                    kept_rows(out, rows) if model is wrapped and not find_unused else out[rows]
                ).square().sum().backward()
            pair.append({name: p.grad for name, p in model.named_parameters()})
        found.append(distance(*pair))
    return found


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(x))


def own_passes(rank: int) -> dict[str, Any]:
    """A refresh of other numbers of samples in each process, after a step that moved the statistics of each."""
    samples = numbers(20, 6, seed=rank, dtype=torch.float32), torch.arange(20) % CLASSES
    found: dict[str, Any] = {}
    for shared in (True, False):
        model = DistributedDataParallel(fresh(Normalized))
        model.broadcast_buffers = shared
        optimizer = sgd(model)
        run = attached(model, optimizer, BigLoss(keep=0.5), rank, samples=samples, batch=4)
        x, y = next(iter(run.loader))
        run.criterion(run.model(x), y).backward()
        optimizer.step()
        first = copy.deepcopy(model.module)
        calls: list[int] = []
        model.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        ids = torch.arange(4, 16 if rank else 9)
        run._parts.passes.refresh(ids, training=False)
        if shared:
            for buffer in first.buffers():
                distributed.broadcast(buffer, 0)
        first.eval()
        expected = F.cross_entropy(
            first(samples[0][ids]), samples[1][ids], reduction="none"
        ).detach()
        found[f"shared {shared}"] = float((run.records["loss"][ids] - expected).abs().max())
        found[f"calls {shared}"] = len(calls)
        buffers = [torch.empty_like(first.norm.running_mean) for _ in range(WORLD)]
        distributed.all_gather(buffers, model.module.norm.running_mean)
        found[f"equal {shared}"] = torch.equal(*buffers)
        found[f"modes {shared}"] = model.training and model.module.training
    return found


def fallbacks(rank: int) -> tuple[bool, bool, bool]:
    """One process could not trace the model: all must go on in the same way."""
    trained = TrainedModel(DistributedDataParallel(fresh()), subset=True)
    before = trained.is_plain_anywhere(can_score=True)
    trained._subset_modules[0].fallback = "values" if rank else None
    return before, trained.is_plain, trained.is_plain_anywhere(can_score=True)


def synchronized(rank: int) -> str:
    model = subset_backward(nn.Sequential(nn.Linear(6, 4), nn.SyncBatchNorm(4)), strict=True)
    try:
        model(numbers(6, 6, dtype=torch.float32))
    except RuntimeError as error:
        return str(error)
    return ""


CASES = (orders, no_sync, reducer, heads, gradients, own_passes, fallbacks, synchronized)


def run_cases(rank: int, folder: str) -> None:
    """Runs every case in this process of two, and saves what they return."""
    torch.set_num_threads(1)
    SubsetBackward._trace = trace_once_per_architecture(SubsetBackward._trace)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=180),
    )
    try:
        torch.save({case.__name__: case(rank) for case in CASES}, f"{folder}/{rank}")
        distributed.barrier()  # a process that leaves first takes the connections along
    finally:
        distributed.destroy_process_group()
