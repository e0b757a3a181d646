"""Prototypes: how far a sample is from the middle of its cluster in a feature space.

Sorscher et al., "Beyond neural scaling laws: beating power law scaling via data pruning", NeurIPS 2022, arXiv:2206.14486. Its
features are those of a self-supervised model and its clusters about as many as the classes; labels are not needed. Keep the
far, hard samples where there is much data, the near, easy ones where there is little, and a share of every class
(`Prune(per_class_floor=...)`). Here the nearest centroid is the one of the smallest angle, whatever cluster k-means put a
sample in.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from thresher import rng
from thresher.scores.passes import Answer, Forward, Seen, Taken, or_nan, plain_forward, rows, scan, scores_of
from thresher.scores.table import Scores

STARTS = 10
"""Beginnings of k-means, of which the best is taken."""


def to_nearest(features: Tensor, centroids: Tensor) -> Tensor:
    """1 - cosine to the nearest of the centroids, shape (N,), for features (N, D) and centroids (K, D) of any length."""
    unit, middle = (nn.functional.normalize(vectors.double(), dim=1) for vectors in (features, centroids))
    return 1 - (unit @ middle.T).amax(1)


def centroids_of(features: Tensor, clusters: int, seed: int) -> Tensor:
    """Centroids of the features at unit length, by the k-means of scikit-learn, shape (clusters, D).

    Raises:
        ImportError: scikit-learn is not installed.
    """
    unit = nn.functional.normalize(features.double(), dim=1)
    with warnings.catch_warnings(), rng.undisturbed(torch.device("cpu")):
        try:
            from sklearn.cluster import KMeans
            from sklearn.exceptions import ConvergenceWarning
        except ImportError as error:
            raise ImportError("prototypes need scikit-learn for k-means: pip install 'thresher[experiments]'") from error
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer different samples than clusters: centroids coincide
        found = KMeans(clusters, n_init=STARTS, random_state=seed).fit(unit.numpy())  # pyright: ignore[reportArgumentType]
    return torch.from_numpy(found.cluster_centers_)


def prototypes(
    model: nn.Module,
    loader: DataLoader[Any],
    clusters: int,
    *,
    seed: int = 0,
    embed: Callable[[Any, Any], Tensor] | None = None,
    forward: Forward | None = None,
    trained: Taken = (0, 0),
    provenance: Mapping[str, Any] | None = None,
) -> Scores:
    """1 - cosine of each sample's features to the nearest centroid of k-means.

    Args:
        model: Makes the features: by default what its last `nn.Linear` is given.
        loader: Its dataset is read in order, whatever its sampler does. Leave augmentation out of it.
        clusters: Of k-means, 1 or more; about as many as there are classes.
        seed: Of k-means.
        embed: `(model, batch) -> features` of shape (n, ...), for models without such a layer.
        forward: `(model, batch) -> (outputs, targets)`. Default: batches are pairs.
        trained: Samples that training the model put through forward and backward passes; part of the scores' cost.
        provenance: What else is known of the model.

    Raises:
        ImportError: scikit-learn is not installed.
        TypeError: See `passes.scan`.
        ValueError: Likewise, or more clusters than samples with finite features.
    """
    if clusters < 1:
        raise ValueError(f"prototypes: `clusters` must be 1 or more, got {clusters}")
    if embed is None:
        seen = scan(model, loader, _features, forward=forward or plain_forward, features=True)
    else:
        targets = lambda batch: batch[1] if isinstance(batch, list | tuple) and len(batch) == 2 else None  # noqa: E731
        seen = scan(model, loader, _embedded, forward=lambda model, batch: (embed(model, batch), targets(batch)))
    known = seen.values.isfinite().all(1)
    if int(known.sum()) < clusters:
        raise ValueError(f"prototypes: {clusters} `clusters` of {int(known.sum())} samples with finite features; ask for fewer")
    distances = to_nearest(seen.values, centroids_of(seen.values[known], clusters, seed))
    found = Seen(or_nan(distances, known), seen.labels)
    settings = {"clusters": clusters, "seed": seed}
    return scores_of("prototypes", found, model, trained=trained, provenance={**settings, **(provenance or {})})


def _features(answers: list[Answer]) -> Tensor:
    return rows(answers[0].feature, answers[0].group.n)


def _embedded(answers: list[Answer]) -> Tensor:
    return answers[0].outputs.float().flatten(1)
