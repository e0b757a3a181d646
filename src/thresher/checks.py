"""What attach() refuses, before anything is changed."""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from thresher.criteria import Criterion, unreadable
from thresher.methods import EpochMethod


def single(method: Any) -> EpochMethod:
    """The one method of `attach(method)`."""
    methods = list(method) if isinstance(method, list | tuple) else [method]
    if len(methods) != 1:
        raise ValueError(f"`method` must be one method, or a list with at most one method a stage; got {len(methods)} of them")
    chosen = methods[0]
    stage = getattr(chosen, "stage", None)
    if isinstance(chosen, type):
        raise TypeError(f"`method` must be an instance, got the class {chosen.__name__}; write {chosen.__name__}()")
    if stage == "batch":
        raise ValueError(f"`method` {type(chosen).__name__} selects inside the batch, which this version does not support yet")
    if stage != "epoch" or not isinstance(chosen, EpochMethod):
        raise TypeError(
            f"`method` must have stage = 'epoch', columns() and plan_epoch(), got {type(chosen).__name__}; see thresher.methods"
        )
    return chosen


def check_settings(epochs: Any, forward_passes: Any, scoring: Any, on_nonfinite: Any, process_group: Any, seed: Any) -> None:
    """Settings of `attach` that stand for themselves."""
    if not isinstance(epochs, int) or isinstance(epochs, bool) or epochs < 1:
        raise ValueError(f"`epochs` must be a whole number of 1 or more, got {epochs!r}")
    if forward_passes not in ("auto", "once", "twice"):
        raise ValueError(f"`forward_passes` must be 'auto', 'once' or 'twice', got {forward_passes!r}")
    if scoring is not None:
        raise ValueError("`scoring` belongs to methods that select in the batch, which this version does not support yet")
    if on_nonfinite not in ("keep", "raise"):
        raise ValueError(f"`on_nonfinite` must be 'keep' or 'raise', got {on_nonfinite!r}")
    if not isinstance(seed, int):
        raise TypeError(f"`seed` must be an int, got {type(seed).__name__}")
    several = torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    if process_group is not None or several:
        raise ValueError("`process_group`: training in several processes is not supported in this version; run one process")


def check_needs(
    method: Any, adapter: Criterion | None, model: nn.Module | None, optimizer: Optimizer | None, signals: Any
) -> None:
    """What a method needs of the training it is attached to."""
    name = type(method).__name__
    if getattr(method, "scales_lr", False) and optimizer is None:
        raise ValueError(
            f"{name} scales the learning rate: pass attach(optimizer=...), or switch that off (Kakurenbo: adjust_lr=False)"
        )
    if getattr(method, "refreshes", False) and (model is None or adapter is None):
        missing = "model" if model is None else "criterion"
        raise ValueError(f"{name} forwards samples that it left out, to refresh their losses: pass attach({missing}=...)")
    wanted = {column.signal or column_name for column_name, column in method.columns().items()}
    if wanted & {"correct", "confidence"} and signals is None and adapter is not None and adapter.kind == "values":
        raise ValueError(f"{name} needs signals that this criterion does not give. {unreadable(adapter.own)}")


def innermost(optimizer: Any) -> Optimizer | None:
    """The optimizer whose hooks run: accelerate's wrapper holds it."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, Optimizer) else optimizer


def device_of(device: torch.device | str | None, model: nn.Module | None) -> torch.device | None:
    """Where batches go: as told, else where the model is; None leaves them where they are."""
    if device is not None:
        return torch.device(device)
    if model is None:
        return None
    tensor = next(iter((*model.parameters(), *model.buffers())), None)
    return None if tensor is None else tensor.device
