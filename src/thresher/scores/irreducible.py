"""Irreducible loss: what is left of a sample's loss under a model that never trained on it.

Mindermann et al., "Prioritized Training on Points that are Learnable, Worth Learning, and Not Yet Learnt", ICML 2022,
arXiv:2206.07137. Original code: github.com/OATML/RHO-Loss. `thresher.RhoLoss` takes these scores.

The model is trained on holdout data; without any, on halves of the data, each of which scores the other.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from thresher.losses.adapt import adapt
from thresher.scores.memorisation import membership
from thresher.scores.passes import Answer, Forward, Models, Seen, Taken, as_list, or_nan, scan, scores_of
from thresher.scores.table import Scores


def irreducible(
    models: Models,
    loader: DataLoader[Any],
    criterion: Callable[..., Tensor],
    *,
    trained_on: Sequence[Tensor] | None = None,
    forward: Forward | None = None,
    trained: Taken = (0, 0),
    provenance: Mapping[str, Any] | None = None,
) -> Scores:
    """The mean loss of each sample under the models that did not train on it; without class weights.

    Args:
        models: Trained on holdout data, or each on a part of this.
        loader: Its dataset is read in order, whatever its sampler does. Leave augmentation out of it.
        criterion: The loss, as `thresher.attach` takes it.
        trained_on: Of each model the ids that it trained on, int64; None: none of these samples.
        forward: `(model, batch) -> (outputs, targets)`. Default: batches are pairs.
        trained: Samples that training the models put through forward and backward passes; part of the scores' cost.
        provenance: What else is known of the models, such as their epochs and seeds.

    Raises:
        TypeError: See `passes.scan`.
        ValueError: Likewise, or a sample that every model trained on.
    """
    models, adapter = as_list(models), adapt(criterion)
    n = len(loader.dataset)  # pyright: ignore[reportArgumentType]
    member = torch.zeros(len(models), n, dtype=torch.bool)
    if trained_on is not None:
        member = membership("irreducible", trained_on, len(models), n)
    if len(known := member.all(0).nonzero()):
        raise ValueError(
            f"irreducible: every sample needs a model that did not train on it; {len(known)} have none, such as {int(known[0])}"
        )

    def read(answers: list[Answer]) -> Tensor:
        losses = [adapter.signals(one.outputs, one.targets, one.group, set())["loss"].cpu() for one in answers]
        return torch.stack(losses, dim=1)

    seen = scan(models, loader, read, forward=forward)
    losses = seen.values.double().masked_fill(member.T, 0).sum(1) / (~member).sum(0)
    found = Seen(or_nan(losses, losses.isfinite()), seen.labels)
    return scores_of("irreducible", found, models, trained=trained, provenance=provenance)
