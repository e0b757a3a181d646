"""The variance of the gradient of stratified batches, beside that of random ones, on the user's own model."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from thresher import StratifiedBatchSampler, labels_of

VARIANCE_ROUNDS, ROUND_BATCHES = 4, 12
"""Number of rounds, and of batches of each kind in a round; each round gives one ratio."""
SHORT_STEPS = 2000
"""Number of steps up to which stratified batches helped full training in the laboratory; with more, nothing was gained."""


@dataclass(frozen=True)
class VarianceRatio:
    """Variance of the gradient of a stratified batch over that of a random batch of the same size.

    Args:
        ratio: The ratio, of all rounds together; below 1 where stratified batches vary less.
        low: Smallest ratio of a round.
        high: Largest ratio of a round.
    """

    ratio: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        """Returns the values as plain numbers."""
        return asdict(self)


def variance_ratio(
    loader: DataLoader[Any], backward: Callable[[Any], None], parameters: Sequence[Tensor], seed: int
) -> VarianceRatio | None:
    """Measures the ratio, at the weights that the model has.

    Args:
        loader: Loader of the training, whose dataset, batch size and collate function are taken.
        backward: Function of a batch that adds the gradient of its mean loss to the parameters.
        parameters: Parameters of the model.
        seed: Random seed of the batches.

    Returns:
        The ratio; None where the dataset holds no classes, or has fewer than `ROUND_BATCHES` full batches.
    """
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        return None
    try:
        codes = StratifiedBatchSampler(labels_of(loader.dataset), 1).codes
    except ValueError:
        return None
    size = loader.batch_sampler.batch_size  # pyright: ignore[reportAttributeAccessIssue]
    if len(codes) < ROUND_BATCHES * size:
        return None
    random, stratified = (_batches(loader, labels, size, seed) for labels in (codes * 0, codes))

    def variance(batches: Any) -> float:
        return _variance(islice(batches, ROUND_BATCHES), backward, parameters)

    pairs = [(variance(stratified), variance(random)) for _ in range(VARIANCE_ROUNDS)]
    ratios = [one / other for one, other in pairs if other > 0]
    if len(ratios) < VARIANCE_ROUNDS:
        return None
    return VarianceRatio(sum(one for one, _ in pairs) / sum(other for _, other in pairs), min(ratios), max(ratios))


def _batches(loader: DataLoader[Any], labels: Any, size: int, seed: int) -> Iterator[Any]:
    """Yields batches of any number of epochs, stratified by some labels; where all are the same, batches are random."""
    sampler = StratifiedBatchSampler(labels, size, drop_last=True, seed=seed)
    while True:
        yield from DataLoader(loader.dataset, batch_sampler=sampler, collate_fn=loader.collate_fn)


def _variance(batches: Iterable[Any], backward: Callable[[Any], None], parameters: Sequence[Tensor]) -> float:
    """Returns the variance of the gradients of batches, summed over the parameters."""
    sums: list[Tensor] = [torch.zeros_like(one) for one in parameters]
    squares, count = 0.0, 0
    for batch in batches:
        backward(batch)
        for total, one in zip(sums, parameters, strict=True):
            if one.grad is not None:
                total += one.grad
                squares += float(one.grad.double().square().sum())
                one.grad = None
        count += 1
    return (squares - sum(float(total.double().square().sum()) for total in sums) / count) / (count - 1)


def about_strata(found: Mapping[str, float] | None, steps: int) -> str:
    """Returns what the ratio says, in one sentence.

    Args:
        found: `VarianceRatio.as_dict`; None where it is not known.
        steps: Number of steps of the planned training.
    """
    if found is None:
        return "Whether stratified batches vary less is not known: the dataset must hold classes, and a dozen batches."
    said = (
        f"The gradient of stratified batches has {found['ratio']:.2f} of the variance of random ones ({found['low']:.2f} to "
        f"{found['high']:.2f})"
    )
    if found["high"] >= 1:
        return f"{said}: no clear gain by stratify='class'."
    way = "attach(method, ..., stratify='class'), and attach(0.5) by itself"
    worth = f"{said}, as batches {1 / found['ratio']:.1f} times as large would have: {way}"
    return f"{worth}. It helped trainings of up to {SHORT_STEPS:,} steps, and no longer ones; this one has {steps:,}."
