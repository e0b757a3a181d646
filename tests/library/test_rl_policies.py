"""Policies of prompts: their draws, what they learn from rewards, and their states."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import thresher.trl
from thresher import rl

MAKE = [rl.Uniform, rl.Greso]
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


# Proposals of the policies for nine prompts.
BY_PROMPT = {
    "Uniform": [
        [8, 7],
        [4, 6, 5],
        [1, 2, 0, 3, 6],
        [5, 2, 3, 1, 4, 0, 7, 8],
        [6, 5],
        [8, 4, 2],
        [3, 0, 1, 7, 8],
        [6, 3, 1, 7, 4, 2, 5, 0],
        [8, 3],
        [4, 6, 1],
        [7, 0, 2, 5, 1],
        [2, 4, 8, 0, 7, 3, 5, 6],
    ],
    "Greso": [
        [8, 7],
        [4, 6, 5],
        [1, 2, 0, 3, 5],
        [0, 6, 3, 8, 1, 4, 7, 5],
        [7, 3],
        [4, 8, 3],
        [1, 0, 4, 2, 5],
        [3, 4, 3, 0, 4, 5, 6, 3],
        [3, 4],
        [5, 6, 1],
        [5, 3, 6, 4, 3],
        [6, 1, 7, 5, 4, 3, 6, 8],
    ],
}


@pytest.mark.parametrize("make", MAKE)
def test_proposals_stay_as_they_are(make):
    policy = make(9, seed=5)
    for number, expected in enumerate(BY_PROMPT[make.__name__]):
        assert policy.propose(len(expected)) == expected
        passes = [
            [((one * 7 + place * number) % 3 == 0 and one > 2) or one > 6 for place in range(4)]
            for one in expected
        ]
        policy.observe(expected, torch.tensor(passes).double())


def test_rollouts_of_a_prompt_in_one_call_are_one_visit():
    policy = rl.Greso(3)
    for _ in range(2):
        policy.observe([0, 0, 2], torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]))
    assert policy.easy.tolist() == [2, 0, 0] and policy.hard.tolist() == [0, 0, 2]
    policy.observe([0, 0, 2], torch.tensor([[1.0, 1.0], [1.0, 0.0], [NAN, NAN]]))
    assert policy.easy.tolist() == [0, 0, 0] and policy.hard.tolist() == [0, 0, 2]


def test_a_saved_state_does_not_change():
    policy = rl.Greso(2)
    state = policy.state_dict()
    policy.propose(1)
    policy.observe([0, 1], torch.ones(2, 2))
    assert state["easy"].tolist() == [0, 0] and len(state["queue"]) == 0


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


def test_what_is_refused():
    with pytest.raises(ValueError, match="Greso: `prompts` must be 1 or more, got 0"):
        rl.Greso(0)
    with pytest.raises(ValueError, match="the state is for 4 prompts, but the policy has 3"):
        rl.Greso(3).load_state_dict(rl.Greso(4).state_dict())


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
