"""GraNd: the norm of a sample's gradient, early in training.

Paul et al., "Deep Learning on a Data Diet", NeurIPS 2021, arXiv:2107.07075: of all parameters, the mean of ten or more
networks trained for a few epochs. DeepCore (github.com/PatrickZH/DeepCore) takes the last layer's, as does the default here;
a layer without a bias has no gradient of one, which its formula counts all the same.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from thresher.attribution.rows import RowLayout
from thresher.loading.row_buffer import rows_of
from thresher.loading.trees import map_leaves
from thresher.losses.adapt import adapt
from thresher.losses.base import Criterion
from thresher.scores.passes import Answer, Forward, Models, Taken, as_list, or_nan, plain_forward, rows, scan
from thresher.scores.passes import scores_of as table
from thresher.scores.table import Scores


def last_layer(errors: Tensor, feature: Tensor, *, bias: bool = True) -> Tensor:
    """Norm of the gradient of a linear layer's parameters, of each sample.

    Args:
        errors: Gradient with respect to what the layer returns, p - y for cross-entropy, shape (n, C).
        feature: What the layer is given, shape (n, D).
        bias: Whether it has a bias.

    Returns:
        ||errors|| * sqrt(1 + ||feature||^2), without the 1 where there is no bias; shape (n,).
    """
    return errors.norm(dim=1) * (feature.square().sum(1) + bias).sqrt()


def whole_model(model: nn.Module, batch: Any, criterion: Criterion, forward: Forward) -> tuple[Tensor, Any]:
    """Norm of the gradient of all parameters that are trained, of each sample, shape (n,), and the targets.

    One forward and one backward pass a sample.

    Raises:
        ValueError: No parameter is trained.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ValueError(f"grand: no parameter of {type(model).__name__} has requires_grad=True: there is no gradient")
    n, found, targets = rows_of(batch), [], []
    for row in range(n):
        one = map_leaves(lambda leaf, i=row: leaf[i : i + 1] if leaf.dim() and len(leaf) == n else leaf, batch)
        with torch.enable_grad():
            outputs, target = forward(model, one)
            loss = criterion.means(RowLayout(1, None).rows(criterion.plain_positions(outputs, target)), target).sum()
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        norms = torch.stack([gradient.float().norm() for gradient in gradients if gradient is not None])
        found.append(or_nan(norms.norm(), loss.isfinite()))
        targets.append(target)
    return torch.stack(found), torch.cat(targets) if all(isinstance(target, Tensor) for target in targets) else targets


def grand(
    models: Models,
    loader: DataLoader[Any],
    criterion: Callable[..., Tensor],
    *,
    layer: Literal["last", "all"] = "last",
    forward: Forward | None = None,
    trained: Taken = (0, 0),
    provenance: Mapping[str, Any] | None = None,
) -> Scores:
    """The mean over models of the norm of a sample's gradient; class weights of the criterion do not count.

    Args:
        models: Trained a little.
        loader: Its dataset is read in order, whatever its sampler does. Leave augmentation out of it.
        criterion: The loss, as `thresher.attach` takes it.
        layer: "last": of the last `nn.Linear`, whose outputs are the model's, from one forward pass of a batch; "all": of
            all parameters that are trained, one forward and backward pass a sample.
        forward: `(model, batch) -> (outputs, targets)`. Default: batches are pairs.
        trained: Samples that training the models put through forward and backward passes; part of the scores' cost.
        provenance: What else is known of the models, such as their epochs and seeds.

    Raises:
        TypeError: See `passes.scan`.
        ValueError: Likewise, no such `layer`, or a model that does not end in a linear layer.
    """
    if layer not in ("last", "all"):
        raise ValueError(f"grand: `layer` must be 'last' or 'all', got {layer!r}")
    adapter, models = adapt(criterion), as_list(models)
    if layer == "all":
        own = forward or plain_forward
        norms = lambda model, batch: whole_model(model, batch, adapter, own)  # noqa: E731
        seen = scan(models, loader, lambda answers: torch.stack([one.outputs for one in answers]).mean(0), forward=norms)
        backward = len(models) * len(seen.values)
    else:
        backward = 0

        def read(answers: list[Answer]) -> Tensor:
            return torch.stack([_of_head(adapter, answer) for answer in answers]).mean(0)

        seen = scan(models, loader, read, forward=forward, features=True)
    return table("grand", seen, models, trained=trained, provenance=provenance, backward=backward, layer=layer)


def _of_head(criterion: Criterion, answer: Answer) -> Tensor:
    n, head = answer.group.n, answer.head
    assert head is not None
    if not isinstance(answer.outputs, Tensor) or answer.outputs.shape != (n, head.out_features):
        got = tuple(answer.outputs.shape) if isinstance(answer.outputs, Tensor) else type(answer.outputs).__name__
        raise ValueError(
            f"grand: the model's outputs {got} are not those of its last nn.Linear, {(n, head.out_features)}; use layer='all'"
        )
    loss = criterion.signals(answer.outputs, answer.targets, answer.group, set())["loss"]
    errors = criterion.errors(answer.outputs, answer.targets, answer.group)
    return or_nan(last_layer(errors, rows(answer.feature, n), bias=head.bias is not None), loss.isfinite())
