"""What selection could save on a training, told from a short probe of it.

The probe trains for some epochs, or until its time is up, and asks every method that plans epochs what it would leave out by
the losses of these epochs, and by those of samples that are all learnt but one. Then it times the loader, the parts of a step
and the steps of each method in turns. Loading and computing take `overlap * max + (1 - overlap) * sum` together, the overlap
being that of full training: 0 where one waits for the other, 1 where workers load while the model computes.
"""

import math
import random
import statistics
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import thresher
from thresher.cost import break_even
from thresher.experiments.recipes.resolve import task_of
from thresher.experiments.training.trainable import Training
from thresher.experiments.training.loop import Clock, sizes_of
from thresher.experiments.training.recording import EASY, distribution
from thresher.experiments.training.specs import Spec
from thresher.experiments.training.store import versions
from thresher.loading.trees import to_device
from thresher.methods.contract import requirements_of
from thresher.methods.infobatch import well_learned
from thresher.methods.kakurenbo import trusted
from thresher.plans import EpochPlan
from thresher.records import EPOCH, NEVER_SEEN, Column
from thresher.selection import on_host

EPOCHS = 20
SECONDS = 60.0
PROBED = 3
"""Epochs of the probe, if there is time: what methods leave out changes most in the first."""
STEPS = 6
"""Batches that are timed at a time, at least; a third and a half of them are whole batches."""
ROUNDS = 9
BLOCK = 0.1
"""Seconds that are timed at a time, at least, so that a short disturbance of the machine is a small one."""
WORTH = 0.05
"""Share of the time below which a saving is not worth the trouble."""
NOTHING = 0.005
"""What is 0 in whole percent."""
INPUT_BOUND = 0.5
"""Share of a step spent waiting for the loader from which the input pipeline decides what can be saved."""
AT_RANDOM = ("uniform", "random_backprop")
"""Controls: what they save is no choice of samples."""
FULL_PARTS = ("forward", "backward", "optimizer")

Advice = dict[str, Any]


def advise(
    task: str,
    specs: Sequence[Spec],
    *,
    epochs: int = EPOCHS,
    data: Path | None = None,
    seconds: float = SECONDS,
    seed: int = 0,
    threads: int = 1,
) -> Advice:
    """Probe a training and say for each method what share of the time it could save.

    Args:
        task: See `tasks.task_of`.
        specs: The methods, other than full training.
        epochs: Of the training that is meant, which schedules of methods refer to.
        data: A folder with the data, for tasks that take one.
        seconds: Of the probe's epochs, at most.
        seed: Of the training and of the order in which things are timed.
        threads: Of torch, for as long as this takes; a comparison trains with one.

    Returns:
        Plain values: task, epochs, device, versions, probe, step, losses, trace, break_even_keep, methods and sentences. Of a
        method: `saves`, by the losses of the probe, and `at_most`, were all samples but one learnt; shares of
        the wall time of full training, below 0 where it takes longer.

    Raises:
        ValueError: Something that was asked for is not possible.
        FileNotFoundError: The data is not there.
    """
    if epochs < 1 or threads < 1 or not seconds > 0:
        given = f"{epochs}, {threads} and {seconds}"
        raise ValueError(f"advise: `epochs` and `threads` must be 1 or more and `seconds` above 0, got {given}")
    trained = task_of(task)
    with torch_threads(threads):
        training = trained.training(trained.load(trained.find(data)), seed)
        torch.manual_seed(seed)
        probe = Probe(training, epochs=epochs, seed=seed)
        refusals = {spec.label: probe.refusal(spec) for spec in specs}
        possible = [spec for spec in specs if refusals[spec.label] is None]
        signals = probe.first_epochs(possible, seconds)
        pace, own = probe.pace(possible)
    rows = [row_of(spec, refusals[spec.label], pace, own, signals, epochs, seed) for spec in specs]
    advice = {
        "task": task,
        "epochs": epochs,
        "device": str(probe.device),
        "versions": versions(),
        "probe": {"samples": probe.seen, "epochs": probe.trained},
        "step": pace.as_dict(),
        "losses": losses_of(signals[-1]),
        "trace": {"fallback": probe.fallback},
        "break_even_keep": pace.break_even,
        "methods": rows,
    }
    return advice | {"sentences": sentences(advice)}


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Torch computes with so many threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Pace:
    """Seconds that full training takes for a batch, by what it does.

    Attributes:
        loader: Getting the batch, alone.
        forward: Model and criterion, with gradient.
        backward: The backward pass.
        optimizer: Its step.
        scoring: Model and criterion in evaluation, without gradient.
        overlap: Share of the shorter of loading and computing that happens during the other, [0, 1].
    """

    loader: float
    forward: float
    backward: float
    optimizer: float
    scoring: float
    overlap: float = 0.0

    @property
    def compute(self) -> float:
        """Everything but the loader."""
        return self.forward + self.backward + self.optimizer

    @property
    def full(self) -> float:
        """A step of full training."""
        return self.step(self.compute)

    @property
    def waiting(self) -> float:
        """Share of a step in which nothing but loading happens."""
        return 1 - self.compute / self.full

    @property
    def break_even(self) -> float:
        """Share of a batch to keep below which a forward pass that only scores saves time; see `thresher.break_even`."""
        return break_even(self.scoring, max(self.compute - self.scoring, 1e-12))

    def step(self, compute: float) -> float:
        """Seconds where a loaded batch is computed with for so long."""
        return max(self.loader, compute) + (1 - self.overlap) * min(self.loader, compute)

    def as_dict(self) -> dict[str, float]:
        """Plain values, the derived ones too."""
        return {**vars(self), "compute": self.compute, "full": self.full, "waiting": self.waiting}


class Probe:
    """A training that is tried out for a short while.

    Args:
        training: What is trained.
        epochs: Of the training that is meant.
        seed: Of draws.

    Attributes:
        seen: Samples that the first epochs got to.
        trained: How many epochs these were.
        fallback: Why the model cannot be traced by `subset_backward`; None where it can, or where nobody asked.

    Raises:
        ValueError: There is no batch to train on.
    """

    def __init__(self, training: Training, *, epochs: int, seed: int) -> None:
        if not len(training.loader):
            raise ValueError(
                f"advise: the loader of {len(training.loader.dataset)} samples has no batch; "  # pyright: ignore[reportArgumentType]
                "give it more of them, or drop_last=False"
            )
        self._accelerator = Accelerator()
        self._model, self._optimizer = self._accelerator.prepare(training.model, training.optimizer)
        self._traced = thresher.subset_backward(self._model)
        self._training, self._epochs, self._seed = training, epochs, seed
        self.device: torch.device = self._accelerator.device
        self.seen, self.trained = 0, 0.0
        self._held = held(training.loader, STEPS, self.device, seed)
        self._made: Held = self._held.dataset  # pyright: ignore[reportAttributeAccessIssue]
        self._loader_steps = STEPS

    @property
    def fallback(self) -> str | None:
        """See the class."""
        return self._traced.fallback

    def refusal(self, spec: Spec) -> str | None:
        """Why a method cannot be attached to this training; None where it can."""
        if not foreseeable(spec.create()):
            return "advise tries out methods that choose in the batch, or by the last signals of samples, one at a time"
        try:
            self._attach(spec.create(), self._training.loader, self._model, **spec.attachment()).detach()
        except (TypeError, ValueError) as error:
            return str(error)
        return None

    def first_epochs(self, specs: Sequence[Spec], seconds: float) -> list[dict[str, Tensor]]:
        """Train for some epochs or so many seconds, and return what methods would remember of the samples after each.

        Returns:
            Signal to (seen,) tensor, once an epoch: the loss, and what else the methods that plan epochs ask for. An epoch
            that was not finished is there only if it is the first.
        """
        columns = {"loss": Column(torch.float32, fill=NEVER_SEEN)}
        for spec in specs:
            columns |= {column.signal or name: column for name, column in _columns(spec).items()}
        watching = Watching({name: Column(column.dtype, column.fill) for name, column in columns.items()})
        run = self._attach(watching, self._training.loader, self._model)
        schedule = thresher.ProgressLR(self._optimizer, run, self._training.schedule)
        end, late, found = time.monotonic() + seconds, False, []
        for _ in range(min(PROBED, self._epochs)):
            for batch in run.loader:
                self._step(run.model, run.criterion, batch)
                schedule.step()
                late = time.monotonic() > end
                if late:
                    break
            if not (found and late):
                known = run.trained.cpu() > 0
                found.append({name: column.cpu()[known] for name, column in run.records.items()})
            if late:
                break
        self.seen, self.trained = len(found[-1]["loss"]), round(run.progress * self._epochs, 6)
        run.detach()
        return found

    def pace(self, specs: Sequence[Spec]) -> tuple[Pace, dict[str, float]]:
        """Time full training and the methods.

        Returns:
            The pace of full training, and seconds that each method computes a batch by its label: what it does inside the
            loop where it plans epochs, leaving nothing out, and all it does where it selects in the batch.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = group["lr"] * 0  # timed steps are steps, and leave the weights as they are
        self._trace(specs)
        sides: dict[str, Callable[[], Spent]] = {
            "compute": lambda: self._over_held(self._plain_step),
            "loader": lambda: self._over_loader(lambda _: None),
            "forward": lambda: self._over_held(self._loss_of),
            "both": lambda: self._over_held(self._gradient_of),
            "scoring": self._scoring,
        }
        if self._may_overlap:
            sides["loop"] = lambda: self._over_loader(self._plain_step)
        sides |= {spec.label: (lambda spec=spec: self._over_run(spec)) for spec in specs}
        self._lengthen(sides)
        one_thread = self.device.type == "cpu" and torch.get_num_threads() == 1
        alone = sides.keys() - {"loader", "loop"} if one_thread else ()
        seconds = in_turns(sides, ROUNDS, self._seed, by_cpu=alone)
        return pace_of(seconds), {spec.label: seconds[spec.label] for spec in specs}

    @property
    def _may_overlap(self) -> bool:
        return self._training.loader.num_workers > 0 or self.device.type != "cpu"

    def _attach(self, method: Any, loader: DataLoader[Any], model: nn.Module, **settings: Any) -> thresher.Run:
        return thresher.attach(
            method,
            loader=loader,
            criterion=self._training.criterion,
            model=model,
            optimizer=self._optimizer,
            epochs=self._epochs,
            seed=self._seed,
            **settings,
        )

    def _trace(self, specs: Sequence[Spec]) -> None:
        """Have the model traced before anything is timed, where a method chooses in the training's own forward pass."""
        if any(_in_own_pass(spec) for spec in specs):
            with warnings.catch_warnings(action="ignore"):  # the advice says it in words
                self._traced(next(iter(self._held))[0])

    def _lengthen(self, sides: Mapping[str, Callable[[], "Spent"]]) -> None:
        """Have so many batches timed at a time that it takes `BLOCK` seconds; what came first warmed up."""
        for name in ("compute", "loader"):
            sides[name]()
        self._made.times = _times(sides["compute"]().wall)
        self._loader_steps = STEPS * _times(sides["loader"]().wall)

    def _plain_step(self, batch: Any) -> None:
        self._step(self._model, self._training.criterion, batch)

    def _step(self, model: nn.Module, criterion: Callable[..., Tensor], batch: Any) -> None:
        x, y = batch
        self._accelerator.backward(criterion(model(x), y).mean())
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _loss_of(self, batch: Any) -> Tensor:
        x, y = batch
        return self._training.criterion(self._model(x), y).mean()

    def _gradient_of(self, batch: Any) -> None:
        self._accelerator.backward(self._loss_of(batch))
        self._optimizer.zero_grad()

    def _over_held(self, act: Callable[[Any], Any]) -> "Spent":
        return spent(self._held, act, len(self._held))

    def _scoring(self) -> "Spent":
        self._model.eval()
        with torch.no_grad():
            found = self._over_held(self._loss_of)
        self._model.train()
        return found

    def _over_loader(self, act: Callable[[Any], Any]) -> "Spent":
        """Steps from the user's loader, once it has drawn its order and batches that workers made ahead are used up."""
        loader = self._training.loader
        batches = (to_device(batch, self.device) for batch in loader)
        ahead = min(1 + loader.num_workers * (loader.prefetch_factor or 0), len(loader) // 2)
        for batch in islice(batches, ahead):
            act(batch)
        steps = min(max(self._loader_steps, 2 * loader.num_workers), len(loader) - ahead)
        return spent(islice(batches, steps), act, steps)

    def _over_run(self, spec: Spec) -> "Spent":
        """One attached epoch over the batches at hand, or as many as the method takes until it scores again."""
        settings = spec.attachment()
        method: Any = spec.create()
        whole = method if method.stage == "batch" else Watching(method.columns())
        run = self._attach(whole, self._held, self._traced if _in_own_pass(spec) else self._model, **settings)
        epochs = spec.batch.get("score_every", 1)
        batches = chain.from_iterable(run.loader for _ in range(epochs))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* with two forward passes it saves time on this")
            found = spent(batches, lambda batch: self._step(run.model, run.criterion, batch), epochs * len(self._held))
        run.detach()
        return found


@dataclass(frozen=True)
class Watching:
    """A method that leaves nothing out and remembers what others would.

    Args:
        remembered: Columns of its records.
    """

    stage: ClassVar[Literal["epoch"]] = "epoch"
    remembered: Mapping[str, Column]

    def columns(self) -> dict[str, Column]:
        """See `EpochMethod`."""
        return dict(self.remembered)

    def plan_epoch(self, records: Mapping[str, Tensor], *, epoch: int, epochs: int, generator: torch.Generator) -> EpochPlan:
        """All samples."""
        return EpochPlan(torch.arange(len(next(iter(records.values())))))


class Whole(NamedTuple):
    """A batch as it was collated."""

    batch: Any


class Held(Dataset[Any]):
    """Samples in batches that are made and on the device already, so that nothing but computing takes time.

    Args:
        samples: As the user's dataset gave them.
        batches: Of all samples, in order.
        size: Of each batch.

    Attributes:
        times: How often the same samples come, one after the other.
    """

    def __init__(self, samples: Sequence[Any], batches: Sequence[Any], size: int) -> None:
        self._samples, self._batches, self._size = samples, batches, size
        self.times = 1

    def __len__(self) -> int:
        return self.times * len(self._samples)

    def __getitem__(self, i: int) -> Any:
        return self._samples[i % len(self._samples)]

    def __getitems__(self, ids: Sequence[int]) -> Whole:
        """The batch that begins with the first of the ids."""
        return Whole(self._batches[ids[0] % len(self._samples) // self._size])


def held(loader: DataLoader[Any], batches: int, device: torch.device, seed: int) -> DataLoader[Any]:
    """So many batches of random samples of a loader's dataset, as `Held`; one of all samples where there are fewer."""
    dataset: Any = loader.dataset
    size = min(sizes_of(loader)[1], len(dataset))
    wanted = min(batches, len(dataset) // size) * size
    ids = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))[:wanted].tolist()
    samples, collate = [dataset[i] for i in ids], loader.collate_fn
    made = [to_device(collate(samples[i : i + size]), device) for i in range(0, wanted, size)]

    def taken(found: Any) -> Any:
        return found.batch if isinstance(found, Whole) else collate(found)

    return DataLoader(Held(samples, made, size), batch_size=size, collate_fn=taken)


class Spent(NamedTuple):
    """Seconds."""

    wall: float
    cpu: float


def spent(batches: Iterable[Any], act: Callable[[Any], Any], count: int) -> Spent:
    """What each of `count` batches took, until all is done, on the device as well."""
    clock = Clock()
    with clock.running():
        for batch in batches:
            act(batch)
    return Spent(clock.wall_s / count, clock.cpu_s / count)


def in_turns(
    sides: Mapping[str, Callable[[], Spent]], rounds: int, seed: int, *, by_cpu: Collection[str] = ()
) -> dict[str, float]:
    """Median wall seconds of each side, by its ratio to the first within a round: what disturbs one side disturbs all.

    Args:
        sides: Name to what measures itself; each is called once more before, to warm up.
        rounds: In an order drawn anew for each.
        seed: Of these draws.
        by_cpu: Sides that wait for nothing, so that the ratio of CPU seconds is the same and not disturbed by other processes.
    """
    draw, names = random.Random(seed), list(sides)
    for side in sides.values():
        side()
    taken = [{name: sides[name]() for name in draw.sample(names, len(names))} for _ in range(rounds)]

    def ratio(name: str) -> float:
        pairs = [(round_[name], round_[names[0]]) for round_ in taken]
        return statistics.median(a.cpu / b.cpu if name in by_cpu else a.wall / b.wall for a, b in pairs)

    baseline = statistics.median(round_[names[0]].wall for round_ in taken)
    return {name: baseline * ratio(name) for name in names}


def pace_of(seconds: Mapping[str, float]) -> Pace:
    """The parts of a step from times of growing pieces of it.

    Args:
        seconds: loader, forward, both (forward and backward), compute (the optimizer too) and scoring; loop (all) where
            loading and computing can happen at once.
    """
    loader, compute = seconds["loader"], seconds["compute"]
    forward = min(seconds["forward"], compute)
    backward = min(max(seconds["both"] - forward, 0.0), compute - forward)
    both_at_once = loader + compute - seconds.get("loop", loader + compute)
    overlap = min(1.0, max(0.0, both_at_once / min(loader, compute)))
    return Pace(loader, forward, backward, compute - forward - backward, seconds["scoring"], overlap)


def row_of(
    spec: Spec,
    refusal: str | None,
    pace: Pace,
    own: Mapping[str, float],
    signals: Sequence[Mapping[str, Tensor]],
    epochs: int,
    seed: int,
) -> dict[str, Any]:
    """What one method would do to the time: see `advise`."""
    method: Any = spec.create()
    refreshes, stage = requirements_of(method).refresh is not None, method.stage
    row: dict[str, Any] = {"method": spec.label, "stage": stage, "settings": spec.settings, "refreshes": refreshes}
    if refusal is not None:
        return row | {"refused": refusal}
    compute = own[spec.label]
    row |= {"refused": None, "compute_s": compute}
    if method.stage == "batch":
        saves = 1 - pace.step(compute) / pace.full
        return row | {"saves": saves, "at_most": saves, "left_out": None, "forwarded": None}
    known = planned(method, signals, epochs, seed)
    learnt = planned(method, [all_learnt(signals[-1])], epochs, seed)
    saves = saved_by_plans(pace, compute, *known)
    at_most = max(saves, saved_by_plans(pace, compute, *learnt))
    return row | {"saves": saves, "at_most": at_most, "left_out": known[0], "forwarded": known[1]}


def foreseeable(method: Any) -> bool:
    """Whether the plans of a method follow from the signals of one epoch, or it chooses in the batch."""
    if method.stage != "epoch" or requirements_of(method).full_pass:
        return method.stage == "batch"
    return all(column.merge in ("last", "sum") and column.signal != EPOCH for column in method.columns().values())


def planned(method: Any, signals: Sequence[Mapping[str, Tensor]], epochs: int, seed: int) -> tuple[float, float]:
    """Shares of the samples of all epochs that a method leaves out, and that it only forwards.

    Args:
        method: That plans epochs.
        signals: What is known after the first, second, ... epoch; what is known last stays so.
        epochs: Of the training.
        seed: Of its draws.
    """
    n, generator = len(signals[0]["loss"]), torch.Generator().manual_seed(seed)
    left_out = forwarded = 0
    for epoch in range(epochs):
        records = _records(method, signals[min(max(epoch, 1), len(signals)) - 1])
        plan = method.plan_epoch(records, epoch=epoch, epochs=epochs, generator=generator)
        left_out += n - len(plan.ids)
        forwarded += 0 if plan.refresh is None else len(plan.refresh)
    return left_out / n / epochs, forwarded / n / epochs


def saved_by_plans(pace: Pace, compute: float, left_out: float, forwarded: float) -> float:
    """Share of the time; what is left out is not loaded either, what is forwarded is."""
    return 1 - ((1 - left_out) * pace.step(compute) + forwarded * pace.step(pace.scoring)) / pace.full


def all_learnt(signals: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What would be known of samples of which all but one are learnt: no loss, right, and certain."""
    learnt = {name: torch.ones_like(values) for name, values in signals.items()}
    learnt["loss"] = torch.zeros_like(signals["loss"])
    learnt["loss"][-1] = 1.0
    return learnt


def losses_of(signals: Mapping[str, Tensor]) -> dict[str, Any]:
    """How the losses are distributed: see `recording.distribution`; shares below the mean, and right and confident."""
    loss = on_host(signals["loss"])
    found = distribution(loss) | {"below_mean": float(well_learned(loss, "mean").mean()), "trusted": None}
    if "correct" in signals and "confidence" in signals:
        sure = trusted(on_host(signals["correct"]), on_host(signals["confidence"]), thresher.Kakurenbo.tau)
        found["trusted"] = float(sure.mean())
    return found


def sentences(advice: Advice) -> list[str]:
    """The advice in words."""
    step, rows = advice["step"], [row for row in advice["methods"] if row["refused"] is None]
    parts = ", ".join(f"{name} {_percent(step[name] / step['full'])}" for name in FULL_PARTS)
    said = [f"A step takes {_milliseconds(step['full'])}: waiting for input {_percent(step['waiting'])}, {parts}."]
    if step["waiting"] >= INPUT_BOUND:
        said += _input_bound(step, rows)
    said += [_of_method(row, advice) for row in advice["methods"]]
    said.append(
        f"Two forward passes save time only while less than {_percent(advice['break_even_keep'])} of a batch is kept: the pass "
        f"that only scores takes {_percent(step['scoring'] / step['compute'])} of what training on the batch does."
    )
    if advice["trace"]["fallback"] is not None:
        said.append(
            f"One forward pass saves nothing of the backward pass here, as the model cannot be traced: "
            f"{advice['trace']['fallback']}."
        )
    return [*said, _losses(advice), _conclusion(rows)]


def _input_bound(step: Mapping[str, float], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What waiting for the loader means for either kind of method."""
    said = f"Your input pipeline takes {_percent(step['waiting'])} of a step."
    batch = [row["saves"] for row in rows if row["stage"] == "batch"]
    if batch:
        verdict = "cannot help" if max(batch) < WORTH else f"can save little, {_percent(max(batch))} at most"
        said += f" Methods that select in the batch load every candidate: they {verdict}."
    epoch = [row for row in rows if row["stage"] == "epoch"]
    can = [row["method"] for row in epoch if row["at_most"] >= WORTH]
    cannot = [row for row in epoch if row["at_most"] < WORTH]
    if can:
        said += f" Methods that plan epochs do not load what they leave out: {_and(can)} can help."
    for refreshes, why in ((True, "what is left out is loaded for a forward pass"), (False, "too little is left out")):
        if names := [row["method"] for row in cannot if row["refreshes"] == refreshes]:
            said += f" Not so {_and(names)}: {why}."
    return [said]


def _of_method(row: Mapping[str, Any], advice: Advice) -> str:
    name = row["method"]
    if row["refused"] is not None:
        return f"{name} cannot be used here: {row['refused']}"
    if row["at_most"] < NOTHING:
        longer = f": it takes {_percent(-row['saves'])} longer than full training" if -row["saves"] >= NOTHING else ""
        return f"{name} saves no time{longer}."
    if row["stage"] == "batch":
        return f"{name} can save {_percent(row['saves'])} of the time at most."
    forwards = ", which still cost a forward pass" if row["forwarded"] else ""
    does = f"it leaves out {_percent(row['left_out'])} of the samples of {advice['epochs']} epochs{forwards}"
    if row["at_most"] - row["saves"] < NOTHING:
        return f"{name} can save {_percent(row['saves'])} of the time at most: {does}."
    amount = "saves no time" if row["saves"] < NOTHING else f"can save {_percent(row['saves'])} of the time"
    return (
        f"{name} {amount}, by the losses of the probe: {does}. Were all samples learnt, it could save "
        f"{_percent(row['at_most'])}."
    )


def _losses(advice: Advice) -> str:
    """How far the samples are learnt."""
    losses = advice["losses"]
    epochs = advice["probe"]["epochs"]
    after = f"After {epochs:.2g} epoch{'' if epochs == 1 else 's'} of the probe"
    easy = f"{_percent(losses.get('easy_share', 0.0))} of the samples have a loss below {_percent(EASY)} of the largest"
    sure = "" if losses["trusted"] is None else f", {_percent(losses['trusted'])} are right and confident"
    return f"{after} {easy}{sure}, {_percent(losses['below_mean'])} have a loss below the mean."


def _conclusion(rows: Sequence[Mapping[str, Any]]) -> str:
    worth = [row for row in rows if row["at_most"] >= WORTH]
    if not worth:
        return f"Selection cannot help here: none of these methods could save {_percent(WORTH)} of the time."
    chosen = [row for row in worth if not row["method"].startswith(AT_RANDOM)]
    best = max(chosen or worth, key=lambda row: row["at_most"])
    return (
        f"The most time could be saved by {best['method']}: {_percent(best['at_most'])}. What that does to the result is not "
        "known from this: `thresher compare` measures it, beside controls of the same cost."
    )


def _percent(share: float) -> str:
    return f"{round(100 * share)} %"


def _milliseconds(seconds: float) -> str:
    """Three digits, and all of a large number."""
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.1 else f"{1000 * seconds:.3g} ms"


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _times(seconds: float) -> int:
    """How often `STEPS` batches of so many seconds make a `BLOCK`."""
    return max(1, math.ceil(BLOCK / STEPS / seconds))


def _columns(spec: Spec) -> dict[str, Column]:
    method: Any = spec.create()
    return method.columns() if method.stage == "epoch" else {}


def _records(method: Any, signals: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Signals under the names of a method's columns."""
    return {name: signals[column.signal or name].to(column.dtype) for name, column in method.columns().items()}


def _in_own_pass(spec: Spec) -> bool:
    """Whether a method chooses by the losses of the training's own forward pass, if the model can be traced."""
    return spec.settings.get("forward_passes") in ("once", "auto") and not any(key.startswith("score_") for key in spec.batch)
