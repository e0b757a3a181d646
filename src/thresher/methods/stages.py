"""Splits the argument `method` of `attach` by the stage at which each method decides."""

from typing import Any

from thresher.methods.contract import STAGES, BatchMethod, EpochMethod, check_declaration
from thresher.methods.full import FullData


def split_by_stage(method: Any) -> tuple[Any, EpochMethod, BatchMethod | None]:
    """Returns the methods that decide before training, before each epoch (by default all data), and in each batch."""
    methods = list(method) if isinstance(method, list | tuple) else [method]
    by_stage: dict[str, Any] = {}
    for one in methods:
        if isinstance(one, type):
            raise TypeError(f"`method` must be an instance, got the class {one.__name__}; write {one.__name__}()")
        stage, name = getattr(one, "stage", None), type(one).__name__
        if stage == "position":
            raise TypeError(
                f"`method`: {name} chooses among the positions of each loss, not among samples. Give its answer to run.reduce, "
                "as in run.reduce(losses, valid=valid, keep=tokens.chosen(losses, valid, reference)), or the method to "
                "thresher.transformers.Selection."
            )
        if stage not in STAGES or not isinstance(one, STAGES[stage]):
            raise TypeError(
                "`method` must have stage = 'epoch', columns() and plan_epoch(), or stage = 'batch', init_state(), "
                f"count() and plan_batch(), or stage = 'before' and kept(), got {name}; see thresher.methods"
            )
        check_declaration(one)
        if stage in by_stage:
            raise ValueError(f"`method` must have at most one method a stage, got {type(by_stage[stage]).__name__} and {name}")
        by_stage[stage] = one
    if not by_stage:
        raise ValueError("`method` must be one method, or a list with at most one method a stage; got an empty list")
    return by_stage.get("before"), by_stage.get("epoch", FullData()), by_stage.get("batch")
