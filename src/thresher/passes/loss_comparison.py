"""Compares, in the first steps, the losses of the run's own forward passes with those of the loop."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thresher.attribution.accumulator import Entry, StepAccumulator
from thresher.attribution.rows import AttributionError
from thresher.comparing import same_losses
from thresher.passes.extra_passes import Beginning, ExtraPasses
from thresher.torch_internals import next_node
from thresher.warning import warn

TIMES = 2
"""Number of epochs in which a batch to compare is searched for."""
PATIENCE = 64
"""Number of batches and forward passes of an epoch after which the search gives up."""
HELD = 3
"""Number of batches held for a comparison: the first one, for a deep prefetcher, and the latest ones."""
PASSES = 4
"""Number of forward passes whose beginning is remembered."""


class Comparison:
    """Repeats a forward pass of the loop as an extra pass, with the same random numbers, and compares the losses.

    The extra pass runs when the loop's backward pass begins. The parameters are then still those of the loop's forward pass,
    and the loop no longer needs any state that the modules kept from it. The losses are compared before the next batch is
    yielded.

    Args:
        passes: Makes the extra passes.
        accumulator: Holds the losses of the loop.
    """

    def __init__(self, passes: ExtraPasses, accumulator: StepAccumulator) -> None:
        self._passes = passes
        self._accumulator = accumulator
        self.pending = False
        """Whether a batch to compare is searched for."""
        self._times = TIMES
        self._left = 0
        self._held: dict[int, Any] = {}
        self._began: dict[int, Beginning] = {}
        self._entry: Entry | None = None
        self._end = 0
        self._repeated: Tensor | None = None
        self._full_precision = self._rows_apart = True
        self._use: str | None = None
        self._trial: Callable[[], bool] | None = None
        self.can_choose = False
        """Whether a comparison has shown that forward passes of the run give the losses of the loop, for chosen rows as well.
        """

    def begin_epoch(self, use: str | None, *, trial: Callable[[], bool] | None = None) -> None:
        """Starts the search for a batch to compare, if the run uses losses of extra passes, now or perhaps later.

        Args:
            use: How the run uses the losses of its extra passes, for the message. None: the run does not use them.
            trial: Function that returns, once losses are recorded, whether the run will use them later. None: it will not.
        """
        self._stop()
        self._trial = trial if use is None else None
        self._use = use
        replayed = self._passes.device.type in (
            "cpu",
            "cuda",
        )  # random states of other devices cannot be put back
        if (
            (use is not None or self._trial is not None)
            and self._times
            and not self._passes.have_compared
            and self._passes.possible
            and self._passes.repeatable
            and replayed
        ):
            self.pending = True
            self._left = PATIENCE
            # This ends with the search, because each beginning copies buffers and attributes of the model.
            self._passes.watch_forward(self._forward_begins)

    def _stop(self) -> None:
        if self.pending:
            self._passes.watch_forward(None)
        self.pending = False
        self._entry = None
        self._repeated = None
        self._held = {}
        self._began = {}

    def _keep_searching(self) -> bool:
        """Counts an attempt, and returns whether the search goes on: it ends after `PATIENCE` attempts."""
        self._left -= 1
        if self._left < 0:
            # A loop that offers no batch in one epoch will hardly do so in the next: the search must not go on forever.
            self._times -= 1
            self._stop()
        return self.pending

    def yielded(self, number: int, batch: Any) -> None:
        """Notes a batch that is about to be yielded. Call it after `compare`.

        Args:
            number: Number of the batch.
            batch: The batch, on the device.
        """
        if self._keep_searching():
            # Versions show later whether the loop has written into the batch: extra passes get it as yielded.
            self._held[number] = batch, self._passes.versions(batch)
            if len(self._held) > HELD:
                # The first one stays: a deep prefetcher takes many batches before the loop trains on that one.
                del self._held[list(self._held)[1]]

    def _forward_begins(self, autocast: torch.dtype | None) -> None:
        if self._keep_searching():
            if len(self._began) == PASSES:
                del self._began[min(self._began)]
            # The number of the next autograd node shows later from which of several forward passes the outputs of a loss are.
            self._began[next_node()] = self._passes.beginning(autocast)

    def credited(self, value: Tensor, outputs: Any) -> None:
        """Notes a loss of the loop, and repeats its forward pass when its backward pass begins.

        Args:
            value: The scalar for the loop.
            outputs: Outputs of the loss.
        """
        if self._trial is not None and not self._trial():
            self._stop()
            return
        # An extra pass computes one loss per row, in the order of the batch, so only a loss of all rows can be compared.
        whole = [entry for entry in self._accumulator.open if self._is_whole(entry)]
        if self._entry in whole and self._entry is not None:
            if self._entry.end == self._end:
                return
        elif self._repeated is not None:  # the step of that batch is over
            self.compare()
            return
        elif whole:
            self._entry = whole[-1]
        else:
            return
        entry = self._entry
        self._end = entry.end
        self._repeated = None
        end = entry.end
        origin = self._accumulator.meter.passes.origin(outputs)
        # The state at the beginning of the pass that made these outputs: one step may have several passes.
        beginning = None if origin is None else self._began.get(origin.first)
        assert entry.attribution.batch is not None
        batch, versions = self._held[entry.attribution.batch.number]
        if self._passes.versions(batch) != versions:
            self._cannot_compare()
            return

        def backward_begins(_: Tensor) -> None:
            # Looked at once more: the loop may write its batch between the loss and the backward pass.
            same = self._entry is entry and self._end == end and self._repeated is None
            if same and self._passes.versions(batch) == versions:
                self._repeat(batch, entry.attribution.layout.n, beginning)

        # The hook of the scalar is the first to run in its backward pass, so no parameter has been stepped yet.
        if value.requires_grad:
            value.register_hook(backward_begins)

    def _cannot_compare(self) -> None:
        """Ends the comparison: the loop changed its batch in place, while extra passes get the unchanged batch."""
        self._times = 0
        self._stop()
        # A `forward` of the user's does what the loop does with the batch. Nothing depends on the trial yet, so do not warn.
        if self._trial is None and self._passes.is_plain:
            warn(
                "The loop changes its batches in place before it computes a loss, but the run's own forward passes get the "
                f"unchanged batches. {self._use} Change a copy of the batch, so that the losses of the loop and the run can be "
                "compared, or pass attach(forward=lambda model, batch: (outputs, targets)) that does the same as the loop. If "
                "the loop mixes samples, as mixup does, a difference is expected. This warning is given once."
            )

    def _is_whole(self, entry: Entry) -> bool:
        attribution = entry.attribution
        batch = attribution.batch
        return (
            batch is not None
            and batch.number in self._held
            and attribution.key == (batch.number, 0, 1, len(batch.ids))
        )

    def _repeat(self, batch: Any, n: int, beginning: Beginning | None) -> None:
        try:
            repeated = self._passes.repeat(batch, n, beginning)
        except (AttributionError, ValueError):
            # What a run may do later must not end a training that goes well without it.
            if self._trial is None:
                raise
            self._stop()
            return
        # The extra pass needs memory in the middle of a step, which a loop that fills its device does not have.
        except torch.OutOfMemoryError:
            self._stop()
            warn(
                "There was not enough memory to compare the losses of the run's own forward passes with the losses of the "
                "loop. Training continues without this comparison."
            )
            return
        if repeated is None:  # random losses: those of other batches would be, too
            self._stop()
            return
        self._repeated, self._full_precision = repeated
        self._rows_apart = self._passes.can_choose(batch, n)

    def compare(self) -> None:
        """Compares the losses of a batch that were computed in both ways, and warns if they differ."""
        entry = self._entry
        repeated = self._repeated
        self._entry = self._repeated = None
        if entry is None or repeated is None or entry.key is None or entry.end != self._end:
            return
        entry.add_up(final=False)
        signals = entry.signals if isinstance(entry.signals, dict) else entry.signals.now()
        loss = signals["loss"].to(repeated.dtype)
        same = same_losses(repeated, loss, full_precision=self._full_precision, atol=(1e-4, 1e-2))
        different = int((~same).sum())
        # After a difference there is nothing left to find out. State is settled before the warning, which a filter may raise.
        trial = self._trial is not None
        self._times = 0
        self._stop()
        if trial:
            self.can_choose = self._rows_apart and not different
        elif different:
            largest = float((repeated - loss).abs()[~same].max())
            warn(
                "The losses that the run computes in its own forward passes differ from the losses of the loop: in one batch "
                f"they differ for {different} of {len(repeated)} samples, by up to {largest:.3g}. {self._use} In its own "
                f"passes, the run calls {self._passes.call} and gives the result to the criterion. If the loop does more than "
                "that (it normalizes inputs, scales outputs or has a part of the network outside of run.model), pass "
                "attach(forward=lambda model, batch: (outputs, targets)) that does the same and returns what the criterion "
                "gets. If the loop adds up several losses of a sample, let one criterion compute them all from (outputs, "
                "targets). If the loop draws random numbers between run.loader and run.model, as for noise or augmentation, a "
                "difference is expected. This warning is given once."
            )
