"""Smaller batches: divides the chosen rows of an epoch among as many steps as full training has."""

import math

import numpy as np
from numpy.typing import NDArray

from thresher.samplers.epochs import cut, scale


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


def too_few(least: int) -> str:
    """Returns text for an error message: why a batch has too few rows.

    Args:
        least: Least number of rows of a batch: 1, or 2 if the model has BatchNorm.
    """
    if least == 1:
        return "less than one a batch"
    return "fewer than two per batch, which BatchNorm needs"


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


def smaller_batches(
    rows: int, everything: int, batch_size: int, *, drop_last: bool = False, least: int = 1
) -> NDArray[np.int64] | None:
    """Returns the ends of smaller batches, after a leading 0; None if they are as large as in full training.

    Args:
        rows: Number of ids of the order of the epoch that the plan keeps.
        everything: Number of samples in an epoch of full training.
        batch_size: Number of rows of a batch of full training.
        drop_last: Whether full training drops a last batch that is not full. Default: False.
        least: Least number of rows of a batch: 1, or 2 if the model has BatchNorm. Default: 1.

    Raises:
        SmallerBatchesError: There are fewer than `least` rows per batch.

    Example:
        >>> smaller_batches(14, 28, 8)
        array([ 0,  3,  7, 10, 14])
    """
    steps = everything // batch_size if drop_last else -(-everything // batch_size)
    most = steps * batch_size if drop_last else everything
    # With drop_last, the plan keeps the same fraction of the rows that full training does not drop. It is rounded to the
    # nearest number, so that the smallest allowed share has a row for every step.
    rows = scale(rows, most, everything)
    # None, because full batches need no division, and the loader then draws the same random numbers as without a plan.
    if rows == most:
        return None
    if rows < least * steps:
        smallest = min(1, rounded_up(least * steps / most))
        raise SmallerBatchesError(
            f"An epoch has {steps} batches, and {rows} of its {most} samples are chosen, {too_few(least)}: the smallest share "
            f"is {smallest:g}. Give the loader larger batches, raise the share, or leave out whole steps (spend=steps)."
        )
    return cut(rows, batch_size, batches=steps)
