"""What a method would do to the time of a training, from the first epochs of it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thresher.methods import defines, requirements_of
from thresher.records import EPOCH, Column
from thresher_lab.advise.pace import Pace
from thresher_lab.training.specs import Spec


def forecast(
    spec: Spec,
    refusal: str | None,
    pace: Pace,
    own: Mapping[str, float],
    signals: Sequence[Mapping[str, Tensor]],
    epochs: int,
    seed: int,
) -> dict[str, Any]:
    """Returns what one method would do to the training time: an entry of `methods` in the advice.

    Args:
        spec: The method.
        refusal: Reason why the method cannot be attached; None where it can.
        pace: Times of a step of full training.
        own: Seconds that each method computes for a batch, by label.
        signals: Signals of the samples after each epoch of the probe: name to tensor of shape (seen,).
        epochs: Number of epochs of the planned training.
        seed: Random seed of the draws of plans.
    """
    method: Any = spec.create()
    refreshes, stage = requirements_of(method).refresh is not None, _stage_of(method)
    row: dict[str, Any] = {"method": spec.label, "stage": stage, "settings": spec.settings, "refreshes": refreshes}
    if refusal is not None:
        return row | {"refused": refusal}
    compute = own[spec.label]
    row |= {"refused": None, "compute_s": compute}
    if stage == "batch":
        saves = 1 - pace.step(compute) / pace.full
        return row | {"saves": saves, "at_most": saves, "left_out": None, "forwarded": None}
    in_batches = spec.batch.get("spend", "batches" if requirements_of(method).smaller_batches else "steps") == "batches"
    by_losses = planned_shares(method, signals, epochs, seed)
    if_learned = planned_shares(method, [all_learned(signals[-1])], epochs, seed)
    saves = saved_by_plans(pace, compute, *by_losses, in_batches=in_batches)
    at_most = max(saves, saved_by_plans(pace, compute, *if_learned, in_batches=in_batches))
    return row | {"saves": saves, "at_most": at_most, "left_out": by_losses[0], "forwarded": by_losses[1]}


def is_foreseeable(method: Any) -> bool:
    """Returns whether a method chooses in the batch, or plans epochs by nothing but the signals of one epoch."""
    if _stage_of(method) != "epoch" or defines(method, "full_pass"):
        return _stage_of(method) == "batch"
    return all(column.merge in ("last", "sum", "plan") and column.signal != EPOCH for column in method.columns().values())


def planned_shares(method: Any, signals: Sequence[Mapping[str, Tensor]], epochs: int, seed: int) -> tuple[float, float]:
    """Returns the shares of the samples of all epochs that a method leaves out, and that it only forwards.

    Args:
        method: Method that plans epochs.
        signals: Signals after the first, second, ... epoch; the last ones stand for all later epochs.
        epochs: Number of epochs of the training.
        seed: Random seed of the draws of plans.
    """
    n, generator = len(signals[0]["loss"]), torch.Generator().manual_seed(seed)
    planned = {name: column for name, column in method.columns().items() if column.merge == "plan"}
    remembered = {name: torch.full((n,), column.fill, dtype=column.dtype) for name, column in planned.items()}
    left_out = forwarded = 0
    for epoch in range(epochs):
        records = _records_from(method, signals[min(max(epoch, 1), len(signals)) - 1]) | remembered
        plan = method.plan_epoch(records, epoch=epoch, epochs=epochs, generator=generator)
        remembered |= plan.remember
        left_out += n - len(plan.ids)
        forwarded += 0 if plan.refresh is None else len(plan.refresh)
    return left_out / n / epochs, forwarded / n / epochs


def saved_by_plans(pace: Pace, compute: float, left_out: float, forwarded: float, *, in_batches: bool = False) -> float:
    """Returns the share of the time that plans save.

    Args:
        pace: Times of a step of full training.
        compute: Seconds that the method computes for a batch.
        left_out: Share of the samples that are left out, [0, 1]; they are not loaded, unless they are forwarded.
        forwarded: Share of the samples that are loaded for a forward pass only, [0, 1].
        in_batches: Whether there are as many steps as in full training, with smaller batches. Default: False, fewer steps.
    """
    kept = 1 - left_out
    trained = pace.step(compute * pace.of_smaller(kept), kept) if in_batches else kept * pace.step(compute)
    return 1 - (trained + forwarded * pace.step(pace.scoring)) / pace.full


def all_learned(signals: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the signals of samples that are all learned but one: no loss, right, and certain."""
    learned = {name: torch.ones_like(values) for name, values in signals.items()}
    learned["loss"] = torch.zeros_like(signals["loss"])
    learned["loss"][-1] = 1.0
    return learned


def columns_of(spec: Spec) -> dict[str, Column]:
    """Returns the columns that a method records of the loop; none where it does not plan epochs."""
    method: Any = spec.create()
    columns: dict[str, Column] = method.columns() if _stage_of(method) == "epoch" else {}
    return {name: column for name, column in columns.items() if column.merge != "plan"}


def _stage_of(method: Any) -> str | None:
    """Returns the stage of a method; None for a list of methods of several stages."""
    return getattr(method, "stage", None)


def _records_from(method: Any, signals: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns signals under the names of a method's columns, without those that the training does not give."""
    columns: dict[str, Column] = method.columns()
    recorded = {name: column for name, column in columns.items() if (column.signal or name) in signals}
    return {name: signals[column.signal or name].to(column.dtype) for name, column in recorded.items()}
