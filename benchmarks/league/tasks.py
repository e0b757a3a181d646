"""The tasks of the league: small trainings of unlike data and networks.

On two of them, papers say, selection must win; two are read from the folder of `benchmarks.people`, in THRESHER_DATA.

- Near-duplicates: 1,000 images of Fashion-MNIST, each 1 to 20 times, moved by up to two pixels.
- Texts of unlike lengths: 32 to 384 bytes of Python's standard library, to be assigned to one of eight packages. As in the
  task of the next byte, they depend on the version of Python.
"""

import os
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.people import cifar
from benchmarks.winnow.tasks import Part, Problem, Sets, fashion, held_out
from benchmarks.winnow.tasks import problem_of as problem_of_winnow
from thresher_lab.tasks import TASKS as BUILT_IN
from thresher_lab.tasks.base import Data, Task

COPIES, SHIFT = 20, 2
"""Largest number of times that an image comes, and of pixels that a copy is moved by."""
PACKAGES = (
    "asyncio",
    "email",
    "unittest",
    "multiprocessing",
    "importlib",
    "http",
    "logging",
    "urllib",
)
SHORTEST, LONGEST = 32, 384
"""Bytes of a text; the logarithms of lengths are spread evenly."""
TRAIN, CHOICE = 2000, 1000
"""Numbers of texts that are trained on, and that rates are chosen with; the others count."""


@cache
def near_duplicates(images: int = 1000) -> Sets:
    """Returns Fashion-MNIST with each training image 1 to 20 times, moved at random; the other sets have no copies.

    Args:
        images: Number of different training images.
    """
    sets = fashion(images)
    data: Any = sets.train
    generator = torch.Generator().manual_seed(7)
    times = torch.randint(1, COPIES + 1, (images,), generator=generator)
    ids = torch.arange(images).repeat_interleave(times)
    shifts = torch.randint(-SHIFT, SHIFT + 1, (len(ids), 2), generator=generator)
    inputs, targets = data.tensors
    copies = [inputs[i].roll(tuple(by), (1, 2)) for i, by in zip(ids, shifts.tolist(), strict=True)]
    return replace(sets, train=TensorDataset(torch.stack(copies), targets[ids]))


@cache
def package_texts() -> Sets:
    """Returns texts of the standard library as bytes, padded by zeros, and the numbers of their packages."""
    generator = torch.Generator().manual_seed(11)
    inputs = list[Tensor]()
    targets = list[int]()
    for number, package in enumerate(PACKAGES):
        for text in _texts(package, generator):
            inputs.append(text)
            targets.append(number)
    padded = nn.utils.rnn.pad_sequence(inputs, batch_first=True)
    order = torch.randperm(len(padded), generator=generator)
    cuts = (order[:TRAIN], order[TRAIN : TRAIN + CHOICE], order[TRAIN + CHOICE :])
    labels = torch.tensor(targets)
    train, choice, test = ((padded[ids], labels[ids]) for ids in cuts)
    return Sets(Texts(*train), choice, test)


def _texts(package: str, generator: torch.Generator) -> list[Tensor]:
    """Returns the files of a package, cut into texts of unlike lengths."""
    files = sorted((Path(os.__file__).parent / package).glob("*.py"))
    content = torch.tensor(list(b"".join(file.read_bytes() for file in files)))
    spread = torch.rand(len(content) // SHORTEST, generator=generator)
    lengths = (SHORTEST * (LONGEST / SHORTEST) ** spread).long()
    ends = lengths.cumsum(0)
    whole = int((ends <= len(content)).sum())
    return list(content[: int(ends[whole - 1])].split(lengths[:whole].tolist()))


def lengths_of(inputs: Tensor) -> Tensor:
    """Returns the number of bytes of each text, without the zeros at its end.

    Args:
        inputs: Texts, shape (N, length).
    """
    return (inputs != 0).sum(1)


class Texts(TensorDataset):
    """Texts without the zeros at their ends, and their classes."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns a text and its class."""
        text, label = super().__getitem__(index)
        return text[: int(lengths_of(text[None]))], label


def padded(samples: list[Part]) -> tuple[Tensor, Tensor]:
    """Returns a batch, whose texts end with zeros up to the length of the longest.

    Args:
        samples: Texts with their classes.
    """
    texts, labels = zip(*samples, strict=True)
    return nn.utils.rnn.pad_sequence(list(texts), batch_first=True), torch.stack(labels)


class BytesNetwork(nn.Module):
    """Two convolutions over bytes, whose outputs are averaged over the bytes of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, 32)
        self.first = nn.Conv1d(32, 32, 5, padding=2)
        self.second = nn.Conv1d(32, 32, 5, padding=2)
        self.head = nn.Linear(32, len(PACKAGES))

    def forward(self, inputs: Tensor) -> Tensor:
        """Maps texts of shape (N, length) to scores of the packages."""
        real = (inputs != 0).unsqueeze(1)
        hidden = self.bytes(inputs).transpose(1, 2) * real
        hidden = self.first(hidden).relu() * real
        hidden = self.second(hidden).relu() * real
        return self.head(hidden.sum(2) / real.sum(2).clamp(min=1))


class TextTask(Task):
    """A task of texts."""

    def loader(self, data: Data, seed: int) -> DataLoader[Any]:
        """Returns the training batches, in an order that depends on `seed` alone."""
        generator = torch.Generator().manual_seed(seed)
        own = {"batch_size": self.batch_size, "shuffle": True, "generator": generator}
        return DataLoader(data.train, collate_fn=padded, **own)


@cache
def by_people(column: str) -> Sets:
    """Returns 5,000 images of CIFAR-10 with labels by people; those to choose rates and to count with have the right ones.

    Args:
        column: Which labels, see `benchmarks.people`: "clean" for the right ones.
    """
    labeled = cifar(column, BUILT_IN["cifar10"].find(None).parent, seed=0)  # pyright: ignore[reportOptionalMemberAccess]
    train = TensorDataset(labeled.inputs[:COLORED], labeled.labels[:COLORED])
    choice, test = (
        (labeled.test_inputs[part], labeled.test_labels[part])
        for part in (slice(CHOICE), slice(CHOICE, None))
    )
    return Sets(train, choice, test)


def colored_cnn() -> nn.Sequential:
    """Returns a network of two convolutions with stride 2 and two linear layers, for images of 3 x 32 x 32."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 32, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


_TEXTS = TextTask(
    "package-texts",
    lambda _: None,
    lambda _: package_texts().data,
    BytesNetwork,
    lr=0.015,
    batch_size=32,
    weight_decay=0.01,
    optimize="adamw",
    has_images=False,
)
_IMAGES = replace(problem_of_winnow("fashion-10k").task, name="near-duplicates")
_WRONG = replace(BUILT_IN["mnist-5k-noisy"], network=BUILT_IN["mnist-5k-mlp"].network)
_COLORED, _BY_PEOPLE = (
    replace(BUILT_IN["cifar10"], name=name, network=colored_cnn, lr=0.05, batch_size=64)
    for name in ("cifar10-5k", "cifar10-5k-people")
)
COLORED = 5000
"""Number of images of CIFAR-10."""

FIRST = (
    *map(
        problem_of_winnow,
        ("fashion-10k", "fashion-10k-noisy", "fashion-imbalanced", "bike", "text"),
    ),
    Problem(_IMAGES, near_duplicates, 10),
    Problem(_TEXTS, package_texts, 10),
)
"""The tasks of the first seeds."""
PROBLEMS = (
    *FIRST,
    problem_of_winnow("fashion-augmented-10"),
    Problem(_COLORED, partial(by_people, "clean"), 10),
    Problem(_BY_PEOPLE, partial(by_people, "worst"), 10),
    Problem(BUILT_IN["mnist-5k-mlp"], partial(held_out, "mnist-5k-mlp"), 10),
    Problem(_WRONG, partial(held_out, "mnist-5k-noisy"), 10),
)
"""All tasks."""
TASKS = tuple(problem.task.name for problem in PROBLEMS)
TITLES = {
    "near-duplicates": "Fashion-MNIST, 1,000 images, each 1 to 20 times with small shifts",
    "package-texts": "texts of 32 to 384 bytes, to be assigned to a package",
}


def problem_of(name: str) -> Problem:
    """Returns a task of the league by its name.

    Args:
        name: Name of the task.
    """
    return next(problem for problem in PROBLEMS if problem.task.name == name)
