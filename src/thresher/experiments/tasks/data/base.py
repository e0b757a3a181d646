"""The training and test samples of a task, as tensors in memory."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.data import TensorDataset


@dataclass(frozen=True)
class Data:
    """The training samples and the test samples of a task.

    Args:
        train: Dataset of training samples, pairs of an input and a target.
        test_inputs: Inputs of the network: images of shape (N, channels, H, W), rows of shape (N, features), or tokens of
            shape (N, length).
        test_targets: Class labels of shape (N,), (N, positions) or (N, H, W), int64, or values of shape (N, outputs), float32.
    """

    train: TensorDataset
    test_inputs: Tensor
    test_targets: Tensor


def training_subset(data: Data, samples: int) -> Data:
    """Returns the data with a subset of the training samples, always the same one, and with all test samples.

    If each sample has one label, the numbers of samples per class differ by at most one.

    Args:
        data: Data of a task.
        samples: Number of training samples to keep.

    Raises:
        ValueError: A class has too few samples or would have none, or there are too few samples in total.
    """
    targets = data.train.tensors[1]
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    one_label = targets.dim() == 1 and not targets.is_floating_point()
    ids = _of_each_class(targets, order, samples) if one_label else order[:samples]
    if len(ids) < samples:
        raise ValueError(f"a part of the training samples has 1 to {len(order)} of them, got {samples}")
    return replace(data, train=TensorDataset(*(tensor[ids.sort().values] for tensor in data.train.tensors)))


def with_wrong_labels(data: Data, share: float) -> Data:
    """Returns the data with a share of the training labels replaced by another class, always the same ones; test labels stay.

    Args:
        data: Data of a task with one class per sample.
        share: Share of the training labels, [0, 1]: exactly floor(share * N) labels.
    """
    inputs, labels = data.train.tensors
    generator = torch.Generator().manual_seed(1)
    classes, wrong = int(labels.max()) + 1, torch.randperm(len(labels), generator=generator)[: int(share * len(labels) + 1e-9)]
    changed = labels.clone()
    changed[wrong] = (labels[wrong] + torch.randint(1, classes, (len(wrong),), generator=generator)) % classes
    return replace(data, train=TensorDataset(inputs, changed))


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
