"""A training that is tried for a short while: what its samples' losses are, and what the parts of its steps take."""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

import thresher
from thresher import EpochPlan, to_device
from thresher.methods import requirements_of
from thresher.records import NEVER_SEEN, Column
from thresher_lab.advise.forecast import columns_of, forecast, is_foreseeable
from thresher_lab.advise.pace import Pace, PreparedBatches, Spent, median_seconds, pace_of, prepared_loader, time_steps
from thresher_lab.training.loop import Clock, as_number, fresh_accelerator, sizes_of
from thresher_lab.training.specs import Spec
from thresher_lab.training.trainable import Training

PROBED_EPOCHS = 3
"""Largest number of epochs of the probe: what methods leave out changes most in the first ones."""
TIMED_STEPS = 6
"""Smallest number of batches that are timed at a time; a third and a half of them are whole numbers."""
TIMED_ROUNDS = 9
TIMED_SECONDS = 0.1
"""Smallest time that is measured at once, in seconds, so that a short disturbance of the machine is a small one."""
FIXED_CALLS, CALLS_OF_METHOD = 10, 3
"""Smallest number of times that batches are gone through to time full training, and one method besides."""
NO_TIME = "there was no time for it; --seconds gives more"
LEAST_HALVED = 4
"""Smallest batch of which half a batch is timed: BatchNorm needs two samples."""

Says = Callable[[str], None]
"""Function that is called with a line about what is done now, and how long it takes at most."""


def quietly(_: str) -> None:
    """Says nothing."""


@dataclass(frozen=True)
class RecordSignals:
    """A method that leaves no sample out and only records signals.

    Args:
        recorded: Columns of its records, by name.
    """

    stage: ClassVar[Literal["epoch"]] = "epoch"
    recorded: Mapping[str, Column]

    def columns(self) -> dict[str, Column]:
        """Returns the columns that the method was given."""
        return dict(self.recorded)

    def plan_epoch(self, records: Mapping[str, Tensor], *, epoch: int, epochs: int, generator: torch.Generator) -> EpochPlan:
        """Returns a plan of all samples."""
        return EpochPlan(torch.arange(len(next(iter(records.values())))))


class Probe:
    """A training that is tried for a short while.

    Args:
        training: The training.
        epochs: Number of epochs of the training that is planned.
        seed: Random seed of all draws.
        says: Function that is called with what is done now. Default: none.
        until: Time, as `time.monotonic` says it, at which the probe is to be done. Default: no limit.
        parts: Whether the parts of a step are timed, too; else those that methods need. Default: True.

    Attributes:
        seen: Number of samples that the first epochs trained on.
        trained: Number of epochs that were trained, a fraction where the last one was not finished.
        skipped: Names of the measurements that there was no time for.
        step_s: Wall seconds of a step in the first epochs, with loading; 0 before them.
        trace_s: Seconds that tracing the model took; 0 where no method needed it.
        fallback: Reason why `subset_backward` cannot trace the model; None where it can, or where no method needed it.

    Raises:
        ValueError: The training's loader has no batch.
    """

    def __init__(
        self, training: Training, *, epochs: int, seed: int, says: Says = quietly, until: float = math.inf, parts: bool = True
    ) -> None:
        if not len(training.loader):
            raise ValueError(
                f"advise: the loader of {len(training.loader.dataset)} samples has no batch; "  # pyright: ignore[reportArgumentType]
                "give it more of them, or drop_last=False"
            )
        self._accelerator = fresh_accelerator()
        self._model, self._optimizer = self._accelerator.prepare(training.model, training.optimizer)
        self._traced = thresher.subset_backward(self._model)
        self._training, self._epochs, self._seed, self._says = training, epochs, seed, says
        self.device: torch.device = self._accelerator.device
        self.seen, self.trained, self.trace_s, self.step_s = 0, 0.0, 0.0, 0.0
        self.skipped, self._until, self._parts = list[str](), until, parts
        self._prepared = prepared_loader(training.loader, TIMED_STEPS, self.device, seed)
        self._halves = self._prepared_halves()
        self._loader_steps = TIMED_STEPS

    def try_evaluate(self) -> None:
        """Evaluates the model once, so that a mistake in `evaluate` is told before anything takes long.

        Raises:
            ValueError: `evaluate` does not return a number.
        """
        self._says("calling `evaluate` once, so that a mistake in it is told now")
        with self._modes_kept():
            as_number(self._training.evaluate(self._model))

    @property
    def fallback(self) -> str | None:
        """Reason why `subset_backward` cannot trace the model; None where it can, or where no method needed it."""
        return self._traced.fallback

    def refusal(self, spec: Spec) -> str | None:
        """Returns the reason why a method cannot be attached to this training; None where it can."""
        if not is_foreseeable(spec.create()):
            return "advise tries out methods that choose in the batch, or by the last signals of samples, one at a time"
        loader, settings = self._training.loader, spec.attachment()
        return _refused(lambda: self._attach(spec.create(), loader, self._model, **settings).detach(), TypeError, ValueError)

    def missing(self, spec: Spec) -> dict[str, str]:
        """Returns the signals that this training does not give and a method can do without, each with what it does then."""
        columns = {column.signal or name: column for name, column in columns_of(spec).items()}
        recorded = self._recordable(columns)
        return {signal: of.optional for signal, of in columns.items() if of.optional is not None and signal not in recorded}

    def first_epochs(self, specs: Sequence[Spec], seconds: float) -> list[dict[str, Tensor]]:
        """Trains for `PROBED_EPOCHS` epochs or until a time limit, and returns what methods would record.

        Args:
            specs: Methods whose columns are recorded beside the loss.
            seconds: Time limit in seconds.

        Returns:
            One dictionary per epoch, from the name of a signal to a tensor of shape (seen,). An epoch that was not finished is
            there only if it is the first.
        """
        columns: dict[str, Column] = {}
        for spec in specs:
            columns |= {column.signal or name: column for name, column in columns_of(spec).items()}
        columns["loss"] = Column(torch.float32, fill=NEVER_SEEN)
        recording = RecordSignals(self._recordable(columns))
        run = self._attach(recording, self._training.loader, self._model)
        schedule = thresher.ProgressLR(self._optimizer, run, self._training.schedule)
        begun, steps, late, signals = time.monotonic(), 0, False, []
        epochs = min(PROBED_EPOCHS, self._epochs)
        for epoch in range(epochs):
            self._says(f"training epoch {epoch + 1} of {epochs} of the probe: all of them take {seconds:.3g} s at most")
            for batch in run.loader:
                self._step(run.model, run.criterion, batch)
                schedule.step()
                spent, steps = time.monotonic() - begun, steps + 1
                late, self.step_s = spent > seconds, spent / steps
                if late:
                    break
            if not (signals and late):
                known = run.trained.cpu() > 0
                signals.append({name: column.cpu()[known] for name, column in run.records.items()})
            if late:
                break
        self.seen, self.trained = len(signals[-1]["loss"]), round(run.progress * self._epochs, 6)
        run.detach()
        return signals

    def forecasts(self, specs: Sequence[Spec], seconds: float) -> tuple[Pace, list[dict[str, Tensor]], list[dict[str, Any]]]:
        """Trains the first epochs, times steps, and foretells what methods do to the time of training.

        Args:
            specs: The methods.
            seconds: Time limit for the first epochs, in seconds.

        Returns:
            The pace of full training, the signals after each epoch, and one entry per method, see `forecast`.
        """
        torch.manual_seed(self._seed)
        refusals = {spec.label: self.refusal(spec) for spec in specs}
        possible = [spec for spec in specs if refusals[spec.label] is None]
        signals = self.first_epochs(possible, seconds)
        self.hold_still(possible)
        fitting = self._fitting(possible)
        for spec in possible:
            refusals[spec.label] = _refused(partial(self._over_run, spec), ValueError) if spec in fitting else NO_TIME
        possible = [spec for spec in possible if refusals[spec.label] is None]
        pace, costs = self.pace(possible)
        rows = [forecast(spec, refusals[spec.label], pace, costs, signals, self._epochs, self._seed) for spec in specs]
        missing = {spec.label: self.missing(spec) for spec in possible}
        return pace, signals, [row | {"missing": missing.get(row["method"], {})} for row in rows]

    def _fitting(self, specs: Sequence[Spec]) -> list[Spec]:
        """Returns the methods that there is time to time, after batches are made fewer where steps take long."""
        left, calls = self._until - time.monotonic(), FIXED_CALLS + CALLS_OF_METHOD * len(specs)
        steps = next((count for count in (TIMED_STEPS, 3, 2) if count * self.step_s * calls <= left), 1)
        self._loader_steps = steps
        for loader in filter(None, (self._prepared, self._halves)):
            dataset: PreparedBatches = loader.dataset  # pyright: ignore[reportAssignmentType]
            dataset.times = min(1, steps / len(loader))
        call = steps * self.step_s
        fitting = [spec for i, spec in enumerate(specs) if call * (FIXED_CALLS + CALLS_OF_METHOD * (i + 1)) <= left or not call]
        self.skipped += [f"timing {spec.label}" for spec in specs if spec not in fitting]
        return fitting

    def hold_still(self, specs: Sequence[Spec]) -> None:
        """Has further steps leave the weights as they are, and traces the model, before anything is timed.

        Args:
            specs: The methods that are timed.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = group["lr"] * 0
        self._trace(specs)

    def pace(self, specs: Sequence[Spec]) -> tuple[Pace, dict[str, float]]:
        """Times full training and the methods, after `hold_still`.

        Returns:
            The pace of full training, and for each method, by its label, the seconds that it computes for a batch. Methods that
            plan epochs are timed inside the loop, where they leave nothing out; methods that choose in the batch with all that
            they do.
        """
        sides: dict[str, Callable[[], Spent]] = {
            "compute": lambda: self._over_prepared(self._plain_step),
            "loader": lambda: self._over_loader(lambda _: None),
        }
        if self._parts:
            sides["forward"] = lambda: self._over_prepared(self._loss_of)
            sides["both"] = lambda: self._over_prepared(self._gradient_of)
        if self._parts or any(requirements_of(spec.create()).refresh is not None for spec in specs):
            sides["scoring"] = self._scoring
        if self._halves is not None:
            sides["half"] = lambda: self._over_prepared(self._plain_step, self._halves)
        if self._may_overlap:
            sides["loop"] = lambda: self._over_loader(self._plain_step)
        sides |= {spec.label: (lambda spec=spec: self._over_run(spec)) for spec in specs}
        if self._loader_steps == TIMED_STEPS:
            self._lengthen(sides)
        rounds = self._rounds(sides)
        one_thread = self.device.type == "cpu" and torch.get_num_threads() == 1
        alone = sides.keys() - {"loader", "loop"} if one_thread else ()
        seconds = median_seconds(sides, rounds, self._seed, by_cpu=alone)
        return pace_of(seconds), {spec.label: seconds[spec.label] for spec in specs}

    @property
    def _may_overlap(self) -> bool:
        return self._training.loader.num_workers > 0 or self.device.type != "cpu"

    def _prepared_halves(self) -> DataLoader[Any] | None:
        """Returns half batches; None where batches are too small."""
        if sizes_of(self._training.loader)[1] < LEAST_HALVED:
            return None
        return prepared_loader(self._training.loader, TIMED_STEPS, self.device, self._seed, halves=True)

    def _recordable(self, columns: Mapping[str, Column]) -> dict[str, Column]:
        """Returns those columns whose signals this training gives; values replace each other."""
        recordable = {}
        for name, column in columns.items():
            last = Column(column.dtype, column.fill, signal=column.signal)
            try:
                self._attach(RecordSignals({name: last}), self._training.loader, self._model).detach()
            except ValueError:
                continue
            recordable[name] = last
        return recordable

    def _attach(self, method: Any, loader: DataLoader[Any], model: nn.Module, **settings: Any) -> thresher.Run:
        return thresher.attach(
            method,
            loader=loader,
            criterion=self._training.criterion,
            forward=self._training.forward,
            model=model,
            optimizer=self._optimizer,
            epochs=self._epochs,
            seed=self._seed,
            # Batches that were collated before come from a function of ours, which keeps the rows where the user's does.
            collate_keeps_rows=self._training.loader.collate_fn is default_collate,
            **settings,
        )

    def _trace(self, specs: Sequence[Spec]) -> None:
        """Traces the model before anything is timed, where a method chooses in the training's own forward pass."""
        if any(chooses_in_forward(spec) for spec in specs):
            clock = Clock()
            with clock.running(), warnings.catch_warnings(action="ignore"):  # a sentence of the advice gives the reason
                self._training.passed(self._traced, next(iter(self._prepared)))
            self.trace_s = clock.cpu_s

    def _lengthen(self, sides: Mapping[str, Callable[[], Spent]]) -> None:
        """Sets the number of batches so that timing them takes `TIMED_SECONDS`; the first call of each side warms up."""
        for name in ("compute", "loader"):
            sides[name]()
        times = _repeats(sides["compute"]().wall)
        for loader in filter(None, (self._prepared, self._halves)):
            dataset: PreparedBatches = loader.dataset  # pyright: ignore[reportAssignmentType]
            dataset.times = times
        self._loader_steps = TIMED_STEPS * _repeats(sides["loader"]().wall)

    def _rounds(self, sides: Mapping[str, Callable[[], Spent]]) -> int:
        """Returns the number of rounds that take half of the time left; others than the loader take as long as the first."""
        begun = time.monotonic()
        sides["compute"]()
        first = time.monotonic() - begun
        sides["loader"]()
        seconds = time.monotonic() - begun + first * (len(sides) - 2)  # of a round
        rounds = max(1, int(min(TIMED_ROUNDS, (self._until - time.monotonic()) / 2 / seconds - 1)))
        about = f"{rounds} round{'s' * (rounds > 1)}: about {max(1, round((rounds + 1) * seconds))} s"
        self._says(f"timing {len(sides)} kinds of steps in {about}")
        return rounds

    def _plain_step(self, batch: Any) -> None:
        self._step(self._model, self._training.criterion, batch)

    def _step(self, model: nn.Module, criterion: Callable[..., Tensor], batch: Any) -> None:
        self._accelerator.backward(criterion(*self._training.passed(model, batch)).mean())
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _loss_of(self, batch: Any) -> Tensor:
        outputs, targets = self._training.passed(self._model, batch)
        return self._training.criterion(outputs, targets).mean()

    def _gradient_of(self, batch: Any) -> None:
        self._accelerator.backward(self._loss_of(batch))
        self._optimizer.zero_grad()

    def _over_prepared(self, act: Callable[[Any], Any], loader: DataLoader[Any] | None = None) -> Spent:
        """Times steps over the prepared batches, or over those of another loader of such batches."""
        batches = self._prepared if loader is None else loader
        return time_steps(batches, act, len(batches))

    def _scoring(self) -> Spent:
        with self._modes_kept(), torch.no_grad():
            self._model.eval()
            return self._over_prepared(self._loss_of)

    @contextmanager
    def _modes_kept(self) -> Iterator[None]:
        """Puts every part of the model back into the mode it had: some are in evaluation mode for good."""
        modes = [(part, part.training) for part in self._model.modules()]
        yield
        for part, mode in modes:
            part.training = mode

    def _over_loader(self, act: Callable[[Any], Any]) -> Spent:
        """Times steps of the user's loader, after it drew its order and the batches that workers made ahead are used up."""
        loader = self._training.loader
        batches = (to_device(batch, self.device) for batch in loader)
        ahead = min(1 + loader.num_workers * (loader.prefetch_factor or 0), len(loader) // 2)
        for batch in islice(batches, ahead):
            act(batch)
        steps = min(max(self._loader_steps, 2 * loader.num_workers), len(loader) - ahead)
        return time_steps(islice(batches, steps), act, steps)

    def _over_run(self, spec: Spec) -> Spent:
        """Times an attached epoch over the prepared batches, or as many epochs as pass between two scorings of the method."""
        settings = spec.attachment()
        method: Any = spec.create()
        whole = method if method.stage == "batch" else RecordSignals(self._recordable(columns_of(spec)))
        run = self._attach(whole, self._prepared, self._traced if chooses_in_forward(spec) else self._model, **settings)
        epochs = spec.batch.get("score_every", 1)
        batches = chain.from_iterable(run.loader for _ in range(epochs))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* with two forward passes it saves time on this")
            spent = time_steps(batches, lambda batch: self._step(run.model, run.criterion, batch), epochs * len(self._prepared))
        run.detach()
        return spent


def _refused(act: Callable[[], object], *errors: type[Exception]) -> str | None:
    """Returns the message of one of these errors that a function raises; None if it raises none."""
    try:
        with warnings.catch_warnings(action="ignore"):  # the advice says what it makes of the method
            act()
    except errors as error:
        return str(error)
    return None


def _repeats(seconds: float) -> int:
    """Returns how often `TIMED_STEPS` batches of `seconds` each must be repeated to take `TIMED_SECONDS`."""
    return max(1, math.ceil(TIMED_SECONDS / TIMED_STEPS / seconds))


def chooses_in_forward(spec: Spec) -> bool:
    """Returns whether a method chooses by the losses of the training's own forward pass, if the model can be traced.

    Args:
        spec: The method.
    """
    return spec.settings.get("forward_passes") in ("once", "auto") and not any(key.startswith("score_") for key in spec.batch)
