"""What a run saves, and how it goes on from there."""

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from thresher import rng
from thresher.attribution.accumulator import StepAccumulator
from thresher.attribution.attributor import Attributor
from thresher.cost import Cost
from thresher.loading.loader import SelectedLoader
from thresher.methods import name_of
from thresher.records import Records
from thresher.run.epochs import Epochs
from thresher.run.stopwatch import Stopwatch

VERSION = 3


@dataclass(frozen=True)
class SavedState:
    """Saves and loads a run, as one flat mapping of tensors and plain values.

    Args:
        methods: Methods of the run, in the order of their stages.
        kept: Ids that pruning left, shape (K,), int64; None where there was no pruning.
        loader: Loader of the run.
        epochs: Epochs of the run.
        attributor: Attributor of the run.
        accumulator: Accumulator of the run.
        records: Records of the run.
        cost: Cost of the run.
        stopwatch: Stopwatch of the run.
        device: Device of the records, where the loop draws random numbers.
    """

    methods: list[Any]
    kept: Tensor | None
    loader: SelectedLoader
    epochs: Epochs
    attributor: Attributor
    accumulator: StepAccumulator
    records: Records
    cost: Cost
    stopwatch: Stopwatch
    device: torch.device

    def save(self) -> dict[str, Any]:
        """Returns everything that the run remembers."""
        position = self.epochs.state_dict()
        self.accumulator.settle()
        self.stopwatch.update(self.cost)
        return {
            "version": VERSION,
            "method": self._name(),
            "settings": self._settings(),
            "n": self.loader.n,
            "kept": self.kept,
            **position,
            **self.loader.state_dict(),
            "trained": self.accumulator.count_trained().clone(),
            "records": self.records.state_dict(),
            "cost": asdict(self.cost),
            "rng": rng.capture(self.device, self.loader.generators()),
        }

    def load(self, state: Mapping[str, Any], *, restore_rng: bool) -> None:
        """Goes on where a saved run stopped.

        Raises:
            ValueError: The state belongs to another method, number of samples, or version; nothing was changed.
        """
        self._check(state)
        self.accumulator.end_step()
        self.accumulator.settle()
        self.records.load_state_dict(state["records"])
        vars(self.cost).update(state["cost"])
        self.accumulator.meter.restart()
        self.accumulator.count_trained().copy_(state["trained"])
        self.epochs.load_state_dict(state)
        self.loader.load_state_dict(state)
        self.attributor.forget_batches()
        if restore_rng:
            rng.restore(state["rng"], self.device, self.loader.generators())

    def _name(self) -> str:
        return "+".join(name_of(method) for method in self.methods)

    def _settings(self) -> str:
        return " ".join(repr(method) for method in self.methods)

    def _check(self, state: Mapping[str, Any]) -> None:
        if state.get("version") != VERSION:
            raise ValueError(f"load_state_dict: the state has version {state.get('version')}, this is version {VERSION}")
        if state["method"] != self._name():
            raise ValueError(f"load_state_dict: the state is of method {state['method']!r}, this run has {self._name()!r}")
        if state["n"] != self.loader.n:
            raise ValueError(f"load_state_dict: the state is of {state['n']} samples, this run has {self.loader.n}")
        kept, given = self.kept, state["kept"]
        if kept is not None and not torch.equal(kept, given):
            raise ValueError(
                f"load_state_dict: the state keeps {len(given)} samples, this run {len(kept)} others: the scores that pruning "
                "goes by have changed; use the file or the scores of the interrupted run"
            )
        columns = set(state["records"])
        if columns != set(self.records):
            raise ValueError(f"load_state_dict: the state has columns {sorted(columns)}, this run {sorted(self.records)}")
        passes = self.epochs.selection.forward_passes
        if state["passes"] != passes and not self.epochs.may_switch:
            raise ValueError(f"load_state_dict: the state is of forward_passes={state['passes']!r}, this run has {passes!r}")
        if state["settings"] != self._settings():
            warnings.warn(
                f"load_state_dict: the state was saved with {state['settings']}, this run has {self._settings()}", stacklevel=4
            )
