"""One pass over a whole dataset, in its own order, through one or more models."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from thresher.distributed.wrappers import inside
from thresher.loading.collate_check import UnknownRows, checked
from thresher.loading.samplers import check_iteration
from thresher.loading.settings import KEPT_SETTINGS
from thresher.passes.engine import (
    Answer,
    Forward,
    answers,
    device_of_model,
    isolated_pass,
    labels_or_none,
    plain_forward,
)

Models = nn.Module | Sequence[nn.Module]
BATCH_SIZE = 64
"""Batch size if a batch sampler has no attribute `batch_size`."""


class Seen(NamedTuple):
    """Values and classes of all samples.

    Attributes:
        values: Values of the samples, shape (N, ...).
        labels: Classes of the samples, shape (N,), int64; None if they have none.
    """

    values: Tensor
    labels: Tensor | None


def scan(
    models: Models,
    loader: DataLoader[Any],
    read: Callable[[list[Answer]], Tensor],
    *,
    forward: Forward | None = None,
    features: bool = False,
) -> Seen:
    """Runs every sample once through each model without gradients, and reads values from the answers.

    The modes of the models and all global random states are restored.

    Args:
        models: One model or more; batches are moved to their devices.
        loader: Loader whose dataset is read, from its first sample to its last; all settings but the order are kept.
        read: Function that gets the `Answer` of each model to a batch, as a list, and returns values of shape (n, ...).
        forward: Function `(model, batch) -> (outputs, targets)`. Default: batches are pairs, `(model(batch[0]), batch[1])`.
        features: Whether the answers contain the input of the `nn.Linear` that ran last.

    Returns:
        The values and the classes of all samples.

    Raises:
        TypeError: `models` holds no model, or `loader` is not a DataLoader over a map-style dataset.
        ValueError: The rows of a batch are not its samples, or `read` does not return one value per sample.
    """
    models = as_list(models)
    sequential = in_order(loader)
    # A collate function that leaves samples out or reorders them would silently give scores to the wrong ids.
    sequential.collate_fn = checked(sequential)
    values = []
    labels = []
    # Each device once, in the order of the models.
    devices = dict.fromkeys(device_of_model(model) or torch.device("cpu") for model in models)
    with isolated_pass(models, devices=devices):
        for found in answers(
            models, _with_counts(sequential), forward or plain_forward, features=features
        ):
            n = found[0].layout.n
            _check_targets(found, n)
            # Kept on the CPU: values of all samples, such as features, may not fit on the device.
            part = read(found).detach().cpu()
            if not part.dim() or len(part) != n:
                raise ValueError(
                    f"{n} samples gave values of shape {tuple(part.shape)}; expected one row per sample"
                )
            values.append(part)
            labels.append(labels_or_none(found[0].targets, n))
    known = [one.cpu() for one in labels if one is not None]
    # Classes of some batches only are no classes of the dataset: row i must be sample i.
    return Seen(torch.cat(values), torch.cat(known) if len(known) == len(labels) else None)


def _with_counts(loader: DataLoader[Any]) -> Iterator[tuple[Any, int]]:
    """Yields the batches of a loader in order, with their numbers of samples."""
    left = len(loader.dataset)  # pyright: ignore[reportArgumentType]
    rows = UnknownRows(collate_keeps_rows=None)
    for batch in map(rows.open, loader):
        if rows.reason is not None:
            raise ValueError(f"`loader`: {rows.reason}: scores cannot be assigned to samples")
        # Counted, not read from the batch: its structure is the user's own, and any of its tensors may have other rows.
        n = min(loader.batch_size or left, left)
        left -= n
        yield batch, n


def _check_targets(found: list[Answer], n: int) -> None:
    for targets in (one.targets for one in found):
        # Several targets per sample are allowed, as in flattened tokens.
        if isinstance(targets, Tensor) and targets.dim() and len(targets) % n:
            raise ValueError(
                f"`loader` yielded {len(targets)} targets for {n} samples: they cannot be assigned to samples"
            )


def as_list(models: Models) -> list[nn.Module]:
    """Returns the models as a list, each taken out of wrappers whose calls wait for other processes.

    Raises:
        TypeError: `models` is empty, or one of them is not a module.
    """
    modules = [models] if isinstance(models, nn.Module) else list(models)
    if not modules or not all(isinstance(model, nn.Module) for model in modules):
        got = ", ".join(type(model).__name__ for model in modules) or "none"
        raise TypeError(f"`models` must be one torch.nn.Module or more, got {got}")
    # A scan may run in one process alone, which must not wait for the others.
    return [inside(model) for model in modules]


def in_order(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Returns a loader of the same dataset with the samples in the order of the dataset, every one once.

    Raises:
        TypeError: `loader` is not a DataLoader over a map-style dataset.
        ValueError: `loader` has batch_size=None, or is a subclass that makes batches in its own way; or the dataset is empty.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"`loader` must be a torch.utils.data.DataLoader, got {type(loader).__name__}"
        )
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"`loader` iterates over {type(dataset).__name__}: its samples have no indices. Scores need a map-style dataset "
            "(__getitem__ and __len__)."
        )
    if loader.batch_sampler is None:
        raise ValueError(
            "`loader` has batch_size=None: batches must be made by the loader. Give it a batch_size."
        )
    if not len(dataset):
        raise ValueError("`loader`: the dataset is empty")
    check_iteration(loader)
    # A loader with a batch sampler has no batch size of its own.
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or BATCH_SIZE
    # The state of the user's generator must not move. Persistent workers would only outlive the single pass of this loader.
    settings = {
        name: getattr(loader, name)
        for name in KEPT_SETTINGS
        if name not in ("generator", "persistent_workers")
    }
    return DataLoader(dataset, batch_size=size, **settings)
