"""`TokenSelection` in a Trainer: its place among the methods, and the passes of its reference model."""

from typing import Any

import torch
from torch import Tensor

from thresher.methods.full import FullData
from thresher.methods.token_selection import TokenSelection
from thresher.transformers.losses import Losses, without_labels


class Tokens:
    """A token selection at work.

    Args:
        method: The token selection.
    """

    def __init__(self, method: TokenSelection) -> None:
        if method.reference is None:
            raise ValueError(
                "thresher.transformers.Selection: TokenSelection has no reference model, by which it chooses. Give it one of "
                "the package transformers with the same tokens: thresher.TokenSelection(keep, reference=model)."
            )
        self._method, self._reference = method, method.reference

    def begin(self, model: Any, device: torch.device) -> None:
        """Prepares the reference model.

        Args:
            model: Model that is trained.
            device: Device of the batches.

        Raises:
            ValueError: The reference model is the model that is trained.
        """
        if set(map(id, self._reference.parameters())) & set(map(id, model.parameters())):
            raise ValueError(
                "thresher.transformers.Selection: the reference model of TokenSelection has parameters of the model that is "
                "trained, and would follow it. Give a model of its own, such as copy.deepcopy(model)."
            )
        self._reference.to(device).eval()

    def chosen(self, inputs: Any, labels: Tensor, losses: Losses, by_position: Tensor, valid: Tensor) -> Tensor:
        """Returns which positions are trained on, after a pass of the reference model over the batch.

        Args:
            inputs: Batch, with its labels or without.
            labels: Labels of the batch.
            losses: Losses of the training.
            by_position: Losses by position of the model that is trained, shape (rows, ...).
            valid: Marks of the positions that count, same shape.
        """
        with torch.no_grad():
            reference, _ = losses.by_position(self._reference(**without_labels(inputs)), labels)
        return self._method.chosen(by_position, valid.bool(), reference)


def split_tokens(selection: Any) -> tuple[Any, Tokens | None]:
    """Returns the methods that choose among samples, as `thresher.attach` takes them, and the token selection if there is one.

    Args:
        selection: Argument of `Selection`.

    Raises:
        ValueError: There are two token selections, or one without a reference model.
    """
    methods = list(selection) if isinstance(selection, list | tuple) else [selection]
    found = [one for one in methods if isinstance(one, TokenSelection)]
    if not found:
        return selection, None
    if len(found) > 1:
        raise ValueError("thresher.transformers.Selection: `selection` has two TokenSelection; give one")
    others = [one for one in methods if not isinstance(one, TokenSelection)]
    return (others[0] if len(others) == 1 else others) if others else FullData(), Tokens(found[0])
