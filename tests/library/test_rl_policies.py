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


# Proposals of the policies for nine prompts, before they had groups.
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
    "Thompson": [
        [1, 4],
        [2, 7, 3],
        [3, 8, 5, 0, 2],
        [5, 3, 2, 0, 7, 8, 4, 1],
        [5, 6],
        [6, 3, 5],
        [2, 3, 6, 1, 7],
        [6, 3, 5, 4, 7, 1, 8, 0],
        [3, 6],
        [3, 5, 7],
        [3, 5, 6, 4, 1],
        [3, 6, 4, 0, 2, 5, 7, 1],
    ],
}


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize(
    "groups",
    [
        None,
        range(9),
        list("abcdefghi"),
        np.arange(9) * 1000 - 5,
        np.array(list("abcdefghi"), dtype=object),
    ],
)
def test_groups_of_one_prompt_are_the_prompts(make, groups):
    policy = make(9, seed=5, groups=groups)
    for number, expected in enumerate(BY_PROMPT[make.__name__]):
        assert policy.propose(len(expected)) == expected
        passes = [
            [((one * 7 + place * number) % 3 == 0 and one > 2) or one > 6 for place in range(4)]
            for one in expected
        ]
        policy.observe(expected, torch.tensor(passes).double())


@pytest.mark.parametrize("make", MAKE)
@given(
    st.lists(st.sampled_from(["x", "y", "long name"]), min_size=1, max_size=12),
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.sampled_from([0.0, 0.3, 1.0]),
)
def test_prompts_of_a_group_come_in_turn(make, groups, asked, floor):
    policy = make(len(groups), groups=groups, floor=floor)
    other = make(len(groups), groups=groups, floor=floor, seed=9)
    drawn = []
    for k in asked:
        ids = policy.propose(k)
        assert len(ids) == k
        policy.observe(ids, torch.tensor([[groups[one] == "x", 0.0] for one in ids]).double())
        drawn.extend(ids)
    for name in set(groups):
        members = [one for one, group in enumerate(groups) if group == name]
        ids = [one for one in drawn if one in members]
        for start in range(0, len(ids), len(members)):
            part = ids[start : start + len(members)]
            assert len(set(part)) == len(part)
    other.load_state_dict(policy.state_dict())
    assert [policy.propose(3) for _ in range(3)] == [other.propose(3) for _ in range(3)]


def test_uniform_gives_each_group_as_many_prompts():
    groups = np.array([7] * 2 + [3] * 90 + [5] * 8)
    policy = rl.Uniform(100, groups=groups)
    counts = np.unique(groups[policy.propose(300)], return_counts=True)
    assert policy.names == [3, 5, 7] and counts[1].tolist() == [100, 100, 100]


def test_a_group_learns_from_all_of_its_prompts():
    groups = ["dead", "mixed"] * 50
    rewards = torch.tensor([[0.0] * 8, [1.0, 0.0] * 4]).double()
    for make in (rl.Greso, rl.Thompson):
        policy, floored = (make(100, groups=groups, floor=floor) for floor in (0.0, 0.5))
        for number in range(0, 20, 2):
            policy.observe([number, number + 1], rewards)
            floored.observe([number, number + 1], rewards)
        # No prompt above 20 was seen.
        chosen, equally = policy.propose(16), floored.propose(200)
        assert sum(one % 2 for one in chosen) >= 13
        dead = sum(one % 2 == 0 for one in equally) / 200
        assert dead > 0.2


def test_rollouts_of_a_group_in_one_call_are_one_visit():
    thompson = rl.Thompson(4, groups=[0, 0, 0, 1])
    thompson.observe([2, 0, 3], torch.tensor([[1.0, 0.0], [1.0, NAN], [NAN, NAN]]))
    assert thompson.passed.tolist() == [0.5 + 0.5 + 2, 1.0]
    assert thompson.failed.tolist() == [0.5 + 0.5 + 1, 1.0]
    greso = rl.Greso(4, groups=[0, 0, 0, 1])
    for _ in range(2):
        greso.observe([0, 1, 3], torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]))
    assert greso.easy.tolist() == [2, 0] and greso.hard.tolist() == [0, 2]
    greso.observe([0, 1, 3], torch.tensor([[1.0, 1.0], [1.0, 0.0], [NAN, NAN]]))
    assert greso.easy.tolist() == [0, 0] and greso.hard.tolist() == [0, 2]


def test_a_saved_state_does_not_change():
    policy = rl.Greso(2, groups=["a", "b"])
    state = policy.state_dict()
    policy.propose(1)
    policy.observe([0, 1], torch.ones(2, 2))
    assert state["easy"].tolist() == state["turn"].tolist() == [0, 0]


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
    for groups in ([0, 1], [[0, 1, 2]], [0.5, 1.5, 2.5], ["a", None, "b"]):
        with pytest.raises(ValueError, match="Uniform: `groups` must be whole numbers or strings"):
            rl.Uniform(3, groups=groups)
    with pytest.raises(ValueError, match=r"Greso: `floor` must be a share, within \[0, 1\], got 2"):
        rl.Greso(3, floor=2)
    for other in (rl.Greso(4), rl.Greso(3, groups=[0, 0, 1])):
        with pytest.raises(ValueError, match="Greso: the state is of . prompts in other `groups`"):
            rl.Greso(3).load_state_dict(other.state_dict())
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
