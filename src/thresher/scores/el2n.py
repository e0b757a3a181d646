"""EL2N: how far the predicted probabilities of a sample are from its label, early in training.

Paul et al., "Deep Learning on a Data Diet", NeurIPS 2021, arXiv:2107.07075. Original code: github.com/mansheej/data_diet.
Published: the mean of ten or more networks trained for a few epochs. The mean is taken of the norms, not of the errors.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from thresher.losses.adapt import adapt
from thresher.records import NEVER_SEEN
from thresher.scores.passes import Answer, Forward, Models, Taken, or_nan, scan, scores_of
from thresher.scores.table import Scores


def error_norms(answer: Answer) -> Tensor:
    """||p - y||_2 of each sample, shape (n,), within [0, sqrt 2]; the mean over its valid positions, NaN where it has none."""
    signals = adapt(nn.CrossEntropyLoss()).signals(answer.outputs, answer.targets, answer.group, {"el2n"})
    return or_nan(signals["el2n"], signals["loss"] != NEVER_SEEN)


def el2n(
    models: Models,
    loader: DataLoader[Any],
    *,
    forward: Forward | None = None,
    trained: Taken = (0, 0),
    provenance: Mapping[str, Any] | None = None,
) -> Scores:
    """The mean over models of ||p - y||_2, p being the softmax of the outputs.

    Args:
        models: Trained a little; their outputs score classes along dimension 1, softmax not taken.
        loader: Its dataset is read in order, whatever its sampler does. Leave augmentation out of it.
        forward: `(model, batch) -> (outputs, targets)`. Default: batches are pairs.
        trained: Samples that training the models put through forward and backward passes; part of the scores' cost.
        provenance: What else is known of the models, such as their epochs and seeds.

    Raises:
        TypeError: See `passes.scan`.
        ValueError: Likewise, or outputs that do not score the classes of the targets.
    """
    seen = scan(models, loader, lambda answers: torch.stack([error_norms(one) for one in answers]).mean(0), forward=forward)
    return scores_of("el2n", seen, models, trained=trained, provenance=provenance)
