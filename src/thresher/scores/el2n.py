"""EL2N: distance between the predicted probabilities of a sample and its label, early in training.

Paul et al., "Deep Learning on a Data Diet", NeurIPS 2021, arXiv:2107.07075. Original code: github.com/mansheej/data_diet.
The paper takes the mean over ten or more networks trained for a few epochs: the mean of the norms, not of the errors.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from thresher.losses.adapters import adapt
from thresher.passes.engine import Answer, Forward
from thresher.passes.scan import Models, scan
from thresher.records import NEVER_SEEN
from thresher.score_table import Scores
from thresher.scores._common import PassCounts, or_nan, scored


def error_norms(answer: Answer) -> Tensor:
    """Returns ||p - y||_2 of each sample, the mean over its valid positions.

    Args:
        answer: Outputs of one model for one batch, with the targets.

    Returns:
        Norms, shape (n,), within [0, sqrt(2)]; NaN if a sample has no valid position.

    Example:
        >>> from thresher.attribution.rows import RowLayout
        >>> probs, target = torch.tensor([[0.7, 0.2, 0.1]]), torch.tensor([0])
        >>> error_norms(Answer(probs.log(), target, None, RowLayout(1)))
        tensor([0.3742])
    """
    signals = adapt(nn.CrossEntropyLoss()).signals(
        answer.outputs, answer.targets, answer.layout, {"el2n"}
    )
    return or_nan(signals["el2n"], signals["loss"] != NEVER_SEEN)


def el2n(
    models: Models,
    loader: DataLoader[Any],
    *,
    forward: Forward | None = None,
    trained: PassCounts = (0, 0),
    provenance: Mapping[str, Any] | None = None,
) -> Scores:
    """Scores each sample by the mean over models of ||p - y||_2, where p is the softmax of the outputs.

    Args:
        models: Models that were trained for a few epochs; their outputs are logits with the classes in dimension 1.
        loader: Loader over a map-style dataset without augmentation; read in the order of the dataset, whatever its sampler.
        forward: Function `(model, batch) -> (outputs, targets)`. Default: `(model(batch[0]), batch[1])`, for pairs.
        trained: Cost of training the models, `(forward, backward)`: numbers of samples that went through forward and backward
            passes. It is added to the cost of the scores. Default: (0, 0).
        provenance: Other facts about the models, such as their epochs and seeds. Default: none.

    Returns:
        Scores of all samples, within [0, sqrt(2)].

    Raises:
        TypeError: `models` or `loader` has the wrong type, or the dataset has no length.
        ValueError: The outputs do not fit the targets, or the loader gives batches whose rows cannot be matched to samples.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> model = nn.Linear(1, 2, bias=False)
        >>> model.weight.data = torch.tensor([[-1.0], [1.0]])
        >>> data = TensorDataset(torch.tensor([[2.0], [0.1], [-2.0]]), torch.tensor([1, 1, 1]))
        >>> el2n(model, DataLoader(data)).values
        tensor([0.0254, 0.6366, 1.3888])
    """
    seen = scan(
        models,
        loader,
        lambda answers: torch.stack([error_norms(one) for one in answers]).mean(0),
        forward=forward,
    )
    return scored("el2n", seen, models, trained=trained, provenance=provenance)
