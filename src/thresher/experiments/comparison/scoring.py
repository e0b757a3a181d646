"""Static scores from scratch: models trained for a few epochs as a comparison trains them, then asked about every sample."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

import thresher
from thresher import rng, scores
from thresher.experiments.recipes.resolve import task_of
from thresher.experiments.training.trainable import Trainable, Training
from thresher.experiments.training.loop import pair_of
from thresher.experiments.training.recording import class_labels
from thresher.experiments.training.store import versions, whole
from thresher.loading.loader import KEPT_SETTINGS
from thresher.methods.full import FullData
from thresher.records import Column
from thresher.scores import Scores
from thresher.selection import share

SCORES = (
    "el2n",
    "grand",
    "grand_all",
    "forgetting",
    "prototypes",
    "memorisation",
    "entropy",
    "mutual_information",
    "variation_ratio",
    "irreducible",
)
SUBSET = 0.7
"""Share of the data that each model of memorisation trains on, as published."""
ENDINGS = (".parquet", ".txt")

Progress = Callable[[int, int], None]
"""Called with the number of models trained, and of all."""
Parts = Callable[[int, torch.Generator], list[Tensor | None]]
"""Of so many samples the ids that the models of one seed train on, a model each; None for all samples."""


class Watched(FullData):
    """All data, and whether each sample was right when it was last trained on."""

    def columns(self) -> dict[str, Column]:
        """The last loss and `correct`."""
        return {**super().columns(), "correct": Column(torch.bool)}


@dataclass
class Ensemble:
    """Models trained for scores, and what they took.

    Attributes:
        first: What the first of them trained, its loader over all samples.
        models: As they are at the end.
        trained_on: Of each the ids; None for all.
        correct: Of each, whether the samples were right, shape (epochs, N), bool; empty where nobody asked.
        taken: Of each, samples put through forward and backward passes.
    """

    first: Training
    models: list[nn.Module] = field(default_factory=list)
    trained_on: list[Tensor | None] = field(default_factory=list)
    correct: list[Tensor] = field(default_factory=list)
    taken: list[tuple[int, int]] = field(default_factory=list)

    @property
    def cost(self) -> tuple[int, int]:
        """Of all together."""
        return sum(forward for forward, _ in self.taken), sum(backward for _, backward in self.taken)


def make_scores(
    task: str,
    score: str,
    *,
    models: int = 3,
    epochs: int = 2,
    seed: int = 0,
    data: Path | None = None,
    clusters: int | None = None,
    progress: Progress | None = None,
) -> Scores:
    """Train models for a score, and score every training sample.

    The learning rate follows the schedule of the training within these epochs. Model i has the seed `seed` + i. For
    "irreducible" it is two models a seed, each of a half of the data; for "memorisation" each trains on a random 70 %.

    Args:
        task: See `tasks.task_of`.
        score: One of `SCORES`.
        models: How many, 1 or more; two or more for "memorisation", "mutual_information" and "variation_ratio".
        epochs: That each trains for, 1 or more.
        seed: Of the first.
        data: A folder with the data, for tasks that take one.
        clusters: Of "prototypes". Default: as many as there are classes.
        progress: Told after each model.

    Raises:
        ValueError: Something that was asked for is not possible; mostly before anything is trained.
        FileNotFoundError: The data is not there.
    """
    if score not in SCORES:
        raise ValueError(f"--score: no score {score!r}; there are {', '.join(SCORES)}")
    if models < 1 or epochs < 1:
        raise ValueError(f"score: `models` and `epochs` must be 1 or more, got {models} and {epochs}")
    if models < 2 and score in ("memorisation", "mutual_information", "variation_ratio"):
        raise ValueError(f"score: {score} compares models with each other: `models` must be 2 or more, got {models}")
    trainable = task_of(task)
    loaded = trainable.load(trainable.find(data))
    parts = {"irreducible": halves, "memorisation": most}.get(score, everything)
    seeds = [seed + number for number in range(models)]
    first = trainable.training(loaded, seed)
    labels = class_labels(first.loader.dataset)
    if score == "prototypes" and clusters is None:
        if labels is None:
            raise ValueError("score: the dataset does not tell its classes; give the number of `clusters`")
        clusters = len(set(labels.tolist()))
    made = trained(trainable, loaded, first, seeds, epochs, parts, watch=score == "forgetting", progress=progress)
    told = {"task": task, "epochs": epochs, "seeds": seeds, "recipe": trainable.recipe, "versions": versions()}
    return _of(score, made, told, clusters=clusters, seed=seed, labels=None if labels is None else torch.from_numpy(labels))


def _of(score: str, made: Ensemble, told: dict[str, Any], *, clusters: int | None, seed: int, labels: Tensor | None) -> Scores:
    models, loader, criterion = made.models, made.first.loader, made.first.criterion
    given: dict[str, Any] = {"trained": made.cost, "provenance": told}
    if score == "el2n":
        return scores.el2n(models, loader, **given)
    if score in ("grand", "grand_all"):
        return scores.grand(models, loader, criterion, layer="all" if score == "grand_all" else "last", **given)
    if score == "irreducible":
        return scores.irreducible(models, loader, criterion, trained_on=_known(made.trained_on), **given)
    if score == "memorisation":
        return scores.memorisation(models, _known(made.trained_on), loader, **given)
    if score == "forgetting":
        runs = zip(made.correct, made.taken, strict=True)
        found = [scores.forgetting(right, labels=labels, trained=cost, provenance=told) for right, cost in runs]
        return Scores.mean(found)
    if score == "prototypes":
        assert clusters is not None
        pairs = zip(models, made.taken, strict=True)
        found = [scores.prototypes(one, loader, clusters, seed=seed, trained=cost, provenance=told) for one, cost in pairs]
        return Scores.mean(found)
    return scores.disagreement(models, loader, kind=score, **given)  # pyright: ignore[reportArgumentType]


def trained(
    task: Trainable,
    data: Any,
    first: Training,
    seeds: list[int],
    epochs: int,
    parts: Parts,
    *,
    watch: bool = False,
    progress: Progress | None = None,
) -> Ensemble:
    """Train the models of some seeds.

    Args:
        task: What is trained.
        data: From `task.load`.
        first: The training of the first seed, not begun.
        seeds: Of the models.
        epochs: That each trains for.
        parts: What each trains on.
        watch: Whether to remember after each epoch which samples were right.
        progress: Told after each model.
    """
    made = Ensemble(first)
    n = len(first.loader.dataset)  # pyright: ignore[reportArgumentType]
    for number, seed in enumerate(seeds):
        split = parts(n, rng.seeded(seed))
        for part, ids in enumerate(split):
            training = first if number == part == 0 else task.training(data, seed)
            if ids is not None:
                training = replace(training, loader=part_of(training.loader, ids, seed))
            _train(training, epochs, seed, watch, made)
            made.trained_on.append(ids)
            if progress is not None:
                progress(len(made.models), len(seeds) * len(split))
    return made


def _train(training: Training, epochs: int, seed: int, watch: bool, made: Ensemble) -> None:
    """A plain loop over all data; the model and what it took are added to those `made`."""
    accelerator = Accelerator()
    with rng.undisturbed(accelerator.device):
        torch.manual_seed(seed)
        model, optimizer = accelerator.prepare(training.model, training.optimizer)
        run = thresher.attach(
            Watched() if watch else FullData(),
            loader=training.loader,
            criterion=training.criterion,
            model=model,
            optimizer=optimizer,
            epochs=epochs,
            seed=seed,
        )
        scheduler, correct = thresher.ProgressLR(optimizer, run, training.schedule), []
        for _ in range(epochs):
            for batch in run.loader:
                x, y = pair_of(batch)
                loss = run.criterion(run.model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if watch:
                correct.append(run.records["correct"].cpu().clone())
    if not run.cost.backward:
        raise ValueError(f"score: a loader of {run.loader.n} samples has no batch; give it more of them, or drop_last=False")
    made.models.append(accelerator.unwrap_model(model, keep_fp32_wrapper=False))
    made.taken.append((run.cost.forward, run.cost.backward))
    made.correct += [torch.stack(correct)] if watch else []
    run.detach()


def everything(n: int, generator: torch.Generator) -> list[Tensor | None]:
    """One model on all samples."""
    return [None]


def halves(n: int, generator: torch.Generator) -> list[Tensor | None]:
    """Two models, each on a random half."""
    order = torch.randperm(n, generator=generator)
    return [order[: n // 2].sort().values, order[n // 2 :].sort().values]


def most(n: int, generator: torch.Generator) -> list[Tensor | None]:
    """One model on a random `SUBSET` of the samples."""
    return [torch.randperm(n, generator=generator)[: max(1, share(SUBSET, n))].sort().values]


def part_of(loader: DataLoader[Any], ids: Tensor, seed: int) -> DataLoader[Any]:
    """A loader with the same settings over some of the samples, shuffled.

    Raises:
        ValueError: Its batches are of its own making.
    """
    if loader.batch_size is None:
        raise ValueError("score: models that train on a part of the data take a loader with a batch_size")
    settings = {name: getattr(loader, name) for name in KEPT_SETTINGS if name != "generator"}
    shuffle = {"shuffle": True, "generator": torch.Generator().manual_seed(seed)}
    return DataLoader(
        Subset(loader.dataset, ids.tolist()), batch_size=loader.batch_size, drop_last=loader.drop_last, **shuffle, **settings
    )


def _known(trained_on: list[Tensor | None]) -> list[Tensor]:
    return [ids for ids in trained_on if ids is not None]


def in_epochs(table: Scores, backward_to_forward: float = 2.0) -> float:
    """What scores cost, in epochs of full training on their samples."""
    passes = table.forward + backward_to_forward * table.backward
    return passes / (1 + backward_to_forward) / max(1, table.samples)


def check_export(path: Path) -> None:
    """Refuse a file for ids that has another ending than .parquet or .txt.

    Raises:
        ValueError: It has.
    """
    if path.suffix not in ENDINGS:
        raise ValueError(f"--out {path}: ids go to a file that ends in {' or '.join(ENDINGS)}")


def export(ids: Tensor, path: Path) -> None:
    """Write ids, shape (K,), as Parquet with the column id, or as text with one a line, by the ending of the file.

    Raises:
        ValueError: Another ending.
    """
    check_export(path)
    with whole(path) as file:
        if path.suffix == ".txt":
            file.write("".join(f"{number}\n" for number in ids.tolist()).encode())
        else:
            pq.write_table(pa.table({"id": ids.numpy()}), file)


def kept_of_classes(table: Scores, kept: Tensor) -> dict[int, float]:
    """Share of each class that is kept; empty where there are no classes."""
    if table.labels is None:
        return {}
    classes, counts = table.labels.unique(return_counts=True)
    left = table.labels[torch.isin(table.ids, kept)]
    return {number: int((left == number).sum()) / n for number, n in zip(classes.tolist(), counts.tolist(), strict=True)}
