"""Policies of prompts: their draws, what they learn of rewards, and their states; and what is told before a training."""

import itertools
from statistics import fmean

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import thresher.trl
from thresher import rl

MAKE = [rl.Uniform, rl.Greso, rl.Thompson]
NAN = float("nan")


@pytest.mark.parametrize("make", MAKE)
@given(st.integers(1, 12), st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 3))
def test_as_many_prompts_as_asked_for_and_the_same_on_every_rank(make, prompts, asked, seed):
    first, second = make(prompts, seed=seed), make(prompts, seed=seed)
    before = torch.get_rng_state()
    for k in asked:
        ids = first.propose(k)
        assert ids == second.propose(k) and len(ids) == k and all(0 <= one < prompts for one in ids)
        rewards = torch.rand(k, 4, generator=torch.Generator().manual_seed(k)).round().double()
        for policy in (first, second):
            policy.observe(ids, rewards)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("make", MAKE)
def test_a_state_goes_on_with_the_same_prompts(make):
    policy = make(10, seed=3)
    policy.observe(
        ids := policy.propose(4),
        torch.tensor([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]).double(),
    )
    state = {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in policy.state_dict().items()
    }
    expected = [policy.propose(3) for _ in range(4)]
    again = make(10, seed=8)
    again.load_state_dict(state)
    assert len(ids) == 4 and [again.propose(3) for _ in range(4)] == expected


def test_uniform_gives_each_prompt_once_before_any_comes_again():
    policy = rl.Uniform(7)
    drawn = list(itertools.chain(*(policy.propose(k) for k in (3, 5, 6))))
    assert sorted(drawn[:7]) == sorted(drawn[7:]) == list(range(7)) and drawn[:7] != drawn[7:]


def test_greso_counts_visits_in_a_row_without_a_signal():
    policy = rl.Greso(4)
    for _ in range(3):
        policy.observe([0, 1, 2, 3], torch.tensor([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [NAN, NAN]]))
    assert policy.easy.tolist() == [3, 0, 0, 0] and policy.hard.tolist() == [0, 3, 0, 0]
    policy.observe([0, 1], torch.tensor([[1.0, 0.0], [NAN, 0.0]]))
    assert policy.easy.tolist() == [0, 0, 0, 0] and policy.hard.tolist() == [0, 4, 0, 0]
    before = policy.bases
    policy.observe([3], torch.tensor([[NAN, NAN]]))
    assert policy.bases == before
    drawn = policy.propose(400)
    assert drawn.count(1) < 0.5 * drawn.count(2)


def test_thompson_is_the_discounted_posterior():
    policy = rl.Thompson(3, decay=0.5)
    policy.observe([0, 2], torch.tensor([[1.0, 1.0, 0.0, NAN], [0.25, 0.75, 0.0, 0.0]]))
    policy.observe([0], torch.tensor([[1.0, 1.0, 1.0, 1.0]]))
    assert policy.passed.tolist() == [0.5 * 3 + 0.5 + 4, 1.0, 2.0] and policy.failed.tolist() == [
        0.5 * 2 + 0.5,
        1.0,
        4.0,
    ]
    sure = rl.Thompson(3, pool=3)
    sure.passed, sure.failed = (
        torch.tensor([1e6, 1e6, 1.0]).double(),
        torch.tensor([1e6, 1.0, 1e6]).double(),
    )
    assert {sure.propose(1)[0] for _ in range(20)} == {0}


@given(
    st.lists(
        st.lists(st.sampled_from([0.0, 0.3, 1.0, NAN]), min_size=4, max_size=4),
        min_size=1,
        max_size=6,
    )
)
def test_preflight_is_the_share_of_subsets_without_a_difference(rewards):
    found = rl.preflight(rewards)
    for number in (2, 4):
        subsets = [[set(some) for some in itertools.combinations(row, number)] for row in rewards]
        shares = [
            fmean(len({value for value in some if value == value}) < 2 for some in of)
            for of in subsets
        ]
        assert found.dead_with[number] == pytest.approx(fmean(shares))
    assert found.dead == pytest.approx(found.dead_with[4]) == pytest.approx(found.easy + found.hard)


def test_preflight_takes_lists_and_arrays_and_rewards_of_any_range():
    rewards = [[3.0, 3.0], [0.0, 4.0], [-1.0, -1.0], [NAN, NAN]]
    assert (
        rl.preflight(rewards)
        == rl.preflight(np.array(rewards))
        == rl.preflight(torch.tensor(rewards))
    )
    assert rl.preflight(rewards, middle=2.0)[:3] == (0.75, 0.25, 0.5)
    assert rl.preflight([[1, 1], [0, 1]]).dead == 0.5


def test_what_is_refused():
    with pytest.raises(ValueError, match="Greso: `prompts` must be 1 or more, got 0"):
        rl.Greso(0)
    for wrong in ({"target": 1.0}, {"decay": 0.0}, {"pool": 0}):
        with pytest.raises(ValueError, match="Thompson: `target` must be within"):
            rl.Thompson(3, **wrong)
    with pytest.raises(
        ValueError,
        match=r"rewards must be within \[0, 1\]; scale the rewards, or use Greso or Uniform",
    ):
        rl.Thompson(3).observe([0], torch.tensor([[2.0, 0.0]]))
    for shape in ((3,), (0, 4), (2, 1)):
        with pytest.raises(ValueError, match="preflight: `rewards` must have shape"):
            rl.preflight(torch.zeros(shape))


def test_rows_of_a_batch_are_cut_to_their_longest_completion():
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
    batch = {
        "advantages": torch.tensor([0.0, 1.0, 0.0]),
        "completion_mask": mask,
        "prompt_mask": torch.ones(3, 5),
        "tool_mask": None,
    }
    found = thresher.trl.without_other_rows(batch, torch.tensor([1]), "bnpo")
    assert found["completion_mask"].shape == (1, 2) and found["prompt_mask"].shape == (1, 5)
    assert found["advantages"].item() == pytest.approx(2 / 6)
    empty = thresher.trl.without_other_rows(batch, torch.tensor([2]), "dapo")
    assert empty["completion_mask"].shape == (1, 1)
    assert "rows trained on         0 of 0 (0 %)" in thresher.trl.Picks().summary()
