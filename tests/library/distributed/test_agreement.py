"""Ranks that were started with different settings: every rank raises an error that names them."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from threaded_world import on_ranks
from thresher import Kakurenbo, Prune
from thresher.distributed.world import DisagreementError, agree, describe_setting, sampler_facts
from thresher.scores import Scores

LIKE = {"seed": 0, "method": Kakurenbo(), "n": 100, "epochs": 5}


def messages(size, facts_of):
    """The messages of all ranks; "" where a rank found nothing."""

    def look(world):
        try:
            agree(world, facts_of(world.rank))
        except DisagreementError as error:
            return str(error)
        return ""

    return on_ranks(size, look)


def test_ranks_that_agree_raise_nothing():
    assert messages(4, lambda rank: LIKE) == [""] * 4


@pytest.mark.parametrize(
    ("name", "other", "text"),
    [
        ("seed", 1, "seed is 0 on ranks 0, 1, 3, 4, and 1 on rank 2."),
        ("n", 99, "n is 100 on ranks 0, 1, 3, 4, and 99 on rank 2."),
        ("method", Kakurenbo(0.4), "method is Kakurenbo(max_fraction=0.3"),
        ("epochs", 5.0, "epochs is 5 on ranks 0, 1, 3, 4, and 5.0 on rank 2."),
        (
            "sampler",
            "RandomSampler",
            "sampler is missing on ranks 0, 1, 3, 4, and 'RandomSampler' on rank 2.",
        ),
    ],
)
def test_a_rank_with_another_setting_is_told_on_all_ranks(name, other, text):
    found = messages(5, lambda rank: {**LIKE, name: other} if rank == 2 else LIKE)
    assert len(set(found)) == 1 and text in found[0]
    assert found[0].count("\n") == 2, "only what differs is named"


def test_many_ranks_and_long_values_are_cut_off():
    found = messages(30, lambda rank: {"method": "x" * 5000 + str(rank % 2)})
    assert (
        len(set(found)) == 1
        and len(found[0]) < 1000
        and "ranks 0, 2, 4, 6, 8, 10, 12, 14, ..." in found[0]
    )


def test_several_differences_are_all_named():
    found = messages(2, lambda rank: {"seed": rank, "n": rank, "epochs": 3})
    assert all("seed is" in one and "n is" in one and "epochs" not in one for one in found)


def test_descriptions_tell_values_apart():
    plain = [1, 1.0, "1", True, None, [1, 2], (1, 2.0), range(20), range(21)]
    arrays = [
        torch.arange(3),
        torch.arange(3).float(),
        np.arange(3) + 1,
        {"a": torch.zeros(2)},
        {"a": torch.ones(2)},
    ]
    generators = [torch.Generator().manual_seed(seed) for seed in range(2)]
    methods = [Prune(Scores(torch.arange(2), torch.tensor([1.0, score]))) for score in (2.0, 3.0)]
    values = [*plain, *arrays, *generators, *methods]
    texts = [describe_setting(value) for value in values]
    assert len(set(texts)) == len(values)
    assert texts == [describe_setting(value) for value in values]
    assert describe_setting(object()) == describe_setting(object()) == "object"


def test_a_sampler_is_told_from_another():
    data = range(50)
    same = [DistributedSampler(data, 2, rank, seed=3) for rank in range(2)]
    assert sampler_facts(same[0]) == sampler_facts(same[1])
    same[1].set_epoch(4)
    others = [
        *same,
        DistributedSampler(data, 2, 0, seed=4),
        DistributedSampler(data, 2, 0, seed=3, shuffle=False),
        DistributedSampler(range(51), 2, 0, seed=3),
        RandomSampler(data, generator=torch.Generator().manual_seed(1)),
        RandomSampler(data, generator=torch.Generator().manual_seed(2)),
        SequentialSampler(data),
        WeightedRandomSampler([0.5, 0.5], 2),
        WeightedRandomSampler([0.5, 0.6], 2),
        range(50),
    ]
    texts = [describe_setting(sampler_facts(sampler)) for sampler in others]
    assert len(set(texts)) == len(others)


def test_samplers_of_the_ranks_agree_or_not():
    samplers = [DistributedSampler(range(50), 3, rank, seed=rank // 2) for rank in range(3)]
    found = messages(3, lambda rank: sampler_facts(samplers[rank]))
    assert len(set(found)) == 1 and "sampler.seed is 0 on ranks 0, 1, and 1 on rank 2." in found[0]


def test_methods_are_described_by_their_settings():
    assert describe_setting(Kakurenbo(tau=0.5)) != describe_setting(Kakurenbo(tau=0.6))
    assert "tau=0.5" in describe_setting(dataclasses.replace(Kakurenbo(), tau=0.5))
