"""`WeightedSampler`: draws samples in proportion to weights: evenly paced, independently, or without replacement."""

import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from thresher import rng
from thresher.permutation import Permutation
from thresher.samplers.epochs import EpochSampler, PickedOrder
from thresher.selection import chunks, on_host, smallest

Weights = NDArray[np.float64]

OWN_KEY = 0x3E16475
"""Part of the random keys, so that these draws differ from others with the same seed and epoch."""

FEW = 512
"""Number of weights up to which paced samples come in the order of their deadlines."""

NEARLY = 1e-6
"""Tolerance for parts of a visit: nearly 0 counts as none and nearly 1 as a whole visit, so that rounding does not decide."""


def visits_due(weights: Weights, scale: float) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Returns the smallest number of visits of each sample per epoch, and the share of epochs in which it has one more.

    Args:
        weights: Weights of the samples, shape (k,), 0 or more.
        scale: Number of visits per epoch for a weight of 1.

    Example:
        >>> visits_due(np.array([3.0, 1.0]), 0.5)
        (array([1, 0]), array([0.5, 0.5], dtype=float32))
    """
    rate = weights * scale
    whole = np.floor(rate + NEARLY)
    return whole.astype(np.int64), np.maximum(rate - whole, 0).astype(np.float32)


def running_sums(weights: Weights, place: float = 0.0) -> Iterator[tuple[slice, Weights]]:
    """Yields slices of the weights, and the sums before the first and after each weight of the slice, shape (k + 1,).

    Args:
        weights: Weights, shape (n,).
        place: Sum before the first weight. Default: 0.

    Example:
        >>> list(running_sums(np.array([0.5, 2.0])))
        [(slice(0, 2, None), array([0. , 0.5, 2.5]))]
    """
    for part in chunks(len(weights)):
        # Added up in their order, so that the sums are the same on every platform.
        ends = np.add.accumulate(np.concatenate([[place], weights[part]]))
        place = float(ends[-1])
        yield part, ends


def total_of(weights: Weights, below: float = np.inf) -> float:
    """Returns the sum of the weights below a bound.

    Args:
        weights: Weights, shape (n,).
        below: The bound. Default: none.

    Example:
        >>> total_of(np.array([0.5, 2.0])), total_of(np.array([0.5, 2.0]), below=2)
        (2.5, 0.5)
    """
    return sum(
        float(np.add.accumulate(np.where(weights[part] < below, weights[part], 0))[-1])
        for part in chunks(len(weights))
    )


def overdue(
    weights: Weights, lag: NDArray[np.float32], visits: int, scale: float, base: int
) -> NDArray[Any]:
    """Returns the samples of a paced epoch: those that are due, chosen by the earliest deadline.

    Each sample has a random phase. A sample that has had more visits than its weight asks for is not visited, and one that
    would otherwise be a whole visit keys is visited first: the bounds of a "Pfair" schedule (Baruah et al., 1996,
    "Proportionate Progress"). With few samples these bounds may be impossible; then samples are visited in the order of their
    deadlines, large weights first.

    Args:
        weights: Weights, shape (n,).
        lag: Visits by which each sample is behind its weight, shape (n,), float32; overwritten with the values after the epoch.
        visits: Number of visits of all samples in an epoch.
        scale: Number of visits for a weight of 1.
        base: Seed of the phases, within [0, 2**63).

    Returns:
        Ids, shape (visits,), ascending, with repeats if weights are large.
    """
    keys = np.empty(len(weights), dtype=np.float64 if len(weights) <= FEW else np.float32)
    certain = 0
    for part in chunks(len(weights)):
        whole, rate = visits_due(weights[part], scale)
        lag[part] += rate
        due = lag[part]
        phase = rng.uniform(base, range(part.start, part.stop))
        turn = -due - phase
        if len(weights) <= FEW:
            epochs_left = np.ceil((1 - NEARLY - due) / np.maximum(rate, 1e-9))
            turn = -1 / (1 + epochs_left - rate + NEARLY * phase)
        # The smallest keys are visited. Turns lie within (-8, 8): before them come samples that are a whole visit late, and
        # after them samples that have had enough visits.
        keys[part] = np.where(due >= 1 - NEARLY, -8 - due, np.where(due <= NEARLY, 8 - due, turn))
        keys[part][weights[part] == 0] = 100  # never among the smallest
        certain += int(whole.sum())
    mask = smallest(keys, visits - certain)
    del keys
    lag -= mask
    ids = np.empty(visits, dtype=np.int32 if len(mask) < 2**31 else np.int64)
    end = 0
    for part in chunks(len(mask)):
        visited = np.flatnonzero(mask[part])
        if certain:  # as np.repeat, in a third of the time
            last = np.cumsum(visits_due(weights[part], scale)[0] + mask[part])
            visited = np.cumsum(np.bincount(last, minlength=last[-1] + 1)[: last[-1]])
        ids[end : end + len(visited)] = visited + part.start
        end += len(visited)
    return ids


def independent(weights: Weights, visits: int, generator: np.random.Generator) -> NDArray[Any]:
    """Draws samples independently in proportion to the weights, and returns their ids, ascending, shape (visits,).

    Args:
        weights: Weights, shape (n,), 0 or more.
        visits: Number of draws.
        generator: Source of the random numbers, of 53 bits each.

    Example:
        >>> independent(np.array([0.0, 1.0]), 3, np.random.default_rng(0)).tolist()
        [1, 1, 1]
    """
    # Sorted, so that the draws of each chunk of weights are one slice of the points.
    points = generator.random(visits)
    points.sort()
    *_, (_, ends) = running_sums(weights)
    points *= ends[-1]
    # A product may be rounded up to the sum of all weights.
    ids = np.full(
        visits, np.flatnonzero(weights)[-1], dtype=np.int32 if len(weights) < 2**31 else np.int64
    )
    for part, ends in running_sums(weights):
        first, last = np.searchsorted(points, [ends[0], ends[-1]])
        ids[first:last] = part.start + np.searchsorted(ends[1:], points[first:last], side="right")
    return ids


def systematic(weights: Weights, visits: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Draws different samples, in random order, with probabilities in proportion to the weights, but at most 1.

    The samples are put in random order and their probabilities are added up. Each time the sum passes one of the equally spaced
    points, the current sample is chosen: systematic sampling (Madow, 1949, "On the Theory of Systematic Sampling, II") on a
    random order (Hartley & Rao, 1962). The probabilities are exact, unlike with successive draws as in `torch.multinomial`.

    Args:
        weights: Weights, shape (n,), of which at least `visits` are above 0.
        visits: Number of samples to draw.
        seed: Random seed.
        epoch: Number of the epoch.

    Example:
        >>> sorted(systematic(np.array([1.0, 0.0, 9.0]), 2, 0, 0).tolist())
        [0, 2]
    """
    # Samples with a probability of 1 or more are certain. The others then share fewer draws, and further ones may become
    # certain, until none does.
    bound = np.inf
    certain = -1
    scale = 0.0
    while certain != (certain := int(np.count_nonzero(weights >= bound))):
        rest = total_of(weights, below=bound)
        scale = (visits - certain) / rest if rest else 0.0
        bound = (1 - NEARLY / 2) / scale if scale else bound
    order = Permutation(len(weights), seed, epoch)
    # Not 0 or 1, where rounding would decide whether a sum has passed a point.
    start = rng.uniform(rng.seeds(1, seed, epoch, OWN_KEY)[0], range(1))[0]
    place = float(np.clip(start, NEARLY, 1 - NEARLY))
    chosen = []
    for part in chunks(len(weights)):
        ids = order.piece(part.start, part.stop)
        values = weights[ids]
        # The points are the whole numbers.
        for _, ends in running_sums(np.where(values >= bound, 1, values * scale), place):
            chosen.append(ids[np.floor(ends[1:]) > np.floor(ends[:-1])])
            place = float(ends[-1])
    return np.concatenate(chosen)


class WeightedSampler(EpochSampler):
    """Sampler that yields each sample in proportion to its weight, in one or several processes.

    Use it as `DataLoader(dataset, batch_size, sampler=WeightedSampler(weights))`. Weights need not add up to 1: a sample of
    weight w should come `num_samples * w / sum(weights)` times per epoch.

    - `replacement="paced"` (default): a sample that should come 1.7 times per epoch comes once or twice in each epoch, and 1.7
    * E times in E epochs, to within 1. It comes twice in an epoch only if it should come more than once. In which epochs it
    comes twice is random, unless there are at most 512 samples. After a change of weights, a sample may be up to 2 visits off.
    - `replacement=True`: independent draws with exact probabilities, as from torch's WeightedRandomSampler, for any number of
      samples; its limit of 2^24 does not apply.
    - `replacement=False`: different samples in each epoch. A sample is in an epoch with a probability in proportion to its
    weight, at most 1: systematic sampling on a random order (Madow, 1949; Hartley & Rao, 1962).

    The first loop over the sampler yields epoch 0, and each further loop the next epoch. After `set_epoch(e)`, the next loop
    yields epoch `e`. The order depends only on the seed, the epoch and the weights. Global random states are not used.

    With W processes, process r gets the ids at positions r, r + W, r + 2W, ... of the order, as from a DistributedSampler; if
    the number is not divisible by W, the first ids come again.

    Args:
        weights: Weight of each sample, shape (N,): list, array or tensor of finite numbers, 0 or more, at least one above 0.
        num_samples: Number of samples per epoch, in all processes together, 1 or more. Default: N.
        replacement: "paced" (default), True or False; see above.
        seed: Random seed. Default: 0.
        num_replicas: Number of processes that share the ids. Default: the world size of torch.distributed if it is initialized,
            else 1. Pass num_replicas=1, rank=0 if other code divides the data among processes, such as `accelerator.prepare`.
        rank: Number of this process, within [0, num_replicas). Default: the rank in torch.distributed, or 0.
        drop_last: Whether to leave out the last ids, instead of repeating the first, if the processes cannot get equally many.
            Default: False.

    Attributes:
        epoch: Number of the next epoch, which the next loop over the sampler yields.

    Raises:
        TypeError: `seed` or `num_samples` is not an integer.
        ValueError: `weights` have the wrong shape or value, `num_samples` exceeds the number of positive weights without
            replacement, or another argument is out of its range.

    Example:
        >>> sampler = WeightedSampler([2.0, 1.0, 1.0], num_samples=2)
        >>> [sorted(sampler) for _ in range(4)]
        [[0, 1], [0, 2], [0, 1], [0, 2]]
        >>> sampler.set_weights({0: 0.0})
        >>> sorted(sampler)
        [1, 2]
    """

    def __init__(
        self,
        weights: ArrayLike | Tensor,
        num_samples: int | None = None,
        *,
        replacement: Literal["paced"] | bool = "paced",
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        drop_last: bool = False,
    ) -> None:
        super().__init__(seed, num_replicas, rank, drop_last, num_samples=num_samples)
        if replacement not in ("paced", True, False):
            raise ValueError(
                f"WeightedSampler: `replacement` must be 'paced', True or False, got {replacement!r}"
            )
        values = _as_weights(weights)
        n = len(values) if values.ndim else 0
        self.num_samples = n if num_samples is None else int(num_samples)
        self.replacement = replacement
        self._begin_lag = np.zeros(0, dtype=np.float32)
        """Visits that samples were behind before these weights; empty for none."""
        self._later: tuple[int, Weights] | None = None
        """Weights that hold from a later epoch on."""
        self._hold(0, self._checked(values, n))

    @property
    def total(self) -> int:
        """Number of samples per epoch, in all processes together."""
        return self.num_samples

    @property
    def samples(self) -> int:
        """Number of samples of the dataset."""
        return len(self._weights)

    @property
    def weights(self) -> Weights:
        """Weights of the next epoch, shape (N,)."""
        return self._weights if self._later is None else self._later[1]

    def set_weights(self, weights: ArrayLike | Tensor | Mapping[int, float]) -> None:
        """Changes the weights from the next epoch on; an epoch in progress keeps its order, also in persistent workers.

        A sample that came too often or too rarely for its old weight is still compensated. Call it in all processes with equal
        weights.

        Args:
            weights: Weight of each sample, shape (N,); or a dict with only the weights that change, by id.

        Raises:
            ValueError: The weights have the wrong shape or value, or an id is outside [0, N).
        """
        n = self.samples
        if isinstance(weights, Mapping):
            values = self.weights.copy()
            ids = np.fromiter(weights.keys(), dtype=np.int64, count=len(weights))
            if len(ids) and not (ids.min() >= 0 and ids.max() < n):
                outside = ids[(ids < 0) | (ids >= n)][0]
                raise ValueError(
                    f"WeightedSampler: `weights` has the id {outside}, but ids must be within [0, {n})"
                )
            values[ids] = np.fromiter(weights.values(), dtype=np.float64, count=len(weights))
        else:
            values = _as_weights(weights)
        values = self._checked(values, n)
        # An epoch with the weights of an earlier change has begun, so they are in use, although its order may not be drawn yet.
        if self._later is not None and self._later[0] < self.epoch:
            self._take_over(*self._later)
        self._later = self.epoch, values

    def order(self, epoch: int) -> PickedOrder:
        """Returns the order of an epoch: an object that returns the ids at given positions.

        Args:
            epoch: Number of the epoch, 0 or more.

        Raises:
            RuntimeError: The weights of an earlier epoch are no longer stored.
        """
        if self._later is not None and epoch >= self._later[0]:
            later = self._later
            self._later = None
            self._take_over(*later)
        if epoch < self._since:
            raise RuntimeError(
                f"WeightedSampler: the weights were changed at epoch {self._since}, and the weights of epoch {epoch} are no "
                "longer stored: load a state of that epoch with load_state_dict."
            )
        if self.replacement is False:
            return PickedOrder(systematic(self._weights, self.num_samples, self.seed, epoch))
        if self.replacement is True:
            ids = independent(
                self._weights, self.num_samples, np.random.default_rng((self.seed, epoch, OWN_KEY))
            )
        else:
            ids = self._paced(epoch)
        return PickedOrder(ids, Permutation(len(ids), self.seed, epoch))

    def state_at(self, epoch: int, consumed: int) -> dict[str, Any]:
        """Returns the state at a given position; after a change of weights it includes them.

        Args:
            epoch: Number of the epoch.
            consumed: Number of ids of this epoch that all processes together have consumed.
        """
        state = super().state_at(epoch, consumed)
        if self._since or self._later is not None:
            weights = torch.from_numpy(self._weights)
            lag = torch.from_numpy(self._begin_lag)
            if self._later is None:
                later = None
            else:
                later = (self._later[0], torch.from_numpy(self._later[1]))
            state["changed"] = {"since": self._since, "values": weights, "lag": lag, "later": later}
        return state

    def settings(self) -> dict[str, Any]:
        """Returns the settings that determine the order, as plain values; for the weights a checksum."""
        settings = {
            "num_samples": self.num_samples,
            "replacement": self.replacement,
            "weights": self._checksum,
        }
        return super().settings() | settings

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a position, from which the next loop continues, and the weights; the number of processes may differ.

        Args:
            state: State that `state_dict` returned, with weights set by `set_weights`.

        Raises:
            ValueError: The state was saved by a sampler with other settings.
        """
        changed = state.get("changed")
        super().load_state_dict(state if changed is None else {**state, "weights": self._checksum})
        self.restore_weights(state)

    def restore_weights(self, state: Mapping[str, Any]) -> None:
        """Loads only the weights from a state, if `set_weights` had changed them.

        Args:
            state: State that `state_dict` returned.
        """
        changed = state.get("changed")
        if changed is not None:
            later = changed["later"]
            self._later = None if later is None else (later[0], on_host(later[1]))
            self._begin_lag = on_host(changed["lag"])
            self._hold(changed["since"], on_host(changed["values"]))

    def _paced(self, epoch: int) -> NDArray[np.int64]:
        """Returns the ids of a paced epoch, ascending; draws all epochs after the last drawn one, one by one."""
        base = rng.seeds(1, self.seed, OWN_KEY)[0]
        last, ids = self._drawn or (epoch + 1, None)
        # The lag only goes forward: an earlier epoch is drawn from the first one with these weights.
        if last > epoch:
            if len(self._begin_lag):
                self._lag = self._begin_lag.copy()
            else:
                self._lag = np.zeros(self.samples, dtype=np.float32)
            last = self._since - 1
        self._drawn = None  # a draw that is interrupted begins again
        for _ in range(last, epoch):
            ids = None  # frees memory
            ids = overdue(self._weights, self._lag, self.num_samples, self._scale, base)
        assert ids is not None
        self._drawn = epoch, ids
        return ids

    def _take_over(self, epoch: int, weights: Weights) -> None:
        """Begins to use weights that were set for a later epoch, after drawing the epochs before it."""
        if self.replacement == "paced" and epoch > self._since:
            self._paced(epoch - 1)
            self._begin_lag = self._lag
        self._hold(epoch, weights)

    def _hold(self, since: int, weights: Weights) -> None:
        """Uses these weights from an epoch on."""
        self._since = since
        self._weights = weights
        self._scale = self.num_samples / total_of(weights)
        """Number of visits per epoch for a weight of 1."""
        self._checksum = zlib.crc32(weights.data)
        self._drawn: tuple[int, NDArray[Any]] | None = None
        """Paced epoch that was drawn last, and its ids; `_lag` has the visits that samples are behind after it."""

    def _checked(self, weights: Weights, n: int) -> Weights:
        if weights.shape != (n,) or not n:
            raise ValueError(
                f"WeightedSampler: `weights` must have shape ({n or 'N'},), a weight per sample, got {weights.shape}"
            )
        wrong = np.flatnonzero(~((weights >= 0) & (weights < np.inf)))
        if len(wrong):
            raise ValueError(
                f"WeightedSampler: `weights` must be finite and 0 or more, got {weights[wrong[0]]} for sample {wrong[0]} (and "
                f"{len(wrong) - 1} more). If a sample should never be drawn, give it the weight 0."
            )
        positive = int(np.count_nonzero(weights))
        if not positive:
            raise ValueError(
                "WeightedSampler: `weights` are all 0: give at least one sample a positive weight."
            )
        if self.replacement is False and positive < self.num_samples:
            raise ValueError(
                f"WeightedSampler: `num_samples` is {self.num_samples}, but only {positive} weights are above 0, and no sample "
                "may repeat. Pass a smaller num_samples=, or replacement='paced'."
            )
        return weights


def _as_weights(weights: Any) -> Weights:
    return np.array(on_host(weights) if isinstance(weights, Tensor) else weights, dtype=np.float64)
