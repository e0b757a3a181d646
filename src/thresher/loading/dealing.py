"""Smaller batches: the rows of an epoch, dealt over as many steps as full training has."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from thresher.plans import EpochPlan


class SmallerBatchesError(ValueError):
    """A training cannot make the smaller batches of a plan."""


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


def too_few(least: int) -> str:
    """Returns the reason why batches are refused, for messages.

    Args:
        least: Least number of rows of a batch: 1, or 2 where the model has BatchNorm.
    """
    return "less than one a batch" if least == 1 else "less than the two a batch that BatchNorm needs"


def rounded_up(share: float) -> float:
    """Returns a share with three significant digits that is not less.

    Args:
        share: The share, above 0.

    Example:
        >>> rounded_up(1 / 3), rounded_up(0.29), rounded_up(1 / 4096)
        (0.334, 0.29, 0.000245)
    """
    scale = 10 ** (2 - math.floor(math.log10(share)))
    return math.ceil(share * scale - 1e-9) / scale


def deal_of(
    plan: EpochPlan,
    n: int,
    ids: Callable[[], int],
    everything: int,
    batch_size: int,
    drop_last: bool,
    *,
    least: int = 1,
) -> Deal | None:
    """Returns how the smaller batches of a plan are made; None where they are the batches of full training.

    Args:
        plan: The plan of an epoch.
        n: Number of samples of the dataset.
        ids: Function that returns how many ids the epoch's order has after the plan; it raises TypeError where that is not
            known.
        everything: Number of samples in an epoch of full training.
        batch_size: Number of rows of a batch of full training.
        drop_last: Whether full training drops a last batch that is not full.
        least: Least number of rows of a step: 1, or 2 where the model has BatchNorm.

    Raises:
        SmallerBatchesError: There are too few rows for the steps, or it is not known how many ids the order has.
    """
    try:
        staying = ids()
    except TypeError as error:
        raise SmallerBatchesError(f"Smaller batches need the number of samples of an epoch, and {error}.") from None
    steps = everything // batch_size if drop_last else -(-everything // batch_size)
    most = steps * batch_size if drop_last else everything
    staying = min(staying, most)
    rows = staying if plan.keys is None else round(plan.share * staying)
    if rows == most:
        return None
    if rows < least * steps:
        smallest = min(1, rounded_up(least * steps / (most if plan.keys is None else staying)))
        raise SmallerBatchesError(
            f"An epoch has {steps} batches, and {rows} of its {most} samples are to be trained on, {too_few(least)}: the "
            f"smallest share is {smallest:g}. Give the loader larger batches, or raise the share."
        )
    if plan.keys is None:
        return Deal(steps, rows, rows)
    keys = plan.keys if len(plan.ids) == n else torch.zeros(n).index_copy_(0, plan.ids, plan.keys)
    return Deal(steps, rows, min(staying, round(plan.width * rows)), keys)
