"""D2 pruning: difficulty and diversity together, by messages between neighbors in a space of features.

Maharana et al., "D2 Pruning: Message Passing for Balancing Diversity & Difficulty in Data Pruning", ICLR 2024,
arXiv:2310.07931. First, a part of the scores of its nearest neighbors is added to the score of each sample. Then the sample
with the largest score is picked, again and again. After each pick, the neighbors lose a part of the score of the picked sample,
so that the next picks are elsewhere. The result is an order of all samples; any number of samples from its start can be kept.

The graph mode `median` of the published code uses an undefined variable, so it is left out here. As we read that code, messages
decrease with the distance, not with its square.
"""

import heapq
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thresher.score_table import Scores

BLOCK = 1024
"""Number of samples whose distances to all others are in memory at a time."""


def nearest(features: Tensor, k: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Finds the k nearest neighbors of each feature vector by Euclidean distance; ties go to lower ids.

    Args:
        features: Feature vectors, shape (N, D).
        k: Number of neighbors, 1 to N - 1; a vector is not a neighbor of itself.

    Returns:
        `(ids, distances)`: NumPy arrays of shape (N, k), int64 and float64, with the nearest neighbor first.

    Example:
        >>> nearest(torch.tensor([[0.0], [1.0], [3.0]]), 1)[0].ravel()
        array([1, 0, 1])
    """
    features = features.double()
    ids = []
    distances = []
    for start in range(0, len(features), BLOCK):
        block = torch.cdist(
            features[start : start + BLOCK], features, compute_mode="donot_use_mm_for_euclid_dist"
        )
        rows = torch.arange(len(block))
        block[rows, start + rows] = torch.inf
        order = _smallest(block, k)
        ids.append(order)
        distances.append(block.gather(1, order))
    return torch.cat(ids).numpy(), torch.cat(distances).numpy()


def _smallest(rows: Tensor, k: int) -> Tensor:
    """Returns the columns of the k smallest values of each row, the smallest first; ties go to lower columns."""
    values, order = rows.topk(k, dim=1, largest=False)
    order = order.sort(dim=1).values
    order = order.gather(1, rows.gather(1, order).argsort(dim=1, stable=True))
    # It is not defined which of equal values topk takes, so rows with ties at the end are sorted again.
    tied = ((rows <= values[:, -1:]).sum(1) > k).nonzero().squeeze(1)
    if len(tied):
        order[tied] = rows[tied].argsort(dim=1, stable=True)[:, :k]
    return order


def pick_order(
    scores: NDArray[np.float64], ids: NDArray[np.int64], messages: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Picks the sample with the largest score again and again, and lowers the scores of its neighbors after each pick.

    A neighbor loses the score of the picked sample times the message to that neighbor.

    Args:
        scores: Finite scores, shape (N,). If scores are equal, the sample with the higher id is picked first.
        ids: Neighbors of each sample, shape (N, k).
        messages: Share of a sample's score that each neighbor loses when the sample is picked, shape (N, k).

    Returns:
        Ids of all samples in the order in which they are picked, shape (N,), int64.

    Example:
        >>> pick_order(np.array([3.0, 2.9, 1.0]), np.array([[1], [0], [1]]), np.array([[0.8], [0.8], [0.1]])).tolist()
        [0, 2, 1]
    """
    now = scores.copy()
    heap = [(-score, -i) for i, score in enumerate(now.tolist())]
    heapq.heapify(heap)
    picked = np.zeros(len(now), dtype=np.bool_)
    order = []
    while len(order) < len(now):
        score, i = heapq.heappop(heap)
        if picked[-i] or -score != now[-i]:  # the score has changed since this entry was made
            continue
        picked[-i] = True
        order.append(-i)
        for neighbour, message in zip(ids[-i].tolist(), messages[-i].tolist(), strict=True):
            if not picked[neighbour]:
                now[neighbour] += score * message
                heapq.heappush(heap, (-now[neighbour], -neighbour))
    return np.array(order, dtype=np.int64)


def d2(
    scores: Scores,
    features: Tensor,
    *,
    neighbours: int = 10,
    forward: float = 1.0,
    reverse: float = 1.0,
    provenance: Mapping[str, Any] | None = None,
) -> Scores:
    """Scores each sample by its position in a greedy order of hard, dissimilar samples; the first has the highest score.

    Args:
        scores: Difficulty of all samples, larger for harder ones, such as forgetting events. Their cost is the cost of the
            result; add what the features cost with `dataclasses.replace`.
        features: Feature vectors of all samples, shape (N, D), such as inputs of the last layer.
        neighbours: Number of nearest neighbors of a sample, 1 or more; at most N - 1 are used. Default and published: 10.
        forward: Factor gamma, 0 or more. At first each neighbor adds exp(-gamma * distance) times its score to a sample's
            score. Default: 1.
        reverse: Factor gamma, 0 or more. A neighbor of a picked sample loses exp(-gamma * distance) times the score of the
            picked sample. Default: 1; the paper uses 0 to 1.
        provenance: Further facts to store with the scores. Default: none.

    Returns:
        Scores of all N samples: 1 for the last pick, 2 for the one before, and so on; NaN if the score or a feature of a sample
        is not finite.

    Raises:
        TypeError: `scores` are not `Scores`.
        ValueError: `features` do not have one row per sample, or a setting is out of its range.

    Example:
        >>> hard = Scores(torch.arange(4), torch.tensor([3.0, 2.9, 0.5, 0.4]))
        >>> d2(hard, torch.tensor([[0.0], [0.1], [9.0], [9.1]]), neighbours=1).values
        tensor([4., 2., 3., 1.])
    """
    if not isinstance(scores, Scores):
        raise TypeError(
            f"d2: `scores` must be a thresher.scores.Scores, got {type(scores).__name__}"
        )
    n = scores.samples
    if features.dim() != 2 or len(features) != n or not features.shape[1]:
        raise ValueError(
            f"d2: `features` must have shape ({n}, D), one row per sample, got {tuple(features.shape)}"
        )
    if not isinstance(neighbours, int) or isinstance(neighbours, bool) or neighbours < 1:
        raise ValueError(
            f"d2: `neighbours` must be a whole number of 1 or more, got {neighbours!r}"
        )
    for name, gamma in (("forward", forward), ("reverse", reverse)):
        if not 0 <= gamma < math.inf:
            raise ValueError(f"d2: `{name}` must be a finite number >= 0, got {gamma!r}")
    places = _places(
        scores.dense(n).double(), features.detach().cpu(), neighbours, forward, reverse
    )
    facts = {"of": scores.name, "neighbours": neighbours, "forward": forward, "reverse": reverse}
    return Scores(
        torch.arange(n),
        places,
        "d2",
        labels=None if scores.labels is None or len(scores) < n else scores.labels,
        forward=scores.forward,
        backward=scores.backward,
        provenance={**scores.provenance, **facts, **(provenance or {})},
    )


def _places(
    values: Tensor, features: Tensor, neighbours: int, forward: float, reverse: float
) -> Tensor:
    """Returns 1 for the last pick, 2 for the one before, and so on, shape (N,); NaN for samples that cannot be picked."""
    known = values.isfinite() & features.isfinite().all(1)
    places = torch.full((len(values),), torch.nan, dtype=torch.float32)
    m = int(known.sum())
    if m:
        scores = values[known].numpy()
        ids, distances = nearest(features[known], min(neighbours, m - 1))
        collected = scores + (np.exp(-forward * distances) * scores[ids]).sum(1)
        order = pick_order(collected, ids, np.exp(-reverse * distances))
        ranks = torch.empty(m, dtype=torch.float32)
        ranks[torch.from_numpy(order)] = torch.arange(m, 0, -1).float()
        places[known] = ranks
    return places
