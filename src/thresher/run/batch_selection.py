"""Base class of the objects that choose the rows of batches. It trains on all rows."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thresher.attribution.attributor import MeasureLoss
from thresher.attribution.rows import Attribution, RowLayout
from thresher.attribution.tracker import LossDimension
from thresher.losses.given import GivenLosses
from thresher.losses.signals import batch_loss
from thresher.methods.contract import title_given, way_around
from thresher.methods.full import FullData
from thresher.records import NEVER_SEEN
from thresher.run.batch_stage import BatchStage, WholeBatches
from thresher.run.parts import Parts


def without_ignored(signals: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns signals with a loss of 0 for samples whose labels are all ignored, so that they do not count as unseen."""
    return {**signals, "loss": torch.where(signals["loss"] == NEVER_SEEN, 0.0, signals["loss"])}


class BatchSelection:
    """How the rows of batches are chosen, as seen by run and loader. This base class trains on all rows.

    Args:
        parts: Parts of the run.
        stage: The batch method with its state.
    """

    fills: bool | None = None
    """Whether the loader fills chosen rows up to full batches; None if it yields the batches as they are."""
    forward_passes: str | None = None
    """Kind of forward pass in use, for the saved state: "once", "twice", or None without a batch method."""
    by_loop = False
    """Whether the losses of the loop's own forward pass choose the rows."""
    fallback: "BatchSelection | None" = None
    """Selection that takes over if the model turns out not to be traceable; None if there is no other."""
    scores = False
    """Whether rows are chosen by losses from extra passes of the trained model."""
    tracing_s = 0.0
    """Seconds of the loop's steps that tracing the model has taken."""
    gives_up: Callable[[], bool] | None = None
    """Function that returns whether `fallback` will take over, because the model could not be traced; None without `fallback`."""

    def __init__(self, parts: Parts, stage: BatchStage | WholeBatches) -> None:
        self._parts = parts
        self.stage = stage
        self._world = parts.config.world
        self.by_chance = stage.by_chance
        """Whether processes keep different numbers of rows of equal batches."""
        # The criterion's own function, without a layer around it, because it is called in every step.
        self.loss: MeasureLoss = parts.reader.measuring()
        """Computes the criterion of the rows that are trained on, and the signals of all."""
        self._dimension = LossDimension()

    def reduced(
        self,
        given: GivenLosses,
        outputs: Any,
        targets: Any,
        attribution: Attribution,
        weights: Tensor | None,
        *_: Any,
    ) -> tuple[Any, ...]:
        """Averages losses that the loop computed itself over the rows that are trained on, and reads the signals of all."""
        # `outputs` is the pair (losses, outputs) that `Run.reduce` passes, by which the samples are found.
        signals = self._signals_of_given_losses(
            given, attribution.layout, outputs[1], targets, self._parts.reader.recorded
        )
        return given.value(attribution.layout, weights), signals

    def _signals_of_given_losses(
        self, given: GivenLosses, layout: RowLayout, outputs: Any, targets: Any, wanted: set[str]
    ) -> dict[str, Tensor]:
        """Returns the signals of samples whose losses the loop computed itself."""
        # Before the means, which would mix samples if these were along the second dimension.
        if not given.by_row:
            self._dimension.check(given.losses, layout.n)
        signals = {"loss": given.means(layout)}
        # Computed here, because the reader does not have the losses.
        if "batch_loss" in wanted:
            signals["batch_loss"] = batch_loss(signals["loss"])
        return signals | self._parts.reader.beside(
            outputs,
            targets,
            layout.n,
            wanted - {"batch_loss"},
            self._explain_missing,
            signals["loss"],
        )

    def _explain_missing(self, wanted: set[str]) -> str:
        config = self._parts.config
        names = ", ".join(sorted(wanted))
        if config.given.observe and isinstance(config.methods[-1], FullData):
            return (
                f"run.reduce: the data map of a classification needs {names}: pass outputs= and targets=. To rank samples by "
                "their losses alone, pass criterion=None to thresher.observe or attach."
            )
        # The batch method stands last; without one, the epoch method needs the signals.
        method = config.methods[-1]
        return (
            f"run.reduce: {title_given(method)} needs {names}: pass outputs= and targets=, or "
            f"attach(signals=...){way_around(method, *sorted(wanted))}"
        )

    def watch(self, value: Tensor) -> None:
        """Times the backward pass of a loss of the loop."""
        self._parts.stopwatch.watch(value)

    def at_epoch_start(self, *, can_score: bool) -> "BatchSelection":
        """Returns the selection for the new epoch: `self`, or one that scores before each step if the model cannot be traced.

        Args:
            can_score: Whether a comparison has shown that forward passes of the run give the losses of the loop; False until
                then.
        """
        return self

    def step_over(self) -> None:
        """Forgets the choices of the optimizer step that is over."""

    def batch_yielded(self, number: int) -> None:
        """Forgets the choices of batches long before this one."""

    def warn_if_in_vain(self, keep: float, batches: int) -> None:
        """Warns once if choosing saves nothing.

        Args:
            keep: Share of the rows that the method chose in the last epoch, in the batches in which it chose.
            batches: Number of these batches.
        """
