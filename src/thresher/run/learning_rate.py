"""Learning-rate schedules that follow the progress of training, however many steps an epoch has."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from thresher.run.progress import Progress
from thresher.warning import warn


def follow_clock(timeline: Any) -> Progress:
    """Returns the clock of a run, for a schedule that follows it.

    Args:
        timeline: Timeline of the run.
    """
    # A schedule that follows the run ends in time, so that no warning about fewer steps is due.
    timeline.steps.paced = True
    return timeline.progress


FIRST_CALLS = 3
"""Number of calls of `step` that show whether the loop steps a scheduler once per batch."""


class PacedLR(LRScheduler):
    """A scheduler that advances the user's scheduler by the samples consumed since the last step. See `Run.pace`.

    Args:
        scheduler: The user's scheduler, before its first step.
        clock: Clock of the run; None if the run trains in full, so that a step is one of the user's scheduler.
        total: Number of steps of the scheduler in full training.
        by_batches: Whether `total` is the default, the number of batches.
    """

    def __init__(
        self,
        scheduler: LRScheduler,
        clock: Progress | None,
        total: int,
        *,
        by_batches: bool = False,
    ) -> None:
        # LRScheduler.__init__ is not called: the user's scheduler has set the learning rates, and it would set them again.
        self.scheduler = scheduler
        self.total = total
        self.stepped = 0
        self._clock = clock
        self._was_loaded = False
        self._first_calls: list[int] | None = [] if by_batches else None

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
            RuntimeError: The state of the scheduler was loaded, but not the state of the run.
        """
        if epoch is not None:
            raise TypeError(
                "run.pace: step(epoch) is not supported. Call step() without arguments."
            )
        # Without a clock: the loop may leave an epoch early, as with `break`, and steps that it did not make do not count.
        now = self.stepped + 1 if self._clock is None else self._clock.steps(self.total)
        if self._was_loaded and now < self.stepped:
            raise RuntimeError(
                f"run.pace: the loaded scheduler had made {self.stepped} steps, but the run is only at step {now} of "
                f"{self.total}. Load the state of the run saved with it: run.load_state_dict(state)."
            )
        self._was_loaded = False
        if self._first_calls is not None and self._clock is not None:
            self._check_calls(self._first_calls, self._clock.batch)
        # One by one, because a scheduler may compute a rate from the one before. No step if the clock went back, as after a
        # loop without training, which does not count as an epoch.
        for _ in range(now - self.stepped):
            self.scheduler.step()
            self.stepped += 1

    def _check_calls(self, batches: list[int], batch: int) -> None:
        """Warns if the loop does not step once per batch; `batches` has the last batch at each earlier call."""
        batches.append(batch)
        if len(batches) < FIRST_CALLS:
            return
        self._first_calls = None
        # Two or more batches per call, so that a loop that skips a batch gets no warning.
        if batches[-1] - batches[0] >= 2 * (FIRST_CALLS - 1):
            warn(
                f"run.pace: the scheduler has no number of steps, so it is paced for one step per batch ({self.total} in full "
                "training), but the loop steps it once for several batches, as with accumulated gradients. Its learning rates "
                "are wrong. Pass total=, the number of steps that it makes in full training: run.pace(scheduler, total=...)."
            )

    def get_last_lr(self) -> list[float | Tensor]:
        """Returns the learning rates that the user's scheduler set last."""
        return self.scheduler.get_last_lr()

    def get_lr(self) -> list[float | Tensor]:
        """Returns the learning rates of the user's scheduler."""
        return self.scheduler.get_lr()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the user's scheduler, and the number of its steps so far."""
        return {
            "scheduler": self.scheduler.state_dict(),
            "total": self.total,
            "stepped": self.stepped,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a saved state.

        Args:
            state_dict: State that `state_dict` returned, with the same `total`.

        Raises:
            ValueError: The state was saved by the original scheduler, or has another `total`; nothing was changed.
        """
        missing = {"scheduler", "total", "stepped"} - set(state_dict)
        if missing:
            raise ValueError(
                f"run.pace: the state lacks {', '.join(sorted(missing))}: it was not saved by a paced scheduler. Load it into "
                "the scheduler that you passed to run.pace, or save the scheduler that run.pace returns."
            )
        if state_dict["total"] != self.total:
            saved = state_dict["total"]
            raise ValueError(
                f"run.pace: the state was saved with total={saved}, but this scheduler has total={self.total}"
            )
        self.scheduler.load_state_dict(dict(state_dict["scheduler"]))
        self.stepped = state_dict["stepped"]
        self._was_loaded = True

    def __getattr__(self, name: str) -> Any:
        # `copy` and `pickle` ask for attributes before there are any: the next line would call this method again, endlessly.
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)


def pace(scheduler: Any, clock: Progress, total: Any, *, exact: bool = False) -> PacedLR:
    """Returns a scheduler that follows the progress of training. See `Run.pace`.

    Args:
        scheduler: The user's scheduler.
        clock: Clock of the run.
        total: Number of steps in full training; None for the default.
        exact: Whether the run trains in full, so that the user's scheduler steps whenever the loop steps it. Default: False.

    Raises:
        TypeError: `scheduler` is not a scheduler that steps without arguments.
        ValueError: `total` is not a number of steps, is unknown, or contradicts the scheduler; or the scheduler has already
            stepped.
    """
    # By name, because accelerate need not be installed.
    if type(scheduler).__name__ == "AcceleratedScheduler":
        scheduler = _of_accelerate(scheduler, total)
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau | PacedLR):
        raise TypeError(
            "run.pace: `scheduler` must be a torch.optim.lr_scheduler.LRScheduler that counts steps, such as OneCycleLR, got "
            f"{type(scheduler).__name__}"
        )
    name = type(scheduler).__name__
    declared = getattr(scheduler, "total_steps", None)
    if clock.full_steps == 0:
        raise ValueError(
            "run.pace: the loader has no batches. With drop_last=True, the dataset must have enough samples for one."
        )
    if clock.full_steps is None:
        raise ValueError(
            "run.pace: the dataset is an IterableDataset without a length, so progress is unknown. Give the IterableDataset a "
            "__len__, or call the scheduler once per epoch without run.pace."
        )
    by_batches = declared is None and total is None
    total = declared or clock.full_steps if total is None else total
    if isinstance(total, bool) or not isinstance(total, int) or total < 1:
        raise ValueError(
            f"run.pace: `total` must be the number of steps of full training, 1 or more, got {total!r}"
        )
    if declared is not None and total != declared:
        raise ValueError(
            f"run.pace: {name} was created for {declared} steps, but total={total}. Both must be the number of steps of full "
            "training, such as epochs * len(loader) with your own loader."
        )
    if getattr(scheduler, "last_epoch", 0) > 0:
        raise ValueError(
            f"run.pace: {name} has made {scheduler.last_epoch} steps already. Call run.pace before its first step, and load a "
            "saved state into the scheduler that run.pace returns."
        )
    return PacedLR(scheduler, None if exact else clock, total, by_batches=by_batches)


def _of_accelerate(scheduler: Any, total: Any) -> Any:
    """Returns the scheduler that accelerate prepared, which steps once per update of all processes."""
    inner = scheduler.scheduler
    state = scheduler.gradient_state
    several = state.num_steps > 1 or any(
        optimizer.accelerator_state.num_processes > 1 for optimizer in scheduler.optimizers
    )
    if several and total is None and not hasattr(inner, "total_steps"):
        raise ValueError(
            "run.pace: with accumulated gradients, or several processes, accelerate does not step a scheduler once per batch. "
            "Pass total=, the number of steps for which the scheduler was created."
        )
    return inner


class ProgressLR(LRScheduler):
    """Sets the learning rate as a function of `run.progress`, however many steps an epoch has.

    The factor is `fn(run.progress)`, even if the loader runs ahead of the loop.

    Args:
        optimizer: Optimizer whose initial learning rates are the base.
        run: Run whose progress is read at every `step()`. Call `step()` per batch, per optimizer step or per epoch.
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
            raise TypeError(
                f"ProgressLR: `fn` must map progress to a factor, got {type(fn).__name__}"
            )
        # Before the base class, whose constructor makes a first step and so asks for a rate.
        self.fn = fn
        self._clock = follow_clock(run._timeline)
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Returns the base learning rates times `fn(progress)`."""
        factor = self.fn(self._clock.share)
        return [base * factor for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Returns the state without `run` and `fn`; pass these to the new scheduler."""
        # LRScheduler saves all attributes but the optimizer.
        return {
            key: value for key, value in super().state_dict().items() if key not in {"fn", "_clock"}
        }
