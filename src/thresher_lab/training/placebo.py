"""A method with its signals permuted: a control that shows whether they matter at all."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thresher.losses.signals import rows_in_order
from thresher.methods import Method, defines, requirements_of
from thresher.records import Column

NAME = "Placebo"
"""End of the name of such a method."""
PASSED = ("error", "feature", "label")
"""Columns that a full pass may add to the records."""


def why_no_placebo(method: Method) -> str:
    """Returns why a method has no placebo, without a full stop; "" where it has one.

    Args:
        method: Method of any stage.

    Example:
        >>> from thresher import RandomBackprop
        >>> why_no_placebo(RandomBackprop())
        'RandomBackprop chooses without losses or scores: there is nothing to permute'
    """
    name = type(method).__name__
    needs = requirements_of(method)
    if method.stage == "batch":
        chooses_by = needs.signals
    elif method.stage == "epoch":
        columns: dict[str, Column] = method.columns()
        optional = any(column.optional is not None for column in columns.values())
        chooses_by = defines(method, "full_pass") or ((needs.records or optional) and columns)
    else:
        return f"{name} decides before training; a placebo is for methods of the epoch and the batch stage"
    if chooses_by:
        return ""
    return f"{name} chooses without losses or scores: there is nothing to permute"


def placebo_of(method: Method) -> Any:
    """Returns a method that decides as another one does, by the signals of other samples.

    A batch method gets the signals of its batch in random order, together with the ids. An epoch method gets the records of the
    samples that were trained on, and the results of a full pass, in random order; all values of a sample stay together. Samples
    without a record keep their place, as do those that a plan has marked by a number that is not finite, and so does what
    earlier plans have remembered.

    Args:
        method: Method of the epoch or the batch stage that chooses by signals.

    Raises:
        ValueError: It decides before training, where there are no signals of a run to permute, or without signals.

    Example:
        >>> from thresher import BigLoss
        >>> type(placebo_of(BigLoss())).__name__
        'BigLossPlacebo'
    """
    if reason := why_no_placebo(method):
        raise ValueError(reason)
    kind = type(method)
    if method.stage == "epoch":
        plan = {"plan_epoch": _plan_epoch}
    else:
        plan = {"plan_batch": _plan_batch}
    permuted = type(kind.__name__ + NAME, (kind,), {**plan, "__doc__": kind.__doc__})
    copied = object.__new__(permuted)
    vars(copied).update(vars(method))
    return copied


def _plan_epoch(
    self: Any, records: Mapping[str, Tensor], *, generator: torch.Generator, **settings: int
) -> Any:
    declared: dict[str, Column] = self.columns()
    signals = [name for name, column in declared.items() if column.merge != "plan"]
    columns = {name: records[name] for name in (*signals, *PASSED) if name in records}
    marks = {name: records[name] for name, column in declared.items() if _marks(column)}
    if columns and len(seen := _with_values({**marks, **columns}, declared)):
        other = seen[torch.randperm(len(seen), generator=generator)]
        for name, column in columns.items():
            here = seen.to(column.device)
            there = other.to(column.device)
            columns[name] = column.clone().index_copy_(0, here, column.index_select(0, there))
    plain: Any = super(type(self), self)
    return plain.plan_epoch({**records, **columns}, generator=generator, **settings)


def _marks(column: Column) -> bool:
    """Whether plans write the column and can mark samples in it by a number that is not finite, as those that are held back."""
    return column.merge == "plan" and column.dtype.is_floating_point and math.isfinite(column.fill)


def _with_values(columns: Mapping[str, Tensor], declared: Mapping[str, Column]) -> Tensor:
    """Returns the ids of the samples that have a value in all columns: a finite one, or one other than at the start."""
    there = torch.ones(len(next(iter(columns.values()))), dtype=torch.bool)
    for name, column in columns.items():
        if column.is_floating_point():
            there &= (
                column.isfinite().flatten(1).all(1).cpu()
                if column.ndim > 1
                else column.isfinite().cpu()
            )
            if name in declared and declared[name].merge != "plan" and declared[name].fill:
                there &= (column != declared[name].fill).cpu()
        elif name in declared and column.dtype is not torch.bool:
            there &= (column != declared[name].fill).cpu()
    return there.nonzero().flatten()


def _plan_batch(
    self: Any, signals: Mapping[str, Tensor], state: Any, *, step: int, generator: torch.Generator
) -> Any:
    order = torch.randperm(len(signals["id"]), generator=generator)
    permuted = rows_in_order(signals, order.to(signals["id"].device))
    plain: Any = super(type(self), self)
    return plain.plan_batch(permuted, state, step=step, generator=generator)
