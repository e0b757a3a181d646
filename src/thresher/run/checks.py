"""What attach() refuses, before anything is changed."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thresher.losses.base import Criterion, unreadable
from thresher.losses.signals import ABOUT_CLASSES
from thresher.methods.contract import BatchMethod, BeforeMethod, EpochMethod, check_declaration, requirements_of, way_around
from thresher.methods.full import FullData
from thresher.plans import EpochPlan
from thresher.run.scoring import Scoring

NOT_OF_VALUES = {"correct", "confidence"} | ABOUT_CLASSES
"""Signals that a regression does not have."""


class Stages(NamedTuple):
    """The methods of one run by the stage they decide at."""

    before: Any
    epoch: EpochMethod
    batch: BatchMethod | None


PROTOCOLS: dict[str, Any] = {"before": BeforeMethod, "epoch": EpochMethod, "batch": BatchMethod}


def stages(method: Any) -> Stages:
    """The methods of `attach(method)` by stage: before training, each epoch (all data where there is none), in each batch."""
    methods = list(method) if isinstance(method, list | tuple) else [method]
    found: dict[str, Any] = {}
    for one in methods:
        if isinstance(one, type):
            raise TypeError(f"`method` must be an instance, got the class {one.__name__}; write {one.__name__}()")
        stage, name = getattr(one, "stage", None), type(one).__name__
        if stage not in PROTOCOLS or not isinstance(one, PROTOCOLS[stage]):
            raise TypeError(
                "`method` must have stage = 'epoch', columns() and plan_epoch(), or stage = 'batch', init_state(), "
                f"count() and plan_batch(), or stage = 'before' and kept(), got {name}; see thresher.methods"
            )
        check_declaration(one)
        if stage in found:
            raise ValueError(f"`method` must have at most one method a stage, got {type(found[stage]).__name__} and {name}")
        found[stage] = one
    if not found:
        raise ValueError("`method` must be one method, or a list with at most one method a stage; got an empty list")
    return Stages(found.get("before"), found.get("epoch", FullData()), found.get("batch"))


def kept_of(before: Any, n: int) -> Tensor:
    """The samples that a method keeps before training.

    Raises:
        TypeError: Not int64 ids.
        ValueError: None, or not ascending ids of the dataset.
    """
    plan = EpochPlan(before.kept(n))
    plan.check(n)
    return plan.ids


def check_settings(epochs: Any, forward_passes: Any, scoring: Any, on_nonfinite: Any, process_group: Any, seed: Any) -> None:
    """Settings of `attach` that stand for themselves."""
    if not isinstance(epochs, int) or isinstance(epochs, bool) or epochs < 1:
        raise ValueError(f"`epochs` must be a whole number of 1 or more, got {epochs!r}")
    if forward_passes not in ("auto", "once", "twice"):
        raise ValueError(f"`forward_passes` must be 'auto', 'once' or 'twice', got {forward_passes!r}")
    if scoring is not None and not isinstance(scoring, Scoring):
        raise TypeError(f"`scoring` must be a thresher.Scoring, got {type(scoring).__name__}")
    if on_nonfinite not in ("keep", "raise"):
        raise ValueError(f"`on_nonfinite` must be 'keep' or 'raise', got {on_nonfinite!r}")
    if not isinstance(seed, int):
        raise TypeError(f"`seed` must be an int, got {type(seed).__name__}")
    several = torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    if process_group is not None or several:
        raise ValueError("`process_group`: training in several processes is not supported in this version; run one process")


def check_needs(
    method: Any,
    batch: BatchMethod | None,
    adapter: Criterion | None,
    model: nn.Module | None,
    optimizer: Optimizer | None,
    signals: Any,
) -> None:
    """What a method needs of the training it is attached to."""
    name, requires = type(method).__name__, requirements_of(method)
    if requires.optimizer and optimizer is None:
        raise ValueError(f"{name} scales the learning rate: pass attach(optimizer=...){way_around(method, 'optimizer')}")
    if requires.refresh and (model is None or adapter is None):
        missing = "model" if model is None else "criterion"
        raise ValueError(f"{name} forwards samples that it left out, to refresh their losses: pass attach({missing}=...)")
    if requires.full_pass and (model is None or adapter is None):
        missing = "model" if model is None else "criterion"
        raise ValueError(f"{name} looks at the gradients of all samples before it plans: pass attach({missing}=...)")
    parts = () if model is None or "feature" not in requires.full_pass else model.modules()
    if parts and not any(isinstance(part, nn.Linear) for part in parts):
        raise ValueError(
            f"{name} needs what the last nn.Linear gets, and {type(model).__name__} has none{way_around(method, 'feature')}"
        )
    wanted = {column.signal or column_name for column_name, column in method.columns().items()}
    wanted |= set(() if batch is None else requirements_of(batch).signals)
    lacking = wanted & NOT_OF_VALUES
    if lacking and signals is None and adapter is not None and adapter.kind == "values":
        why = unreadable(adapter.own, lacking, way_around(method, *sorted(lacking)))
        raise ValueError(f"{name} needs signals that this criterion does not give. {why}")


def passes_of(
    method: BatchMethod | None, forward_passes: str, scoring: Scoring | None, *, model: Any, adapter: Any, n: int | None
) -> str:
    """How a batch method gets its signals: "none" needed, "once" in the loop's own forward, "twice" in one before it.

    Args:
        method: What selects in the batch, if anything.
        forward_passes: As given to `attach`.
        scoring: Likewise.
        model: Likewise.
        adapter: The criterion.
        n: Samples of the dataset; None of a stream.

    Raises:
        ValueError: What it needs is missing, or settings contradict.
    """
    if method is None:
        if scoring is not None:
            raise ValueError("`scoring` is for methods that select in the batch; none was given")
        return "none"
    name = type(method).__name__
    signals = requirements_of(method).signals
    if not signals:
        if scoring is not None:
            raise ValueError(f"`scoring`: {name} needs no losses to choose by; leave it out")
        return "none"
    if scoring is not None and forward_passes == "once":
        raise ValueError("`scoring` is for forward_passes='twice': with 'once' the loop's own forward pass gives the losses")
    if scoring is not None and n is None and (scoring.every_epochs > 1 or scoring.losses is not None):
        raise ValueError("`scoring`: losses of earlier epochs need samples with ids, a map-style dataset")
    if scoring is not None and scoring.losses is not None and len(scoring.losses) != n:
        raise ValueError(f"`scoring`: `losses` are of {len(scoring.losses)} samples, the dataset has {n}")
    for argument, given in (("model", model), ("criterion", adapter)):
        if given is None and not (argument == "criterion" and forward_passes == "once"):
            or_once = "" if argument == "model" else ", or forward_passes='once' where the loop calls run.reduce"
            raise ValueError(f"{name} chooses by {', '.join(signals)}: pass attach({argument}=...){or_once}")
    return "twice" if scoring is not None or forward_passes == "twice" else "once"


def check_counted_once(method: EpochMethod, passes: str, forward_passes: str) -> None:
    """Refuse a scoring pass beside an epoch method that adds up what it is told of a sample."""
    if (
        passes != "none"
        and forward_passes != "once"
        and any(c.merge == "sum" or callable(c.merge) for c in method.columns().values())
    ):
        raise ValueError(
            f"{type(method).__name__} adds up what it is told of a sample, and a scoring pass would count it twice: pass "
            f"forward_passes='once'{way_around(method, 'sum')}"
        )


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
