"""Token selection: train on the tokens of each batch whose loss is far above their loss under a reference model.

Lin et al., "Rho-1: Not All Tokens Are What You Need", NeurIPS 2024, arXiv:2404.07965, where it is called selective language
modeling. It is RHO-LOSS for tokens instead of samples, with a reference model that was trained on data of high quality. It is
biased by design: nothing is re-weighted.

The paper's training code is not public; the order of tokens with equal excess losses is not described.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from thresher.methods._base import check_keep
from thresher.methods.contract import Card, Requirements


def largest_positions(scores: Tensor, valid: Tensor, keep: float) -> Tensor:
    """Marks the floor(keep * m) largest scores of the m valid positions, at least one, without waiting for the device.

    Args:
        scores: Scores, any shape, floating point; one that is not finite counts as larger than all others.
        valid: Mask of the positions to choose from, same shape, bool.
        keep: Share to mark, (0, 1].

    Returns:
        Mask, same shape, bool; ties go to later positions in the tensor.

    Example:
        >>> largest_positions(torch.tensor([1.0, 3.0, 3.0, 9.0]), torch.tensor([True, True, True, False]), 0.4)
        tensor([False, False,  True, False])
    """
    ranked = scores.nan_to_num(torch.inf, torch.inf, torch.inf).where(valid, -torch.inf).flatten()
    count = (valid.sum().double() * keep + 1e-9).floor().clamp(min=1)
    ascending = ranked.argsort(stable=True)
    places = torch.empty_like(ascending).scatter_(
        0, ascending, torch.arange(len(ranked), device=ranked.device)
    )
    return (places >= len(ranked) - count).view(valid.shape) & valid


@dataclass(frozen=True)
class TokenSelection:
    """Trains on the tokens of each batch whose losses are furthest above those of a reference model (Rho-1).

    The excess loss of a token is its loss minus its loss under the reference model. Do not pass this method to `attach`: it
    chooses among the positions of a loss, and can be combined with a method that chooses samples. In a loop, pass the mask that
    `chosen` returns to `run.reduce(keep=)`. With `thresher.transformers.Selection`, put the method into its list of methods; it
    then calls the reference model.

    Args:
        keep: Share of the tokens of each batch to keep, (0, 1]: floor(keep * m) of the m tokens that count, at least one.
            Default and published: 0.6 (0.7 for the larger model of the paper).
        reference: Reference model, which `thresher.transformers.Selection` calls with the batch without its labels. Default
            None: the loop passes the reference losses to `chosen`.

    Raises:
        TypeError: `reference` is not a `torch.nn.Module`.
        ValueError: `keep` is outside (0, 1].

    Example:
        >>> losses = torch.tensor([[3.0, 0.25, 1.5], [4.0, 0.75, 0.0]])
        >>> of_reference = torch.tensor([[1.0, 0.125, 1.25], [3.875, 0.25, 0.0]])
        >>> valid = torch.tensor([[True, True, True], [True, True, False]])
        >>> TokenSelection(keep=0.4).chosen(losses, valid, of_reference)
        tensor([[ True, False, False],
                [False,  True, False]])
    """

    stage: ClassVar[Literal["position"]] = "position"
    requires: ClassVar[Requirements] = Requirements(signals=("loss",))
    card: ClassVar[Card] = Card(
        summary="train on tokens with losses above those of a reference",
        paper="arXiv:2404.07965",
        rule="its loss was little above its loss under the reference model",
        biased="yes, by design: towards tokens that are easy for the reference model and hard for this one; nothing is "
        "re-weighted",
        forwards="one of the reference model over every sample, in each epoch. thresher.transformers.Selection counts it in "
        "run.cost, as a pass of the trained model whatever its size; a loop adds it with run.cost.add_scores((n, 0))",
        claim="few-shot accuracy on mathematics up to 16 % higher after continued pretraining of models with 1 and 7 billion "
        "parameters, and the accuracy of the baseline with 5 to 10 times fewer tokens",
        caveat="it saves no work: every sample goes forward and backward through the whole model, since the tokens that are "
        "kept attend to the others. Only the gradient of the logits has zeros, and nothing below the head gets cheaper. So "
        "run.cost counts full forward and backward passes, plus the forward passes of the reference model. It can give a "
        "better model after the same number of steps. On planted sequences in which half of the tokens are random, the loss on "
        "the other tokens is 0.08; training on all tokens gives 0.73, and on a random half 0.82. Without random tokens it is "
        "0.033; all tokens give 0.037 (tests/reference/test_token_selection.py, seed 0). Language models were not measured "
        "here",
        missing=(
            "Training of the reference model, which is ordinary training on data of high quality.",
        ),
    )
    keep: float = 0.6
    reference: nn.Module | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_keep(self, self.keep)
        if self.reference is not None and not isinstance(self.reference, nn.Module):
            raise TypeError(
                f"TokenSelection: `reference` must be a torch.nn.Module, got {type(self.reference).__name__}. Pass losses that "
                "you have computed to tokens.chosen(losses, valid, reference_losses)"
            )

    def chosen(
        self, losses: Tensor, valid: Tensor | None = None, reference: Tensor | None = None
    ) -> Tensor:
        """Returns the mask of the positions to train on in a batch.

        Args:
            losses: Loss at each position, any shape, such as (rows, tokens), floating point.
            valid: Mask of the positions that count, same shape, bool. Default: all.
            reference: Losses of the same positions under the reference model, same shape. Default: none; the positions with the
                largest losses are trained on.

        Returns:
            Mask for `run.reduce(keep=)`, shape of `losses`, bool. Positions whose excess loss is not finite are chosen before
            all others; ties go to later positions.

        Raises:
            ValueError: `valid` or `reference` has another shape than `losses`, or `valid` is not a mask of bool.
        """
        valid = torch.ones_like(losses, dtype=torch.bool) if valid is None else valid
        for name, given in (("valid", valid), ("reference", reference)):
            if given is not None and given.shape != losses.shape:
                raise ValueError(
                    f"TokenSelection.chosen: `{name}` has shape {tuple(given.shape)}, but `losses` has {tuple(losses.shape)}: "
                    "give one entry per loss"
                )
        if valid.dtype != torch.bool:
            raise ValueError(
                f"TokenSelection.chosen: `valid` must be a mask of bool, such as labels != -100, got {valid.dtype}"
            )
        excess = losses.detach().float()
        excess = excess if reference is None else excess - reference.detach().float()
        return largest_positions(excess, valid, self.keep)
