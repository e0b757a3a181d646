"""GraNd: norm of the gradient of a sample's loss, early in training.

Paul et al., "Deep Learning on a Data Diet", NeurIPS 2021, arXiv:2107.07075: gradient of all parameters, mean over ten or more
networks trained for a few epochs. DeepCore (github.com/PatrickZH/DeepCore) takes the gradient of the last layer, which is the
default here too. DeepCore's formula includes a gradient of the bias even if the layer has no bias; this implementation does
not.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from thresher.attribution.rows import RowLayout
from thresher.loading.row_buffer import rows_of
from thresher.losses.adapters import adapt
from thresher.losses.base import Criterion
from thresher.passes.engine import Answer, Forward, feature_rows, plain_forward
from thresher.passes.scan import Models, as_list, scan
from thresher.score_table import Scores
from thresher.scores._common import PassCounts, or_nan, scored
from thresher.trees import map_leaves


def last_layer(errors: Tensor, feature: Tensor, *, bias: bool = True) -> Tensor:
    """Returns for each sample the norm of the gradient of its loss with respect to the parameters of a linear layer.

    Args:
        errors: Gradient of each sample's loss with respect to the outputs of the layer, shape (n, C); for cross-entropy, the
            probabilities minus the one-hot label.
        feature: Inputs of the layer, shape (n, D).
        bias: Whether the layer has a bias. Default: True.

    Returns:
        ||errors|| * sqrt(1 + ||feature||^2), without the 1 if there is no bias; shape (n,).

    Example:
        >>> last_layer(torch.tensor([[-0.6, 0.8]]), torch.tensor([[3.0, 4.0]]), bias=False)
        tensor([5.])
    """
    return errors.norm(dim=1) * (feature.square().sum(1) + bias).sqrt()


def whole_model(
    model: nn.Module, batch: Any, criterion: Criterion, forward: Forward
) -> tuple[Tensor, Any]:
    """Returns for each sample the norm of the gradient of all parameters with requires_grad=True.

    Each sample takes one forward and one backward pass.

    Args:
        model: Model in evaluation mode.
        batch: Batch on the device of the model.
        criterion: Loss without reduction.
        forward: Function `(model, batch) -> (outputs, targets)`.

    Returns:
        Norms, shape (n,), NaN if the loss is not finite; and the targets.

    Raises:
        ValueError: No parameter has requires_grad=True.

    Example:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> layer.weight.data.fill_(0.0)
        tensor([[0.]])
        >>> batch = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [1.0]])
        >>> whole_model(layer, batch, adapt(nn.MSELoss()), plain_forward)[0]
        tensor([2., 4.])
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ValueError(
            f"grand: no parameter of {type(model).__name__} has requires_grad=True: there is no gradient"
        )
    n = rows_of(batch)
    row_norms = []
    targets = []
    for row in range(n):
        one = map_leaves(
            lambda leaf, i=row: leaf[i : i + 1] if leaf.dim() and len(leaf) == n else leaf, batch
        )
        with torch.enable_grad():
            outputs, target = forward(model, one)
            loss = criterion.means(
                RowLayout(1, None).rows(criterion.plain_positions(outputs, target)), target
            ).sum()
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        norms = torch.stack(
            [gradient.float().norm() for gradient in gradients if gradient is not None]
        )
        row_norms.append(or_nan(norms.norm(), loss.isfinite()))
        targets.append(target)
    return torch.stack(row_norms), torch.cat(targets) if all(
        isinstance(target, Tensor) for target in targets
    ) else targets


def grand(
    models: Models,
    loader: DataLoader[Any],
    criterion: Callable[..., Tensor],
    *,
    layer: Literal["last", "all"] = "last",
    forward: Forward | None = None,
    trained: PassCounts = (0, 0),
    provenance: Mapping[str, Any] | None = None,
) -> Scores:
    """Scores each sample by the mean over models of the norm of its gradient; class weights of the criterion are ignored.

    Args:
        models: Models that were trained for a few epochs.
        loader: Loader over a map-style dataset without augmentation; read in the order of the dataset, whatever its sampler.
        criterion: Loss, in any form that `thresher.attach` accepts.
        layer: Parameters whose gradient counts. "last" (default): parameters of the last `nn.Linear`, whose outputs must be the
            outputs of the model; takes one forward pass per batch. "all": all parameters with requires_grad=True; takes one
            forward and one backward pass per sample.
        forward: Function `(model, batch) -> (outputs, targets)`. Default: `(model(batch[0]), batch[1])`, for pairs.
        trained: Cost of training the models, `(forward, backward)`: numbers of samples that went through forward and backward
            passes. It is added to the cost of the scores. Default: (0, 0).
        provenance: Other facts about the models, such as their epochs and seeds. Default: none.

    Returns:
        Scores of all samples, 0 or more.

    Raises:
        TypeError: `models` or `loader` has the wrong type, or the dataset has no length.
        ValueError: `layer` is not one of the allowed values, the model does not end in a linear layer, no parameter has
            requires_grad=True, or the loader gives batches whose rows cannot be matched to samples.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> model = nn.Linear(1, 1, bias=False)
        >>> model.weight.data.fill_(0.0)
        tensor([[0.]])
        >>> data = TensorDataset(torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [1.0]]))
        >>> grand(model, DataLoader(data), nn.MSELoss()).values
        tensor([2., 4.])
    """
    if layer not in ("last", "all"):
        raise ValueError(f"grand: `layer` must be 'last' or 'all', got {layer!r}")
    adapter = adapt(criterion)
    models = as_list(models)
    if layer == "all":
        run_forward = forward or plain_forward

        def norms(model: nn.Module, batch: Any) -> Any:
            return whole_model(model, batch, adapter, run_forward)

        seen = scan(
            models,
            loader,
            lambda answers: torch.stack([one.outputs for one in answers]).mean(0),
            forward=norms,
        )
        backward = len(models) * len(seen.values)
    else:
        backward = 0

        def read(answers: list[Answer]) -> Tensor:
            return torch.stack([_head_norms(adapter, answer) for answer in answers]).mean(0)

        seen = scan(models, loader, read, forward=forward, features=True)
    return scored(
        "grand",
        seen,
        models,
        trained=trained,
        provenance=provenance,
        backward=backward,
        layer=layer,
    )


def _head_norms(criterion: Criterion, answer: Answer) -> Tensor:
    n = answer.layout.n
    head = answer.head
    assert head is not None
    if not isinstance(answer.outputs, Tensor) or answer.outputs.shape != (n, head.out_features):
        if isinstance(answer.outputs, Tensor):
            got = tuple(answer.outputs.shape)
        else:
            got = type(answer.outputs).__name__
        raise ValueError(
            f"grand: the model must return the outputs of its last nn.Linear, of shape {(n, head.out_features)}, got {got}. "
            "For other models, use layer='all'."
        )
    loss = criterion.signals(answer.outputs, answer.targets, answer.layout, set())["loss"]
    errors = criterion.errors(answer.outputs, answer.targets, answer.layout)
    return or_nan(
        last_layer(errors, feature_rows(answer.feature, n), bias=head.bias is not None),
        loss.isfinite(),
    )
