"""Schedules of the learning rate that follow the training, however many steps an epoch turns out to have."""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from thresher.attribution.attributor import Attributor
from thresher.loading.loader import SelectedLoader
from thresher.loading.smaller_batches import StepSizes

PLACES = 1024
"""Number of batches whose places are held until their losses are credited."""


class BatchPlace(NamedTuple):
    """Where a batch lies in the training.

    Attributes:
        number: Number of the batch, counted from the start of the run.
        epoch: Number of its epoch.
        consumed: Number of ids of the epoch's order that are consumed after it.
        last: Whether it is the last batch of the epoch.
    """

    number: int
    epoch: int
    consumed: int
    last: bool


class Position:
    """How far the training is: up to the batch that was trained on last, not the one that a prefetcher has already asked for.

    Args:
        loader: Loader of the run.
        attributor: Attributor of the run.
        epochs: Number of epochs of the whole training.
    """

    def __init__(self, loader: SelectedLoader, attributor: Attributor, epochs: int) -> None:
        self._loader, self._attributor, self._epochs = loader, attributor, epochs
        self._places: deque[BatchPlace] = deque(maxlen=PLACES)
        self._before: BatchPlace | None = None
        self._first = 0
        self._sizes: StepSizes | None = None

    def begin_pass(self, sizes: StepSizes | None) -> None:
        """Notes how the smaller batches of the epoch are made; None where it has full batches."""
        self._before, self._first, self._sizes = self._reached(), self._attributor.batches, sizes

    def take_back_pass(self) -> None:
        """Forgets the batches of the pass, in which nothing was trained."""
        while self._places and self._places[-1].number >= self._first:
            self._places.pop()

    def on_batch(self, place: BatchPlace) -> None:
        """Notes a batch that is on its way to the loop."""
        self._places.append(place)

    def resume(self, epoch: int, consumed: int) -> None:
        """Goes on at the position of a saved run."""
        self._places.clear()
        self._before = BatchPlace(-1, epoch, consumed, last=False)

    @property
    def full_steps(self) -> int:
        """Number of batches of full training, in all epochs; 0 where that is not known."""
        return self._epochs * -(-self._loader.candidates // self._loader.batch_sampler.batch_size)

    def steps(self, total: int) -> int:
        """Returns the number of steps that full training would have made by now.

        Args:
            total: Number of steps of full training.
        """
        place, full = self._reached(), self.full_steps
        if place is None:
            return 0
        in_epoch = full // self._epochs
        done = min(place.epoch * in_epoch + self._batches_by(place, in_epoch), full)
        return done * total // full

    @property
    def progress(self) -> float:
        """Share of all epochs' candidate samples that are consumed, in [0, 1]."""
        place, whole = self._reached(), max(1, self._loader.candidates)  # a stream's length may not be known yet
        if place is None:
            return 0.0
        epoch, consumed = (place.epoch + 1, 0) if place.last else (place.epoch, min(place.consumed, whole))
        return min(1.0, (epoch * whole + consumed) / (self._epochs * whole))

    def _reached(self) -> BatchPlace | None:
        """Returns the place of the batch that was trained on last; None where none was."""
        # Up to the batch that was trained on: behind a prefetcher, the loader is several batches further.
        trained = self._attributor.newest_trained
        known = (place for place in reversed(self._places) if trained is None or place.number <= trained)
        return next(known, self._before)

    def _batches_by(self, place: BatchPlace, in_epoch: int) -> int:
        """Returns the number of batches of a full epoch that are over at a place."""
        # Smaller last batches, or rows left out at the end, do not leave an epoch unfinished.
        if place.last:
            return in_epoch
        if self._sizes is not None:
            return self._sizes.step_after(place.consumed, self._sizes.candidates)
        return place.consumed // self._loader.batch_sampler.batch_size


def followed(epochs: Any) -> Position:
    """Returns how far the training of a run is, for a schedule that follows it.

    Args:
        epochs: Epochs of the run.
    """
    if epochs.step_checks is not None:
        epochs.step_checks.paced = True
    return epochs.position


class PacedLR(LRScheduler):
    """A scheduler whose `step()` advances the user's scheduler by what was consumed since the last call. See `Run.pace`.

    Args:
        scheduler: The user's scheduler, before its first step.
        position: How far the training is.
        total: Number of steps of the scheduler in full training.
    """

    def __init__(self, scheduler: LRScheduler, position: Position, total: int) -> None:
        # The user's scheduler has set the learning rates already; a second initialisation would set them again.
        self.scheduler, self.total, self.stepped = scheduler, total, 0
        self._position, self._was_loaded = position, False

    @property
    def optimizer(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The optimizer of the user's scheduler."""
        return self.scheduler.optimizer

    def step(self, epoch: int | None = None) -> None:
        """Advances the user's scheduler to where full training would be by now.

        Args:
            epoch: Not supported; it must be None.

        Raises:
            TypeError: An epoch is given.
            RuntimeError: The schedule was loaded from a state, and its run was not.
        """
        if epoch is not None:
            raise TypeError(
                "run.pace: step(epoch) is not supported: the scheduler follows the run. Call step() without arguments."
            )
        now = self._position.steps(self.total)
        if self._was_loaded and now < self.stepped:
            raise RuntimeError(
                f"run.pace: the schedule was loaded from a state that had made {self.stepped} steps, and the run is only at "
                f"step {now} of {self.total}. Load the state of the run that was saved with it: run.load_state_dict(state)."
            )
        self._was_loaded = False
        for _ in range(now - self.stepped):
            self.scheduler.step()
            self.stepped += 1

    def get_last_lr(self) -> list[float | Tensor]:
        """Returns the learning rates that the user's scheduler set last."""
        return self.scheduler.get_last_lr()

    def get_lr(self) -> list[float | Tensor]:
        """Returns the learning rates of the user's scheduler."""
        return self.scheduler.get_lr()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the user's scheduler, and how many of its steps were made."""
        return {"scheduler": self.scheduler.state_dict(), "total": self.total, "stepped": self.stepped}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on where a saved schedule stopped.

        Args:
            state_dict: Result of `state_dict` of a schedule with the same `total`.

        Raises:
            ValueError: It is the state of the scheduler alone, or of another `total`; nothing was changed.
        """
        missing = {"scheduler", "total", "stepped"} - set(state_dict)
        if missing:
            raise ValueError(
                f"run.pace: the state lacks {', '.join(sorted(missing))}: it is not of a paced scheduler. Load it into the "
                "scheduler that was given to run.pace, or save the result of run.pace."
            )
        if state_dict["total"] != self.total:
            saved = state_dict["total"]
            raise ValueError(f"run.pace: the state is of a schedule with total={saved}, this one has total={self.total}")
        self.scheduler.load_state_dict(dict(state_dict["scheduler"]))
        self.stepped, self._was_loaded = state_dict["stepped"], True

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)


def paced(scheduler: Any, position: Position, total: Any) -> PacedLR:
    """Returns a scheduler that follows the training. See `Run.pace`, which describes the arguments.

    Raises:
        TypeError: `scheduler` is no scheduler that steps without arguments.
        ValueError: `total` is no number of steps, is not known, or contradicts the scheduler; or the scheduler has stepped.
    """
    if type(scheduler).__name__ == "AcceleratedScheduler":
        scheduler = _of_accelerate(scheduler, total)
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau | PacedLR):
        raise TypeError(
            "run.pace: `scheduler` must be a torch.optim.lr_scheduler.LRScheduler that counts steps, such as OneCycleLR, got "
            f"{type(scheduler).__name__}"
        )
    name, own = type(scheduler).__name__, getattr(scheduler, "total_steps", None)
    if not position.full_steps:
        raise ValueError(
            "run.pace: the loader streams samples without a length, so that it is not known how far the training is. Give the "
            "IterableDataset a __len__, or call the scheduler once per epoch without run.pace."
        )
    total = own or position.full_steps if total is None else total
    if isinstance(total, bool) or not isinstance(total, int) or total < 1:
        raise ValueError(f"run.pace: `total` is the number of steps of full training, 1 or more, got {total!r}")
    if own is not None and total != own:
        raise ValueError(
            f"run.pace: {name} was made for {own} steps, and total={total}. Give both the number of steps of full training, "
            "such as epochs * len(loader) of your own loader."
        )
    if getattr(scheduler, "last_epoch", 0) > 0:
        raise ValueError(
            f"run.pace: {name} has made {scheduler.last_epoch} steps already. Call run.pace before its first step, and load a "
            "saved state into the result of run.pace."
        )
    return PacedLR(scheduler, position, total)


def _of_accelerate(scheduler: Any, total: Any) -> Any:
    """Returns the scheduler that accelerate prepared, which steps once per update of all processes."""
    own, state = scheduler.scheduler, scheduler.gradient_state
    several = state.num_steps > 1 or any(one.accelerator_state.num_processes > 1 for one in scheduler.optimizers)
    if several and total is None and not hasattr(own, "total_steps"):
        raise ValueError(
            "run.pace: with accumulated gradients, or several processes, accelerate steps a scheduler another number of times "
            "than there are batches. Give total=, the number of steps that the scheduler was made for."
        )
    return own


class ProgressLR(LRScheduler):
    """Sets the learning rate as a function of progress: right however many steps an epoch turns out to have.

    It follows the training as `Run.pace` has another scheduler follow it: up to the batch that was trained on last, also where
    the loader runs ahead of the loop. In a loop that trains on each batch before it asks for the next one, this is
    `run.progress`.

    Args:
        optimizer: Optimizer whose initial learning rates are the base.
        run: Run that is followed at every `step()`, once per batch, per step of the optimizer or per epoch.
        fn: Function that maps progress in [0, 1] to a factor on the base learning rate.

    Raises:
        TypeError: `fn` is not callable.

    Example:
        >>> from torch import nn
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> import thresher
        >>> model = nn.Linear(1, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loader = DataLoader(TensorDataset(torch.randn(8, 1), torch.arange(8) % 2), batch_size=4)
        >>> run = thresher.attach(
        ...     thresher.FullData(), loader=loader, criterion=nn.CrossEntropyLoss(), model=model, optimizer=optimizer, epochs=2
        ... )
        >>> schedule = ProgressLR(optimizer, run, lambda progress: 1 - progress)
        >>> for x, y in run.loader:
        ...     run.criterion(run.model(x), y).backward()
        ...     optimizer.step()
        ...     schedule.step()
        >>> run.progress, schedule.get_last_lr()
        (0.5, [0.05])
    """

    def __init__(self, optimizer: Optimizer, run: Any, fn: Callable[[float], float]) -> None:
        if not callable(fn):
            raise TypeError(f"ProgressLR: `fn` must map progress to a factor, got {type(fn).__name__}")
        self.fn, self._position = fn, followed(run._epochs)
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Returns the base learning rates times `fn(progress)`."""
        factor = self.fn(self._position.progress)
        return [base * factor for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Returns the state without the run and the function, which are given to the new scheduler."""
        return {key: value for key, value in super().state_dict().items() if key not in {"fn", "_position"}}
