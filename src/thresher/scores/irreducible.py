"""Irreducible loss: the loss of a sample under a model that never trained on it.

Mindermann et al., "Prioritized Training on Points that are Learnable, Worth Learning, and Not Yet Learnt", ICML 2022,
arXiv:2206.07137. Original code: github.com/OATML/RHO-Loss. `thresher.RhoLoss` takes these scores.

The model is trained on holdout data. Without holdout data, two models are trained on one half of the data each, and each scores
the other half.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from thresher.losses.adapters import adapt
from thresher.passes.engine import Answer, Forward
from thresher.passes.scan import Models, Seen, as_list, scan
from thresher.score_table import Scores
from thresher.scores._common import PassCounts, or_nan, scored
from thresher.scores.memorisation import membership


def irreducible(
    models: Models,
    loader: DataLoader[Any],
    criterion: Callable[..., Tensor],
    *,
    trained_on: Sequence[Tensor] | None = None,
    forward: Forward | None = None,
    trained: PassCounts = (0, 0),
    provenance: Mapping[str, Any] | None = None,
) -> Scores:
    """Scores each sample by its mean loss under the models that did not train on it; class weights are ignored.

    Args:
        models: Models that were trained on holdout data, or each on a part of this dataset.
        loader: Loader over a map-style dataset without augmentation; read in the order of the dataset, whatever its sampler.
        criterion: Loss, in any form that `thresher.attach` accepts.
        trained_on: Ids of the samples that each model trained on, one int64 tensor per model. Default: None, no model trained
            on any sample of this dataset.
        forward: Function `(model, batch) -> (outputs, targets)`. Default: `(model(batch[0]), batch[1])`, for pairs.
        trained: Cost of training the models, `(forward, backward)`: numbers of samples that went through forward and backward
            passes. It is added to the cost of the scores. Default: (0, 0).
        provenance: Other facts about the models, such as their epochs and seeds. Default: none.

    Returns:
        Scores of all samples; NaN if a loss is not finite.

    Raises:
        TypeError: `models`, `loader` or `trained_on` has the wrong type, or the dataset has no length.
        ValueError: Every model trained on some sample, `trained_on` does not fit the models or the dataset, or the loader
            gives batches whose rows cannot be matched to samples.

    Example:
        >>> from torch import nn
        >>> from torch.utils.data import TensorDataset
        >>> halves = [nn.Linear(1, 1), nn.Linear(1, 1)]
        >>> for model, answer in zip(halves, (1.0, 3.0)):
        ...     model.weight.data, model.bias.data = torch.zeros(1, 1), torch.tensor([answer])
        >>> loader = DataLoader(TensorDataset(torch.ones(4, 1), torch.zeros(4, 1)))
        >>> irreducible(halves, loader, nn.MSELoss(), trained_on=[torch.tensor([0, 1]), torch.tensor([2, 3])]).values
        tensor([9., 9., 1., 1.])
    """
    models = as_list(models)
    adapter = adapt(criterion)
    n = len(loader.dataset)  # pyright: ignore[reportArgumentType]
    member = torch.zeros(len(models), n, dtype=torch.bool)
    if trained_on is not None:
        member = membership("irreducible", trained_on, len(models), n)
    if len(known := member.all(0).nonzero()):
        raise ValueError(
            f"irreducible: every sample needs a model that did not train on it; {len(known)} have none, such as {int(known[0])}"
        )

    def read(answers: list[Answer]) -> Tensor:
        losses = [
            adapter.signals(one.outputs, one.targets, one.layout, set())["loss"].cpu()
            for one in answers
        ]
        return torch.stack(losses, dim=1)

    seen = scan(models, loader, read, forward=forward)
    losses = seen.values.double().masked_fill(member.T, 0).sum(1) / (~member).sum(0)
    losses_seen = Seen(or_nan(losses, losses.isfinite()), seen.labels)
    return scored("irreducible", losses_seen, models, trained=trained, provenance=provenance)
