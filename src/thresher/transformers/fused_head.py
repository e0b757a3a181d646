"""SFTTrainer of TRL: losses from its fused head, which returns no logits, and examples that are joined into one row."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from thresher.run.trainers import trl_class
from thresher.transformers.losses import ClassLosses, UsersLosses

ROWS = "thresher_rows"
"""Key in a batch for the lengths of the examples that are joined in its row."""
RIGHT_SHARE = 0.5
"""Share of the positions of a sample that must be right for the sample to be correct."""


def module_of_head(kind: type) -> ModuleType | None:
    """Returns the module of SFTTrainer, if a class of a trainer is one whose loss comes from a fused head (TRL 1.15 and later).

    Args:
        kind: Class of a trainer.
    """
    base = trl_class(kind, ["SFTTrainer"])
    module = None if base is None else sys.modules[base.__module__]
    return module if hasattr(module, "add_fused_lm_head") else None


@contextmanager
def squares_in_head(kind: type) -> Iterator[None]:
    """Makes the fused head of a new trainer also return the sums of squared probabilities, for the signal `uncertainty`.

    Args:
        kind: Class of the trainer.
    """
    module: Any = module_of_head(kind)
    if module is None:
        yield
        return
    add = module.add_fused_lm_head
    module.add_fused_lm_head = lambda *args, outputs, **kwargs: add(
        *args, outputs=(*outputs, "log_sum_sq_probs"), **kwargs
    )
    try:
        yield
    finally:
        module.add_fused_lm_head = add


class NotingLengths:
    """Collate function that calls another, and adds the lengths of the examples that it joined into one row.

    Args:
        collate: The collate function.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the batch."""
        return {
            **self._collate(examples),
            ROWS: [len(example["input_ids"]) for example in examples],
        }


class HeadLosses(UsersLosses):
    """Loss at each position, as the fused head returns it. Targets are the lengths of joined examples; None if not joined.

    Args:
        loss_type: Setting of SFTConfig: "nll", "chunked_nll" or "dft".
    """

    def __init__(self, loss_type: str) -> None:
        super().__init__(self._of_positions)
        self._dft = loss_type == "dft"
        self.token_loss = "dft_loss" if self._dft else "loss"
        self._of_logits = ClassLosses(shifts=True)

    def __repr__(self) -> str:
        return "the loss of SFTTrainer"

    def _of_positions(self, outputs: Any, labels: Any) -> tuple[Tensor, Tensor]:
        """Returns losses and the mask of the positions that count, both of shape (examples, positions)."""
        losses = self._as_trained(-outputs.log_probs)
        return by_example(losses, labels), by_example(outputs.label_mask, labels)

    def _as_trained(self, losses: Tensor) -> Tensor:
        """Returns the losses of the trainer from those of the cross-entropy."""
        return losses * (-losses).exp().detach() if self._dft else losses

    def signals(self, outputs: Any, lengths: Any) -> dict[str, Tensor]:
        """Returns signals of the examples: means over the positions that count, as for a cross-entropy of logits.

        The head does not return the largest probability, so `confidence` is the probability of the label. The two are equal if
        the model is right; otherwise the label's is lower.
        """
        with torch.no_grad():
            valid = by_example(outputs.label_mask, lengths)
            count = valid.sum(1)

            def mean(values: Tensor) -> Tensor:
                return by_example(values, lengths).float().where(valid, 0).sum(1) / count.clamp(
                    min=1
                )

            probability = mean(outputs.log_probs.float().exp())
            return {
                "tokens": count,
                "correct": (mean(outputs.is_top1) >= RIGHT_SHARE) & (count > 0),
                "confidence": probability,
                "label_probability": probability,
                "entropy": mean(outputs.entropy),
                "uncertainty": mean(-torch.expm1(outputs.log_sum_sq_probs.float())),
            }

    def of_reference(self, outputs: Any, labels: Tensor, lengths: Any) -> Tensor:
        """Returns the loss at each position of a model that returns logits, in the shape of `by_position`."""
        losses = self._of_logits.by_position(outputs, labels)[0][:, :-1]
        return by_example(self._as_trained(losses), lengths)


def by_example(values: Tensor, lengths: Sequence[int] | None) -> Tensor:
    """Splits a joined row into one row per example.

    Args:
        values: Value at each position, shape (rows, positions). A joined row has shape (1, positions), without a value for the
            last token, which has no next token.
        lengths: Number of tokens of each example; None if each row is one example.

    Returns:
        Values, shape (examples, length of the longest), with zeros after the end of an example.

    Raises:
        ValueError: The row is not as long as its examples together.

    Example:
        >>> by_example(torch.tensor([[1, 2, 3, 4]]), [2, 3])
        tensor([[1, 2],
                [3, 4]])
    """
    if lengths is None:
        return values
    tokens = sum(lengths) - 1  # nothing comes after the last token; behind it there may be padding
    if values.shape[0] != 1 or values.shape[1] < tokens:
        raise ValueError(
            f"thresher.transformers.Selection: examples of {tokens + 1} tokens were joined, but the model returned values of "
            f"shape {tuple(values.shape)}. Use the data_collator of SFTTrainer, or padding_free=False."
        )
    return pad_sequence(
        list(values[0, :tokens].split([*lengths[:-1], lengths[-1] - 1])), batch_first=True
    )


def aux_loss(trainer: Any, outputs: Any, total: Any) -> Tensor | float:
    """Returns the auxiliary loss of a mixture of experts for a batch, a scalar; 0.0 for other models.

    Args:
        trainer: The SFTTrainer.
        outputs: Outputs of its model.
        total: Number of positions that the loss is divided by; None for the positions of the batch.
    """
    if not trainer.aux_loss_enabled:
        return 0.0
    return (
        trainer.router_aux_loss_coef
        * outputs.aux_loss
        / (1 if total is None else trainer.current_gradient_accumulation_steps)
    )
