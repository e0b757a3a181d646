"""What a run saves, the checks of a saved state, and how a run goes on from there.

The names, the number and the sizes of the tensors do not depend on the number of processes, as
`torch.distributed.checkpoint` needs it. Everything else is in one tuple, which it saves and loads as one object.
"""

import io
import itertools
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from thresher import rng
from thresher.attribution.accumulator import TRAINED, StepAccumulator
from thresher.attribution.attributor import Attributor
from thresher.cost import Cost
from thresher.distributed.bitmask import unpacked
from thresher.distributed.layout import ShardLayout
from thresher.distributed.order import KeptOrder
from thresher.distributed.plan import HeldPlan, PackedPlan
from thresher.distributed.sharded_records import from_bits, on_host_as_bits
from thresher.loading.loader import SelectedLoader
from thresher.methods import name_of
from thresher.permutation import Permutation
from thresher.records import Records
from thresher.run.batch_selection import BatchStage
from thresher.run.epochs import COUNTED, Epochs
from thresher.run.optimizer_steps import Stopwatch
from thresher.shards import ALONE, Shard, World

FieldCheck = Callable[[str, Any], None]
"""Function of the name of a field and its value, which raises ValueError where the value is not what it must be."""

VERSION = 7
"""Number of the form of a saved state."""

MARKS = ("ids", "refresh")
"""Parts of a plan that are marks of samples."""
OF_KEPT = ("weights", "keys")
"""Parts of a plan that have a number for each sample that is kept."""
BY_ID = "by_id"
"""Entry of the plan of a process: names of the parts that are in the tensors of all samples."""

MOST = 2**63
"""Upper limit of whole numbers that have no other."""


def refuse(name: str, must: str, value: Any) -> NoReturn:
    """Raises the error about one field.

    Raises:
        ValueError: Always.
    """
    got = f"a {value.dtype} tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.80}"
    raise ValueError(
        f"load_state_dict: `{name}` must be {must}, got {got}. The state is damaged, or was changed after run.state_dict() "
        "returned it; nothing was loaded. Load another checkpoint."
    )


def check_version(state: Mapping[str, Any]) -> None:
    """Refuses a state of another form.

    Args:
        state: Result of `run.state_dict()`.

    Raises:
        ValueError: It has another version.
    """
    if state.get("version") != VERSION:
        raise ValueError(
            f"load_state_dict: the state has version {state.get('version')}, this is version {VERSION}. Load it with the "
            "version of thresher that saved it, or begin the training again; nothing was loaded."
        )


def plain(kinds: tuple[type, ...], must: str, low: float = -MOST, high: float = MOST) -> FieldCheck:
    """Returns a check for a plain value of some types; numbers lie between two limits, both included."""

    def check(name: str, value: Any) -> None:
        fits = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
        if not fits or (isinstance(value, int | float) and not low <= value <= high):
            refuse(name, must, value)

    return check


def whole_number(low: int = 0, high: int = MOST) -> FieldCheck:
    """Returns a check for a whole number."""
    most = "" if high == MOST else f" and at most {high}"
    return plain((int,), f"a whole number of at least {low}{most}", low, high)


TRUTH = plain((bool,), "True or False")
TEXT = plain((str,), "a text")
NUMBER = plain((int, float), "a number", -sys.float_info.max, sys.float_info.max)


def tensor(like: Tensor, shape: tuple[int | None, ...], low: int | None = None, high: int | None = None) -> FieldCheck:
    """Returns a check for a tensor.

    Args:
        like: Tensor of the dtype that is wanted.
        shape: Shape that is wanted; None for any size.
        low: Smallest value that is allowed. Default: any.
        high: Upper limit of the values, excluded. Default: none.
    """
    sizes = ", ".join("any" if size is None else str(size) for size in shape) + "," * (len(shape) == 1)
    within = "" if low is None else f" with values of at least {low}" + ("" if high is None else f" and below {high}")

    def check(name: str, value: Any) -> None:
        must = f"a {like.dtype} tensor of shape ({sizes}){within}"
        if not isinstance(value, Tensor) or value.dtype != like.dtype or value.dim() != len(shape):
            refuse(name, must, value)
        if any(size not in (None, own) for size, own in zip(shape, value.shape, strict=True)):
            refuse(name, must, value)
        if low is not None and value.numel() and (int(value.min()) < low or (high is not None and int(value.max()) >= high)):
            refuse(name, must, value)

    return check


def or_none(check: FieldCheck) -> FieldCheck:
    """Returns a check for None or what another check takes."""
    return lambda name, value: None if value is None else check(name, value)


def table(parts: Mapping[str, FieldCheck], others: FieldCheck | None = None, may_lack: tuple[str, ...] = ()) -> FieldCheck:
    """Returns a check for a mapping.

    Args:
        parts: Checks of the entries that it must have.
        others: Check for unlisted keys. Default: they are an error.
        may_lack: Names of entries that may be missing.
    """

    def check(name: str, value: Any) -> None:
        if not isinstance(value, Mapping):
            refuse(name, f"a mapping with {', '.join(parts) or 'names and values'}", value)
        missing = [part for part in parts if part not in value and part not in may_lack]
        unknown = [part for part in value if part not in parts and others is None]
        if missing or unknown:
            which = f"lacks {missing}" if missing else f"has {unknown}, which this version does not know"
            raise ValueError(
                f"load_state_dict: `{name}` {which}. The state is damaged, or of another version of thresher; nothing was "
                "loaded. Load another checkpoint."
            )
        for part, own in value.items():
            if not isinstance(part, str):
                refuse(f"{name}, the names", "texts", part)
            (parts.get(part) or others or TEXT)(f"{name}.{part}", own)

    return check


def sequence(check: FieldCheck) -> FieldCheck:
    """Returns a check for a list whose entries another check takes."""

    def check_all(name: str, value: Any) -> None:
        if not isinstance(value, list | tuple):
            refuse(name, "a list", value)
        for place, entry in enumerate(value):
            check(f"{name}[{place}]", entry)

    return check_all


IDS = torch.empty(0, dtype=torch.int64)
BITS = torch.empty(0, dtype=torch.uint8)
WEIGHTS = torch.empty(0, dtype=torch.float32)
ANY: FieldCheck = lambda *_: None  # noqa: E731
RANDOM_STATES: dict[str, FieldCheck] = {"torch": ANY, "python": ANY, "numpy": ANY, "generators": sequence(ANY), "cuda": ANY}


def _ids_or_bits(name: str, value: Any) -> None:
    tensor(BITS if isinstance(value, Tensor) and value.dtype == torch.uint8 else IDS, (None,))(name, value)


PLAN = table(
    {
        "ids": _ids_or_bits,
        "weights": or_none(tensor(WEIGHTS, (None,))),
        "refresh": or_none(tensor(BITS, (None,))),
        "lr_scale": NUMBER,
        "drawn": TRUTH,
        "facts": table({}, NUMBER),
        "smaller_batches": TRUTH,
        "keys": or_none(tensor(WEIGHTS, (None,))),
        "share": NUMBER,
        "width": NUMBER,
        "note": TEXT,
        "timed": TRUTH,
    }
)
SHUFFLE = table(
    {
        "seed": plain((int,), "a whole number", -float("inf"), float("inf")),
        "samples": whole_number(),
        "epoch": whole_number(),
        "begun": or_none(whole_number()),
        "sampler": TEXT,
    },
    may_lack=("sampler",),
)
HISTORY = sequence(
    table(
        {"epoch": whole_number(), "complete": TRUTH, **{name: whole_number() for name in COUNTED}},
        plain((bool, int, float, str, type(None)), "a plain value"),
    )
)


FORM = table(
    {
        **dict.fromkeys(("version", "kept", "records", "trained"), ANY),
        "plan": table(dict.fromkeys((*MARKS, *OF_KEPT), ANY)),
        "ranks": sequence(table({}, ANY)),
    }
)


def check_form(state: Any) -> None:
    """Checks that a state has the parts of one, whatever is in them.

    Args:
        state: Argument of `load_state_dict`.

    Raises:
        TypeError: It is no mapping.
        ValueError: It has another version, or lacks a part.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"load_state_dict: `state` must be a result of run.state_dict(), got {type(state).__name__}")
    check_version(state)
    FORM("state", state)
    if not state["ranks"]:
        refuse("state.ranks", "what each process had by itself", state["ranks"])
    for rank, own in enumerate(state["ranks"]):
        if not isinstance(plan := own.get("plan"), Mapping):
            continue
        by_id, parts = plan.get(BY_ID), state["plan"]
        if not isinstance(by_id, list | tuple) or not all(name in parts for name in by_id):
            refuse(f"state.ranks[{rank}].plan.{BY_ID}", f"names out of {', '.join(parts)}", by_id)
        for name in by_id:
            if not isinstance(parts[name], Tensor):
                refuse(f"state.plan.{name}", "a tensor", parts[name])


def fields_of_process(loader: SelectedLoader, stage: BatchStage | None) -> dict[str, FieldCheck]:
    """Returns the checks of what a process has by itself, by name."""
    ids = tensor(IDS, (None,), 0, None if loader.streams else loader.n)
    number_or_none = or_none(plain((int, float), "a number of at least 0", 0))
    return {
        "method": TEXT,
        "settings": TEXT,
        "n": whole_number(),
        "epochs": whole_number(1),
        "seed": plain((int,), "a whole number", -float("inf"), float("inf")),
        "epoch": whole_number(),
        "active": TRUTH,
        "ran_out": TRUTH,
        "consumed": whole_number(),
        "stayed": whole_number(),
        "checksum": whole_number(0, 2**32 - 1),
        "plan": ANY,
        "batch_stage": or_none(_stage(stage)),
        "passes": or_none(TEXT),
        "history": HISTORY,
        "waiting": table({"ids": ids, "weights": or_none(tensor(WEIGHTS, (None,)))}),
        "seen": whole_number(),
        "epoch_start": or_none(table({**RANDOM_STATES, "workers_ran": TRUTH}, may_lack=("cuda",))),
        "shuffle": or_none(SHUFFLE),
        "cost": table(
            {field.name: whole_number() if field.default == 0 else number_or_none for field in fields(Cost)}
            | {"unknown": or_none(TEXT)}
        ),
        "rng": table(RANDOM_STATES, may_lack=("cuda",)),
    }


def fields_of(loader: SelectedLoader, stage: BatchStage | None, trained: Tensor, records: Records) -> FieldCheck:
    """Returns the check of the types, shapes, dtypes and ranges of all that a process goes on with."""
    return table(
        fields_of_process(loader, stage)
        | {
            "version": whole_number(),
            "kept": or_none(tensor(IDS, (None,))),
            "plan": or_none(PLAN),
            "trained": tensor(trained, tuple(trained.shape), 0),
            "records": table({name: tensor(column, tuple(column.shape)) for name, column in records.items()}),
        }
    )


def _stage(stage: BatchStage | None) -> FieldCheck:
    counters = {name: whole_number() for name in ("step", "candidates", "kept", "batches")}
    own = {} if stage is None else {name: _like(value) for name, value in stage.method.init_state().items()}
    seed = plain((int,), "a whole number", -float("inf"), float("inf"))
    return table({"state": table(own), "seed": seed, "facts": table({}, NUMBER), **counters})


def _like(first: Any) -> FieldCheck:
    """Returns a check for a value that takes the place of a first one; a dimension that was empty may have grown."""
    if isinstance(first, Tensor):
        return tensor(first, tuple(size or None for size in first.shape))
    return plain((int, float) if type(first) in (int, float) else (type(first),), f"a value such as {first!r}")


def check_position(
    state: Mapping[str, Any], loader: SelectedLoader, stage: BatchStage | None, passes: str | None, shard: Shard
) -> None:
    """Checks what the fields of a state say together: the epoch, its plan, and the rows that wait.

    Args:
        state: State whose fields are checked already.
        loader: Loader of the run.
        stage: Batch method at work; None where there is none.
        passes: How the run chooses rows in the end.
        shard: Samples whose records this process holds.

    Raises:
        ValueError: Fields do not agree.
    """
    last = state["history"][-1]["epoch"] + 1 if state["history"] else 0
    if state["epoch"] != last:
        refuse("epoch", f"{last}, the epoch after the last of `history`", state["epoch"])
    plan, waiting = state["plan"], state["waiting"]
    if (plan is None) != loader.streams:
        refuse("plan", "None, since the loader streams" if loader.streams else "a plan", plan)
    own = state["batch_stage"]
    if (own is None) != (stage is None):
        refuse("batch_stage", "None, since no batch method was attached" if stage is None else "that of a batch method", own)
    if plan is not None:
        try:
            PackedPlan(**plan).unpacked(shard).check(shard)
        except (TypeError, ValueError) as error:
            raise ValueError(f"load_state_dict: `plan` is damaged; nothing was loaded. {error}") from error
        if plan["weights"] is not None and not bool(plan["weights"].isfinite().all()):
            refuse("plan.weights", "finite", plan["weights"])
    if waiting["weights"] is not None and waiting["weights"].shape != waiting["ids"].shape:
        refuse("waiting.weights", f"of shape {tuple(waiting['ids'].shape)}, as `waiting.ids` is", waiting["weights"])
    if len(waiting["ids"]) and passes != "twice":
        refuse("waiting.ids", "empty, since this run does not gather rows over batches", waiting["ids"])
    size = loader.batch_sampler.batch_size
    most = MOST if plan is None else max(loader.n, len(plan["ids"]), loader.candidates + size)
    whole_number(0, most if state["active"] else 0)("consumed", state["consumed"])
    if state["consumed"] and state["epoch_start"] is None:
        refuse("epoch_start", "the random states at the beginning of the epoch in progress", None)


def check_shuffle(state: Mapping[str, Any], loader: SelectedLoader) -> None:
    """Checks that the loader has the order of a state, which is not drawn again where it is that of a `Shuffle`.

    Warns where later epochs have another order than the run that was saved.

    Args:
        state: State whose fields are checked already.
        loader: Loader of the run.

    Raises:
        ValueError: An interrupted epoch would go on in another order.
    """
    saved, own = state["shuffle"], loader.order_state()
    was, now = _order_of(saved), _order_of(own)
    if state["consumed"] and state["plan"] is not None and not state["plan"]["drawn"]:
        if was != now:
            raise ValueError(
                f"load_state_dict: the state was saved in the middle of an epoch by a loader with {was}, this one has {now}: "
                "the rest of the epoch would be in another order. Nothing was loaded. Use the same sampler, or save between "
                "epochs."
            )
        if saved is not None:
            whole_number()("shuffle.begun", saved["begun"])
            whole_number(0, state["consumed"])("stayed", state["stayed"])
    elif was != now and saved is not None and own is not None:
        warnings.warn(f"load_state_dict: the state was saved by a loader with {was}, this one has {now}", stacklevel=5)


def _order_of(shuffle: Mapping[str, Any] | None) -> str:
    """Returns what the orders of a loader depend on, in words; None: a sampler that is no `Shuffle`."""
    if shuffle is None:
        return "another sampler"
    return f"{shuffle.get('sampler', 'Shuffle')}(seed={shuffle['seed']}) over {shuffle['samples']} samples"


def check_generators(state: Mapping[str, Any], loader: SelectedLoader, device: torch.device, *, restored: bool) -> None:
    """Checks that the random states of a state can be restored, and that the loader draws as the one that was saved.

    Args:
        state: State whose fields are checked already.
        loader: Loader of the run.
        device: Device of the records.
        restored: Whether the random states at the time of saving are to be restored.

    Raises:
        ValueError: They cannot.
    """
    replays = bool(state["consumed"])
    parts = [("epoch_start", state["epoch_start"])] if replays else []
    for name, states in [*parts, *([("rng", state["rng"])] if restored else [])]:
        saved, own = len(states["generators"]), len(loader.generators())
        if saved != own:
            way_out = "save between epochs" if replays else "pass restore_rng=False"
            raise ValueError(
                f"load_state_dict: the state has the random states of {saved} generators, and the loader of this run draws "
                f"from {own}; nothing was loaded. Give the DataLoader and its sampler a `generator` where they had one, or "
                f"{way_out}."
            )
        try:
            rng.check_states(states, device, loader.generators())
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, OverflowError) as error:
            raise ValueError(
                f"load_state_dict: `{name}` has random states that cannot be restored ({error}); nothing was loaded. Load "
                "another checkpoint, or pass restore_rng=False where only `rng` is damaged."
            ) from error
    if replays and state["epoch_start"]["workers_ran"] and not loader.persistent_workers:
        raise ValueError(
            "load_state_dict: the state was saved in the middle of an epoch by a loader with persistent workers, which draw "
            "fewer random numbers; this loader has none, and its order would be another. Nothing was loaded. Use "
            "persistent_workers=True as before, or save between epochs."
        )


@dataclass(frozen=True)
class Spread:
    """The two places of values by id: the block of a rank, and the part that a DTensor gives it, as `torch.chunk` cuts it.

    Args:
        layout: Blocks of the ranks.
        world: The ranks.
        ids_per_value: Number of ids that one value is for: 1, or 8 for marks that are packed as bits. Default: 1.

    Example:
        >>> from thresher.testing.threaded_world import on_ranks
        >>> def there_and_back(world):
        ...     spread = Spread(ShardLayout(n=20, size=2, unit=8), world)
        ...     block = torch.arange(20)[spread.layout.block(world.rank)]
        ...     return [len(part) for part in spread.parts], torch.equal(spread.home(spread.out(block)), block)
        >>> import torch
        >>> on_ranks(2, there_and_back)
        [([10, 10], True), ([10, 10], True)]
    """

    layout: ShardLayout
    world: World
    ids_per_value: int = 1

    @property
    def total(self) -> int:
        """Number of values of all ranks."""
        return -(-self.layout.n // self.ids_per_value)

    @property
    def blocks(self) -> list[range]:
        """Places of the values that belong to the records of each rank."""
        blocks = map(self.layout.block, range(self.world.size))
        return [range(-(-block.start // self.ids_per_value), -(-block.stop // self.ids_per_value)) for block in blocks]

    @property
    def parts(self) -> list[range]:
        """Places of the values that each rank has of a DTensor."""
        most = -(-self.total // self.world.size)
        ends = [min(self.total, rank * most) for rank in range(self.world.size + 1)]
        return [range(*part) for part in itertools.pairwise(ends)]

    def out(self, values: Tensor) -> Tensor:
        """Returns what is saved: a DTensor or, in one process, the values; all ranks call it.

        Args:
            values: Values of the block of this rank.
        """
        if self.world.size == 1:
            return values
        return self.world.sharded(self._moved(values, self.blocks, self.parts), self.total)

    def home(self, saved: Any) -> Any:
        """Returns the values of the block of this rank; all ranks call it.

        Args:
            saved: Result of `out` of this number of ranks, or a plain tensor with the values of all ids. Anything else is
                given back for others to refuse.

        Raises:
            ValueError: The tensor has the part of another rank, or that of a rank among another number of ranks.
        """
        if not isinstance(saved, Tensor) or saved.shape != (self.total,):
            return saved
        mesh: Any = getattr(saved, "device_mesh", None)
        if mesh is None:
            block = self.blocks[self.world.rank]
            return saved[block.start : block.stop]
        (rank,) = mesh.get_coordinate()
        if (rank, mesh.size()) != (self.world.rank, self.world.size):
            raise ValueError(
                f"load_state_dict: the state has the part of process {rank} of {mesh.size()}, and this is process "
                f"{self.world.rank} of {self.world.size}. What a process saves with torch.save is for itself alone: save and "
                "load with torch.distributed.checkpoint, which gives each process its part."
            )
        part: Any = saved
        return self._moved(part.to_local(), self.parts, self.blocks)

    def _moved(self, values: Tensor, have: Sequence[range], want: Sequence[range]) -> Tensor:
        """Returns the values that this rank wants, of those that all ranks have."""
        own, bits = have[self.world.rank], on_host_as_bits(values)
        parts = [bits[max(0, to.start - own.start) : max(0, to.stop - own.start)] for to in want]
        return from_bits(np.concatenate(self.world.exchange(parts)), values.dtype).to(values.device)


class SavedForm:
    """Makes the state that is saved of the states of all processes, and takes from it what belongs to this one.

    Args:
        shard: Samples whose records this process holds.
    """

    def __init__(self, shard: Shard) -> None:
        self._world, layout = shard.world, ShardLayout(max(1, shard.n), shard.world.size)
        self._values, self._bits = Spread(layout, shard.world), Spread(layout, shard.world, ids_per_value=8)

    def made(self, own: Mapping[str, Any], by_id: Mapping[str, Any], kept: Tensor | None, *, is_fresh: bool) -> dict[str, Any]:
        """Returns the state that is saved; all processes call it.

        Args:
            own: Tensors and plain values that this process has by itself, and its part of the plan.
            by_id: "records", columns by name, and "trained": copies, each of shape (block,).
            kept: Ids that pruning left; None where there was no pruning.
            is_fresh: Whether nothing was trained yet. The state then has room for a plan with all parts, so that
                `torch.distributed.checkpoint` can load any state into it.
        """
        plan, tensors = self._split(own["plan"], is_fresh=is_fresh)
        return {
            "version": VERSION,
            "kept": None if kept is None else kept.clone(),
            "records": {name: self._values.out(column) for name, column in by_id["records"].items()},
            "trained": self._values.out(by_id["trained"]),
            "plan": tensors,
            "ranks": of_all({**own, "plan": plan}, self._world),
        }

    def _split(self, plan: Mapping[str, Any] | None, *, is_fresh: bool) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """Splits a plan in what each process saves, such as ids that were drawn, and tensors of all samples."""
        tensors: dict[str, Any] = dict.fromkeys((*MARKS, *OF_KEPT))
        if plan is None:
            return None, tensors
        by_id = () if plan["drawn"] else tuple(name for name in tensors if plan[name] is not None)
        own, block = {name: value for name, value in plan.items() if name not in by_id}, self._block
        for name in tensors:
            spread = self._bits if name in MARKS else self._values
            if name in by_id:
                value = plan[name].clone()
                if name in OF_KEPT:
                    value = torch.zeros(block).masked_scatter_(self._marks(plan["ids"]), value)
            elif is_fresh:
                value = torch.zeros(-(-block // spread.ids_per_value), dtype=torch.uint8 if name in MARKS else torch.float32)
            else:
                continue
            tensors[name] = spread.out(value)
        return {**own, BY_ID: by_id}, tensors

    @property
    def _block(self) -> int:
        return len(self._values.blocks[self._world.rank])

    def _marks(self, bits: Tensor) -> Tensor:
        return torch.from_numpy(unpacked(bits.numpy())[: self._block])

    def joined(self, state: Mapping[str, Any], own: Mapping[str, Any], plan: Any) -> dict[str, Any]:
        """Returns all that this process goes on with, as one flat mapping; all processes call it.

        Args:
            state: The state that was saved, whose form was checked.
            own: Tensors and plain values that this process has by itself.
            plan: Result of `plan` for the same state.
        """
        return {
            **own,
            "version": state["version"],
            "kept": state["kept"],
            "records": _each(self._values.home, state["records"]),
            "trained": self._values.home(state["trained"]),
            "plan": plan,
        }

    def plan(self, state: Mapping[str, Any]) -> Any:
        """Returns this process's part of the plan; what is no plan is given back for others to refuse.

        Args:
            state: The state that was saved, whose form was checked.
        """
        ranks = state["ranks"]
        plan = ranks[self._world.rank % len(ranks)].get("plan")
        if not isinstance(plan, Mapping):
            return plan
        found = {name: value for name, value in plan.items() if name != BY_ID}
        for name in (name for name in (*MARKS, *OF_KEPT) if name in plan[BY_ID]):
            value = (self._bits if name in MARKS else self._values).home(state["plan"][name]).cpu()
            found[name] = value.clone() if name in MARKS else self._of_kept(value, found.get("ids"))
        return found

    def _of_kept(self, values: Tensor, bits: Any) -> Tensor:
        """Returns the values of the samples that are kept; all of them, to be refused, where the marks are no marks."""
        is_marks = isinstance(bits, Tensor) and bits.dtype == torch.uint8 and bits.shape == (-(-self._block // 8),)
        return values[self._marks(bits)] if is_marks and values.shape == (self._block,) else values


def _each(function: Callable[[Any], Any], values: Any) -> Any:
    return {name: function(value) for name, value in values.items()} if isinstance(values, Mapping) else values


def of_all(own: Mapping[str, Any], world: World) -> tuple[Any, ...]:
    """Returns what each process has by itself, in the order of their ranks; all processes call it.

    Args:
        own: Tensors and plain values of this process.
        world: The processes.
    """
    if world.size == 1:
        return (own,)
    file = io.BytesIO()
    torch.save(own, file)
    text = np.frombuffer(file.getvalue(), dtype=np.uint8)
    ends = np.cumsum(world.gather(np.array([len(text)])))
    parts = np.split(world.join(text), ends[:-1])
    return tuple(torch.load(io.BytesIO(part.tobytes()), map_location="cpu", weights_only=True) for part in parts)


SAMPLES = ("forward", "backward", "refresh", "scoring", "full_forward", "full_backward")
"""Fields of `Cost` that count samples of one process."""


class Resharding:
    """What all processes of a run had by themselves, of which each process of another run takes its part.

    Args:
        states: Parts of a saved state that each process had by itself, in the order of their ranks.
        plan: The part of the plan that is of this process's block; None where there is no plan.
        world: Processes of this run.
        loader: Loader of this run.

    Raises:
        ValueError: The states are of a place at which these processes cannot go on.
    """

    def __init__(
        self, states: Sequence[Mapping[str, Any]], plan: Mapping[str, Any] | None, world: World, loader: SelectedLoader
    ) -> None:
        self._states, self._world, self._loader = states, world, loader
        self._plan = None if plan is None else PackedPlan(**plan)
        batch_size = loader.sizes.batch_size
        self._first, self._n = self._states[0], self._states[0]["n"]
        stayed = len(self._states) * self._first["stayed"]
        self._stayed = stayed // world.size
        if stayed % world.size or (self._first["active"] and self._stayed % batch_size and not self._deals):
            raise ValueError(
                f"load_state_dict: the {len(self._states)} processes have trained on {stayed} rows of the epoch in progress, "
                f"which are not whole batches of {batch_size} rows in each of {world.size} processes. Choose the batch size so "
                "that all processes together have batches of the same size as before, or save between epochs."
            )
        order = self._first["shuffle"]
        if world.size == 1 and stayed and self._first["active"] and (order or {}).get("sampler") != "Shuffle":
            raise ValueError(
                "load_state_dict: several processes were in the middle of an epoch, and one process goes on there only with a "
                "thresher.Shuffle, in which every place can be found. Use it, go on in several processes, or save between "
                "epochs."
            )
        if any(len(state["waiting"]["ids"]) for state in self._states):
            raise ValueError(
                "load_state_dict: rows were chosen and not trained on yet, each in the process that read it. Go on with as "
                "many processes as before, or save between epochs."
            )

    @property
    def _deals(self) -> bool:
        return self._plan is not None and self._plan.smaller_batches

    def state(self) -> dict[str, Any]:
        """Returns what this process goes on with."""
        world, size = self._world, len(self._states)
        like = self._states[world.rank % size]
        state = {
            **like,
            "stayed": self._stayed,
            "consumed": self._first["consumed"] * size // world.size,
            "cost": self._cost(like["cost"]),
        }
        if world.size == 1 and self._plan is not None and state["active"] and self._stayed:
            state["consumed"] = self._place_alone(self._plan)
        return state

    def _place_alone(self, plan: PackedPlan) -> int:
        """Returns the place in the order of a `Shuffle`, which one process goes on at."""
        order = self._first["shuffle"]
        held = HeldPlan(plan, ShardLayout(self._n, 1), ALONE)
        kept = KeptOrder(Permutation(self._n, order["seed"], order["begun"]).piece, self._n, held.keeps, ALONE)
        deal, consumed = self._loader.deal(held), self._stayed
        if deal is not None:
            consumed = deal.sizes.before(deal.step_at(self._stayed), deal.candidates)
        return kept.place_after(consumed)

    def _cost(self, like: Mapping[str, Any]) -> dict[str, Any]:
        """Shares out what all processes have counted."""
        found = dict(like)
        for name in SAMPLES:
            number = sum(state["cost"][name] for state in self._states)
            found[name] = (number + self._world.rank) // self._world.size
        return found


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
            check = table(fields_of_process(self.loader, self.epochs.selection.stage))
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
        if not state["ran_out"]:
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
                f"batch, by break or return. The run goes on with epoch {state['epoch']}, as the loop would have done. To go "
                "on within the epoch, save the state inside the loop, before break or return.",
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
