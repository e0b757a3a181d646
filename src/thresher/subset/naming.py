"""Names of the parts of a model that let the samples of a batch affect each other."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from thresher.subset.module import SubsetBackward


def mixes_samples(model: nn.Module) -> tuple[str, ...]:
    """Returns the parts of a model that let the samples of a batch affect each other, in its present mode.

    With such a part, rows that are left out of the loss still have an effect on the gradient. Where it is batch normalisation,
    `subset_backward` passes gradient back as if the kept rows were the whole batch, with the statistics of the whole batch;
    where it is anything else, `subset_backward` uses the plain model.

    Args:
        model: Any module. For a model from `subset_backward` that was called, the operations that its graphs showed are
            named too.

    Returns:
        Names such as "BatchNorm2d 'layer1.0.bn1'"; empty where no part is known to mix samples.

    Raises:
        TypeError: `model` is not a module.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        >>> mixes_samples(model)
        ("BatchNorm1d '1'",)
        >>> mixes_samples(model.eval())
        ()
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"mixes_samples: `model` must be a torch.nn.Module, got {type(model).__name__}")
    names = list(_batch_norms(model.wrapped if isinstance(model, SubsetBackward) else model))
    for part in model.modules():
        if isinstance(part, SubsetBackward):
            for known in part._traces.values():
                names.extend(name for graphs in known for name in graphs.mixing)
    return tuple(dict.fromkeys(names))


def _batch_norms(module: nn.Module) -> tuple[str, ...]:
    """Returns the names of normalisations that use the statistics of the batch itself."""
    return tuple(
        f"{type(part).__name__} {name!r}"
        for name, part in module.named_modules()
        if isinstance(part, _BatchNorm) and (part.training or part.running_mean is None)
    )
