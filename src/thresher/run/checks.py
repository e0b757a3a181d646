"""Checks of the arguments of `attach`, before anything is changed."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from thresher import selection
from thresher.distributed.wrappers import SubsetModule, check_wrapping, inside, is_sharded
from thresher.loading.sampler_order import groups_by_length, is_free
from thresher.loading.samplers import check_loader, composes
from thresher.loading.smaller_batches import rounded_up, too_few
from thresher.losses.adapters import adapt
from thresher.losses.base import Criterion, unreadable
from thresher.losses.signals import NOT_OF_VALUES
from thresher.methods.contract import (
    BatchMethod,
    EpochMethod,
    calls_model,
    defines,
    full_pass_names,
    mark_as_given,
    requirements_of,
    share_given,
    title_given,
    way_around,
)
from thresher.methods.stages import split_by_stage
from thresher.methods.uniform_rows import UniformRows
from thresher.observation import TOKEN_LOSSES
from thresher.passes.scoring_settings import Scoring
from thresher.plans import EpochPlan
from thresher.run.divisor import check_divisor, divides_by_batch, warn_of_sum
from thresher.run.optimizer_steps import parts_of
from thresher.run.ownership import check_free
from thresher.run.parts import Arguments, RunConfig, SelectionMode
from thresher.run.selection_mode import check_counted_once, selection_mode
from thresher.run.several_processes import check_alike, check_several, world_of
from thresher.run.strata import OTHER_LABELS, Strata, given_codes, why_not_stratified
from thresher.samplers.stratified import StratifiedBatchSampler
from thresher.warning import warn


def check(given: Arguments, process_group: Any) -> RunConfig:
    """Checks the arguments of `attach` before anything is changed, and returns what it found out.

    Args:
        given: The arguments.
        process_group: Process group of the processes that train together; None for the default one.

    Raises:
        TypeError: An argument has the wrong type, or the method needs indices of samples and the dataset has none.
        ValueError: An argument is out of range, or something that the method needs is missing.
    """
    before, epoch_method, batch_method = split_by_stage(given.method)
    several = isinstance(given.method, list | tuple) and len(given.method) > 1
    loader = given.loader
    world = world_of(process_group)
    # A batch method alone needs no ids, so that it may train on a stream.
    check_loader(loader, plans_epochs=batch_method is None or several, several=world.size > 1)
    streams = isinstance(loader.dataset, IterableDataset)
    check_spend(given.spend, streams=streams)
    if given.observe and streams:
        raise ValueError(
            "`observe`: `loader` iterates over an IterableDataset; use a map-style dataset"
        )
    check_settings(
        given.epochs, given.forward_passes, given.scoring, given.on_nonfinite, given.seed
    )
    _check_types(given)
    # From here on a process may fail by itself, and the others would wait for it: first all of them compare what they have.
    world.meet("thresher.attach", patient=True)
    check_alike(world, _settings_of(given), loader)
    check_free(
        "optimizer",
        "" if given.optimizer is None else type(given.optimizer).__name__,
        optimizers_of(given),
    )
    check_free("loader", type(loader).__name__, [loader])
    adapter = None if given.criterion is None else adapt(given.criterion)
    free = not streams and is_free(loader)
    # `cache` turns it into a function that warns once, although strata and the data map both call it.
    on_mismatch = cache(partial(warn, OTHER_LABELS.format(type(loader.dataset).__name__)))
    strata = _strata(given, epoch_method, adapter, free=free, on_mismatch=on_mismatch)
    composed = _is_composed(given, epoch_method, strata)
    if composed and batch_method is not None:
        _check_composed(given)
    check_needs(given, epoch_method, batch_method, adapter)
    samples = None if streams else len(loader.dataset)  # pyright: ignore[reportArgumentType]
    config = RunConfig(
        given=given,
        world=world,
        before=before,
        epoch_method=epoch_method,
        batch_method=_with_least_rows(batch_method, given),
        adapter=adapter,
        samples=samples,
        by_batch=divides_by_batch(batch_method),
        spend="batches" if composed and batch_method is not None else given.spend,
        free=free and not composed,
        composes=composed,
        strata=strata,
        on_mismatch=on_mismatch,
    )
    config = replace(config, mode=selection_mode(config))
    check_counted_once(config)
    check_divisor(config)
    warn_of_sum(config)
    if given.model is not None:
        check_wrappers(given.model, config.mode, _method_with_extra_passes(config))
    check_several(config)
    kept = None if before is None or samples is None else kept_of(before, samples)
    # After pruning, because a method that looks samples up by their ids must know the ids that are left.
    for method in (epoch_method, batch_method):
        _check_ids(method, samples, kept)
    return replace(config, kept=kept)


def _strata(
    given: Arguments,
    method: EpochMethod,
    adapter: Criterion | None,
    *,
    free: bool,
    on_mismatch: Callable[[], None],
) -> Strata | None:
    """Returns what batches are stratified by; None if they are not."""
    batches = given.loader.batch_sampler
    requires = requirements_of(method)
    wanted = given.stratify
    if wanted == "auto":
        # Batches that a sampler composes stay as they are, and so does an order by length: both are right without the samples
        # that are left out. Stratified batches are made anew, so that they are also stratified by score.
        composed = composes(batches) and not isinstance(batches, StratifiedBatchSampler)
        composed = composed or groups_by_length(given.loader)
        wanted = "class" if requires.order == "class" and free and not composed else None
    if wanted is None:
        return None
    streams = isinstance(given.loader.dataset, IterableDataset)
    if why := why_not_stratified(method, streams=streams, free=free):
        raise ValueError(f"`stratify`: batches cannot be stratified, because {why}")
    # The targets of a regression are no classes.
    of_values = adapter is not None and adapter.kind == "values" and given.labels is None
    of_user = given.labels is not None or isinstance(batches, StratifiedBatchSampler)
    codes = None if of_values else given_codes(given.labels, given.loader)
    return Strata(codes, None if of_user else on_mismatch)


def _is_composed(given: Arguments, method: EpochMethod, strata: Strata | None) -> bool:
    """Returns whether the loader's batch sampler composes the batches of each epoch."""
    batches = given.loader.batch_sampler
    # Strata, or a method that draws the order, take the place of stratified batches.
    replaced = strata is not None or requirements_of(method).order == "plan"
    return composes(batches) and not (replaced and isinstance(batches, StratifiedBatchSampler))


def _check_composed(given: Arguments) -> None:
    """Checks that the chosen rows of a composed batch stay a batch of their own."""
    # Rows of several batches, gathered into full ones, would not be batches of this sampler.
    if given.spend == "steps":
        raise ValueError(
            "`spend='steps'` gathers rows of several batches, which are no batches of "
            f"{type(given.loader.batch_sampler).__name__}. Use spend='batches'."
        )


def _settings_of(given: Arguments) -> dict[str, Any]:
    """Returns the arguments of `attach` that must be the same in all processes."""
    # Plain settings, and those that compare by value: models and functions are other objects in each process.
    names = (
        "method",
        "epochs",
        "seed",
        "spend",
        "on_nonfinite",
        "forward_passes",
        "scoring",
        "stratify",
    )
    return {name: getattr(given, name) for name in names}


def _check_types(given: Arguments) -> None:
    if given.model is not None and not isinstance(given.model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module, got {type(given.model).__name__}")
    if isinstance(given.model, torch.jit.ScriptModule):
        raise TypeError(
            "`model` must be a Python module, got the result of torch.jit.script or torch.jit.trace. Pass the original module, "
            "or wrap the scripted module, as in torch.nn.Sequential(model), and train this."
        )
    if given.optimizer is not None and not isinstance(given.optimizer, Optimizer):
        raise TypeError(
            f"`optimizer` must be a torch.optim.Optimizer, got {type(given.optimizer).__name__}"
        )
    for name, function in (("forward", given.forward), ("signals", given.signals)):
        if function is not None and not callable(function):
            raise TypeError(f"`{name}` must be callable, got {type(function).__name__}")
    if given.stratify not in ("auto", "class", None):
        raise ValueError(
            f"`stratify` must be 'auto', 'class', None or the class of each sample, got {given.stratify!r}"
        )
    if isinstance(given.observe, str) and given.observe not in TOKEN_LOSSES:
        raise TypeError(f"`observe` must be True or False, got {given.observe!r}")
    if not isinstance(given.collate_keeps_rows, bool):
        raise TypeError(
            f"`collate_keeps_rows` must be True or False, got {given.collate_keeps_rows!r}"
        )


def _method_with_extra_passes(config: RunConfig) -> str:
    """Returns the name of a method for which the run makes extra passes of the model; "" if there is none."""
    if calls_model(config.epoch_method):
        return title_given(config.epoch_method)
    scoring = config.given.scoring
    others = scoring is not None and (scoring.losses is not None or scoring.model is not None)
    if config.mode is SelectionMode.BEFORE_FORWARD and not others:
        return title_given(config.batch_method)
    return ""


def check_wrappers(model: nn.Module, mode: SelectionMode, method_name: str) -> None:
    """Checks that `subset_backward` can be applied to a model, and that the run can make extra forward passes.

    Args:
        model: Argument of `attach`.
        mode: Where and by what the rows of a batch are chosen.
        method_name: Name of the method that needs extra forward passes; "" for none.

    Raises:
        ValueError: The wrappers for several processes around the model are in an order that does not allow it.
    """
    # A model that contains `subset_backward` already needs no place for it.
    if mode.is_in_forward and not any(isinstance(part, SubsetModule) for part in model.modules()):
        check_wrapping(inside(model))
    if method_name and is_sharded(model):
        raise ValueError(
            f"`model`: {method_name} needs forward passes besides those of the loop. All processes must take part in each pass of a "
            "sharded model, but they have different samples and numbers of passes. Use DistributedDataParallel, or a "
            "method that chooses in the batch, with forward_passes='once'."
        )


def optimizers_of(given: Arguments) -> list[Optimizer]:
    """Returns the optimizer of `attach` and the optimizers inside it; an empty list if none was given."""
    return [] if given.optimizer is None else parts_of(given.optimizer)


def least_rows(model: nn.Module | None) -> int:
    """Returns the least number of rows of a batch: 2 if the model has BatchNorm, which needs a variance, else 1."""
    # BatchNorm raises an error in training if a channel has a single value, as in a batch of one row.
    parts = () if model is None else model.modules()
    return 2 if any(isinstance(part, _BatchNorm) for part in parts) else 1


def _with_least_rows(method: BatchMethod | None, given: Arguments) -> BatchMethod | None:
    """Returns a batch method whose batches have enough rows for the model."""
    if not isinstance(method, UniformRows):
        return method
    size = given.loader.batch_size
    least = max(method.least, least_rows(given.model))
    if size is not None and selection.share(method.keep, size) < least:
        raise ValueError(
            f"A batch has {size} samples, of which a share of {method.keep:g} is {too_few(least)}: the smallest share is "
            f"{min(1, rounded_up(least / size)):g}. Give the loader larger batches, or raise the share."
        )
    return mark_as_given(replace(method, least=least), share_given(method))


def _check_ids(method: Any, samples: int | None, kept: Tensor | None) -> None:
    """Calls the check of a method that looks samples up by their ids or depends on their number, if it has one."""
    if method is None or not defines(method, "check"):
        return
    if samples is None:
        raise ValueError(
            f"{title_given(method)} must know the index of each sample, and an IterableDataset has none: use a dataset with "
            "__getitem__ and __len__"
        )
    method.check(torch.arange(samples) if kept is None else kept)


def kept_of(before: Any, n: int) -> Tensor:
    """Returns the ids that a method keeps before training, shape (K,), int64.

    Raises:
        TypeError: The method did not return int64 ids.
        ValueError: The method returned no id, or ids that are not ascending or not in the dataset.
    """
    # The check of a plan is the one that these ids need.
    plan = EpochPlan(before.kept(n))
    plan.check(n)
    return plan.ids


def check_settings(
    epochs: Any, forward_passes: Any, scoring: Any, on_nonfinite: Any, seed: Any
) -> None:
    """Checks the arguments of `attach` that do not depend on each other."""
    # True is an integer in Python.
    if not isinstance(epochs, int) or isinstance(epochs, bool) or epochs < 1:
        raise ValueError(f"`epochs` must be a whole number of 1 or more, got {epochs!r}")
    if forward_passes not in ("auto", "once", "twice"):
        raise ValueError(
            f"`forward_passes` must be 'auto', 'once' or 'twice', got {forward_passes!r}"
        )
    if scoring is not None and not isinstance(scoring, Scoring):
        raise TypeError(
            f"`forward_passes` must be 'auto', 'once', 'twice' or a thresher.Scoring, got {type(scoring).__name__}"
        )
    if on_nonfinite not in ("keep", "raise"):
        raise ValueError(f"`on_nonfinite` must be 'keep' or 'raise', got {on_nonfinite!r}")
    if not isinstance(seed, int):
        raise TypeError(f"`seed` must be an int, got {type(seed).__name__}")


def check_spend(spend: Any, *, streams: bool) -> None:
    """Checks the argument `spend` of `attach`."""
    if spend not in (None, "steps", "batches"):
        raise ValueError(
            f"`spend` must be 'steps', 'batches' or None for the default of the method, got {spend!r}"
        )
    if spend is not None and streams:
        raise ValueError(
            "`spend`: `loader` iterates over an IterableDataset, for which it has no effect; leave it out. A share, as in "
            "attach(0.5, ...), makes smaller batches of an IterableDataset"
        )


def undefined_signals(
    optional: Mapping[str, str], adapter: Criterion | None, signals: Any
) -> list[str]:
    """Returns the optional signals that the criterion does not define.

    Args:
        optional: Signals that the run can do without.
        adapter: The user's criterion per sample; None if there is none.
        signals: Argument of `attach`.
    """
    if signals is not None:
        return []
    if adapter is None:  # the loop computes its losses, and nothing else is seen
        return sorted(optional)
    if adapter.kind == "values":
        return sorted(optional.keys() & NOT_OF_VALUES)
    return []


def check_needs(
    given: Arguments, method: Any, batch: BatchMethod | None, adapter: Criterion | None
) -> None:
    """Checks that `attach` got everything that the methods need."""
    model = given.model
    optimizer = given.optimizer
    name = title_given(method)
    requires = requirements_of(method)
    if requires.optimizer and optimizer is None:
        raise ValueError(
            f"{name} scales the learning rate: pass attach(optimizer=optimizer){way_around(method, 'optimizer')}"
        )
    for group in optimizer.param_groups if requires.optimizer and optimizer is not None else ():
        # An optimizer that finds its own rate has no number to scale, such as Adafactor of Transformers with lr=None.
        if not isinstance(group.get("lr"), int | float | Tensor):
            raise ValueError(
                f"{name} scales the learning rate, but {type(optimizer).__name__} has a parameter group with "
                f"lr={group.get('lr')!r}: give the group a number{way_around(method, 'optimizer')}"
            )
    if requires.refresh and (model is None or adapter is None):
        missing = "model" if model is None else "criterion"
        raise ValueError(
            f"{name} makes forward passes over the samples that it skipped: pass "
            f"attach({missing}={missing}){way_around(method, 'refresh')}"
        )
    # For all epochs, because a pass that only a later epoch needs is refused now as well.
    requested = full_pass_names(method, given.epochs)
    if requested and (model is None or adapter is None):
        missing = "model" if model is None else "criterion"
        raise ValueError(
            f"{name} needs the gradients of all samples before an epoch: pass attach({missing}={missing})"
        )
    parts = () if model is None or "feature" not in requested else model.modules()
    if parts and not any(isinstance(part, nn.Linear) for part in parts):
        raise ValueError(
            f"{name} needs the input of the last nn.Linear, but {type(model).__name__} has none{way_around(method, 'feature')}"
        )
    # A missing optional signal is reported when the run is built, with what the method does instead.
    wanted = {
        column.signal or name
        for name, column in method.columns().items()
        if column.optional is None
    }
    wanted |= set(() if batch is None else requirements_of(batch).signals)
    lacking = wanted & NOT_OF_VALUES
    if lacking and given.signals is None and adapter is not None and adapter.kind == "values":
        why = unreadable(adapter.original, lacking, way_around(method, *sorted(lacking)))
        raise ValueError(f"{name} needs signals that this criterion does not give. {why}")
