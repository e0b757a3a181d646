"""Checks of what a method is: a frozen dataclass of settings, with a card and the functions of its stage."""

import copy
import dataclasses
import inspect
import pathlib
import pickle
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thresher.methods.card import Card
from thresher.methods.contract import requirements_of
from thresher.testing.promise import promise
from thresher.testing.subjects import BatchSubject, EpochSubject, Subject

PLAIN_TYPES = (bool, int, float, str, type(None))
"""Types of plain values."""


@promise("before", "epoch", "batch")
def check_value(subject: Subject) -> None:
    """Checks that a method is a frozen dataclass without tensors or random state that repr, pickle and copies reproduce.

    Args:
        subject: Method under examination; callers pass the method itself.

    Example:
        >>> import thresher
        >>> @dataclasses.dataclass(frozen=True)
        ... class Listed(thresher.UniformSubset):
        ...     ids: list = dataclasses.field(default_factory=list)
        >>> check_value(Listed(keep=0.5))
        Traceback (most recent call last):
        ...
        thresher.testing.subjects.ContractError: Listed: its setting `ids` owns a list; state belongs to the run
    """
    method = subject.method
    subject.expect(dataclasses.is_dataclass(method), "is not a dataclass; a method is a frozen dataclass of settings")
    frozen = type(method).__dataclass_params__.frozen  # pyright: ignore[reportAttributeAccessIssue]
    subject.expect(frozen, "is not frozen: settings could change while it decides; write @dataclass(frozen=True)")
    for field in dataclasses.fields(method):
        owned = _forbidden_type(getattr(method, field.name))
        subject.expect(not owned, f"its setting `{field.name}` owns a {owned}; state belongs to the run")
    extra = sorted(set(getattr(method, "__dict__", ())) - {field.name for field in dataclasses.fields(method)})
    subject.expect(not extra, f"keeps {', '.join(extra)} beside its settings; a method remembers nothing itself")
    with subject.asked("hash, pickle or deepcopy"):
        again = {"pickle": pickle.loads(pickle.dumps(method)), "deepcopy": copy.deepcopy(method)}
        for how, other in again.items():
            subject.expect(other == method and hash(other) == hash(method), f"{how} gives another method: {other!r}")
    if not any(_is_scores(getattr(method, field.name)) for field in dataclasses.fields(method)):
        with subject.asked("eval(repr(method))"):
            names = {**vars(pathlib), **vars(sys.modules[type(method).__module__]), type(method).__name__: type(method)}
            subject.expect(eval(repr(method), names) == method, f"its repr gives another method: {method!r}")


def _is_scores(value: Any) -> bool:
    return type(value).__module__.startswith("thresher.scores")


def _forbidden_type(value: Any) -> str:
    """Returns the name of the type of a value that no setting may have; "" where the value is allowed."""
    if isinstance(value, (*PLAIN_TYPES, pathlib.PurePath, type)) or inspect.isroutine(value) or _is_scores(value):
        return ""
    if isinstance(value, tuple | frozenset):
        return next(filter(None, map(_forbidden_type, value)), "")
    return "" if dataclasses.is_dataclass(value) else type(value).__name__


@promise("before", "epoch", "batch")
def check_interface(subject: Subject) -> None:
    """Checks that a method has a card, and that its functions take the arguments that the run passes.

    Args:
        subject: Method under examination; callers pass the method itself.

    Example:
        >>> import thresher
        >>> class NoCard(thresher.UniformSubset):
        ...     card = None
        >>> try:
        ...     check_interface(NoCard(keep=0.5))
        ... except AssertionError as error:
        ...     print(error)
        NoCard: has no `card`: add a thresher.methods.card.Card with facts that the settings do not show
    """
    method = subject.method
    card = getattr(method, "card", None)
    subject.expect(
        isinstance(card, Card), "has no `card`: add a thresher.methods.card.Card with facts that the settings do not show"
    )
    if method.stage == "before":
        return
    function = method.plan_epoch if method.stage == "epoch" else method.plan_batch
    wanted = {"epoch": ["epoch", "epochs", "generator"], "batch": ["step", "generator"]}[method.stage]
    parameters = inspect.signature(function).parameters.values()
    named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    subject.expect(
        named == wanted, f"{function.__name__} takes {', '.join(named) or 'nothing'} by name, not {', '.join(wanted)}"
    )
    if method.stage == "batch":
        names = requirements_of(method).signals
        subject.expect(isinstance(names, tuple), f"`signals` is a {type(names).__name__}, it must be a tuple of names")
        _check_active(subject)


def _check_active(subject: Subject) -> None:
    if not requirements_of(subject.method).active:
        return
    for step, progress in enumerate((0.0, 0.3, 0.5, 0.999, 1.0)):
        with subject.asked(f"active({progress}, {step})"):
            answer = subject.method.active(progress, step)
        subject.expect(type(answer) is bool, f"active({progress}, {step}) is {answer!r}, it must be True or False")


@promise("epoch", "batch")
def check_bytes(subject: Subject) -> None:
    """Checks that a method with its default settings remembers as many bytes per sample as its card says.

    Args:
        subject: Method under examination; callers pass the method itself.

    Example:
        >>> import thresher
        >>> class Modest(thresher.Kakurenbo):
        ...     card = dataclasses.replace(thresher.Kakurenbo.card, bytes_per_sample=1)
        >>> try:
        ...     check_bytes(Modest())
        ... except AssertionError as error:
        ...     print(error)
        Modest: its card says 1 bytes per sample, it takes 9
    """
    defaults = {
        f.name: f.default for f in dataclasses.fields(subject.method) if f.init and f.default is not dataclasses.MISSING
    }
    default = subject.of(dataclasses.replace(subject.method, **defaults))
    declared, used = subject.method.card.bytes_per_sample, _bytes_per_sample(default)
    subject.expect(abs(used - declared) < 1e-6, f"its card says {declared:g} bytes per sample, it takes {used:g}")


def _bytes_per_sample(subject: Subject) -> float:
    if isinstance(subject, EpochSubject):
        return subject.table(1).bytes_per_sample
    assert isinstance(subject, BatchSubject)
    if any(field.default is field.default_factory is dataclasses.MISSING for field in dataclasses.fields(subject.method)):
        return _bytes_of(subject.method.init_state()) / subject.samples  # a required setting has a value of every sample
    few, many, size = 64, 1024, 64
    used = []
    for samples in (few, many):
        state = subject.method.init_state()
        for step in range(many // size):
            ids = torch.arange(size) + (step * size) % samples
            _, state = subject.ask({**subject.batch(size, step, samples=samples), "id": ids}, state, step)
        used.append(_bytes_of(state))
    return (used[1] - used[0]) / (many - few)


def _bytes_of(value: Any) -> int:
    """Returns the size of a state: that of the elements of each tensor, and 8 bytes for every other value."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(8 * (not isinstance(name, str)) + _bytes_of(one) for name, one in value.items())
    if isinstance(value, list | tuple):
        return sum(_bytes_of(one) for one in value)
    return 8
