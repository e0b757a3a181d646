"""Counts samples when passes really run: a forward pass when the model is called, a backward pass when autograd runs it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from thresher.attribution.forward_passes import ForwardPass, ForwardPasses
from thresher.attribution.pending_gradients import PendingGradients
from thresher.attribution.rows import RowLayout, Rows
from thresher.cost import Cost
from thresher.torch_internals import backward_pass, next_node

UNCREDITED = "run.model was called with gradients for inputs that are not a batch of run.loader, and its outputs got no recorded loss"
PARTS = (
    "the loop puts packed samples, or only a part of the rows of a batch, through the model, so the cost of full training is "
    "unknown; take the samples that the loop leaves out out of the dataset, as with torch.utils.data.Subset"
)
TRANSFORMED = "run.model was called inside a torch.func transform, such as vmap or grad, whose passes cannot be counted"

SOME_DIMENSION = (
    "run.model was called with inputs that are not a batch of run.loader, and the samples of its losses can be along the first "
    "or the second dimension of these inputs"
)


@dataclass
class LoaderPass:
    """Counts of one pass over the loader so far.

    Args:
        start: Counts of the run when the pass began: samples in forward passes; samples that full training would have had in
            forward and in backward passes by then; and steps.
        evaluated: Number of calls of `run.model` without gradients before the pass over the loader began.
        at_batch: Two counts before the latest batch: samples in forward passes, and those among them that a backward pass
            reached.
        size: Number of samples of the latest batch.
        in_parts: Whether the loop put only a part of a batch through the model.
        yielded: Number of samples that the loader yielded.
        beside: Rows in forward passes that were not of the batch, such as unlabeled ones.
        reached_beside: Those that a backward pass reached.
        more_forward: Samples added to the forward count of full training, because the loop passes samples through the model
            more than once.
        more_backward: Samples added to its backward count for the same reason.
    """

    start: tuple[int, int, int, int]
    evaluated: int
    at_batch: tuple[int, int]
    size: int = 1
    in_parts: bool = False
    yielded: int = 0
    beside: int = 0
    reached_beside: int = 0
    more_forward: int = 0
    more_backward: int = 0


class Meter:
    """Counts the samples of the forward and backward passes of the training.

    A forward pass of `run.model` is counted when it runs. Other forward passes are counted when a loss of their outputs is
    recorded. A loss belongs to a new forward pass if its outputs were computed after all earlier losses.

    Args:
        cost: Counters of the run, to which this class adds.
        parameters: Function that returns the parameters of `run.model`. Default: attach got no model.
    """

    def __init__(
        self, cost: Cost, parameters: Callable[[], Iterable[Tensor]] | None = None
    ) -> None:
        self.cost = cost
        self.passes = ForwardPasses(parameters, self._forgotten)
        """The latest forward passes."""
        self.reached = 0
        """Number of samples in forward passes that a backward pass reached, even if it ran on a part of their rows."""
        self.backwards = 0
        """Number of backward passes, counted once per forward pass that they reached."""
        self.reached_passes: list[ForwardPass] = []
        """Forward passes that a backward pass reached since the last step; empty if no steps are seen."""
        self.pending: PendingGradients | None = None
        """Notices cleared gradients; None if attach got no optimizer, so that no steps are seen."""
        self.subset_backwards = self.whole_backwards = 0
        """Numbers of backward passes of `subset_backward`, and of those among them that ran on all rows."""
        self.same_steps = False
        """Whether the plan of the epoch makes as many steps as full training, each with fewer samples."""
        self.evaluated = 0
        """Number of calls of `run.model` without gradients."""
        self.elsewhere = 0
        """Number of samples whose forward pass was not made by `run.model`."""
        self.credited = 0
        """Number of batches with a loss."""
        self._shares = 0.0
        self._fresh: list[tuple[ForwardPass, Tensor]] = []
        self.restart()

    def restart(self) -> None:
        """Keeps the counters and forgets the forward passes, because training continues from another point."""
        self.passes.clear()
        self._unknown = self.cost.unknown
        self._begin_window()

    def next_batch(self, n: int) -> None:
        """Notes that the loader yields a batch of n samples."""
        self._judge_rows()
        self._counts.yielded += n
        self._counts.size = n

    def _judge_rows(self) -> None:
        """Notes whether the loop put only a part of the latest batch through the model."""
        # Micro-batches add up to the whole batch, and a skipped batch adds nothing: only a remainder shows a part.
        counts = self._counts
        now = (self.of_loop() - counts.beside, self.reached - counts.reached_beside)
        if (now[0] - counts.at_batch[0]) % counts.size or (
            now[1] - counts.at_batch[1]
        ) % counts.size:
            counts.in_parts = True
        counts.at_batch = now

    def begin_pass(self) -> None:
        """Begins the counts of a pass over the loader, because each plan may keep another share of the samples."""
        self._judge_rows()
        self.settle()
        # `settle` decides anew in each call, for this pass alone. Its last decision must outlast the pass.
        if self.cost.unknown == PARTS:
            self.make_unknown(PARTS)
        self._begin_window()

    def _begin_window(self) -> None:
        cost = self.cost
        passed = self.of_loop()
        self.reached = 0
        self._counts = LoaderPass(
            (passed, cost.full_forward, cost.full_backward, cost.steps), self.evaluated, (passed, 0)
        )

    # Counts from calls of the model

    def passed(
        self,
        outputs: Any,
        rows: Rows | None,
        first: int,
        shapes: Sequence[Sequence[int]] = (),
        *,
        is_whole: bool = False,
        evaluates: bool = False,
    ) -> None:
        """Counts a forward pass of `run.model`.

        Args:
            outputs: Outputs of the model.
            rows: Samples of the inputs; None if the inputs do not show them.
            first: Value of `next_node` before the pass.
            shapes: First two dimensions of the inputs, if these do not show the number of samples.
            is_whole: Whether the samples of all tensors among the inputs are known.
            evaluates: Whether the model is in evaluation mode and its inputs are not a batch: the pass is validation with
                gradients enabled, and no cost of training, unless a loss of its outputs shows otherwise.
        """
        forward_pass = self.passes.subset
        self.passes.subset = None
        if evaluates and forward_pass is not None:
            return
        if forward_pass is None:
            forward_pass = ForwardPass(self, first, None if rows is None else rows.n)
            forward_pass.named = forward_pass.named or evaluates
            forward_pass.shapes = shapes
            self.passes.add(forward_pass)
            forward_pass.watch(outputs)
        else:
            # `subset_backward` registered this pass when it began. Now its inputs and its whole span of nodes are known;
            # the span may enclose passes that were added since, so that the search by number must not stop early.
            forward_pass.first = first
            forward_pass.last = next_node()
            self.passes.in_order = self.passes.in_order and self.passes.latest[-1:] == [
                forward_pass
            ]
            forward_pass.n = forward_pass.rows if rows is None else rows.n
            forward_pass.named = True
        forward_pass.samples = rows if is_whole else None
        forward_pass.batch = forward_pass.inputs_of = None if rows is None else rows.batch.number
        self.cost.forward += forward_pass.n

    def backward_begins(self) -> None:
        """Notes that a backward pass has reached a loss or the outputs of a forward pass."""
        # One backward pass may reach several of them, and has added gradients when it reaches the second one.
        pending = self.pending
        if pending is not None and (task := backward_pass()) != pending.task:
            pending.task = task
            if pending.accumulates or self.backwards != pending.stepped:
                pending.begin_backward(self.backwards)

    def look_at_gradients(self) -> None:
        """Looks whether the gradients of the backward passes since the last step were cleared."""
        if self.pending is not None:
            self.pending.look(self.backwards)

    def step_over(self) -> None:
        """Notes that a step has used the gradients of all backward passes so far."""
        self.reached_passes = []
        if self.pending is not None:
            self.pending.stepped = self.backwards

    def subset_pass(self, rows: int) -> ForwardPass:
        """Registers the forward pass that `subset_backward` makes now, even if the loop calls the model without `run.model`.

        The pass is counted later: by `run.model`, by a loss of its outputs, or by a backward pass, whichever comes first.

        Args:
            rows: Number of rows of the pass.
        """
        # Not counted yet: a call of the model without `run.model` may be for a plot, and not for training.
        self.passes.subset = forward_pass = ForwardPass(
            self, number := next_node(), None, rows=rows
        )
        forward_pass.last = number + 1
        self.passes.add(forward_pass)
        return forward_pass

    def count_shares(self, part: int, rows: int) -> None:
        """Counts `part / rows` samples that went backward, and carries a fraction of a sample over to the next call."""
        # Fractions such as three times 1/3 can add up to just less than 1; without the small term a sample would be counted
        # late.
        whole = int(self._shares + part / rows + 1e-6)
        self._shares += part / rows - whole
        self.cost.backward += whole

    # Counts from losses

    def count(
        self, outputs: Any, origin: ForwardPass | None, new: int | Tensor, layout: RowLayout
    ) -> None:
        """Counts the samples of a loss if `run.model` has not counted their forward pass.

        Args:
            outputs: Outputs that the loss was computed from.
            origin: Forward pass of the outputs; None if unknown.
            new: Number of samples for which no earlier loss of this forward pass was computed; as a tensor of shape () if the
                number is on an accelerator.
            layout: Layout of the rows of the loss as samples.
        """
        self._count_pass(outputs, origin, new, layout)
        # A loss of pairs has two passes, one for each half.
        if any(forward_pass.unnamed for forward_pass in self.passes.latest):
            for forward_pass in self.passes.origins(outputs):
                if forward_pass is not None and forward_pass is not origin and forward_pass.unnamed:
                    self._count_pass(outputs, forward_pass, new, layout)

    def _count_pass(
        self, outputs: Any, origin: ForwardPass | None, new: int | Tensor, layout: RowLayout
    ) -> None:
        if origin is not None and origin.rows:
            origin.name_by_rows()
        if origin is not None and origin.named and origin.n:
            return
        if origin is None:
            # The backward pass of outputs that were cached without gradients, as in GradCache, ends at the cache; a later
            # forward pass counts that of the model. Outputs that lead to a parameter of the model are not cached: the call
            # without gradients was for something else.
            cached = (
                self.evaluated != self._counts.evaluated
                and not self.passes.lead_to_parameters(outputs)
            )
            latest = self.passes.latest
            origin = ForwardPass(self, latest[-1].last if latest else 0, None, by_model=cached)
            if not cached:
                self.passes.add(origin)
        if not origin.by_model:
            origin.watch(outputs)
        samples = self._samples_of_inputs(origin.shapes, new, layout.repeat)
        if samples is not None:
            origin.named = True
            origin.add(samples)
            if isinstance(new, int) and samples > new:
                origin.beside = samples - new
                self._counts.beside += origin.beside
                self._counts.reached_beside += origin.beside * origin.backwards
        elif isinstance(new, int):
            origin.add(new)
        else:
            self._fresh.append((origin, new))

    def _samples_of_inputs(
        self, shapes: Sequence[Sequence[int]], new: int | Tensor, repeat: int | None
    ) -> int | None:
        """Returns the number of samples in the inputs of a forward pass; None if only its losses show it."""
        # The model may also run rows that are not of the batch, such as unlabeled ones: the inputs show their number, the loss
        # does not.
        rows = {shape[0] for shape in shapes if shape}
        if len(rows) != 1 or repeat is None:
            return None
        (leading,) = rows
        if not isinstance(new, int):
            return leading if repeat == 1 else None
        # The loop may have flattened the tokens of the outputs, or of the inputs, too.
        fits = {leading, leading // repeat if leading % repeat == 0 else leading}
        fits = {new} if new in fits else {samples for samples in fits if samples > new}
        hidden = new not in fits and any(new in shape[1:] for shape in shapes)
        if hidden or len(fits) > 1:
            self.make_unknown(SOME_DIMENSION)
        return max(fits, default=None)

    def discard_foreign(self) -> None:
        """Removes the counts of passes that `run.model` did not make, because another model made them."""
        for forward_pass in self.passes.latest:
            if not forward_pass.by_model:
                forward_pass.add(-forward_pass.n)
        self._fresh = [
            (forward_pass, new) for forward_pass, new in self._fresh if forward_pass.by_model
        ]
        self.passes.latest = [
            forward_pass for forward_pass in self.passes.latest if forward_pass.by_model
        ]

    # Totals

    def settle(self) -> None:
        """Adds the counts that were kept on the device, and updates the cost that the same loop would have with full training.

        Each yielded sample stands for a number of samples of full training, which the plan states. A loop that leaves out
        batches, or trains on them twice, is assumed to do the same in full training.
        """
        for forward_pass, new in self._fresh:
            forward_pass.add(int(new))
        self._fresh.clear()
        cost = self.cost
        counts = self._counts
        # Computed anew from the start of the pass: the user may read the cost at any time, and must not change it by reading.
        before, full_forward, full_backward, steps = counts.start
        in_parts = False
        if counts.yielded:
            forward = cost.full_forward - counts.more_forward - full_forward
            backward = cost.full_backward - counts.more_backward - full_backward
            passed = self.of_loop() - before
            # Steps ran and no pass was counted: the passes were not seen. Read as zero passes per sample, this would lower
            # the cost of full training to zero.
            unseen = not passed and (cost.steps > steps or self._unknown is not None)
            passed -= counts.beside
            reached = self.reached - counts.reached_beside
            # Full training has the same rows beside each of its batches.
            steps_of_full = 1.0 if self.same_steps else forward / counts.yielded
            more_forward = more_backward = 0
            if not unseen:
                more_forward = _more(forward, passed, counts.yielded)
                more_forward += round(counts.beside * steps_of_full)
                more_backward = _more(backward, reached, counts.yielded)
                more_backward += round(counts.reached_beside * steps_of_full)
            cost.full_forward += more_forward - counts.more_forward
            cost.full_backward += more_backward - counts.more_backward
            counts.more_forward = more_forward
            counts.more_backward = more_backward
            uncertain = passed % counts.yielded or reached % counts.yielded
            in_parts = bool(
                uncertain
                and counts.in_parts
                and (forward != counts.yielded or backward != counts.yielded)
            )
        uncredited = any(forward_pass.uncredited for forward_pass in self.passes.latest)
        reason = PARTS if in_parts else None
        cost.unknown = self._unknown or (UNCREDITED if uncredited else reason)

    def _forgotten(self, forward_pass: ForwardPass) -> None:
        # `settle` looks at remembered passes only, so this is the last chance to notice.
        if forward_pass.uncredited:
            self.make_unknown(UNCREDITED)

    def make_unknown(self, reason: str) -> None:
        """Declares the cost unknown from now on; the reason is a sentence without its full stop."""
        self.cost.unknown = self._unknown = self._unknown or reason

    def reached_beside(self, rows: int) -> None:
        """Notes that a backward pass reached rows beside the batch."""
        self._counts.reached_beside += rows

    def of_loop(self) -> int:
        """Number of samples in forward passes of the loop, without those of refresh and scoring passes."""
        return self.cost.of_loop


def _more(candidates: int, passed: int, yielded: int) -> int:
    """Returns how many samples to add to `candidates`, so that full training makes `passed / yielded` passes per sample."""
    return round(candidates * (passed / yielded - 1))
