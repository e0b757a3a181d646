"""Commands and trainings of the experiments that several processes run together.

`integration/test_launched_commands.py` starts the processes once and compares what they return with one process.
"""

import datetime
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
)

import thresher
from depth import depth
from thresher_lab.comparison.compare import Watcher, compare
from thresher_lab.comparison.controls import Job
from thresher_lab.recipes import running
from thresher_lab.recipes.running import SmokeTask
from thresher_lab.training.loop import train
from thresher_lab.training.processes import number_of_processes, own_rank
from thresher_lab.training.specs import MethodSpec, parse_methods
from thresher_lab.training.trainable import Training

BATCH, EPOCHS, SEED = 64, 3, 1
PARTS, WHOLE = 264, 256
"""Numbers of samples with which the last batch of an epoch is not full, and is."""
COMPARED = "mine.py:build"
SCRIPT = """
from launched_processes import Blobs

def build(seed):
    made = Blobs().training(None, seed)
    return made.model, made.loader, made.criterion, made.optimizer, made.evaluate
"""
RECIPE = "adaselection-line"


class Blobs:
    """A task in double precision without BatchNorm.

    Args:
        n: Number of samples.
        order: Sampler of the loader.
        batch: Number of samples per batch.
        accumulate: Number of batches per step.
    """

    name, recipe = "blobs", {}

    def __init__(
        self, n: int = PARTS, order: str = "shuffle", batch: int | None = BATCH, accumulate: int = 1
    ) -> None:
        self.accumulate = accumulate
        self.order, self.batch, self.drop_last = order, batch, n == WHOLE
        x = torch.randn(2 * n, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        y = (x[:, 0] > 0).long() + (x[:, 1] > 1).long()
        self.data, self.test = TensorDataset(x[:n], y[:n]), (x[n:], y[n:])
        self.evaluated = 0

    def loader(self, seed: int) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(seed)
        if self.batch is None:
            return DataLoader(
                self.data,
                batch_sampler=BatchSampler(RandomSampler(self.data), BATCH, drop_last=False),
            )
        samplers: dict[str, Any] = {
            "shuffle": RandomSampler(self.data, generator=generator),
            "without a generator": RandomSampler(self.data),
            "Shuffle": thresher.Shuffle(self.data, seed),
            "in order": None,
            "some": SubsetRandomSampler(range(9)),
        }
        if self.order == "DistributedSampler":
            return DataLoader(
                self.data, self.batch // 2, sampler=DistributedSampler(self.data, seed=seed)
            )
        return DataLoader(
            self.data,
            self.batch,
            sampler=samplers[self.order],
            drop_last=self.drop_last,
            generator=generator,
        )

    def training(self, data: Any, seed: int) -> Training:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        settings: dict[str, Any] = {"metric": "-loss", "accumulate": self.accumulate}
        return Training(
            model, self.loader(seed), nn.CrossEntropyLoss(), optimizer, self.evaluate, **settings
        )

    def evaluate(self, model: nn.Module) -> float:
        self.evaluated += 1
        with torch.inference_mode():
            return -nn.functional.cross_entropy(model(self.test[0]), self.test[1]).item()


ALL_JOBS = {
    "full": Job.of(MethodSpec("full"), SEED),
    "infobatch": Job.of(MethodSpec("infobatch"), SEED),
    "kakurenbo": Job.of(MethodSpec("kakurenbo", {"max_fraction": 0.4}), SEED),
    # Stratified batches of two processes are stratified each by itself, and so are not those of one process.
    "winnow": Job.of(MethodSpec("winnow", {"share": 0.5}, {"stratify": None}), SEED),
    "placebo": Job.control("placebo", SEED, 0.5, MethodSpec("infobatch")),
    "smaller": Job.control("smaller", SEED, 0.5),
    "shorter": Job.control("shorter", SEED, 0.6),
}
JOBS = {
    name: ALL_JOBS[name]
    for name in depth(("full", "infobatch", "winnow", "shorter"), tuple(ALL_JOBS))
}
"""Runs of which several processes make those of one, as long as batches are full."""
PASSES = depth(("twice",), ("once", "twice"))
ORDERS = depth(("shuffle",), ("shuffle", "Shuffle", "in order"))


def trained(task: Any, job: Job, **settings: Any) -> dict[str, Any]:
    """The results of a training of some epochs."""
    return train(
        task,
        None,
        job.spec,
        seed=job.seed,
        epochs=EPOCHS,
        share=job.share,
        label=job.label,
        **settings,
    )


# Cases; each runs in every process


def runs() -> dict[str, Any]:
    """Trainings that are those of one process, with the history of every sample."""
    return {
        name: trained(Blobs(WHOLE), job, samples_to=Path(f"{name}.parquet"))
        for name, job in JOBS.items()
    }


def orders() -> dict[str, Any]:
    """Full training with a last batch that is not full, and how often each process has evaluated."""
    found = {}
    for order in ORDERS:
        task = Blobs(PARTS, order)
        found[order] = trained(task, JOBS["full"]), task.evaluated
    return found


def accumulated() -> dict[str, Any]:
    """Steps of several batches: the last one of an epoch has fewer, and its last batch is not full."""
    chance, task = (
        parse_methods("selective_backprop:beta=1:forward_passes=twice")[0],
        Blobs(PARTS, batch=BATCH // 4, accumulate=3),
    )
    found, ended = {"full": trained(task, JOBS["full"])}, list[Training]()
    found["by chance"] = trained(task, Job.of(chance, SEED), on_end=ended.append)
    return found | {"weights": [one.tolist() for one in ended[0].model.state_dict().values()]}


def padded() -> dict[str, Any]:
    """A method that keeps an odd number of samples, the batch stage, and loaders that one process does not have."""
    found = {"infobatch": trained(Blobs(PARTS), JOBS["infobatch"])}
    for passes in PASSES:
        job = Job.of(MethodSpec("big_loss", {"keep": 0.25}, {"forward_passes": passes}), SEED)
        found[passes] = trained(Blobs(PARTS), job)
    if number_of_processes() > 1:
        for order in ("DistributedSampler", "without a generator"):
            found[order] = trained(Blobs(PARTS, order), JOBS["full"])
    return found


class StopError(Exception):
    """Raised in the middle of a training."""


def recipes() -> dict[str, Any]:
    """A recipe that is interrupted after its second epoch and goes on, and the same without an interruption."""
    found = {}
    for name in ("whole", "stopped"):
        task = SmokeTask.at(RECIPE, Path("made-up"), shortened=EPOCHS)
        spec = task.spec("infobatch")

        def stop(done: int, _: float, name: str = name) -> None:
            if name == "stopped" and done == 2:
                raise StopError

        with suppress(StopError):
            running.run(task, spec, out=Path(name), progress=stop)
        if name == "stopped":
            found["after the second epoch"] = sorted(path.name for path in Path(name).iterdir())
            own = running.run(task, spec, out=Path(name))
        else:
            own = running.run(task, spec, out=Path(name))
        found[name] = (
            own,
            torch.load(Path(name) / "model.pt", weights_only=True) if own_rank() == 0 else None,
        )
    return found


class Noted(Watcher):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def advanced(self, job: Job, epochs: int, metric: float) -> None:
        self.told.append(f"{job.label} {epochs}")

    def finished(self, job: Job, run: dict[str, Any], *, reused: bool) -> None:
        self.told.append(f"{job.label}{' kept' * reused}")

    def left_out(self, method: str, control: str, why: str) -> None:
        self.told.append(f"without {control}: {why[:30]}")


def comparisons() -> dict[str, Any]:
    """The same comparison twice, the second time with one run missing."""
    found: dict[str, Any] = {}
    for name in ("first", "again"):
        watcher, specs = Noted(), parse_methods("infobatch")
        results = compare(
            COMPARED, specs, [0], 2, Path("compared"), controls=["shorter"], watcher=watcher
        )
        found[name] = results, watcher.told
        if name == "first" and own_rank() == 0:
            [run] = Path("compared/runs").glob("infobatch-*.json")
            run.unlink()
    return found


def refusals() -> dict[str, str]:
    """Messages of what is refused, before anything is written."""
    compared: dict[str, dict[str, Any]] = {
        "jobs": {"jobs": 2},
        "too many controls": {"methods": "winnow:share=0.02", "controls": ["smaller"]},
    }
    found: dict[str, str] = {}
    for name, change in compared.items():
        settings: dict[str, Any] = {"methods": "infobatch", "jobs": None, "controls": ()} | change
        specs = parse_methods(settings.pop("methods"))
        found[name] = _message(
            partial(compare, COMPARED, specs, [0], 2, Path("refused"), **settings)
        )
    tasks = {
        "batch": Blobs(batch=63),
        "batch sampler": Blobs(batch=None),
        "some": Blobs(order="some"),
    }
    for name, task in tasks.items():
        found[name] = _message(lambda: trained(task, JOBS["full"]))  # noqa: B023
    found["refused"] = str(Path("refused").exists())
    return found


def _message(act: Callable[[], Any]) -> str:
    try:
        act()
    except ValueError as error:
        return str(error)
    return "nothing"


CASES = (runs, orders, accumulated, padded, recipes, comparisons, refusals)


def run_cases(rank: int, size: int, folder: str) -> None:
    """Runs all cases in this process, and saves what they return."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "ACCELERATE_USE_CPU": "true",
    }
    os.environ |= {
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29512",
    }
    os.chdir(folder)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=120),
    )
    try:
        torch.save({case.__name__: case() for case in CASES}, f"{folder}/{rank}")
        distributed.barrier()
    finally:
        distributed.destroy_process_group()
