"""When values of a run are compared with values computed in another way, and when losses count as equal."""

import torch
from torch import Tensor


def is_compared(number: int) -> bool:
    """Returns whether a step is one of those to compare: 1, 2, 4, 8 and so on.

    Args:
        number: Number of the step, from 1.

    Example:
        >>> [number for number in range(1, 20) if is_compared(number)]
        [1, 2, 4, 8, 16]
    """
    # A power of two has a single bit.
    return not number & (number - 1)


def same_losses(
    losses: Tensor,
    others: Tensor,
    *,
    full_precision: bool = True,
    rtol: tuple[float, float] = (1e-3, 0.05),
    atol: tuple[float, float] = (1e-4, 1e-4),
    equal_nan: bool = True,
) -> Tensor:
    """Returns the mask of the losses that are equal up to rounding.

    Args:
        losses: Losses, any shape.
        others: The losses computed in another way, same shape.
        full_precision: Whether both were computed without half precision throughout. Losses that have a dtype of half precision
            were not, in any case. Default: True.
        rtol: Relative tolerances, in full precision and in half precision. Default: (1e-3, 0.05).
        atol: Absolute tolerances, in full precision and in half precision. Default: (1e-4, 1e-4).
        equal_nan: Whether NaN equals NaN. Default: True.

    Example:
        >>> same_losses(torch.tensor([1.0, 2.0]), torch.tensor([1.0001, 2.1]))
        tensor([ True, False])
    """
    # Half precision rounds to 1e-3 (float16) or 8e-3 (bfloat16), perhaps in each layer.
    half = not full_precision or losses.dtype not in (torch.float32, torch.float64)
    wide = torch.promote_types(losses.dtype, torch.float32)
    return torch.isclose(losses.to(wide), others.to(wide), rtol[half], atol[half], equal_nan)
