"""Settings of the scoring pass: the extra forward pass whose losses a batch method uses to choose samples."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thresher.selection import share
from thresher.trees import map_leaves

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MODES = {3: "linear", 4: "bilinear", 5: "trilinear"}
"""How inputs are resized, by their number of dimensions: batch, channels, and one to three sizes."""


@dataclass(frozen=True)
class Scoring:
    """Settings of a cheaper scoring pass: the extra forward pass whose losses a batch method uses to choose samples.

    Args:
        dtype: Dtype of autocast: `torch.float32`, `torch.float16` or `torch.bfloat16`. Default None: as in training.
        every_epochs: Number of epochs from one scoring to the next, 1 or more. In the epochs between, rows are chosen by stored
            losses, as in stale Selective-Backprop, whose code scores every 3 epochs. Default: 1.
        model: Model that scores instead of the trained one. Default None: the trained model itself.
        input_scale: Factor that scales the sizes of the inputs, in (0, 1]; see `shrink`. Default: 1.
        losses: Losses of all samples that were computed elsewhere, shape (N,), floating point, used instead of a scoring pass.
            Default None.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A setting is out of range.

    Example:
        >>> Scoring(input_scale=0.5).shrink(torch.zeros(8, 3, 32, 32)).shape
        torch.Size([8, 3, 16, 16])
    """

    dtype: torch.dtype | None = None
    every_epochs: int = 1
    model: nn.Module | None = None
    input_scale: float = 1.0
    losses: Tensor | None = None

    def __post_init__(self) -> None:
        # Types before ranges: `<` of a wrong type would raise an error that names neither the setting nor the way out.
        if self.dtype is not None and not isinstance(self.dtype, torch.dtype):
            raise TypeError(
                f"Scoring: `dtype` must be a torch.dtype such as torch.bfloat16, or None, got {self.dtype!r}"
            )
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(
                f"Scoring: `dtype` must be torch.float32, torch.float16 or torch.bfloat16, got {self.dtype}"
            )
        # A bool is an int in Python: True would pass for 1.
        if not isinstance(self.every_epochs, int) or isinstance(self.every_epochs, bool):
            raise TypeError(
                f"Scoring: `every_epochs` must be a whole number, got {self.every_epochs!r}"
            )
        if self.every_epochs < 1:
            raise ValueError(
                f"Scoring: `every_epochs` must be 1 (every epoch) or more, got {self.every_epochs}"
            )
        if isinstance(self.model, type):
            raise TypeError(
                f"Scoring: `model` must be a module, got a class; pass {self.model.__name__}(...)"
            )
        if self.model is not None and not isinstance(self.model, nn.Module):
            raise TypeError(
                f"Scoring: `model` must be a torch.nn.Module or None, got {type(self.model).__name__}"
            )
        if not isinstance(self.input_scale, int | float) or isinstance(self.input_scale, bool):
            raise TypeError(f"Scoring: `input_scale` must be a number, got {self.input_scale!r}")
        if self.losses is not None and not (
            isinstance(self.losses, Tensor) and self.losses.is_floating_point()
        ):
            if isinstance(self.losses, Tensor):
                got = self.losses.dtype
            else:
                got = type(self.losses).__name__
            raise TypeError(f"Scoring: `losses` must be a floating-point tensor or None, got {got}")
        if self.losses is not None and self.losses.dim() != 1:
            raise ValueError(
                f"Scoring: `losses` must have shape (N,), got {tuple(self.losses.shape)}"
            )
        # As one chain: NaN fails it, while it would pass both `<= 0` and `> 1`.
        if not 0 < self.input_scale <= 1:
            raise ValueError(
                f"Scoring: `input_scale` must be within (0, 1], got {self.input_scale}"
            )

    def shrink(self, tree: Any) -> Any:
        """Returns inputs with their sizes scaled down; the same object if `input_scale` is 1.

        Args:
            tree: Inputs, in any nesting. Floating-point tensors (batch, channels, size, ...) of 3 to 5 dimensions are
                shrunk to floor(input_scale * size), at least 1; everything else stays as it is.

        Raises:
            ValueError: No tensor can be shrunk.
        """
        if self.input_scale == 1:
            return tree
        seen = []

        def smaller(leaf: Tensor) -> Tensor:
            # Integers are token ids or labels, and two dimensions are features: neither has a size to shrink.
            fits = leaf.is_floating_point() and leaf.dim() in MODES
            seen.append((fits, f"{leaf.dtype} {tuple(leaf.shape)}"))
            return _resize(leaf, self.input_scale) if fits else leaf

        shrunk = map_leaves(smaller, tree)
        # An error rather than the whole input: the setting would save nothing, and nobody would notice.
        if not any(fits for fits, _ in seen):
            raise ValueError(
                "Scoring: `input_scale` shrinks floating-point inputs of 3 to 5 dimensions (batch, channels, sizes), got "
                f"{', '.join(what for _, what in seen) or 'no tensor'}; leave it at 1"
            )
        return shrunk


def _resize(leaf: Tensor, scale: float) -> Tensor:
    sizes = [max(1, share(scale, size)) for size in leaf.shape[2:]]
    return F.interpolate(
        leaf, size=sizes, mode=MODES[leaf.dim()], align_corners=False, antialias=False
    )
