"""What a run saves, the checks of a saved state, and how a run goes on from there.

The names, the number and the sizes of the tensors do not depend on the number of processes, as
`torch.distributed.checkpoint` needs it. Everything else is in one tuple, which it saves and loads as one object.
"""

import hashlib
import io
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from thresher import rng
from thresher.attribution.accumulator import TRAINED
from thresher.distributed.bitmask import unpacked
from thresher.distributed.layout import ShardLayout
from thresher.distributed.order import KeptOrder
from thresher.distributed.plan import HeldPlan, PackedPlan
from thresher.distributed.sharded_records import from_bits, on_host_as_bits
from thresher.loading.loader import SelectedLoader
from thresher.methods import name_of
from thresher.permutation import Permutation
from thresher.run.batch_selection import BatchStage
from thresher.run.epochs import Epochs
from thresher.run.parts import Parts
from thresher.shards import ALONE, Shard, World
from thresher.warning import warn

VERSION = 10
"""Number of the form of a saved state."""

MARKS = ("ids", "refresh")
"""Parts of a plan that are marks of samples."""
BY_ID = "by_id"
"""Entry of the plan of a process: names of the parts that are in the tensors of all samples."""

FIELDS = ("version", "digest", "kept", "records", "trained", "plan", "ranks")
"""Names of what a state holds, in any number of processes."""


def refuse(what: str) -> NoReturn:
    """Raises the error about a state that is not as it was saved.

    Args:
        what: Defect of the state.

    Raises:
        ValueError: Always.
    """
    raise ValueError(
        f"load_state_dict: {what}. The state is damaged, or was changed after run.state_dict() returned it; nothing was "
        "loaded. Load another checkpoint."
    )


def check_form(state: Any) -> None:
    """Checks that a state has this version, and that all in it but the values by id is as it was saved.

    Args:
        state: Argument of `load_state_dict`.

    Raises:
        TypeError: It is no mapping.
        ValueError: It has another version, lacks a part, or was changed.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"load_state_dict: `state` must be a result of run.state_dict(), got {type(state).__name__}")
    if state.get("version") != VERSION:
        raise ValueError(
            f"load_state_dict: the state has version {state.get('version')}, this is version {VERSION}. Load it with the "
            "version of thresher that saved it, or begin the training again; nothing was loaded."
        )
    missing, unknown = [name for name in FIELDS if name not in state], [name for name in state if name not in FIELDS]
    if missing or unknown:
        refuse(f"`state` lacks {missing}" if missing else f"`state` has {unknown}, which this version does not know")
    if state["digest"] != digest_of(state["kept"], state["ranks"]):
        refuse("`state` is not what its digest was made of")


def digest_of(*values: Any) -> str:
    """Returns a digest of tensors and plain values, the same wherever they lie and for lists as for tuples.

    Args:
        values: Tensors, plain values, and mappings and lists of them.

    Example:
        >>> digest_of({"a": 1}, (torch.ones(2),)) == digest_of({"a": 1}, [torch.ones(2)])
        True
    """
    digest = hashlib.blake2b(digest_size=16)

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
            digest.update(np.ascontiguousarray(on_host_as_bits(value)).data)
        elif isinstance(value, Mapping):
            add(sorted(value.items()) if all(isinstance(name, str) for name in value) else list(value.items()))
        elif isinstance(value, list | tuple):
            digest.update(b"[")
            for part in value:
                add(part)
            digest.update(b"]")
        else:
            digest.update(f"{value!r},".encode())

    add(values)
    return digest.hexdigest()


SUMMED_AT_ONCE = 2**22
"""Number of values whose bits are added up at once."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sum_of(values: Tensor, first: int) -> int:
    """Returns a sum over the bits and the places of values; the sums of all blocks add up to that of the whole, modulo 2^31.

    Args:
        values: Values of a block, shape (block,).
        first: Place of the first of them.
    """
    total = 0
    for start in range(0, len(values), SUMMED_AT_ONCE):
        bits = values[start : start + SUMMED_AT_ONCE].contiguous().view(BITS[values.element_size()]).long()
        # Weighted by place: a sum alone would not notice values that changed places.
        places = torch.arange(first + start, first + start + len(bits), device=bits.device)
        total += int((bits * (2 * places + 1)).sum())
    return total % 2**31


def check_batch_stage(state: Mapping[str, Any], stage: BatchStage | None) -> None:
    """Checks that what a batch method remembers has the shapes that it has in this run.

    Args:
        state: State that is as it was saved.
        stage: Batch method at work; None where there is none.

    Raises:
        ValueError: It has not, since the method was made with other settings.
    """
    # The first state has the shapes of the settings, such as one value per base method.
    own = {} if stage is None else stage.method.init_state()
    saved = {} if state["batch_stage"] is None else state["batch_stage"]["state"]
    for name in {**own, **saved}:
        if not _takes_the_place(saved.get(name), own.get(name)):
            raise ValueError(
                f"load_state_dict: the method of the state remembers `{name}` as {_kind_of(saved.get(name))}, that of this run "
                f"as {_kind_of(own.get(name))}; nothing was loaded."
            )


def _takes_the_place(value: Any, first: Any) -> bool:
    """Whether a value may follow a first one; a dimension that was empty may have grown."""
    if not isinstance(first, Tensor) or not isinstance(value, Tensor):
        return type(value) is type(first) or {type(value), type(first)} == {int, float}
    # A window of losses, as of Selective-Backprop, begins empty and grows.
    sizes = zip(value.shape, first.shape, strict=False)
    return value.dtype == first.dtype and value.dim() == first.dim() and all(size in (0, now) for now, size in sizes)


def _kind_of(value: Any) -> str:
    return f"a {value.dtype} tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def check_shuffle(state: Mapping[str, Any], loader: SelectedLoader) -> None:
    """Checks that the loader has the order of a state, which is not drawn again where it is that of a `Shuffle`.

    Warns where later epochs have another order than the run that was saved.

    Args:
        state: State that is as it was saved.
        loader: Loader of the run.

    Raises:
        ValueError: An interrupted epoch would go on in another order.
    """
    saved, own = state["shuffle"], loader.order_state()
    was, now = _order_of(saved), _order_of(own)
    # A drawn plan brings its own order, which is in the state.
    if state["consumed"] and state["plan"] is not None and not state["plan"]["drawn"]:
        if was != now:
            raise ValueError(
                f"load_state_dict: the state was saved in the middle of an epoch by a loader with {was}, this one has {now}: "
                "the rest of the epoch would be in another order. Nothing was loaded. Use the same sampler, or save between "
                "epochs."
            )
    elif was != now and saved is not None and own is not None:
        warn(f"load_state_dict: the state was saved by a loader with {was}, this one has {now}")


def _order_of(shuffle: Mapping[str, Any] | None) -> str:
    """Returns what the orders of a loader depend on, in words; None: a sampler that is no `Shuffle`."""
    if shuffle is None:
        return "another sampler"
    return f"{shuffle.get('sampler', 'Shuffle')}(seed={shuffle['seed']}) over {shuffle['samples']} samples"


def check_generators(state: Mapping[str, Any], loader: SelectedLoader, device: torch.device, *, restored: bool) -> None:
    """Checks that the random states of a state can be restored, and that the loader draws as the one that was saved.

    Args:
        state: State that is as it was saved.
        loader: Loader of the run.
        device: Device of the records.
        restored: Whether the random states at the time of saving are to be restored.

    Raises:
        ValueError: They cannot.
    """
    # In the middle of an epoch its beginning is drawn again, from the states that it began with.
    replays = bool(state["consumed"])
    parts = [("epoch_start", state["epoch_start"])] if replays else []
    way_out = "save between epochs" if replays else "pass restore_rng=False"
    for name, states in [*parts, *([("rng", state["rng"])] if restored else [])]:
        saved, own = len(states["generators"]), len(loader.generators())
        if saved != own:
            raise ValueError(
                f"load_state_dict: the state has the random states of {saved} generators, and the loader of this run draws "
                f"from {own}; nothing was loaded. Give the DataLoader and its sampler a `generator` where they had one, or "
                f"{way_out}."
            )
        try:
            rng.check_states(states, device, loader.generators())
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"load_state_dict: `{name}` has random states that cannot be restored here ({error}), since they are of "
                "generators on another device or of another version of PyTorch; nothing was loaded. "
                f"{way_out.capitalize()}."
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
            saved: Result of `out` of this number of ranks, or a plain tensor with the values of all ids.

        Raises:
            ValueError: It is no such tensor, or has the part of another rank or of a rank among another number of ranks.
        """
        if not isinstance(saved, Tensor) or saved.shape != (self.total,):
            refuse(f"a tensor of shape ({self.total},) is needed for the samples, got {getattr(saved, 'shape', saved)!r:.80}")
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
        self._world, self._streams = shard.world, not shard.n
        layout = ShardLayout(max(1, shard.n), shard.world.size)
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
        sums: dict[str, int] = {}
        plan, tensors = self._split(own["plan"], sums, is_fresh=is_fresh)
        records = {name: self._out(f"records.{name}", column, sums) for name, column in by_id["records"].items()}
        trained = self._out("trained", by_id["trained"], sums)
        # The tensors by id have sums of their own, which do not depend on how they are spread; the digest is of everything
        # else.
        kept, ranks = None if kept is None else kept.clone(), of_all({**own, "plan": plan, "sums": sums}, self._world)
        parts = {"kept": kept, "records": records, "trained": trained, "plan": tensors, "ranks": ranks}
        return {"version": VERSION, "digest": digest_of(kept, ranks), **parts}

    def _spread(self, name: str) -> Spread:
        return self._bits if name in [f"plan.{marks}" for marks in MARKS] else self._values

    def _out(self, name: str, values: Tensor, sums: dict[str, int]) -> Tensor:
        """Returns what is saved of values by id, and notes their sum."""
        spread = self._spread(name)
        sums[f"{name} {values.dtype}"] = sum_of(values, spread.blocks[self._world.rank].start)
        return spread.out(values)

    def _home(self, state: Mapping[str, Any], name: str, saved: Any) -> Tensor:
        """Returns the values of the block of this rank, which must be as they were saved."""
        if self._streams:  # which have no values by id
            return saved
        spread = self._spread(name)
        values = spread.home(saved)
        key = f"{name} {values.dtype}"
        whole = sum(rank["sums"].get(key, -1) for rank in state["ranks"]) % 2**31
        if self._world.total(sum_of(values, spread.blocks[self._world.rank].start)) % 2**31 != whole:
            refuse(f"`{name}` has other values, or another dtype, than were saved")
        return values

    def _split(
        self, plan: Mapping[str, Any] | None, sums: dict[str, int], *, is_fresh: bool
    ) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """Splits a plan in what each process saves, such as ids that were drawn, and tensors of all samples."""
        tensors: dict[str, Any] = dict.fromkeys((*MARKS, "weights"))
        if plan is None:
            return None, tensors
        parts = ("refresh",) if plan["drawn"] else tensors  # ids that were drawn are an order, with their weights beside them
        by_id = tuple(name for name in parts if plan[name] is not None)
        own, block = {name: value for name, value in plan.items() if name not in by_id}, self._block
        for name in tensors:
            if name in by_id:
                value = plan[name].clone()
                if name == "weights":
                    value = torch.zeros(block).masked_scatter_(self._marks(plan["ids"]), value)
            # torch.distributed.checkpoint loads in place, into tensors that are there before.
            elif is_fresh:
                size, dtype = (-(-block // 8), torch.uint8) if name in MARKS else (block, torch.float32)
                value = torch.zeros(size, dtype=dtype)
            else:
                continue
            tensors[name] = self._out(f"plan.{name}", value, sums)
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

        Raises:
            ValueError: Values by id are not as they were saved.
        """
        records = {name: self._home(state, f"records.{name}", saved) for name, saved in state["records"].items()}
        return {**own, "records": records, "trained": self._home(state, "trained", state["trained"]), "plan": plan}

    def plan(self, state: Mapping[str, Any]) -> dict[str, Any] | None:
        """Returns this process's part of the plan, as `PackedPlan.state_dict` does; None where there is no plan.

        Args:
            state: The state that was saved, whose form was checked.

        Raises:
            ValueError: Values by id are not as they were saved.
        """
        plan = state["ranks"][self._world.rank % len(state["ranks"])]["plan"]
        if plan is None:
            return None
        found = {name: value for name, value in plan.items() if name != BY_ID}
        for name in (name for name in (*MARKS, "weights") if name in plan[BY_ID]):
            value = self._home(state, f"plan.{name}", state["plan"][name]).cpu()
            found[name] = value.clone() if name in MARKS else value[self._marks(found["ids"])]
        return found


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
    # The states of ranks differ in size, so that they travel as bytes, one after the other.
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
        if world.size == 1 and stayed and self._first["active"] and self._plan is not None and self._plan.drawn:
            raise ValueError(
                "load_state_dict: several processes were in the middle of an epoch whose order was drawn, and one process "
                "cannot go on there. Go on in several processes, or save between epochs."
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
            # Several processes count consumed rows each; the order of one process has a place in ids.
            state["consumed"] = self._place_alone(self._plan)
        return state

    def _place_alone(self, plan: PackedPlan) -> int:
        """Returns the place in the order of a `Shuffle`, which one process goes on at."""
        order = self._first["shuffle"]
        held = HeldPlan(plan, ShardLayout(self._n, 1), ALONE)
        kept = KeptOrder(Permutation(self._n, order["seed"], order["begun"]).piece, self._n, held.keeps, ALONE)
        sizes = self._loader.step_sizes(held)
        if sizes is not None:
            sizes.step_at(self._stayed)
        return kept.place_after(self._stayed)

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
        parts: Parts of the run.
        epochs: Epochs of the run.
    """

    parts: Parts
    epochs: Epochs

    @property
    def _options(self) -> str:
        """What was chosen for the run and can be changed between saving and loading; a warning says so."""
        return " ".join(map(repr, self.parts.config.methods))

    def save(self) -> dict[str, Any]:
        """Returns everything that the run remembers."""
        self.parts.records.shard.world.meet("run.state_dict()")
        position = self.epochs.state_dict()
        self.parts.accumulator.settle()
        self.parts.stopwatch.update(self.parts.cost)
        own = {
            "method": self._name(),
            "settings": self._options,
            "n": self.parts.loader.n,
            **position,
            **self.parts.loader.state_dict(),
            "cost": asdict(self.parts.cost),
            "rng": rng.capture(self.parts.device, self.parts.loader.generators()),
        }
        trained = self.parts.accumulator.count_trained()
        by_id = {
            "records": self.parts.records.state_dict(),
            "trained": self.parts.accumulator.counts.state_dict().get(TRAINED, trained),
        }
        is_fresh = not (position["active"] or position["epoch"])
        return SavedForm(self.parts.records.shard).made(own, by_id, self.parts.config.kept, is_fresh=is_fresh)

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
        # Everything is checked before anything changes: a refused state leaves the run as it was.
        check_form(state)
        state = self._of_this_process(state)
        self._check(state, restore_rng=restore_rng)
        state |= {"waiting": _on_host(state["waiting"])}
        self.parts.accumulator.end_step()
        self.parts.accumulator.settle()
        self.parts.records.load_state_dict(state["records"])
        vars(self.parts.cost).update(state["cost"])
        self.parts.accumulator.meter.restart()
        self.parts.accumulator.count_trained()
        self.parts.accumulator.counts.load_state_dict({TRAINED: state["trained"]})
        # The epochs first: they decide by the state whether the loader has a buffer of rows.
        self.epochs.load_state_dict(state)
        self.parts.loader.load_state_dict(state)
        self.parts.attributor.forget_batches()
        if restore_rng:
            rng.restore(state["rng"], self.parts.device, self.parts.loader.generators())

    def _of_this_process(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what this process goes on with, of the state of this or another number of processes."""
        shard, ranks = self.parts.records.shard, state["ranks"]
        form = SavedForm(shard)
        self._check_kind(state)
        plan = form.plan(state)
        if len(ranks) == shard.world.size:
            own = ranks[shard.world.rank]
        else:
            own = Resharding(ranks, plan, shard.world, self.parts.loader).state()
        return form.joined(state, own, plan)

    def _name(self) -> str:
        return "+".join(name_of(method) for method in self.parts.config.methods)

    def _check(self, state: Mapping[str, Any], *, restore_rng: bool) -> None:
        try:
            check_batch_stage(state, self.epochs.selection.stage)
        except ValueError as error:
            said = f"{error} The state was saved with {state['settings']}, this run has {self._options}."
            raise ValueError(said) from None
        passes = self.epochs.selection.forward_passes
        if state["passes"] != passes and not (self.epochs.may_switch and state["passes"] in ("once", "twice")):
            raise ValueError(f"load_state_dict: the state is of forward_passes={state['passes']!r}, this run has {passes!r}")
        check_shuffle(state, self.parts.loader)
        check_generators(state, self.parts.loader, self.parts.device, restored=restore_rng)
        for what, saved, own in (
            ("", state["settings"], self._options),
            ("epochs=", state["epochs"], self.parts.config.epochs),
        ):
            if saved != own:
                warn(f"load_state_dict: the state was saved with {what}{saved}, this run has {what}{own}")
        if state["in_step"]:
            warn(
                "load_state_dict: the state was saved within a step: losses were credited whose optimizer step was not made "
                "yet, and gradients are no part of a state. The run goes on after them."
            )
        if state["left"]:
            warn(
                f"load_state_dict: the state was saved after the loop had left epoch {state['epoch']} by break, return or an "
                f"exception. The run goes on within epoch {state['epoch']}. A loop that goes on after break begins the next."
            )
        if not state["ran_out"]:
            warn(
                f"load_state_dict: the state was saved after the last batch of epoch {state['epoch'] - 1}, when the loop had "
                "not asked run.loader for a further batch: it had left by break, return, zip or islice, or it counts its calls "
                f"of next. The run goes on with epoch {state['epoch']}. If code of your loop that follows the last batch, such "
                "as scheduler.step(), had not run when the state was saved, run it now. A state that is saved after run.loader "
                "has been iterated to its end gives no such warning."
            )

        if not state["active"] and state["history"][-1:] and not state["history"][-1]["complete"]:
            warn(
                f"load_state_dict: the state was saved after the loop had left epoch {state['epoch'] - 1} before its last "
                f"batch, by break or return. The run goes on with epoch {state['epoch']}, as the loop would have done. To go "
                "on within the epoch, save the state inside the loop, before break or return."
            )

    def _check_kind(self, state: Mapping[str, Any]) -> None:
        """Refuses a state of another run."""
        own, kept, given = state["ranks"][0], self.parts.config.kept, state["kept"]
        if own["method"] != self._name():
            raise ValueError(f"load_state_dict: the state is of method {own['method']!r}, this run has {self._name()!r}")
        if own["n"] != self.parts.loader.n:
            raise ValueError(f"load_state_dict: the state is of {own['n']} samples, this run has {self.parts.loader.n}")
        if (own["plan"] is None) != self.parts.loader.streams:
            here, there = ("a stream", "a dataset with a length")[:: 1 if self.parts.loader.streams else -1]
            raise ValueError(f"load_state_dict: the state is of {there}, the loader of this run reads {here}")
        if kept is not None and not torch.equal(kept, given.cpu()):
            raise ValueError(
                f"load_state_dict: the state keeps {len(given)} samples, this run {len(kept)} others: the scores that pruning "
                "goes by have changed; use the file or the scores of the interrupted run"
            )
        columns, own = (
            {name: getattr(column, "dtype", None) for name, column in found.items()}
            for found in (state["records"], self.parts.records)
        )
        if columns != own:
            raise ValueError(f"load_state_dict: the state has columns {columns}, this run {own}")


def _on_host(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a mapping on the host, where they were when it was saved, wherever torch.load has put them."""
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in tensors.items()}
