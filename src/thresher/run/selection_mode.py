"""Decides where and by what the rows of a batch are chosen, and checks the settings for it."""

from torch import nn

from thresher.distributed.wrappers import is_sharded
from thresher.losses.signals import WIDE_SIGNALS
from thresher.methods.contract import BatchMethod, requirements_of, title_given, way_around
from thresher.run.batch_stage import by_chance
from thresher.run.divisor import divides_by_batch, divisible_before
from thresher.run.parts import RunConfig, SelectionMode
from thresher.warning import warn


def _passes_for_signals(config: RunConfig) -> str:
    """Returns the `forward_passes` that the signals of the batch method need, after checking that they can be computed."""
    method = config.batch_method
    forward_passes = config.given.forward_passes
    scoring = config.given.scoring
    wide = set() if method is None else WIDE_SIGNALS & {*requirements_of(method).signals}
    if not wide:
        return forward_passes
    name = title_given(method)
    if scoring is not None and (scoring.every_epochs > 1 or scoring.losses is not None):
        raise ValueError(
            f"`forward_passes`: {name} chooses by {', '.join(sorted(wide))}, which has several numbers per sample and is not "
            "stored between epochs: use every_epochs=1, and do not pass `losses`"
        )
    if "feature" not in wide:
        return forward_passes
    if forward_passes == "once":
        raise ValueError(
            f"{name} needs the input of the last nn.Linear, which is unknown in the loop's own forward pass: use "
            f"forward_passes='twice'{way_around(method, 'feature')}"
        )
    # The features are those of the model that makes the pass.
    if scoring is None or scoring.model is None:
        scored = config.given.model
    else:
        scored = scoring.model
    if isinstance(scored, nn.Module) and not any(
        isinstance(part, nn.Linear) for part in scored.modules()
    ):
        raise ValueError(
            f"{name} needs the input of the last nn.Linear, but {type(scored).__name__} has none{way_around(method, 'feature')}"
        )
    return "twice"


def selection_mode(config: RunConfig) -> SelectionMode:
    """Returns where and by what the rows of a batch are chosen.

    Args:
        config: Options of the run; its mode is not read.

    Raises:
        ValueError: An argument that the method needs is missing, or options contradict each other.
        RuntimeError: The backward pass of some rows needs a newer torch.
    """
    method = config.batch_method
    scoring = config.given.scoring
    n = config.samples
    forward_passes = _passes_for_signals(config)
    if method is None:
        if scoring is not None:
            raise ValueError(
                "`forward_passes`: a Scoring is for methods that choose in each batch; leave it out"
            )
        return SelectionMode.NONE
    name = title_given(method)
    signals = requirements_of(method).signals
    if not signals:
        if scoring is not None:
            raise ValueError(
                f"`forward_passes`: {name} needs no losses to choose by; leave the Scoring out"
            )
        # Without losses there is nothing to score: "twice" then asks for full batches of chosen rows.
        if forward_passes == "twice":
            return SelectionMode.WITHOUT_LOSSES_FILLED
        return SelectionMode.WITHOUT_LOSSES
    if (
        scoring is not None
        and n is None
        and (scoring.every_epochs > 1 or scoring.losses is not None)
    ):
        raise ValueError(
            "`forward_passes`: losses of earlier epochs need a map-style dataset (__getitem__ and __len__)"
        )
    if scoring is not None and scoring.losses is not None and len(scoring.losses) != n:
        raise ValueError(
            f"`forward_passes`: the `losses` of the Scoring are of {len(scoring.losses)} samples, but the dataset has {n}"
        )
    for argument, given in (("model", config.given.model), ("criterion", config.adapter)):
        # A loop that computes its own losses, for run.reduce, has them in its own forward pass.
        in_loop = argument == "criterion" and forward_passes != "twice" and scoring is None
        if given is None and not in_loop:
            if argument == "model":
                or_once = ""
            else:
                or_once = ", or leave out forward_passes= if the loop calls run.reduce"
            raise ValueError(
                f"{name} chooses by {', '.join(signals)}: pass attach({argument}={argument}){or_once}"
            )
    if scoring is not None or forward_passes == "twice":
        return SelectionMode.BEFORE_FORWARD
    # The fallback scores with the criterion, so that a loop that computes its own losses has none.
    may_fall_back = (
        forward_passes == "auto"
        and config.adapter is not None
        and _can_choose_before(config, method)
    )
    from thresher.subset.compilers import (
        lacks_torch,
    )  # loads `thresher.subset`, which no other mode needs

    reason = lacks_torch()
    if reason is None:
        if may_fall_back:
            return SelectionMode.IN_FORWARD_AT_FIRST
        return SelectionMode.IN_FORWARD
    if not may_fall_back:
        raise RuntimeError(
            f"{reason}. Update torch, or use forward_passes='twice', which needs attach(criterion=criterion)."
        )
    warn(
        f"{reason}: {name} chooses by a scoring pass before each step, as with forward_passes='twice'."
    )
    return SelectionMode.BEFORE_FORWARD


def _can_choose_before(config: RunConfig, method: BatchMethod) -> bool:
    """Whether a batch method that chooses in the loop's forward pass could go on with a scoring pass of the model."""
    # A sharded model needs all processes in each pass, a number of rows by chance gives them different batches, and a divisor
    # by the batch must be a factor that the criterion lets pass.
    by_batch = divides_by_batch(method)
    uneven = by_chance(method) and (config.world.size > 1 or by_batch)
    split = config.given.model is not None and is_sharded(config.given.model)
    return not (split or uneven or (by_batch and not divisible_before(config.adapter)))


def check_counted_once(config: RunConfig) -> None:
    """Checks that no scoring pass is made for a method that adds up the losses of a sample."""
    method = config.epoch_method
    scores = config.mode in (
        SelectionMode.BEFORE_FORWARD,
        SelectionMode.IN_FORWARD,
        SelectionMode.IN_FORWARD_AT_FIRST,
    )
    adds = any(
        column.merge == "sum" or callable(column.merge) for column in method.columns().values()
    )
    if scores and config.given.forward_passes != "once" and adds:
        raise ValueError(
            f"{title_given(method)} adds up the losses of a sample, and a scoring pass would add them twice: pass "
            f"forward_passes='once'{way_around(method, 'sum')}"
        )
