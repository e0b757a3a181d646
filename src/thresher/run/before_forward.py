"""How the rows of a batch are chosen before the loop sees the batch."""

import warnings
from typing import Any

import torch
from torch import Tensor

from thresher.attribution.attributor import MeasureLoss
from thresher.attribution.rows import Attribution
from thresher.cost import break_even
from thresher.losses.given import GivenLosses
from thresher.losses.reader import DIVISOR_SHARE
from thresher.passes.scoring import Scoring
from thresher.plans import BatchPlan
from thresher.run.batch_selection import NoSelection, Tools
from thresher.run.batch_stage import BatchStage
from thresher.run.chosen_rows import without_ignored
from thresher.run.divisor import UnevenLabels, part_of_batch


class BeforeForward(NoSelection):
    """A batch method chooses before the loop sees a batch, by a scoring pass or, where it needs no losses, without one.

    Args:
        tools: Parts of the run.
        stage: The batch method at work.
        scoring: How losses are computed.
        fills: Whether chosen rows are filled up to full batches.
    """

    def __init__(self, tools: Tools, stage: BatchStage, scoring: Scoring, *, fills: bool) -> None:
        super().__init__(tools)
        self.stage = self._stage = stage
        self._scoring, self.fills = scoring, fills
        self._known_losses = None if scoring.losses is None else scoring.losses.to(tools.device)
        self._warned = False
        by_rows = tools.by_batch and (fills or not self.sees_labels)
        self._uneven = UnevenLabels(tools.device) if by_rows else None
        if self._uneven is not None and tools.reader.criterion is not None:
            self.measure = self._measure_by_rows

    @property
    def forward_passes(self) -> str | None:
        """Whether there is a pass before the loop's; a method without losses is named by whether batches are filled up."""
        return "twice" if self.fills or self._stage.requires.signals else "once"

    @property
    def scores(self) -> bool:
        """Whether there are scoring passes, and not of another model."""
        return bool(self._stage.requires.signals) and self._known_losses is None and self._scoring.model is None

    @property
    def sees_labels(self) -> bool:
        """Whether a pass over each candidate batch tells how many labels each of its rows has."""
        return bool(self._stage.requires.signals) and self._known_losses is None and self._scoring.every_epochs == 1

    def choose(self, batch: Any, ids: Tensor, epoch: int) -> BatchPlan:
        """Returns the rows of a candidate batch that the loop sees.

        Args:
            batch: The batch, on the device.
            ids: Ids of its rows, shape (n,), int64, on the host.
            epoch: Number of the epoch, 0-based.
        """
        here = ids.to(self._tools.device, non_blocking=True)
        if self._is_inactive(self._stage):
            return self._stage.whole(len(ids), self._tools.device)
        found = self._signals(batch, here, epoch) if self._stage.requires.signals else {}
        shares = found.pop(DIVISOR_SHARE, None)
        plan = self._stage.plan(here, found)
        return part_of_batch(plan, len(ids), shares) if self._tools.by_batch else plan

    def _signals(self, batch: Any, ids: Tensor, epoch: int) -> dict[str, Tensor]:
        """Signals to choose by: given ones, those of an earlier epoch, or those of a scoring pass."""
        if self._known_losses is not None:
            return {"loss": self._known_losses.index_select(0, ids)}
        if epoch % self._scoring.every_epochs:
            self._attributor.write()
            return {name: self._tools.records[name].index_select(0, ids) for name in self._stage.requires.signals}
        return without_ignored(self._tools.passes.score(batch, ids, self._scoring, self._tools.beside(fills=self.fills)))

    def warn_of_labels(self) -> None:
        """Warns once where the losses were divided by a share of rows, and labels should have counted."""
        if self._uneven is not None:
            self._uneven.warn()

    def measuring(self, given: GivenLosses) -> MeasureLoss:
        """Returns the function that averages losses of the loop over all rows, and reads their signals."""
        measure, uneven = super().measuring(given), self._uneven
        if uneven is None:
            return measure

        def noted(outputs: Any, targets: Any, attribution: Attribution, weights: Tensor | None, over_n: Tensor | None) -> Any:
            if (counts := given.counts(attribution.layout)) is not None:
                uneven.note(counts)
            return measure(outputs, targets, attribution, weights, over_n)

        return noted

    def _measure_by_rows(
        self, outputs: Any, targets: Any, attribution: Attribution, weights: Tensor | None, over_n: Tensor | None
    ) -> tuple[Any, ...]:
        criterion, device = self._tools.reader.criterion, self._tools.device
        assert self._uneven is not None
        assert criterion is not None
        self._uneven.note(criterion.shares(torch.empty(attribution.layout.n, 1, device=device), targets))
        return self._tools.reader.measuring()(outputs, targets, attribution, weights, over_n)

    def warn_if_in_vain(self, keep: float) -> None:
        """Warns once where a scoring pass costs more than it saves on this model, as measured."""
        self.warn_of_labels()
        scoring, ratio = self._scoring, self._stopwatch.ratio()
        cheaper = scoring.losses is not None or scoring.model is not None or scoring.dtype or scoring.input_scale != 1
        if not self._stage.requires.signals or cheaper or self._warned or not ratio:
            return
        most = 1 - (1 - break_even(1.0, ratio)) / scoring.every_epochs
        if keep <= most:
            return
        self._warned = True
        warnings.warn(
            f"{type(self._stage.method).__name__} kept {keep:.2f} of the samples, but with two forward passes it saves time on "
            f"this model only below {most:.2f} (a backward pass takes {ratio:.2f} forward passes, measured). Keep less than "
            f"{most:.2f}, use forward_passes='once', or a cheaper scoring=Scoring(...). This is said once.",
            stacklevel=5,
        )
