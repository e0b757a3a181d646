"""The epochs of a run: when one begins and ends, the plan it follows, progress, history, and what it cost."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from time import perf_counter
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from thresher import rng
from thresher.attribution.rows import AttributionError
from thresher.loading.held_plan import HeldPlan, equal_part
from thresher.loading.order import OrderPlace, PieceOrder, TensorOrder, check_begins
from thresher.methods._adapted import OnSubset
from thresher.methods.contract import EpochMethod, calls_model, defines, requirements_of
from thresher.passes.consistency import Comparison
from thresher.plans import BatchPlan, EpochPlan
from thresher.run.batch_selection import BatchSelection, BeforeForward
from thresher.run.checks import NO_FURTHER_PLAN, check_attached_late_enough, has_group, release
from thresher.run.clock import RunClock
from thresher.run.epoch_end import EpochEnd, Pass, SilentEpochs, plans_by_losses
from thresher.run.optimizer_steps import StepChecks, StepHooks, parameters_elsewhere
from thresher.run.parts import Parts
from thresher.timing import ATTRIBUTION, OUTSIDE, PLANNING, REFRESH, SCORING_PASS, STEPS
from thresher.warning import warn


class Planner:
    """Makes the plans of a run.

    Args:
        parts: Parts of the run.
        method: The epoch method, on the samples that pruning left where there was pruning.
        fills: Function that returns whether a batch method fills the rows that it chooses up to full batches.
    """

    def __init__(self, parts: Parts, method: EpochMethod | OnSubset, *, fills: Callable[[], bool | None]) -> None:
        self._config, self._method, self._fills = parts.config, method, fills
        self._loader, self._records, self._passes = parts.loader, parts.records, parts.passes
        self._warned_of: set[str] = set()

    def plan(self, epoch: int, seed: int) -> HeldPlan:
        """Returns the plan of an epoch.

        Args:
            epoch: Number of the epoch.
            seed: Random seed of the run.

        Raises:
            TypeError: The method returned no plan.
            ValueError: The plan does not fit the training.
        """
        known = self._known(epoch)
        held = HeldPlan(**self._config.world.from_first(lambda: self._planned(known, epoch, seed).state_dict()))
        if held.note and held.note not in self._warned_of:
            self._warned_of.add(held.note)
            warn(held.note)
        return held

    def _planned(self, known: Mapping[str, Tensor], epoch: int, seed: int) -> HeldPlan:
        """Returns the plan that the process with the records makes."""
        generator, n = rng.seeded(seed, epoch), self._records.n
        plan = self._method.plan_epoch(known, epoch=epoch, epochs=self._config.epochs, generator=generator)
        plan = self._checked(plan)
        if self._config.strata is not None:
            layout = lambda one: self._loader.rows_of_steps(HeldPlan.of(one, n))  # noqa: E731
            plan = self._config.strata.in_order(plan, self._records, layout, self._config.world.size, generator)
        self._records.remember(plan.remember)
        return HeldPlan.of(plan, n)

    def _known(self, epoch: int) -> Mapping[str, Tensor]:
        """What a plan is made of: the records and, where the method asks for one, the results of a full pass."""
        method, world = self._method, self._config.world
        names = method.full_pass(epoch, self._config.epochs) if defines(method, "full_pass") else ()  # pyright: ignore
        if not names:
            return self._records
        ids = method.kept if isinstance(method, OnSubset) else torch.arange(self._loader.n)
        part = ids[slice(*equal_part(len(ids), world.rank, world.size))]
        found = self._passes.full_pass(TensorOrder(lambda: part), names)
        if world.size > 1:
            parts = [*world.to_first([{name: values.cpu() for name, values in found.items()}])][::-1]
            found = {name: torch.cat([one[name] for one in parts]).to(found[name].device) for name in found if parts}
        return {**self._records, **found}

    def _checked(self, plan: Any) -> EpochPlan:
        name = title_of(self._method)
        if not isinstance(plan, EpochPlan):
            raise TypeError(f"{name}.plan_epoch must return a thresher.EpochPlan, got {type(plan).__name__}")
        plan.check(self._records.n)
        plan = as_spent(plan, self._config.spend)
        if plan.smaller_batches and self._fills():
            raise ValueError(
                f"{name} makes smaller batches, which the batch method would fill up with forward_passes='twice': use "
                "forward_passes='once', or one of the two methods"
            )
        if plan.drawn and self._config.strata is not None:
            raise ValueError(
                f"{name} draws the order of training, which stratified batches would change: declare Requirements(order='plan')"
            )
        if plan.drawn and not self._loader.order_is_free:
            raise ValueError(
                f"{name} draws the order of training, but the loader's sampler has an order of its own: use shuffle=True"
            )
        if plan.lr_scale != 1 and self._config.optimizer is None:
            raise ValueError(f"{name} scales the learning rate: pass attach(optimizer=...)")
        if plan.refresh is not None and not self._passes.possible:
            raise ValueError(f"{name} refreshes samples: pass attach(model=..., criterion=...)")
        return plan


def as_spent(plan: EpochPlan, spend: Literal["steps", "batches"] | None) -> EpochPlan:
    """Returns a plan that spends its samples as `attach(spend=)` says.

    With as many steps as in full training there is nothing to make up for: the learning rate is not scaled, and weights have a
    mean of 1.

    Args:
        plan: Plan of the method.
        spend: "steps", "batches", or None for the plan as it is.
    """
    if spend == "steps":
        return replace(plan, smaller_batches=False)
    if spend != "batches" or plan.smaller_batches:
        return plan
    weights = None if plan.weights is None else plan.weights / plan.weights.mean(dtype=torch.float64).item()
    return replace(plan, smaller_batches=True, weights=weights, lr_scale=1.0)


def title_of(method: Any) -> str:
    """Returns the name of a method, for messages."""
    return type(method.method if isinstance(method, OnSubset) else method).__name__


LOOKED_AT = 2**20
"""Number of losses that are looked at together."""

NAMED = 5
"""Largest number of samples that are named."""


def not_finite(losses: Tensor) -> tuple[int, NDArray[np.int64]]:
    """Returns how many losses are NaN or +inf, and the first places where they are; it waits for the device once, or twice.

    Args:
        losses: Last loss of each sample, shape (N,), on any device; -inf stands for a sample that was never seen.

    Example:
        >>> not_finite(torch.tensor([0.5, float("nan"), float("-inf"), float("inf")]))
        (2, array([1, 3]))
    """
    pieces = losses.split(LOOKED_AT)
    counts = torch.stack([len(piece) - (piece < torch.inf).sum() for piece in pieces]).tolist()
    first = [np.empty(0, dtype=np.int64)]
    for number, piece in enumerate(pieces):
        if counts[number] and sum(map(len, first)) < NAMED:
            first.append((piece < torch.inf).logical_not_().nonzero().flatten()[:NAMED].cpu().numpy() + number * LOOKED_AT)
    return sum(counts), np.concatenate(first)[:NAMED]


def mean_loss(losses: Tensor) -> float | None:
    """Returns the mean of the finite losses, with four digits; None if there is none.

    Args:
        losses: Last loss of each sample, shape (N,), on any device; -inf stands for a sample that was never seen.

    Example:
        >>> mean_loss(torch.tensor([0.5, float("nan"), float("-inf"), 1.5]))
        1.0
    """
    found = torch.zeros(2, dtype=torch.float64, device=losses.device)
    for piece in losses.split(LOOKED_AT):
        finite = piece.isfinite()
        found += torch.stack([torch.where(finite, piece, 0).sum(dtype=torch.float64), finite.sum(dtype=torch.float64)])
    total, count = found.tolist()
    # Rounded: the last bits of the losses depend on the number of processes that computed them.
    return float(f"{total / count:.4g}") if count else None


COUNTED = ("forward", "backward", "refresh", "scoring", "steps", "full_forward", "full_backward")
"""Fields of `Cost` that the history gives by epoch."""


class Epochs:
    """Begins and ends the epochs of a run; the loader asks it and reports to it (`loading.loader.EpochControl`).

    Args:
        parts: Parts of the run.
        method: The epoch method, on the samples that pruning left where there was pruning.
        selection: How the rows of batches are chosen.
    """

    def __init__(self, parts: Parts, method: EpochMethod | OnSubset, selection: BatchSelection) -> None:
        self.config, self._method, self._loader = parts.config, method, parts.loader
        self.selection, self._selection_attached = selection, selection
        self._attributor, self._accumulator, self._passes = parts.attributor, parts.accumulator, parts.passes
        self._records, self._cost, self.timing = parts.records, parts.cost, parts.timing
        self._traced_s = self._selection_attached.tracing_s
        self.comparison = Comparison(self._passes, self._accumulator)
        """Compares the losses of own passes with those of the loop."""
        by_losses, who = plans_by_losses(method), method if selection.stage is None else selection.stage.method
        needs_losses = lambda: by_losses or self.selection.by_loop  # noqa: E731
        self._silence = SilentEpochs(self._attributor, title_of(who), needs_losses)
        self._planner = Planner(parts, method, fills=lambda: self.selection.fills)
        self.hooks: StepHooks | None = None
        """Scales the learning rate and counts steps; None without an optimizer, and before `follow`."""
        self.step_checks: StepChecks | None = None
        """Compares the steps with what the run takes them for; None where there are no hooks."""
        self._world = self.config.world
        self._single_process, self._had_group = self._world.size == 1, has_group()
        self.clock = RunClock(self._loader, self._attributor, self.config.epochs)
        """How far the training is."""
        self.epoch = 0
        self._seed = self.config.seed
        self._active = self._resumed = self._warned = False
        self._ran_out = True
        self._place, self._consumed = OrderPlace(), 0
        self._plan: HeldPlan | None = None
        self._history: list[dict[str, Any]] = []
        self._booked = dict.fromkeys(COUNTED, 0)
        self._warned_of_length = self._warned_of_evaluation = self._saved_left = False
        self._at_begin = False, OrderPlace()
        self.end = EpochEnd(parts, self._end_epoch, single_process=self._single_process)

    def follow(self, optimizer: Optimizer, model: nn.Module | None) -> None:
        """Follows the steps of the optimizer from now on: the last thing of `attach`, after which nothing is refused.

        Args:
            optimizer: The user's optimizer.
            model: The user's model; None where there is none.
        """
        self.hooks = hooks = StepHooks(optimizer, self.step_over, self.trains, self.timing, self._accumulator.gradients_zeroed)
        self.step_checks = StepChecks(hooks, type(optimizer).__name__, parameters_elsewhere(model, hooks))

    # What the loader asks and reports

    def begin(self) -> tuple[HeldPlan | None, OrderPlace]:
        """Begins an epoch, or goes on with an interrupted one."""
        check_attached_late_enough(self._had_group)
        if self._resumed and self._place.consumed and self._loader.streams:
            check_begins(self._loader.dataset)
        # The last batch of the pass before may still have to be compared.
        self.comparison.compare()
        # A pass that ended without its end being seen (the loop kept its iterator, or left by break) ends here.
        if self._active and not self._resumed:
            left = self.epoch
            if not self.end.finish(leaves=True):
                self._silence.begin_again(steps_are_seen=self.hooks is not None)
                self._take_back()
            elif self._saved_left:
                warn(
                    f"The state that was saved after the loop had left epoch {left} by break goes on within epoch {left} when "
                    f"it is loaded, but this run begins epoch {left + 1}. For both to do the same, end epochs early with a "
                    "sampler of fewer samples instead of break."
                )
        self._saved_left = False
        resumed = self._resumed
        # The share of candidates that a yielded row stands for is that of the plan, so that a pass is counted by itself.
        self._accumulator.meter.begin_pass()
        self._at_begin = resumed, self._place if resumed else OrderPlace()
        if not resumed:
            # Judged before the plan is made: a method that chooses by losses must not plan a third epoch without any.
            self._silence.begin()
        plan = self.plan_if_any()
        self._resumed = False
        if not resumed:
            # The last step of an epoch may come after its pass, so that its books close when the next one begins.
            self.close_books()
            self._records.start_epoch()
            self._place, self._consumed = OrderPlace(), 0
            self._switch(self.selection.at_epoch_start(can_score=self.comparison.can_choose))
        self.comparison.begin_epoch(_use_of_own_losses(self.selection, self._method, plan), trial=self.selection.gives_up)
        if self.epoch >= self.config.epochs and not self._warned_of_length and torch.is_grad_enabled():
            self._warned_of_length = True
            warn(
                f"Epoch {self.epoch + 1} begins, but attach was given epochs={self.config.epochs}, to which the schedules of "
                "methods refer. Pass the number of all epochs to attach. This is said once."
            )
        self._records.epoch = self.epoch
        self._active, self._ran_out = True, False
        self.end.begin()
        self._attributor.begin_epoch(ids_repeat=self._ids_repeat(plan))
        self.clock.begin_pass(self._loader.scale_of(plan))
        # The scale is set anew in each epoch and holds for steps on losses of the run: between epochs there is nothing to put
        # back.
        if self.hooks is not None:
            self.hooks.scale = 1.0 if plan is None else plan.lr_scale
        if self.step_checks is not None:
            self.step_checks.begin_epoch(self._attributor.batches, resumed=resumed)
        return plan, self._place

    def _ids_repeat(self, plan: HeldPlan | None) -> bool:
        """Whether a sample can come twice in an epoch, which a plan that is only dealt into stratified batches does not do."""
        if plan is None or not plan.drawn:
            return plan is None or not self._loader.yields_once
        return self.config.strata is None or self._world.size > 1

    def choose(self, batch: Any, ids: Tensor) -> BatchPlan:
        """Returns the rows of a candidate batch that the loop sees."""
        loading = self.timing.switch(SCORING_PASS)
        assert isinstance(self.selection, BeforeForward)
        plan = self.selection.choose(batch, ids, self.epoch)
        self.timing.switch(loading)
        return plan

    def count(self, n: int) -> int | None:
        """Returns how many rows of a batch of n are kept; None where that is not known before the losses are."""
        stage = self.selection.stage
        return n if stage is None else stage.method.count(n)

    def on_batch(self, batch: Any, ids: Tensor, place: OrderPlace, weights: Tensor | None, *, last: bool) -> None:
        """Notes a batch that is on its way to the loop.

        Args:
            batch: The batch, on the device.
            ids: Ids of its rows, shape (n,), int64, on the host.
            place: Where the epoch's order goes on after it.
            weights: Weights of the rows, of the plan and of a batch method, shape (n,); None where all are 1.
            last: Whether it is the last batch of the epoch.
        """
        begin = perf_counter()
        self.end.on_batch(last=last)
        # After that call, which asks whether the batch before was credited, and before this batch gets its number.
        number = self._attributor.batches
        consumed = self.clock.on_batch(number, self.epoch, place, last=last)
        # A comparison of the batch before is read now: by then the device has computed its losses.
        if self.comparison.pending:
            self.comparison.compare()
            self.comparison.yielded(number, batch)
        self.selection.batch_yielded(number)
        # A batch that own passes cannot read is refused before the first step, not when the first epoch has been trained.
        if number == 0 or self._loader.unknown_rows.reason is not None:
            self._passes.check(batch)
        self._attributor.yielded(batch, ids, weights)
        before, self._place, self._consumed = self._consumed, place, consumed
        self._cost.full_forward += self._consumed - before
        self._cost.full_backward += self._consumed - before
        self.timing.attribution_s += perf_counter() - begin
        self.timing.switch(STEPS)

    def on_loop_exit(self, *, exhausted: bool) -> None:
        """Notes that the loop has left the pass: all batches were asked for, or its iterator is gone."""
        self.timing.switch(ATTRIBUTION)  # of the losses that were not written yet
        if exhausted:
            self.comparison.compare()
            self._ran_out = True
            self.clock.end_epoch(self.epoch)
        self.end.on_loop_exit(exhausted=exhausted)
        self.timing.switch(OUTSIDE)
        # After the last epoch no other pass may come that could show that nothing was trained in this one.
        looks = exhausted and self.epoch >= self.config.epochs and not self.end.trained
        if self._active and (looks or self.end.evaluates):
            self._silence.end(complete=False)
            self._take_back()

    def _take_back(self) -> None:
        """Takes back a pass in which nothing was trained: the same epoch begins with the next one."""
        plan, stage, exhausted = self._plan, self.selection.stage, self.end.state is Pass.OVER
        self.end.forget()
        self.clock.take_back_pass()
        self._resumed, place = self._at_begin
        scale = self._loader.scale_of(plan)
        back, self._consumed = self._consumed, scale.samples_at(place, scale.at(place))
        self._cost.full_forward -= back - self._consumed
        self._cost.full_backward -= back - self._consumed
        self._active, self._place = self._resumed, place
        self.timing.drop()
        if stage is not None:
            stage.facts()
        selects = self.selection.fills is not None or (plan is not None and not plan.everything)
        if exhausted and selects and not self._warned_of_evaluation:
            self._warned_of_evaluation = True
            who = title_of(self._method if stage is None else stage.method)
            warn(
                "A pass over run.loader without training, as for an evaluation or for torch.optim.swa_utils.update_bn, had "
                f"only the samples that {who} keeps for training, so that its results are not those of all samples. The pass "
                "does not count as an epoch. Evaluate on a DataLoader of your own. If the loop trains, call run.model and "
                "run.criterion; with forward passes only, call run.criterion under torch.enable_grad() once per batch. This "
                "warning is given once."
            )

    # What the run reports

    @property
    def held(self) -> HeldPlan:
        """The plan of the epoch in progress or, between epochs, of the one that comes next; made when first asked for.

        Raises:
            RuntimeError: Several processes train, and the training is over.
            ValueError: The loader streams: there is nothing to plan.
        """
        if self._loader.streams:
            raise ValueError("run.plan: an IterableDataset has no epoch plan; rows are chosen in every batch")
        if self._plan is None and not self._single_process:
            raise RuntimeError(NO_FURTHER_PLAN.format(self.epoch + 1, self.config.epochs))
        plan = self.plan_if_any()
        assert plan is not None
        return plan

    def plan_ahead(self) -> None:
        """Makes the plan of the next epoch, where processes must make it together: no other event is common to all of them."""
        if not self._single_process and self.epoch < self.config.epochs:
            self.plan_if_any()

    def plan_if_any(self) -> HeldPlan | None:
        """Returns the plan, which all processes ask for together; None for a stream, which has none."""
        self.end.read()
        if self._plan is None and not self._loader.streams:
            self._settle()
            before = self.timing.switch(PLANNING)
            self._plan = self._planner.plan(self.epoch, self._seed)
            self.timing.switch(before)
            if not self._active:  # the length of the next epoch depends on it, which frameworks ask for before it begins
                self._switch(self.selection.at_epoch_start(can_score=self.comparison.can_choose))
        return self._plan

    @property
    def history(self) -> list[dict[str, Any]]:
        """One entry per epoch that is over."""
        self.end.read()
        self.close_books()
        return self._history

    def close_books(self) -> None:
        """Adds what the last epoch computed to its entry; its last step may have come after it was exhausted."""
        if not self._history or "forward" in self._history[-1] or self._active:
            return
        self._accumulator.settle()
        counted = asdict(self._cost)
        self._history[-1] |= {name: counted[name] - self._booked[name] for name in COUNTED}
        self._booked = {name: counted[name] for name in COUNTED}
        traced_before, self._traced_s = self._traced_s, self._selection_attached.tracing_s
        self.timing.close(epoch=self._history[-1]["epoch"], tracing_s=self._traced_s - traced_before)
        if self.step_checks is not None:
            last = self._history[-1]
            self.step_checks.check_steps(last["epoch"], last["steps"], last["backward"], last.get("lr_scale", 1.0))

    def trains(self) -> bool:
        """Returns whether the next step trains on a loss of the run, so that its learning rate is scaled.

        A closure computes the loss inside of the step: then a batch waits for it.
        """
        # A loss that was credited belongs to this step; a batch that waits may get its loss in the closure of the step.
        running = self.end.state in (Pass.RUNNING, Pass.ALL_YIELDED)
        return running or self._accumulator.in_step or not self._attributor.last_credited

    def step_over(self) -> None:
        """Notes that the optimizer stepped."""
        begin = perf_counter()
        self._cost.steps += 1
        self.selection.step_over()
        self._accumulator.end_step()
        self._silence.step_over()
        self.end.step_over()
        if self.end.state in (Pass.RUNNING, Pass.ALL_YIELDED):  # else the end of the epoch may be in it, which books itself
            self.timing.attribution_s += perf_counter() - begin
        # A loop that keeps its iterator may evaluate next, which is no time of the training.
        if self.end.state is Pass.ALL_YIELDED:  # the loop may keep the iterator, and do something else first
            self.timing.switch(OUTSIDE)

    def detach(self) -> None:
        """Takes the hooks off the optimizer, and lets other runs have it and the loader."""
        self.close_books()
        if self.hooks is not None:
            self.hooks.remove()
        release(self)

    @property
    def in_progress(self) -> bool:
        """Whether an epoch has begun and was not ended."""
        return self._active

    # Saving

    @property
    def may_switch(self) -> bool:
        """Whether the selection may change by itself, as with forward_passes="auto"."""
        return self._selection_attached.instead is not None

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the training, as tensors and plain values."""
        self.end.finish(leaves=False)
        self._saved_left = self._active and (self.end.state is Pass.LEFT or (self._resumed and self._saved_left))
        in_step = self.hooks is not None and self._accumulator.waits_for_step
        plan, stage = self.plan_if_any(), self.selection.stage
        self.close_books()
        return {
            "epochs": self.config.epochs,
            "seed": self._seed,
            "epoch": self.epoch,
            "active": self._active,
            "left": self._saved_left,
            "in_step": in_step,
            "ran_out": self._active or self._ran_out or not self._history[-1:] or not self._history[-1]["complete"],
            **self._place._asdict(),
            "plan": None if plan is None else plan.state_dict(),
            "batch_stage": None if stage is None else stage.state_dict(),
            "passes": self.selection.forward_passes,
            "history": [dict(entry) for entry in self._history],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on at the position that `state_dict` returned."""
        self._history = [dict(entry) for entry in state["history"]]
        self._plan = None if state["plan"] is None else HeldPlan(**state["plan"])
        # A model that could not be traced may be traceable where the run goes on, and the other way round: the state decides.
        attached = self._selection_attached
        if attached.instead is not None:
            self._switch(attached if state["passes"] == "once" else attached.instead)
        self.selection.step_over()
        if self.selection.stage is not None:
            self.selection.stage.load_state_dict(state["batch_stage"])
        self.epoch, self._active, self._seed = state["epoch"], state["active"], state["seed"]
        self._place = OrderPlace(state["consumed"], state["stayed"], state["checksum"])
        self._ran_out = state["ran_out"]
        self._resumed, self._saved_left = self._active, state["left"]
        self._consumed = self.clock.resume(self.epoch, self._place, self._loader.scale_of(self._plan))
        self.end.forget()
        self._booked = {name: sum(entry.get(name, 0) for entry in self._history) for name in COUNTED}
        self.timing.forget()
        self._traced_s = self._selection_attached.tracing_s

    def _switch(self, selection: BatchSelection) -> None:
        if selection is not self.selection:
            self.selection = selection
            self._loader.select_before_loop(selection.fills, by_chance=selection.by_chance)

    def _end_epoch(self, complete: bool) -> None:
        """Ends the epoch: refreshes, and checks what the device has computed."""
        # A process whose loop left the pass early must not send to others that are still in the gradients of a step.
        self._world.meet(f"The end of epoch {self.epoch}", patient=True)
        self._silence.end(complete=complete)
        plan, stage = self._plan, self.selection.stage
        self._accumulator.flush()
        if plan is not None and plan.refreshed:
            # A sample may be trained on in one process and refreshed in another: its loss of the refresh is the later one.
            self._records.sync()
            before = self.timing.switch(REFRESH)
            self._passes.refresh(
                PieceOrder(plan.refreshing(self._world.rank, self._world.size)),
                training=requirements_of(self._method).refresh == "train",
            )
            self.timing.switch(before)
        # Every process sends what it recorded to the one that keeps the records: the next plan reads them.
        self._accumulator.sync()
        if complete:
            # What a plan left out of a complete epoch, full training would have trained on.
            rest = max(0, self._loader.candidates - self._consumed)
            self._cost.full_forward += rest
            self._cost.full_backward += rest
        self.clock.end_epoch(self.epoch)
        # From here on no read ends this epoch a second time.
        self.end.forget()
        entry: dict[str, Any] = {"epoch": self.epoch, "complete": complete, "lr_scale": 1.0}
        if plan is not None:
            sizes = self._loader.step_sizes(plan)
            entry |= {
                "kept": plan.rows if sizes is None else sizes.rows * self._world.size,
                "refreshed": plan.refreshed,
                "lr_scale": plan.lr_scale,
                **plan.facts,
            }
        if stage is not None:
            own = stage.facts()
            entry |= own if len(self.config.methods) == 1 else {f"batch_{name}": value for name, value in own.items()}
            self.selection.warn_if_in_vain(*stage.chosen())
        self._history.append(entry)
        if complete and self.step_checks is not None:
            full = -(-self._loader.candidates // self._loader.batch_sampler.batch_size)
            self.step_checks.end_epoch(self.epoch, self._attributor.batches, full)
        self.epoch += 1
        self._plan, self._active, self._place, self._consumed = None, False, OrderPlace(), 0
        # The plan of the next epoch reads the records, so that the last losses are written and checked before it is made.
        self._settle()
        self.plan_ahead()

    def _settle(self) -> None:
        """Before records are used: writes every loss, and checks everything that the device was asked.

        Raises:
            AttributionError: Targets on the device had other values than the rows that the outputs named.
            FloatingPointError: Losses are not finite, with on_nonfinite="raise".
        """
        self._accumulator.settle()
        # Comparisons on a device are read once an epoch: read in the step they would make the host wait.
        doubts, self._accumulator.doubts = self._accumulator.doubts, []
        if self._world.total(bool(doubts) and not bool(torch.stack(doubts).all())):
            raise AttributionError(
                "Targets were new tensors whose values are not the yielded targets of the rows that the outputs name, or `ids` "
                "were not those of the rows or named a sample more than once, in the epoch that just ended. Those losses were "
                "not recorded."
            )
        self._look_for_nonfinite()

    def _look_for_nonfinite(self) -> None:
        if "loss" not in self._records or not self._history or "nonfinite" in self._history[-1]:
            return
        losses = self._records["loss"]
        count, some, mean = self._world.from_first(lambda: (*not_finite(losses), mean_loss(losses)))
        self._history[-1]["nonfinite"] = count
        if mean is not None:
            self._history[-1]["mean_loss"] = mean
        if not count:
            return
        message = f"{count} samples have a loss that is not finite (ids {some.tolist()}{' ...' if count > 5 else ''})"
        if self.config.on_nonfinite == "raise":
            raise FloatingPointError(f"{message}; attach(on_nonfinite='keep') trains on")
        if not self._warned:
            self._warned = True
            warn(f"{message}; they are kept for training and not scored. This is said once.")


def _use_of_own_losses(selection: BatchSelection, method: EpochMethod | OnSubset, plan: HeldPlan | None) -> str | None:
    """Returns what the run does by the losses of its own forward passes, as a sentence; None where it makes none."""
    if selection.scores:
        who = method if selection.stage is None else selection.stage.method
        return f"{title_of(who)} chooses samples by the losses of own passes."
    if calls_model(method) or (plan is not None and plan.refreshed):
        return f"{title_of(method)} decides about samples by losses of own passes, beside those of the loop."
    return None
