"""DivBS: train on rows of a batch whose gradients, made orthogonal to one another, contain most of the batch's mean gradient.

Hong et al., "Diversified Batch Selection for Training Acceleration", ICML 2024, arXiv:2406.04872. Official code:
github.com/Feng-Hong/DivBS. It is biased towards rows that are typical of the batch and unlike the rows already chosen: nothing
is re-weighted.

The gradient of a row is that of the last layer, the outer product e x h of its error e (p - y for cross-entropy) and the input
h of the layer. Rows are chosen one after another. Each time, the row is chosen whose gradient has the largest inner product
with what is left of the mean gradient. This gradient is made orthogonal to the gradients of earlier rows, and the component
along it is removed from the mean gradient. Only inner products are computed, <e_i x h_i, e_j x h_j> = <e_i, e_j> <h_i, h_j>. If
nothing is left of the mean gradient, the remaining rows are drawn at random.

Where the official code differs:
- It draws each row with probability proportional to the absolute inner product. The paper describes a greedy choice, which
  takes the largest. The setting is `sample`.
- Rounding errors let it draw a row again, which adds nothing. Here each row is chosen at most once.
- On Tiny ImageNet it computes the inner products on a random quarter of the entries of the gradients.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thresher.methods._base import KeepShare
from thresher.methods.contract import Card, Requirements

NOTHING = 1e-9
"""Inner products up to this share of the largest one at the beginning count as rounding errors."""


def gradient_products(error: Tensor, feature: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the inner products of the gradients of samples, and which gradients are finite.

    Args:
        error: Gradient of each loss with respect to the outputs, shape (n, C).
        feature: Input of the last layer, shape (n, D); None for the gradient with respect to the outputs alone.

    Returns:
        Inner products, shape (n, n), float64 (float32 on devices without it), 0 for gradients that are not finite; errors and
        features are first divided by their largest absolute values. And the mask of the finite gradients, shape (n,), bool.

    Example:
        >>> gradient_products(torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([[2.0], [1.0]]))[0]
        tensor([[1.0000, 0.5000],
                [0.5000, 0.5000]], dtype=torch.float64)
    """
    wide = torch.float32 if error.device.type == "mps" else torch.float64
    if feature is None:
        finite = error.isfinite().all(1)
    else:
        finite = error.isfinite().all(1) & feature.isfinite().all(1)
    products = torch.ones((), dtype=wide, device=error.device)
    for factor in (error,) if feature is None else (error, feature):
        rows = torch.where(finite[:, None], factor, 0).to(wide)
        rows = rows / rows.abs().amax().clamp(min=torch.finfo(wide).tiny)
        products = products * (rows @ rows.T)
    return products, finite


def pursued(products: Tensor, finite: Tensor, k: int, lots: Tensor, waits: Tensor | None) -> Tensor:
    """Chooses rows one after another, by their inner product with what earlier rows left of the mean gradient.

    Args:
        products: Inner products of the gradients, shape (n, n), 0 where one is not finite.
        finite: Mask of the finite gradients, shape (n,), bool; the others are chosen first.
        k: Number of rows, 1 to n.
        lots: Random numbers, uniform on [0, 1), shape (n,), to choose rows when nothing is left of the mean gradient.
        waits: Random numbers, exponential, shape (k, n), to draw in proportion to the inner products; None to take the largest.

    Returns:
        Positions in the order of the choice, shape (k,), int64; ties go to the highest position.
    """
    n = len(products)
    place = torch.arange(n, device=products.device)
    left = products.sum(1) / finite.sum().clamp(min=1)
    least = NOTHING * left.abs().amax()
    basis = products.new_zeros(n, k)
    free = torch.ones_like(finite)
    chosen = []
    for slot in range(k):
        worth = torch.where(left.abs() > least, left.abs(), 0)
        worth = torch.where(
            (worth * free).amax() > 0, worth if waits is None else worth / waits[slot], lots
        )
        worth = torch.where(finite, worth, torch.inf).masked_fill(~free, -1)
        pick = torch.where(worth == worth.amax(), place, -1).amax(0, keepdim=True)
        row = (products.index_select(0, pick) - basis.index_select(0, pick) @ basis.T).squeeze(0)
        own = row.index_select(0, pick)
        size = products.diagonal().index_select(0, pick)
        length = torch.where(
            own > NOTHING * size, own.sqrt(), torch.inf
        )  # inf if earlier rows span the gradient
        along = row / length
        left = left - along * left.index_select(0, pick) / length
        basis[:, slot] = along
        free = free & (place != pick)
        chosen.append(pick)
    return torch.cat(chosen)


@dataclass(frozen=True)
class DivBS(KeepShare):
    """Trains on floor(keep * n) rows of each batch, at least one, whose gradients together contain most of the mean gradient.

    Each chosen gradient is made orthogonal to the earlier ones, so similar rows are not chosen twice. Rows whose gradient is
    not finite are kept before all others. If nothing is left of the mean gradient, the remaining rows are drawn at random.

    Args:
        keep: Share kept of each batch, (0, 1]. Default and published: 0.1, with batches of 320 samples.
        gradient: Gradient of a row. "layer": with respect to the weights of the last `nn.Linear`; needs an extra forward pass.
            "outputs": with respect to the model's outputs; the loop's own forward pass is enough. Default and published:
            "layer".
        sample: Whether to draw each row in proportion to its inner product, as in the official code, instead of taking the row
            with the largest. Default False.

    Raises:
        ValueError: A setting is out of its range.

    Example:
        >>> from thresher import DivBS
        >>> error = torch.tensor([[1.0, 0.0], [0.9, 0.0], [0.0, 0.5], [0.0, 0.1]])
        >>> method, signals = DivBS(keep=0.5, gradient="outputs"), {"id": torch.arange(4), "error": error}
        >>> method.plan_batch(signals, {}, step=0, generator=torch.Generator())[0].rows
        tensor([0, 2])
    """

    card: ClassVar[Card] = Card(
        summary="rows whose orthogonal gradients make up the batch's mean gradient",
        paper="arXiv:2406.04872",
        rule="its gradient added little to those of the chosen rows of its batch",
        biased="yes, by design: towards rows that are typical of the batch and unlike one another; nothing is re-weighted",
        forwards="every sample of a batch, to choose by; none with gradient='outputs', for which the loop's own forward pass "
        "is enough",
        claim="a better trade-off between accuracy and time than other selections within the batch, in classification, "
        "segmentation, cross-modal retrieval and fine-tuning of language models (the abstract has no number)",
        differences=(
            "The code draws each row in proportion to its inner product; here it is the largest one, unless `sample` is set.",
            "The code may draw a row more than once; here each row is chosen at most once.",
            "Rows whose gradient is not finite are kept first.",
        ),
        missing=(
            "Inner products on a random part of the entries of the gradients, as in the code on Tiny ImageNet.",
        ),
        caveat="on the planted problems `rare`, `skewed` and `noisy` it is worse than random rows of the same cost. The choice "
        "takes about twenty times as long as that of Big Loss, because rows are chosen one after another",
    )
    keep: float = 0.1
    gradient: Literal["layer", "outputs"] = "layer"
    sample: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gradient not in ("layer", "outputs"):
            raise ValueError(
                f"DivBS: `gradient` must be 'layer' or 'outputs', got {self.gradient!r}"
            )

    @property
    def requires(self) -> Requirements:
        """What the method needs: gradients at the outputs and, with `gradient="layer"`, inputs of the last layer."""
        signals = ("error", "feature") if self.gradient == "layer" else ("error",)
        return Requirements(signals=signals, switches={"feature": "gradient='outputs'"})

    def picked(self, signals: Mapping[str, Tensor], k: int, generator: torch.Generator) -> Tensor:
        """Returns the positions of the chosen rows, shape (k,), int64."""
        n = len(signals["id"])
        device = signals["id"].device
        lots = torch.rand(n, generator=generator, dtype=torch.float64)
        if self.sample:
            waits = torch.empty(k, n, dtype=torch.float64).exponential_(generator=generator)
        else:
            waits = None
        products, finite = gradient_products(signals["error"].flatten(1), signals.get("feature"))
        lots, waits = (
            None if x is None else x.to(device, products.dtype, non_blocking=True)
            for x in (lots, waits)
        )
        assert lots is not None
        return pursued(products, finite, k, lots, waits)
