"""The tasks of the league: five of `benchmarks.winnow`, and two on which papers say that selection must win.

- Near-duplicates: 1,000 images of Fashion-MNIST, each 1 to 20 times, moved by up to two pixels.
- Texts of unlike lengths: 32 to 384 bytes of Python's standard library, to be assigned to one of eight packages. As in the
  task of the next byte, they depend on the version of Python.
"""

import os
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.winnow.tasks import Part, Problem, Sets, fashion
from benchmarks.winnow.tasks import problem_of as problem_of_winnow
from thresher.samplers import Grouped
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


@dataclass(frozen=True)
class TextTask(Task):
    """A task of texts.

    Args:
        grouped: Whether batches have texts of similar lengths, as by `thresher.samplers.Grouped`. Default: False.
    """

    grouped: bool = False

    def loader(self, data: Data, seed: int) -> DataLoader[Any]:
        """Returns the training batches, in an order that depends on `seed` alone."""
        if self.grouped:
            batches = Grouped(lengths_of(data.train.tensors[0]), self.batch_size, seed=seed)
            return DataLoader(data.train, batch_sampler=batches, collate_fn=padded)
        generator = torch.Generator().manual_seed(seed)
        own = {"batch_size": self.batch_size, "shuffle": True, "generator": generator}
        return DataLoader(data.train, collate_fn=padded, **own)


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

OF_WINNOW = ("fashion-10k", "fashion-10k-noisy", "fashion-imbalanced", "bike", "text")
"""Tasks of `benchmarks.winnow`."""
PROBLEMS = (
    *map(problem_of_winnow, OF_WINNOW),
    Problem(_IMAGES, near_duplicates, 10),
    Problem(_TEXTS, package_texts, 10),
)
"""The tasks, in the order in which they are run."""
TASKS = tuple(problem.task.name for problem in PROBLEMS)
UNLIKE_LENGTHS = ("package-texts",)
"""Tasks whose samples have unlike lengths."""
TITLES = {
    "near-duplicates": "Fashion-MNIST, 1,000 images, each 1 to 20 times with small shifts",
    "package-texts": "texts of 32 to 384 bytes, to be assigned to a package",
}


def problem_of(name: str, *, grouped: bool = False) -> Problem:
    """Returns a task of the league by its name.

    Args:
        name: Name of the task.
        grouped: Whether batches have samples of similar lengths; for `UNLIKE_LENGTHS` alone. Default: False.
    """
    problem = next(problem for problem in PROBLEMS if problem.task.name == name)
    if not grouped:
        return problem
    return replace(problem, task=replace(problem.task, grouped=True))
