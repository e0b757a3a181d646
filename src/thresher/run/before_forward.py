"""Chooses the rows of a batch before the loop sees it: `forward_passes="twice"`, and methods without signals."""

from typing import Any

import torch
from torch import Tensor

from thresher.attribution.rows import Attribution, RowLayout
from thresher.cost import break_even
from thresher.losses.given import GivenLosses
from thresher.methods.contract import title_given
from thresher.passes.scoring_settings import Scoring
from thresher.plans import BatchPlan
from thresher.run.batch_selection import BatchSelection, without_ignored
from thresher.run.batch_stage import BatchStage
from thresher.run.divisor import UnevenLabels, part_of_batch
from thresher.run.parts import Parts
from thresher.warning import warn


class BeforeForward(BatchSelection):
    """A batch method chooses before the loop sees a batch, by a scoring pass or, if it needs no losses, without one.

    Args:
        parts: Parts of the run.
        stage: The batch method with its state.
        scoring: Settings of the scoring pass.
        fills: Whether chosen rows of several batches are gathered into full batches.
    """

    def __init__(self, parts: Parts, stage: BatchStage, scoring: Scoring, *, fills: bool) -> None:
        super().__init__(parts, stage)
        self._stage = stage
        self._scoring = scoring
        self.fills = fills
        self.forward_passes = "twice" if fills else "once"
        if scoring.losses is None:
            self._known_losses = None
        else:
            self._known_losses = scoring.losses.to(parts.device)
        # Losses from the user or another model are not compared with those of the loop: they are meant to differ.
        self.scores = (
            bool(stage.requires.signals) and scoring.losses is None and scoring.model is None
        )
        self._warned = False
        self._loss_of_rows = self.loss
        self._uneven = UnevenLabels(parts.device) if parts.config.by_batch else None
        if self._uneven is not None and parts.reader.criterion is not None:
            self.loss = self._loss_by_rows

    def choose(self, batch: Any, ids: Tensor, epoch: int) -> BatchPlan:
        """Chooses which rows of a batch the loop gets, and returns them as a plan.

        Args:
            batch: The batch, on the device.
            ids: Ids of its rows, shape (n,), int64, on the host.
            epoch: Number of the epoch, 0-based.
        """
        if self._stage.keeps_all:
            return self._stage.whole(len(ids), ids.device)
        # A method without signals chooses on the host, where the loader needs the rows: nothing waits for the device then.
        signals: dict[str, Tensor] = {}
        if self._stage.requires.signals:
            ids = ids.to(self._parts.device, non_blocking=True)
            signals = self._signals(batch, ids, epoch)
        plan = self._stage.plan(ids, signals)
        if self._parts.config.by_batch:
            return part_of_batch(plan, len(ids))
        return plan

    def _signals(self, batch: Any, ids: Tensor, epoch: int) -> dict[str, Tensor]:
        """Returns the signals to choose by: losses from the user, signals of an earlier epoch, or those of a scoring pass."""
        if self._known_losses is not None:
            return {"loss": self._known_losses.index_select(0, ids)}
        # Losses of this step may still wait in the accumulator, and stale ones are read from the records.
        if epoch % self._scoring.every_epochs:
            self._parts.attributor.write()
            return {
                name: self._parts.records[name].index_select(0, ids)
                for name in self._stage.requires.signals
            }
        return without_ignored(self._parts.passes.score(batch, ids, self._scoring))

    def _signals_of_given_losses(
        self, given: GivenLosses, layout: RowLayout, outputs: Any, targets: Any, wanted: set[str]
    ) -> dict[str, Tensor]:
        if self._uneven is not None and (counts := given.counts(layout)) is not None:
            self._uneven.note(counts)
        return super()._signals_of_given_losses(given, layout, outputs, targets, wanted)

    def _loss_by_rows(
        self, outputs: Any, targets: Any, attribution: Attribution, *weights: Any
    ) -> tuple[Any, ...]:
        criterion = self._parts.reader.criterion
        device = self._parts.device
        assert self._uneven is not None
        assert criterion is not None
        # `shares` reads only shape, dtype and device of its first argument.
        like_losses = torch.empty(attribution.layout.n, 1, dtype=torch.float32, device=device)
        self._uneven.note(criterion.shares(like_losses, targets))
        return self._loss_of_rows(outputs, targets, attribution, *weights)

    def warn_if_in_vain(self, keep: float, batches: int) -> None:
        """Warns once if a scoring pass costs more than it saves on this model, as measured."""
        if self._uneven is not None:
            self._uneven.warn()
        scoring = self._scoring
        ratio = self._parts.stopwatch.ratio()
        # The measured ratio is that of a full pass of the model, and says nothing about a cheaper one.
        cheaper = (
            scoring.losses is not None
            or scoring.model is not None
            or scoring.dtype
            or scoring.input_scale != 1
        )
        if not self._stage.requires.signals or cheaper or self._warned or not (ratio and batches):
            return
        # Losses of an earlier epoch spread the cost of a scoring pass over several epochs.
        most = 1 - (1 - break_even(1.0, ratio)) / scoring.every_epochs
        if keep <= most:
            return
        self._warned = True
        warn(
            f"{title_given(self._stage.method)} kept {keep:.2f} of the samples, but with two forward passes it saves time on "
            f"this model only below {most:.2f} (a backward pass takes {ratio:.2f} forward passes, measured). Keep less than "
            f"{most:.2f}, use forward_passes='once', or a cheaper forward_passes=Scoring(...). This warning is given once."
        )
