"""Errors of a criterion that cannot be computed from the kept rows of the loop's own forward pass, with the ways out."""

from typing import Any

import torch


def kept_losses_only(method: object, criterion: Any) -> str:
    """Returns the message for a criterion that leaves the losses unreduced, of which only the kept rows would be there."""
    return (
        f"{type(method).__name__} keeps some rows of a batch after the loop's own forward pass, and criterion {criterion!r} "
        "has reduction='none': the loop would get the losses of the kept rows alone, and tensors of the loop, such as weights "
        "or masks, have the rows of the whole batch. Use reduction='mean'; or attach(forward_passes='twice'), with which "
        "run.loader yields the kept rows alone; or compute the losses in the loop and call run.reduce(losses, outputs=...)."
    )


def not_by_rows(error: Exception, criterion: Any, kept: int, of: int) -> Exception:
    """Returns the error for a criterion that takes the whole batch and does not take the kept rows of it.

    It is the same error where that has another cause, or names the criterion and what to do already.
    """
    if isinstance(error, torch.OutOfMemoryError) or str(error).startswith(f"criterion {criterion!r}"):
        return error
    return ValueError(
        f"criterion {criterion!r} could be computed for the {of} samples of a batch, and not for {kept} of them: {error}. With "
        "forward_passes='once' it gets the kept rows of outputs and targets, of every tensor whose first dimension is the "
        "samples'. Let the first dimension of all of them be the samples', and transpose within the criterion where it needs "
        "another order, as nn.CTCLoss does; or use attach(forward_passes='twice'); or compute the losses in the loop and call "
        "run.reduce(losses, ids=run.ids)."
    )
