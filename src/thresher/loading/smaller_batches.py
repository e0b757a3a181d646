"""Smaller batches: divides the chosen rows of an epoch among as many steps as full training has."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


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
    """The number of rows of each step of an epoch; the numbers differ by one at most.

    Args:
        steps: Number of steps, 1 or more.
        rows: Number of rows of all steps together, at least `steps`.

    Example:
        >>> sizes = StepSizes(steps=4, rows=14)
        >>> list(sizes.parts()), list(sizes.parts(first=sizes.step_after(10)))
        ([3, 4, 3, 4], [4])
    """

    steps: int
    rows: int

    def before(self, step: int) -> int:
        """Returns the number of rows of all steps before a step.

        Args:
            step: Number of the step, from 0.
        """
        # Integer arithmetic, so every process and every resumed run gets the same sizes.
        return step * self.rows // self.steps

    def ends(self) -> NDArray[np.int64]:
        """Returns the number of rows up to the end of each step, with a 0 before them, shape (steps + 1,)."""
        return np.arange(self.steps + 1, dtype=np.int64) * self.rows // self.steps

    def parts(self, first: int = 0) -> Iterator[int]:
        """Returns the number of rows of each step, from step `first` on.

        Args:
            first: Number of the first step. Default: 0.
        """
        return (self.before(step + 1) - self.before(step) for step in range(first, self.steps))

    def step_after(self, rows: int) -> int:
        """Returns the number of the step that begins after the first `rows` rows of the epoch.

        Args:
            rows: Number of rows; the last of them must be the last row of a step.
        """
        return min(-(-rows * self.steps // self.rows), self.steps + 1)

    def step_at(self, rows: int) -> int:
        """Returns the number of the step that begins after the first `rows` rows of the epoch.

        Args:
            rows: Number of rows.

        Raises:
            ValueError: No step ends after this number of rows, for example because the batch size was another one.
        """
        step = self.step_after(rows)
        if self.before(step) != rows:
            raise ValueError(
                f"The epoch in progress has trained on {rows} rows, which does not fit an epoch with {self.rows} rows in "
                f"{self.steps} steps. Use the same number of processes and batch size as before, or save between epochs."
            )
        return step


def too_few(least: int) -> str:
    """Returns text for an error message: why a batch has too few rows.

    Args:
        least: Least number of rows of a batch: 1, or 2 if the model has BatchNorm.
    """
    return (
        "less than one a batch" if least == 1 else "fewer than two per batch, which BatchNorm needs"
    )


def rounded_up(share: float) -> float:
    """Rounds a share up to three significant digits.

    Args:
        share: The share, above 0.

    Example:
        >>> rounded_up(1 / 3), rounded_up(0.29), rounded_up(1 / 4096)
        (0.334, 0.29, 0.000245)
    """
    scale = 10 ** (2 - math.floor(math.log10(share)))
    # 1e-9 is subtracted because a product can be slightly too large: 0.07 * 10**4 is 700.0000000000001.
    return math.ceil(share * scale - 1e-9) / scale


def smaller_sizes(
    ids: Callable[[], int], everything: int, batch_size: int, drop_last: bool, *, least: int = 1
) -> StepSizes | None:
    """Returns the sizes of the smaller batches of a plan; None if they are as large as in full training.

    Args:
        ids: Function that returns how many ids of the order of the epoch the plan keeps; raises TypeError if that is unknown.
        everything: Number of samples in an epoch of full training.
        batch_size: Number of rows of a batch of full training.
        drop_last: Whether full training drops a last batch that is not full.
        least: Least number of rows of a step: 1, or 2 if the model has BatchNorm.

    Raises:
        SmallerBatchesError: There are fewer than `least` rows per step, or it is not known how many ids the order has.
    """
    try:
        staying = ids()
    except TypeError as error:
        raise SmallerBatchesError(
            f"Smaller batches need the number of samples of an epoch, and {error}."
        ) from None
    steps = everything // batch_size if drop_last else -(-everything // batch_size)
    most = steps * batch_size if drop_last else everything
    # With drop_last, the plan keeps the same fraction of the rows that full training does not drop. Rounded to the nearest
    # number, so the smallest allowed share has a row for every step.
    rows = min((2 * staying * most + everything) // max(1, 2 * everything), most)
    # None, because full batches need no division, and the loader then draws the same random numbers as without a plan.
    if rows == most:
        return None
    if rows < least * steps:
        smallest = min(1, rounded_up(least * steps / most))
        raise SmallerBatchesError(
            f"An epoch has {steps} batches, and {rows} of its {most} samples are chosen, {too_few(least)}: the smallest share "
            f"is {smallest:g}. Give the loader larger batches, raise the share, or leave out whole steps (spend=steps)."
        )
    return StepSizes(steps, rows)
