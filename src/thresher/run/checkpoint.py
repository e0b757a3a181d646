"""What a run saves, the checks of a saved state, and how a run resumes from it.

The state of process 0 has the values stored for each sample. Their names, number and sizes do not depend on the number of
processes, as `torch.distributed.checkpoint` requires. Everything else is in tuples, which it saves and loads as objects.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from thresher import rng
from thresher.attribution.accumulator import TRAINED
from thresher.distributed.world import World, agree
from thresher.loading.composed_order import ComposedOrder
from thresher.loading.epoch import BETWEEN_BATCHES
from thresher.loading.loader import SelectedLoader
from thresher.loading.order import none_if_unknown
from thresher.loading.packed_plan import PackedPlan
from thresher.methods import name_of
from thresher.run.batch_stage import BatchStage, WholeBatches
from thresher.run.parts import Parts
from thresher.run.timeline import Timeline
from thresher.warning import warn

VERSION = 12
"""Version of the format of a saved state."""

FIELDS = ("version", "digest", "ranks")
"""Names of the entries in the state of each process."""
BOOKS = ("kept", "records", "trained", "plan")
"""Names of further entries, which only the state of process 0 has."""


def refuse(what: str) -> NoReturn:
    """Raises the error for a damaged state.

    Args:
        what: Defect of the state.

    Raises:
        ValueError: Always.
    """
    raise ValueError(
        f"load_state_dict: {what}. The state is damaged, or was changed after run.state_dict() returned it. Nothing was "
        "loaded. Load another checkpoint."
    )


def check_form(state: Any) -> None:
    """Checks the version of a state, and that everything except the values stored for each sample is as it was saved.

    Args:
        state: Argument of `load_state_dict`.

    Raises:
        TypeError: The state is not a mapping.
        ValueError: The state has another version, lacks a part, or was changed.
    """
    if not isinstance(state, Mapping):
        raise TypeError(
            f"load_state_dict: `state` must come from run.state_dict(), got {type(state).__name__}"
        )
    if state.get("version") != VERSION:
        raise ValueError(
            f"load_state_dict: the state has version {state.get('version')}, but this is version {VERSION}. Nothing was "
            "loaded. Load it with the version of thresher that saved it, or start training again."
        )
    # Only the state of process 0 has the entries of `BOOKS`.
    needed = (*FIELDS, *BOOKS) if any(name in state for name in BOOKS) else FIELDS
    missing = [name for name in needed if name not in state]
    unknown = [name for name in state if name not in FIELDS + BOOKS]
    if missing or unknown:
        refuse(
            f"`state` lacks {missing}"
            if missing
            else f"`state` has {unknown}, which this version does not know"
        )
    if state["digest"] != digest_of(state["ranks"]):
        refuse("`state` does not match its digest")


def digest_of(*values: Any) -> str:
    """Returns a digest of tensors and plain values; it does not depend on devices, and is the same for lists and tuples.

    Args:
        values: Tensors, plain values, and mappings and lists of them.

    Example:
        >>> digest_of({"a": 1}, (torch.ones(2),)) == digest_of({"a": 1}, [torch.ones(2)])
        True
    """
    digest = hashlib.blake2b(digest_size=16)

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            # Bytes alone would not tell a tensor from its view in another shape or dtype.
            digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
            # NumPy has no bfloat16.
            bits = value.view(torch.int16) if value.dtype is torch.bfloat16 else value
            digest.update(np.ascontiguousarray(bits.detach().cpu().numpy()).data)
        elif isinstance(value, Mapping):
            # By name, because a mapping that was saved and loaded may have its items in another order.
            add(
                sorted(value.items())
                if all(isinstance(name, str) for name in value)
                else list(value.items())
            )
        elif isinstance(value, list | tuple):
            # Brackets tell ([1], 2) from ([1, 2],).
            digest.update(b"[")
            for part in value:
                add(part)
            digest.update(b"]")
        else:
            digest.update(f"{value!r},".encode())

    add(values)
    return digest.hexdigest()


def check_batch_stage(state: Mapping[str, Any], stage: BatchStage | WholeBatches) -> None:
    """Checks that the saved state of a batch method has the same tensors, by shape and dtype, as in this run.

    Args:
        state: Saved state, already checked for damage.
        stage: Batch method with its state.

    Raises:
        ValueError: A tensor differs, because the saved method had other settings.
    """
    # The first state has the shapes of the settings, such as one value per base method.
    expected = stage.init_state()
    saved = {} if state["batch_stage"] is None else state["batch_stage"]["state"]
    for name in {**expected, **saved}:
        if not _fits(saved.get(name), expected.get(name)):
            raise ValueError(
                f"load_state_dict: the saved method has `{name}` as {_describe(saved.get(name))}, but this run has "
                f"{_describe(expected.get(name))}. Use the same method. Nothing was loaded."
            )


def _fits(value: Any, first: Any) -> bool:
    """Whether a saved value fits a first one: equal type, dtype and shape, but a dimension that was empty may have grown."""
    if not isinstance(first, Tensor) or not isinstance(value, Tensor):
        # A number may begin as an int, such as 0, and go on as a float.
        return type(value) is type(first) or {type(value), type(first)} == {int, float}
    # A window of losses, as of Selective-Backprop, begins empty and grows.
    sizes = zip(value.shape, first.shape, strict=False)
    return (
        value.dtype == first.dtype
        and value.dim() == first.dim()
        and all(size in (0, now) for now, size in sizes)
    )


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return type(value).__name__


def check_rows(state: Mapping[str, Any], loader: SelectedLoader) -> None:
    """Checks that the position in an interrupted epoch is between two batches of this run.

    Args:
        state: Saved state, already checked for damage.
        loader: Loader of the run.

    Raises:
        ValueError: No batch ends there, because the batch size or the number of processes was another one.
    """
    if not state["active"] or state["plan"] is None:
        return
    # If the number of rows is unknown, or the batches depend on the epoch of their sampler, it is checked when the epoch
    # continues.
    ends = none_if_unknown(lambda: loader.ends(PackedPlan(**state["plan"])))
    if ends is None or isinstance(loader.order, ComposedOrder):
        return
    if state["rows"] not in ends:
        raise ValueError(
            f"load_state_dict: {BETWEEN_BATCHES.format(state['rows'])} Nothing was loaded."
        )


def check_shuffle(state: Mapping[str, Any], loader: SelectedLoader) -> None:
    """Checks that the loader has the same order as the saved run.

    Warns if later epochs have another order than in the saved run.

    Args:
        state: Saved state, already checked for damage.
        loader: Loader of the run.

    Raises:
        ValueError: An interrupted epoch would continue in another order.
    """
    saved = state["shuffle"]
    current = loader.order.state_dict()
    # The state has the weights that `WeightedSampler.set_weights` has set, which are loaded with it.
    if "changed" in (saved or {}):
        unlike = ("weights",)
    else:
        unlike = ()
    was = _order_of(saved, unlike)
    now = _order_of(current, unlike)
    # A drawn plan brings its own order, which is in the state.
    if state["rows"] and state["plan"] is not None and not state["plan"]["drawn"]:
        if was != now:
            raise ValueError(
                f"load_state_dict: the state was saved in the middle of an epoch by a loader with {was}, but this one has "
                f"{now}: the rest of the epoch would be in another order. Nothing was loaded. Use the same sampler, or save "
                "between epochs."
            )
    elif was != now and saved is not None and current is not None:
        warn(f"load_state_dict: the state was saved by a loader with {was}, but this one has {now}")


def _order_of(shuffle: Mapping[str, Any] | None, unlike: tuple[str, ...]) -> str:
    """Describes for messages the sampler that orders a loader, without the settings in `unlike`."""
    if shuffle is None:
        return "another sampler"
    names = [
        name
        for name in ("seed", "num_samples", "replacement", "weights")
        if name in shuffle and name not in unlike
    ]
    settings = ", ".join(f"{name}={shuffle[name]!r}" for name in names)
    return f"{shuffle.get('sampler', 'Shuffle')}({settings}) over {shuffle['samples']} samples"


def check_generators(
    state: Mapping[str, Any], loader: SelectedLoader, device: torch.device, *, restored: bool
) -> None:
    """Checks that random states can be restored, and that the loader draws random numbers as the saved loader did.

    Args:
        state: Saved state, already checked for damage.
        loader: Loader of the run.
        device: Device of the records.
        restored: Whether the saved random states will be restored.

    Raises:
        ValueError: The random states cannot be restored, or the loader draws other numbers.
    """
    # In the middle of an epoch, its order is drawn again, from the random states with which the epoch began.
    replays = bool(state["rows"])
    parts = [("epoch_start", state["epoch_start"])] if replays else []
    way_out = "save between epochs" if replays else "pass restore_rng=False"
    for name, states in [*parts, *([("rng", state["rng"])] if restored else [])]:
        saved = len(states["generators"])
        current = len(loader.generators())
        if saved != current:
            raise ValueError(
                f"load_state_dict: the state has the random states of {saved} generators, but the loader of this run uses "
                f"{current}. Nothing was loaded. Give the DataLoader and its sampler a `generator` if they had one, or "
                f"{way_out}."
            )
        try:
            rng.check_states(states, device, loader.generators())
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"load_state_dict: `{name}` has random states that cannot be restored here ({error}), from another device or "
                f"another version of PyTorch. Nothing was loaded. {way_out.capitalize()}."
            ) from error
    if replays and state["epoch_start"]["workers_ran"] and not loader.persistent_workers:
        raise ValueError(
            "load_state_dict: the state was saved in the middle of an epoch by a loader with persistent workers, which draw "
            "fewer random numbers; this loader has none, so its order would differ. Nothing was loaded. Use "
            "persistent_workers=True as before, or save between epochs."
        )


SAMPLES = (
    "forward",
    "backward",
    "refresh",
    "scoring",
    "comparing",
    "full_forward",
    "full_backward",
)
"""Fields of `Cost` that count samples of one process."""


class OtherProcesses:
    """The states of all processes of a saved run, for resuming with another number of processes.

    Args:
        states: Parts of the saved state that differ between processes, in the order of ranks.
        plan: Chosen samples of the epoch; None if there is no plan.
        world: Processes of this run.

    Raises:
        ValueError: These processes cannot continue from the saved position.
    """

    def __init__(
        self,
        states: Sequence[Mapping[str, Any]],
        plan: Mapping[str, Any] | None,
        world: World,
    ) -> None:
        self._states = states
        self._world = world
        self._first = states[0]
        # All processes have trained on equally many rows, which together are the beginning of the common order.
        rows = len(states) * self._first["rows"]
        self._rows_per_process = rows // world.size
        if rows % world.size:
            raise ValueError(
                f"load_state_dict: the {len(states)} processes have trained on {rows} rows of the epoch in progress, which "
                f"{world.size} processes cannot share equally. Use a number of processes that divides it, or save between "
                "epochs."
            )
        drawn = plan is not None and plan["drawn"]
        order = self._first["shuffle"] or {}
        if (
            world.size == 1
            and rows
            and self._first["active"]
            and not drawn
            and order.get("sampler") != "Shuffle"
        ):
            raise ValueError(
                "load_state_dict: several processes saved the state in the middle of an epoch. One process can continue it "
                "only if the sampler of its loader is a thresher.Shuffle. Use that, or several processes, or save between "
                "epochs."
            )
        if any(len(state["waiting"]["ids"]) for state in self._states):
            raise ValueError(
                "load_state_dict: each process had chosen rows that were not trained on yet. Use the same number of processes "
                "as before, or save between epochs."
            )

    def state(self) -> dict[str, Any]:
        """Returns the state from which this process continues."""
        size = len(self._states)
        # What cannot be divided, such as random states, is taken from one of the saved processes.
        template = self._states[self._world.rank % size]
        return {
            **template,
            "rows": self._rows_per_process,
            "samples": template["samples"] * size // self._world.size,
            # The saved ones are of other rows than this process has read.
            "checksum": None,
            "cost": self._cost(template["cost"]),
        }

    def _cost(self, template: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the part of this process in the counts of all saved processes."""
        counts = dict(template)
        for name in SAMPLES:
            number = sum(state["cost"][name] for state in self._states)
            # Rounded down after adding the rank, the parts of all ranks add up to the number.
            counts[name] = (number + self._world.rank) // self._world.size
        return counts


@dataclass(frozen=True)
class SavedState:
    """Saves and loads a run, as one flat mapping of tensors and plain values.

    Args:
        parts: Parts of the run.
        timeline: Timeline of the run.
    """

    parts: Parts
    timeline: Timeline

    @property
    def _options(self) -> str:
        """The methods with their settings. A run that loads may have other settings, which gives a warning."""
        return " ".join(map(repr, self.parts.config.methods))

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the run. Every process must call it; the state of process 0 has the values of all samples."""
        if self.timeline.progress.active and self.parts.attributor.waits_for_credit:
            warn(
                "state_dict: the loop has not computed the loss of a batch that it got (it was skipped, or a prefetcher holds "
                "it); a resumed run continues after this batch"
            )
        world = self.parts.config.world
        # Before anything is sent: a process that saves alone, as in `if rank == 0`, gets an error instead of waiting forever.
        world.meet("run.state_dict()")
        # First, because it ends an epoch that is over, which writes records and makes the next plan.
        position = self.timeline.state_dict()
        self.parts.accumulator.settle()
        self.parts.stopwatch.update(self.parts.cost)
        records = self.parts.records.state_dict()
        # Without those of a step in progress, whose gradients are not part of a state.
        self.parts.accumulator.count_trained()
        trained = self.parts.accumulator.counts.state_dict().get(
            TRAINED, torch.empty(0, dtype=torch.int32)
        )
        # The plan is an object, too: torch.distributed.checkpoint loads tensors in place, and those of plans differ in size.
        plan = position.pop("plan")
        kept = self.parts.config.kept
        books = {
            "kept": None if kept is None else kept.clone(),
            "records": records,
            "trained": trained,
            "plan": () if plan is None else (_copy(plan),),
        }
        of_process = {
            "method": self._name(),
            "settings": self._options,
            "n": self.parts.loader.n,
            **position,
            **self.parts.loader.pass_state_dict(),
            "cost": asdict(self.parts.cost),
            "rng": rng.capture(self.parts.device, self.parts.loader.generators()),
            "books": {name: digest_of(books[name]) for name in BOOKS} if world.is_first else None,
        }
        # Each state has the random states of all processes, so that the file of process 0 is enough to go on.
        ranks = tuple(world.every(of_process))
        return {
            "version": VERSION,
            "digest": digest_of(ranks),
            "ranks": ranks,
            **(books if world.is_first else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, restore_rng: bool) -> None:
        """Loads the state of a saved run.

        Args:
            state: State that `state_dict` returned, with any number of processes.
            restore_rng: Whether to restore random states.

        Raises:
            TypeError: The state is not a mapping.
            ValueError: The state is damaged, or belongs to another method, loader, number of samples or version; nothing was
                changed.
        """
        # Everything is checked before anything changes: a refused state leaves the run as it was.
        check_form(state)
        books = state
        world = self.parts.config.world
        # Processes that load different checkpoints would continue at different places, and wait for each other forever.
        agree(world, {"the digest of the saved state": state["digest"]})
        state = self._of_this_process(state)
        self._check(state, restore_rng=restore_rng)
        state |= {"waiting": _copy(state["waiting"])}
        # What this run has recorded is written before the records are replaced, so that it cannot be written over them later.
        self.parts.accumulator.end_step()
        self.parts.accumulator.settle()
        self.parts.records.load_state_dict(
            books["records"] if world.is_first else self.parts.records
        )
        vars(self.parts.cost).update(state["cost"])
        # After the cost, from whose counters the meter goes on.
        self.parts.accumulator.meter.restart()
        self.parts.accumulator.count_trained()
        counts = self.parts.accumulator.counts
        counts.load_state_dict({TRAINED: books["trained"]} if world.is_first else counts)
        # The epochs first: they decide by the state whether the loader has a buffer of rows.
        self.timeline.load_state_dict(state)
        self.parts.loader.load_pass_state_dict(state)
        self.parts.attributor.forget_batches()
        # Last, so that nothing above moves the random states.
        if restore_rng:
            rng.restore(state["rng"], self.parts.device, self.parts.loader.generators())

    def _of_this_process(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the state from which this process continues, saved by this or another number of processes."""
        world = self.parts.config.world
        ranks = state["ranks"]
        # First: for a state of another method or dataset, every other error would hide the cause.
        self._check_kind(ranks[0])
        # Only process 0 has the entries to check, and its error is raised in all processes.
        plan = world.from_first(lambda: self._plan_of(state))
        same = len(ranks) == world.size
        of_process = ranks[world.rank] if same else self._of_other_processes(ranks, plan)
        return {**of_process, "plan": plan}

    def _of_other_processes(
        self, ranks: Sequence[Mapping[str, Any]], plan: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        if ranks[0]["active"] and ranks[0]["rows"] and self.parts.config.composes:
            raise ValueError(
                "load_state_dict: another number of processes was in the middle of an epoch whose batches have unlike sizes. "
                "Use as many processes as before, or save between epochs."
            )
        return OtherProcesses(ranks, plan, self.parts.config.world).state()

    def _plan_of(self, state: Mapping[str, Any]) -> dict[str, Any] | None:
        """Checks the entries that only process 0 has, and returns the plan among them."""
        if "records" not in state:
            raise ValueError(
                "load_state_dict: process 0 was given the state of another process, which has no stored losses. Load the state "
                "that process 0 saved, in all processes."
            )
        kept = self.parts.config.kept
        saved = state["kept"]
        for name, digest in state["ranks"][0]["books"].items():
            if digest_of(state[name]) != digest:
                refuse(f"`{name}` is not as it was saved: values, sizes or dtypes differ")
        if (not state["plan"]) != self.parts.loader.streams:
            sources = ("a stream", "a dataset with a length")
            current, saved_for = sources if self.parts.loader.streams else sources[::-1]
            raise ValueError(
                f"load_state_dict: the state is for {saved_for}, but the loader of this run reads {current}"
            )
        if kept is not None and not torch.equal(kept, saved.cpu()):
            raise ValueError(
                f"load_state_dict: pruning kept {len(saved)} samples in the saved run, but {len(kept)} other samples in this "
                "run: the scores have changed. Use the scores of the interrupted run"
            )
        columns, expected = (
            {name: getattr(column, "dtype", None) for name, column in records.items()}
            for records in (state["records"], self.parts.records)
        )
        if columns != expected:
            raise ValueError(
                f"load_state_dict: the state has columns {columns}, but this run has {expected}. Nothing was loaded. Use the model, "
                "criterion, `observe` and `signals` of the saved run, or load the model and the optimizer alone."
            )
        return _copy(state["plan"][0]) if state["plan"] else None

    def _name(self) -> str:
        return "+".join(name_of(method) for method in self.parts.config.methods)

    def _check(self, state: Mapping[str, Any], *, restore_rng: bool) -> None:
        try:
            check_batch_stage(state, self.timeline.selection.stage)
        except ValueError as error:
            message = f"{error} The state was saved with {state['settings']}, but this run has {self._options}."
            raise ValueError(message) from None
        passes = self.timeline.selection.forward_passes
        # With forward_passes="auto", loading switches to the selection of the saved run.
        if state["passes"] != passes and not (
            self.timeline.may_switch and state["passes"] in ("once", "twice")
        ):
            raise ValueError(
                f"load_state_dict: the state has forward_passes={state['passes']!r}, but this run has {passes!r}"
            )
        check_rows(state, self.parts.loader)
        check_shuffle(state, self.parts.loader)
        check_generators(state, self.parts.loader, self.parts.device, restored=restore_rng)
        for argument, saved, current in (
            ("", state["settings"], self._options),
            ("epochs=", state["epochs"], self.parts.given.epochs),
        ):
            if saved != current:
                warn(
                    f"load_state_dict: the state was saved with {argument}{saved}, but this run has {argument}{current}"
                )
        if state["in_step"]:
            warn(
                "load_state_dict: the state was saved within a step: some losses had no optimizer step yet, and gradients are "
                "not part of a state. The run continues after these batches."
            )
        if state["left"]:
            warn(
                f"load_state_dict: the state was saved after the loop had left epoch {state['epoch']} by break, return or an "
                f"exception. The resumed run finishes epoch {state['epoch']}; without the resume, the next epoch would have "
                "begun."
            )
        if not state["ran_out"]:
            warn(
                f"load_state_dict: the state was saved after the last batch of epoch {state['epoch'] - 1}, but before the end "
                "of the loop over run.loader: it was left by break, return, zip or islice, or calls next. The run continues "
                f"with epoch {state['epoch']}. If code of your loop that follows the last batch, such as scheduler.step(), had "
                "not run when the state was saved, run it now. A state saved after the loop over run.loader has ended gives no "
                "such warning."
            )

        if not state["active"] and state["history"][-1:] and not state["history"][-1]["complete"]:
            warn(
                f"load_state_dict: the state was saved after the loop had left epoch {state['epoch'] - 1} before its last "
                f"batch, by break or return. The run continues with epoch {state['epoch']}, as the loop would have done. To "
                "continue within the epoch, save the state inside the loop, before break or return."
            )

    def _check_kind(self, state: Mapping[str, Any]) -> None:
        """Raises an error if a state has another method or number of samples than this run."""
        if state["method"] != self._name():
            raise ValueError(
                f"load_state_dict: the state has method {state['method']!r}, but this run has {self._name()!r}"
            )
        if state["n"] != self.parts.loader.n:
            raise ValueError(
                f"load_state_dict: the state is for {state['n']} samples, but this run has {self.parts.loader.n}"
            )


def _copy(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a mapping with copies of its tensors on the host, wherever torch.load has put them."""
    return {
        name: value.cpu().clone() if isinstance(value, Tensor) else value
        for name, value in values.items()
    }
