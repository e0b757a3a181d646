"""One pass over a dataset, in its order: what trained models answer in evaluation mode, with no trace left behind."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import thresher
from thresher import rng
from thresher.attribution.rows import RowLayout
from thresher.loading.collate_check import collate_mixes
from thresher.loading.loader import KEPT_SETTINGS
from thresher.loading.trees import to_device
from thresher.scores.table import Scores
from thresher.subset.module import SubsetBackward

Models = nn.Module | Sequence[nn.Module]
Forward = Callable[[Any, Any], tuple[Any, Any]]
"""`(model, batch) -> (outputs, targets)`."""
Taken = tuple[int, int]
"""Samples put through forward and backward passes."""
BATCH_SIZE = 64
"""Where a batch sampler does not tell its own."""


class Answer(NamedTuple):
    """What one model says to one batch: outputs, targets, what its last linear layer was given, and how rows are samples."""

    outputs: Any
    targets: Any
    feature: Tensor | None
    group: RowLayout


class Seen(NamedTuple):
    """What was read of all samples, shape (N, ...), and their classes, shape (N,), int64; None where there are none."""

    values: Tensor
    labels: Tensor | None


def plain_forward(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """Outputs and targets of a batch that is a pair.

    Raises:
        ValueError: It is not.
    """
    if not (isinstance(batch, list | tuple) and len(batch) == 2):
        raise ValueError(
            f"batches must be pairs of inputs and targets, got {type(batch).__name__}: pass "
            "forward=lambda model, batch: (outputs, targets)"
        )
    return model(batch[0]), batch[1]


def scan(
    models: Models,
    loader: DataLoader[Any],
    read: Callable[[list[Answer]], Tensor],
    *,
    forward: Forward | None = None,
    features: bool = False,
) -> Seen:
    """Put every sample once through each model, without gradients, and read something of the answers.

    Modes of the models and all global random states are as before.

    Args:
        models: One or more; batches are moved to their devices.
        loader: Whose dataset is read, from its first sample to its last; all settings but the order are kept.
        read: Of a batch's answers, one a model, values of shape (n, ...).
        forward: `(model, batch) -> (outputs, targets)`. Default: batches are pairs, `(model(batch[0]), batch[1])`.
        features: Whether answers shall have what the last `nn.Linear` was given.

    Raises:
        TypeError: No models, or no loader over a map-style dataset.
        ValueError: Samples could not be told apart, or see `read`.
    """
    models = as_list(models)
    sequential = in_order(loader)
    n, answer = len(sequential.dataset), forward or plain_forward  # pyright: ignore[reportArgumentType]
    values, labels, done = [], [], 0
    with ExitStack() as stack:
        for device in {device_of(model) for model in models}:
            stack.enter_context(rng.undisturbed(device))
        if mixed := collate_mixes(sequential, []):
            raise ValueError(f"`loader`: {mixed}: scores could not be told apart by sample")
        stack.enter_context(evaluating(models))
        inputs = [stack.enter_context(last_input(model)) if features else [] for model in models]
        for batch in sequential:
            group = RowLayout(min(sequential.batch_size or n, n - done), None)
            answers = []
            for model, given in zip(models, inputs, strict=True):
                outputs, targets = answer(model, to_device(batch, device_of(model)))
                if isinstance(targets, Tensor) and targets.dim() and len(targets) % group.n:
                    raise ValueError(f"`loader` made {len(targets)} targets of {group.n} samples: they could not be told apart")
                answers.append(Answer(outputs, targets, given.pop() if features else None, group))
            part = read(answers).detach().cpu()
            if not part.dim() or len(part) != group.n:
                raise ValueError(f"{group.n} samples gave values of shape {tuple(part.shape)}; expected one row a sample")
            values.append(part)
            labels.append(classes_of(answers[0].targets, group.n))
            done += group.n
    known = [one for one in labels if one is not None]
    return Seen(torch.cat(values), torch.cat(known) if len(known) == len(labels) else None)


def as_list(models: Models) -> list[nn.Module]:
    """The models.

    Raises:
        TypeError: None, or something else.
    """
    found = [models] if isinstance(models, nn.Module) else list(models)
    if not found or not all(isinstance(model, nn.Module) for model in found):
        got = ", ".join(type(model).__name__ for model in found) or "none"
        raise TypeError(f"`models` must be one torch.nn.Module or more, got {got}")
    return found


def in_order(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The loader with the samples in the order of the dataset, every one once.

    Raises:
        TypeError: Not a DataLoader over a map-style dataset.
        ValueError: It does not make the batches, or the dataset is empty.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(f"`loader` must be a torch.utils.data.DataLoader, got {type(loader).__name__}")
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"`loader` iterates over {type(dataset).__name__}: its samples have no ids, so no score could be kept. Scores need "
            "a map-style dataset (__getitem__ and __len__)."
        )
    if loader.batch_sampler is None:
        raise ValueError("`loader` has batch_size=None: batches must be made by the loader. Give it a batch_size.")
    if not len(dataset):
        raise ValueError("`loader`: the dataset is empty")
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or BATCH_SIZE
    settings = {name: getattr(loader, name) for name in KEPT_SETTINGS if name not in ("generator", "persistent_workers")}
    return DataLoader(dataset, batch_size=size, **settings)


def device_of(model: nn.Module) -> torch.device:
    """Where a model is; the CPU where it has neither parameters nor buffers."""
    return next((tensor.device for tensor in chain(model.parameters(), model.buffers())), torch.device("cpu"))


def classes_of(targets: Any, n: int) -> Tensor | None:
    """Targets that are classes, one a sample; None where they are something else."""
    whole = isinstance(targets, Tensor) and targets.shape == (n,) and targets.dtype == torch.int64
    return targets.cpu() if whole else None


@contextmanager
def evaluating(models: Sequence[nn.Module]) -> Iterator[None]:
    """Evaluation mode without gradients; every module's own mode is put back."""
    parts = [part for model in models for part in model.modules()]
    parts += [part.wrapped for part in parts if isinstance(part, SubsetBackward)]
    modes = [(part, part.training) for part in parts]
    try:
        for model in models:
            model.eval()
        with torch.no_grad():
            yield
    finally:
        for part, mode in modes:
            part.training = mode


def last_linear(model: nn.Module) -> nn.Linear:
    """The layer that turns features into outputs.

    Raises:
        ValueError: The model has no `nn.Linear`.
    """
    layers = [part for part in model.modules() if isinstance(part, nn.Linear)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no nn.Linear, whose inputs would be the features of a sample")
    return layers[-1]


@contextmanager
def last_input(model: nn.Module) -> Iterator[list[Tensor]]:
    """What the last linear layer was given in the last call, in a list that the caller empties."""
    given: list[Tensor] = []

    def keep(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        given[:] = inputs[:1]

    handle = last_linear(model).register_forward_pre_hook(keep)
    try:
        yield given
    finally:
        handle.remove()


def rows(feature: Tensor | None, n: int) -> Tensor:
    """Features as (n, D).

    Raises:
        ValueError: The last linear layer was not given one row a sample.
    """
    assert feature is not None
    if feature.dim() != 2 or len(feature) != n:
        raise ValueError(
            f"the model's last nn.Linear was given {tuple(feature.shape)} for {n} samples; this score needs one row of "
            "features a sample, shape (n, D)"
        )
    return feature.float()


def or_nan(values: Tensor, known: Tensor) -> Tensor:
    """The values where they are known, else NaN."""
    return torch.where(known, values.float(), torch.nan)


def scores_of(
    name: str,
    seen: Seen,
    models: Models,
    *,
    trained: Taken,
    provenance: Mapping[str, Any] | None,
    backward: int = 0,
    **settings: Any,
) -> Scores:
    """Scores with what they cost: one forward pass of all samples a model, and what the caller says the models took.

    Args:
        name: Of the score.
        seen: Values of shape (N,).
        models: That answered.
        trained: Samples that training them put through forward and backward passes.
        provenance: What the caller knows of them.
        backward: Samples that scoring itself put through backward passes.
        settings: Of the score.

    Raises:
        ValueError: `trained` is not two numbers of 0 or more.
    """
    models, n = as_list(models), len(seen.values)
    if len(trained) != 2 or not all(isinstance(count, int) and count >= 0 for count in trained):
        raise ValueError(f"{name}: `trained` must be two whole numbers of 0 or more (forward, backward), got {trained!r}")
    versions = {"thresher": thresher.__version__, "torch": str(torch.__version__)}
    known = {"models": len(models), "model": type(models[0]).__name__, "versions": versions, **settings, **(provenance or {})}
    return Scores(
        torch.arange(n),
        seen.values,
        name,
        labels=seen.labels,
        forward=trained[0] + n * len(models),
        backward=trained[1] + backward,
        provenance=known,
    )
