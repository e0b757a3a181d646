"""What the plan of an epoch says of single samples, looked up by their ids."""

import numpy as np
import torch
from torch import Tensor

from thresher.plans import EpochPlan

PART = 2**20
"""Least number of ids that are entered into the mask with each look-up, until all of them are."""

PER_ID = 16
"""Number of ids that are entered for each one that is looked up: a search takes longer than that."""


class KeptIds:
    """Tells of ids whether they are in a plan.

    A mask of all samples tells it. It is made in parts, so that the first batch of an epoch does not wait for the whole of it;
    ids behind the made part are searched for in the plan.

    Args:
        ids: Ids of the plan, shape (K,), int64, ascending.
        n: Number of samples of the dataset.

    Example:
        >>> kept = KeptIds(torch.tensor([1, 2, 5]), n=6)
        >>> kept.has(torch.tensor([5, 0, 1]))
        tensor([ True, False,  True])
    """

    def __init__(self, ids: Tensor, n: int) -> None:
        self._ids, self._mask = ids.numpy(), np.zeros(n, dtype=np.bool_)
        self._made = 0

    def has(self, ids: Tensor) -> Tensor:
        """Returns whether ids are in the plan, shape (k,), bool.

        Args:
            ids: Ids to look up, shape (k,), int64, each within [0, n).
        """
        if self._made < len(self._ids):
            more = max(PART, PER_ID * len(ids))
            self._mask[self._ids[self._made : self._made + more]] = True
            self._made += more
        asked = ids.numpy()
        found = self._mask[asked]
        if self._made < len(self._ids):
            behind = np.flatnonzero(asked >= self._ids[self._made])
            places = np.searchsorted(self._ids, asked[behind])
            found[behind] = self._ids[np.minimum(places, len(self._ids) - 1)] == asked[behind]
        return torch.from_numpy(found)


class PlanWeights:
    """The weights of the samples of a plan, looked up by their ids.

    Args:
        plan: The plan.

    Example:
        >>> weights = PlanWeights(EpochPlan(torch.tensor([1, 4, 5]), weights=torch.tensor([0.5, 2.0, 1.0])))
        >>> weights.of(torch.tensor([5, 1]))
        tensor([1.0000, 0.5000])
    """

    def __init__(self, plan: EpochPlan) -> None:
        self._ids, self._weights = plan.ids, plan.weights
        if plan.weights is not None and plan.drawn:
            # Ids that were drawn are in no order; a sample that was drawn twice has one weight.
            self._weights = torch.empty(int(plan.ids.max()) + 1).index_copy_(0, plan.ids, plan.weights)
        self._by_id = plan.drawn

    def of(self, ids: Tensor) -> Tensor | None:
        """Returns the weights of samples of the plan, shape (k,), float32; None where all are 1.

        Args:
            ids: Ids to look up, shape (k,), int64, each in the plan.
        """
        if self._weights is None:
            return None
        return self._weights[ids if self._by_id else torch.searchsorted(self._ids, ids)]
