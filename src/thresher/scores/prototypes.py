"""Prototypes: distance between a sample and the nearest centroid of k-means in a feature space.

Sorscher et al., "Beyond neural scaling laws: beating power law scaling via data pruning", NeurIPS 2022, arXiv:2206.14486. The
paper takes the features of a self-supervised model and about as many clusters as there are classes; labels are not needed. It
advises keeping the samples far from their centroid (hard) if there is much data, the near ones (easy) if there is little, and a
share of every class (`Prune(per_class_floor=...)`). Here the nearest centroid is the one at the smallest angle; k-means may
have put the sample in another cluster.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from thresher import rng
from thresher.passes.engine import Answer, Forward
from thresher.passes.scan import Seen, scan
from thresher.score_table import Scores
from thresher.scores._common import PassCounts, or_nan, sample_features, scored

STARTS = 10
"""Number of times that k-means runs, each from a random start; the best result is used."""


def to_nearest(features: Tensor, centroids: Tensor) -> Tensor:
    """Returns 1 - cosine of the angle between each feature vector and the nearest centroid, float64.

    Args:
        features: Feature vectors of any length, shape (N, D).
        centroids: Centroids of any length, shape (K, D).

    Returns:
        Distances, shape (N,), float64, within [0, 2].

    Example:
        >>> to_nearest(torch.tensor([[2.0, 0.0], [3.0, 4.0]]), torch.tensor([[1.0, 0.0]]))
        tensor([0.0000, 0.4000], dtype=torch.float64)
    """
    unit, middle = (
        nn.functional.normalize(vectors.double(), dim=1) for vectors in (features, centroids)
    )
    return 1 - (unit @ middle.T).amax(1)


def centroids_of(features: Tensor, clusters: int, seed: int) -> Tensor:
    """Returns the centroids of the features, scaled to unit length, by k-means of scikit-learn.

    Args:
        features: Feature vectors, shape (N, D), finite.
        clusters: Number of clusters, 1 to N.
        seed: Random seed of k-means.

    Returns:
        Centroids, shape (clusters, D), float64.

    Raises:
        ImportError: scikit-learn is not installed.

    Example:
        >>> centroids_of(torch.tensor([[1.0, 0.0], [0.0, 5.0]]), clusters=1, seed=0)
        tensor([[0.5000, 0.5000]], dtype=torch.float64)
    """
    unit = nn.functional.normalize(features.double(), dim=1)
    with warnings.catch_warnings(), rng.undisturbed(torch.device("cpu")):
        try:
            from sklearn.cluster import KMeans
            from sklearn.exceptions import ConvergenceWarning
        except ImportError as error:
            raise ImportError(
                "prototypes need scikit-learn for k-means: pip install scikit-learn"
            ) from error
        warnings.simplefilter(
            "ignore", ConvergenceWarning
        )  # with fewer different samples than clusters, centroids coincide
        clustering = KMeans(clusters, n_init=STARTS, random_state=seed).fit(unit.numpy())  # pyright: ignore[reportArgumentType]
    return torch.from_numpy(clustering.cluster_centers_)


def prototypes(
    model: nn.Module,
    loader: DataLoader[Any],
    clusters: int,
    *,
    seed: int = 0,
    embed: Callable[[Any, Any], Tensor] | None = None,
    forward: Forward | None = None,
    trained: PassCounts = (0, 0),
    provenance: Mapping[str, Any] | None = None,
) -> Scores:
    """Scores each sample by 1 - cosine of the angle between its features and the nearest centroid of k-means.

    Args:
        model: Model that computes the features: by default the inputs of its last `nn.Linear`.
        loader: Loader over a map-style dataset without augmentation; read in the order of the dataset, whatever its sampler.
        clusters: Number of clusters, 1 or more; about as many as there are classes.
        seed: Random seed of k-means. Default: 0.
        embed: Function `(model, batch) -> features` of shape (n, ...), for models without an `nn.Linear`. Default: None.
        forward: Function `(model, batch) -> (outputs, targets)`. Default: `(model(batch[0]), batch[1])`, for pairs.
        trained: Cost of training the model, `(forward, backward)`: numbers of samples that went through forward and backward
            passes. It is added to the cost of the scores. Default: (0, 0).
        provenance: Other facts about the model. Default: none.

    Returns:
        Scores of all samples, within [0, 2]; NaN if a feature is not finite.

    Raises:
        ImportError: scikit-learn is not installed.
        TypeError: `model` or `loader` has the wrong type, or the dataset has no length.
        ValueError: There are fewer samples with finite features than clusters, the model has no `nn.Linear`, the inputs of its
            last one are not of shape (batch, D), or the loader gives batches whose rows cannot be matched to samples.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> data = TensorDataset(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0], [0.0, 3.0]]), torch.zeros(4))
        >>> prototypes(nn.Linear(2, 2), DataLoader(data), clusters=1).values
        tensor([0.2929, 0.2929, 0.2929, 0.2929])
    """
    if clusters < 1:
        raise ValueError(f"prototypes: `clusters` must be 1 or more, got {clusters}")
    if embed is None:
        seen = Seen(*sample_features(model, loader, forward=forward))
    else:

        def targets(batch: Any) -> Any:
            if isinstance(batch, list | tuple) and len(batch) == 2:
                return batch[1]
            return None

        seen = scan(
            model,
            loader,
            _embedded,
            forward=lambda model, batch: (embed(model, batch), targets(batch)),
        )
    known = seen.values.isfinite().all(1)
    if int(known.sum()) < clusters:
        raise ValueError(
            f"prototypes: {clusters} `clusters` need as many samples with finite features, got {int(known.sum())}"
        )
    distances = to_nearest(seen.values, centroids_of(seen.values[known], clusters, seed))
    distances_seen = Seen(or_nan(distances, known), seen.labels)
    settings = {"clusters": clusters, "seed": seed}
    return scored(
        "prototypes",
        distances_seen,
        model,
        trained=trained,
        provenance={**settings, **(provenance or {})},
    )


def _embedded(answers: list[Answer]) -> Tensor:
    return answers[0].outputs.float().flatten(1)
