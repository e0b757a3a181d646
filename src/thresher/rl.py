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


class Uniform:
    """Policy that chooses every prompt once, in random order, and then starts again.

    A policy is any object with the methods `propose`, `observe`, `state_dict` and `load_state_dict`. It has a random generator
    of its own, and must be the same on every rank.

    Args:
        prompts: Number of prompts, 1 or more.
        seed: Random seed. Default: 0.

    Raises:
        ValueError: `prompts` is below 1.

    Example:
        >>> policy = Uniform(4)
        >>> sorted(policy.propose(3) + policy.propose(1))
        [0, 1, 2, 3]
    """

    def __init__(self, prompts: int, *, seed: int = 0) -> None:
        if prompts < 1:
            raise ValueError(f"{type(self).__name__}: `prompts` must be 1 or more, got {prompts}")
        self.prompts = prompts
        self.generator = torch.Generator().manual_seed(seed)
        self.queue = torch.empty(0, dtype=torch.int64)

    def propose(self, k: int) -> list[int]:
        """Returns the ids of the k prompts to sample rollouts for next: a list of numbers in [0, prompts).

        Args:
            k: Number of prompts, 1 or more.
        """
        return self._next(k).tolist()

    def observe(self, ids: list[int], rewards: Tensor) -> None:
        """Updates the policy with the rewards of rollouts.

        Args:
            ids: Ids of the prompts.
            rewards: Rewards of their rollouts, shape (k, G), float64; NaN for a rollout without a reward.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as tensors and plain values."""
        tensors = {
            name: value.clone() for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return {**tensors, "prompts": self.prompts, "generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a saved state.

        Args:
            state: State that `state_dict` returned.

        Raises:
            ValueError: The state has another number of prompts.
        """
        if state["prompts"] != self.prompts:
            raise ValueError(
                f"{type(self).__name__}: the state is for {state['prompts']} prompts, but the policy has {self.prompts}"
            )
        self.generator.set_state(state["generator"])
        for name, value in state.items():
            if name != "generator":
                setattr(self, name, value.clone() if isinstance(value, Tensor) else value)

    def _next(self, k: int) -> Tensor:
        while len(self.queue) < k:
            more = torch.randperm(self.prompts, generator=self.generator)
            self.queue = torch.cat((self.queue, more))
        ids = self.queue[:k]
        self.queue = self.queue[k:]
        return ids


class Greso(Uniform):
    """Policy that tends to skip prompts whose recent rollouts gave no signal (GRESO, arXiv:2506.02177).

    A visit of a prompt counts as too easy (too hard) if its rollouts had equal and high (low) rewards. All rollouts of a prompt
    in one call of `observe` count as one visit.

    Args:
        prompts: Number of prompts, 1 or more.
        seed: Random seed. Default: 0.

    Example:
        >>> policy = Greso(2)
        >>> for _ in range(50):
        ...     policy.observe([0, 1], torch.tensor([[1.0, 1.0], [1.0, 0.0]]))
        >>> policy.propose(20).count(1) > 12
        True
    """

    def __init__(self, prompts: int, *, seed: int = 0) -> None:
        super().__init__(prompts, seed=seed)
        self.easy = torch.zeros(prompts, dtype=torch.int64)
        self.hard = torch.zeros_like(self.easy)
        self.bases = Exploration()

    def propose(self, k: int) -> list[int]:
        """Returns the ids of the k prompts to sample rollouts for next."""
        chances = rollout_chances(self.easy, self.hard, self.bases)
        chosen = torch.empty(0, dtype=torch.int64)
        while len(chosen) < k:
            missing = k - len(chosen)
            kept = choose_prompts(self._next(missing), chances, missing, self.generator)
            chosen = torch.cat((chosen, kept))
        return chosen.tolist()

    def observe(self, ids: list[int], rewards: Tensor) -> None:
        """Counts at how many of its last visits a prompt gave no signal, and adapts the factors."""
        scored = ~rewards.isnan().all(1)
        if not scored.any():
            return
        same = scored & ~has_signal(rewards)
        easy = same & (rewards.nanmean(1) >= 0.5)
        hard = same & ~easy
        count = self._sums(ids, scored)
        visited = count > 0
        for visits, without_signal in ((self.easy, easy), (self.hard, hard)):
            every = self._sums(ids, without_signal) == count
            visits[visited] = torch.where(every, visits + 1, 0)[visited]
        easy_share = float(easy[scored].double().mean())
        hard_share = float(hard[scored].double().mean())
        self.bases = self.bases.adjusted(easy_share, hard_share)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as tensors and plain values."""
        return super().state_dict() | {"bases": tuple(self.bases)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a saved state."""
        super().load_state_dict(state)
        self.bases = Exploration(*state["bases"])

    def _sums(self, ids: list[int], mask: Tensor) -> Tensor:
        """Returns how often each prompt is in the mask; a prompt may come more than once."""
        return torch.zeros_like(self.easy).index_add(0, torch.tensor(ids), mask.long().cpu())
