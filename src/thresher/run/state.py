"""What a run saves, and how it goes on from there."""

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from thresher import rng
from thresher.attribution.accumulator import TRAINED, StepAccumulator
from thresher.attribution.attributor import Attributor
from thresher.cost import Cost
from thresher.loading.loader import SelectedLoader
from thresher.methods import name_of
from thresher.records import Records
from thresher.run.epochs import Epochs
from thresher.run.resharding import Resharding
from thresher.run.saved_form import SavedForm
from thresher.run.state_checks import (
    MAY_LACK,
    PLAN,
    check_form,
    check_generators,
    check_position,
    check_shuffle,
    fields_of,
    fields_of_process,
    or_none,
    refuse,
    sequence,
    table,
)
from thresher.run.stopwatch import Stopwatch


@dataclass(frozen=True)
class SavedState:
    """Saves and loads a run, as one flat mapping of tensors and plain values.

    Args:
        methods: Methods of the run, in the order of their stages.
        settings: Text of what was chosen for the run and can be changed between saving and loading; a warning says so.
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
    settings: str
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
        self.records.shard.world.meet("run.state_dict()")
        position = self.epochs.state_dict()
        self.accumulator.settle()
        self.stopwatch.update(self.cost)
        own = {
            "method": self._name(),
            "settings": self.settings,
            "n": self.loader.n,
            **position,
            **self.loader.state_dict(),
            "cost": asdict(self.cost),
            "rng": rng.capture(self.device, self.loader.generators()),
        }
        trained = self.accumulator.count_trained()
        by_id = {"records": self.records.state_dict(), "trained": self.accumulator.counts.state_dict().get(TRAINED, trained)}
        is_fresh = not (position["active"] or position["epoch"])
        return SavedForm(self.records.shard).made(own, by_id, self.kept, is_fresh=is_fresh)

    def load(self, state: Mapping[str, Any], *, restore_rng: bool) -> None:
        """Goes on where a saved run stopped.

        Args:
            state: Result of `save`, of any number of processes.
            restore_rng: Whether random states are put back.

        Raises:
            TypeError: The state is no mapping.
            ValueError: The state is damaged, or belongs to another method, loader, number of samples or version; nothing was
                changed.
        """
        check_form(state)
        state = self._of_this_process(state)
        self._check(state, restore_rng=restore_rng)
        state |= {"waiting": _on_host(state["waiting"])}
        self.accumulator.end_step()
        self.accumulator.settle()
        self.records.load_state_dict(state["records"])
        vars(self.cost).update(state["cost"])
        self.accumulator.meter.restart()
        self.accumulator.count_trained()
        self.accumulator.counts.load_state_dict({TRAINED: state["trained"]})
        self.epochs.load_state_dict(state)
        self.loader.load_state_dict(state)
        self.attributor.forget_batches()
        if restore_rng:
            rng.restore(state["rng"], self.device, self.loader.generators())

    def _of_this_process(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what this process goes on with, of the state of this or another number of processes."""
        shard, ranks = self.records.shard, state["ranks"]
        form = SavedForm(shard)
        self._check_kind({**ranks[0], "kept": state["kept"], "records": state["records"]})
        plan = form.plan(state)
        if len(ranks) == shard.world.size:
            own = ranks[shard.world.rank]
        else:
            check = table(fields_of_process(self.loader, self.epochs.selection.stage), may_lack=MAY_LACK)
            sequence(check)("state.ranks", ranks)
            or_none(PLAN)("state.plan", plan)
            own = Resharding(ranks, plan, shard.world, self.loader).state()
        return form.joined(state, own, plan)

    def _name(self) -> str:
        return "+".join(name_of(method) for method in self.methods)

    def _check(self, state: Mapping[str, Any], *, restore_rng: bool) -> None:
        stage = self.epochs.selection.stage
        try:
            fields_of(self.loader, stage, self.accumulator.count_trained(), self.records)("state", state)
        except ValueError as error:
            if state.get("settings", self.settings) == self.settings:
                raise
            said = f"{error} The state was saved with {state['settings']}, this run has {self.settings}."
            raise ValueError(said) from None
        passes = self.epochs.selection.forward_passes
        if state["passes"] != passes and not (self.epochs.may_switch and state["passes"] in ("once", "twice")):
            raise ValueError(f"load_state_dict: the state is of forward_passes={state['passes']!r}, this run has {passes!r}")
        check_position(state, self.loader, stage, state["passes"], self.records.shard)
        check_shuffle(state, self.loader)
        check_generators(state, self.loader, self.device, restored=restore_rng)
        for what, saved, own in (
            ("", state["settings"], self.settings),
            ("epochs=", state["epochs"], self.epochs.settings.epochs),
        ):
            if saved != own:
                warnings.warn(
                    f"load_state_dict: the state was saved with {what}{saved}, this run has {what}{own}", stacklevel=4
                )
        if not state.get("ran_out", True):
            warnings.warn(
                f"load_state_dict: the state was saved after the last batch of epoch {state['epoch'] - 1}, when the loop had "
                "not asked run.loader for a further batch: it had left by break, return, zip or islice, or it counts its calls "
                f"of next. The run goes on with epoch {state['epoch']}. If code of your loop that follows the last batch, such "
                "as scheduler.step(), had not run when the state was saved, run it now. A state that is saved after run.loader "
                "has been iterated to its end gives no such warning.",
                stacklevel=4,
            )

        if not state["active"] and state["history"][-1:] and not state["history"][-1]["complete"]:
            warnings.warn(
                f"load_state_dict: the state was saved after the loop had left epoch {state['epoch'] - 1} before its last "
                f"batch, by break or return. The run goes on with epoch {state['epoch']}, as the loop would have done. To go on "
                "within the epoch, save the state inside the loop, before break or return.",
                stacklevel=4,
            )

    def _check_kind(self, state: Mapping[str, Any]) -> None:
        """Refuses a state of another run, which is no damage."""
        if (method := state.get("method", self._name())) != self._name():
            raise ValueError(f"load_state_dict: the state is of method {method!r}, this run has {self._name()!r}")
        if (n := state.get("n", self.loader.n)) != self.loader.n:
            raise ValueError(f"load_state_dict: the state is of {n} samples, this run has {self.loader.n}")
        kept, given = self.kept, state.get("kept")
        if kept is not None and isinstance(given, Tensor) and not torch.equal(kept, given.cpu()):
            raise ValueError(
                f"load_state_dict: the state keeps {len(given)} samples, this run {len(kept)} others: the scores that pruning "
                "goes by have changed; use the file or the scores of the interrupted run"
            )
        if "kept" in state and (kept is None) != (given is None):
            refuse("kept", "None, since nothing was pruned" if kept is None else "the ids that pruning left", given)
        records = state.get("records")
        if isinstance(records, Mapping) and set(records) != set(self.records):
            raise ValueError(
                f"load_state_dict: the state has columns {sorted(map(str, records))}, this run {sorted(self.records)}"
            )


def _on_host(tensors: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The tensors of a mapping on the host, where they were when it was saved, wherever torch.load has put them."""
    if tensors is None:
        return None
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in tensors.items()}
