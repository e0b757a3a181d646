"""The steps of the user's optimizer: scales the learning rate within steps, counts and checks them."""

import inspect
import time
import weakref
from collections.abc import Callable, Iterator
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thresher.timing import Timing
from thresher.warning import warn


def parts_of(optimizer: Any) -> list[Optimizer]:
    """Returns an optimizer and the optimizers inside it that update the same parameters, the innermost last.

    SAM, Lookahead and wrappers of trainers contain the optimizer whose `step` really runs.
    """
    parameters = _parameters(optimizer)
    optimizers: list[Optimizer] = [optimizer]
    # The list grows while it is walked, because an optimizer inside may hold another one. One that updates none of these
    # parameters is merely kept there, and its steps are its own.
    for outer in optimizers:
        for inner in _inner_optimizers(outer):
            if all(inner is not other for other in optimizers) and parameters & _parameters(inner):
                optimizers.append(inner)
    return optimizers


def _inner_optimizers(optimizer: Any) -> list[Optimizer]:
    held: list[Optimizer] = []
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer):
            held.append(value)
        elif value and isinstance(value, dict | list | tuple):
            held += [
                one
                for one in (value.values() if isinstance(value, dict) else value)
                if isinstance(one, Optimizer)
            ]
    return held


def _parameters(optimizer: Any) -> set[int]:
    groups = getattr(optimizer, "param_groups", ())
    return set().union(*[map(id, group["params"]) for group in groups])


def _rate_mark(lr: Any) -> Any:
    """Returns a value that differs after a change of the learning rate; never waits for the device that may hold the rate."""
    return (id(lr), lr._version) if isinstance(lr, torch.Tensor) else lr


class StepHooks:
    """Multiplies the learning rates while `optimizer.step` runs, and restores them exactly, even after an error.

    Schedulers, gradient scalers and the user see the unscaled values at all other times. The hooks end when their run is
    deleted.

    Args:
        optimizer: Optimizer that gets the hooks, as do the optimizers inside it; `remove` removes them.
        stepped: Function that is called after each step without an error.
        trains: Function that returns whether the next step trains on a loss of the run; only then are rates scaled.
        timing: Records how the time of the run is spent.
        begins: Function that is called before each step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        stepped: Callable[[], None],
        trains: Callable[[], bool],
        timing: Timing,
        begins: Callable[[], None] = lambda: None,
    ) -> None:
        self._trains = trains
        self._timing = timing
        self._begins = begins
        self.scale = 1.0
        self.changes = 0
        """Number of steps of this epoch whose learning rate differed from that of the step before."""
        self._optimizer = optimizer
        self._stepped = stepped
        # Parameter groups with their learning rates before the step in progress.
        self._unscaled: list[tuple[dict[str, Any], Any]] | None = None
        self._last_mark: Any = None
        self._depth = 0
        """Number of hooked steps in progress: that of a wrapper calls that of the optimizer inside."""
        self._updated = False
        """Whether an innermost optimizer made its step, and so updated the parameters."""
        parts = parts_of(optimizer)
        # A wrapper whose base class was not initialized, as that of accelerate, has no hooks; the optimizers inside it do.
        self.parts = [part for part in parts if "_optimizer_step_pre_hooks" in vars(part)]
        innermost = [part for part in self.parts if len(parts_of(part)) == 1] or self.parts
        self._innermost = {id(part) for part in innermost}
        self._first_innermost = innermost[0]
        weak_self: weakref.ref[StepHooks] = weakref.ref(self)
        # A run without references leaves the optimizer as it was, because the hooks refer to the run weakly.
        self._unhook = weakref.finalize(
            self, _remove, [undo for part in self.parts for undo in _hook(part, weak_self)]
        )
        self._unhook.atexit = False

    def begin_epoch(self) -> None:
        """Resets the count of changes of the learning rate within an epoch."""
        self.changes = 0
        self._last_mark = None

    def before(self) -> None:
        """Scales the learning rates at the start of the outermost step."""
        begin = time.perf_counter()
        self._depth += 1
        # A step that calls its parent's, or that of an optimizer inside, runs the hooks twice.
        if self._depth > 1:
            return
        self._updated = False
        self._begins()
        # A schedule that steps within the epoch shows in the rates of the steps.
        mark = _rate_mark(self._first_innermost.param_groups[0].get("lr"))
        self.changes += mark != self._last_mark and self._last_mark is not None
        self._last_mark = mark
        if self.scale != 1.0 and self._trains():
            self._unscaled = [*map(self._scale_group, self._groups())]
        self._timing.attribution_s += time.perf_counter() - begin

    def _scale_group(self, group: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """Scales the learning rate of a group, and returns the group with the rate that it had."""
        lr = group["lr"]
        before = lr.clone() if isinstance(lr, torch.Tensor) else lr
        if isinstance(lr, torch.Tensor):
            # In place: a compiled or captured optimizer has the address of this tensor.
            lr.mul_(self.scale)
        else:
            group["lr"] = lr * self.scale
        return group, before

    def _groups(self) -> Iterator[dict[str, Any]]:
        """Yields the parameter groups of all optimizers, each once: one inside another has the same groups, or its own."""
        seen = set()
        for part in self.parts:
            for group in part.param_groups:
                if id(group) not in seen and "lr" in group:
                    seen.add(id(group))
                    yield group

    def parameters(self) -> dict[int, Tensor]:
        """Returns the parameters that the optimizer, and the optimizers inside it, update now, by their identities."""
        return {
            id(parameter): parameter
            for part in self.parts
            for group in part.param_groups
            for parameter in group["params"]
        }

    def _restore(self) -> None:
        saved = self._unscaled
        self._unscaled = None
        for group, lr in saved or ():
            if isinstance(lr, torch.Tensor):
                group["lr"].copy_(lr)
            else:
                group["lr"] = lr
        if saved:
            # Restoring a tensor raises its version, which would count as a change of the rate.
            self._last_mark = _rate_mark(self._first_innermost.param_groups[0].get("lr"))

    def after(self, part: Optimizer) -> None:
        """Restores the learning rates at the end of the outermost step.

        Args:
            part: Optimizer whose step ended; only a step of the innermost optimizer counts.
        """
        begin = time.perf_counter()
        self._depth -= 1
        # GradScaler skips the step of the inner optimizer if gradients overflow, although that of a wrapper runs.
        self._updated |= id(part) in self._innermost
        if not self._depth:
            self._restore()
        self._timing.attribution_s += time.perf_counter() - begin
        if not self._depth and self._updated:
            self._stepped()

    def guard(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a step, and restores the rates even after an error, for which PyTorch calls no post hook."""
        depth = self._depth
        try:
            return step(*args, **kwargs)
        finally:
            # The post hook of a step that raised did not count the depth down.
            self._depth = depth
            if not depth:
                self._restore()

    def remove(self) -> None:
        """Removes the hooks from the optimizer."""
        self._unhook()


def _hook(part: Optimizer, hooks: "weakref.ref[StepHooks]") -> Iterator[Callable[[], None]]:
    """Hooks one optimizer, and yields functions that take the hooks away."""

    def before(*_: Any) -> None:
        if (alive := hooks()) is not None:
            alive.before()

    def after(optimizer: Optimizer, *_: Any) -> None:
        if (alive := hooks()) is not None:
            alive.after(optimizer)

    yield part.register_step_pre_hook(before).remove
    yield part.register_step_post_hook(after).remove
    # A post hook does not run if the step raises: the guard around the step restores the rates in any case.
    yield _guard_step(part, hooks)


def _guard_step(part: Any, hooks: "weakref.ref[StepHooks]") -> Callable[[], None]:
    """Replaces `step` of an optimizer by a function that calls it through the hooks; returns a function that undoes this."""
    method = part.step
    # A scheduler replaces `step` of an optimizer in the same way, by an attribute of the instance.
    had_own = "step" in vars(part)
    holder = weakref.ref(part)

    @wraps(method)
    def guarded(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
        alive = hooks()
        if alive is None:
            return method(*args, **kwargs)
        return alive.guard(method, *args, **kwargs)

    # GradScaler reads the signature of the bound method, which drops the first parameter; a guard below it has one, too.
    signature = inspect.signature(method)
    first = inspect.Parameter("_optimizer", inspect.Parameter.POSITIONAL_ONLY)
    others = [
        parameter for parameter in signature.parameters.values() if parameter.name != first.name
    ]
    vars(guarded)["__signature__"] = signature.replace(parameters=[first, *others])
    part.step = MethodType(guarded, part)
    guard = weakref.ref(guarded)

    def unguard() -> None:
        optimizer = holder()
        guarded = guard()
        # A scheduler may have wrapped the guard since: it stays, and without its run only passes the call on.
        if (
            optimizer is None
            or guarded is None
            or getattr(vars(optimizer).get("step"), "__func__", None) is not guarded
        ):
            return
        del optimizer.step
        if had_own:
            optimizer.step = guarded.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]

    return unguard


def _remove(hooks: list[Callable[[], None]]) -> None:
    for undo in hooks:
        undo()


CHANGES = 2
"""From this number of changes of the learning rate within an epoch on, a schedule is taken to count steps."""


class UnseenSteps:
    """The steps of a run that got no optimizer: they are neither counted nor checked."""

    seen = False
    """Whether the steps of the loop are noticed."""
    by_progress = False
    """Whether the loop has read `run.progress` in this epoch: its schedule may follow that."""
    paced = False
    """Whether a schedule follows the progress of training, by `run.pace` or as `ProgressLR`."""

    def begin_epoch(self, batches: int, *, scale: float, resumed: bool) -> None:
        """Begins an epoch; see `StepChecks.begin_epoch`."""

    def end_epoch(self, epoch: int, batches: int, full: int) -> None:
        """Ends a complete epoch; see `StepChecks.end_epoch`."""

    def check_steps(self, epoch: int, steps: int, backward: int, scale: float) -> None:
        """Ends the last step of an epoch; see `StepChecks.check_steps`."""

    def remove(self) -> None:
        """Removes the hooks from the optimizer."""


class StepChecks(UnseenSteps):
    """Warns, once for each cause, if steps went unnoticed, kept an unscaled rate, or are fewer than a schedule expects.

    Args:
        hooks: Hooks of the optimizer.
        optimizer: Name of the type of the optimizer, for error messages.
        model: The user's model; None if there is none.
    """

    seen = True

    def __init__(self, hooks: StepHooks, optimizer: str, model: nn.Module | None) -> None:
        self.hooks = hooks
        self._optimizer = optimizer
        self._model = nn.Module() if model is None else model
        self._from_start = False
        self._batches = 0
        self._versions: dict[int, int] = {}
        """Version of each parameter at the beginning of the epoch, by its identity."""
        self._warned_of: set[str] = set()

    def begin_epoch(self, batches: int, *, scale: float, resumed: bool) -> None:
        """Begins an epoch.

        Args:
            batches: Number of batches since the run began.
            scale: Factor on the learning rate.
            resumed: Whether an interrupted epoch continues, whose earlier batches are unknown.
        """
        # Only steps on losses of the run use the scale: it need not be reset between epochs.
        self.hooks.scale = scale
        self.hooks.begin_epoch()
        self._batches = batches
        self._from_start = not resumed
        self.by_progress = False
        self._versions = {
            id(parameter): parameter._version for parameter in self._model.parameters()
        }

    def _updated_elsewhere(self) -> bool:
        """Whether a parameter was updated in this epoch that the optimizer does not have now."""
        # Looked at anew each epoch: a loop that unfreezes a body adds a parameter group, or a second optimizer. An optimizer
        # updates in place, which raises the versions: this needs no value, and waits for no device.
        attached = self.hooks.parameters()
        elsewhere = [
            parameter
            for parameter in self._model.parameters()
            if parameter.requires_grad and id(parameter) not in attached
        ]
        # A parameter that came within the epoch has no version to compare with.
        return any(
            parameter._version != self._versions.get(id(parameter), parameter._version)
            for parameter in elsewhere
        )

    def end_epoch(self, epoch: int, batches: int, full: int) -> None:
        """Checks a complete epoch.

        Args:
            epoch: Number of the epoch.
            batches: Number of batches since the run began.
            full: Number of batches of an epoch over all samples.
        """
        # A schedule of a fixed number of steps shows by changes of the rate within the epoch and by fewer batches than full
        # training has.
        batches -= self._batches
        if (
            not self._from_start
            or self.by_progress
            or self.paced
            or batches >= full
            or self.hooks.changes < CHANGES
        ):
            return
        self._warn(
            "schedule",
            f"The learning rate changes within the epoch, and epoch {epoch} had {batches} batches, while an epoch over all "
            f"samples has {full}. A schedule over a fixed number of steps, such as OneCycleLR with epochs * len(loader) steps, "
            "then does not reach its end, and its learning rates are wrong. Use scheduler = run.pace(scheduler), or "
            "thresher.ProgressLR(optimizer, run, fn), which follow the progress of training. A schedule made for exactly this "
            "number of batches is right.",
        )

    def check_steps(self, epoch: int, steps: int, backward: int, scale: float) -> None:
        """Checks the steps of an epoch that is over.

        Args:
            epoch: Number of the epoch.
            steps: Number of noticed optimizer steps.
            backward: Number of samples with a recorded loss.
            scale: Factor on the learning rate in the plan of the epoch.
        """
        if backward and not steps:
            if scale == 1:
                unscaled = ""
            else:
                unscaled = (
                    f" So the learning rate was not multiplied by {scale:.3g}, as the method asks."
                )
            self._warn(
                "steps",
                f"In epoch {epoch}, {backward} samples had a loss, but the {self._optimizer} of the run made no step.{unscaled} "
                "Pass the optimizer whose step() the loop calls; after a change of the optimizer call run.detach() and create "
                "another run.",
            )
        elif scale != 1 and self._updated_elsewhere():
            self._warn(
                "elsewhere",
                f"In epoch {epoch}, parameters were updated that the attached {self._optimizer} does not have. The method "
                f"multiplies the learning rate by {scale:.3g}, but only for the attached optimizer. Use one optimizer with "
                "several parameter groups.",
            )

    def remove(self) -> None:
        """Removes the hooks from the optimizer."""
        self.hooks.remove()

    def _warn(self, cause: str, message: str) -> None:
        if cause not in self._warned_of:
            self._warned_of.add(cause)
            warn(f"{message} This warning is given once.")
