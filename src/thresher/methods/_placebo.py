"""A method with its signals permuted: a control that shows whether they matter at all."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thresher.methods.contract import Method

NAME = "Placebo"
"""End of the name of such a method."""


def placebo_of(method: Method) -> Any:
    """Returns a method that decides as another one does, by the signals of other samples.

    A batch method gets the signals of its batch in random order. An epoch method gets the records of the samples that were
    trained on in random order; all columns of a sample stay together, and samples without a record keep their place.

    Args:
        method: Method of the epoch or the batch stage.

    Raises:
        ValueError: It decides before training, where there are no signals of a run to permute.

    Example:
        >>> from thresher import BigLoss
        >>> type(placebo_of(BigLoss())).__name__
        'BigLossPlacebo'
    """
    kind = type(method)
    parts = {"epoch": {"plan_epoch": _plan_epoch}, "batch": {"plan_batch": _plan_batch}}
    if method.stage not in parts:
        raise ValueError(f"{kind.__name__} decides before training; a placebo is for methods of the epoch and the batch stage")
    permuted = type(kind.__name__ + NAME, (kind,), {**parts[method.stage], "__doc__": kind.__doc__})
    copied = object.__new__(permuted)
    vars(copied).update(vars(method))
    return copied


def _plan_epoch(self: Any, records: Mapping[str, Tensor], *, generator: torch.Generator, **settings: int) -> Any:
    columns = {name: records[name] for name in self.columns() if name in records}
    recorded = [column for column in columns.values() if column.is_floating_point()]
    seen = torch.stack([column.isfinite().cpu() for column in recorded]).all(0).nonzero().flatten() if recorded else None
    if seen is not None and len(seen):
        other = seen[torch.randperm(len(seen), generator=generator)]
        for name, column in columns.items():
            here, there = seen.to(column.device), other.to(column.device)
            columns[name] = column.clone().index_copy_(0, here, column.index_select(0, there))
    own: Any = super(type(self), self)
    return own.plan_epoch({**records, **columns}, generator=generator, **settings)


def _plan_batch(self: Any, signals: Mapping[str, Tensor], state: Any, *, step: int, generator: torch.Generator) -> Any:
    order = torch.randperm(len(signals["id"]), generator=generator)
    permuted = {
        name: values if name == "id" else values.index_select(0, order.to(values.device)) for name, values in signals.items()
    }
    own: Any = super(type(self), self)
    return own.plan_batch(permuted, state, step=step, generator=generator)
