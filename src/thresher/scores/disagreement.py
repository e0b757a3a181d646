"""Disagreement of an ensemble: members classify a sample differently, or no member is certain.

Chitta et al., "Training Data Subset Search with Ensemble Active Learning", arXiv:1905.12737. The paper trains on the samples on
which an ensemble disagrees.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from thresher.passes.engine import Answer, Forward
from thresher.passes.scan import Models, as_list, scan
from thresher.score_table import Scores
from thresher.scores._common import PassCounts, class_outputs, scored

DisagreementKind = Literal["entropy", "mutual_information", "variation_ratio"]


def entropy(probs: Tensor) -> Tensor:
    """Returns the entropy -sum(p log p) over the last dimension, in nats; 0 log 0 is 0.

    Args:
        probs: Probabilities, shape (..., C).

    Example:
        >>> entropy(torch.tensor([[0.5, 0.5], [0.9, 0.1]]))
        tensor([0.6931, 0.3251])
    """
    return -torch.special.xlogy(probs, probs).sum(-1)


def disagreement_of(probs: Tensor, kind: DisagreementKind) -> Tensor:
    """Measures how much the members of an ensemble disagree on each sample.

    Args:
        probs: Class probabilities, shape (M, n, C) for M members.
        kind: Measure. "entropy": entropy of the mean probabilities. "mutual_information": that entropy minus the mean entropy
            of the single members. "variation_ratio": share of the members that do not predict the most frequent class.

    Returns:
        Disagreement, shape (n,), 0 or more.

    Example:
        >>> probs = torch.tensor([[[1.0, 0.0], [1.0, 0.0]], [[0.0, 1.0], [1.0, 0.0]]])
        >>> disagreement_of(probs, "variation_ratio")
        tensor([0.5000, 0.0000])
    """
    if kind == "variation_ratio":
        votes = torch.nn.functional.one_hot(probs.argmax(2), probs.shape[2]).sum(0)
        return 1 - votes.amax(1) / len(probs)
    whole = entropy(probs.mean(0))
    if kind == "entropy":
        return whole
    return (whole - entropy(probs).mean(0)).clamp(min=0)


def disagreement(
    models: Models,
    loader: DataLoader[Any],
    *,
    kind: DisagreementKind = "entropy",
    forward: Forward | None = None,
    trained: PassCounts = (0, 0),
    provenance: Mapping[str, Any] | None = None,
) -> Scores:
    """Scores each sample by the disagreement of an ensemble; labels are not needed.

    Args:
        models: Members of the ensemble: one or more for "entropy", else two or more.
        loader: Loader over a map-style dataset without augmentation; read in the order of the dataset, whatever its sampler.
        kind: Measure of disagreement: "entropy", "mutual_information" or "variation_ratio", as in `disagreement_of`. Default:
            "entropy".
        forward: Function `(model, batch) -> (outputs, targets)`. Default: `(model(batch[0]), batch[1])`, for pairs.
        trained: Cost of training the models, `(forward, backward)`: numbers of samples that went through forward and backward
            passes. It is added to the cost of the scores. Default: (0, 0).
        provenance: Other facts about the models, such as their epochs and seeds. Default: none.

    Returns:
        Scores of all samples; the name of the scores is `kind`.

    Raises:
        TypeError: `models` or `loader` has the wrong type, or the dataset has no length.
        ValueError: `kind` is not one of the allowed values, there is one model but two are needed, the outputs do not have
            shape (n, classes), or the loader gives batches whose rows cannot be matched to samples.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> models = [torch.nn.Linear(2, 2, bias=False) for _ in range(2)]
        >>> for model, angle in zip(models, (0.0, 1.0)):
        ...     model.weight.data = 3 * torch.tensor([[1.0, angle], [-1.0, -angle]])
        >>> inputs = torch.tensor([[1.0, 1.0], [1.0, -2.0]])
        >>> disagreement(models, DataLoader(TensorDataset(inputs, torch.zeros(2))), kind="variation_ratio").values
        tensor([0.0000, 0.5000])
    """
    models = as_list(models)
    if kind not in get_args(DisagreementKind):
        raise ValueError(
            f"disagreement: `kind` must be one of {get_args(DisagreementKind)}, got {kind!r}"
        )
    if kind != "entropy" and len(models) < 2:
        raise ValueError(
            f"disagreement: `models` must be two or more for {kind!r}, got one, which always agrees with itself"
        )

    def read(answers: list[Answer]) -> Tensor:
        outputs = [class_outputs("disagreement", one) for one in answers]
        return disagreement_of(
            torch.stack([one.double().softmax(1).cpu() for one in outputs]), kind
        )

    seen = scan(models, loader, read, forward=forward)
    return scored(kind, seen, models, trained=trained, provenance=provenance)
