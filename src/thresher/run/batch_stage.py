"""A batch method with its state, its random numbers, and counts of what it chose."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from thresher import rng
from thresher.methods.contract import BatchMethod, defines, requirements_of
from thresher.plans import BatchPlan

OF_BATCHES = 1
"""Key that sets the random numbers of steps apart from those of epochs."""
SEEDS = 256
"""Number of steps whose seeds are made together; one by one they would take longer than the choice itself."""


# Any number works: a method that keeps a random number of rows knows it for none.
FEW = 8
"""Number of rows for which a method is asked how many it keeps."""


def by_chance(method: Any) -> bool:
    """Returns whether the number of rows that a batch method keeps is not known before it chooses."""
    return method.count(FEW) is None


class WholeBatches:
    """Stands for the `BatchStage` of a run without a batch method: all rows of every batch are kept."""

    by_chance = False
    keeps_a_row = True
    # Read as a ratio, kept / candidates.
    kept = candidates = 1

    def init_state(self) -> dict[str, Any]:
        """Returns the state of a method that has none."""
        return {}

    def count(self, n: int) -> int:
        """Returns the number of rows of a batch."""
        return n

    def facts(self) -> dict[str, float]:
        """Returns no numbers, because nothing is chosen."""
        return {}

    def chosen(self) -> tuple[float, int]:
        """Returns the share of the chosen rows, 1, and the number of batches with a choice, 0."""
        return 1.0, 0

    def state_dict(self) -> None:
        """Returns None, the state of a run without a batch method."""

    def load_state_dict(self, state: None) -> None:
        """Loads nothing."""


class BatchStage:
    """A batch method with its state, its random numbers, and counts of what it chose.

    Args:
        method: The method.
        seed: Random seed of its draws.
        rank: Number of this process among the processes that train together; each draws other random numbers. Default: 0.
        progress: Function that returns the share of training that is done, in [0, 1]. Default: unknown.
    """

    def __init__(
        self,
        method: BatchMethod,
        *,
        seed: int,
        rank: int = 0,
        progress: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.method = method
        self.seed = seed
        self._rank = rank
        self._progress = progress
        self.requires = requirements_of(method)
        self.state = self.init_state()
        self.step = 0
        self.candidates = self.kept = 0
        self._facts: dict[str, float] = {}
        self._batches = self._rows_offered = self._rows_chosen = self._choices = 0
        # (seed, block) and the seeds of the steps of this block.
        self._seeds: tuple[tuple[int, int] | None, list[int]] = None, []

    def init_state(self) -> dict[str, Any]:
        """Returns the first state of the method."""
        return self.method.init_state()

    def plan(self, ids: Tensor, signals: Mapping[str, Tensor]) -> BatchPlan:
        """Returns the plan of the method for one batch.

        Args:
            ids: Ids of the rows, shape (n,), int64.
            signals: Signals by name, each of shape (n,).

        Raises:
            TypeError: The method did not return a BatchPlan.
        """
        signals = {"id": ids, **signals}
        plan, state = self.method.plan_batch(
            signals, self.state, step=self.step, generator=self._generator()
        )
        if not isinstance(plan, BatchPlan):
            name = type(self.method).__name__
            raise TypeError(
                f"{name}.plan_batch must return (thresher.BatchPlan, state), got {type(plan).__name__}"
            )
        # The state changes only now, so that an invalid plan leaves it as it was.
        self.state = state
        # Unlike `candidates`, these counts leave out batches that were left whole, because the warning about a choice that saves
        # nothing must not include them.
        self._choices += 1
        self._rows_offered += len(ids)
        self._rows_chosen += len(plan.rows)
        return self._counted(plan, len(ids))

    def _generator(self) -> torch.Generator:
        """Returns the generator of this step, whatever was drawn before."""
        # The draw of a step depends on the seed and the number of the step alone: a resumed run draws the same.
        block, place = divmod(self.step, SEEDS)
        if self._seeds[0] != (self.seed, block):
            # Rank 0 has the keys of a training in one process, so that both draw the same.
            keys = (self.seed, block, OF_BATCHES, *([self._rank] if self._rank else []))
            self._seeds = (self.seed, block), rng.seeds(SEEDS, *keys)
        return torch.Generator().manual_seed(self._seeds[1][place])

    def count(self, n: int) -> int | None:
        """Returns how many rows of a batch of n rows are kept; None if this depends on the losses."""
        return self.method.count(n)

    @property
    def by_chance(self) -> bool:
        """Whether the number of kept rows is not known before the method chooses."""
        return by_chance(self.method)

    @property
    def keeps_a_row(self) -> bool:
        """Whether at least one row of every batch is kept; False for a method that keeps rows by chance, without a share."""
        return getattr(self.method, "keep", None) is not None or not self.by_chance

    @property
    def keeps_all(self) -> bool:
        """Whether the whole next batch is trained on, because the method does not choose at this point of training."""
        method: Any = self.method
        return defines(method, "active") and not method.active(self._progress(), self.step)

    def whole(self, n: int, device: torch.device) -> BatchPlan:
        """Returns a plan with every row of a batch."""
        return self._counted(BatchPlan(torch.arange(n, device=device)), n)

    def _counted(self, plan: BatchPlan, n: int) -> BatchPlan:
        self.step += 1
        self.candidates += n
        self.kept += len(plan.rows)
        self._batches += 1
        for name, value in plan.facts.items():
            self._facts[name] = self._facts.get(name, 0.0) + value
        return plan

    def facts(self) -> dict[str, float]:
        """Returns the numbers of rows seen and kept since the last call, and the means of the facts of the plans, by name."""
        numbers: dict[str, float] = {"candidates": self.candidates, "selected": self.kept}
        numbers |= {name: total / self._batches for name, total in self._facts.items()}
        if self.candidates:
            numbers["actual_fraction"] = 1 - self.kept / self.candidates
        if defines(self.method, "report"):
            numbers |= self.method.report(self.state)  # pyright: ignore[reportAttributeAccessIssue]
        self.candidates = self.kept = self._batches = 0
        self._facts = {}
        return numbers

    def chosen(self) -> tuple[float, int]:
        """Returns the share of rows that the method chose since the last call, and the number of batches in which it chose.

        The share is 1 if the method did not choose in any batch.
        """
        counts = (
            self._rows_chosen / self._rows_offered if self._rows_offered else 1.0,
            self._choices,
        )
        self._rows_offered = self._rows_chosen = self._choices = 0
        return counts

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the method and its position in the random numbers."""
        return {
            # A copy, because the method may change its tensors in place in the next step.
            "state": {
                name: v.clone() if isinstance(v, Tensor) else v for name, v in self.state.items()
            },
            "step": self.step,
            "seed": self.seed,
            "candidates": self.candidates,
            "kept": self.kept,
            "facts": dict(self._facts),
            "batches": self._batches,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a saved state."""
        self.state = dict(state["state"])
        self.step = state["step"]
        self.seed = state["seed"]
        self.candidates = state["candidates"]
        self.kept = state["kept"]
        self._facts = dict(state["facts"])
        self._batches = state["batches"]
