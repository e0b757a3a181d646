"""Makes scores of samples: trains models for a few epochs, as a comparison does, and scores every sample with them."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

import thresher
from thresher import FullData, loader_settings, rng, scores
from thresher.methods import no_such
from thresher.records import Column
from thresher.scores import Scores
from thresher.selection import share
from thresher_lab.recipes.running import task_of
from thresher_lab.training.loop import train_on_all
from thresher_lab.training.processes import (
    combine_counts,
    number_of_processes,
    of_each_process,
    shard_loader,
)
from thresher_lab.training.samples import class_labels, class_name
from thresher_lab.training.store import versions, whole
from thresher_lab.training.trainable import Trainable, Training

SCORES = ("el2n", "grand", "grand_all", "forgetting", "prototypes", "memorisation", "entropy", "mutual_information",
    "variation_ratio", "irreducible", "aum", "dyn_unc", "dual", "tdds", "d2")  # fmt: skip
WINDOWS = {"dyn_unc": 0, "dual": 0, "tdds": 1}
"""Number of epochs that a score needs beside those of a window; the others have none."""
OF_FEATURES = ("prototypes", "d2")
"""Scores that are made of the features of samples."""
SUBSET = 0.7
"""Share of the data that each model for memorisation scores trains on, as published."""
EXPORT_SUFFIXES = (".parquet", ".txt")

ModelProgress = Callable[[int, int, int], None]
"""Function that is called after each epoch with the number of the model, from 1, that of all models, and that of its epochs."""
Watch = Callable[[thresher.Run, nn.Module, Training], Tensor]
"""Function that returns what is recorded of all samples after an epoch, of a run, its model and the training."""
SplitSamples = Callable[[int, torch.Generator], list[Tensor | None]]
"""Function that returns, for a number of samples, the ids that each model of one seed trains on; None for all samples."""


class FullDataWithCorrect(FullData):
    """Full training that also records whether each sample was right when it was last trained on."""

    def columns(self) -> dict[str, Column]:
        """Returns the columns of full training and `correct`."""
        return {**super().columns(), "correct": Column(torch.bool)}


@dataclass
class Ensemble:
    """Models that were trained for scores, and their cost.

    Attributes:
        first: Training of the first model; its loader has all samples.
        models: The models after training.
        trained_on: Ids of the samples that each model trained on, shape (K,); None for all samples.
        watched: Values of all samples that were recorded while each model trained, shape (epochs, N, ...); empty where a score
            needs none.
        passes: Numbers of samples that went through forward and backward passes, for each model.
    """

    first: Training
    models: list[nn.Module] = field(default_factory=list)
    trained_on: list[Tensor | None] = field(default_factory=list)
    watched: list[Tensor] = field(default_factory=list)
    passes: list[tuple[int, int]] = field(default_factory=list)

    @property
    def cost(self) -> tuple[int, int]:
        """Numbers of samples that went through forward and backward passes, for all models together."""
        return sum(forward for forward, _ in self.passes), sum(
            backward for _, backward in self.passes
        )


def make_scores(
    task: str,
    score: str,
    *,
    models: int = 3,
    epochs: int = 2,
    seed: int = 0,
    data: Path | None = None,
    clusters: int | None = None,
    window: int = 10,
    progress: ModelProgress | None = None,
) -> Scores:
    """Trains models for a score, and scores every training sample.

    The learning rate follows the schedule of the training within these epochs. Model i has the seed `seed` + i. For
    "irreducible", there are two models per seed, each for one half of the data. For "memorisation", each model trains on a
    random 70 % of the data.

    Args:
        task: Name of the task, see `recipes.running.task_of`.
        score: Name of the score, one of `SCORES`.
        models: Number of models, 1 or more; 2 or more for "memorisation", "mutual_information" and "variation_ratio".
            Default: 3.
        epochs: Number of epochs that each model trains for, 1 or more. Default: 2.
        seed: Random seed of the first model. Default: 0.
        data: Folder with the data, for tasks that take one.
        clusters: Number of clusters of "prototypes". Default: the number of classes.
        window: Number of epochs of a window of "dyn_unc", "dual" and "tdds", 2 or more. Default and published: 10.
        progress: Function that is called after each epoch of each model. Default: none.

    Raises:
        ValueError: An argument is not possible; most errors come before anything is trained.
        FileNotFoundError: The data is missing.
    """
    _check(score, models=models, epochs=epochs, window=window)
    trainable = task_of(task)
    loaded = trainable.load(trainable.find(data))
    parts = {"irreducible": halves, "memorisation": random_most}.get(score, all_samples)
    seeds = [seed + number for number in range(models)]
    first = trainable.training(loaded, seed)
    if score in OF_FEATURES:
        _check_has_features(score, first.model)
    labels = class_labels(first.loader.dataset)
    if score == "prototypes" and clusters is None:
        if labels is None:
            raise ValueError(
                "score: the dataset does not tell its classes; give the number of `clusters`"
            )
        clusters = len(set(labels.tolist()))
    ensemble = train_ensemble(
        trainable, loaded, first, seeds, epochs, parts, WATCHED.get(score), progress=progress
    )
    provenance = {
        "task": task,
        "epochs": epochs,
        "seeds": seeds,
        "recipe": trainable.recipe,
        "versions": versions(),
    }
    groups = None if labels is None else torch.from_numpy(labels)
    result = _score_with(
        score, ensemble, provenance, clusters=clusters, window=window, seed=seed, labels=groups
    )
    if first.classes is None:
        return result
    return replace(result, provenance={**result.provenance, "classes": [*first.classes]})


def _check(score: str, *, models: int, epochs: int, window: int) -> None:
    """Raises ValueError where a score is not known, or cannot be made with these numbers."""
    if score not in SCORES:
        raise ValueError(f"--score: {no_such('score', score, SCORES)}")
    if models < 1 or epochs < 1:
        raise ValueError(
            f"score: `models` and `epochs` must be 1 or more, got {models} and {epochs}"
        )
    if models < 2 and score in ("memorisation", "mutual_information", "variation_ratio"):
        raise ValueError(
            f"score: {score} compares models with each other: `models` must be 2 or more, got {models}"
        )
    if score in WINDOWS and not 2 <= window <= epochs - WINDOWS[score]:
        raise ValueError(
            f"score: {score} needs windows of 2 epochs or more, and {WINDOWS[score]} more epochs than a window has; got "
            f"`window`={window} and `epochs`={epochs}. Give --epochs {window + WINDOWS[score]} or more, or a smaller --window."
        )


def _check_has_features(score: str, model: nn.Module) -> None:
    """Raises ValueError where a model has no layer whose inputs are features, before it is trained."""
    if not any(isinstance(part, nn.Linear) for part in model.modules()):
        raise ValueError(
            f"score: {score} needs features; features are the input of the last nn.Linear, and {type(model).__name__} has no "
            "nn.Linear. Use another score, such as --score forgetting."
        )


def _score_with(score: str, made: Ensemble, provenance: dict[str, Any], **how: Any) -> Scores:
    """Returns the scores that trained models give; `how` has `clusters`, `window`, `seed` and `labels` of `make_scores`."""
    models = made.models
    loader = made.first.loader
    criterion = made.first.criterion
    forward = made.first.forward
    settings: dict[str, Any] = {"trained": made.cost, "provenance": provenance, "forward": forward}
    if score == "el2n":
        return scores.el2n(models, loader, **settings)
    if score in ("grand", "grand_all"):
        return scores.grand(
            models, loader, criterion, layer="all" if score == "grand_all" else "last", **settings
        )
    if score == "irreducible":
        return scores.irreducible(
            models, loader, criterion, trained_on=_known(made.trained_on), **settings
        )
    if score == "memorisation":
        return scores.memorisation(models, _known(made.trained_on), loader, **settings)
    if score in WATCHED:
        windows = {"window": how["window"]} if score in WINDOWS else {}
        score_of = partial(
            getattr(scores, "forgetting" if score == "d2" else score),
            **windows,
            labels=how["labels"],
        )
        runs = zip(made.watched, made.passes, strict=True)
        found = Scores.mean(
            [score_of(seen, trained=cost, provenance=provenance) for seen, cost in runs]
        )
        if score == "d2":
            return picked_apart(models[0], loader, found, forward)
        return found
    if score == "prototypes":
        pairs = zip(models, made.passes, strict=True)
        settings = {**settings, "seed": how["seed"]}
        found = [
            scores.prototypes(one, loader, how["clusters"], **{**settings, "trained": cost})
            for one, cost in pairs
        ]
        return Scores.mean(found)
    return scores.disagreement(models, loader, kind=score, **settings)  # pyright: ignore[reportArgumentType]


def picked_apart(
    model: nn.Module,
    loader: DataLoader[Any],
    hard: Scores,
    forward: Callable[[nn.Module, Any], tuple[Any, Any]] | None = None,
) -> Scores:
    """Returns D2 scores of samples by how hard they are and by their features, with the cost of both.

    The places of several orders have no mean: models that pick different samples of one neighborhood would cancel each other.
    So there is one order, by the features of one model.

    Args:
        model: Model that computes the features.
        loader: Loader over all samples.
        hard: Scores of all samples, larger for harder ones.
        forward: Function `(model, batch) -> (outputs, targets)`. Default: batches are pairs.
    """
    found, _ = scores.sample_features(model, loader, forward=forward)
    return scores.d2(replace(hard, forward=hard.forward + len(found)), found)


def train_ensemble(
    task: Trainable,
    data: Any,
    first: Training,
    seeds: list[int],
    epochs: int,
    parts: SplitSamples,
    watch: Watch | None = None,
    *,
    progress: ModelProgress | None = None,
) -> Ensemble:
    """Trains the models of some seeds.

    Args:
        task: The task.
        data: Data that `task.load` returned.
        first: Training of the first seed, not begun.
        seeds: Random seeds of the models.
        epochs: Number of epochs that each model trains for.
        parts: Function that returns the samples that each model trains on.
        watch: Function that returns what to record after each epoch, one of `WATCHED`. Default: nothing is recorded.
        progress: Function that is called after each epoch of each model. Default: none.
    """
    ensemble = Ensemble(first)
    n = len(first.loader.dataset)  # pyright: ignore[reportArgumentType]
    for number, seed in enumerate(seeds):
        split = parts(n, rng.seeded(seed))
        for part, ids in enumerate(split):
            training = first if number == part == 0 else task.training(data, seed)
            if ids is not None:
                training = replace(training, loader=part_of(training.loader, ids, seed))
            if progress is None:
                done = None
            else:
                done = partial(progress, len(ensemble.models) + 1, len(seeds) * len(split))
            _train(training, epochs, seed, watch, ensemble, done)
            ensemble.trained_on.append(ids)
    return ensemble


def _train(
    training: Training,
    epochs: int,
    seed: int,
    watch: Watch | None,
    made: Ensemble,
    done: Callable[[int], None] | None,
) -> None:
    """Trains one model in a plain loop over all data, calls `done` after each epoch, and adds model and cost to `made`."""
    if training.accumulate > 1 or (watch is not None and number_of_processes() > 1):
        raise ValueError(
            "score: models for this score are trained in one process, and without accumulated gradients"
        )
    method = FullDataWithCorrect() if watch is was_right else FullData()
    seen = list[Tensor]()

    def record(run: thresher.Run, model: nn.Module, epoch: int) -> None:
        if watch is not None:
            seen.append(watch(run, model, training))
        if done is not None:
            done(epoch)

    training = replace(training, loader=shard_loader(training.loader, seed))
    attach = partial(thresher.attach, method)
    run, model = train_on_all(
        training, attach, epochs=epochs, seed=seed, command="score", after_epoch=record
    )
    made.models.append(model)
    cost = combine_counts(of_each_process(asdict(run.cost)))
    watched = 0 if watch in (None, was_right) else sum(map(len, seen))
    made.passes.append((cost["forward"] + watched, cost["backward"]))
    made.watched += [torch.stack(seen)] if seen else []
    run.detach()


def was_right(run: thresher.Run, model: nn.Module, training: Training) -> Tensor:
    """Returns whether each sample was right when it was last trained on, shape (N,), bool."""
    return run.records["correct"].cpu().clone()


def all_probabilities(run: thresher.Run, model: nn.Module, training: Training) -> Tensor:
    """Returns the probabilities of all classes, shape (N, C), by a forward pass over all samples."""
    return scores.class_probabilities(model, training.loader, forward=training.forward)[0].cpu()


def label_probabilities(run: thresher.Run, model: nn.Module, training: Training) -> Tensor:
    """Returns the probability of the label of each sample, shape (N,), by a forward pass over all samples."""
    found, labels = scores.class_probabilities(model, training.loader, forward=training.forward)
    return found.gather(1, labels.unsqueeze(1)).squeeze(1).cpu()


def label_margins(run: thresher.Run, model: nn.Module, training: Training) -> Tensor:
    """Returns how far the logit of the label is ahead of the others, shape (N,), by a forward pass over all samples.

    Logarithms of probabilities differ as the logits do; probabilities below 1e-38 count as that much.
    """
    found, labels = scores.class_probabilities(model, training.loader, forward=training.forward)
    logits = found.clamp(min=1e-38).log()
    label = labels.unsqueeze(1)
    others = logits.scatter(1, label, -torch.inf).amax(1)
    return (logits.gather(1, label).squeeze(1) - others).cpu()


WATCHED: dict[str, Watch] = {
    "forgetting": was_right,
    "aum": label_margins,
    "dyn_unc": label_probabilities,
    "dual": label_probabilities,
    "tdds": all_probabilities,
    "d2": was_right,
}
"""What the scores of the dynamics of a training record after each epoch."""


def all_samples(n: int, generator: torch.Generator) -> list[Tensor | None]:
    """Returns the samples of one model: all of them."""
    return [None]


def halves(n: int, generator: torch.Generator) -> list[Tensor | None]:
    """Returns the samples of two models: a random half for each."""
    order = torch.randperm(n, generator=generator)
    return [order[: n // 2].sort().values, order[n // 2 :].sort().values]


def random_most(n: int, generator: torch.Generator) -> list[Tensor | None]:
    """Returns the samples of one model: a random share `SUBSET`."""
    return [torch.randperm(n, generator=generator)[: max(1, share(SUBSET, n))].sort().values]


def part_of(loader: DataLoader[Any], ids: Tensor, seed: int) -> DataLoader[Any]:
    """Returns a loader with the same settings over some of the samples, shuffled.

    Args:
        loader: The loader over all samples.
        ids: Ids of the samples, shape (K,).
        seed: Random seed of the shuffling.

    Raises:
        ValueError: The loader has no batch size.
    """
    if loader.batch_size is None:
        raise ValueError(
            "score: models that train on a part of the data take a loader with a batch_size"
        )
    shuffle = {"shuffle": True, "generator": torch.Generator().manual_seed(seed)}
    sizes = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    return DataLoader(
        Subset(loader.dataset, ids.tolist()), **{**loader_settings(loader), **sizes, **shuffle}
    )


def _known(trained_on: list[Tensor | None]) -> list[Tensor]:
    return [ids for ids in trained_on if ids is not None]


def in_epochs(table: Scores, backward_to_forward: float = 2.0) -> float:
    """Returns the cost of scores, in epochs of full training on their samples."""
    passes = table.forward + backward_to_forward * table.backward
    return passes / (1 + backward_to_forward) / max(1, table.samples)


def check_export(path: Path) -> None:
    """Checks that a file for ids ends in .parquet or .txt.

    Raises:
        ValueError: The file has another suffix.
    """
    if path.suffix not in EXPORT_SUFFIXES:
        raise ValueError(
            f"--out {path}: ids go to a file that ends in {' or '.join(EXPORT_SUFFIXES)}"
        )


def export(ids: Tensor, path: Path) -> None:
    """Writes ids as Parquet with the column `id`, or as text with one id per line.

    Args:
        ids: The ids, shape (K,), int64.
        path: File; its suffix, .parquet or .txt, decides the format.

    Raises:
        ValueError: The file has another suffix.
    """
    check_export(path)
    with whole(path) as file:
        if path.suffix == ".txt":
            file.write("".join(f"{number}\n" for number in ids.tolist()).encode())
        else:
            pq.write_table(pa.table({"id": ids.numpy()}), file)


def kept_of_classes(table: Scores, kept: Tensor) -> dict[str, float]:
    """Returns the share of each class that is kept, by its name where the table has names; empty where it has no classes."""
    if table.labels is None:
        return {}
    classes, counts = table.labels.unique(return_counts=True)
    left = table.labels[torch.isin(table.ids, kept)]
    names = [class_name(number, table.provenance.get("classes")) for number in classes.tolist()]
    shares = [
        int((left == number).sum()) / n
        for number, n in zip(classes.tolist(), counts.tolist(), strict=True)
    ]
    return {
        f"class {name}" if name.isdigit() else name: share
        for name, share in zip(names, shares, strict=True)
    }
