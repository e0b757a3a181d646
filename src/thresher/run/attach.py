"""`attach`: the one way to attach a method to a training loop, and the wiring of the parts of a run."""

import ast
import inspect
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, default_collate

from thresher.attribution.accumulator import COUNT_OF_TRAINED, OwnModel, StepAccumulator
from thresher.attribution.attributor import Attributor
from thresher.attribution.cost_meter import Meter
from thresher.attribution.model import TrackedModel
from thresher.attribution.tracker import RowTracker, SampleDimension
from thresher.cost import Cost
from thresher.distributed.layout import ShardLayout
from thresher.distributed.sharded_records import ShardedRecords
from thresher.loading.loader import SelectedLoader
from thresher.losses.base import SignalReader, Signals
from thresher.methods import registry
from thresher.methods._adapted import OnSubset
from thresher.methods.contract import EpochMethod, Method, requirements_of, way_around
from thresher.methods.full import FullData
from thresher.methods.winnow import Winnow
from thresher.passes.engine import Forward, device_of_model
from thresher.passes.own import OwnPasses
from thresher.passes.scoring import Scoring
from thresher.records import NEVER_SEEN, Column, Records
from thresher.run.batch_selection import (
    BatchSelection,
    BatchStage,
    BeforeForward,
    InForward,
    NoSelection,
    Tools,
    Trained,
    by_chance,
    divisible_before,
)
from thresher.run.checkpoint import SavedState
from thresher.run.checks import Arguments, Checked, check, claim, least_rows, optimizers_of, undefined_signals
from thresher.run.epochs import Epochs, RunSettings
from thresher.run.optimizer_steps import StepChecks, StepHooks, Stopwatch, parameters_elsewhere
from thresher.run.run import Parts, Run
from thresher.run.strata import STRATUM, STRATUM_COLUMN
from thresher.shards import World
from thresher.subset.parallel import is_sharded
from thresher.timing import SPREAD_OVER, WHOLE_STEPS, Timing, whole_steps


def method_of(given: Any, spend: str | None = None) -> Any:
    """Returns the method that a share or a name stands for; anything else as it is.

    Args:
        given: Argument `method` of `attach`, or a list of such arguments: a number such as 0.5 or a text such as "50%" is
            `Winnow(share)`; another text is a method as on the command line.
        spend: Argument of `attach`: with "steps", a share is `Winnow(share, paced=True)`. Default: none.

    Raises:
        ValueError: A share is outside (0, 1], no method has this name, or the method has settings without a default.
    """
    if isinstance(given, list | tuple):
        return [method_of(one, spend) for one in given]
    if isinstance(given, bool) or not isinstance(given, int | float | str):
        return given
    if isinstance(given, str) and given[:1].isalpha() and not given.endswith("%"):
        return _by_name(given)
    return Winnow(share=_share_of(given), paced=spend == "steps")


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
        return float(given.removesuffix("%")) / 100 if given.endswith("%") else float("nan")
    except ValueError:
        return float("nan")


def _by_name(name: str) -> Any:
    """Returns the method of a name, or of a text as on the command line, such as "kakurenbo:max_fraction=0.2"."""
    known, *texts = name.split(":")
    try:
        kind = registry.load(known)
    except ValueError as error:
        raise ValueError(f"`method`: {error}") from None
    settings = {key: _value(text) for key, _, text in (one.partition("=") for one in texts)}
    parameters = inspect.signature(kind).parameters
    for key in settings:
        if key not in parameters:
            raise ValueError(f"`method`: thresher.{kind.__name__} has no setting {key!r}; it has {', '.join(parameters)}")
    needed = [one.name for one in parameters.values() if one.default is one.empty and one.name not in settings]
    if needed:
        missing = ", ".join(f"{one}=..." for one in needed)
        raise ValueError(f"`method`: {name!r} has settings without a default; write thresher.{kind.__name__}({missing})")
    return kind(**settings)


def _value(text: str) -> Any:
    """Returns the value that a setting has on the command line: a number, True, False, None, or else the text."""
    try:
        return ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(text.lower(), text))
    except (ValueError, SyntaxError):
        return text


def build_run(given: Arguments, checked: Checked) -> Run:
    """Builds a run.

    Args:
        given: Arguments of `attach`.
        checked: Results of the checks.

    Raises:
        ValueError: The method decides the order of training, and the loader's sampler has an order of its own.
    """
    methods, device = _methods(checked), _device(given)
    here = device or torch.device("cpu")
    timing, own = Timing(here), {"kept": checked.kept, "world": checked.world, "keeps": given.keeps_rows}
    loader = SelectedLoader(given.loader, device=device, timing=timing, **own)
    _check_order(checked.epoch_method, loader)
    epoch_method = _on_subset(checked, loader)
    records = _records(_columns(given, checked), loader.n, here, checked.world)
    cost = _cost_of_scores(methods, checked.world)
    meter = Meter(cost)
    counts = _records({} if loader.streams else COUNT_OF_TRAINED, loader.n, here, checked.world)
    accumulator = StepAccumulator(records, meter, counts, count_steps=given.optimizer is None)
    tracker, stopwatch = _tracker(given), Stopwatch(here)
    unknown, n = loader.unknown_rows, loader.n
    attributor = Attributor(tracker, accumulator, samples=n, device=here, unknown_rows=unknown, timing=timing)
    trained = Trained(given.model, subset=checked.passes == "once")
    module, call = trained.module, trained.call
    model = None if module is None else TrackedModel(module, call, tracker, stopwatch, here, meter, timing)
    _recognise(model, attributor)
    trained.report_to(meter)
    reader, who = _reader(records, given, checked), _who_passes(given, checked, methods[-1])
    passes = OwnPasses(model, loader, reader, records, cost, given.forward, here, unknown, who)
    progress = lambda: epochs.progress  # noqa: E731
    tools = Tools(attributor, reader, stopwatch, passes, records, here, progress, methods[-1], timing, checked.by_batch)
    selection = _selection(tools, given, checked, trained, -(-loader.candidates // loader.batch_sampler.batch_size))
    loader.select_before_loop(selection.fills, by_chance=selection.by_chance)
    epochs = Epochs(
        RunSettings(given.epochs, given.seed, given.on_nonfinite, given.spend, alone=len(methods) == 1),
        epoch_method,
        loader,
        selection,
        timing=timing,
        attributor=attributor,
        accumulator=accumulator,
        passes=passes,
        records=records,
        cost=cost,
        steps_are_seen=given.optimizer is not None,
        strata=checked.strata,
    )
    loader.connect(epochs)
    epochs.plan_ahead()
    _check_smaller_batches(epochs, loader, given, checked)
    if given.optimizer is not None:
        _follow_steps(epochs, given.optimizer, given.model)
    claim(epochs, [given.loader, *optimizers_of(given)])
    parts = (attributor, accumulator, records, cost, stopwatch)
    state = SavedState(methods, " ".join(map(repr, methods)), checked.kept, loader, epochs, *parts, here)
    return Run(Parts(methods[-1], loader, model, checked.criterion, epochs, *parts, state))


def _follow_steps(epochs: Epochs, optimizer: Optimizer, model: nn.Module | None) -> None:
    epochs.hooks = hooks = StepHooks(optimizer, epochs.step_over, epochs.trains, epochs.timing)
    epochs.step_checks = StepChecks(hooks, type(optimizer).__name__, parameters_elsewhere(model, hooks))


def _cost_of_scores(methods: list[Any], world: World) -> Cost:
    """The cost of the scores that the methods were given; the processes share it out among them."""
    cost, of_each = Cost(), [one.cost for one in methods if requirements_of(one).cost and one.cost is not None]
    for forward, backward in of_each:
        cost.add_scores(((forward + world.rank) // world.size, (backward + world.rank) // world.size))
    return cost


def _records(columns: dict[str, Column], n: int, device: torch.device, world: World) -> Records:
    """Records of all samples, or of those whose records this process holds."""
    return (
        Records(columns, n, device) if world.size == 1 else ShardedRecords(columns, ShardLayout(n, world.size), world, device)
    )


def _methods(checked: Checked) -> list[Any]:
    """Methods in the order of their stages; all data beside another method needs no mention."""
    methods = [one for one in (checked.before, checked.epoch_method, checked.batch_method) if one is not None]
    return methods if len(methods) == 1 else [one for one in methods if not isinstance(one, FullData)]


def _on_subset(checked: Checked, loader: SelectedLoader) -> EpochMethod | OnSubset:
    """The epoch method, which plans for the samples that pruning left, or for those that the user's sampler yields."""
    method = checked.epoch_method
    if checked.kept is None and isinstance(method, FullData):
        return method
    ids = loader.ids_of_sampler()
    if checked.kept is None:
        return method if ids is None else OnSubset(method, ids, loader.n, of=len(ids))
    if ids is not None:
        raise ValueError(
            f"{type(checked.before).__name__} decides among all {loader.n} samples of the dataset, but the loader's sampler "
            f"yields {len(ids)} of them. Pass a loader over torch.utils.data.Subset(dataset, ids), and scores of these samples."
        )
    kept = checked.kept
    if checked.world.size > 1 and requirements_of(method).sharded:
        block = ShardLayout(loader.n, checked.world.size).block(checked.world.rank)
        kept = kept[(kept >= block.start) & (kept < block.stop)]
    return OnSubset(method, kept, loader.n)


def _device(given: Arguments) -> torch.device | None:
    """Device of batches: the one that was given, else that of the model; None leaves them where they are."""
    if given.device is not None:
        return torch.device(given.device)
    return None if given.model is None else device_of_model(given.model)


def _check_order(method: EpochMethod, loader: SelectedLoader) -> None:
    if requirements_of(method).own_order and not loader.order_is_free:
        raise ValueError(
            f"{type(method).__name__} draws the order of training, but the loader's sampler has an order of its own: use "
            "shuffle=True"
        )


def _columns(given: Arguments, checked: Checked) -> dict[str, Column]:
    """What is remembered of each sample; nothing of a stream, whose samples have no ids."""
    if checked.samples is None:
        return {}
    columns, batch = dict(checked.epoch_method.columns()), checked.batch_method
    if checked.strata is not None and checked.strata.codes is None and _has_classes(checked):
        columns.setdefault(STRATUM, STRATUM_COLUMN)
    for name in undefined_signals(checked.epoch_method, checked.criterion, given.signals):
        columns = {own: column for own, column in columns.items() if (column.signal or own) != name}
    if batch is not None:
        stale = given.scoring is not None and given.scoring.every_epochs > 1
        for name in {"loss", *(requirements_of(batch).signals if stale else ())}:
            columns.setdefault(name, Column(torch.float32, fill=NEVER_SEEN))
    return columns


def _has_classes(checked: Checked) -> bool:
    """Whether the criterion may see the class of each sample."""
    return checked.criterion is not None and checked.criterion.kind != "values"


def _check_smaller_batches(epochs: Epochs, loader: SelectedLoader, given: Arguments, checked: Checked) -> None:
    """Refuses batches that would have too few rows, and says what a method cannot do here."""
    method, name = checked.epoch_method, type(checked.epoch_method).__name__
    requires = requirements_of(method)
    if checked.on_stream is not None:
        warnings.warn(
            f"{name} draws uniformly inside each batch of a stream, which has no epoch to plan. The rows that it leaves out "
            "are loaded all the same.",
            stacklevel=4,
        )
    if loader.streams or (given.spend != "batches" and not requires.smaller_batches):
        return
    deal = loader.deal(epochs.held, least=least_rows(given.model))
    where = "where the loop computes its losses" if given.criterion is None else f"of the outputs of {given.criterion!r}"
    for signal in undefined_signals(method, checked.criterion, given.signals):
        warnings.warn(
            f"{name} has no `{signal}` {where} and {requires.optional[signal]}. Pass "
            f"attach(signals=function) with function(outputs, targets) -> {{'{signal}': (n,) tensor}}"
            f"{way_around(method, signal)}.",
            stacklevel=4,
        )
    if given.epochs == 1 and requires.smaller_batches and deal is not None:
        warnings.warn(f"{name} draws uniformly in a training of one epoch: no sample was seen before.", stacklevel=4)


def _reader(records: Records, given: Arguments, checked: Checked) -> SignalReader:
    recorded = records.signals - {"loss"}
    batch = checked.batch_method
    chosen_by = recorded | (set() if batch is None else {*requirements_of(batch).signals} - {"loss"})
    return SignalReader(checked.criterion, given.signals, recorded=recorded, chosen_by=chosen_by)


def _who_passes(given: Arguments, checked: Checked, method: Any) -> str | None:
    """Name of the method where own passes will be made, else None."""
    scores = checked.passes == "twice" and (given.scoring is None or given.scoring.losses is None)
    return type(method).__name__ if scores or requirements_of(checked.epoch_method).model else None


def _selection(tools: Tools, given: Arguments, checked: Checked, trained: Trained, steps: int) -> BatchSelection:
    """Chooses how rows of batches are chosen, given the number of batches of an epoch; 0 where that is not known."""
    method = checked.on_stream or checked.batch_method
    if method is None:
        return NoSelection(tools)
    fills = checked.passes == "twice" or (given.forward_passes == "twice" and checked.on_stream is None)
    whole = () if fills or trained.is_compiled else whole_steps(steps or SPREAD_OVER, WHOLE_STEPS)  # filled up: all are whole
    stage = BatchStage(method, seed=given.seed, rank=checked.world.rank, whole_steps=whole)
    scoring = given.scoring or Scoring()
    if checked.passes == "once":
        automatic = given.forward_passes == "auto" and not (given.model is not None and is_sharded(given.model))
        automatic = automatic and not (by_chance(method) and (checked.world.size > 1 or checked.by_batch))
        automatic = automatic and not (checked.by_batch and not divisible_before(checked.criterion))
        return InForward(tools, stage, trained, BeforeForward(tools, stage, scoring, fills=True) if automatic else None)
    return BeforeForward(tools, stage, scoring, fills=fills)


def _tracker(given: Arguments) -> RowTracker:
    """Knows rows by the first dimension of tensors, which is checked where a function of the user's makes the batches."""
    tracker = RowTracker()
    if given.loader.collate_fn is not default_collate and not given.keeps_rows:
        tracker.sample_dimension = SampleDimension()
    return tracker


def _recognise(model: TrackedModel | None, attributor: Attributor) -> None:
    """Has losses of the run's model told from those of another one, and from those of outputs that the loop has cached."""
    if model is not None:
        attributor.own_model = OwnModel(attributor.meter, model.parameters)
        attributor.meter.parameters = model.parameters


def attach(
    method: Method | float | str | Sequence[Method | float | str],
    *,
    loader: DataLoader[Any],
    criterion: Any,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    epochs: int,
    forward: Forward | None = None,
    forward_passes: Literal["auto", "once", "twice"] = "auto",
    scoring: Scoring | None = None,
    signals: Signals | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    on_nonfinite: Literal["keep", "raise"] = "keep",
    spend: Literal["steps", "batches"] | None = None,
    process_group: Any = None,
    stratify: Literal["auto", "class"] | None = "auto",
    labels: Any = None,
    collate_keeps_rows: bool = False,
) -> Run:
    """Attaches a method to a training loop, which then iterates `run.loader` and calls `run.model` and `run.criterion`.

    Args:
        method: Method such as `Kakurenbo()`, its text as on the command line, "kakurenbo:tau=0.5", or a list with at most one
            per stage (before training, epoch, batch). 0.5, or "50%", is a share of the cost of full training: `Winnow(0.5)`.
        loader: Training DataLoader, whose settings and order are kept. Batch methods, and a share alone, also take streams.
        criterion: Loss of torch.nn, or function `(outputs, targets) -> per-sample losses`, which `run.criterion` averages; None
            if only `run.reduce` is called. Losses that the loop itself reduces come from a module with reduction="none". Hooks
            of a criterion are not called.
        model: Model, whose outputs name their rows. Needed where the method makes forward passes of its own.
        optimizer: Optimizer; its steps are counted. Needed where the method scales the learning rate.
        epochs: Number of epochs of the whole training, 1 or more, to which schedules of methods refer.
        forward: Function `(model, batch) -> (outputs, targets)` of own passes. Default: `(model(batch[0]), batch[1])`.
        forward_passes: Where the losses come from by which a batch method chooses. "once": from the loop's own forward pass;
            `run.model` is `subset_backward(model)`, inside of DDP. "twice": from a pass before it, over every candidate batch.
            "auto": "once", and "twice" from the second epoch on where the model cannot be traced.
        scoring: Settings of the scoring pass with "twice": lower precision, stale losses, another model, smaller inputs.
        signals: Function `(outputs, targets) -> {name: (n,) tensor}` for signals that the criterion cannot give.
        seed: Random seed of all draws of the method; the loop's own random numbers are not touched.
        device: Device of batches and records. Default: the device of the model.
        on_nonfinite: Reaction to losses that are not finite, whose samples are always kept: "keep" warns, "raise" raises.
        spend: Way to spend plans: "steps", fewer steps; "batches", smaller ones, no LR scaled. Default None: the method's own.
        process_group: Process group of data parallelism. Default: the default group of torch.distributed, where there is one.
        stratify: "class", batches with each class in its share; None, the loader's order. Default "auto": the method's own.
        labels: Class of each sample, as of `StratifiedBatchSampler`. Default: those of the dataset, or of `run.criterion`.
        collate_keeps_rows: Declaration that row i of each batch is sample i; without it, batches are compared with samples.

    Example:
        >>> loader = DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 3), torch.arange(8) % 2), 2)
        >>> len(attach("uniform", loader=loader, criterion=nn.CrossEntropyLoss(), epochs=3).loader)
        3

    Raises:
        TypeError: An argument has the wrong type, or the samples of the dataset have no ids.
        ValueError: An argument is out of range, or something that the method needs is missing; nothing was changed.
    """
    first = (method_of(method, spend), loader, criterion, model, optimizer, epochs, forward, forward_passes, scoring, signals)
    given = Arguments(*first, seed, device, on_nonfinite, spend, collate_keeps_rows, stratify, labels)
    return build_run(given, check(given, process_group))
