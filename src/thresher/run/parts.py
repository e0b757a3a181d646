"""The parts of a run."""

from dataclasses import dataclass
from typing import Any

from thresher.attribution.accumulator import StepAccumulator
from thresher.attribution.attributor import Attributor
from thresher.attribution.model import TrackedModel
from thresher.cost import Cost
from thresher.loading.loader import SelectedLoader
from thresher.losses.base import Criterion
from thresher.records import Records
from thresher.run.epochs import Epochs
from thresher.run.state import SavedState
from thresher.run.stopwatch import Stopwatch


@dataclass(frozen=True)
class Parts:
    """The parts of a run; each owns one concern.

    Args:
        method: The method, the last one where there are several.
        loader: The user's loader, its order filtered.
        model: The user's model, tracked; None where `attach` was given none.
        criterion: The user's criterion per sample; None where the loop calls `run.reduce` alone.
        epochs: The beginning and the end of epochs, plans, progress and history.
        attributor: Credits losses to samples.
        accumulator: Collects the signals of a step.
        records: Records of every sample.
        cost: Counters of samples and steps.
        stopwatch: Times forward and backward passes.
        state: Saves and loads.
    """

    method: Any
    loader: SelectedLoader
    model: TrackedModel | None
    criterion: Criterion | None
    epochs: Epochs
    attributor: Attributor
    accumulator: StepAccumulator
    records: Records
    cost: Cost
    stopwatch: Stopwatch
    state: SavedState
