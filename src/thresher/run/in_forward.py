"""Chooses rows by the losses of the loop's own forward pass; criterion and backward pass then use the chosen rows only."""

from collections.abc import Mapping
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from thresher.attribution.attributor import BATCHES_AHEAD
from thresher.attribution.rows import Attribution, RowLayout
from thresher.comparing import same_losses
from thresher.loading.row_buffer import is_per_sample, take_rows
from thresher.losses.base import Criterion
from thresher.losses.given import GivenLosses
from thresher.losses.signals import narrow
from thresher.methods.contract import title_given
from thresher.plans import BatchPlan
from thresher.run.batch_selection import BatchSelection, without_ignored
from thresher.run.batch_stage import BatchStage
from thresher.run.parts import Parts
from thresher.run.trained_model import TrainedModel
from thresher.subset import kept_rows
from thresher.trees import leaves, map_where
from thresher.warning import warn


def gradient_of_nothing(outputs: Any) -> Tensor:
    """Returns a loss of 0, whose backward pass reaches all parameters, because other processes wait for it."""
    return torch.stack(
        [leaf.flatten()[:0].sum() for leaf in leaves(outputs) if leaf.is_floating_point()]
    ).sum()


def take_samples(tree: Any, plan: BatchPlan, layout: RowLayout) -> Any:
    """Keeps the chosen samples of a batch, in every tensor with rows of all samples and every list with an item per sample.

    Args:
        tree: Outputs, targets or other parts of a batch, in any nesting. Everything else in it stays as it is.
        plan: Rows that are kept.
        layout: Layout of the rows as samples.
    """

    def take(part: Any) -> Any:
        if not isinstance(part, Tensor):
            if is_per_sample(part, layout.n):
                return take_rows([part], plan.rows)[0]
            return part
        # Several rows per sample are those of flattened tensors, such as (samples * tokens, classes).
        rows_per_sample = len(part) // layout.n if part.dim() else 0
        # If `repeat` is unknown, any number of rows per sample will do.
        allowed = (1, layout.repeat or rows_per_sample)
        if (
            not rows_per_sample
            or len(part) != layout.n * rows_per_sample
            or rows_per_sample not in allowed
        ):
            return part
        return kept_rows(
            part, plan.rows.to(part.device, non_blocking=True), layout.n, drawn=plan.drawn
        )

    return map_where(
        take, tree, lambda part: isinstance(part, Tensor) or is_per_sample(part, layout.n)
    )


def times(value: Tensor, factor: Tensor | float | None) -> Tensor:
    """Returns a loss times a factor, in the dtype of the loss; None for a factor of 1."""
    if factor is None:
        return value
    return value * (factor.to(value.dtype) if isinstance(factor, Tensor) else factor)


def joint_weights(plan: BatchPlan, weights: Tensor | None) -> Tensor | None:
    """Returns the weights of the chosen rows: the product of the weights of the epoch and the batch."""
    if weights is None:
        return plan.weights
    weights = weights.index_select(0, plan.rows)
    return weights if plan.weights is None else weights * plan.weights


def kept_losses_only(method: object, criterion: Any) -> str:
    """Returns the error message for a criterion with reduction="none", which would return only kept rows."""
    return (
        f"{title_given(method)} keeps some rows of a batch after the loop's own forward pass, and criterion {criterion!r} "
        "has reduction='none': the loop would get losses of the kept rows only, while its other tensors, such as weights or "
        "masks, have the rows of the whole batch. Use reduction='mean'; or attach(forward_passes='twice'), with which "
        "run.loader yields only the kept rows; or compute the losses in the loop and call run.reduce(losses, outputs=...)."
    )


def not_by_rows(error: Exception, criterion: Any, kept: int, of: int) -> Exception:
    """Returns the error for a criterion that works with the whole batch but not with its kept rows.

    If the error has another cause, or already says what to do, it is returned unchanged.
    """
    # Memory has nothing to do with the kept rows, and an error that names the criterion has a way out already.
    if isinstance(error, torch.OutOfMemoryError) or str(error).startswith(
        f"criterion {criterion!r}"
    ):
        return error
    return ValueError(
        f"criterion {criterion!r} could be computed for the {of} samples of a batch, but not for {kept} of them: {error}. With "
        "forward_passes='once', it gets the kept rows of outputs and targets, from every tensor with the samples in dimension "
        "0. Put the samples in dimension 0 of all of them, and transpose within the criterion if it needs another order, as "
        "nn.CTCLoss does; or use attach(forward_passes='twice'); or compute the losses in the loop and call run.reduce(losses, "
        "ids=run.ids)."
    )


MOSTLY = 0.9
"""From this share on, kept rows count as nearly all rows, and backward passes as nearly all passes."""


def part_of_divisor(
    criterion: Criterion,
    targets: Any,
    layout: RowLayout,
    rows: Tensor,
    weights: Tensor | None,
    of_batch: Tensor | None,
) -> Tensor | float:
    """Returns the share of some samples in the divisor of the loss of their batch.

    The mean loss of these samples times this share is their summed loss divided by the divisor of the batch.

    Args:
        criterion: The user's criterion per sample.
        targets: Targets of the batch.
        layout: Layout of the rows of the batch as samples.
        rows: Indices of the samples, shape (k,), int64.
        weights: Weights of these samples, shape (k,), float; None if all are 1.
        of_batch: Weights of all samples of the batch, shape (n,), float; None if all are 1.
    """
    if criterion.reduction == "sum":
        return 1.0
    # `shares` reads only shape, dtype and device of its first argument.
    like_losses = torch.empty(layout.n, 1, dtype=torch.float32, device=rows.device)
    shares = criterion.shares(like_losses, targets)
    kept = shares.index_select(0, rows)
    # With class weights, the weights of samples are part of the divisor, too.
    if criterion.class_weights:
        kept = kept if weights is None else kept * weights
        shares = shares if of_batch is None else shares * of_batch
    return kept.sum() / shares.sum()


class InForward(BatchSelection):
    """A batch method chooses by the losses of the loop's own forward pass; the criterion keeps the chosen rows.

    Args:
        parts: Parts of the run.
        stage: The batch method with its state.
        trained: The model. If it can be traced, its backward pass runs on the chosen rows only.
        fallback: Selection to use if the model cannot be traced; None if there is none.
    """

    forward_passes = "once"
    by_loop = True

    def __init__(
        self,
        parts: Parts,
        stage: BatchStage,
        trained: TrainedModel,
        fallback: BatchSelection | None,
    ) -> None:
        super().__init__(parts, stage)
        self._stage = stage
        self._trained = trained
        self.fallback = fallback
        self.loss = self._loss_of_chosen
        self.gives_up = None if fallback is None else lambda: trained.is_plain
        # (key of the batch, plan, factor of `_factor`) for each choice since the last optimizer step.
        self._chosen_in_step: list[tuple[Any, BatchPlan, Tensor | None]] = []
        self._stage_before_step: dict[str, Any] = {}
        self._may_be_other_model = False
        """Whether the choices of this step may come from the losses of a model that is not trained, such as a teacher."""
        # Backward passes with a gradient in the chosen rows only, and in all rows, up to the last epoch end.
        self._backwards_before = 0, 0
        self._share = 1.0
        self._warned = self._compared = False

    @property
    def tracing_s(self) -> float:
        """Seconds that tracing has taken in the loop's forward passes."""
        return self._trained.tracing_s

    def watch(self, value: Tensor) -> None:
        """Times the backward pass, which runs on the chosen rows only if the model was traced."""
        self._parts.stopwatch.watch(value, 1.0 if self._trained.is_plain else self._share)

    def _loss_of_chosen(
        self,
        outputs: Any,
        targets: Any,
        attribution: Attribution,
        weights: Tensor | None,
        weights_over_n: Any,
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        reader = self._parts.reader
        layout = attribution.layout
        criterion = reader.criterion
        assert criterion is not None
        # The loop would multiply the losses of the kept rows with weights of all rows.
        if criterion.keeps_positions:
            raise ValueError(kept_losses_only(self._stage.method, criterion.original))
        # Choosing takes time that full training does not take; the criterion itself does.
        begin = perf_counter()
        all_count = attribution.all_count and criterion.ignores_negatives_of(targets)
        signals = reader.signals(outputs, targets, layout, reader.chosen_by, all_count=all_count)
        # If all labels of a sample are ignored, its loss is NEVER_SEEN, which would look like "not seen yet" to a method.
        plan, factor = self._choose_rows(
            attribution, signals if all_count else without_ignored(signals)
        )
        # Before the rows are taken: the divisor is that of the targets of the whole batch.
        if self._parts.config.by_batch:
            factor = part_of_divisor(
                criterion, targets, layout, plan.rows, joint_weights(plan, weights), weights
            )
        weights = joint_weights(plan, weights)
        k = len(plan.rows)
        outputs, targets = (take_samples(tree, plan, layout) for tree in (outputs, targets))
        self._parts.timing.attribution_s += perf_counter() - begin
        kept_layout = RowLayout(k, layout.repeat)
        losses_alone = None
        # A loss whose value for a row depends on the other rows (contrastive, in-batch negatives) would be another one for the
        # kept rows; the first step shows it.
        to_compare = not self._compared and 0 < k < layout.n
        try:
            if to_compare:
                losses_alone = criterion.signals_alone(outputs, targets, kept_layout)
            # Other processes wait in the backward pass for gradients of every parameter.
            if not k:
                value = gradient_of_nothing(outputs)
            elif weights is None:
                value = criterion.value(outputs, targets)
            else:
                value = criterion.measure(
                    outputs, targets, kept_layout, weights=weights, wanted=set()
                ).value
        except (RuntimeError, ValueError, IndexError) as error:
            raise not_by_rows(error, criterion.original, k, layout.n) from error
        if to_compare:
            self._compare(losses_alone, signals["loss"].index_select(0, plan.rows))
        return times(value, factor), narrow(signals), plan.rows

    def _factor(self, k: int) -> Tensor | None:
        """Returns the factor of a mean over k rows, so that the mean over the processes is that over the rows of all of them.

        None if processes keep equally many rows.
        """
        several = self._world.size > 1 and self.by_chance
        if several:
            return self._world.share_of_mean(k, self._parts.device)
        return None

    def reduced(
        self,
        given: GivenLosses,
        outputs: Any,
        targets: Any,
        attribution: Attribution,
        weights: Tensor | None,
        *_: Any,
    ) -> tuple[Any, ...]:
        """Averages losses that the loop computed itself over the chosen rows, and records the signals of all rows."""
        layout = attribution.layout
        # `outputs` is the pair (losses, outputs) that `Run.reduce` passes, by which the samples are found.
        signals = self._signals_of_given_losses(
            given, layout, outputs[1], targets, self._parts.reader.chosen_by
        )
        plan, factor = self._choose_rows(
            attribution, signals if given.all_count else without_ignored(signals)
        )
        value = given.value(layout, joint_weights(plan, weights), plan.rows)
        if self._parts.config.by_batch:
            factor = given.part(layout, plan.rows)
        # The factor is for a mean over the kept rows; with a total, the caller has chosen the divisor of all processes.
        elif given.total is not None:
            factor = None
        return times(value, factor), narrow(signals), plan.rows

    def _compare(self, alone: Tensor | None, losses: Tensor) -> None:
        """Compares once the losses of the chosen rows by themselves with those that they had in the whole batch.

        Raises:
            ValueError: They differ, so that the loss of a sample depends on the rest of its batch.
        """
        criterion = self._parts.reader.criterion
        assert criterion is not None
        if alone is not None and not same_losses(losses, alone).all():
            raise ValueError(
                f"criterion {criterion.original!r} returns other losses for {len(losses)} samples of the batch than for the "
                "whole batch: the loss of a sample depends on the other samples, as in a contrastive loss. "
                "forward_passes='once' trains on the kept rows and would compute another loss. Use forward_passes='twice', or "
                "compute the losses of the whole batch yourself and call run.reduce(losses, outputs=...)."
            )
        self._compared = True

    def _choose_rows(
        self, attribution: Attribution, signals: Mapping[str, Tensor]
    ) -> tuple[BatchPlan, Tensor | None]:
        """Has the method choose among some rows; a second loss of the same rows in a step gets the same plan.

        Returns:
            The plan, and the factor of `_factor`.
        """
        trains_own = self._parts.attributor.trains_model
        if trains_own:
            self._discard_other_model()
        # A second criterion for the same rows, as of an auxiliary head, keeps the same rows. Ids from the user have no key:
        # for these, the method chooses anew.
        chosen = next(
            (
                choice
                for choice in self._chosen_in_step
                if choice[0] is not None and choice[0] == attribution.key
            ),
            None,
        )
        if chosen is None:
            ids = attribution.ids
            device = self._parts.device
            # With this copy, `_discard_other_model` can undo what the method learns from the losses of a teacher.
            if not (trains_own or self._chosen_in_step):
                self._stage_before_step = self._stage.state_dict()
            self._may_be_other_model = not trains_own
            if self._stage.keeps_all:
                plan = self._stage.whole(len(ids), device)
            else:
                plan = self._stage.plan(ids, signals)
            chosen = attribution.key, plan, self._factor(len(plan.rows))
            self._chosen_in_step.append(chosen)
        _, plan, factor = chosen
        self._share = len(plan.rows) / attribution.layout.n
        return plan, factor

    def at_epoch_start(self, *, can_score: bool) -> BatchSelection:
        """Returns the selection that scores before each step if the model could not be traced, else `self`."""
        if self.fallback is not None and self._trained.is_plain_anywhere(can_score):
            return self.fallback
        return self

    def warn_if_in_vain(self, keep: float, batches: int) -> None:
        """Warns once if the backward pass costs the whole batch because of the loop."""
        meter = self._parts.attributor.meter
        before = self._backwards_before
        self._backwards_before = now = meter.subset_backwards, meter.whole_backwards
        passes = now[0] - before[0]
        whole = now[1] - before[1]
        if self._warned or self._trained.module is None or meter.cost.unknown is not None:
            return
        if meter.elsewhere:
            why = (
                f"the outputs of {meter.elsewhere:,} samples did not come from run.model, so their backward pass costs the "
                "whole batch. Call run.model(inputs) in the loop instead of the model itself."
            )
        # A penalty on the outputs, or a loss of another head, of all rows. Batches that the method left whole are expected.
        elif passes and batches and 0 < keep < MOSTLY and whole >= passes - (1 - MOSTLY) * batches:
            if self._trained.is_plain:
                why = f"the model could not be traced, so its backward pass costs the whole batch: {self._trained.why_plain()}."
            else:
                why = (
                    f"{whole:,} of {passes:,} backward passes had a gradient in all rows, so they cost the whole batch. "
                    "Another loss of the outputs uses all rows: compute it with run.criterion or run.reduce, too, or add it to the "
                    "losses passed to run.reduce."
                )
        else:
            return
        self._warned = True
        warn(
            f"{title_given(self._stage.method)} kept {keep:.2f} of the samples in the loop's own forward pass, and {why} "
            "This warning is given once."
        )

    def step_over(self) -> None:
        """Forgets the choices of the optimizer step that is over."""
        self._chosen_in_step.clear()
        self._may_be_other_model = False

    def _discard_other_model(self) -> None:
        """Undoes the choices of this step by losses of another model, and what the method learned from them.

        The first loss of the run's own model shows that earlier losses came from another model. Until then, the loop may have
        computed its outputs without `run.model`.
        """
        if self._may_be_other_model and self._chosen_in_step:
            self._stage.load_state_dict(self._stage_before_step)
            self._chosen_in_step.clear()
        self._may_be_other_model = False

    def batch_yielded(self, number: int) -> None:
        """Forgets the choices of batches that are not in use any more."""
        # A prefetcher asks for batches before the loss of an earlier one is computed.
        first = number - BATCHES_AHEAD
        self._chosen_in_step = [
            choice
            for choice in self._chosen_in_step
            if choice[0] is not None and choice[0][0] > first
        ]
