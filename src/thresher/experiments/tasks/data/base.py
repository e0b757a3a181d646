"""What a task trains and tests on, as tensors in memory."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.data import TensorDataset


@dataclass(frozen=True)
class Data:
    """Training samples as a dataset of pairs of inputs and targets, and the test samples.

    Inputs are as the network takes them: pictures of shape (N, channels, H, W), rows of shape (N, features), tokens of shape
    (N, length). Targets are class labels (N,), (N, positions) or (N, H, W), int64, or values (N, outputs), float32.
    """

    train: TensorDataset
    test_inputs: Tensor
    test_targets: Tensor


def part(data: Data, samples: int) -> Data:
    """So many of the training samples, the same every time, and all of the test set.

    Of samples with one label each, classes in equal numbers, give or take one.

    Raises:
        ValueError: A class has too few samples or would have none, or there are too few samples at all.
    """
    targets = data.train.tensors[1]
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    one_label = targets.dim() == 1 and not targets.is_floating_point()
    ids = _of_each_class(targets, order, samples) if one_label else order[:samples]
    if len(ids) < samples:
        raise ValueError(f"a part of the training samples has 1 to {len(order)} of them, got {samples}")
    return replace(data, train=TensorDataset(*(tensor[ids.sort().values] for tensor in data.train.tensors)))


def _of_each_class(labels: Tensor, order: Tensor, samples: int) -> Tensor:
    classes = int(labels.max()) + 1
    wanted = [samples // classes + (number < samples % classes) for number in range(classes)]
    of_class = [order[labels[order] == number] for number in range(classes)]
    if not wanted[-1] or any(len(ids) < count for ids, count in zip(of_class, wanted, strict=True)):
        most = classes * min(map(len, of_class))
        raise ValueError(
            f"a part of the training samples has {classes} to {most} of them, as many of each class; got {samples}"
        )
    return torch.cat([ids[:count] for ids, count in zip(of_class, wanted, strict=True)])
