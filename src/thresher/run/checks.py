"""Everything that `attach` refuses, before anything is changed."""

import gc
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from thresher import selection
from thresher.distributed.world import ALONE, ProcessWorld, World, agree, sampler_facts
from thresher.distributed.wrappers import SubsetModule, check_wrapping, in_several_processes, inside, is_sharded
from thresher.loading.distributed_order import SharedOrder
from thresher.loading.local_order import UserOrder
from thresher.loading.samplers import check_loader, check_shared, inner_sampler
from thresher.loading.smaller_batches import rounded_up, too_few
from thresher.loading.stratified import StratifiedBatchSampler
from thresher.losses.adapters import adapt
from thresher.losses.base import Criterion, unreadable
from thresher.losses.signals import GIVEN_ONLY, NOT_OF_VALUES, WIDE_SIGNALS
from thresher.methods.contract import (
    STAGES,
    BatchMethod,
    EpochMethod,
    calls_model,
    check_declaration,
    defines,
    full_pass_names,
    requirements_of,
    way_around,
)
from thresher.methods.full import FullData
from thresher.methods.uniform_rows import UniformRows
from thresher.passes.scoring import Scoring
from thresher.plans import EpochPlan
from thresher.run.batch_selection import by_chance, divides_by_batch, divisible_before
from thresher.run.optimizer_steps import parts_of
from thresher.run.parts import RunConfig, SelectionMode
from thresher.run.strata import OTHER_LABELS, Strata, given_codes, why_not_stratified
from thresher.warning import warn


def check_wide(method: Any, forward_passes: str, scoring: Scoring | None, model: Any, signals: Any) -> str:
    """Returns `forward_passes` as the signals of a batch method need it, after checking that these can be had.

    Args:
        method: The batch method; None where there is none.
        forward_passes: Argument of `attach`.
        scoring: Argument of `attach`.
        model: Argument of `attach`.
        signals: Argument of `attach`.

    Raises:
        ValueError: A signal cannot be had from the passes, the model or the function that were given.
    """
    wide = set() if method is None else WIDE_SIGNALS & {*requirements_of(method).signals}
    if not wide:
        return forward_passes
    name = type(method).__name__
    if lacking := sorted(wide & GIVEN_ONLY if signals is None else ()):
        raise ValueError(
            f"{name} needs {', '.join(lacking)}, which no criterion gives. Pass attach(signals=function) with "
            f"function(outputs, targets) -> {{'{lacking[0]}': (n, n) tensor}}{way_around(method, *lacking)}."
        )
    if "alignment" in requirements_of(method).signals and (scoring is None or scoring.validation is None):
        raise ValueError(
            f"{name} needs a validation batch: pass attach(forward_passes=thresher.Scoring(validation=function)) with a "
            "function that returns one, such as lambda: (inputs, targets)"
        )
    if scoring is not None and (scoring.every_epochs > 1 or scoring.losses is not None):
        raise ValueError(
            f"`forward_passes`: {name} chooses by {', '.join(sorted(wide))}, of which each sample has several numbers, and "
            "nothing of them is kept from epoch to epoch: use every_epochs=1 and no `losses`"
        )
    if "feature" not in wide:
        return forward_passes
    if forward_passes == "once":
        raise ValueError(
            f"{name} needs the input of the last nn.Linear, which the loop's own forward pass does not show: use "
            f"forward_passes='twice'{way_around(method, 'feature')}"
        )
    scored = model if scoring is None or scoring.model is None else scoring.model
    if isinstance(scored, nn.Module) and not any(isinstance(part, nn.Linear) for part in scored.modules()):
        raise ValueError(
            f"{name} needs the input of the last nn.Linear, and {type(scored).__name__} has none{way_around(method, 'feature')}"
        )
    return "twice"


NO_FURTHER_PLAN = (
    "There is no plan of epoch {} before all processes begin it together by iterating run.loader: attach was given epochs={}. "
    "Ask for run.plan and len(run.loader) before the training is over."
)
NOT_SHARED = "sampler.generator"
"""Fact about a sampler in which processes may differ: accelerate gives all of them the same state before each epoch."""


def world_of(process_group: Any) -> World:
    """Returns the processes that train together; `ALONE` where there is one.

    Args:
        process_group: Argument of `attach`; None for the default group, where there is one.

    Raises:
        ValueError: `process_group` is no group of torch.distributed that this process is in.
    """
    if process_group is None and not in_several_processes():
        return ALONE
    try:
        world = ProcessWorld(process_group)
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"`process_group`: {error}") from error
    return ALONE if world.size == 1 else world


def has_group() -> bool:
    """Returns whether this process is in a process group of torch.distributed, be it alone there."""
    return distributed.is_available() and distributed.is_initialized()


def check_attached_late_enough(had_group: bool) -> None:
    """Refuses a run that was attached as that of one process, and trains in several.

    Args:
        had_group: Result of `has_group` when the run was attached.

    Raises:
        RuntimeError: There is a process group of several processes now, and there was none then.
    """
    if not had_group and in_several_processes():
        raise RuntimeError(
            f"attach was called before torch.distributed.init_process_group, so that each of the "
            f"{distributed.get_world_size()} processes would train on all samples by itself. Call attach after it."
        )


def check_alike(world: World, settings: dict[str, Any], loader: Any) -> None:
    """Checks that all processes attach alike; each of them calls it, before any of them can fail by itself.

    Args:
        world: The processes.
        settings: Arguments of `attach` by name.
        loader: The user's loader.

    Raises:
        DisagreementError: They do not; all processes raise it.
    """
    if world.size == 1:
        return
    batches = loader.batch_sampler
    sampler = None if batches is None else inner_sampler(batches)
    facts = {name: fact for name, fact in sampler_facts(sampler).items() if name != NOT_SHARED}
    sizes = {name: getattr(batches, name, None) for name in ("batch_size", "drop_last")}
    samples = len(loader.dataset) if hasattr(loader.dataset, "__len__") else None
    agree(world, {**settings, "samples": samples, **sizes, **facts})


def check_several(config: RunConfig) -> None:
    """Refuses what several processes cannot do together.

    Raises:
        ValueError: A loader or a method is not for several processes.
    """
    loader, scoring, world, batch = config.loader, config.scoring, config.world, config.batch_method
    if world.size == 1:
        return
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            f"`loader` iterates over {type(loader.dataset).__name__}, an IterableDataset: {world.size} processes could have "
            "different numbers of batches. Use a map-style dataset, or one process."
        )
    check_shared(loader, world)
    if scoring is not None and scoring.every_epochs > 1:
        raise ValueError(
            "`forward_passes`: losses of earlier epochs are in the records of process 0, and not where a sample is in a batch. "
            "Use every_epochs=1 in several processes."
        )
    if batch is not None and config.mode is SelectionMode.WITHOUT_LOSSES and by_chance(batch):
        raise ValueError(
            f"{type(batch).__name__} keeps rows by chance and without losses, so that the processes would have batches of "
            "different sizes, or none. Use forward_passes='twice', which fills them up."
        )


_OWNERS: "weakref.WeakKeyDictionary[Any, weakref.ref[Any]]" = weakref.WeakKeyDictionary()


def _owner(thing: Any) -> Any:
    owner = _OWNERS.get(thing)
    return None if owner is None else owner()


def check_free(argument: str, kind: str, things: Iterable[Any]) -> None:
    """Refuses an object that a run still has.

    Args:
        argument: Name of the argument of `attach`, for the message.
        kind: Name of the type of what was given, for the message.
        things: The object and its parts, as an optimizer that holds another.

    Raises:
        ValueError: A run that was not detached has one of them.
    """
    if all(_owner(thing) is None for thing in things):
        return
    gc.collect()  # a run that nobody holds any more may be waiting for it
    if any(_owner(thing) is not None for thing in things):
        why = "its learning rate would be scaled twice" if argument == "optimizer" else "two runs would draw from one order"
        raise ValueError(
            f"`{argument}`: this {kind} belongs to a run that is not detached, and {why}. Call run.detach() on that run "
            f"before you attach again, or make a new {kind}."
        )


def claim(owner: Any, things: Iterable[Any]) -> None:
    """Notes that objects belong to a run, as long as something holds `owner`, a part of the run."""
    for thing in things:
        _OWNERS[thing] = weakref.ref(owner)


def release(owner: Any) -> None:
    """Notes that nothing belongs to a run any more."""
    for thing in [thing for thing, one in _OWNERS.items() if one() is owner]:
        del _OWNERS[thing]


def split_by_stage(method: Any) -> tuple[Any, EpochMethod, BatchMethod | None]:
    """Returns the methods that decide before training, before each epoch (by default all data), and in each batch."""
    methods = list(method) if isinstance(method, list | tuple) else [method]
    found: dict[str, Any] = {}
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
        if stage in found:
            raise ValueError(f"`method` must have at most one method a stage, got {type(found[stage]).__name__} and {name}")
        found[stage] = one
    if not found:
        raise ValueError("`method` must be one method, or a list with at most one method a stage; got an empty list")
    return found.get("before"), found.get("epoch", FullData()), found.get("batch")


def check(given: RunConfig, process_group: Any) -> RunConfig:
    """Checks the arguments of `attach`, before anything is changed, and returns them with what follows from them.

    Args:
        given: The arguments.
        process_group: Process group of the processes that train together; None for the default one.

    Raises:
        TypeError: An argument has the wrong type, or the samples of the dataset have no ids.
        ValueError: An argument is out of range, or something that the method needs is missing.
    """
    before, epoch_method, batch_method = split_by_stage(given.method)
    several = isinstance(given.method, list | tuple) and len(given.method) > 1
    world = world_of(process_group)
    check_loader(given.loader, plans_epochs=batch_method is None or several, several=world.size > 1)
    streams = isinstance(given.loader.dataset, IterableDataset)
    check_spend(given.spend, streams=streams)
    if given.observe and streams:
        raise ValueError("`observe`: `loader` iterates over an IterableDataset, whose samples have no ids to observe them by")
    check_settings(given.epochs, given.forward_passes, given.scoring, given.on_nonfinite, given.seed)
    _check_types(given)
    # From here on a process may fail by itself, and the others would wait for it: first all of them compare what they have.
    world.meet("thresher.attach", patient=True)
    check_alike(world, _settings_of(given), given.loader)
    check_free("optimizer", "" if given.optimizer is None else type(given.optimizer).__name__, optimizers_of(given))
    check_free("loader", type(given.loader).__name__, [given.loader])
    adapter = None if given.criterion is None else adapt(given.criterion)
    given = replace(given, on_mismatch=cache(partial(warn, OTHER_LABELS.format(type(given.loader.dataset).__name__))))
    strata = _strata(given, epoch_method, adapter, world)
    check_needs(epoch_method, batch_method, adapter, given.model, given.optimizer, given.signals, given.epochs)
    samples = None if streams else len(given.loader.dataset)  # pyright: ignore[reportArgumentType]
    config = replace(
        given,
        world=world,
        before=before,
        epoch_method=epoch_method,
        batch_method=_with_least_rows(batch_method, given),
        adapter=adapter,
        samples=samples,
        strata=strata,
    )
    config = replace(config, mode=selection_mode(config), by_batch=divides_by_batch(batch_method))
    check_counted_once(config)
    check_divisor(config)
    if config.model is not None:
        check_wrappers(config.model, config.mode, _who_calls_it(config))
    check_several(config)
    config = replace(config, kept=None if before is None or samples is None else kept_of(before, samples))
    # After pruning: a method that looks samples up by their ids is asked for the ids that training has.
    for method in (epoch_method, batch_method):
        _check_ids(method, config.samples, config.kept)
    return config


def _strata(given: RunConfig, method: EpochMethod, adapter: Criterion | None, world: World) -> Strata | None:
    """What batches are stratified by; None where they are not."""
    batches, requires, wanted = given.loader.batch_sampler, requirements_of(method), given.stratify
    if wanted == "auto":
        # A user who has given the loader stratified batches wants them of the plans, too.
        own = isinstance(batches, StratifiedBatchSampler) and requires.order != "plan"
        wanted = "class" if own or requires.order == "class" else None
    if wanted is None:
        return None
    streams = isinstance(given.loader.dataset, IterableDataset)
    # Only a plain shuffle may be replaced by another order: any other order means something.
    free = streams or (UserOrder(given.loader) if world.size == 1 else SharedOrder(given.loader, world)).is_free
    if why := why_not_stratified(method, streams=streams, free=free):
        if given.stratify == "auto":
            raise ValueError(
                f"`method`: {type(method).__name__} trains in stratified batches, and {why}. stratify=None leaves its rows in "
                "the loader's order; UniformSubset keeps the order of any sampler."
            )
        raise ValueError(f"`stratify`: batches cannot be stratified, because {why}")
    of_values = adapter is not None and adapter.kind == "values" and given.labels is None
    of_user = given.labels is not None or isinstance(batches, StratifiedBatchSampler)
    on_mismatch = None if of_user else given.on_mismatch
    return Strata(None if of_values else given_codes(given.labels, given.loader), on_mismatch)


def _settings_of(given: RunConfig) -> dict[str, Any]:
    """Arguments of `attach` that must be the same in all processes."""
    names = ("method", "epochs", "seed", "spend", "on_nonfinite", "forward_passes", "scoring", "stratify")
    return {name: getattr(given, name) for name in names}


def _check_types(given: RunConfig) -> None:
    if given.model is not None and not isinstance(given.model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module, got {type(given.model).__name__}")
    if isinstance(given.model, torch.jit.ScriptModule):
        raise TypeError(
            "`model` must be a Python module, got one that torch.jit.script or torch.jit.trace made. Pass the module that it "
            "was made of, or put the scripted module into one, as in torch.nn.Sequential(model), and train that."
        )
    if given.optimizer is not None and not isinstance(given.optimizer, Optimizer):
        raise TypeError(f"`optimizer` must be a torch.optim.Optimizer, got {type(given.optimizer).__name__}")
    for name, function in (("forward", given.forward), ("signals", given.signals)):
        if function is not None and not callable(function):
            raise TypeError(f"`{name}` must be callable, got {type(function).__name__}")
    if given.stratify not in ("auto", "class", None):
        raise ValueError(f"`stratify` must be 'auto', 'class', None or the class of each sample, got {given.stratify!r}")
    if not isinstance(given.collate_keeps_rows, bool):
        raise TypeError(f"`collate_keeps_rows` must be True or False, got {given.collate_keeps_rows!r}")


def _who_calls_it(config: RunConfig) -> str:
    """Name of a method for which the run calls the model beside the loop; empty where none needs that."""
    if calls_model(config.epoch_method):
        return type(config.epoch_method).__name__
    scoring = config.scoring
    others = scoring is not None and (scoring.losses is not None or scoring.model is not None)
    return type(config.batch_method).__name__ if config.mode is SelectionMode.BEFORE_FORWARD and not others else ""


def check_wrappers(model: nn.Module, mode: SelectionMode, who: str) -> None:
    """Validates that `subset_backward` can be put into a model, and that the run can call the model beside the loop.

    Args:
        model: Argument of `attach`.
        mode: Where and by what the rows of a batch are chosen.
        who: Name of the method for which the run calls the model; empty where none needs that.

    Raises:
        ValueError: The model is in wrappers of several processes in an order that does not allow it.
    """
    if mode.is_in_forward and not any(isinstance(part, SubsetModule) for part in model.modules()):
        check_wrapping(inside(model))
    if who and is_sharded(model):
        raise ValueError(
            f"`model`: {who} needs forward passes beside those of the loop. All processes together must make each pass of a "
            "sharded model, but each process has its own samples, and so its own number of passes. Use "
            "DistributedDataParallel, or a method that chooses in the batch, with forward_passes='once'."
        )


def optimizers_of(given: RunConfig) -> list[Optimizer]:
    """Returns the optimizer of `attach` and those that it holds; none where none was given."""
    return [] if given.optimizer is None else parts_of(given.optimizer)


def least_rows(model: nn.Module | None) -> int:
    """Returns the least number of rows of a batch: 2 where the model has BatchNorm, which needs a variance, else 1."""
    parts = () if model is None else model.modules()
    return 2 if any(isinstance(part, _BatchNorm) for part in parts) else 1


def _with_least_rows(method: BatchMethod | None, given: RunConfig) -> BatchMethod | None:
    """Returns a batch method whose batches have enough rows for the model."""
    if not isinstance(method, UniformRows):
        return method
    size, least = given.loader.batch_size, max(method.least, least_rows(given.model))
    if size is not None and selection.share(method.keep, size) < least:
        raise ValueError(
            f"A batch has {size} samples, of which a share of {method.keep:g} is {too_few(least)}: the smallest share is "
            f"{min(1, rounded_up(least / size)):g}. Give the loader larger batches, or raise the share."
        )
    return replace(method, least=least)


def _check_ids(method: Any, samples: int | None, kept: Tensor | None) -> None:
    """Lets a method check the ids of the samples, where it looks samples up by them or depends on their number."""
    if method is None or not defines(method, "check"):
        return
    if samples is None:
        raise ValueError(
            f"{type(method).__name__} needs the ids of samples, and those of an IterableDataset have none: "
            "use a map-style dataset"
        )
    method.check(torch.arange(samples) if kept is None else kept)


def kept_of(before: Any, n: int) -> Tensor:
    """Returns the ids that a method keeps before training, shape (K,), int64.

    Raises:
        TypeError: The method did not return int64 ids.
        ValueError: The method returned no id, or ids that are not ascending or not in the dataset.
    """
    plan = EpochPlan(before.kept(n))
    plan.check(n)
    return plan.ids


def check_settings(epochs: Any, forward_passes: Any, scoring: Any, on_nonfinite: Any, seed: Any) -> None:
    """Validates the arguments of `attach` that do not depend on one another."""
    if not isinstance(epochs, int) or isinstance(epochs, bool) or epochs < 1:
        raise ValueError(f"`epochs` must be a whole number of 1 or more, got {epochs!r}")
    if forward_passes not in ("auto", "once", "twice"):
        raise ValueError(f"`forward_passes` must be 'auto', 'once' or 'twice', got {forward_passes!r}")
    if scoring is not None and not isinstance(scoring, Scoring):
        raise TypeError(f"`forward_passes` must be 'auto', 'once', 'twice' or a thresher.Scoring, got {type(scoring).__name__}")
    if on_nonfinite not in ("keep", "raise"):
        raise ValueError(f"`on_nonfinite` must be 'keep' or 'raise', got {on_nonfinite!r}")
    if not isinstance(seed, int):
        raise TypeError(f"`seed` must be an int, got {type(seed).__name__}")


def check_spend(spend: Any, *, streams: bool) -> None:
    """Validates the argument `spend` of `attach`."""
    if spend not in (None, "steps", "batches"):
        raise ValueError(f"`spend` must be 'steps', 'batches' or None for what the method does by itself, got {spend!r}")
    if spend is not None and streams:
        raise ValueError(
            "`spend`: `loader` iterates over an IterableDataset, which has no epoch plan to spend; leave `spend` out: a share, "
            "as in attach(0.5, ...), makes smaller batches of a stream by itself"
        )


def undefined_signals(optional: Mapping[str, str], adapter: Criterion | None, signals: Any) -> list[str]:
    """Returns the optional signals that the criterion does not define.

    Args:
        optional: Signals that the run can do without.
        adapter: The user's criterion per sample; None where there is none.
        signals: Argument of `attach`.
    """
    if signals is not None:
        return []
    if adapter is None:  # the loop computes its losses, and nothing else is seen
        return sorted(optional)
    return sorted(optional.keys() & NOT_OF_VALUES) if adapter.kind == "values" else []


def check_needs(
    method: Any,
    batch: BatchMethod | None,
    adapter: Criterion | None,
    model: nn.Module | None,
    optimizer: Optimizer | None,
    signals: Any,
    epochs: int,
) -> None:
    """Validates that the training has everything that the methods need."""
    name, requires = type(method).__name__, requirements_of(method)
    if requires.optimizer and optimizer is None:
        raise ValueError(f"{name} scales the learning rate: pass attach(optimizer=...){way_around(method, 'optimizer')}")
    for group in optimizer.param_groups if requires.optimizer and optimizer is not None else ():
        if not isinstance(group.get("lr"), int | float | Tensor):
            raise ValueError(
                f"{name} scales the learning rate, and {type(optimizer).__name__} has a parameter group with "
                f"lr={group.get('lr')!r}: give the group a number{way_around(method, 'optimizer')}"
            )
    if requires.refresh and (model is None or adapter is None):
        missing = "model" if model is None else "criterion"
        raise ValueError(
            f"{name} refreshes the losses of samples that it left out by forward passes: pass attach({missing}=...)"
            f"{way_around(method, 'refresh')}"
        )
    asked = full_pass_names(method, epochs)
    if asked and (model is None or adapter is None):
        missing = "model" if model is None else "criterion"
        raise ValueError(f"{name} needs the gradients of all samples before it plans: pass attach({missing}=...)")
    parts = () if model is None or "feature" not in asked else model.modules()
    if parts and not any(isinstance(part, nn.Linear) for part in parts):
        raise ValueError(
            f"{name} needs the input of the last nn.Linear, and {type(model).__name__} has none{way_around(method, 'feature')}"
        )
    # An optional signal that is missing is said when the run is built, with what the method does instead.
    wanted = {column.signal or own for own, column in method.columns().items() if column.optional is None}
    wanted |= set(() if batch is None else requirements_of(batch).signals)
    lacking = wanted & NOT_OF_VALUES
    if lacking and signals is None and adapter is not None and adapter.kind == "values":
        why = unreadable(adapter.own, lacking, way_around(method, *sorted(lacking)))
        raise ValueError(f"{name} needs signals that this criterion does not give. {why}")


def selection_mode(config: RunConfig) -> SelectionMode:
    """Returns where and by what the rows of a batch are chosen.

    Args:
        config: Options of the run; its mode is not read.

    Raises:
        ValueError: Something that the method needs is missing, or options contradict each other.
        RuntimeError: The backward pass of some rows needs a newer torch.
    """
    method, scoring, n = config.batch_method, config.scoring, config.samples
    forward_passes = check_wide(method, config.forward_passes, scoring, config.model, config.signals)
    if method is None:
        if scoring is not None:
            raise ValueError("`forward_passes`: a Scoring is for methods that select in the batch; none was given")
        return SelectionMode.NONE
    name, signals = type(method).__name__, requirements_of(method).signals
    if not signals:
        if scoring is not None:
            raise ValueError(f"`forward_passes`: {name} needs no losses to choose by; leave the Scoring out")
        return SelectionMode.WITHOUT_LOSSES_FILLED if forward_passes == "twice" else SelectionMode.WITHOUT_LOSSES
    if scoring is not None and n is None and (scoring.every_epochs > 1 or scoring.losses is not None):
        raise ValueError("`forward_passes`: losses of earlier epochs need samples with ids, a map-style dataset")
    if scoring is not None and scoring.losses is not None and len(scoring.losses) != n:
        raise ValueError(
            f"`forward_passes`: the `losses` of the Scoring are of {len(scoring.losses)} samples, the dataset has {n}"
        )
    for argument, given in (("model", config.model), ("criterion", config.adapter)):
        # A loop that computes its own losses, for run.reduce, has them in its own forward pass.
        in_loop = argument == "criterion" and forward_passes != "twice" and scoring is None
        if given is None and not in_loop:
            or_once = "" if argument == "model" else ", or leave out forward_passes= where the loop calls run.reduce"
            raise ValueError(f"{name} chooses by {', '.join(signals)}: pass attach({argument}=...){or_once}")
    if scoring is not None or forward_passes == "twice":
        return SelectionMode.BEFORE_FORWARD
    may_fall_back = forward_passes == "auto" and config.adapter is not None and _can_choose_before(config, method)
    from thresher.subset.compilers import lacks_torch  # loads `thresher.subset`, which no other mode needs

    reason = lacks_torch()
    if reason is None:
        return SelectionMode.IN_FORWARD_AT_FIRST if may_fall_back else SelectionMode.IN_FORWARD
    if not may_fall_back:
        raise RuntimeError(f"{reason}. Update torch, or use forward_passes='twice', which needs attach(criterion=...).")
    warn(f"{reason}: {name} chooses by a scoring pass before each step, as with forward_passes='twice'.")
    return SelectionMode.BEFORE_FORWARD


def _can_choose_before(config: RunConfig, method: BatchMethod) -> bool:
    """Whether a batch method that chooses in the loop's forward pass could go on with a scoring pass of the model."""
    by_batch = divides_by_batch(method)
    uneven = by_chance(method) and (config.world.size > 1 or by_batch)
    split = config.model is not None and is_sharded(config.model)
    return not (split or uneven or (by_batch and not divisible_before(config.adapter)))


def check_counted_once(config: RunConfig) -> None:
    """Refuses a scoring pass beside an epoch method that adds up the losses of a sample."""
    method = config.epoch_method
    scores = config.mode in (SelectionMode.BEFORE_FORWARD, SelectionMode.IN_FORWARD, SelectionMode.IN_FORWARD_AT_FIRST)
    adds = any(column.merge == "sum" or callable(column.merge) for column in method.columns().values())
    if scores and config.forward_passes != "once" and adds:
        raise ValueError(
            f"{type(method).__name__} adds up the losses of a sample, and a scoring pass would add them twice: pass "
            f"forward_passes='once'{way_around(method, 'sum')}"
        )


def check_divisor(config: RunConfig) -> None:
    """Refuses a criterion whose losses cannot be divided by the rows of the batch before the forward pass."""
    adapter = config.adapter
    if not config.by_batch or config.mode.is_in_forward or divisible_before(adapter):
        return
    how = "class weights" if adapter is not None and adapter.class_weights else "reduction='sum'"
    raise ValueError(
        f"`criterion`: {type(config.batch_method).__name__} divides the losses of the rows that it keeps by the rows of the "
        f"batch. Before the forward pass this is a weight, and {how} of the criterion would cancel it or count it twice. Use "
        "forward_passes='once', or a criterion without it."
    )
