"""RewardTrainer and DPOTrainer of TRL: the loss of each pair of answers, and its margin."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from thresher.transformers.losses import check_same


class Margins(TorchFunctionMode):
    """Keeps what the loss of a trainer takes the last `logsigmoid` of in the block: the margin of each pair in the loss.

    This is how each reference model, divergence and adapter of DPOTrainer is followed without computing its loss again.

    Example:
        >>> with Margins() as margins:
        ...     loss = -F.logsigmoid(torch.tensor([2.0, -1.0])).mean()
        >>> margins.last
        tensor([ 2., -1.])
    """

    last: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls the function."""
        if func is F.logsigmoid:
            self.last = args[0]
        return func(*args, **(kwargs or {}))


OTHER_LOSSES = (
    "The loss must be the mean over the pairs of a batch of -logsigmoid(margin): use compute_loss of TRL with "
    "loss_weights=None and router_aux_loss_coef=0.0, or train without Selection."
)


def losses_of_pairs(
    trainer: Any, inputs: Any, outputs: Any, margins: Tensor | None, own: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the loss of each pair with gradient, and its chosen minus its rejected reward, both of shape (pairs,).

    Args:
        trainer: The trainer.
        inputs: Its batch.
        outputs: Outputs of its model.
        margins: Margins in its loss, shape (pairs,), with gradient; None if it has none.
        own: Its loss, shape ().

    Raises:
        ValueError: The loss of the trainer is not the mean of those of the pairs.
    """
    if margins is None:
        raise ValueError(
            f"thresher.transformers.Selection: the trainer's loss has no margins. {OTHER_LOSSES}"
        )
    losses = -F.logsigmoid(margins)
    center = getattr(trainer.args, "center_rewards_coefficient", None)
    if center is not None:
        chosen, rejected = outputs.logits.squeeze(-1).chunk(2)
        losses = losses + center * (chosen + rejected) ** 2
    check_same(own.detach(), losses.detach().mean(), "its pairs", OTHER_LOSSES)
    # RewardTrainer subtracts the margin that a pair should have, if the dataset has such a column.
    return losses, margins.detach() + inputs.get("margin", 0)


def as_two_classes(margins: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the logits of two classes, of which the second is the given choice, and their targets, both of shape (pairs, 2).

    Targets are probabilities, so that no pair has a label. Without a margin, the prediction is the first class, a wrong one.

    Args:
        margins: Margin of each pair, shape (pairs,).

    Example:
        >>> as_two_classes(torch.tensor([0.5]))
        (tensor([[0.0000, 0.5000]]), tensor([[0., 1.]]))
    """
    column = margins.float().unsqueeze(1)
    return F.pad(column, (1, 0)), F.pad(torch.ones_like(column), (1, 0))
