"""Plans over shards: the same bits for every number of ranks, and what travels for them."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from depth import depth
from shard_cases import assert_one_plan, hard_columns, part_of_records, planned, planned_in_shards, records_of
from thresher import (
    Bls,
    EpochSelectiveBackprop,
    Forgetting,
    FullData,
    Ies,
    InfoBatch,
    Kakurenbo,
    OrderDp,
    Prune,
    RePb,
    Rs2,
    SeTa,
    Ucb,
    UniformSubset,
    Winnow,
    methods,
)
from thresher.distributed.layout import ShardLayout
from thresher.distributed.order import KeptOrder
from thresher.distributed.plan import HeldPlan
from thresher.methods._adapted import OnSubset
from thresher.methods.contract import requirements_of
from thresher.scores import Scores
from thresher.testing.threaded_world import on_ranks

N = depth(100_000, 1_000_000)

METHODS = [
    FullData(),
    Kakurenbo(),
    Kakurenbo(0.4, tau=0.7, drop_top=0.1),
    Kakurenbo(0.3, move_back=False, candidates="threshold"),
    Kakurenbo(0.3, merge="sum", candidates="threshold", lr_fraction="scheduled"),
    InfoBatch(),
    InfoBatch(0.3, threshold=0.8, rescale="ratio"),
    InfoBatch(target=0.4),
    Bls(),
    SeTa(),
    SeTa(target=0.5, groups=20, window=0.4),
    OrderDp(),
    RePb(),
    RePb(target=0.5),
    Ies(threshold=0.5),
    Ies(),
    Ies(target=0.5),
    Ucb(),
    Ucb(explore="epsilon", every=5),
    Rs2(),
    Rs2(replace=True),
    Winnow(),
    Winnow(share=0.3, score="loss", least_agreement=-1),
    UniformSubset(0.7),
    UniformSubset(1e-9),
    EpochSelectiveBackprop(),
    EpochSelectiveBackprop(beta=2.0, bins=17, min_probability=0.05),
    Forgetting(0.3, start=1),
    Forgetting(0.4, start=1, never_learned="cut", hide="once"),
]


def short(method: Any) -> str:
    fields = [(field.name, getattr(method, field.name), field.default) for field in dataclasses.fields(method)]
    changed = [f"{name}={value}" for name, value, default in fields if value != default]
    return "-".join([type(method).__name__, *changed])


roster = pytest.mark.parametrize("method", METHODS, ids=short)


@pytest.fixture(scope="module")
def columns():
    return hard_columns(N, 0)


@roster
def test_the_same_bits_for_every_number_of_ranks(method, columns):
    records = records_of(method, columns)
    whole = planned(method, records)
    assert requirements_of(method).sharded
    assert type(method) in (FullData, Winnow) or len(whole.ids) < N
    for size in depth((2, 3, 4, 7), (1, 2, 3, 4, 7, 64, 256)):
        assert_one_plan(planned_in_shards(method, records, size)[0], whole)


@roster
@pytest.mark.parametrize("n", [1, 2, 60])
def test_more_ranks_than_blocks(method, n):
    """Most of the ranks hold nothing, and the others little."""
    for seed in range(depth(3, 20)):
        records = records_of(method, hard_columns(n, seed))
        try:
            whole = planned(method, records, seed=seed)
        except ValueError as error:
            with pytest.raises(ValueError, match=str(error).split(";")[0]):
                planned_in_shards(method, records, 5, unit=8, seed=seed)
            continue
        for size in (2, 5, 11):
            assert_one_plan(planned_in_shards(method, records, size, unit=8, seed=seed)[0], whole)


@roster
def test_nothing_known_and_everything_equal(method):
    nothing = hard_columns(100, 0)
    nothing |= {"loss": torch.full((100,), float("nan")), "uncertainty": torch.full((100,), -torch.inf)}
    nothing["forgetting"] = torch.full((100,), -1)
    equal = hard_columns(100, 0) | {"loss": torch.full((100,), 0.1), "forgetting": torch.full((100,), 3)}
    for values in (nothing, equal):
        records = records_of(method, values)
        if values is equal and getattr(method, "candidates", "") == "threshold" and not method.move_back:
            continue  # all are candidates, so that nothing would be left
        whole = planned(method, records)
        assert_one_plan(planned_in_shards(method, records, 3, unit=8)[0], whole)


@pytest.mark.parametrize("method", [Kakurenbo(), InfoBatch(), Winnow(), UniformSubset(), Forgetting(0.3, start=1)], ids=short)
def test_after_pruning(method, columns):
    """The part of the samples that pruning left is another on every rank, and is numbered anew for the method."""
    scores = Scores(torch.arange(N), columns["loss"])
    kept = Prune(scores, keep=0.4).kept(N)
    records = records_of(method, columns)
    whole = planned(OnSubset(method, kept, N), records)
    for size in (2, 3):
        of_rank = lambda shard: OnSubset(method, kept[(kept >= shard.first) & (kept < shard.last)], N)  # noqa: E731
        found = planned_in_shards(of_rank, records, size)
        assert_one_plan(found[0], whole)


def test_every_method_over_shards_is_in_the_roster():
    declared = {type(m).__name__ for m in map(methods.create, ["full", "kakurenbo", "infobatch", "winnow", "uniform"])}
    declared |= {"EpochSelectiveBackprop", "Forgetting", "Bls", "SeTa", "OrderDp", "RePb", "Ies", "Ucb", "Rs2"}
    assert {type(method).__name__ for method in METHODS} == declared
    assert not requirements_of(EpochSelectiveBackprop(percentile="rank")).sharded


@pytest.mark.parametrize(
    "method",
    [Kakurenbo(), InfoBatch(), Winnow(), UniformSubset(), EpochSelectiveBackprop(), Forgetting(0.3, start=1)],
    ids=short,
)
def test_what_travels_for_a_plan(method, columns):
    """66 kB of counts, one bit per sample for the marks, two bytes per 1,024 samples for the places, weights: no records."""
    records, layout = records_of(method, columns), ShardLayout(N, 4)

    def share(world):
        shard = layout.shard(world)
        plan = planned(method, part_of_records(records, shard))
        counts = world.bytes
        plan.check(shard)
        shared = HeldPlan.of(plan, layout, world)
        order = KeptOrder(np.arange, N, shared.keeps, world)
        weights = 0 if plan.weights is None else 4 * layout.size * layout.per
        return counts, world.bytes - weights, len(order) == shared.rows, world.calls

    for counts, everything, complete, calls in on_ranks(4, share):
        sampled = 2 * 8 * 2**16 if isinstance(method, Winnow) else 0
        assert complete and counts <= 66_000 + sampled
        padded = layout.per * layout.size - N
        assert everything <= 66_000 + sampled + (N + padded) / 8 + (N + padded) / 512 + 2 * 1024, calls
        assert calls["exchange"] == 0
