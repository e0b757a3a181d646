"""Splits the argument `method` of `attach` into methods that choose before training, before each epoch, in each batch."""

from typing import Any

from thresher.methods.contract import STAGES, BatchMethod, EpochMethod, check_declaration
from thresher.methods.full import FullData


def split_by_stage(method: Any) -> tuple[Any, EpochMethod, BatchMethod | None]:
    """Returns the methods that choose before training, before each epoch (by default all data), and in each batch."""
    methods = list(method) if isinstance(method, list | tuple) else [method]
    by_stage: dict[str, Any] = {}
    for one in methods:
        if isinstance(one, type):
            raise TypeError(
                f"`method` must be an instance, got the class {one.__name__}; write {one.__name__}()"
            )
        stage = getattr(one, "stage", None)
        name = type(one).__name__
        if stage == "position":
            raise TypeError(
                f"`method`: {name} chooses among the positions (tokens) of each loss, not among samples. Pass its mask to "
                "run.reduce, as in run.reduce(losses, valid=valid, keep=tokens.chosen(losses, valid, reference)), or pass the "
                "method to thresher.transformers.Selection."
            )
        if stage not in STAGES or not isinstance(one, STAGES[stage]):
            raise TypeError(
                "`method` must have stage = 'epoch', columns() and plan_epoch(), or stage = 'batch', init_state(), "
                f"count() and plan_batch(), or stage = 'before' and kept(), got {name}; see thresher.methods"
            )
        check_declaration(one)
        if stage in by_stage:
            raise ValueError(
                f"`method` may have one method per `stage`, got {type(by_stage[stage]).__name__} and {name}"
            )
        by_stage[stage] = one
    if not by_stage:
        raise ValueError(
            "`method` must be a method, or a list with at most one method per `stage`; got an empty list"
        )
    return by_stage.get("before"), by_stage.get("epoch", FullData()), by_stage.get("batch")
