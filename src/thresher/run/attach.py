"""`attach`, which attaches a method to a training loop, and the functions that build the parts of a run."""

import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Unpack, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset, default_collate

from thresher.attribution.accumulator import COUNT_OF_TRAINED, TRAINED, StepAccumulator
from thresher.attribution.attributor import Attributor
from thresher.attribution.cost_meter import Meter
from thresher.attribution.tracked_model import TrackedModel
from thresher.attribution.tracker import RowTracker, SampleDimension
from thresher.backward_ratio import Stopwatch
from thresher.cost import Cost
from thresher.distributed.gathered_records import GatheredRecords
from thresher.distributed.world import World
from thresher.loading.loader import SelectedLoader
from thresher.loading.sampler_order import groups_by_length
from thresher.loading.samplers import inner_sampler, without_wrapper
from thresher.losses.base import SignalReader, Signals
from thresher.methods import registry
from thresher.methods._adapted import OnSubset
from thresher.methods.contract import (
    OBSERVE,
    EpochMethod,
    Method,
    calls_model,
    defines,
    mark_as_given,
    requirements_of,
    title_given,
    way_around,
)
from thresher.methods.full import FullData
from thresher.methods.text import parse, validate_settings
from thresher.methods.uniform_rows import UniformRows
from thresher.methods.winnow import Winnow
from thresher.observation import OBSERVED, OF_ANY_LOSS, OF_TOKENS
from thresher.passes.engine import Forward, device_of_model
from thresher.passes.extra_passes import ExtraPasses
from thresher.passes.scoring_settings import Scoring
from thresher.records import NEVER_SEEN, Column, Records
from thresher.run.batch_selection import BatchSelection
from thresher.run.batch_stage import BatchStage, WholeBatches
from thresher.run.before_forward import BeforeForward
from thresher.run.checks import check, least_rows, optimizers_of, undefined_signals
from thresher.run.ownership import claim
from thresher.run.parts import Arguments, Options, Parts, RunConfig, SelectionMode
from thresher.run.run import Run
from thresher.run.strata import STRATUM, STRATUM_COLUMN
from thresher.run.timeline import Timeline
from thresher.run.trained_model import TrainedModel
from thresher.timing import Timing
from thresher.warning import warn

# A whole training as one long epoch, as with RandomSampler(num_samples=...), leaves an epoch method nothing to decide.
LONG_EPOCH = 100
"""Number of times that an epoch may draw each sample, on average, before a warning."""


def method_of(method: Any, *, streams: bool = False) -> Any:
    """Returns the method that a share or a name stands for; a method is returned unchanged.

    Args:
        method: Argument `method` of `attach`, or a list of such arguments: a number such as 0.5 or a text such as "50%" is
            `Winnow(share)`, or `UniformRows(share)` for an IterableDataset; another text is a method as on the command line.
        streams: Whether the loader iterates over an IterableDataset. Default: False.

    Raises:
        ValueError: A share is outside (0, 1], no method has this name, or the method has settings without a default.
    """
    if isinstance(method, list | tuple):
        return [method_of(one, streams=streams) for one in method]
    # True is a number in Python, and no share.
    if isinstance(method, bool) or not isinstance(method, int | float | str):
        return method
    if isinstance(method, str) and method[:1].isalpha() and not method.endswith("%"):
        return _by_name(method)
    share = _share_of(method)
    chosen = UniformRows(share) if streams else Winnow(share)
    return mark_as_given(chosen, method)


def _share_of(given: float | str) -> float:
    share = _percent(given) if isinstance(given, str) else float(given)
    if not 0 < share <= 1:
        raise ValueError(
            f"`method`: the share of the cost of full training must be within (0, 1], such as 0.5 or '50%', got {given!r}"
        )
    return share


def _percent(given: str) -> float:
    """Returns the share that a percentage names; nan for another text."""
    try:
        # nan is outside of every range, so that `_share_of` refuses any other text with its own message.
        if given.endswith("%"):
            return float(given.removesuffix("%")) / 100
        return float("nan")
    except ValueError:
        return float("nan")


def _by_name(text: str) -> Any:
    """Returns the method of a name, or of a text as on the command line, such as "kakurenbo:max_fraction=0.2"."""
    try:
        name, settings, _ = parse(text)
        kind = registry.load(name)
        validate_settings(name, kind, settings)
    except ValueError as error:
        raise ValueError(f"`method`: {error}") from None
    return kind(**settings)


def build_run(config: RunConfig) -> Run:
    """Builds a run. Each builder makes complete objects from the objects that earlier builders made.

    Args:
        config: Options of `attach`, checked.

    Raises:
        ValueError: The method decides the order of training, and the loader's sampler has an order of its own; or the batches
            of an epoch would have too few rows.
    """
    device = _device(config)
    trained = TrainedModel(config.given.model, subset=config.mode.is_in_forward)
    timing = Timing()
    loader, method = _build_loader(config, device=device, timing=timing)
    config = _keep_users_order(config, loader)
    # Without a device, a model and an optimizer, batches stay where they are, and the records are on the CPU.
    parts = _build_parts(
        config, loader=loader, trained=trained, device=device or torch.device("cpu"), timing=timing
    )
    # A batch method may ask for the progress of training, which is known once the timeline is there.
    selection = _build_selection(parts, trained=trained, progress=lambda: timeline.progress.share)
    timeline = _build_timeline(parts, method=method, selection=selection)
    _check_first_epoch(parts, timeline)
    _warn_of_undefined_signals(config)
    _warn_of_useless_epochs(parts, timeline)
    # Nothing of the user's was changed before this line; nothing is refused after it.
    if config.given.optimizer is not None:
        timeline.follow(config.given.optimizer, config.given.model)
    claim(timeline, [config.given.loader, *optimizers_of(config.given)])
    return Run(parts, timeline)


def _build_loader(
    config: RunConfig, *, device: torch.device | None, timing: Timing
) -> tuple[SelectedLoader, EpochMethod | OnSubset]:
    """Builds the loader, and the epoch method restricted to the samples of the loader."""
    settings: dict[str, Any] = {
        "kept": config.kept,
        "world": config.world,
        "collate_keeps_rows": config.given.collate_keeps_rows,
        "composes": config.composes,
    }
    # A batch method may fill batches up with rows of the next ones, so the sizes of its batches are left as they are.
    settings["least"] = least_rows(config.given.model) if config.batch_method is None else 1
    loader = SelectedLoader(config.given.loader, device=device, timing=timing, **settings)
    method = config.epoch_method
    # The planner refuses such a plan, too, but in one process only when the first epoch is planned.
    if requirements_of(method).order == "plan" and not config.free:
        raise ValueError(
            f"{title_given(method)} draws the order of training, but the loader's sampler sets another order: use "
            "shuffle=True"
        )
    return loader, _restrict_to_subset(config, loader)


def _keep_users_order(config: RunConfig, loader: SelectedLoader) -> RunConfig:
    """Returns the options with which a method that stratifies by default keeps the order of the user's sampler; warns."""
    method = config.epoch_method
    given = config.given
    sampler = type(inner_sampler(given.loader.batch_sampler)).__name__
    stratifies = requirements_of(method).order == "class" and given.stratify == "auto"
    if not stratifies or config.free or config.composes or groups_by_length(given.loader):
        return config
    if loader.candidates > LONG_EPOCH * len(given.loader.dataset):  # pyright: ignore[reportArgumentType]
        raise ValueError(
            f"`method`: {title_given(method)} chooses once per epoch, but the loader's sampler sets another order, of "
            f"{loader.candidates:,} samples: use shuffle=True"
        )
    # Smaller batches need the number of rows of an epoch, which is not known if the sampler may repeat or skip samples.
    unknown = config.world.size == 1 and not loader.yields_once
    spends_steps = given.spend is None and unknown
    size = ""
    settings = "stratify=None"
    if spends_steps:
        size = " and have their full size, in fewer steps"
        settings += ", spend='steps'"
    warn(
        f"Batches are not stratified by class{size}, because {sampler} sets an order of its own: pass shuffle=True, or "
        f"{settings} to keep this order without a warning."
    )
    return replace(config, spend="steps") if spends_steps else config


def _build_parts(
    config: RunConfig,
    *,
    loader: SelectedLoader,
    trained: TrainedModel,
    device: torch.device,
    timing: Timing,
) -> Parts:
    """Builds the objects that all others of a run share, such as the records, the counters and the tracked model."""
    records = _build_records(_columns(config), loader.n, device, config.world)
    # One write counts a sample at most once, so processes send each other a bool per sample.
    count_columns = {} if loader.streams else COUNT_OF_TRAINED
    counts = _build_records(
        count_columns, loader.n, device, config.world, sent={TRAINED: torch.bool}
    )
    cost = _cost_of_scores(config)
    module = trained.module
    meter = Meter(cost, None if module is None else module.parameters)
    stopwatch = Stopwatch(device)
    trained.report_to(meter)
    # A collate function of the user's own may put the samples along another dimension than the first.
    may_transpose = (
        config.given.loader.collate_fn is not default_collate
        and not config.given.collate_keeps_rows
    )
    tracker = RowTracker(SampleDimension() if may_transpose else None)
    accumulator = StepAccumulator(
        records, meter, counts, count_steps=config.given.optimizer is None
    )
    unknown = loader.unknown_rows
    attributor = Attributor(
        tracker, accumulator, samples=loader.n, device=device, unknown_rows=unknown, timing=timing
    )
    if module is None:
        model = None
    else:
        model = TrackedModel(module, trained.call, tracker, stopwatch, device, meter, timing)
    reader = _reader(config, records)
    passes = ExtraPasses(
        model,
        loader,
        reader,
        records,
        cost,
        config.given.forward,
        device,
        unknown,
        _title_for_extra_passes(config),
    )
    return Parts(
        given=config.given,
        config=config,
        device=device,
        loader=loader,
        model=model,
        attributor=attributor,
        accumulator=accumulator,
        reader=reader,
        passes=passes,
        records=records,
        cost=cost,
        stopwatch=stopwatch,
        timing=timing,
        why_plain=trained.why_plain,
    )


def _build_selection(
    parts: Parts, *, trained: TrainedModel, progress: Callable[[], float]
) -> BatchSelection:
    """Builds the object that chooses the rows of batches."""
    config = parts.config
    mode = parts.config.mode
    method = config.batch_method
    if method is None:
        return BatchSelection(parts, WholeBatches())
    stage = BatchStage(method, seed=config.given.seed, rank=config.world.rank, progress=progress)
    scoring = config.given.scoring or Scoring()
    fills = config.spend != "batches"
    if not mode.is_in_forward:
        return BeforeForward(parts, stage, scoring, fills=mode.fills and fills)
    from thresher.run.in_forward import (
        InForward,
    )  # loads `thresher.subset`, which no other selection needs

    falls_back = mode is SelectionMode.IN_FORWARD_AT_FIRST
    return InForward(
        parts,
        stage,
        trained,
        BeforeForward(parts, stage, scoring, fills=fills) if falls_back else None,
    )


def _build_timeline(
    parts: Parts, *, method: EpochMethod | OnSubset, selection: BatchSelection
) -> Timeline:
    """Builds the timeline, has the loader report to it, and, in several processes, makes the plan of the first epoch."""
    parts.loader.select_before_loop(selection.fills, by_chance=selection.by_chance)
    timeline = Timeline(parts, method, selection)
    parts.loader.control = timeline
    timeline.plan_ahead()
    return timeline


def _cost_of_scores(config: RunConfig) -> Cost:
    """Returns the cost of the scores that were passed to methods, divided among the processes."""
    cost = Cost()
    world = config.world
    for method in config.methods:
        if defines(method, "cost") and method.cost is not None:
            forward, backward = method.cost
            # Rounded down after adding the rank, the parts of all ranks add up to the whole.
            cost.add_scores(
                ((forward + world.rank) // world.size, (backward + world.rank) // world.size)
            )
    return cost


def _build_records(
    columns: dict[str, Column],
    n: int,
    device: torch.device,
    world: World,
    sent: Mapping[str, torch.dtype] | None = None,
) -> Records:
    """Builds the records of all samples, which process 0 stores."""
    if world.size == 1:
        return Records(columns, n, device)
    return GatheredRecords(columns, n, world, device, sent)


def _restrict_to_subset(config: RunConfig, loader: SelectedLoader) -> EpochMethod | OnSubset:
    """Returns the epoch method, restricted to the samples that pruning left or that the user's sampler yields."""
    method = config.epoch_method
    kept = config.kept
    # Full training needs no ids, so it works with a sampler whose ids are unknown.
    if kept is None and isinstance(method, FullData):
        return method
    ids = loader.order.ids_of_sampler()
    if kept is None:
        # A share of the samples means a share of those that the sampler yields, not of the dataset.
        if ids is None:
            return method
        return OnSubset(method, ids, loader.n, of=len(ids))
    if ids is not None:
        raise ValueError(
            f"{type(config.before).__name__} chooses among all {loader.n} samples of the dataset, but the loader's sampler "
            f"yields {len(ids)} of them. Pass a loader over torch.utils.data.Subset(dataset, ids), and scores of these samples."
        )
    return OnSubset(method, kept, loader.n)


def _device(config: RunConfig) -> torch.device | None:
    """Returns the device for batches: `device`, else that of the model or optimizer; None leaves batches where they are."""
    if config.given.device is not None:
        return torch.device(config.given.device)
    if config.given.model is not None:
        return device_of_model(config.given.model)
    return next(
        (
            parameter.device
            for optimizer in optimizers_of(config.given)
            for group in optimizer.param_groups
            for parameter in group["params"]
        ),
        None,
    )


def _columns(config: RunConfig) -> dict[str, Column]:
    """Returns the columns that are stored for each sample; none for a stream, whose samples have no ids."""
    if config.samples is None:
        return {}
    columns = dict(config.epoch_method.columns())
    batch = config.batch_method
    adapter = config.adapter
    # The classes that the criterion gets are recorded if something reads them: the data map, or strata that have no codes or
    # compare their codes with these classes.
    shows_classes = adapter is not None and adapter.kind != "values"
    if shows_classes and (
        config.given.observe or ((own := config.strata) and (own.codes is None or own.on_mismatch))
    ):
        columns.setdefault(STRATUM, STRATUM_COLUMN)
    if config.given.observe:
        # A column of the method replaces an observed one of the same name.
        columns = {**OBSERVED, **columns}
        if adapter is not None and adapter.kind in ("classes", "labels"):
            columns = {name: column for name, column in columns.items() if name not in OF_ANY_LOSS}
        if isinstance(config.given.observe, str):
            columns = {**OF_TOKENS, **columns}
    # Signals that the method can do without, and that this criterion does not give.
    undefined = {*undefined_signals(config.optional, adapter, config.given.signals)}
    # Signals of the user's are for the method, not for what is observed.
    if adapter is not None and adapter.kind == "values":
        undefined |= {name for name, note in config.optional.items() if not note}
    # A column of a signal that is not defined would stay empty for the whole training.
    for name in undefined:
        columns = {
            known: column for known, column in columns.items() if (column.signal or known) != name
        }
    if batch is not None:
        # With `every_epochs`, the method chooses by losses and signals of an earlier epoch, which the records must have.
        stale = config.given.scoring is not None and config.given.scoring.every_epochs > 1
        for name in {"loss", *(requirements_of(batch).signals if stale else ())}:
            columns.setdefault(name, Column(torch.float32, fill=NEVER_SEEN))
    return columns


def _check_first_epoch(parts: Parts, timeline: Timeline) -> None:
    """Raises an error if a step of the first epoch has too few rows, while nothing of the user's has been changed."""
    config = parts.config
    smaller = config.spend == "batches" or requirements_of(config.epoch_method).smaller_batches
    # Only then, because reading the plan makes it.
    if smaller and not parts.loader.streams and timeline.plan.smaller:
        parts.loader.ends(timeline.plan)


def _warn_of_useless_epochs(parts: Parts, timeline: Timeline) -> None:
    """Warns if the epochs are too long or too few for the epoch method."""
    config = parts.config
    loader = parts.loader
    method = config.epoch_method
    name = title_given(method)
    long = not loader.streams and loader.n is not None and loader.candidates > LONG_EPOCH * loader.n
    if long and not isinstance(method, FullData):
        warn(
            f"An epoch of the loader draws {loader.candidates:,} samples from {loader.n:,}. {name} chooses once per epoch, so "
            "training may end before it chooses again. Use shuffle=True: an epoch then has each sample once."
        )
    smaller = config.given.epochs == 1 and requirements_of(method).smaller_batches
    if smaller and timeline.plan.smaller:
        warn(
            f"{name} draws uniformly in the first epoch, and this run has only one. Train for two or more epochs."
        )


def _warn_of_undefined_signals(config: RunConfig) -> None:
    """Warns if the criterion does not define an optional signal of the epoch method."""
    for signal in undefined_signals(config.optional, config.adapter, config.given.signals):
        if message := _warnings_of_missing(config)[signal]:
            warn(message)


def _warnings_of_missing(config: RunConfig) -> dict[str, str]:
    """Returns, by name of each optional signal of the epoch method, the warning if the criterion does not define it."""
    method = config.epoch_method
    criterion = config.given.criterion
    of = getattr(criterion, "__name__", criterion)  # a function by its name, without its address
    if criterion is None:
        where = "if the loop computes its losses"
    else:
        where = f"of the outputs of {of}"
    return {
        signal: f"{title_given(method)} has no `{signal}` {where} and {note}. A regression has none. For classification, "
        f"pass attach(signals=function) with function(outputs, targets) -> {{'{signal}': (n,) tensor}}"
        f"{way_around(method, signal)}."
        if note
        else ""
        for signal, note in config.optional.items()
    }


def _reader(config: RunConfig, records: Records) -> SignalReader:
    # The loss is read in any case.
    recorded = records.signals - {"loss"}
    batch = config.batch_method
    chosen_by = recorded | (
        set() if batch is None else {*requirements_of(batch).signals} - {"loss"}
    )
    return SignalReader(
        config.adapter,
        config.given.signals,
        recorded=recorded,
        chosen_by=chosen_by,
        without=_warnings_of_missing(config),
        way_around=partial(way_around, config.epoch_method),
    )


def _title_for_extra_passes(config: RunConfig) -> str | None:
    """Returns the title of the method that needs extra forward passes; None if it makes none."""
    known = config.given.scoring is not None and config.given.scoring.losses is not None
    scores = config.mode is SelectionMode.BEFORE_FORWARD and not known
    makes_passes = scores or calls_model(config.epoch_method)
    return title_given(config.methods[-1]) if makes_passes else None


def attach(
    method: Method | float | str | Sequence[Method | float | str],
    *,
    loader: DataLoader[Any],
    criterion: Any,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    epochs: int,
    forward: Forward | None = None,
    forward_passes: Literal["auto", "once", "twice"] | Scoring = "auto",
    signals: Signals | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    spend: Literal["steps", "batches"] | None = None,
    stratify: Any = "auto",
    process_group: Any = None,
    **options: Unpack[Options],
) -> Run:
    """Attaches a method to a training loop, which then iterates `run.loader` and calls `run.model` and `run.criterion`.

    Args:
        method: Method such as `Kakurenbo()`, its text as on the command line, "kakurenbo:tau=0.5", or a list with at most one
            method that chooses before training, one before each epoch, and one in each batch. 0.5, or "50%", is a share of the
            cost of full training: `Winnow(0.5)`, or `UniformRows(0.5)` for an IterableDataset.
        loader: Training DataLoader, whose settings and order are kept. With an IterableDataset, only batch methods work.
        criterion: Loss of torch.nn, or function `(outputs, targets) -> per-sample losses`, which `run.criterion` averages; None
            if only `run.reduce` is called. If the loop reduces the losses itself, pass a module with reduction="none". Hooks of
            a criterion are not called.
        model: Model; `run.model` remembers which samples its outputs belong to. Needed if the method makes extra forward
            passes.
        optimizer: Optimizer, whose steps are counted. Needed if the method scales the learning rate.
        epochs: Number of epochs of the whole training run, 1 or more; schedules of methods are based on it.
        forward: Function `(model, batch) -> (outputs, targets)` for the run's extra forward passes. Default: `(model(batch[0]),
            batch[1])`.
        forward_passes: Forward pass whose losses a batch method uses to choose rows. "once": the loop's own; `run.model` is
            `subset_backward(model)`, inside DDP if there is DDP. "twice": an extra forward pass over each batch before the loop
            sees it. "auto": "once", but "twice" with torch before 2.11, and from the second epoch on if the model cannot be
            traced. `Scoring(...)`: "twice", with lower precision, losses of earlier epochs, another model or smaller inputs in
            the extra pass.
        signals: Function `(outputs, targets) -> {name: (n,) tensor}` for signals (numbers per sample, such as "confidence")
            that the criterion does not define.
        seed: Random seed of the method. The random numbers of the loop do not change.
        device: Device to which batches are moved. Default: the device of the model, else of the optimizer's parameters.
        spend: Quantity that shrinks with fewer samples. "steps": fewer steps, full batches. "batches": as many steps as
            full training, smaller batches, no scaled learning rate. Default None: as the method defines.
        stratify: "class": each batch has every class in its share of the dataset; classes come from the dataset or
            `run.criterion`. A list or tensor of shape (N,): the same with these classes. None: the loader's order. Default
            "auto": as the method defines; the loader's order, with a warning, if its sampler is no plain shuffle.
        process_group: Process group of data parallelism. Default: the default group of torch.distributed, if there is one.
        options: Further settings by name. `on_nonfinite`: what to do with losses that are not finite: "keep" (default) keeps
            the samples and warns; "raise" raises an error. `observe`: whether to store what `run.data_map` needs, 20 to 44
            bytes per sample; default False. `collate_keeps_rows`: True declares that row i of a batch is its sample i; by
            default, the run compares batches with samples.

    Example:
        >>> loader = DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 3), torch.arange(8) % 2), 2)
        >>> len(attach("uniform", loader=loader, criterion=nn.CrossEntropyLoss(), epochs=3).loader)
        3

    Raises:
        TypeError: An argument has the wrong type, or the dataset is an IterableDataset and the method needs indices of samples.
        ValueError: An argument is out of range, or something that the method needs is missing; nothing was changed.
        RuntimeError: `forward_passes` needs torch 2.11; nothing was changed.
    """
    loader = without_wrapper(loader)
    streams = isinstance(getattr(loader, "dataset", None), IterableDataset)
    # A Scoring describes the pass before that of the loop, so it stands for "twice". Labels of the samples stand for "class".
    scores = not isinstance(forward_passes, str | None)
    labeled = not isinstance(stratify, str | None)
    given = Arguments(
        method=method_of(method, streams=streams),
        loader=loader,
        criterion=criterion,
        model=model,
        optimizer=optimizer,
        epochs=epochs,
        forward=forward,
        forward_passes="twice" if scores else forward_passes,
        scoring=forward_passes if scores else None,
        signals=signals,
        seed=seed,
        device=device,
        spend=spend,
        stratify="class" if labeled else stratify,
        labels=stratify if labeled else None,
        **check_options(options),
    )
    return build_run(check(given, process_group))


def check_options(options: Mapping[str, Any]) -> Options:
    """Checks the names of further settings of `attach`, and returns the settings.

    Args:
        options: Options by name.

    Raises:
        TypeError: A name is not an option.
    """
    for name in options:
        if name not in Options.__annotations__:
            raise TypeError(
                f"attach and observe have no argument {name!r}; their options are {', '.join(Options.__annotations__)}"
            )
    return cast(Options, options)


GIVEN_BY_TRAINER = {
    "method",
    "loader",
    "criterion",
    "model",
    "optimizer",
    "epochs",
    "device",
    "process_group",
    "options",
}
"""Arguments of `attach` that are not settings of a framework's `Selection`: it has its own, or reads them from the trainer."""


def check_further_settings(
    settings: Mapping[str, Any], title: str = "", *, given: Set[str] = GIVEN_BY_TRAINER
) -> None:
    """Checks the names of settings of a framework's `Selection`.

    Args:
        settings: Settings by name.
        title: Text of the error message directly after "Selection: ". Default: empty.
        given: Names of arguments of `attach` that the framework provides itself, and that are no settings.

    Raises:
        TypeError: A name is not a setting.
    """
    known = {*inspect.signature(attach).parameters, *Options.__annotations__} - given
    if unknown := sorted(settings.keys() - known):
        raise TypeError(
            f"Selection: {title}{', '.join(unknown)}: no such setting; the settings are {', '.join(sorted(known))}"
        )


def observe(
    *,
    loader: DataLoader[Any],
    criterion: Any,
    model: nn.Module | None = None,
    epochs: int,
    **settings: Any,
) -> Run:
    """Records each sample's losses without selection; the loop trains exactly as without it. See `run.data_map()`.

    Args:
        loader: Training DataLoader.
        criterion: Loss, see `attach`.
        model: Model, see `attach`. Default: none.
        epochs: Number of epochs of the whole training run, 1 or more.
        settings: Other arguments of `attach`, such as `optimizer`, `signals` or `device`.

    Returns:
        A run, used like the one that `attach` returns.

    Raises:
        TypeError: An argument has the wrong type, or the dataset is an IterableDataset.
        ValueError: An argument is out of range; nothing was changed.

    Example:
        >>> data = torch.utils.data.TensorDataset(torch.randn(8, 3), torch.arange(8) % 2)
        >>> model = nn.Linear(3, 2)
        >>> run = observe(loader=DataLoader(data, 4), criterion=nn.CrossEntropyLoss(), model=model, epochs=1)
        >>> for x, y in run.loader:
        ...     run.criterion(run.model(x), y).backward()
        >>> len(run.data_map().suspects(3)), run.data_map()["times_seen"].tolist()
        (3, [1, 1, 1, 1, 1, 1, 1, 1])
    """
    return attach(
        mark_as_given(FullData(), OBSERVE),
        loader=loader,
        criterion=criterion,
        model=model,
        epochs=epochs,
        observe=True,
        **settings,
    )
