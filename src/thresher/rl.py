"""Selection in reinforcement learning of language models: which prompts get rollouts, and which rollouts are trained on.

These are pure functions of rewards, for any trainer: nothing is attached, and nothing is remembered here.

- GRESO (arXiv:2506.02177, github.com/Infini-AI-Lab/GRESO) skips prompts that lately gave all rollouts the same reward, which
  teach nothing: the longer, the more likely. How likely adapts to how many such prompts come all the same.
- PODS (arXiv:2504.13818, github.com/YixuanEvenXu/pods) makes many rollouts of a prompt, which is cheap, and trains on those few
  whose rewards vary most.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

EASY_REWARD, HARD_REWARD = 0.98, 0.11
"""Mean reward from which on a prompt is too easy, and up to which it is too hard, as published."""
LEAST_CHANCE = 0.01
"""Least chance of a prompt to get rollouts."""
STEP, LOWEST, HIGHEST = 0.01, 0.05, 0.95
"""How much the bases of the chances change after a step of training, and their bounds."""


class Exploration(NamedTuple):
    """Bases of the chances of prompts: a prompt that was too easy c times in a row gets rollouts with chance easy^c.

    Attributes:
        easy: Base for prompts that were too easy, in [0.05, 0.95].
        hard: Base for prompts that were too hard, in [0.05, 0.95].

    Example:
        >>> Exploration().adjusted(easy_share=0.2, hard_share=0.0)
        Exploration(easy=0.49, hard=0.51)
    """

    easy: float = 0.5
    hard: float = 0.5

    def adjusted(
        self, easy_share: float, hard_share: float, *, easy_target: float = 0.25 / 3, hard_target: float = 0.5 / 3
    ) -> "Exploration":
        """Returns the bases after a step: less where too many prompts taught nothing, more where few did.

        Args:
            easy_share: Share of the step's prompts that were too easy, [0, 1].
            hard_share: Share of the step's prompts that were too hard, [0, 1].
            easy_target: Share of easy prompts that is aimed at, [0, 1]. Default and published: 0.25 / 3.
            hard_target: Share of hard prompts that is aimed at, [0, 1]. Default and published: 0.5 / 3.

        Raises:
            ValueError: A share is outside [0, 1].
        """
        shares = {"easy_share": easy_share, "hard_share": hard_share, "easy_target": easy_target, "hard_target": hard_target}
        for name, share in shares.items():
            if not 0 <= share <= 1:
                raise ValueError(f"adjusted: `{name}` is a share, within [0, 1], got {share!r}")

        def moved(base: float, share: float, target: float) -> float:
            return min(HIGHEST, max(LOWEST, round(base - STEP if share >= target else base + STEP, 12)))

        return Exploration(moved(self.easy, easy_share, easy_target), moved(self.hard, hard_share, hard_target))


def trailing_visits(rewards: Tensor, *, easy: float = EASY_REWARD, hard: float = HARD_REWARD) -> tuple[Tensor, Tensor]:
    """Counts the last visits in a row at which a prompt was too easy, or too hard.

    Args:
        rewards: Mean reward of the rollouts of each prompt at each visit, the latest last, shape (V, P); NaN where a prompt was
            not visited, which neither counts nor ends a row.
        easy: Mean reward from which on a prompt is too easy. Default and published: 0.98.
        hard: Mean reward up to which a prompt is too hard. Default and published: 0.11.

    Returns:
        Numbers of visits, each of shape (P,), int64; at least one of the two is 0.

    Raises:
        ValueError: `rewards` do not have two dimensions, or `hard` is not below `easy`.

    Example:
        >>> trailing_visits(torch.tensor([[1.0, 0.0], [1.0, 0.5], [float("nan"), 0.0]]))
        (tensor([2, 0]), tensor([0, 1]))
    """
    if rewards.dim() != 2:
        raise ValueError(f"trailing_visits: `rewards` must have shape (visits, prompts), got {tuple(rewards.shape)}")
    if not hard < easy:
        raise ValueError(f"trailing_visits: `hard` must be below `easy`, got hard={hard!r} and easy={easy!r}")
    visited = ~rewards.isnan()

    def in_a_row(holds: Tensor) -> Tensor:
        going_on = (holds | ~visited).flip(0).long().cumprod(0).bool()
        return (going_on & visited.flip(0)).sum(0)

    return in_a_row(rewards >= easy), in_a_row(rewards <= hard)


def rollout_chances(easy: Tensor, hard: Tensor, bases: Exploration = Exploration()) -> Tensor:  # noqa: B008
    """Returns the chance of each prompt to get rollouts: max(base^visits, 0.01).

    Args:
        easy: Number of last visits at which each prompt was too easy, shape (P,), int64.
        hard: Number of last visits at which each prompt was too hard, shape (P,), int64.
        bases: Bases of the chances. Default: 0.5 for both, as at the start of a training.

    Returns:
        Chances, shape (P,), float64, in [0.01, 1]; 1 for a prompt that taught something at its last visit, or has had none.

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


def choose_prompts(candidates: Tensor, chances: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """Returns the first k candidates that chance lets through, in their order; fewer where not so many come through.

    Args:
        candidates: Prompts in the order in which they are tried, shape (n,), int64; more than k, because some are skipped.
            Published: 384 for k = 256.
        chances: Chances of all prompts, shape (P,), as `rollout_chances` returns them.
        k: Number of prompts that get rollouts, 1 or more.
        generator: Random generator on the CPU.

    Raises:
        ValueError: `k` is no whole number of 1 or more.

    Example:
        >>> chances = torch.tensor([1.0, 0.0, 1.0])
        >>> choose_prompts(torch.tensor([2, 1, 0]), chances, 2, torch.Generator().manual_seed(0))
        tensor([2, 0])
    """
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise ValueError(f"choose_prompts: `k` must be a whole number of 1 or more, got {k!r}")
    draws = torch.rand(len(candidates), generator=generator, dtype=torch.float64).to(candidates.device)
    return candidates[draws < chances.to(candidates.device)[candidates]][:k]


def choose_rollouts(rewards: Tensor, m: int) -> Tensor:
    """Returns the m rollouts of each prompt whose rewards have the largest variance.

    They are the i highest and the m - i lowest rewards, for the best i: no other subset of m has a larger variance. Of equally
    good i, the least is taken; of equal rewards, the rollout with the higher number counts as the higher.

    Args:
        rewards: Rewards of the rollouts, shape (..., n), finite.
        m: Number of rollouts that are trained on, 1 to n.

    Returns:
        Numbers of the rollouts, ascending, shape (..., m), int64.

    Raises:
        ValueError: `m` is out of its range.

    Example:
        >>> choose_rollouts(torch.tensor([0.5, 0.0, 1.0, 0.5, 0.4]), 2)
        tensor([1, 2])
    """
    n = rewards.shape[-1] if rewards.dim() else 0
    if not isinstance(m, int) or isinstance(m, bool) or not 1 <= m <= n:
        raise ValueError(f"choose_rollouts: `m` must be a whole number of rollouts within [1, {n}], got {m!r}")
    values, order = rewards.detach().double().sort(dim=-1, stable=True)
    values = values - values.mean(-1, keepdim=True)
    highest = torch.arange(m + 1, device=rewards.device)

    def split_sums(one: Tensor) -> Tensor:
        sums = torch.cat((one.new_zeros(*one.shape[:-1], 1), one.cumsum(-1)), -1)
        return sums[..., m - highest] + sums[..., -1:] - sums[..., n - highest]

    variance = split_sums(values.square()) / m - (split_sums(values) / m).square()
    nearly = variance >= variance.amax(-1, keepdim=True) - 1e-12 * values.square().amax(-1, keepdim=True)
    best = nearly.int().argmax(-1, keepdim=True)
    slot = torch.arange(m, device=rewards.device)
    return order.gather(-1, torch.where(slot < m - best, slot, n - m + slot)).sort(-1).values


def group_advantages(rewards: Tensor) -> Tensor:
    """Returns the advantages of the rollouts of a prompt: rewards less their mean, over their standard deviation.

    Args:
        rewards: Rewards of the rollouts that are trained on, shape (..., m).

    Returns:
        Advantages, shape (..., m); 0 where all rewards are equal.

    Example:
        >>> group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]))
        tensor([ 1., -1., -1.,  1.])
    """
    centred = rewards - rewards.mean(-1, keepdim=True)
    deviation = centred.square().mean(-1, keepdim=True).sqrt()
    same = rewards.amax(-1, keepdim=True) == rewards.amin(-1, keepdim=True)
    return torch.where(same, 0.0, centred / torch.where(same, math.inf, deviation))
