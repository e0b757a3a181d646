"""Builds the parts of a run from checked arguments, and connects them."""

import warnings
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from thresher.attribution.accumulator import COUNT_OF_TRAINED, StepAccumulator
from thresher.attribution.attributor import Attributor
from thresher.attribution.batch_norm import WeightedNorms
from thresher.attribution.calls import OwnModel
from thresher.attribution.meter import Meter
from thresher.attribution.model import TrackedModel
from thresher.attribution.sample_dimension import SampleDimension
from thresher.attribution.tracker import RowTracker
from thresher.cost import Cost
from thresher.distributed.layout import ShardLayout
from thresher.distributed.records import ShardedRecords
from thresher.loading.loader import SelectedLoader
from thresher.losses.reader import SignalReader
from thresher.methods._on_subset import OnSubset
from thresher.methods.contract import EpochMethod, requirements_of, way_around
from thresher.methods.full import FullData
from thresher.passes.engine import device_of_model
from thresher.passes.own import OwnPasses
from thresher.passes.scoring import Scoring
from thresher.records import NEVER_SEEN, Column, Records
from thresher.run.attached import claim
from thresher.run.batch_selection import BatchSelection, InForward, NoSelection, Tools
from thresher.run.batch_stage import BatchStage
from thresher.run.before_forward import BeforeForward
from thresher.run.checks import Arguments, Checked, least_rows, optimizers_of, undefined_signals
from thresher.run.divisor import by_chance, divisible_before
from thresher.run.epochs import Epochs
from thresher.run.learning_rate import StepHooks
from thresher.run.parts import Parts
from thresher.run.planning import RunSettings
from thresher.run.proxy_forward import ProxyForward
from thresher.run.run import Run
from thresher.run.state import SavedState
from thresher.run.step_checks import StepChecks, parameters_elsewhere
from thresher.run.stopwatch import Stopwatch
from thresher.run.trained import Trained
from thresher.shards import World
from thresher.subset.parallel import is_sharded


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
    loader = SelectedLoader(given.loader, device=device, kept=checked.kept, world=checked.world, keeps=given.keeps_rows)
    _check_order(checked.epoch_method, loader)
    epoch_method = _on_subset(checked, loader)
    records = _records(_columns(given, checked), loader.n, here, checked.world)
    cost = Cost()
    for one in methods:
        cost.add_scores(_own_part(one.cost, checked.world) if requirements_of(one).cost else None)
    meter = Meter(cost)
    counts = _records({} if loader.streams else COUNT_OF_TRAINED, loader.n, here, checked.world)
    accumulator = StepAccumulator(records, meter, counts, count_steps=given.optimizer is None)
    tracker, stopwatch = _tracker(given), Stopwatch(here)
    attributor = Attributor(tracker, accumulator, samples=loader.n, device=here, unknown_rows=loader.unknown_rows)
    trained = Trained(given.model, subset=checked.passes == "once")
    attributor.norms = norms = _norms(trained.module, checked)
    module, call = trained.module, trained.call
    model = None if module is None else TrackedModel(module, call, tracker, stopwatch, here, meter, norms)
    _recognise(model, attributor)
    trained.report_to(meter)
    reader = _reader(records, given, checked)
    who = _who_passes(given, checked, methods[-1])
    passes = OwnPasses(model, loader, reader, records, cost, given.forward, here, loader.unknown_rows, who)
    tools = Tools(attributor, reader, stopwatch, passes, records, here, lambda: epochs.progress, methods[-1], checked.by_batch)
    selection = _selection(tools, given, checked, trained)
    loader.select_before_loop(selection.fills)
    epochs = Epochs(
        RunSettings(given.epochs, given.seed, given.on_nonfinite, given.spend, alone=len(methods) == 1),
        epoch_method,
        loader,
        selection,
        attributor=attributor,
        accumulator=accumulator,
        passes=passes,
        records=records,
        cost=cost,
        steps_are_seen=given.optimizer is not None,
    )
    loader.connect(epochs)
    epochs.plan_ahead()
    _check_smaller_batches(epochs, loader, given, checked)
    if given.optimizer is not None:
        epochs.hooks = hooks = StepHooks(given.optimizer, epochs.step_over)
        epochs.step_checks = StepChecks(hooks, type(given.optimizer).__name__, parameters_elsewhere(given.model, hooks))
    claim(epochs, [given.loader, *optimizers_of(given)])
    parts = (attributor, accumulator, records, cost, stopwatch)
    state = SavedState(methods, _settings(methods, given, checked), checked.kept, loader, epochs, *parts, here)
    return Run(Parts(methods[-1], loader, model, checked.criterion, epochs, *parts, state))


def _settings(methods: list[Any], given: Arguments, checked: Checked) -> str:
    """The methods, and what decides beside them which rows are trained with which weights."""
    divide = ["divide='batch'"] if checked.by_batch else []
    proxy = [f"proxy=Proxy(every={given.proxy.every})"] if given.proxy is not None else []
    return " ".join([*map(repr, methods), *divide, *proxy])


def _own_part(cost: tuple[int, int] | None, world: World) -> tuple[int, int] | None:
    """The part of this process in the cost of scores, which the processes share out among them."""
    return None if cost is None else ((cost[0] + world.rank) // world.size, (cost[1] + world.rank) // world.size)


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
    if requirements_of(method).weighted_statistics and not (loader.streams or loader.yields_once):
        raise ValueError(
            f"{type(method).__name__} weighs the rows of BatchNorm layers by how each was drawn, and the loader's sampler can "
            f"yield a sample several times in an epoch: use shuffle=True{way_around(method, 'weighted_statistics')}"
        )


def _columns(given: Arguments, checked: Checked) -> dict[str, Column]:
    """What is remembered of each sample; nothing of a stream, whose samples have no ids."""
    if checked.samples is None:
        return {}
    columns, batch = dict(checked.epoch_method.columns()), checked.batch_method
    for name in undefined_signals(checked.epoch_method, checked.criterion, given.signals):
        columns = {own: column for own, column in columns.items() if (column.signal or own) != name}
    if batch is not None:
        stale = given.scoring is not None and given.scoring.every_epochs > 1
        for name in {"loss", *(requirements_of(batch).signals if stale else ())}:
            columns.setdefault(name, Column(torch.float32, fill=NEVER_SEEN))
    return columns


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
    for signal in undefined_signals(method, checked.criterion, given.signals):
        warnings.warn(
            f"{name} has no `{signal}` of the outputs of {given.criterion!r} and {requires.optional[signal]}. Pass "
            f"attach(signals=function) with function(outputs, targets) -> {{'{signal}': (n,) tensor}}"
            f"{way_around(method, signal)}.",
            stacklevel=4,
        )
    drawn = deal is not None and given.epochs > 1 and not undefined_signals(method, checked.criterion, given.signals)
    if least_rows(given.model) > 1 and drawn and "drawn_statistics" in requires.switches:
        warnings.warn(
            f"{name} trains on drawn rows, and the BatchNorm layers of the model learn with their statistics: do not compute "
            "these anew on all samples after the training, as torch.optim.swa_utils.update_bn does, which costs accuracy"
            f"{way_around(method, 'drawn_statistics')}.",
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


def _selection(tools: Tools, given: Arguments, checked: Checked, trained: Trained) -> BatchSelection:
    method = checked.on_stream or checked.batch_method
    if method is None:
        return NoSelection(tools)
    stage = BatchStage(method, seed=given.seed, rank=checked.world.rank)
    scoring = given.scoring or Scoring()
    if given.proxy is not None:
        return ProxyForward(tools, stage, scoring, given.proxy, fills=given.forward_passes == "twice")
    if checked.passes == "once":
        automatic = given.forward_passes == "auto" and not (given.model is not None and is_sharded(given.model))
        automatic = automatic and not (by_chance(method) and (checked.world.size > 1 or checked.by_batch))
        automatic = automatic and not (checked.by_batch and not divisible_before(checked.criterion))
        return InForward(tools, stage, trained, BeforeForward(tools, stage, scoring, fills=True) if automatic else None)
    fills = checked.passes == "twice" or (given.forward_passes == "twice" and checked.on_stream is None)
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


def _norms(model: nn.Module | None, checked: Checked) -> WeightedNorms | None:
    """The BatchNorm layers of the model, where the method has them weigh rows; a stream has no rows to weigh."""
    method = checked.epoch_method
    if model is None or checked.samples is None or not requirements_of(method).weighted_statistics:
        return None
    return WeightedNorms(model, way_around(method, "weighted_statistics"))
