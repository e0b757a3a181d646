"""How often each class is taken for each other one: what a trained model predicts of the samples that it is measured on."""

from typing import Any

import torch

MOST_CLASSES = 100
"""Largest number of classes for which it is counted."""


def confusion(predicted: Any, right: Any) -> list[list[int]] | None:
    """Counts the predicted classes of the samples of each class.

    Args:
        predicted: Predicted classes, shape (T,), whole numbers of 0 or more.
        right: Right classes, shape (T,), whole numbers of 0 or more.

    Returns:
        Counts: a row for each right class, with a column for each predicted one. None where there are more than 100 classes.

    Raises:
        ValueError: The two are not of one shape (T,), or not classes.

    Example:
        >>> confusion([0, 1, 1], [0, 0, 1])
        [[1, 1], [0, 1]]
    """
    pair = [torch.as_tensor(one).cpu() for one in (predicted, right)]
    if any(
        one.dim() != 1 or one.is_floating_point() or not len(one) or int(one.min()) < 0
        for one in pair
    ):
        shapes = " and ".join(
            f"{tuple(one.shape)} of {str(one.dtype).removeprefix('torch.')}" for one in pair
        )
        raise ValueError(
            f"predict must return predicted and right classes, two of shape (T,), whole numbers; got {shapes}"
        )
    if len(pair[0]) != len(pair[1]):
        raise ValueError(
            f"predict must return as many predicted as right classes, got {len(pair[0])} and {len(pair[1])}"
        )
    classes = 1 + max(int(one.max()) for one in pair)
    if classes > MOST_CLASSES:
        return None
    counts = (pair[1].long() * classes + pair[0].long()).bincount(minlength=classes**2)
    return counts.view(classes, classes).tolist()
