"""A run that several processes have saved, made ready for another number of processes."""

from collections.abc import Mapping, Sequence
from typing import Any

from thresher.distributed.kept import HeldPlan
from thresher.distributed.layout import ShardLayout
from thresher.distributed.order import KeptOrder
from thresher.distributed.packed import PackedPlan
from thresher.loading.loader import SelectedLoader
from thresher.permutation import Permutation
from thresher.shards import ALONE, World

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
        stayed = len(self._states) * self._first.get("stayed", 0)
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
            consumed = deal.step_at(self._stayed) * deal.candidates // deal.steps
        return kept.place_after(consumed)

    def _cost(self, like: Mapping[str, Any]) -> dict[str, Any]:
        """Shares out what all processes have counted."""
        found = dict(like)
        for name in SAMPLES:
            number = sum(state["cost"][name] for state in self._states)
            found[name] = (number + self._world.rank) // self._world.size
        return found
