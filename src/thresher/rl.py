"""Selection in reinforcement learning of language models: which prompts get rollouts (answers), and which rollouts to train on.

The functions compute from rewards alone, and work with any trainer. Policies store rewards of earlier rollouts, and choose the
next prompts. `thresher.trl` connects both to TRL's GRPOTrainer.

- GRESO (arXiv:2506.02177, github.com/Infini-AI-Lab/GRESO) skips prompts whose recent rollouts all had the same reward, because
  such groups have no gradient. The longer this lasts, the more likely it skips the prompt. The probabilities adapt to how many
  such prompts still come.
- PODS (arXiv:2504.13818, github.com/YixuanEvenXu/pods) samples many rollouts of a prompt, which is cheap, and trains on the few
  whose rewards vary most.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

EASY_REWARD = 0.98
HARD_REWARD = 0.11
"""A prompt is too easy at a mean reward of 0.98 or more, and too hard at 0.11 or less, as published."""
LEAST_CHANCE = 0.01
"""Least probability with which a prompt gets rollouts."""
STEP = 0.01
LOWEST = 0.05
HIGHEST = 0.95
"""By how much the factors in `Exploration` change after a training step, and their least and largest value."""


class Exploration(NamedTuple):
    """Factors from which the probabilities of prompts are computed.

    A prompt that was too easy at its last c visits gets rollouts with probability easy^c (hard^c if it was too hard).

    Attributes:
        easy: Factor for each visit at which a prompt was too easy, in [0.05, 0.95].
        hard: Factor for each visit at which a prompt was too hard, in [0.05, 0.95].

    Example:
        >>> Exploration().adjusted(easy_share=0.2, hard_share=0.0)
        Exploration(easy=0.49, hard=0.51)
    """

    easy: float = 0.5
    hard: float = 0.5

    def adjusted(
        self,
        easy_share: float,
        hard_share: float,
        *,
        easy_target: float = 0.25 / 3,
        hard_target: float = 0.5 / 3,
    ) -> "Exploration":
        """Returns the factors after a step: each is lowered by 0.01 if its share reached the target, else raised by 0.01.

        Args:
            easy_share: Share of the step's prompts that were too easy, [0, 1].
            hard_share: Share of the step's prompts that were too hard, [0, 1].
            easy_target: Target share of easy prompts, [0, 1]. Default and published: 0.25 / 3.
            hard_target: Target share of hard prompts, [0, 1]. Default and published: 0.5 / 3.

        Raises:
            ValueError: A share is outside [0, 1].
        """
        shares = {
            "easy_share": easy_share,
            "hard_share": hard_share,
            "easy_target": easy_target,
            "hard_target": hard_target,
        }
        for name, share in shares.items():
            if not 0 <= share <= 1:
                raise ValueError(
                    f"adjusted: `{name}` must be a share, within [0, 1], got {share!r}"
                )

        def moved(base: float, share: float, target: float) -> float:
            return min(
                HIGHEST, max(LOWEST, round(base - STEP if share >= target else base + STEP, 12))
            )

        return Exploration(
            moved(self.easy, easy_share, easy_target), moved(self.hard, hard_share, hard_target)
        )


def trailing_visits(
    rewards: Tensor, *, easy: float = EASY_REWARD, hard: float = HARD_REWARD
) -> tuple[Tensor, Tensor]:
    """Counts for each prompt at how many of its last visits without a break it was too easy, or too hard.

    Args:
        rewards: Mean reward of the rollouts of each prompt at each visit, the latest last, shape (V, P); NaN if a prompt was
            not visited, which neither counts nor is a break.
        easy: Mean reward at or above which a prompt is too easy. Default and published: 0.98.
        hard: Mean reward at or below which a prompt is too hard. Default and published: 0.11.

    Returns:
        The number of last visits at which each prompt was too easy, and the number at which it was too hard, each of shape
        (P,), int64. At least one of the two is 0.

    Raises:
        ValueError: `rewards` do not have two dimensions, or `hard` is not below `easy`.

    Example:
        >>> trailing_visits(torch.tensor([[1.0, 0.0], [1.0, 0.5], [float("nan"), 0.0]]))
        (tensor([2, 0]), tensor([0, 1]))
    """
    if rewards.dim() != 2:
        raise ValueError(
            f"trailing_visits: `rewards` must have shape (visits, prompts), got {tuple(rewards.shape)}"
        )
    if not hard < easy:
        raise ValueError(
            f"trailing_visits: `hard` must be below `easy`, got hard={hard!r} and easy={easy!r}"
        )
    visited = ~rewards.isnan()

    def in_a_row(holds: Tensor) -> Tensor:
        going_on = (holds | ~visited).flip(0).long().cumprod(0).bool()
        return (going_on & visited.flip(0)).sum(0)

    return in_a_row(rewards >= easy), in_a_row(rewards <= hard)


def rollout_chances(easy: Tensor, hard: Tensor, bases: Exploration = Exploration()) -> Tensor:  # noqa: B008
    """Returns the probability that each prompt gets rollouts: max(base^visits, 0.01).

    Args:
        easy: Number of last visits at which each prompt was too easy, shape (P,), int64.
        hard: Number of last visits at which each prompt was too hard, shape (P,), int64.
        bases: Factors for easy and hard visits. Default: 0.5 for both, as at the start of training.

    Returns:
        Probabilities, shape (P,), float64, in [0.01, 1]; 1 for a prompt that was neither too easy nor too hard at its last
        visit, or that was never visited.

    Raises:
        ValueError: The shapes differ.

    Example:
        >>> rollout_chances(torch.tensor([0, 2, 9]), torch.tensor([0, 0, 0]))
        tensor([1.0000, 0.2500, 0.0100], dtype=torch.float64)
    """
    if easy.shape != hard.shape:
        raise ValueError(
            f"rollout_chances: `easy` and `hard` must have the same shape, got {tuple(easy.shape)} and {tuple(hard.shape)}"
        )
    base = torch.where(easy > 0, bases.easy, bases.hard).double()
    return base.pow(torch.where(easy > 0, easy, hard)).clamp(min=LEAST_CHANCE)


def choose_prompts(
    candidates: Tensor, chances: Tensor, k: int, generator: torch.Generator
) -> Tensor:
    """Keeps each candidate with its probability, and returns the first k that are kept, in order; fewer if not enough are.

    Args:
        candidates: Prompts in the order in which they are tried, shape (n,), int64; more than k, because some are skipped. The
            paper uses 384 for k = 256.
        chances: Probabilities of all prompts, shape (P,), as `rollout_chances` returns them.
        k: Number of prompts that get rollouts, 1 or more.
        generator: Random generator on the CPU.

    Raises:
        ValueError: `k` is not an integer of 1 or more.

    Example:
        >>> chances = torch.tensor([1.0, 0.0, 1.0])
        >>> choose_prompts(torch.tensor([2, 1, 0]), chances, 2, torch.Generator().manual_seed(0))
        tensor([2, 0])
    """
    if not isinstance(k, int | np.integer) or k < 1:
        raise ValueError(f"choose_prompts: `k` must be a whole number of 1 or more, got {k!r}")
    draws = torch.rand(len(candidates), generator=generator, dtype=torch.float64).to(
        candidates.device
    )
    return candidates[draws < chances.to(candidates.device)[candidates]][:k]


def choose_rollouts(rewards: Tensor, m: int) -> Tensor:
    """Returns the m rollouts of each prompt whose rewards have the largest variance.

    These are the i highest and the m - i lowest rewards, for the best i: no other m rollouts have a larger variance. Of equally
    good i, the smallest is taken; of equal rewards, the rollout with the higher number counts as higher.

    Args:
        rewards: Rewards of the rollouts, shape (..., n), finite.
        m: Number of rollouts to train on, 1 to n.

    Returns:
        Numbers of the rollouts, ascending, shape (..., m), int64.

    Raises:
        ValueError: `m` is out of its range.

    Example:
        >>> choose_rollouts(torch.tensor([0.5, 0.0, 1.0, 0.5, 0.4]), 2)
        tensor([1, 2])
    """
    n = rewards.shape[-1] if rewards.dim() else 0
    if not isinstance(m, int | np.integer) or not 1 <= m <= n:
        raise ValueError(
            f"choose_rollouts: `m` must be a whole number of rollouts within [1, {n}], got {m!r}"
        )
    values, order = rewards.detach().double().sort(dim=-1, stable=True)
    values = values - values.mean(-1, keepdim=True)
    highest = torch.arange(m + 1, device=rewards.device)

    def split_sums(one: Tensor) -> Tensor:
        sums = torch.cat((one.new_zeros(*one.shape[:-1], 1), one.cumsum(-1)), -1)
        return sums[..., m - highest] + sums[..., -1:] - sums[..., n - highest]

    variance = split_sums(values.square()) / m - (split_sums(values) / m).square()
    nearly = variance >= variance.amax(-1, keepdim=True) - 1e-12 * values.square().amax(
        -1, keepdim=True
    )
    best = nearly.int().argmax(-1, keepdim=True)
    slot = torch.arange(m, device=rewards.device)
    return order.gather(-1, torch.where(slot < m - best, slot, n - m + slot)).sort(-1).values


def group_advantages(rewards: Tensor) -> Tensor:
    """Returns the advantages of the rollouts of a prompt: rewards minus their mean, divided by their standard deviation.

    Args:
        rewards: Rewards of the rollouts that are trained on, shape (..., m).

    Returns:
        Advantages, shape (..., m); 0 if all rewards are equal.

    Example:
        >>> group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]))
        tensor([ 1., -1., -1.,  1.])
    """
    rewards = rewards * 1.0  # torch has no mean of integers
    centred = rewards - rewards.mean(-1, keepdim=True)
    deviation = centred.square().mean(-1, keepdim=True).sqrt()
    same = rewards.amax(-1, keepdim=True) == rewards.amin(-1, keepdim=True)
    return torch.where(same, 0.0, centred / torch.where(same, math.inf, deviation))


# Policies: which prompts get rollouts


def has_signal(rewards: Tensor) -> Tensor:
    """Returns whether the rollouts of each prompt have different rewards; if all are equal, there is no gradient.

    Args:
        rewards: Rewards of the rollouts, shape (k, G); NaN for a rollout without a reward, which is ignored.

    Returns:
        Mask of the prompts with different rewards, shape (k,), bool.

    Example:
        >>> has_signal(torch.tensor([[1.0, 0.0], [1.0, 1.0], [float("nan"), 1.0]]))
        tensor([ True, False, False])
    """
    return rewards.nan_to_num(nan=-torch.inf).amax(1) > rewards.nan_to_num(nan=torch.inf).amin(1)


class Preflight(NamedTuple):
    """How many prompts would give no gradient, estimated from a few rollouts before training.

    Attributes:
        dead: Share of the prompts whose rollouts all have the same reward, [0, 1]. They can be skipped without loss if their
            advantages are exactly 0, as with rewards of 0 and 1.
        easy: Share of the prompts that are dead and have a mean reward of `middle` or more, [0, 1].
        hard: Share of the prompts that are dead and have a lower mean reward or none, [0, 1].
        dead_with: Share of dead prompts with 2, 4, ... of these rollouts, by the number of rollouts.

    Example:
        >>> preflight([[0.5, 0.5]])
        Preflight(dead=1.0, easy=1.0, hard=0.0, dead_with={2: 1.0})
    """

    dead: float
    easy: float
    hard: float
    dead_with: dict[int, float]


def preflight(rewards: ArrayLike | Tensor, *, middle: float = 0.5) -> Preflight:
    """Estimates how many prompts would give no gradient, from the rewards of a few rollouts per prompt.

    Args:
        rewards: Rewards, shape (P, G), G >= 2; NaN for a rollout without a reward.
        middle: Mean reward at or above which a prompt without a gradient counts as easy, otherwise as hard. Default: 0.5, for
            rewards in [0, 1].

    Raises:
        ValueError: `rewards` have another shape.

    Example:
        >>> shares = preflight([[1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 0.0, 0.0]])
        >>> shares.dead, shares.easy, shares.dead_with
        (0.5, 0.5, {2: 0.75, 4: 0.5})
    """
    values = torch.as_tensor(rewards, dtype=torch.float64, device="cpu")
    if values.dim() != 2 or values.shape[1] < 2 or not len(values):
        raise ValueError(
            f"preflight: `rewards` must have shape (P, G), P >= 1 and G >= 2, got {tuple(values.shape)}"
        )
    dead = ~has_signal(values)
    mean = values.nanmean(1)
    easy = dead & (mean >= middle)
    sizes = [2**power for power in range(1, values.shape[1].bit_length())]
    shares = [float(one.double().mean()) for one in (dead, easy, dead & ~easy)]
    return Preflight(
        shares[0],
        shares[1],
        shares[2],
        {size: round(_dead_with(values, size), 12) for size in sizes},
    )


def _dead_with(rewards: Tensor, size: int) -> float:
    """Returns the mean probability that `size` of the rollouts of a prompt, drawn at random, have no two different rewards."""
    group = rewards.shape[1]
    none = rewards.isnan().sum(1)

    def all_among(count: Tensor) -> Tensor:
        places = torch.arange(size, dtype=torch.float64)
        return ((count.unsqueeze(-1) - places).clamp(min=0) / (group - places)).prod(-1)

    # A draw is dead if its rollouts have one reward or none. Draws without any reward would be counted once for each value, so
    # they are subtracted there and added once.
    equal = (rewards.unsqueeze(2) == rewards.unsqueeze(1)).sum(2)
    nothing = all_among(none).unsqueeze(1)
    of_values = torch.where(
        equal > 0, (all_among(equal + none.unsqueeze(1)) - nothing) / equal.clamp(min=1), 0.0
    )
    return float((of_values.sum(1) + nothing.squeeze(1)).mean())


class Uniform:
    """Policy that chooses every group of prompts once, in random order, and then starts again.

    A policy is any object with the methods `propose`, `observe`, `state_dict` and `load_state_dict`. It has a random generator
    of its own, and must be the same on every rank. The policies here choose a group, and then the next prompt of the group.
    What they learn from rewards, they learn about groups. The prompts of a group come in turn, in an order drawn once.

    Args:
        prompts: Number of prompts, 1 or more.
        groups: Group of each prompt, such as its difficulty, source or domain: whole numbers or strings, shape (prompts,).
            Default: each prompt is a group.
        floor: Share of the prompts, on average, that come from all groups equally often, whatever their rewards were, [0, 1].
            Default: 0.
        seed: Random seed. Default: 0.

    Attributes:
        names: Groups, sorted; the other attributes number them in this order.

    Raises:
        ValueError: `prompts` is below 1, `groups` has another shape or other values, or `floor` is out of its range.

    Example:
        >>> policy = Uniform(4)
        >>> sorted(policy.propose(3) + policy.propose(1))
        [0, 1, 2, 3]
        >>> policy = Uniform(4, groups=["code", "math", "math", "math"])
        >>> policy.propose(6).count(0)
        3
    """

    def __init__(
        self,
        prompts: int,
        *,
        groups: ArrayLike | Tensor | None = None,
        floor: float = 0.0,
        seed: int = 0,
    ) -> None:
        name = type(self).__name__
        if prompts < 1:
            raise ValueError(f"{name}: `prompts` must be 1 or more, got {prompts}")
        if not 0 <= floor <= 1:
            raise ValueError(f"{name}: `floor` must be a share, within [0, 1], got {floor!r}")
        # Strings of pandas are objects, which `tolist` makes strings of NumPy.
        values = np.array(np.asarray(range(prompts) if groups is None else groups).tolist())
        if values.shape != (prompts,) or values.dtype.kind not in "biuU":
            raise ValueError(
                f"{name}: `groups` must be whole numbers or strings, shape ({prompts},), got "
                f"{values.dtype}, shape {values.shape}"
            )
        names, numbers = np.unique(values, return_inverse=True)
        self.prompts = prompts
        self.names: list[Any] = names.tolist()
        self.floor = floor
        self.generator = torch.Generator().manual_seed(seed)
        self.queue = torch.empty(0, dtype=torch.int64)
        self.group = torch.from_numpy(numbers)
        self.turn = torch.zeros(len(names), dtype=torch.int64)
        shuffled = torch.randperm(prompts, generator=torch.Generator().manual_seed(seed))
        self.order = shuffled[self.group[shuffled].argsort(stable=True)]

    def propose(self, k: int) -> list[int]:
        """Returns the ids of the k prompts to sample rollouts for next: a list of numbers in [0, prompts).

        Args:
            k: Number of prompts, 1 or more.
        """
        equally = 0
        if self.floor > 0:
            equally = int(
                (torch.rand(k, dtype=torch.float32, generator=self.generator) < self.floor).sum()
            )
        groups = torch.cat((self._next(equally), self._choose(k - equally)))
        sizes = self.group.bincount()
        starts = sizes.cumsum(0) - sizes
        ids: list[int] = []
        for group in groups.tolist():
            ids.append(int(self.order[starts[group] + self.turn[group] % sizes[group]]))
            self.turn[group] += 1
        return ids

    def observe(self, ids: list[int], rewards: Tensor) -> None:
        """Updates the policy with the rewards of rollouts. All rollouts of a group in one call count as one visit.

        Args:
            ids: Ids of the prompts.
            rewards: Rewards of their rollouts, shape (k, G), float64; NaN for a rollout without a reward.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as tensors and plain values."""
        tensors = {
            name: value.clone() for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return {**tensors, "generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a saved state.

        Args:
            state: State that `state_dict` returned.

        Raises:
            ValueError: The state is that of other groups.
        """
        if not torch.equal(state["group"], self.group):
            raise ValueError(
                f"{type(self).__name__}: the state is of {len(state['group'])} prompts in other `groups`"
            )
        self.generator.set_state(state["generator"])
        for name, value in state.items():
            if name != "generator":
                setattr(self, name, value.clone() if isinstance(value, Tensor) else value)

    def _choose(self, k: int) -> Tensor:
        """Returns the groups of the next k prompts."""
        return self._next(k)

    def _next(self, k: int) -> Tensor:
        while len(self.queue) < k:
            more = torch.randperm(len(self.names), generator=self.generator)
            self.queue = torch.cat((self.queue, more))
        groups = self.queue[:k]
        self.queue = self.queue[k:]
        return groups

    def _sums(self, ids: list[int], values: Tensor) -> Tensor:
        """Returns the sum of the values of all prompts of each group."""
        zeros = torch.zeros(len(self.names), dtype=torch.float64)
        return zeros.index_add(0, self.group[torch.tensor(ids)], values.double().cpu())


class Greso(Uniform):
    """Policy that tends to skip groups of prompts whose recent rollouts gave no signal (GRESO, arXiv:2506.02177).

    A visit of a group counts as too easy (too hard) if the rollouts of each of its prompts had equal and high (low) rewards.

    Args:
        prompts: Number of prompts, 1 or more.
        groups: Group of each prompt. Default: each prompt is a group.
        floor: Share of the prompts that come from all groups equally often, [0, 1]. Default: 0.
        seed: Random seed. Default: 0.

    Example:
        >>> policy = Greso(2)
        >>> for _ in range(50):
        ...     policy.observe([0, 1], torch.tensor([[1.0, 1.0], [1.0, 0.0]]))
        >>> policy.propose(20).count(1) > 12
        True
    """

    def __init__(
        self,
        prompts: int,
        *,
        groups: ArrayLike | Tensor | None = None,
        floor: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(prompts, groups=groups, floor=floor, seed=seed)
        self.easy, self.hard = (torch.zeros_like(self.turn) for _ in range(2))
        self.bases = Exploration()

    def observe(self, ids: list[int], rewards: Tensor) -> None:
        """Counts at how many of its last visits all prompts of a group gave no signal, and adapts the factors."""
        scored = ~rewards.isnan().all(1)
        if not scored.any():
            return
        same = scored & ~has_signal(rewards)
        easy = same & (rewards.nanmean(1) >= 0.5)
        hard = same & ~easy
        count = self._sums(ids, scored)
        visited = count > 0
        for visits, prompts in ((self.easy, easy), (self.hard, hard)):
            every = self._sums(ids, prompts) == count
            visits[visited] = torch.where(every, visits + 1, 0)[visited]
        shares = [float(one[scored].double().mean()) for one in (easy, hard)]
        self.bases = self.bases.adjusted(shares[0], shares[1])

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as tensors and plain values."""
        return super().state_dict() | {"bases": tuple(self.bases)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a saved state."""
        super().load_state_dict(state)
        self.bases = Exploration(*state["bases"])

    def _choose(self, k: int) -> Tensor:
        chances = rollout_chances(self.easy, self.hard, self.bases)
        chosen = torch.empty(0, dtype=torch.int64)
        while len(chosen) < k:
            missing = k - len(chosen)
            kept = choose_prompts(self._next(missing), chances, missing, self.generator)
            chosen = torch.cat((chosen, kept))
        return chosen


class Thompson(Uniform):
    """Policy that prefers groups of prompts whose pass rate is near a target (MoPPS, arXiv:2507.04632).

    For each candidate, a random prompt, it draws a pass rate from the Beta posterior of its group, and takes the draws nearest
    to the target (Thompson sampling).

    Args:
        prompts: Number of prompts, 1 or more.
        groups: Group of each prompt. Default: each prompt is a group.
        floor: Share of the prompts that come from all groups equally often, [0, 1]. Default: 0.
        seed: Random seed. Default: 0.
        target: Pass rate to prefer, (0, 1). Default: 0.5.
        decay: Factor on the weight of older rewards with each new visit, (0, 1]. Default: 0.5.
        pool: Number of random candidates per prompt to propose, 1 or more. Default: 4.

    Raises:
        ValueError: An argument is out of its range.

    Example:
        >>> policy = Thompson(8, groups=["hard", "fair"] * 4)
        >>> policy.observe([0, 1], torch.tensor([[0.0] * 8, [1.0, 0.0] * 4]))
        >>> sum(policy.propose(1)[0] % 2 for _ in range(20)) > 15
        True
    """

    def __init__(
        self,
        prompts: int,
        *,
        groups: ArrayLike | Tensor | None = None,
        floor: float = 0.0,
        seed: int = 0,
        target: float = 0.5,
        decay: float = 0.5,
        pool: int = 4,
    ) -> None:
        super().__init__(prompts, groups=groups, floor=floor, seed=seed)
        if not (0 < target < 1 and 0 < decay <= 1 and pool >= 1):
            wanted = "`target` must be within (0, 1), `decay` within (0, 1] and `pool` 1 or more"
            raise ValueError(f"Thompson: {wanted}, got {target}, {decay} and {pool}")
        self.passed, self.failed = (torch.ones_like(self.turn).double() for _ in range(2))
        self.target = target
        self.decay = decay
        self.pool = pool

    def observe(self, ids: list[int], rewards: Tensor) -> None:
        """Updates the posteriors of the pass rates.

        Args:
            ids: Ids of the prompts.
            rewards: Rewards of their rollouts, shape (k, G), [0, 1]; NaN for a rollout without a reward.

        Raises:
            ValueError: A reward is outside [0, 1].
        """
        if ((rewards < 0) | (rewards > 1)).any():
            raise ValueError(
                "Thompson: rewards must be within [0, 1]; scale the rewards, or use Greso or Uniform"
            )
        known = self.group[torch.tensor(ids)].unique()
        passed = self._sums(ids, rewards.nansum(1))[known]
        failed = self._sums(ids, (~rewards.isnan()).sum(1))[known] - passed
        self.passed[known] = self.decay * self.passed[known] + (1 - self.decay) + passed
        self.failed[known] = self.decay * self.failed[known] + (1 - self.decay) + failed

    def _choose(self, k: int) -> Tensor:
        # The pool has prompts, so that a group can be chosen several times.
        pool = self.group[torch.randperm(self.prompts, generator=self.generator)[: self.pool * k]]
        gamma: Any = torch._standard_gamma  # pyright: ignore[reportPrivateImportUsage]
        passed, failed = (
            gamma(one[pool], generator=self.generator) for one in (self.passed, self.failed)
        )
        nearest = pool[(passed / (passed + failed) - self.target).abs().argsort(stable=True)[:k]]
        # If there are fewer prompts than k, some are repeated.
        return nearest.repeat(-(-k // max(1, len(nearest))))[:k]
