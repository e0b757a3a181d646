"""Smaller batches: the rows of an epoch, dealt over as many steps as full training has."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from thresher.plans import EpochPlan


@dataclass(frozen=True, eq=False)
class Deal:
    """How many rows each step of an epoch has, and how they are drawn from its candidates.

    Args:
        steps: Number of steps, 1 or more.
        rows: Number of rows of all steps together, at least `steps`.
        candidates: Number of ids of the epoch's order that the rows are drawn from, at least `rows`.
        keys: Numbers of all samples, shape (N,), float32: of the candidates of a step, those with the smallest keys are its
            rows. None where all candidates are.

    Example:
        >>> deal = Deal(steps=3, rows=4, candidates=8, keys=torch.tensor([5.0, 4, 3, 2, 1, 0, 9, 8]))
        >>> list(deal.sizes(8)), list(deal.sizes(4))
        ([2, 3, 3], [1, 1, 2])
        >>> deal.draw(torch.tensor([7, 0, 6]), 2)
        tensor([7, 0])
    """

    steps: int
    rows: int
    candidates: int
    keys: Tensor | None = None

    def sizes(self, total: int) -> Iterator[int]:
        """Yields the parts of a number in each step, which differ by one at most.

        Args:
            total: The number: `rows` or `candidates`.
        """
        for step in range(self.steps):
            yield (step + 1) * total // self.steps - step * total // self.steps

    def draw(self, ids: Tensor, rows: int) -> Tensor:
        """Returns the rows of one step, in the order of the candidates.

        Args:
            ids: Ids of the candidates, shape (n,), int64.
            rows: Number of rows to draw, at most n.
        """
        if self.keys is None or len(ids) <= rows:
            return ids
        order = self.keys.index_select(0, ids).argsort(stable=True)
        return ids.index_select(0, order[:rows].sort().values)


def deal_of(plan: EpochPlan, n: int, ids: Callable[[], int], everything: int, batch_size: int, drop_last: bool) -> Deal | None:
    """Returns how the smaller batches of a plan are made; None where they are the batches of full training.

    Args:
        plan: The plan of an epoch.
        n: Number of samples of the dataset.
        ids: Function that returns how many ids the epoch's order has after the plan; it raises TypeError where that is not
            known.
        everything: Number of samples in an epoch of full training.
        batch_size: Number of rows of a batch of full training.
        drop_last: Whether full training drops a last batch that is not full.

    Raises:
        ValueError: There is less than one row for each step, or it is not known how many ids the order has.
    """
    try:
        staying = ids()
    except TypeError as error:
        raise ValueError(f"Smaller batches need the number of samples of an epoch, and {error}.") from None
    steps = everything // batch_size if drop_last else -(-everything // batch_size)
    most = steps * batch_size if drop_last else everything
    staying = min(staying, most)
    rows = staying if plan.keys is None else round(plan.share * staying)
    if rows == most:
        return None
    if rows < steps:
        raise ValueError(
            f"An epoch has {steps} batches, and {rows} of its {most} samples are to be trained on, less than one a batch: the "
            f"smallest share is {steps / max(1, most):.3g}. Give the loader larger batches, or raise the share."
        )
    if plan.keys is None:
        return Deal(steps, rows, rows)
    keys = plan.keys if len(plan.ids) == n else torch.zeros(n).index_copy_(0, plan.ids, plan.keys)
    return Deal(steps, rows, min(staying, round(plan.width * rows)), keys)
