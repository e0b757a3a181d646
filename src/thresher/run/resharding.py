"""A run that several processes have saved, made ready for another number of processes."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thresher.attribution.accumulator import TRAINED
from thresher.distributed.kept import HeldPlan, part_of_plan
from thresher.distributed.layout import ShardLayout
from thresher.distributed.order import KeptOrder
from thresher.distributed.packed import PackedPlan
from thresher.distributed.records import ShardedRecords
from thresher.loading.loader import SelectedLoader
from thresher.permutation import Permutation
from thresher.plans import EpochPlan
from thresher.records import Records
from thresher.run.state_checks import check_version
from thresher.shards import ALONE, Shard, World

PARTS = ("ids", "weights", "refresh", "keys", "scores")
"""Fields of a saved plan that have an entry per sample."""

SAMPLES = ("forward", "backward", "refresh", "scoring", "full_forward", "full_backward")
"""Fields of `Cost` that count samples of one process."""


class Resharding:
    """The states of all processes of a run, from which each process of another run takes its part.

    Args:
        states: Results of `run.state_dict()` of all processes, in the order of their ranks.
        world: Processes of this run.
        loader: Loader of this run.

    Raises:
        TypeError: A state is no mapping.
        ValueError: States are missing, or are of a place at which these processes cannot go on.
    """

    def __init__(self, states: Sequence[Mapping[str, Any]], world: World, loader: SelectedLoader) -> None:
        self._states, self._world, self._loader = list(states), world, loader
        self._check_complete()
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
        plan = self._first["plan"]
        return plan is not None and plan["smaller_batches"]

    def _check_complete(self) -> None:
        for state in self._states:
            if not isinstance(state, Mapping):
                raise TypeError(f"load_state_dict: each state must be a result of run.state_dict(), got {type(state).__name__}")
            check_version(state)
        found = [state.get("ranks", {"rank": 0, "size": 1}) for state in self._states]
        expected = [{"rank": rank, "size": len(found)} for rank in range(len(found))]
        if not found or found != expected:
            said = ", ".join(f"{one['rank']} of {one['size']}" for one in found) or "none"
            raise ValueError(
                f"load_state_dict: give the states of all processes, in the order of their ranks; got those of process {said}"
            )

    def state(self, records: Records, counts: Records) -> dict[str, Any]:
        """Returns the state of this process.

        Args:
            records: Records of this run, which are not changed.
            counts: Numbers of times that samples were trained on, as the accumulator has them; not changed.
        """
        world, size = self._world, len(self._states)
        like = self._states[world.rank % size]
        alone = world.size == 1
        trained = self._records("trained", counts)
        state = {
            **like,
            "stayed": self._stayed,
            "consumed": self._first["consumed"] * size // world.size,
            "plan": None if self._first["plan"] is None else self._plan(),
            "cost": self._cost(like["cost"]),
            "records": self._records("records", records),
            "trained": trained[TRAINED] if alone else trained,
            "ranks": {"rank": world.rank, "size": world.size},
        }
        if alone:
            del state["ranks"]
            self._place_alone(state)
        return state

    def _place_alone(self, state: dict[str, Any]) -> None:
        """Sets the place in the order of a `Shuffle`, which one process goes on at."""
        order, plan = state["shuffle"], self._whole_plan()
        if not state["active"] or plan is None or not self._stayed:
            return
        held = HeldPlan.of(plan, ShardLayout(self._n, 1), ALONE)
        kept = KeptOrder(Permutation(self._n, order["seed"], order["begun"]).piece, self._n, held.keeps, ALONE)
        deal, consumed = self._loader.deal(held), self._stayed
        if deal is not None:
            consumed = deal.step_at(self._stayed) * deal.candidates // deal.steps
        state["consumed"] = kept.place_after(consumed)

    def _whole_plan(self) -> EpochPlan | None:
        if self._first["plan"] is None:
            return None
        blocks = map(ShardLayout(self._n, len(self._states)).block, range(len(self._states)))
        plans = [
            PackedPlan(**state["plan"]).unpacked(Shard(block.start, block.stop, self._n))
            for state, block in zip(self._states, blocks, strict=True)
        ]
        parts = {name: _joined([getattr(plan, name) for plan in plans]) for name in PARTS}
        return EpochPlan(**{**vars(plans[0]), **parts})

    def _plan(self) -> dict[str, Any]:
        plan = self._whole_plan()
        assert plan is not None
        shard = ShardLayout(self._n, self._world.size).shard(self._world)
        return PackedPlan.of(part_of_plan(plan, shard), shard).state_dict()

    def _cost(self, like: Mapping[str, Any]) -> dict[str, Any]:
        """Shares out what all processes have counted."""
        found = dict(like)
        for name in SAMPLES:
            number = sum(state["cost"][name] for state in self._states)
            found[name] = (number + self._world.rank) // self._world.size
        return found

    def _records(self, name: str, own: Records) -> dict[str, Any]:
        """Returns the state of the records that this process holds."""
        saved = [_as_shard(state[name], state["n"]) for state in self._states]
        device = next(iter(own.values())).device if own else torch.device("cpu")
        records = ShardedRecords(own.columns, ShardLayout(self._n, self._world.size), self._world, device)
        records.load_shards(saved)
        if self._world.size > 1:
            return records.state_dict()
        records.come_home()
        return dict(records)


def _as_shard(saved: Any, n: int) -> Mapping[str, Any]:
    """Returns the records of a state as those of a shard; those of one process are of all samples."""
    if isinstance(saved, Mapping) and set(saved) == {"first", "n", "columns", "outbox"}:
        return saved
    columns = {TRAINED: saved} if isinstance(saved, Tensor) else dict(saved)
    return {"first": 0, "n": n, "columns": columns, "outbox": {}}


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    known = [part for part in parts if part is not None]
    return torch.cat(known) if known else None
