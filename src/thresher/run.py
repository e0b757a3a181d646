"""attach() and Run: a method in one training loop. The only place that knows all the others."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from thresher import rng
from thresher.attribution import AttributionError, Batch, Credit, Group, Witnesses, attribute
from thresher.checks import check_needs, check_settings, device_of, innermost, single
from thresher.cost import Cost, Stopwatch
from thresher.criteria import Criterion, Unread, adapt
from thresher.feed import Feed, check_loader
from thresher.learning_rate import StepHooks
from thresher.ledger import Ledger
from thresher.methods import EpochMethod, name_of
from thresher.plans import EpochPlan
from thresher.probe import mixes_samples
from thresher.records import Records
from thresher.trees import leaves
from thresher.watched import WatchedModel

Forward = Callable[[nn.Module, Any], tuple[Any, Any]]
Signals = Callable[[Any, Any], Mapping[str, Tensor]]

STATE_VERSION = 1
BATCHES_AHEAD = 2
"""Batches whose tensors are held for comparing values: the one in use and one that a prefetcher asked for."""


def attach(
    method: EpochMethod | Sequence[EpochMethod],
    *,
    loader: DataLoader[Any],
    criterion: Any,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    epochs: int,
    forward: Forward | None = None,
    forward_passes: Literal["auto", "once", "twice"] = "auto",
    scoring: None = None,
    signals: Signals | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    on_nonfinite: Literal["keep", "raise"] = "keep",
    process_group: None = None,
) -> "Run":
    """Attach a method to a training loop, which then iterates `run.loader` and calls `run.model` and `run.criterion`.

    Everything is checked before anything is changed.

    Args:
        method: What decides, such as `Kakurenbo()`; a list of at most one method a stage.
        loader: The training DataLoader, over a map-style dataset. Its settings and the order of its sampler are kept.
        criterion: A loss of torch.nn, or a callable `(outputs, targets) -> per-sample losses`; None where the loop uses
            `run.reduce` alone.
        model: The model. Needed where the method runs passes of its own; its outputs are the second witness of whom a
            loss belongs to. May be compiled.
        optimizer: Needed where the method scales the learning rate; its steps are counted.
        epochs: Epochs of the whole training, 1 or more; schedules of methods refer to it.
        forward: `(model, batch) -> (outputs, targets)` for the run's own passes. Default: `(model(batch[0]), batch[1])`.
        forward_passes: For methods that select in the batch, which this version does not have yet.
        scoring: For methods that select in the batch.
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
    chosen = single(method)
    check_loader(loader)
    check_settings(epochs, forward_passes, scoring, on_nonfinite, process_group, seed)
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module, got {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(f"`optimizer` must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    for name, function in (("forward", forward), ("signals", signals)):
        if function is not None and not callable(function):
            raise TypeError(f"`{name}` must be callable, got {type(function).__name__}")
    adapter = None if criterion is None else adapt(criterion)
    check_needs(chosen, adapter, model, optimizer, signals)
    return Run(
        chosen,
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
        method: EpochMethod,
        *,
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
        self.method = method
        self.epochs = epochs
        self._adapter, self._user_signals = adapter, signals
        self._forward, self._seed, self._on_nonfinite = forward, seed, on_nonfinite
        self._device = device or torch.device("cpu")
        self._module = model
        self._witnesses = Witnesses()
        self._stopwatch = Stopwatch(self._device)
        self._model = None if model is None else WatchedModel(model, self._witnesses, self._stopwatch, self._device)
        self.loader = Feed(
            loader, begin=self._begin, yielded=self._take, finish=self._finish, upcoming=lambda: self.plan, device=device
        )
        self._records = Records(method.columns(), self.loader.n, self._device)
        self._wanted = self._records.signals - {"loss"}
        self._cost = Cost()
        self._ledger = Ledger(self._records, self._cost, count_steps=optimizer is None)
        self._rows_unknown = mixes_samples(loader, self.loader.generators())
        self._hooks = None if optimizer is None else StepHooks(optimizer, self._stepped)
        self._history: list[dict[str, Any]] = []
        self._recent: list[Batch] = []
        self._plan: EpochPlan | None = None
        self._weights: Tensor | None = None
        self._epoch, self._active, self._resumed = 0, False, False
        self._batches, self._consumed, self._checksum = 0, 0, 0
        self._warned = False

    # What the loop calls

    @property
    def model(self) -> WatchedModel:
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
        weights = over_n = None
        if self._weights is not None:
            batch = credit.batch
            if certain and batch is not None:
                weights, over_n = batch.weights, batch.weights_over_n
            else:
                weights = self._weights.index_select(0, credit.ids)
        wanted, own = self._wanted, None
        if self._user_signals is not None:
            own = self._ask_user(outputs, targets, credit.group.n)
            wanted = wanted - own.keys()
        value, found = self._adapter.in_step(outputs, targets, credit, weights=weights, weights_over_n=over_n, wanted=wanted)
        if own is not None:
            found = (found.now() if isinstance(found, Unread) else found) | own
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
        weights = None if self._weights is None else self._weights.index_select(0, credit.ids)
        value = per_sample_losses.mean() if weights is None else (rows.mean(1) * weights.to(rows.dtype)).mean()
        self._ledger.credit(credit, found, (per_sample_losses, outputs))
        if self._stopwatch.running:
            self._stopwatch.watch(value)
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
        candidates = max(1, self.loader.candidates)  # none where a dataset is smaller than a batch and the last is dropped
        consumed = min(self._consumed, candidates) if self._active else 0
        return min(1.0, (self._epoch * candidates + consumed) / (self.epochs * candidates))

    @property
    def plan(self) -> EpochPlan:
        """The plan of the epoch in progress or, between epochs, of the one that comes next."""
        if self._plan is None:
            self._settle()
            generator = rng.seeded(self._seed, self._epoch)
            self._plan = self._checked(
                self.method.plan_epoch(self._records, epoch=self._epoch, epochs=self.epochs, generator=generator)
            )
        return self._plan

    @property
    def records(self) -> Records:
        """What is remembered of every sample, up to the last call of the criterion."""
        self._ledger.flush()
        return self._records

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

    # An epoch

    def _begin(self) -> tuple[EpochPlan, int, int]:
        if self._active and self._consumed and not self._resumed:
            self._end_epoch(complete=False)
        plan, resumed = self.plan, self._resumed
        self._resumed = False
        if not resumed:
            self._close_books()
            self._records.start_epoch()
            self._consumed, self._checksum = 0, 0
        self._ledger.ids_repeat = plan.drawn or not self.loader.yields_once
        self._active = True
        self._weights = None
        if plan.weights is not None:
            table = torch.ones(self.loader.n).index_copy_(0, plan.ids, plan.weights)
            self._weights = table.to(self._device)
        if self._hooks is not None:
            self._hooks.scale = plan.lr_scale
        return plan, self._consumed, self._checksum

    def _take(self, batch: Any, ids: Tensor, consumed: int, checksum: int) -> None:
        """A batch is on its way to the loop."""
        self._check_forward(batch)
        held = self._recent[1 - BATCHES_AHEAD :]
        self._ledger.next_batch(set(held))
        for old in self._recent:
            if old.credited or old not in held:
                old.forget()
        ids = ids.to(self._device, non_blocking=True)
        record = Batch(ids, self._batches, unknown=self._rows_unknown, all_count=_none_ignored(batch))
        if self._weights is not None:
            record.weights = self._weights.index_select(0, ids)
            record.weights_over_n = record.weights / len(ids)
        self._recent = [*held, record]
        self._witnesses.remember_batch(record, leaves(batch))
        self._batches += 1
        self._cost.full_forward += consumed - self._consumed
        self._cost.full_backward += consumed - self._consumed
        self._consumed, self._checksum = consumed, checksum

    def _finish(self) -> None:
        """The epoch is exhausted: refresh, and look at what the device has to say."""
        plan = self.plan
        rest = max(0, self.loader.candidates - self._consumed)
        self._cost.full_forward += rest
        self._cost.full_backward += rest
        self._ledger.flush()
        if plan.refresh is not None and plan.refresh.numel():
            self._refresh(plan.refresh)
        self._end_epoch(complete=True)
        self._settle()

    def _end_epoch(self, *, complete: bool) -> None:
        assert self._plan is not None
        plan = self._plan
        self._history.append(
            {
                "epoch": self._epoch,
                "complete": complete,
                "kept": len(plan.ids),
                "refreshed": 0 if plan.refresh is None or not complete else len(plan.refresh),
                "lr_scale": plan.lr_scale,
                **plan.facts,
            }
        )
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
        module, watched = self._module, self.model
        modes = {part: part.training for part in module.modules()}
        module.train(getattr(self.method, "refresh", "eval") == "train")
        autocast = nullcontext() if watched.autocast is None else torch.autocast(self._device.type, dtype=watched.autocast)
        try:
            with rng.undisturbed(self._device, self.loader.generators()), torch.no_grad(), autocast:
                for batch, batch_ids in self.loader.passes(ids):
                    outputs, targets = self._own_forward(module, batch)
                    n = len(batch_ids)
                    own = {} if self._user_signals is None else self._ask_user(outputs, targets, n)
                    found = self._adapter.signals(outputs, targets, Group(n, None), self._wanted - own.keys())
                    self._records.write(batch_ids.to(self._device), {**found, **own})
                    self._cost.refresh += n
                    self._cost.forward += n
        finally:
            for part, training in modes.items():
                part.training = training

    # Parts of a call

    def _attribute(self, outputs: Any, targets: Any, ids: Tensor | None) -> Credit:
        try:
            return attribute(self._witnesses, outputs, targets, ids, n=self.loader.n, recent=self._recent)
        except AttributionError:
            self._ledger.withdraw(outputs)
            raise

    def _signals_beside(self, outputs: Any, targets: Any, n: int) -> dict[str, Tensor]:
        """Signals for losses that the loop computed itself."""
        own = {} if self._user_signals is None else self._ask_user(outputs, targets, n)
        wanted = self._wanted - own.keys()
        if not wanted:
            return own
        if outputs is None or targets is None or self._adapter is None:
            raise ValueError(
                f"run.reduce: {type(self.method).__name__} needs {', '.join(sorted(wanted))}: pass outputs= and targets=, "
                "attach(signals=...), or use a setting that does not need them (Kakurenbo: move_back=False)"
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
        return {name: tensor for name, tensor in found.items() if name in self._wanted}

    def _own_forward(self, module: nn.Module, batch: Any) -> tuple[Any, Any]:
        if self._forward is not None:
            return self._forward(module, batch)
        if isinstance(batch, Tensor):
            return module(batch), batch
        return module(batch[0]), batch[1]

    def _check_forward(self, batch: Any) -> None:
        """Fail before training, not when the first epoch is over."""
        readable = isinstance(batch, Tensor) or (isinstance(batch, tuple | list) and len(batch) == 2)
        if self._batches == 0 and self._forward is None and getattr(self.method, "refreshes", False) and not readable:
            raise ValueError(
                f"`forward` is needed: {type(self.method).__name__} runs passes of its own, and a batch that is "
                f"{type(batch).__name__} does not tell inputs from targets. "
                "Pass attach(forward=lambda model, batch: (outputs, targets))."
            )

    def _checked(self, plan: Any) -> EpochPlan:
        name = type(self.method).__name__
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
        plan = self.plan
        self._close_books()
        return {
            "version": STATE_VERSION,
            "method": name_of(self.method),
            "settings": repr(self.method),
            "n": self.loader.n,
            "epochs": self.epochs,
            "seed": self._seed,
            "epoch": self._epoch,
            "active": self._active,
            "consumed": self._consumed,
            "checksum": self._checksum,
            "plan": {**vars(plan), "facts": dict(plan.facts)},
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
        self.loader.stop()
        self._records.load_state_dict(state["records"])
        vars(self._cost).update(state["cost"])
        self._history = [dict(entry) for entry in state["history"]]
        self._plan = EpochPlan(**state["plan"])
        self._epoch, self._active = state["epoch"], state["active"]
        self._consumed, self._checksum = state["consumed"], state["checksum"]
        self._resumed = self._active
        self._seed = state["seed"]
        self._recent = []
        self.loader.epoch_start = state["epoch_start"]
        if restore_rng:
            rng.restore(state["rng"], self._device, self.loader.generators())

    def _check_state(self, state: Mapping[str, Any]) -> None:
        if state.get("version") != STATE_VERSION:
            raise ValueError(f"load_state_dict: a state of version {state.get('version')}, this is version {STATE_VERSION}")
        own = name_of(self.method)
        if state["method"] != own:
            raise ValueError(f"load_state_dict: the state is of method {state['method']!r}, this run has {own!r}")
        if state["n"] != self.loader.n:
            raise ValueError(f"load_state_dict: the state is of {state['n']} samples, this run has {self.loader.n}")
        columns = set(state["records"])
        if columns != set(self._records):
            raise ValueError(f"load_state_dict: the state has columns {sorted(columns)}, this run {sorted(self._records)}")
        if state["settings"] != repr(self.method):
            warnings.warn(
                f"load_state_dict: the state was saved with {state['settings']}, this run has {self.method!r}", stacklevel=3
            )

    def _recent_after_flush(self) -> list[Batch]:
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


def _none_ignored(batch: Any) -> bool:
    """Whether it can be told without waiting that no label of a batch is negative, as an ignored index is."""
    labels = [leaf for leaf in leaves(batch) if leaf.dim() == 1 and leaf.numel() and not leaf.is_floating_point()]
    return all(leaf.is_cpu and int(leaf.min()) >= 0 for leaf in labels)


COUNTED = ("forward", "backward", "refresh", "scoring", "steps", "full_forward", "full_backward")
