"""The form of a saved state: what is known by id in tensors of all samples, and beside them what each process has by itself.

The names, the number and the sizes of the tensors do not depend on the number of processes, as
`torch.distributed.checkpoint` needs it. Everything else is in one tuple, which it saves and loads as one object.
"""

import io
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thresher.distributed.layout import ShardLayout
from thresher.distributed.marks import unpacked
from thresher.distributed.spread import Spread
from thresher.run.state_checks import BY_ID, MARKS, OF_KEPT, VERSION
from thresher.shards import Shard, World


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
