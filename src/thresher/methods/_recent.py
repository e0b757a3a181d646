"""The values of the last rows that a batch method saw, from which it knows how large a value is."""

import math

import torch
from torch import Tensor


def extended_history(history: Tensor, loss: Tensor, size: int) -> Tensor:
    """Returns the last `size` losses after new ones were added; losses that are not finite become NaN.

    Args:
        history: Losses so far, oldest first, shape (h,), float32.
        loss: New losses, shape (n,), float32.
        size: Number of losses to keep.

    Returns:
        Losses, oldest first, shape (min(size, h + n),), float32, on the device of `loss`.
    """
    room = max(0, size - len(loss))
    older = history[max(0, len(history) - room) :].to(loss.device, non_blocking=True)
    newest = loss[max(0, len(loss) - size) :]
    return torch.cat((older, torch.where(newest.isfinite(), newest, math.nan)))
