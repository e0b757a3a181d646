"""Selection inside the batch: what a batch method remembers, and rows gathered over several batches until one is full."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thresher import rng
from thresher.methods import BatchMethod
from thresher.plans import BatchPlan
from thresher.trees import leaves, map_leaves


class BatchStage:
    """A batch method at work: its state, its own random numbers, and what it did.

    Args:
        method: What decides.
        seed: Of its draws.
        passes: "once", "twice", or "none" where it chooses before any forward pass.
    """

    def __init__(self, method: BatchMethod, *, seed: int, passes: str) -> None:
        self.method, self.seed, self.passes = method, seed, passes
        self.state = method.init_state()
        self.step = 0
        self.candidates = self.kept = 0
        self._facts: dict[str, float] = {}
        self._batches = 0

    def plan(self, ids: Tensor, signals: Mapping[str, Tensor]) -> BatchPlan:
        """Ask the method about one batch.

        Args:
            ids: Of its rows, shape (n,), int64.
            signals: Name to shape (n,).

        Raises:
            TypeError: It answered something other than a BatchPlan.
        """
        generator = rng.seeded(self.seed, self.step)
        plan, state = self.method.plan_batch({"id": ids, **signals}, self.state, step=self.step, generator=generator)
        if not isinstance(plan, BatchPlan):
            name = type(self.method).__name__
            raise TypeError(f"{name}.plan_batch must return (thresher.BatchPlan, state), got {type(plan).__name__}")
        self.state, self.step = state, self.step + 1
        self.candidates += len(ids)
        self.kept += len(plan.rows)
        self._batches += 1
        for name, value in plan.facts.items():
            self._facts[name] = self._facts.get(name, 0.0) + value
        return plan

    def facts(self) -> dict[str, float]:
        """What happened since this was last asked: rows seen and kept, and the means of what the plans said."""
        found: dict[str, float] = {"candidates": self.candidates, "selected": self.kept}
        found |= {name: total / self._batches for name, total in self._facts.items()}
        if self.candidates:
            found["actual_fraction"] = 1 - self.kept / self.candidates
        self.candidates = self.kept = self._batches = 0
        self._facts = {}
        return found

    def state_dict(self) -> dict[str, Any]:
        """The method's state and its place in the random numbers."""
        return {
            "state": {name: v.clone() if isinstance(v, Tensor) else v for name, v in self.state.items()},
            "step": self.step,
            "seed": self.seed,
            "candidates": self.candidates,
            "kept": self.kept,
            "facts": dict(self._facts),
            "batches": self._batches,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another stopped."""
        self.state, self.step, self.seed = dict(state["state"]), state["step"], state["seed"]
        self.candidates, self.kept = state["candidates"], state["kept"]
        self._facts, self._batches = dict(state["facts"]), state["batches"]


def rows_of(batch: Any) -> int:
    """Number of samples in a batch: the first dimension of its first tensor, else the length of its first list.

    Raises:
        ValueError: There is neither.
    """
    for leaf in leaves(batch):
        if leaf.dim():
            return len(leaf)
    if isinstance(batch, list | tuple) and batch and isinstance(batch[0], list):
        return len(batch[0])
    raise ValueError(f"a batch of {type(batch).__name__} has no tensor with a sample dimension: its rows cannot be told apart")


def _plain_list(tree: Any, n: int) -> bool:
    """Whether this is a list of one thing a sample that is no tensor, such as texts."""
    return (
        isinstance(tree, list)
        and len(tree) == n
        and not any(isinstance(item, Tensor | list | tuple | Mapping) for item in tree)
    )


def select(batch: Any, rows: Tensor, n: int) -> Any:
    """Some rows of every part of a batch that has n of them; the rest is passed through."""
    chosen = None

    def pick_list(values: list[Any]) -> Any:
        nonlocal chosen
        chosen = rows.tolist() if chosen is None else chosen
        return [values[i] for i in chosen]

    def pick(leaf: Tensor) -> Tensor:
        return leaf.index_select(0, rows.to(leaf.device, non_blocking=True)) if leaf.dim() and len(leaf) == n else leaf

    def walk(tree: Any) -> Any:
        if (
            isinstance(tree, list)
            and len(tree) == n
            and not any(isinstance(item, Tensor | list | tuple | Mapping) for item in tree)
        ):
            return pick_list(tree)
        if type(tree) in (list, tuple):
            return type(tree)(walk(item) for item in tree)
        if type(tree) is dict:
            return {name: walk(value) for name, value in tree.items()}
        return map_leaves(pick, tree)

    return walk(batch)


def join(parts: list[Any], counts: list[int]) -> Any:
    """One batch of several, part by part.

    Raises:
        ValueError: Tensors of different shapes.
    """
    if len(parts) == 1:
        return parts[0]
    whole = [list(leaves(part)) for part in parts]
    joined = []
    for column in zip(*whole, strict=True):
        if not all(leaf.dim() and len(leaf) == count for leaf, count in zip(column, counts, strict=True)):
            joined.append(column[-1])
            continue
        if len({leaf.shape[1:] for leaf in column}) > 1:
            raise ValueError(
                f"Selected rows of several batches cannot be joined: shapes {[tuple(leaf.shape) for leaf in column]}. Collate "
                "to one shape, or use forward_passes='once'."
            )
        joined.append(torch.cat(column))
    following = iter(joined)
    return _with_lists(map_leaves(lambda _: next(following), parts[0]), parts, counts)


def _with_lists(rebuilt: Any, parts: list[Any], counts: list[int]) -> Any:
    """Lists of samples that are no tensors, such as texts, one after the other."""
    if isinstance(rebuilt, Tensor):
        return rebuilt
    if all(_plain_list(part, count) for part, count in zip(parts, counts, strict=True)):
        return [item for part in parts for item in part]
    if type(rebuilt) in (list, tuple):
        return type(rebuilt)(_with_lists(item, [p[i] for p in parts], counts) for i, item in enumerate(rebuilt))
    if type(rebuilt) is dict:
        return {name: _with_lists(value, [p[name] for p in parts], counts) for name, value in rebuilt.items()}
    return rebuilt


class Gatherer:
    """Selected rows of candidate batches, waiting until they make a batch.

    Args:
        size: Rows of a batch; None hands out the rows of each candidate batch as they are.
    """

    def __init__(self, size: int | None) -> None:
        self.size = size
        self._parts: list[tuple[Any, Tensor, Tensor | None]] = []
        self.rows = 0

    @property
    def full(self) -> bool:
        """Whether a batch can be taken."""
        return self.rows >= (self.size or 1)

    @property
    def ids(self) -> Tensor:
        """Ids of the rows that wait, shape (rows,), int64."""
        return torch.cat([torch.empty(0, dtype=torch.int64), *(ids.cpu() for _, ids, _ in self._parts)])

    @property
    def weights(self) -> Tensor | None:
        """Their weights; None where no plan gave any."""
        if all(weights is None for _, _, weights in self._parts):
            return None
        return torch.cat([_weights(part).cpu() for part in self._parts])

    def add(self, batch: Any, ids: Tensor, plan: BatchPlan) -> None:
        """Take the chosen rows of a candidate batch.

        Args:
            batch: On the device.
            ids: Of its rows, shape (n,), on the host.
            plan: What the method chose.
        """
        if not len(plan.rows):
            return
        kept = ids[plan.rows.to(ids.device)]
        part = batch if len(kept) == len(ids) else select(batch, plan.rows, len(ids))
        self.put(part, kept, plan.weights)

    def put(self, batch: Any, ids: Tensor, weights: Tensor | None) -> None:
        """Take all rows of a batch."""
        self._parts.append((batch, ids, weights))
        self.rows += len(ids)

    def take(self) -> tuple[Any, Tensor, Tensor | None]:
        """The rows that came first, as many as a batch has or as there are: the batch, its ids and weights."""
        size = self.rows if self.size is None else min(self.size, self.rows)
        taken: list[tuple[Any, Tensor, Tensor | None]] = []
        wanted = size
        while wanted:
            batch, ids, weights = self._parts.pop(0)
            if len(ids) > wanted:
                self._parts.insert(0, _part((batch, ids, weights), torch.arange(wanted, len(ids))))
                batch, ids, weights = _part((batch, ids, weights), torch.arange(wanted))
            wanted -= len(ids)
            taken.append((batch, ids, weights))
        self.rows -= size
        counts = [len(ids) for _, ids, _ in taken]
        weighted = any(weights is not None for _, _, weights in taken)
        together = torch.cat([_weights(part) for part in taken]) if weighted else None
        return join([batch for batch, _, _ in taken], counts), torch.cat([ids for _, ids, _ in taken]), together

    def clear(self) -> None:
        """Let go of everything."""
        self._parts, self.rows = [], 0


def _weights(part: tuple[Any, Tensor, Tensor | None]) -> Tensor:
    return torch.ones(len(part[1])) if part[2] is None else part[2]


def _part(whole: tuple[Any, Tensor, Tensor | None], rows: Tensor) -> tuple[Any, Tensor, Tensor | None]:
    batch, ids, weights = whole
    return select(batch, rows, len(ids)), ids[rows], None if weights is None else weights[rows.to(weights.device)]
