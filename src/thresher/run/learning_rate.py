"""The learning rate of a run: scaled inside optimizer.step, and scheduled by progress where the steps are not known."""

import weakref
from collections.abc import Callable, Iterator
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer


def parts_of(optimizer: Any) -> list[Optimizer]:
    """Returns an optimizer and those that it holds and that update parameters of it, the innermost last.

    SAM, Lookahead and the wrappers of trainers hold the optimizer whose `step` really runs, and may call it without their own.
    """
    own = {id(parameter) for parameter in _parameters(optimizer)}
    found: list[Optimizer] = [optimizer]
    for one in found:
        for inner in _held(one):
            if all(inner is not other for other in found) and any(id(parameter) in own for parameter in _parameters(inner)):
                found.append(inner)
    return found


def _held(optimizer: Any) -> Iterator[Optimizer]:
    for value in list(vars(optimizer).values()):
        several = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        yield from (one for one in several if isinstance(one, Optimizer))


def _parameters(optimizer: Any) -> Iterator[torch.Tensor]:
    return (parameter for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"])


def _mark(lr: Any) -> Any:
    """What a learning rate is known by without waiting for the device that may hold it."""
    return (id(lr), lr._version) if isinstance(lr, torch.Tensor) else lr


class StepHooks:
    """Multiplies the learning rates while `optimizer.step` runs, and puts them back, bit for bit, also when it raises.

    Schedulers, gradient scalers and the user see the unscaled values at all other times. The optimizer does not keep the hooks
    alive: they go with the run that holds them.

    Args:
        optimizer: Optimizer whose step hooks are used, and those of the optimizers that it holds; `remove` takes them away.
        stepped: Function that is called after each step that succeeded.
    """

    def __init__(self, optimizer: Optimizer, stepped: Callable[[], None]) -> None:
        self.scale = 1.0
        self.changes = 0
        """How often in this epoch the learning rate of a step was not that of the step before."""
        self._optimizer = optimizer
        self._stepped = stepped
        self._saved: list[tuple[dict[str, Any], Any]] | None = None
        self._last: Any = None
        self._depth = 0
        self._updated = False
        parts = parts_of(optimizer)
        # A wrapper that was never initialised as an optimizer, as accelerate's, has no hooks: those that it holds have.
        self.parts = [part for part in parts if "_optimizer_step_pre_hooks" in vars(part)]
        innermost = [part for part in self.parts if len(parts_of(part)) == 1] or self.parts
        self._innermost = {id(part) for part in innermost}
        self._leading = innermost[0]
        me: weakref.ref[StepHooks] = weakref.ref(self)
        self._unhook = weakref.finalize(self, _remove, [undo for part in self.parts for undo in _hooked(part, me)])
        self._unhook.atexit = False

    def begin_epoch(self) -> None:
        """Counts changes of the learning rate anew; a change between two epochs is none."""
        self.changes, self._last = 0, None

    def before(self) -> None:
        """Scales the learning rates when the outermost step begins."""
        self._depth += 1
        if self._depth > 1:  # a step that calls its parent's, or that of an optimizer inside, runs the hooks twice
            return
        self._updated = False
        mark = _mark(self._leading.param_groups[0].get("lr"))
        self.changes += mark != self._last and self._last is not None
        self._last = mark
        if self.scale == 1.0:
            return
        self._saved = []
        for group in self._groups():
            lr = group["lr"]
            if isinstance(lr, torch.Tensor):
                self._saved.append((group, lr.clone()))
                lr.mul_(self.scale)
            else:
                self._saved.append((group, lr))
                group["lr"] = lr * self.scale

    def _groups(self) -> Iterator[dict[str, Any]]:
        """Groups of all parts, each once: an optimizer inside another has the same groups, or its own."""
        seen = set()
        for part in self.parts:
            for group in part.param_groups:
                if id(group) not in seen and "lr" in group:
                    seen.add(id(group))
                    yield group

    def _restore(self) -> None:
        saved, self._saved = self._saved, None
        for group, lr in saved or ():
            if isinstance(lr, torch.Tensor):
                group["lr"].copy_(lr)
            else:
                group["lr"] = lr
        if saved:
            self._last = _mark(self._leading.param_groups[0].get("lr"))

    def after(self, part: Optimizer) -> None:
        """Puts the learning rates back when the outermost step has ended.

        Args:
            part: Optimizer whose step ended; the step counts where the innermost one took it.
        """
        self._depth -= 1
        self._updated |= id(part) in self._innermost
        if not self._depth:
            self._restore()
            if self._updated:
                self._stepped()

    def guarded(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a step, and restores in any case: a post hook does not run when the step raises."""
        depth = self._depth
        try:
            return step(*args, **kwargs)
        finally:
            self._depth = depth
            if not depth:
                self._restore()

    def remove(self) -> None:
        """Leaves the optimizer as it was."""
        self._unhook()


def _hooked(part: Optimizer, hooks: "weakref.ref[StepHooks]") -> Iterator[Callable[[], None]]:
    """Hooks one optimizer, and yields functions that take the hooks away."""

    def before(*_: Any) -> None:
        if (alive := hooks()) is not None:
            alive.before()

    def after(optimizer: Optimizer, *_: Any) -> None:
        if (alive := hooks()) is not None:
            alive.after(optimizer)

    yield part.register_step_pre_hook(before).remove
    yield part.register_step_post_hook(after).remove
    step, had_own = part.step, "step" in vars(part)
    holder = weakref.ref(part)

    @wraps(step)
    def guarded(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
        alive = hooks()
        return step(*args, **kwargs) if alive is None else alive.guarded(step, *args, **kwargs)

    part.step = MethodType(guarded, part)
    guard = weakref.ref(guarded)

    def unguard() -> None:
        optimizer, own = holder(), guard()
        if optimizer is None or own is None or getattr(vars(optimizer).get("step"), "__func__", None) is not own:
            return  # a scheduler has wrapped it since: without its run the guard only passes the call on
        del optimizer.step
        if had_own:
            optimizer.step = own.__wrapped__  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]

    yield unguard


def _remove(hooks: list[Callable[[], None]]) -> None:
    for undo in hooks:
        undo()
