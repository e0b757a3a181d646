"""GRESO and PODS against transcriptions prompt by prompt, and against every subset of rollouts there is."""

import math
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

from depth import depth
from helpers import over_instances
from thresher import rl
from thresher.rng import seeded


def in_a_row(rewards: list[float], holds: Any) -> int:
    count = 0
    for reward in reversed(rewards):
        if math.isnan(reward):
            continue
        if not holds(reward):
            break
        count += 1
    return count


@over_instances(depth(range(40), range(400)))
def test_chances_of_prompts(number: int) -> None:
    r = np.random.default_rng(number)
    visits, prompts = int(r.integers(1, 7)), int(r.integers(1, 12))
    rewards = r.choice(
        [0.0, 0.11, 0.12, 0.5, 0.97, 0.98, 1.0, math.nan],
        (visits, prompts),
        p=[0.3, 0.1, 0.05, 0.05, 0.05, 0.1, 0.25, 0.1],
    )
    bases = rl.Exploration(*r.choice([0.05, 0.5, 0.95], 2).tolist())
    easy, hard = rl.trailing_visits(torch.from_numpy(rewards))
    found = rl.rollout_chances(easy, hard, bases)
    for prompt in range(prompts):
        series = rewards[:, prompt].tolist()
        c_easy, c_hard = (
            in_a_row(series, lambda one: one >= 0.98),
            in_a_row(series, lambda one: one <= 0.11),
        )
        assert (int(easy[prompt]), int(hard[prompt])) == (c_easy, c_hard) and 0 in (c_easy, c_hard)
        chance = bases.easy**c_easy if c_easy else bases.hard**c_hard
        assert float(found[prompt]) == pytest.approx(max(chance, 0.01))


def test_bases_move_towards_their_targets_and_stay_within_bounds() -> None:
    bases = rl.Exploration()
    assert bases.adjusted(0.25 / 3, 0.5 / 3) == (0.49, 0.49)
    assert bases.adjusted(0.08, 0.16) == (0.51, 0.51)
    assert bases.adjusted(0.3, 0.3, easy_target=0.4, hard_target=0.2) == (0.51, 0.49)
    for _ in range(200):
        bases = bases.adjusted(1.0, 0.0)
    assert bases == (0.05, 0.95)


def test_prompts_come_through_in_their_order_by_their_chances() -> None:
    candidates, chances = (
        torch.tensor([5, 3, 1, 0, 4, 2]),
        torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 1.0]),
    )
    assert rl.choose_prompts(candidates, chances, 3, seeded(0)).tolist() == [5, 0, 4]
    assert rl.choose_prompts(candidates, chances, 99, seeded(0)).tolist() == [5, 0, 4, 2]
    counts = torch.zeros(3)
    for seed in range(2000):
        counts[
            rl.choose_prompts(torch.arange(3), torch.tensor([0.1, 0.5, 0.9]), 3, seeded(seed))
        ] += 1
    assert (counts / 2000).tolist() == pytest.approx([0.1, 0.5, 0.9], abs=0.04)


def hard_rewards(r: np.random.Generator, n: int) -> np.ndarray:
    kind = r.integers(5)
    if kind == 0:
        return r.choice([0.0, 1.0], n)
    if kind == 1:
        return np.full(n, r.choice([0.0, 0.1]))
    if kind == 2:
        return r.normal(size=n) * 1e30
    if kind == 3:
        return 1e6 + r.integers(0, 3, n)
    return r.integers(-4, 5, n) / 4


@over_instances(depth(range(60), range(600)))
def test_no_subset_of_rollouts_varies_more(number: int) -> None:
    r = np.random.default_rng(number)
    n = int(r.integers(1, 9))
    m = int(r.integers(1, n + 1))
    rewards = hard_rewards(r, n)
    found = rl.choose_rollouts(torch.from_numpy(rewards), m).tolist()
    assert found == sorted(set(found)) and len(found) == m
    best = max(np.var(rewards[list(subset)]) for subset in combinations(range(n), m))
    assert np.var(rewards[found]) == pytest.approx(
        best, rel=1e-6, abs=1e-9 * np.abs(rewards).max() ** 2
    )


@over_instances(depth(range(60), range(600)))
def test_the_split_of_the_paper(number: int) -> None:
    """Of the splits into i highest and m - i lowest, the first with the largest variance, on numbers whose sums are exact."""
    r = np.random.default_rng(number)
    n = int(r.choice([1, 4, 16]))
    m = int(r.integers(1, n + 1))
    rewards = r.integers(-4, 5, n) / 4
    ranked = sorted(range(n), key=lambda i: (rewards[i], i))
    splits = []
    for i in range(m + 1):
        part = ranked[: m - i] + ranked[n - i :]
        values = [rewards[j] for j in part]
        splits.append((m * sum(v * v for v in values) - sum(values) ** 2, part))
    best = max(variance for variance, _ in splits)
    expected = sorted(next(part for variance, part in splits if variance == best))
    assert rl.choose_rollouts(torch.from_numpy(rewards), m).tolist() == expected


def test_several_prompts_at_once() -> None:
    rewards = torch.rand(3, 2, 7, generator=seeded(0))
    found = rl.choose_rollouts(rewards, 4)
    assert found.shape == (3, 2, 4)
    assert all(
        torch.equal(found[i, j], rl.choose_rollouts(rewards[i, j], 4))
        for i in range(3)
        for j in range(2)
    )


def test_counts_of_numpy() -> None:
    rewards = torch.tensor([0.5, 0.0, 1.0, 0.5, 0.4])
    assert rl.choose_rollouts(rewards, np.int64(2)).tolist() == [1, 2]
    ones = torch.ones(3)
    assert rl.choose_prompts(torch.arange(3), ones, np.int64(2), seeded(0)).tolist() == [0, 1]


def test_advantages_of_whole_numbers() -> None:
    assert rl.group_advantages(torch.tensor([1, 0, 0, 1])).tolist() == [1, -1, -1, 1]
    assert rl.group_advantages(torch.tensor([True, True])).tolist() == [0, 0]
    assert rl.group_advantages(torch.tensor([1.0, 0.0]).double()).dtype == torch.float64


def test_advantages() -> None:
    rewards = torch.tensor([[0.0, 3.0, 3.0], [0.1, 0.1, 0.1]])
    found = rl.group_advantages(rewards)
    assert found[0].tolist() == pytest.approx(((rewards[0] - 2) / math.sqrt(2)).tolist())
    assert found[1].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: rl.trailing_visits(torch.zeros(3)),
            r"`rewards` must have shape \(visits, prompts\), got \(3,\)",
        ),
        (
            lambda: rl.trailing_visits(torch.zeros(3, 1), easy=0.1, hard=0.1),
            "`hard` must be below `easy`, got hard=0.1 and easy=0.1",
        ),
        (
            lambda: rl.rollout_chances(torch.zeros(3), torch.zeros(2)),
            r"must have the same shape, got \(3,\) and \(2,\)",
        ),
        (
            lambda: rl.choose_prompts(torch.arange(2), torch.ones(2), 0, seeded(0)),
            "`k` must be a whole number of 1 or more, got 0",
        ),
        (
            lambda: rl.choose_rollouts(torch.zeros(3), 4),
            r"`m` must be a whole number of rollouts within \[1, 3\], got 4",
        ),
        (lambda: rl.choose_rollouts(torch.zeros(()), 1), r"`m` must be .* within \[1, 0\], got 1"),
        (
            lambda: rl.Exploration().adjusted(1.5, 0.0),
            r"adjusted: `easy_share` must be a share, .* got 1.5",
        ),
        (
            lambda: rl.Exploration().adjusted(0.5, 0.0, hard_target=math.nan),
            "adjusted: `hard_target` must be a share, .* got nan",
        ),
    ],
)
def test_arguments_out_of_range_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
