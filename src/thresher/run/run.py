"""attach() and Run: a method in one training loop. The only place that knows all the others."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from thresher import rng
from thresher.attribution.accumulator import StepAccumulator
from thresher.attribution.model import TrackedModel
from thresher.attribution.resolve import attribute
from thresher.attribution.rows import Attribution, AttributionError, RowLayout, YieldedBatch
from thresher.attribution.tracker import RowTracker
from thresher.cost import Cost, break_even
from thresher.loading.collate_check import collate_mixes
from thresher.loading.loader import SelectedLoader, check_loader
from thresher.loading.row_buffer import is_per_sample, taken
from thresher.loading.trees import leaves, map_where
from thresher.losses.adapt import adapt
from thresher.losses.base import Criterion, DeferredSignals
from thresher.losses.signals import labels_of
from thresher.methods._on_subset import OnSubset
from thresher.methods.contract import BatchMethod, BeforeMethod, EpochMethod, requirements_of, way_around
from thresher.methods.full import FullData
from thresher.methods.registry import name_of
from thresher.passes.features import last_linear_input
from thresher.plans import BatchPlan, EpochPlan
from thresher.records import NEVER_SEEN, Column, Records
from thresher.run.batch_stage import BatchStage
from thresher.run.checks import (
    check_counted_once,
    check_needs,
    check_settings,
    device_of,
    innermost,
    kept_of,
    passes_of,
    stages,
)
from thresher.run.learning_rate import StepHooks
from thresher.run.scoring import Scoring
from thresher.run.stopwatch import Stopwatch
from thresher.subset import SubsetBackward, kept_rows, subset_backward

Forward = Callable[[nn.Module, Any], tuple[Any, Any]]
Signals = Callable[[Any, Any], Mapping[str, Tensor]]

Method = BeforeMethod | EpochMethod | BatchMethod

STATE_VERSION = 3
BATCHES_AHEAD = 2
"""Batches whose tensors are held for comparing values: the one in use and one that a prefetcher asked for."""


def attach(
    method: Method | Sequence[Method],
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
    process_group: None = None,
) -> "Run":
    """Attach a method to a training loop, which then iterates `run.loader` and calls `run.model` and `run.criterion`.

    Everything is checked before anything is changed.

    Args:
        method: What decides, such as `Prune(scores)` (before training), `Kakurenbo()` (before each epoch) or
            `SelectiveBackprop()` (in each batch); a list of at most one method a stage.
        loader: The training DataLoader. Its settings and the order of its sampler are kept. An IterableDataset will do for
            methods that select in the batch.
        criterion: A loss of torch.nn, or a callable `(outputs, targets) -> per-sample losses`; None where the loop uses
            `run.reduce` alone.
        model: The model. Needed where the method runs passes of its own; its outputs are the second witness of whom a
            loss belongs to. May be compiled, and is unwrapped where `forward_passes` is "once".
        optimizer: Needed where the method scales the learning rate; its steps are counted.
        epochs: Epochs of the whole training, 1 or more; schedules of methods refer to it.
        forward: `(model, batch) -> (outputs, targets)` for the run's own passes. Default: `(model(batch[0]), batch[1])`.
        forward_passes: How a batch method gets losses to choose by. "once": in the loop's own forward pass; `run.model` is
            `subset_backward(model)`, so that the backward pass costs the chosen rows only. "twice", as published: in a pass
            without gradient over each candidate batch, whose chosen rows `run.loader` gathers to full batches. "auto":
            "once", and "twice" from the second epoch on where the model cannot be traced.
        scoring: How losses are got with "twice": a lower precision, stale losses, a proxy model, smaller inputs.
        signals: `(outputs, targets) -> {name: (n,) tensor}` for signals that cannot be read off the criterion.
        seed: Of everything the method draws; the loop's random numbers are not touched.
        device: Where batches are moved and records live. Default: the model's device.
        on_nonfinite: Samples with a NaN or infinite loss are kept for training in any case; "keep" warns once, "raise"
            raises FloatingPointError when the epoch ends.
        process_group: For training in several processes, which this version does not support yet.

    Returns:
        The run.

    Raises:
        TypeError: An argument of the wrong kind, or a dataset without ids.
        ValueError: A setting out of range, or something that the method needs is missing.
    """
    before, chosen, batch_method = stages(method)
    check_loader(loader, plans_epochs=batch_method is None or (isinstance(method, list | tuple) and len(method) > 1))
    check_settings(epochs, forward_passes, scoring, on_nonfinite, process_group, seed)
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module, got {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(f"`optimizer` must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    for name, function in (("forward", forward), ("signals", signals)):
        if function is not None and not callable(function):
            raise TypeError(f"`{name}` must be callable, got {type(function).__name__}")
    adapter = None if criterion is None else adapt(criterion)
    check_needs(chosen, batch_method, adapter, model, optimizer, signals)
    n = None if isinstance(loader.dataset, IterableDataset) else len(loader.dataset)  # pyright: ignore[reportArgumentType]
    passes = passes_of(batch_method, forward_passes, scoring, model=model, adapter=adapter, n=n)
    check_counted_once(chosen, passes, forward_passes)
    within = None if before is None or n is None else OnSubset(chosen, kept_of(before, n), n)
    if batch_method is not None and requirements_of(batch_method).check:
        if n is None:
            raise ValueError(
                f"{type(batch_method).__name__} looks samples up by id, and an IterableDataset has none: use a map-style "
                "dataset"
            )
        batch_method.check(torch.arange(n) if within is None else within.kept)  # pyright: ignore[reportAttributeAccessIssue]
    return Run(
        within or chosen,
        before=before,
        stage=None if batch_method is None else BatchStage(batch_method, seed=seed, passes=passes),
        scoring=scoring or Scoring(),
        may_switch=passes == "once" and forward_passes == "auto",
        fills=passes == "twice" or forward_passes == "twice",
        loader=loader,
        adapter=adapter,
        model=model,
        optimizer=innermost(optimizer),
        epochs=epochs,
        forward=forward,
        signals=signals,
        seed=seed,
        device=device_of(device, model),
        on_nonfinite=on_nonfinite,
    )


class Run:
    """A method attached to one training loop. Made by `attach`.

    Attributes:
        method: What decides.
        loader: Iterate this instead of the DataLoader.
        epochs: Epochs of the whole training.
    """

    def __init__(
        self,
        method: EpochMethod | OnSubset,
        *,
        before: Any,
        stage: BatchStage | None,
        scoring: Scoring,
        may_switch: bool,
        fills: bool,
        loader: DataLoader[Any],
        adapter: Criterion | None,
        model: nn.Module | None,
        optimizer: Optimizer | None,
        epochs: int,
        forward: Forward | None,
        signals: Signals | None,
        seed: int,
        device: torch.device | None,
        on_nonfinite: str,
    ) -> None:
        own = method.method if isinstance(method, OnSubset) else method
        self._requires = requirements_of(own)
        self._methods = [one for one in (before, own, None if stage is None else stage.method) if one is not None]
        if len(self._methods) > 1 and _is_default(own):
            self._methods.remove(own)
        self.method = self._methods[-1]
        self.epochs = epochs
        self._epoch_method, self._stage, self._scoring, self._may_switch = method, stage, scoring, may_switch
        self._fills = fills
        self._known_losses = None if scoring.losses is None else scoring.losses.to(device or torch.device("cpu"))
        self._adapter, self._user_signals = adapter, signals
        self._forward, self._seed, self._on_nonfinite = forward, seed, on_nonfinite
        self._device = device or torch.device("cpu")
        self._module = model if stage is None or stage.passes != "once" else _with_subset_backward(model)
        self._witnesses = RowTracker()
        self._stopwatch = Stopwatch(self._device)
        self._model = (
            None if self._module is None else TrackedModel(self._module, self._witnesses, self._stopwatch, self._device)
        )
        self.loader = SelectedLoader(
            loader,
            begin=self._begin,
            yielded=self._take,
            finish=self._finish,
            upcoming=lambda: self.plan,
            device=device,
            choose=self._choose,
            count=(lambda n: n) if stage is None else stage.method.count,
        )
        if self._requires.own_order and not self.loader.order_is_free:
            raise ValueError(
                f"{type(own).__name__} draws the order of training, but the loader's sampler has an order of its own: use "
                "shuffle=True"
            )
        columns = {} if self.loader.streams else method.columns()
        if stage is not None and not self.loader.streams:
            for name in {"loss", *(stage.requires.signals if scoring.every_epochs > 1 else ())}:
                columns.setdefault(name, Column(torch.float32, fill=NEVER_SEEN))
        self._records = Records(columns, self.loader.n, self._device)
        self._wanted = self._records.signals - {"loss"}
        self._to_choose = self._wanted | (set() if stage is None else {*stage.requires.signals} - {"loss"})
        self._picked: list[tuple[Any, BatchPlan]] = []
        if stage is not None and stage.passes != "once":
            self.loader.gather(fills=fills)
        self._cost = Cost()
        for one in self._methods:
            self._cost.add_scores(one.cost if requirements_of(one).cost else None)  # pyright: ignore[reportAttributeAccessIssue]
        trained = torch.zeros(self.loader.n, dtype=torch.int16, device=self._device)
        self._ledger = StepAccumulator(self._records, self._cost, trained, count_steps=optimizer is None)
        self._rows_unknown = None if self.loader.streams else collate_mixes(loader, self.loader.generators())
        self._hooks = None if optimizer is None else StepHooks(optimizer, self._stepped)
        self._history: list[dict[str, Any]] = []
        self._recent: list[YieldedBatch] = []
        self._plan: EpochPlan | None = None
        self._weights: Tensor | None = None
        self._epoch, self._active, self._resumed = 0, False, False
        self._batches, self._consumed, self._checksum = 0, 0, 0
        self._warned = self._said_in_vain = False

    # What the loop calls

    @property
    def model(self) -> TrackedModel:
        """The user's model, watched: call this in the loop."""
        if self._model is None:
            raise ValueError("run.model: attach was not given a model; pass attach(model=...)")
        return self._model

    def criterion(self, outputs: Any, targets: Any, ids: Tensor | None = None) -> Tensor:
        """The user's criterion: the same scalar and gradient, weighted where the plan has weights; losses are recorded.

        Under `torch.no_grad()` it is the plain criterion and records nothing.

        Args:
            outputs: What `run.model` returned.
            targets: From the batch that `run.loader` yielded; slices and views are fine.
            ids: Positions in the loader's dataset of the rows, shape (rows,), int64, where tensors were indexed or mixed;
                see `run.ids`. Flattened tensors may have several consecutive rows a sample.

        Returns:
            Shape (). A criterion that returns per-sample losses is averaged.

        Raises:
            AttributionError: The rows cannot be told with certainty; nothing was recorded or counted.
            ValueError: Losses without a sample dimension, or no criterion was attached.
        """
        if self._adapter is None:
            raise ValueError("run.criterion: attach was given criterion=None; use run.reduce, or pass a criterion")
        if not torch.is_grad_enabled():
            return self._adapter.value(outputs, targets)
        credit = self._witnesses.untouched(outputs, targets) if ids is None else None
        certain = credit is not None
        if credit is None:
            credit = self._attribute(outputs, targets, ids)
        if certain and credit.batch is not None:
            weights, over_n = credit.batch.weights, credit.batch.weights_over_n
        else:
            weights, over_n = self._weights_of(credit), None
        if self._stage is not None and self._stage.passes == "once":
            return self._on_chosen_rows(outputs, targets, credit, weights, None if certain else outputs)
        wanted, own = self._wanted, None
        if self._user_signals is not None:
            own = self._ask_user(outputs, targets, credit.group.n)
            wanted = wanted - own.keys()
        value, found = self._adapter.in_step(outputs, targets, credit, weights=weights, weights_over_n=over_n, wanted=wanted)
        if own is not None:
            found = (found.now() if isinstance(found, DeferredSignals) else found) | own
        self._ledger.credit(credit, found, None if certain else outputs)
        if self._stopwatch.running:
            self._stopwatch.watch(value)
        return value

    def reduce(self, per_sample_losses: Tensor, ids: Tensor | None = None, outputs: Any = None, targets: Any = None) -> Tensor:
        """The scalar of losses that the loop computed itself; they are weighted and recorded like the criterion's.

        Args:
            per_sample_losses: Shape (rows, ...), with gradient; the mean over all dimensions but the first is the
                sample's loss.
            ids: See `criterion`.
            outputs: What `run.model` returned, or a part of it: names the rows.
            targets: Tensors of the batch: name the rows.

        Returns:
            Shape (): the mean, weighted where the plan has weights.

        Raises:
            AttributionError: The rows cannot be told with certainty; nothing was recorded or counted.
            TypeError: `per_sample_losses` is not a tensor.
            ValueError: It has no sample dimension, or the method needs signals that `outputs` and `targets` would give.
        """
        if not isinstance(per_sample_losses, Tensor):
            raise TypeError(f"run.reduce: `per_sample_losses` must be a tensor, got {type(per_sample_losses).__name__}")
        if not per_sample_losses.dim():
            raise ValueError("run.reduce: `per_sample_losses` is a scalar; give one loss a sample, before they are averaged")
        if not torch.is_grad_enabled():
            return per_sample_losses.mean()
        credit = self._attribute((per_sample_losses, outputs), targets, ids)
        rows = credit.group.rows(per_sample_losses)
        found = {"loss": rows.detach().mean(1), **self._signals_beside(outputs, targets, len(rows))}
        weights = self._weights_of(credit)
        chosen = None
        if self._stage is not None and self._stage.passes == "once":
            plan = self._chosen(credit, found)
            chosen, weights = plan.rows, _product(plan, weights)
            rows = rows.index_select(0, chosen)
        if weights is not None:
            value = (rows.mean(1) * weights.to(rows.dtype)).mean() if len(rows) else rows.sum()
        elif chosen is not None:
            value = rows.mean() if len(rows) else rows.sum()
        else:
            value = per_sample_losses.mean()
        self._ledger.credit(credit, found, (per_sample_losses, outputs), chosen)
        if self._stopwatch.running:
            self._stopwatch.watch(value, self._share_of_backward(len(rows), credit.group.n))
        return value

    @property
    def ids(self) -> Tensor:
        """Ids of the batch last yielded, shape (B,), int64, on the device of the records: what `ids=` takes."""
        if not self._recent:
            raise ValueError("run.ids: no batch was yielded yet; iterate run.loader")
        return self._recent[-1].ids

    # What it remembers and reports

    @property
    def epoch(self) -> int:
        """The epoch in progress or, between epochs, the one that comes next; 0-based."""
        return self._epoch

    @property
    def progress(self) -> float:
        """Share of all epochs' candidate samples consumed, in [0, 1]."""
        # No candidates: a dataset smaller than a batch where the last is dropped, or a stream whose length is not known yet.
        candidates = self.loader.candidates
        consumed, whole = min(self._consumed, candidates) if self._active else 0, max(1, candidates)
        return min(1.0, (self._epoch * whole + consumed) / (self.epochs * whole))

    @property
    def plan(self) -> EpochPlan:
        """The plan of the epoch in progress or, between epochs, of the one that comes next.

        Raises:
            ValueError: The loader streams: there is nothing to plan.
        """
        if self.loader.streams:
            raise ValueError("run.plan: an IterableDataset has no epoch plan; the batch method chooses in every batch")
        if self._plan is None:
            self._settle()
            plan = self._checked(
                self._epoch_method.plan_epoch(
                    self._known(), epoch=self._epoch, epochs=self.epochs, generator=rng.seeded(self._seed, self._epoch)
                )
            )
            self._records.remember(plan.remember)
            self._plan = plan
        return self._plan

    @property
    def records(self) -> Records:
        """What is remembered of every sample, up to the last call of the criterion."""
        self._ledger.flush()
        return self._records

    @property
    def trained(self) -> Tensor:
        """How often each sample was put through a backward pass, shape (N,), int16; empty for a stream."""
        self._ledger.flush()
        return self._ledger.count_trained()

    @property
    def cost(self) -> Cost:
        """What was computed, and what full training would have computed."""
        self._ledger.settle()
        self._cost.backward_to_forward = self._stopwatch.ratio() or self._cost.backward_to_forward
        return self._cost

    @property
    def history(self) -> list[dict[str, Any]]:
        """One entry an epoch that is over: its plan's facts, what it computed, what was not finite."""
        self._close_books()
        return self._history

    def _known(self) -> Mapping[str, Tensor]:
        """What a plan is made of: the records, and what the method wants to know of all samples besides."""
        method: Any = self._epoch_method
        wanted = method.full_pass(self._epoch, self.epochs) if self._requires.full_pass else ()
        return {**self._records, **self._survey(wanted)} if wanted else self._records

    # An epoch

    def _begin(self) -> tuple[EpochPlan | None, int, int]:
        if self._active and self._consumed and not self._resumed:
            self._end_epoch(complete=False)
        plan, resumed = self._plan_if_any(), self._resumed
        self._resumed = False
        if not resumed:
            self._close_books()
            self._records.start_epoch()
            self._consumed, self._checksum = 0, 0
            self._switch_if_plain()
        self._records.epoch = self._epoch
        self._ledger.ids_repeat = plan is None or plan.drawn or not self.loader.yields_once
        self._active = True
        self._weights = None
        if plan is not None and plan.weights is not None:
            table = torch.ones(self.loader.n).index_copy_(0, plan.ids, plan.weights)
            self._weights = table.to(self._device)
        if self._hooks is not None:
            self._hooks.scale = 1.0 if plan is None else plan.lr_scale
        return plan, self._consumed, self._checksum

    def _plan_if_any(self) -> EpochPlan | None:
        return None if self.loader.streams else self.plan

    def _take(self, batch: Any, ids: Tensor, consumed: int, checksum: int, weights: Tensor | None) -> None:
        """A batch is on its way to the loop."""
        self._picked = [(key, plan) for key, plan in self._picked if key is not None and key[0] > self._batches - BATCHES_AHEAD]
        self._check_forward(batch)
        held = self._recent[1 - BATCHES_AHEAD :]
        self._ledger.next_batch(set(held))
        for old in self._recent:
            if old.credited or old not in held:
                old.forget()
        ids = ids.to(self._device, non_blocking=True)
        record = YieldedBatch(ids, self._batches, unknown=self._rows_unknown, all_count=_none_ignored(batch))
        if self._weights is not None:
            record.weights = self._weights.index_select(0, ids)
        if weights is not None:
            weights = weights.to(self._device, non_blocking=True)
            record.weights = weights if record.weights is None else record.weights * weights
        if record.weights is not None:
            record.weights_over_n = record.weights / len(ids)
        self._recent = [*held, record]
        self._witnesses.remember_batch(record, leaves(batch))
        self._batches += 1
        self._cost.full_forward += consumed - self._consumed
        self._cost.full_backward += consumed - self._consumed
        self._consumed, self._checksum = consumed, checksum

    def _finish(self) -> None:
        """The epoch is exhausted: refresh, and look at what the device has to say."""
        plan = self._plan_if_any()
        rest = max(0, self.loader.candidates - self._consumed)
        self._cost.full_forward += rest
        self._cost.full_backward += rest
        self._ledger.flush()
        if plan is not None and plan.refresh is not None and plan.refresh.numel():
            self._refresh(plan.refresh)
        self._end_epoch(complete=True)
        self._settle()

    def _end_epoch(self, *, complete: bool) -> None:
        plan = self._plan
        entry: dict[str, Any] = {"epoch": self._epoch, "complete": complete}
        if plan is not None:
            refreshed = 0 if plan.refresh is None or not complete else len(plan.refresh)
            entry |= {"kept": len(plan.ids), "refreshed": refreshed, "lr_scale": plan.lr_scale, **plan.facts}
        if self._stage is not None:
            own = self._stage.facts()
            alone = len(self._methods) == 1
            entry |= own if alone else {f"batch_{name}": value for name, value in own.items()}
            self._warn_if_in_vain(1 - own.get("actual_fraction", 1.0))
        self._history.append(entry)
        self._epoch += 1
        self._plan, self._active, self._consumed = None, False, 0

    def _close_books(self) -> None:
        """What the last epoch computed; its last step may have come after it was exhausted."""
        if not self._history or "forward" in self._history[-1] or self._active:
            return
        self._ledger.settle()
        counted = asdict(self._cost)
        before = {name: sum(entry.get(name, 0) for entry in self._history) for name in COUNTED}
        self._history[-1] |= {name: counted[name] - before[name] for name in COUNTED}

    def _settle(self) -> None:
        """Before records are used: every loss is written, and everything the device was asked is answered.

        Raises:
            AttributionError: Targets on the device had other values than the rows that the outputs named.
            FloatingPointError: Non-finite losses, with on_nonfinite="raise".
        """
        self._ledger.settle()
        doubts, self._ledger.doubts = self._ledger.doubts, []
        if doubts and not bool(torch.stack(doubts).all()):
            raise AttributionError(
                "Targets were new tensors whose values are not the yielded targets of the rows that the outputs name, in the "
                "epoch that just ended. Those losses were not recorded."
            )
        self._look_for_nonfinite()

    def _look_for_nonfinite(self) -> None:
        if "loss" not in self._records or not self._history or "nonfinite" in self._history[-1]:
            return
        loss = self._records["loss"]
        bad = loss.isnan() | loss.isposinf()
        count = int(bad.sum())
        self._history[-1]["nonfinite"] = count
        if not count:
            return
        some = bad.nonzero().flatten()[:5].tolist()
        message = f"{count} samples have a loss that is not finite (ids {some}{' ...' if count > 5 else ''})"
        if self._on_nonfinite == "raise":
            raise FloatingPointError(f"{message}; attach(on_nonfinite='keep') trains on")
        if not self._warned:
            self._warned = True
            warnings.warn(f"{message}; they are kept for training and not scored. This is said once.", stacklevel=4)

    def _refresh(self, ids: Tensor) -> None:
        """One forward-only pass over samples that were left out; the loop's random numbers go on as if it had not been."""
        if self._rows_unknown is not None:
            raise AttributionError(f"Cannot refresh losses: the rows of a batch are not its samples: {self._rows_unknown}")
        assert self._module is not None
        assert self._adapter is not None
        with self._own_pass(self._module, training=self._requires.refresh == "train"):
            for batch, batch_ids in self.loader.passes(ids):
                found = self._signals_of(self._module, batch, len(batch_ids), self._wanted)
                self._records.write(batch_ids.to(self._device), found)
                self._cost.refresh += len(batch_ids)
                self._cost.forward += len(batch_ids)

    def _survey(self, wanted: Sequence[str]) -> dict[str, Tensor]:
        """One forward-only pass over every sample that training has, for what is too large to be remembered."""
        if self._rows_unknown is not None:
            raise AttributionError(
                f"Cannot look at single samples: the rows of a batch are not its samples: {self._rows_unknown}"
            )
        assert self._module is not None
        assert self._adapter is not None
        method = self._epoch_method
        ids = method.kept if isinstance(method, OnSubset) else torch.arange(self.loader.n)
        module = self._module.wrapped if isinstance(self._module, SubsetBackward) else self._module
        found: dict[str, list[Tensor]] = {name: [] for name in wanted}
        with self._own_pass(module), last_linear_input(module) as feature:
            for batch, batch_ids in self.loader.passes(ids):
                n = len(batch_ids)
                self._check_forward(batch)
                outputs, targets = self._own_forward(module, batch)
                if "error" in found:
                    found["error"].append(self._adapter.errors(outputs, targets, RowLayout(n, None)))
                if "label" in found:
                    found["label"].append(labels_of(targets, n))
                if "feature" in found:
                    found["feature"].append(feature().reshape(n, -1).float())
                self._cost.scoring += n
                self._cost.forward += n
        return {name: torch.cat(parts) for name, parts in found.items()}

    @contextmanager
    def _own_pass(self, module: nn.Module, *, training: bool = False, dtype: torch.dtype | None = None) -> Iterator[None]:
        """Forward passes of the run itself: the loop's random numbers and modes go on as if they had not been."""
        parts = [*module.modules()]
        parts += [part.wrapped for part in parts if isinstance(part, SubsetBackward)]
        modes = {part: part.training for part in parts}
        module.train(training)
        dtype = dtype or self.model.autocast
        autocast = nullcontext() if dtype in (None, torch.float32) else torch.autocast(self._device.type, dtype=dtype)
        try:
            with rng.undisturbed(self._device, self.loader.generators()), torch.no_grad(), autocast:
                yield
        finally:
            for part, was_training in modes.items():
                part.training = was_training

    def _signals_of(self, module: nn.Module, batch: Any, n: int, wanted: set[str]) -> dict[str, Tensor]:
        """Signals of one batch in a pass of the run's own."""
        assert self._adapter is not None
        outputs, targets = self._own_forward(module, batch)
        own = {} if self._user_signals is None else self._ask_user(outputs, targets, n)
        return {**self._adapter.signals(outputs, targets, RowLayout(n, None), wanted - own.keys()), **own}

    # Selection inside the batch

    def _switch_if_plain(self) -> None:
        """With forward_passes="auto", a model that turned out not to be traceable is scored by passes of its own."""
        stage = self._stage
        if stage is None or stage.passes != "once" or not self._may_switch or not _uses_plain_model(self._module):
            return
        stage.passes = "twice"
        self.loader.gather(fills=True)

    def _choose(self, batch: Any, ids: Tensor) -> BatchPlan:
        """The rows of a candidate batch that the loop gets to see."""
        assert self._stage is not None
        here = ids.to(self._device, non_blocking=True)
        if self._stage.is_inactive(self.progress):
            return self._stage.whole(len(ids), self._device)
        return self._stage.plan(here, {} if self._stage.passes == "none" else self._score(batch, here))

    def _score(self, batch: Any, ids: Tensor) -> dict[str, Tensor]:
        """Signals of a candidate batch before the loop sees it: recorded ones, or by a pass of the run's own."""
        scoring = self._scoring
        if self._known_losses is not None:
            return {"loss": self._known_losses.index_select(0, ids)}
        if self._epoch % scoring.every_epochs:
            self._ledger.flush()
            return {name: self._records[name].index_select(0, ids) for name in self._stage_signals()}
        self._check_forward(batch)
        module = self._module if scoring.model is None else scoring.model
        assert module is not None
        shrunk = batch
        if scoring.input_scale != 1:
            pair = isinstance(batch, tuple | list) and len(batch) == 2
            shrunk = (scoring.shrink(batch[0]), batch[1]) if pair else scoring.shrink(batch)
        with self._own_pass(module, dtype=scoring.dtype):
            found = self._signals_of(module, shrunk, len(ids), self._to_choose)
        self._records.write(ids, found)
        self._cost.scoring += len(ids)
        self._cost.forward += len(ids)
        return _without_ignored(found)

    def _stage_signals(self) -> tuple[str, ...]:
        assert self._stage is not None
        return self._stage.requires.signals

    def _chosen(self, credit: Attribution, found: Mapping[str, Tensor]) -> BatchPlan:
        """The method's answer for some rows; the same one for a second loss of the same rows in a step."""
        assert self._stage is not None
        for key, plan in self._picked:
            if key is not None and key == credit.key:
                return plan
        inactive = self._stage.is_inactive(self.progress)
        plan = self._stage.whole(len(credit.ids), self._device) if inactive else self._stage.plan(credit.ids, found)
        self._picked.append((credit.key, plan))
        return plan

    def _on_chosen_rows(self, outputs: Any, targets: Any, credit: Attribution, weights: Tensor | None, sources: Any) -> Tensor:
        """The criterion over the rows that the batch method chooses by the losses of all."""
        assert self._adapter is not None
        group = credit.group
        own = {} if self._user_signals is None else self._ask_user(outputs, targets, group.n)
        wanted = self._to_choose - own.keys()
        all_count = credit.all_count and self._adapter.ignores_negatives_of(targets)
        found = {**self._adapter.signals(outputs, targets, group, wanted, all_count=all_count), **own}
        plan = self._chosen(credit, found if all_count else _without_ignored(found))
        rows, weights = plan.rows, _product(plan, weights)
        k = len(rows)
        outputs, targets = (_take_rows(tree, plan, group) for tree in (outputs, targets))
        if not k:
            value = torch.stack([leaf.sum() for leaf in leaves(outputs) if leaf.is_floating_point()]).sum()
        elif weights is None:
            value = self._adapter.value(outputs, targets)
        else:
            value = self._adapter.measure(outputs, targets, RowLayout(k, group.repeat), weights=weights, wanted=set()).value
        self._ledger.credit(credit, found, sources, rows)
        if self._stopwatch.running:
            self._stopwatch.watch(value, self._share_of_backward(k, group.n))
        return value

    def _share_of_backward(self, k: int, n: int) -> float:
        """What part of a whole batch's backward pass will run."""
        once = self._stage is not None and self._stage.passes == "once" and not _uses_plain_model(self._module)
        return k / n if once else 1.0

    def _warn_if_in_vain(self, keep: float) -> None:
        """Say once that scoring costs more than it saves on this model, as measured; `keep`: of the last epoch's candidates."""
        stage, ratio = self._stage, self._stopwatch.ratio()
        scoring = self._scoring
        cheaper = scoring.losses is not None or scoring.model is not None or scoring.dtype or scoring.input_scale != 1
        if stage is None or stage.passes != "twice" or cheaper or self._said_in_vain or not ratio:
            return
        most = 1 - (1 - break_even(1.0, ratio)) / scoring.every_epochs
        if keep <= most:
            return
        self._said_in_vain = True
        warnings.warn(
            f"{type(stage.method).__name__} kept {keep:.2f} of the samples, but with two forward passes it saves time on this "
            f"model only below {most:.2f} (a backward pass takes {ratio:.2f} forward passes, measured). Keep less than "
            f"{most:.2f}, use forward_passes='once', or a cheaper scoring=Scoring(...). This is said once.",
            stacklevel=4,
        )

    # Parts of a call

    def _weights_of(self, credit: Attribution) -> Tensor | None:
        """Weights of some rows; None where all are 1."""
        batch = credit.batch
        if batch is not None and batch.weights is not None and credit.positions is not None:
            rows = credit.positions
            return batch.weights[rows.start : rows.stop : rows.step]
        weights = None if self._weights is None else self._weights.index_select(0, credit.ids)
        known = [recent for recent in reversed(self._recent) if recent.weights is not None]
        if self.loader.gatherer is None or not known:
            return weights
        # Weights of a batch method belong to rows, not to samples: the rows are found by the ids that the caller gave.
        same = credit.ids.unsqueeze(1) == torch.cat([recent.ids for recent in known])
        found = torch.cat([recent.weights for recent in known if recent.weights is not None])[same.int().argmax(1)]
        return torch.where(same.any(1), found, 1.0 if weights is None else weights)

    def _attribute(self, outputs: Any, targets: Any, ids: Tensor | None) -> Attribution:
        try:
            return attribute(self._witnesses, outputs, targets, ids, n=self.loader.n or 2**62, recent=self._recent)
        except AttributionError:
            self._ledger.withdraw(outputs)
            raise

    def _signals_beside(self, outputs: Any, targets: Any, n: int) -> dict[str, Tensor]:
        """Signals for losses that the loop computed itself."""
        own = {} if self._user_signals is None else self._ask_user(outputs, targets, n)
        once = self._stage is not None and self._stage.passes == "once"
        wanted = (self._to_choose if once else self._wanted) - own.keys()
        if not wanted:
            return own
        if outputs is None or targets is None or self._adapter is None:
            raise ValueError(
                f"run.reduce: {type(self.method).__name__} needs {', '.join(sorted(wanted))}: pass outputs= and targets=, "
                f"attach(signals=...){way_around(self.method, *sorted(wanted))}"
            )
        with torch.no_grad():
            return {**self._adapter.read(outputs, targets, wanted, n), **own}

    def _ask_user(self, outputs: Any, targets: Any, n: int) -> dict[str, Tensor]:
        assert self._user_signals is not None
        with torch.no_grad():
            found = dict(self._user_signals(outputs, targets))
        for name, tensor in found.items():
            if not isinstance(tensor, Tensor) or tensor.shape != (n,):
                got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise ValueError(f"`signals` must return tensors of shape ({n},), got {got} for {name!r}")
        return {name: tensor for name, tensor in found.items() if name in self._to_choose}

    def _own_forward(self, module: nn.Module, batch: Any) -> tuple[Any, Any]:
        if self._forward is not None:
            return self._forward(module, batch)
        if isinstance(batch, Tensor):
            return module(batch), batch
        return module(batch[0]), batch[1]

    def _check_forward(self, batch: Any) -> None:
        """Fail before training, not when the first epoch is over."""
        readable = isinstance(batch, Tensor) or (isinstance(batch, tuple | list) and len(batch) == 2)
        if self._batches == 0 and self._forward is None and self._runs_passes() and not readable:
            raise ValueError(
                f"`forward` is needed: {type(self.method).__name__} runs passes of its own, and a batch that is "
                f"{type(batch).__name__} does not tell inputs from targets. "
                "Pass attach(forward=lambda model, batch: (outputs, targets))."
            )

    def _runs_passes(self) -> bool:
        scores = self._stage is not None and self._stage.passes == "twice" and self._scoring.losses is None
        return scores or self._requires.model

    def _checked(self, plan: Any) -> EpochPlan:
        method = self._epoch_method
        name = type(method.method if isinstance(method, OnSubset) else method).__name__
        if not isinstance(plan, EpochPlan):
            raise TypeError(f"{name}.plan_epoch must return a thresher.EpochPlan, got {type(plan).__name__}")
        plan.check(self.loader.n)
        if plan.drawn and not self.loader.order_is_free:
            raise ValueError(
                f"{name} draws the order of training, but the loader's sampler has an order of its own: use shuffle=True"
            )
        if plan.lr_scale != 1 and self._hooks is None:
            raise ValueError(f"{name} scales the learning rate: pass attach(optimizer=...)")
        if plan.refresh is not None and (self._module is None or self._adapter is None):
            raise ValueError(f"{name} refreshes samples: pass attach(model=..., criterion=...)")
        return plan

    def _stepped(self) -> None:
        self._cost.steps += 1
        self._picked.clear()
        self._ledger.end_step()

    # Saving and leaving

    def state_dict(self) -> dict[str, Any]:
        """Everything the run remembers: tensors and plain values, so it loads with `weights_only=True`.

        Warns where batches were yielded whose loss was not credited yet: after resuming they will not come again.
        """
        if self._active and any(not b.credited for b in self._recent_after_flush()):
            warnings.warn(
                "state_dict: a batch was yielded whose loss was not credited yet (skipped, or a prefetcher holds it); "
                "a resumed run goes on after it",
                stacklevel=2,
            )
        plan = self._plan_if_any()
        self._close_books()
        waiting, weights = self.loader.waits()
        return {
            "version": STATE_VERSION,
            "method": self._name(),
            "settings": self._settings(),
            "n": self.loader.n,
            "kept": self._kept(),
            "epochs": self.epochs,
            "seed": self._seed,
            "epoch": self._epoch,
            "active": self._active,
            "consumed": self._consumed,
            "checksum": self._checksum,
            "plan": None if plan is None else {**vars(plan), "facts": dict(plan.facts), "remember": {}},
            "batch_stage": None if self._stage is None else self._stage.state_dict(),
            "passes": self._passes(),
            "waiting": {"ids": waiting, "weights": weights},
            "seen": self.loader.seen,
            "trained": self.trained.clone(),
            "records": self.records.state_dict(),
            "cost": asdict(self.cost),
            "history": [dict(entry) for entry in self._history],
            "epoch_start": self.loader.epoch_start,
            "rng": rng.capture(self._device, self.loader.generators()),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, restore_rng: bool = True) -> None:
        """Go on where a saved run stopped: at the next `iter(run.loader)`, after the last batch that was yielded.

        Args:
            state: From `state_dict` of a run of the same method over as many samples.
            restore_rng: Also put back the random states that the run and its loader draw from.

        Raises:
            ValueError: A state of another method, another N, or another version; nothing was changed.
        """
        self._check_state(state)
        self._ledger.end_step()
        self._ledger.settle()
        self.loader.stop()
        self._records.load_state_dict(state["records"])
        vars(self._cost).update(state["cost"])
        self._history = [dict(entry) for entry in state["history"]]
        self._plan = None if state["plan"] is None else EpochPlan(**state["plan"])
        self._ledger.count_trained().copy_(state["trained"])
        self._picked.clear()
        if self._stage is not None:
            self._load_stage(self._stage, state)
        self.loader.go_on((state["waiting"]["ids"].clone(), state["waiting"]["weights"]))
        self.loader.seen = state["seen"]
        self._epoch, self._active = state["epoch"], state["active"]
        self._consumed, self._checksum = state["consumed"], state["checksum"]
        self._resumed = self._active
        self._seed = state["seed"]
        self._recent = []
        self.loader.epoch_start = state["epoch_start"]
        if restore_rng:
            rng.restore(state["rng"], self._device, self.loader.generators())

    def _load_stage(self, stage: BatchStage, state: Mapping[str, Any]) -> None:
        stage.load_state_dict(state["batch_stage"])
        if self._may_switch and state["passes"] != stage.passes:
            stage.passes = state["passes"]
            self.loader.gatherer = None
            if stage.passes == "twice":
                self.loader.gather(fills=True)

    def _passes(self) -> str | None:
        """`forward_passes` as it turned out; what needs no losses takes it for whether batches are filled up."""
        if self._stage is None:
            return None
        filled = "twice" if self._fills else "once"
        return filled if self._stage.passes == "none" else self._stage.passes

    def _name(self) -> str:
        return "+".join(name_of(method) for method in self._methods)

    def _kept(self) -> Tensor | None:
        """What pruning left; None where there was none."""
        return self._epoch_method.kept if isinstance(self._epoch_method, OnSubset) else None

    def _settings(self) -> str:
        return " ".join(repr(method) for method in self._methods)

    def _check_state(self, state: Mapping[str, Any]) -> None:
        if state.get("version") != STATE_VERSION:
            raise ValueError(f"load_state_dict: a state of version {state.get('version')}, this is version {STATE_VERSION}")
        own = self._name()
        if state["method"] != own:
            raise ValueError(f"load_state_dict: the state is of method {state['method']!r}, this run has {own!r}")
        if state["n"] != self.loader.n:
            raise ValueError(f"load_state_dict: the state is of {state['n']} samples, this run has {self.loader.n}")
        kept, given = self._kept(), state["kept"]
        if kept is not None and not torch.equal(kept, given):
            raise ValueError(
                f"load_state_dict: the state keeps {len(given)} samples, this run {len(kept)} others: the scores that pruning "
                "goes by have changed; use the file or the scores of the interrupted run"
            )
        columns = set(state["records"])
        if columns != set(self._records):
            raise ValueError(f"load_state_dict: the state has columns {sorted(columns)}, this run {sorted(self._records)}")
        if state["passes"] != self._passes() and not self._may_switch:
            raise ValueError(
                f"load_state_dict: the state is of forward_passes={state['passes']!r}, this run has {self._passes()!r}"
            )
        if state["settings"] != self._settings():
            warnings.warn(
                f"load_state_dict: the state was saved with {state['settings']}, this run has {self._settings()}", stacklevel=3
            )

    def _recent_after_flush(self) -> list[YieldedBatch]:
        self._ledger.flush()
        return self._recent[-1:]

    def detach(self) -> None:
        """Take the hooks off the optimizer and let go of the data; the user's objects are as they were."""
        self._ledger.settle()
        if self._hooks is not None:
            self._hooks.remove()
        self.loader.close()

    def __repr__(self) -> str:
        return f"Run({self.method!r}, epoch {self._epoch} of {self.epochs}, {self.loader.n} samples)"


def _with_subset_backward(model: nn.Module | None) -> nn.Module | None:
    """The model with a backward pass that costs only the chosen rows; one that has it already is left as it is."""
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper would compile the backward pass of all rows
    if model is None or any(isinstance(part, SubsetBackward) for part in model.modules()):
        return model
    return subset_backward(model)


def _uses_plain_model(model: nn.Module | None) -> bool:
    """Whether the model turned out not to be traceable."""
    found = () if model is None else (part for part in model.modules() if isinstance(part, SubsetBackward))
    return any(part.fallback is not None for part in found)


def _take_rows(tree: Any, plan: BatchPlan, group: RowLayout) -> Any:
    """The rows of some samples in every tensor that has all of them, and their items in every list of samples."""

    def take(part: Any) -> Any:
        if not isinstance(part, Tensor):
            return taken([part], plan.rows)[0] if is_per_sample(part, group.n) else part
        per = len(part) // group.n if part.dim() else 0
        if not per or len(part) != group.n * per or per not in (1, group.repeat or per):
            return part
        return kept_rows(part, plan.rows.to(part.device, non_blocking=True), group.n, drawn=plan.drawn)

    return map_where(take, tree, lambda part: isinstance(part, Tensor) or is_per_sample(part, group.n))


def _without_ignored(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Signals to choose by: a sample all of whose labels are ignored has nothing to teach, rather than no loss yet."""
    return {**found, "loss": torch.where(found["loss"] == NEVER_SEEN, 0.0, found["loss"])}


def _product(plan: BatchPlan, weights: Tensor | None) -> Tensor | None:
    """Weights of the chosen rows, from the epoch's plan and the batch's."""
    if weights is None:
        return plan.weights
    weights = weights.index_select(0, plan.rows)
    return weights if plan.weights is None else weights * plan.weights


def _is_default(method: Any) -> bool:
    return isinstance(method, FullData)


def _none_ignored(batch: Any) -> bool:
    """Whether it can be told without waiting that no label of a batch is negative, as an ignored index is."""
    labels = [leaf for leaf in leaves(batch) if leaf.dim() == 1 and leaf.numel() and not leaf.is_floating_point()]
    return all(leaf.is_cpu and int(leaf.min()) >= 0 for leaf in labels)


COUNTED = ("forward", "backward", "refresh", "scoring", "steps", "full_forward", "full_backward")
