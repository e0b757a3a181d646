"""How the rows of a batch are chosen: not at all, or in the loop's own forward pass."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from thresher.attribution.attributor import Attributor, MeasureLoss
from thresher.attribution.held import BATCHES_AHEAD
from thresher.attribution.rows import Attribution, RowLayout
from thresher.attribution.sample_dimension import LossDimension
from thresher.losses.given import GivenLosses
from thresher.losses.reader import DIVISOR_SHARE, SignalReader
from thresher.losses.signals import batch_loss, narrow
from thresher.methods.contract import way_around
from thresher.passes.own import OwnPasses
from thresher.plans import BatchPlan
from thresher.records import Records
from thresher.run.batch_stage import BatchStage
from thresher.run.chosen_rows import gradient_of_nothing, joint_weights, take_samples, times, without_ignored
from thresher.run.divisor import part_of_divisor
from thresher.run.once_errors import kept_losses_only, not_by_rows
from thresher.run.stopwatch import Stopwatch
from thresher.run.trained import Trained


class BatchSelection(Protocol):
    """What the run, its epochs and its loader need of a way to choose rows."""

    @property
    def stage(self) -> BatchStage | None:
        """The batch method at work; None where there is none."""
        ...

    @property
    def fills(self) -> bool | None:
        """Whether the loader fills chosen rows up to full batches; None where it yields the batches as they are."""
        ...

    @property
    def forward_passes(self) -> str | None:
        """How it turned out, for the saved state: "once", "twice", or None without a batch method."""
        ...

    @property
    def scores(self) -> bool:
        """Whether own passes of the trained model compute the losses that rows are chosen by."""
        ...

    @property
    def measure(self) -> MeasureLoss:
        """Computes the criterion of the rows that are trained on, and the signals of all."""
        ...

    def measuring(self, given: GivenLosses) -> MeasureLoss:
        """Returns the same for losses that the loop computed itself."""
        ...

    def watch(self, value: Tensor) -> None:
        """Times the backward pass of a loss of the loop."""
        ...

    def choose(self, batch: Any, ids: Tensor, epoch: int) -> BatchPlan:
        """Returns the rows of a candidate batch that the loop sees."""
        ...

    def at_epoch_start(self) -> "BatchSelection":
        """Returns the selection of the epoch that begins: this one, or the one that takes its place."""
        ...

    def step_over(self) -> None:
        """Forgets the choices of the optimizer step that is over."""
        ...

    def batch_yielded(self, number: int) -> None:
        """Forgets the choices of batches long before this one."""
        ...

    def warn_if_in_vain(self, keep: float) -> None:
        """Warns once where choosing costs more than it saves, given the share of the last epoch's candidates that was kept."""
        ...


@dataclass(frozen=True)
class Tools:
    """The parts of a run that the selections share.

    Args:
        attributor: Credits losses to samples.
        reader: Reads signals.
        stopwatch: Times forward and backward passes.
        passes: Makes scoring passes.
        records: Records of all samples.
        device: Device of the records.
        progress: Function that returns the share of the training that is done.
        method: The method, for messages.
        by_batch: Whether the losses that a batch method kept are divided by the rows of the batch. Default False.
    """

    attributor: Attributor
    reader: SignalReader
    stopwatch: Stopwatch
    passes: OwnPasses
    records: Records
    device: torch.device
    progress: Callable[[], float]
    method: Any
    by_batch: bool = False

    def beside(self, *, fills: bool | None) -> frozenset[str]:
        """Returns the names of the signals that a pass before the loop's reads beside those to choose by.

        Where batches are filled up, the criterion divides by labels of several batches, which are not known yet.
        """
        return frozenset({DIVISOR_SHARE}) if self.by_batch and not fills else frozenset()


class NoSelection:
    """Every row that the loader yields is trained; also the criterion of `BeforeForward`.

    Args:
        tools: Parts of the run.
    """

    stage: BatchStage | None = None
    fills: bool | None = None

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._attributor, self._stopwatch = tools.attributor, tools.stopwatch
        self.measure: MeasureLoss = tools.reader.measuring()
        self._dimension = LossDimension()

    @property
    def forward_passes(self) -> str | None:
        """None: nothing is chosen."""
        return None

    @property
    def scores(self) -> bool:
        """False: nothing is chosen, or by the losses of the loop."""
        return False

    def measuring(self, given: GivenLosses) -> MeasureLoss:
        """Returns the function that averages losses of the loop over all rows, and reads their signals."""

        def measure(outputs: Any, targets: Any, attribution: Attribution, weights: Tensor | None, _: Any) -> Any:
            found = self._beside(given, attribution.layout, outputs[1], targets, self._tools.reader.recorded)
            return given.value(attribution.layout, weights), found

        return measure

    def watch(self, value: Tensor) -> None:
        """Times the backward pass of all rows."""
        self._stopwatch.watch(value)

    def _beside(self, given: GivenLosses, layout: RowLayout, outputs: Any, targets: Any, wanted: set[str]) -> dict[str, Tensor]:
        """Signals of samples whose losses by position the loop computed itself."""
        self._dimension.check(given.losses, layout.n, by_sample=given.of_samples)
        found = {"loss": given.means(layout)}
        if "batch_loss" in wanted:
            found["batch_loss"] = batch_loss(found["loss"])
        return found | self._tools.reader.beside(outputs, targets, layout.n, wanted - {"batch_loss"}, self._missing)

    def _missing(self, wanted: set[str]) -> str:
        method = self._tools.method
        return (
            f"run.reduce: {type(method).__name__} needs {', '.join(sorted(wanted))}: pass outputs= and targets=, or "
            f"attach(signals=...){way_around(method, *sorted(wanted))}"
        )

    def _is_inactive(self, stage: BatchStage) -> bool:
        """Whether the next batch is trained whole, because the method does not choose at this point of the training."""
        return stage.requires.active and stage.is_inactive(self._tools.progress())

    def choose(self, batch: Any, ids: Tensor, epoch: int) -> BatchPlan:
        """Never called: the loader yields the batches as they are."""
        raise NotImplementedError

    def at_epoch_start(self) -> BatchSelection:
        """Returns itself."""
        return self

    def step_over(self) -> None:
        """Nothing was chosen."""

    def batch_yielded(self, number: int) -> None:
        """Nothing was chosen."""

    def warn_if_in_vain(self, keep: float) -> None:
        """Nothing is chosen, so nothing is in vain."""


MANY = 2**10
"""Number of rows of a batch that stands for any."""


class InForward(NoSelection):
    """A batch method chooses by the losses of the loop's own forward pass; the criterion keeps the chosen rows.

    Args:
        tools: Parts of the run.
        stage: The batch method at work.
        trained: The model, whose backward pass costs the chosen rows only where it was traced.
        instead: Takes over where the model turned out not to be traceable; None: nothing does.
    """

    def __init__(self, tools: Tools, stage: BatchStage, trained: Trained, instead: BatchSelection | None) -> None:
        super().__init__(tools)
        self.stage = self._stage = stage
        self._trained, self.instead = trained, instead
        self.measure = self._measure_chosen
        self._chosen_in_step: list[tuple[Any, BatchPlan, Tensor | None]] = []
        self._before: dict[str, Any] = {}
        tools.attributor.on_disowned = self.disown
        self._share = 1.0
        self._warned = self._compared = False
        self._by_chance = stage.method.count(MANY) is None
        """Whether processes keep different numbers of rows of equal batches."""

    @property
    def forward_passes(self) -> str | None:
        """The forward pass of the loop is the only one."""
        return "once"

    def watch(self, value: Tensor) -> None:
        """Times the backward pass, which runs on the chosen rows only where the model was traced."""
        self._stopwatch.watch(value, 1.0 if self._trained.is_plain else self._share)

    def _measure_chosen(
        self, outputs: Any, targets: Any, attribution: Attribution, weights: Tensor | None, weights_over_n: Any
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        reader, layout = self._tools.reader, attribution.layout
        criterion = reader.criterion
        assert criterion is not None
        if criterion.keeps_positions:
            raise ValueError(kept_losses_only(self._stage.method, criterion.own))
        all_count = attribution.all_count and criterion.ignores_negatives_of(targets)
        found = reader.signals(outputs, targets, layout, reader.chosen_by, all_count=all_count)
        plan, factor = self._choose_rows(attribution, found if all_count else without_ignored(found))
        if self._tools.by_batch:
            factor = part_of_divisor(criterion, targets, layout, plan.rows, joint_weights(plan, weights), weights)
        weights, k = joint_weights(plan, weights), len(plan.rows)
        outputs, targets = (take_samples(tree, plan, layout) for tree in (outputs, targets))
        small, alone = RowLayout(k, layout.repeat), None
        to_compare = not self._compared and 0 < k < layout.n
        try:
            if to_compare:
                alone = criterion.signals_alone(outputs, targets, small)
            if not k:
                value = gradient_of_nothing(outputs)
            elif weights is None:
                value = criterion.value(outputs, targets)
            else:
                value = criterion.measure(outputs, targets, small, weights=weights, wanted=set()).value
        except (RuntimeError, ValueError, IndexError) as error:
            raise not_by_rows(error, criterion.own, k, layout.n) from error
        if to_compare:
            self._compare(alone, found["loss"].index_select(0, plan.rows))
        return times(value, factor), narrow(found), plan.rows

    def _factor(self, k: int) -> Tensor | None:
        """Returns the factor of a mean over k rows, so that the mean over the processes is that over the rows of all of them.

        None where processes keep equally many rows.
        """
        world = self._tools.records.shard.world
        return world.share_of_mean(k, self._tools.device) if world.size > 1 and self._by_chance else None

    def measuring(self, given: GivenLosses) -> MeasureLoss:
        """Returns the function that averages losses of the loop over the chosen rows, and reads the signals of all."""

        def measure(outputs: Any, targets: Any, attribution: Attribution, weights: Tensor | None, _: Any) -> Any:
            layout = attribution.layout
            found = self._beside(given, layout, outputs[1], targets, self._tools.reader.chosen_by)
            plan, factor = self._choose_rows(attribution, found if given.all_count else without_ignored(found))
            value = given.value(layout, joint_weights(plan, weights), plan.rows)
            if self._tools.by_batch:
                factor = given.part(layout, plan.rows)
            elif given.has_total:
                factor = None
            return times(value, factor), narrow(found), plan.rows

        return measure

    def _compare(self, alone: Tensor | None, losses: Tensor) -> None:
        """Compares once the losses of the chosen rows by themselves with those that they had in the whole batch.

        Raises:
            ValueError: They differ, so that the loss of a sample depends on the rest of its batch.
        """
        criterion = self._tools.reader.criterion
        assert criterion is not None
        if alone is not None:
            exact = losses.dtype in (torch.float32, torch.float64)
            if not torch.allclose(alone.to(losses.dtype), losses, rtol=1e-3 if exact else 0.05, atol=1e-4, equal_nan=True):
                raise ValueError(
                    f"criterion {criterion.own!r} gives samples other losses when it is called with {len(losses)} samples of "
                    "the batch than with the whole batch: the loss of a sample depends on the other samples, as in a "
                    "contrastive loss. forward_passes='once' trains on the kept rows and would compute another loss. Use "
                    "forward_passes='twice', or compute the losses of the whole batch yourself and call "
                    "run.reduce(losses, outputs=...)."
                )
        self._compared = True

    def _choose_rows(self, attribution: Attribution, found: Mapping[str, Tensor]) -> tuple[BatchPlan, Tensor | None]:
        """Asks the method about some rows; the same answer for a second loss of the same rows in a step.

        Returns:
            The plan, and the factor of `_factor`.
        """
        chosen = next((one for one in self._chosen_in_step if one[0] is not None and one[0] == attribution.key), None)
        if chosen is None:
            ids, device = attribution.ids, self._tools.device
            inactive = self._is_inactive(self._stage)
            if not (self._attributor.trains_model or self._chosen_in_step):
                self._before = self._stage.state_dict()
            plan = self._stage.whole(len(ids), device) if inactive else self._stage.plan(ids, found)
            chosen = attribution.key, plan, self._factor(len(plan.rows))
            self._chosen_in_step.append(chosen)
        _, plan, factor = chosen
        self._share = len(plan.rows) / attribution.layout.n
        return plan, factor

    def at_epoch_start(self) -> BatchSelection:
        """Returns the selection that takes over where the model turned out not to be traceable, else itself."""
        return self.instead if self.instead is not None and self._trained.is_plain_anywhere() else self

    def warn_if_in_vain(self, keep: float) -> None:
        """Warns once where the loop does not call `run.model`, whose backward pass costs the chosen rows only."""
        elsewhere = self._attributor.meter.elsewhere
        if self._warned or self._trained.module is None or not elsewhere or self._attributor.meter.cost.unknown is not None:
            return
        self._warned = True
        warnings.warn(
            f"{type(self._stage.method).__name__} kept {keep:.2f} of the samples in the loop's own forward pass, and the "
            f"outputs of {elsewhere:,} samples did not come from run.model, so that their backward pass costs the whole batch. "
            "Call run.model(inputs) in the loop instead of the model itself. This is said once.",
            stacklevel=5,
        )

    def step_over(self) -> None:
        """Forgets the choices of the optimizer step that is over."""
        self._chosen_in_step.clear()

    def disown(self) -> None:
        """Takes back the choices of the optimizer step, and what the method learned by them."""
        if self._chosen_in_step:
            self._stage.load_state_dict(self._before)
            self._chosen_in_step.clear()

    def batch_yielded(self, number: int) -> None:
        """Forgets the choices of batches that are not in use any more."""
        first = number - BATCHES_AHEAD
        self._chosen_in_step = [one for one in self._chosen_in_step if one[0] is not None and one[0][0] > first]
