"""What happens when: the events of a training loop, and what the run does at each of them, in this order.

    for batch in run.loader:                            # begin: ends the epoch before, plans, starts a pass
                                                        # batch: notes the batch and the place after it
        loss = run.criterion(run.model(inputs), targets)  # loss: `attribution` assigns it to its samples
        loss.backward()
        optimizer.step()                                # step: counts it, and closes its losses
                                                        # end: refreshes, gathers, writes the history, plans

The epoch ends with the step of its last batch, if that can be seen, else when something needs its results
(`run/epoch_end.py`).
"""

from collections.abc import Mapping
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thresher.attribution.pending_gradients import PendingGradients
from thresher.loading.batch_reader import Batches
from thresher.loading.packed_plan import PackedPlan
from thresher.loading.stream import check_begins
from thresher.methods._adapted import OnSubset
from thresher.methods.contract import EpochMethod, calls_model, requirements_of
from thresher.passes.loss_comparison import Comparison
from thresher.plans import BatchPlan
from thresher.run.batch_selection import BatchSelection
from thresher.run.before_forward import BeforeForward
from thresher.run.epoch_end import EpochEnd, Pass, SilentEpochs, plans_by_losses
from thresher.run.history import History
from thresher.run.optimizer_steps import StepChecks, StepHooks, UnseenSteps
from thresher.run.ownership import release
from thresher.run.parts import Parts
from thresher.run.planner import Planner, title_of
from thresher.run.progress import Progress
from thresher.run.several_processes import NO_FURTHER_PLAN, check_attached_late_enough, has_group
from thresher.timing import ATTRIBUTION, OUTSIDE, PLANNING, REFRESH, SCORING_PASS, STEPS
from thresher.warning import warn


class Timeline:
    """Calls the parts of a run at each event of the loop; the loader reports events to it.

    Args:
        parts: Parts of the run.
        method: The epoch method, on the samples that pruning left if there was pruning.
        selection: How the rows of batches are chosen.
    """

    def __init__(
        self, parts: Parts, method: EpochMethod | OnSubset, selection: BatchSelection
    ) -> None:
        self._parts = parts
        self._method = method
        self.timing = parts.timing
        self.selection = selection
        self._first_selection = selection
        self.comparison = Comparison(parts.passes, parts.accumulator)
        """Compares the losses of extra passes with the losses of the loop."""
        by_losses = plans_by_losses(method)
        self._stage = selection.stage
        chosen_in_batch = parts.config.batch_method
        self._chooser = title_of(method if chosen_in_batch is None else chosen_in_batch)
        self._silent_epochs = SilentEpochs(
            parts.attributor, self._chooser, lambda: by_losses or self.selection.by_loop
        )
        self.planner = Planner(parts, method, fills=lambda: self.selection.fills)
        self.steps = UnseenSteps()
        """Scales the learning rate, counts steps and checks them, after `follow`."""
        config = parts.config
        self.progress = Progress(
            parts.loader, parts.attributor, parts.cost, config.given.epochs, config.given.seed
        )
        self._history = History(parts)
        self._had_group = has_group()
        self._warned_of = set[str]()
        self.end = EpochEnd(parts, self._end_epoch, single_process=self._single_process)

    @property
    def _single_process(self) -> bool:
        return self._parts.config.world.size == 1

    def follow(self, optimizer: Optimizer, model: nn.Module | None) -> None:
        """Follows the steps of the optimizer from now on.

        Args:
            optimizer: The user's optimizer.
            model: The user's model; None if there is none.
        """

        def updated() -> list[Tensor]:
            attached = hooks.parameters()
            # A head outside of `run.model` has its gradients before the backward pass reaches the outputs of the model.
            if model is None:
                return [*attached.values()]
            return [parameter for parameter in model.parameters() if id(parameter) in attached]

        accumulator = self._parts.accumulator
        pending = PendingGradients(updated, accumulator.gradients_cleared)
        hooks = StepHooks(optimizer, self.step_over, self.trains, self.timing, pending.begin_step)
        self.steps = StepChecks(hooks, type(optimizer).__name__, model)
        accumulator.meter.pending = pending

    # Begin

    def begin(self) -> tuple[PackedPlan | None, int]:
        """Begins an epoch, or continues an interrupted epoch; see `EpochControl.begin`."""
        position = self.progress
        parts = self._parts
        check_attached_late_enough(self._had_group)
        if position.resumed and position.rows and parts.loader.streams:
            check_begins(parts.loader.dataset)
        # The last batch of the previous pass may still have to be compared.
        self.comparison.compare()
        self._end_pass_before()
        # How many samples of full training a yielded row stands for depends on the plan, so each pass is counted by itself.
        parts.accumulator.meter.begin_pass()
        if not position.resumed:
            # Judged before the plan is made: a method that chooses by losses must not plan a third epoch without any.
            self._silent_epochs.begin()
        plan = self.plan_if_any()
        if not position.resumed:
            # The last step of an epoch may come after its pass, so that its books close when the next one begins.
            self.complete_last_entry()
            parts.records.start_epoch()
            self._switch(self.selection.at_epoch_start(can_score=self.comparison.can_choose))
        # Smaller batches: full training would have made as many steps by now.
        parts.accumulator.meter.same_steps = plan is not None and plan.smaller
        self.comparison.begin_epoch(self._use_of_own_losses(plan), trial=self.selection.gives_up)
        if position.epoch >= parts.given.epochs and torch.is_grad_enabled():
            self._warn_once(
                f"Epoch {position.epoch + 1} begins, but the run was created with epochs={parts.given.epochs}, on which "
                "schedules of methods are based. Pass the number of all epochs. This warning is given once.",
                "length",
            )
        parts.records.epoch = position.epoch
        resumed = position.begin()
        self.end.begin()
        parts.attributor.begin_epoch(ids_repeat=self._ids_repeat(plan))
        scale = 1.0 if plan is None else plan.lr_scale
        self.steps.begin_epoch(parts.attributor.batches, scale=scale, resumed=resumed)
        return plan, position.rows

    def _end_pass_before(self) -> None:
        """Ends a pass whose end was not seen, because the loop kept its iterator, or left by break."""
        position = self.progress
        if position.active and not position.resumed:
            left = position.epoch
            if not self.end.finish(leaves=True):
                self._silent_epochs.begin_again(steps_are_seen=self.steps.seen)
                self._undo_pass()
            elif position.saved_left:
                warn(
                    f"The state saved after the loop left epoch {left} by break continues within epoch {left} when loaded, but "
                    f"this run begins epoch {left + 1}. To get the same result, end epochs early with a sampler of fewer "
                    "samples instead of break."
                )
        position.saved_left = False

    def _ids_repeat(self, plan: PackedPlan | None) -> bool:
        """Whether a sample can come twice in an epoch; not if the order of a plan was drawn only to stratify its batches."""
        if plan is None or not plan.drawn:
            return plan is None or not self._parts.loader.yields_once
        return self._parts.config.strata is None or not self._single_process

    def _use_of_own_losses(self, plan: PackedPlan | None) -> str | None:
        """Returns a sentence on how the run uses losses of its own forward passes; None if it makes no such passes."""
        if self.selection.scores:
            return f"{self._chooser} chooses samples by these losses."
        if calls_model(self._method) or (plan is not None and plan.refreshed):
            return f"{title_of(self._method)} decides about samples by these losses, besides the losses of the loop."
        return None

    # Batch

    def choose(self, batch: Any, ids: Tensor) -> BatchPlan:
        """Chooses which rows of a batch the loop gets."""
        loading = self.timing.switch(SCORING_PASS)
        assert isinstance(self.selection, BeforeForward)
        plan = self.selection.choose(batch, ids, self.progress.epoch)
        self.timing.switch(loading)
        return plan

    @property
    def keeps_a_row(self) -> bool:
        """Whether at least one row of every batch is kept; False for a method that keeps rows by chance, without a share."""
        return self._stage.keeps_a_row

    def count(self, n: int) -> int | None:
        """Returns how many rows of a batch of n rows are kept; None if this depends on the losses."""
        return self._stage.count(n)

    def on_batch(
        self, batch: Any, ids: Tensor, weights: Tensor | None, candidates: Batches, *, last: bool
    ) -> None:
        """Notes a batch before the loop gets it.

        Args:
            batch: The batch, on the device.
            ids: Ids of its rows, shape (n,), int64, on the host.
            weights: Weights of the rows, from the plan and a batch method, shape (n,); None if all are 1.
            candidates: Batches of the epoch that were read for it and before.
            last: Whether it is the last batch of the epoch.
        """
        # First: attribution is taken out of the time of the steps.
        self.timing.switch(STEPS)
        begin = perf_counter()
        attributor = self._parts.attributor
        self.end.on_batch(last=last)
        # After that call, which reads whether the batch before has its loss, and before this batch gets its number.
        number = attributor.batches
        self.progress.move(number, candidates, last=last)
        # A comparison of the batch before is read now: by then the device has computed its losses.
        if self.comparison.pending:
            self.comparison.compare()
            self.comparison.yielded(number, batch)
        self.selection.batch_yielded(number)
        # A batch that extra passes cannot read is refused before the first step, and not after the first epoch.
        if number == 0 or self._parts.loader.reader.unknown_rows.reason is not None:
            self._parts.passes.check(batch)
        attributor.yielded(batch, ids, weights)
        self.timing.attribution_s += perf_counter() - begin

    # Step

    def trains(self) -> bool:
        """Returns whether the next step trains on a loss of the run, so that its learning rate is scaled.

        With a closure, the loss is computed within the step: then a batch has no loss yet.
        """
        # A recorded loss belongs to this step; a batch without a loss may get it in the closure of the step.
        running = self.end.state in (Pass.RUNNING, Pass.ALL_YIELDED)
        return (
            running or self._parts.accumulator.in_step or not self._parts.attributor.last_credited
        )

    def step_over(self) -> None:
        """Notes that the optimizer stepped."""
        begin = perf_counter()
        self._parts.cost.steps += 1
        self.selection.step_over()
        self._parts.accumulator.end_step()
        self._silent_epochs.step_over()
        # After `end_step`: the epoch ends only if no loss waits for its step any more.
        self.end.step_over()
        # Otherwise this step may have ended the epoch, which is timed by itself.
        if self.end.state in (Pass.RUNNING, Pass.ALL_YIELDED):
            self.timing.attribution_s += perf_counter() - begin
        # The loop may evaluate next, and still hold the iterator.
        if self.end.state is Pass.ALL_YIELDED:
            self.timing.switch(OUTSIDE)

    # End

    def on_loop_exit(self, *, exhausted: bool) -> None:
        """Notes that the loop over the loader has ended, or its iterator was deleted."""
        self.timing.switch(ATTRIBUTION)  # of the losses that were not written yet
        if exhausted:
            self.comparison.compare()
            self.progress.ran_out = True
            self.progress.end_pass()
        self.end.on_loop_exit(exhausted=exhausted)
        self.timing.switch(OUTSIDE)
        # Otherwise the next pass shows that nothing was trained in this one; after the last epoch, there may be none.
        after_training = (
            exhausted and self.progress.epoch >= self._parts.given.epochs and not self.end.trained
        )
        if self.progress.active and (after_training or self.end.evaluates):
            self._silent_epochs.end(complete=False)
            self._undo_pass()

    def _undo_pass(self) -> None:
        """Undoes a pass over the loader without training: the next pass begins the same epoch again."""
        plan = self.planner.current
        exhausted = self.end.state is Pass.OVER
        self.end.forget()
        # Before `facts`, which resets the counts that it reads.
        rows = self._rows_of_batch(plan) if exhausted else 0
        self.progress.take_back()
        self.timing.drop()
        self._stage.facts()
        selects = self.selection.fills is not None or (plan is not None and not plan.everything)
        if exhausted and selects:
            # A loop that skips smaller batches trains on none of them.
            size = self._parts.loader.order.batch_size
            if rows == size:
                smaller = ""
            else:
                smaller = f", in batches of about {rows} rows instead of {size}; skip none because of its size"
            self._warn_once(
                "A loop over run.loader without training, as for evaluation or torch.optim.swa_utils.update_bn, had only the "
                f"samples that {self._chooser} keeps for training, not all{smaller}. It does not count as an epoch. Use another "
                "DataLoader for evaluation. If the loop trains, call run.model and run.criterion; with forward passes only, "
                "call run.criterion under torch.enable_grad() once per batch. This warning is given once.",
                "evaluation",
            )

    def _rows_of_batch(self, plan: PackedPlan | None) -> int:
        """Returns the mean number of rows of the batches of a pass that had at least one."""
        size = self._parts.loader.order.batch_size
        if plan is not None and plan.smaller:
            ends = self._parts.loader.ends(plan)
            return round(int(ends[-1]) / (len(ends) - 1))
        if self.selection.fills is False:
            return round(size * self._stage.kept / self._stage.candidates)
        return size

    def _end_epoch(self, complete: bool) -> None:
        """Ends the epoch: refreshes, and checks what the device has computed."""
        parts = self._parts
        position = self.progress
        # A process whose loop left the pass early must not send to others that are still exchanging gradients of a step.
        parts.config.world.meet(f"The end of epoch {position.epoch}", patient=True)
        self._silent_epochs.end(complete=complete)
        plan = self.planner.current
        parts.loader.end_epoch()
        parts.accumulator.flush()
        if plan is not None and plan.refreshed:
            self._refresh(plan)
        # Every process sends what it recorded to the one that keeps the records: the next plan reads them.
        parts.accumulator.sync()
        if complete:
            position.finish()
        position.end_pass()
        # From here on no read ends this epoch a second time.
        self.end.forget()
        self._history.entries.append(self._entry(plan, complete=complete))
        if position.epoch + 1 >= parts.given.epochs and (
            plan is None or (plan.everything and plan.weights is None)
        ):
            self._history.warn_if_nothing_saved()
        if complete:
            full = parts.loader.order.full_batches
            self.steps.end_epoch(position.epoch, parts.attributor.batches, full)
        position.end()
        self.planner.current = None
        # The plan of the next epoch reads the records, so that the last losses are written and checked before it is made.
        self._history.check()
        self.plan_ahead()

    def _refresh(self, plan: PackedPlan) -> None:
        # A sample may be trained on in one process and refreshed in another: its loss of the refresh is the later one.
        self._parts.records.sync()
        before = self.timing.switch(REFRESH)
        world = self._parts.config.world
        part = plan.refresh_ids(world.rank, world.size)
        self._parts.passes.refresh(part, training=requirements_of(self._method).refresh == "train")
        self.timing.switch(before)

    def _entry(self, plan: PackedPlan | None, *, complete: bool) -> dict[str, Any]:
        """Returns the entry of the history of an epoch that is over."""
        config = self._parts.config
        entry: dict[str, Any] = {
            "epoch": self.progress.epoch,
            "complete": complete,
            "lr_scale": 1.0,
        }
        if plan is not None:
            kept = plan.rows
            if plan.smaller:
                kept = int(self._parts.loader.ends(plan)[-1]) * config.world.size
            entry |= {
                "kept": kept,
                "refreshed": plan.refreshed,
                "lr_scale": plan.lr_scale,
                **plan.facts,
                **self._parts.loader.tokens(),
            }
        prefix = "" if len(config.methods) == 1 else "batch_"
        entry |= {prefix + name: value for name, value in self._stage.facts().items()}
        self.selection.warn_if_in_vain(*self._stage.chosen())
        return entry

    # Plans

    @property
    def plan(self) -> PackedPlan:
        """The plan of the current epoch or, between epochs, of the next epoch; made at the first access.

        Raises:
            RuntimeError: Several processes train, and the last epoch is over.
            ValueError: The loader has an IterableDataset, for which no samples are chosen in advance.
        """
        if self._parts.loader.streams:
            raise ValueError(
                "run.plan: not available with an IterableDataset; rows are chosen in every batch"
            )
        if self.planner.current is None and not self._single_process:
            raise RuntimeError(NO_FURTHER_PLAN.format(self.epoch + 1, self._parts.given.epochs))
        plan = self.plan_if_any()
        assert plan is not None
        return plan

    def plan_ahead(self) -> None:
        """Makes the plan of the next epoch, if several processes must make it together."""
        if not self._single_process and self.epoch < self._parts.given.epochs:
            self.plan_if_any()

    def plan_if_any(self) -> PackedPlan | None:
        """Returns the plan, or None for an IterableDataset. Every process must call it."""
        # An epoch that is over ends first: the next plan is made from its losses.
        self.end.read()
        planner = self.planner
        if planner.current is None and not self._parts.loader.streams:
            self._history.check()
            before = self.timing.switch(PLANNING)
            planner.current = planner.plan(self.epoch, self.progress.seed)
            self.timing.switch(before)
            # Frameworks ask for the length of the next epoch before it begins, and it depends on the selection.
            if not self.progress.active:
                self._switch(self.selection.at_epoch_start(can_score=self.comparison.can_choose))
        return planner.current

    def _switch(self, selection: BatchSelection) -> None:
        if selection is not self.selection:
            self.selection = selection
            self._parts.loader.select_before_loop(selection.fills, by_chance=selection.by_chance)

    # What the run reports

    @property
    def epoch(self) -> int:
        """Number of the current epoch or, between epochs, of the next epoch."""
        return self.progress.epoch

    @property
    def history(self) -> list[dict[str, Any]]:
        """One dict per finished epoch."""
        self.end.read()
        self.complete_last_entry()
        return self._history.entries

    @property
    def nothing_saved(self) -> str:
        """Text of the warning that no sample was left out of any epoch; "" if there was none."""
        return self._history.nothing_saved

    def complete_last_entry(self) -> None:
        """Adds the counts of the last epoch to its entry, because its last step may come after the end of the loop."""
        if self.progress.active:
            entry = None
        else:
            # Only the first selection traces the model; the one that may take over from it does not.
            entry = self._history.close(self._first_selection.tracing_s)
        if entry is not None:
            self.steps.check_steps(
                entry["epoch"], entry["steps"], entry["backward"], entry.get("lr_scale", 1.0)
            )

    def detach(self) -> None:
        """Removes the hooks from the optimizer, which can then be attached to other runs, as the loader can."""
        self.complete_last_entry()
        self.steps.remove()
        release(self)

    def _warn_once(self, message: str, about: str) -> None:
        if about not in self._warned_of:
            self._warned_of.add(about)
            warn(message)

    # Saving

    @property
    def may_switch(self) -> bool:
        """Whether the selection may change by itself, as with forward_passes="auto"."""
        return self._first_selection.fallback is not None

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the training run, as tensors and plain values."""
        self.end.finish(leaves=False)
        position = self.progress
        entries = self._history.entries
        position.saved_left = position.active and (
            self.end.state is Pass.LEFT or (position.resumed and position.saved_left)
        )
        in_step = self.steps.seen and self._parts.accumulator.waits_for_step
        plan = self.plan_if_any()
        self.complete_last_entry()
        return {
            **position.state_dict(),
            "epochs": self._parts.given.epochs,
            "in_step": in_step,
            "ran_out": position.active
            or position.ran_out
            or not entries
            or not entries[-1]["complete"],
            "plan": None if plan is None else plan.state_dict(),
            "batch_stage": self._stage.state_dict(),
            "passes": self.selection.forward_passes,
            "history": [dict(entry) for entry in entries],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the position that `state_dict` returned."""
        if state["plan"] is None:
            self.planner.current = None
        else:
            self.planner.current = PackedPlan(**state["plan"])
        # A model that could not be traced may be traceable when the run goes on, and the other way round: the state decides.
        attached = self._first_selection
        if attached.fallback is not None:
            self._switch(attached if state["passes"] == "once" else attached.fallback)
        # Choices of a step in progress are of batches of this run, not of the saved one.
        self.selection.step_over()
        self._stage.load_state_dict(state["batch_stage"])
        self.progress.load_state_dict(state)
        self._history.load(state["history"], attached.tracing_s)
        self.end.forget()
        self.timing.forget()
