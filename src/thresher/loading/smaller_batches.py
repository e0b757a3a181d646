"""Smaller batches: the rows of an epoch, dealt over as many steps as full training has."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from thresher.distributed.plan import PackedPlan

ByIds = Callable[[NDArray[np.int64]], Tensor]
"""Function of ids of samples, shape (n,), that returns a number of each, shape (n,), float32."""


class SmallerBatchesError(ValueError):
    """The batches of an epoch would have too few rows: give the loader larger batches, or raise the share.

    Example:
        >>> import torch, thresher
        >>> data = torch.utils.data.TensorDataset(torch.zeros(8, 2), torch.arange(8) % 2)
        >>> loader = torch.utils.data.DataLoader(data, 2, shuffle=True)
        >>> method, criterion = thresher.Winnow(0.3), torch.nn.CrossEntropyLoss()
        >>> try:
        ...     thresher.attach(method, loader=loader, criterion=criterion, epochs=2)
        ... except thresher.SmallerBatchesError as error:
        ...     print(str(error).split(",")[0])
        An epoch has 4 batches
    """


@dataclass(frozen=True, eq=False)
class StepSizes:
    """How many rows and candidates each step of an epoch has, and how the rows are drawn from the candidates.

    Args:
        steps: Number of steps, 1 or more.
        rows: Number of rows of all steps together, at least `steps`.
        candidates: Number of ids of the epoch's order that the rows are drawn from, at least `rows`.
        keys: Function of ids, shape (n,), that returns numbers of these samples, shape (n,), float32: of the candidates of a
            step, those with the smallest keys are its rows. None where all candidates are.

    Example:
        >>> import torch
        >>> sizes = StepSizes(steps=4, rows=14, candidates=20)
        >>> list(sizes.parts(14)), list(sizes.parts(20)), list(sizes.parts(14, first=sizes.step_after(10, 14)))
        ([3, 4, 3, 4], [5, 5, 5, 5], [4])
        >>> keys = torch.tensor([5.0, 4, 3, 2, 1, 0, 9, 8])
        >>> StepSizes(steps=3, rows=4, candidates=8, keys=keys.__getitem__).draw(torch.tensor([7, 0, 6]), 2)
        tensor([7, 0])
    """

    steps: int
    rows: int
    candidates: int
    keys: ByIds | None = None

    def before(self, step: int, total: int) -> int:
        """Returns the part of a number that the steps before one have; the parts of the steps differ by one at most.

        Args:
            step: Number of the step.
            total: The number: `rows` or `candidates`.
        """
        # Integer arithmetic: every process and every resumed run cuts the same parts.
        return step * total // self.steps

    def ends(self, total: int) -> NDArray[np.int64]:
        """Returns where the part of each step in a number ends, with a 0 before them, shape (steps + 1,).

        Args:
            total: The number: `rows` or `candidates`.
        """
        return np.arange(self.steps + 1, dtype=np.int64) * total // self.steps

    def parts(self, total: int, first: int = 0) -> Iterator[int]:
        """Returns the part of a number that each step has, step by step.

        Args:
            total: The number: `rows` or `candidates`.
            first: Number of the first step. Default: 0.
        """
        return (self.before(step + 1, total) - self.before(step, total) for step in range(first, self.steps))

    def step_after(self, part: int, total: int) -> int:
        """Returns the number of the step that follows the first part of a number, which ends with a step.

        Args:
            part: The part.
            total: The number: `rows` or `candidates`.
        """
        return min(-(-part * self.steps // max(1, total)), self.steps + 1)

    def step_at(self, rows: int) -> int:
        """Returns the number of the step that follows the first so many rows.

        Args:
            rows: Number of rows.

        Raises:
            ValueError: No step ends with these rows, as with those of another batch size.
        """
        step = self.step_after(rows, self.rows)
        if self.before(step, self.rows) != rows:
            raise ValueError(
                f"The epoch in progress has trained on {rows} rows, which are not those of the first steps of an epoch with "
                f"{self.rows} rows in {self.steps} steps. Go on with as many processes, and the batch size, as before, or save "
                "between epochs."
            )
        return step

    def draw(self, ids: Tensor, rows: int) -> Tensor:
        """Returns the rows of one step, in the order of the candidates.

        Args:
            ids: Ids of the candidates, shape (n,), int64.
            rows: Number of rows to draw, at most n.
        """
        if self.keys is None or len(ids) <= rows:
            return ids
        # Ties are broken by the order of the epoch, as the draw over several processes breaks them.
        order = self.keys(ids.numpy()).argsort(stable=True)
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


def smaller_sizes(
    plan: PackedPlan,
    whole: bool,
    ids: Callable[[], int],
    everything: int,
    batch_size: int,
    drop_last: bool,
    *,
    least: int = 1,
) -> StepSizes | None:
    """Returns the numbers of the smaller batches of a plan; None where they are the batches of full training.

    Args:
        plan: The plan of an epoch, or the part of it that one process has.
        whole: Whether every sample of the dataset is in the plan.
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
    # As large a part of them is dropped as of all samples; rounded, so that the smallest share has a row for every step.
    staying = min((2 * staying * most + everything) // max(1, 2 * everything), most)
    rows = staying if plan.keys is None else round(plan.share * staying)
    # Batches of full training need no cutting, and draw the same random numbers as without a plan.
    if rows == most:
        return None
    if rows < least * steps:
        smallest = min(1, rounded_up(least * steps / (most if plan.keys is None else staying)))
        # Of a plan that draws from some samples only, the method alone knows what a share of all samples comes to.
        named = f": the smallest share is {smallest:g}" if plan.keys is None or whole or staying == most else ""
        raise SmallerBatchesError(
            f"An epoch has {steps} batches, and {rows} of its {most} samples are to be trained on, {too_few(least)}{named}. "
            "Give the loader larger batches, or raise the share."
        )
    candidates = rows if plan.keys is None else min(staying, round(plan.width * rows))
    return StepSizes(steps, rows, candidates)
