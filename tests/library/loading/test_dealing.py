"""Smaller batches: as many steps as full training, of sizes that differ by one at most."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from depth import depth
from thresher import EpochPlan
from thresher.distributed.layout import ShardLayout
from thresher.distributed.plan import HeldPlan
from thresher.loading.smaller_batches import StepSizes, smaller_sizes
from thresher.shards import ALONE


@given(st.integers(1, 50), st.integers(0, 500))
def test_parts_add_up_and_differ_by_one_at_most(steps, total):
    sizes = list(StepSizes(steps, steps, steps).parts(total))
    assert len(sizes) == steps and sum(sizes) == total and max(sizes) - min(sizes) <= 1


@given(st.data())
def test_the_smallest_keys_are_drawn_in_the_order_of_the_candidates(data):
    n = data.draw(st.integers(1, 30))
    keys = torch.tensor(data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, float("inf")]), min_size=n, max_size=n)))
    ids, rows = torch.randperm(n, generator=torch.Generator().manual_seed(n)), data.draw(st.integers(1, n))
    drawn = StepSizes(1, rows, n, keys=keys.__getitem__).draw(ids, rows)
    by_key = sorted(range(n), key=lambda place: (float(keys[ids[place]]), place))
    assert drawn.tolist() == [int(ids[place]) for place in sorted(by_key[:rows])]


def test_without_keys_all_candidates_are_rows():
    assert StepSizes(1, 2, 3).draw(torch.tensor([2, 0, 1]), 2).tolist() == [2, 0, 1]


def made(plan, n, ids, everything, batch_size, drop_last, *, least=1):
    held = HeldPlan.of(plan, ShardLayout(n, 1), ALONE)
    sizes = smaller_sizes(held.own, held.everything, ids, everything, batch_size, drop_last, least=least)
    return sizes if sizes is None or held.own.keys is None else replace(sizes, keys=held.keys)


def dealt(n, plan, *, batch_size=4, drop_last=False, ids=None):
    return made(plan, n, lambda: len(plan.ids) if ids is None else ids, n, batch_size, drop_last)


def drawn(n, share, width=2.0):
    return EpochPlan(torch.arange(n), smaller_batches=True, keys=torch.rand(n), share=share, width=width)


@pytest.mark.parametrize(
    ("n", "share", "width", "drop_last", "steps", "rows", "candidates"),
    [
        (16, 0.5, 2.0, False, 4, 8, 16),
        (16, 0.5, 1.0, False, 4, 8, 8),
        (16, 0.25, 2.0, False, 4, 4, 8),
        (16, 0.75, 2.0, False, 4, 12, 16),  # at most 1 / share candidates per row exist
        (18, 0.5, 2.0, False, 5, 9, 18),
        (18, 0.5, 2.0, True, 4, 8, 16),
    ],
)
def test_rows_and_candidates_of_a_draw(n, share, width, drop_last, steps, rows, candidates):
    found = dealt(n, drawn(n, share, width), drop_last=drop_last)
    assert found is not None and (found.steps, found.rows, found.candidates) == (steps, rows, candidates)


def test_full_training_has_full_batches():
    assert dealt(18, drawn(18, 1.0)) is None
    assert dealt(18, drawn(18, 1.0), drop_last=True) is None
    assert dealt(18, EpochPlan(torch.arange(18), smaller_batches=True)) is None


def test_the_samples_of_a_plan_are_all_dealt():
    found = dealt(18, EpochPlan(torch.arange(7), smaller_batches=True))
    assert found is not None and (found.steps, found.rows, found.candidates, found.keys) == (5, 7, 7, None)


def test_a_draw_from_some_ids_drops_as_large_a_part_of_them_as_full_training_does():
    """Full training drops 10 of 26 samples; a half of 20 samples is then 6 of 12, not 8 of 16."""
    plan = EpochPlan(torch.arange(20), smaller_batches=True, keys=torch.rand(20), share=0.5, width=2.0)
    found = dealt(26, plan, batch_size=16, drop_last=True)
    assert found is not None and (found.steps, found.rows, found.candidates) == (1, 6, 12)


def test_of_a_draw_from_some_ids_no_smallest_share_is_named():
    plan = EpochPlan(torch.arange(20), smaller_batches=True, keys=torch.rand(20), share=0.1)
    with pytest.raises(
        ValueError, match=r"7 batches, and 2 of its 26 samples .* less than one a batch\. Give the loader larger"
    ):
        dealt(26, plan)


def test_keys_of_some_ids_are_those_of_the_dataset():
    plan = EpochPlan(torch.tensor([1, 3, 5, 7]), smaller_batches=True, keys=torch.tensor([4.0, 3, 2, 1]), share=0.5)
    found = made(plan, 8, lambda: 4, 4, 2, False)
    assert found is not None and found.keys is not None and found.keys(plan.ids.numpy()).tolist() == [4, 3, 2, 1]


def test_less_than_one_row_a_batch_is_refused_with_the_smallest_share():
    with pytest.raises(ValueError, match=r"less than one a batch: the smallest share is 0\.25"):
        dealt(16, drawn(16, 0.1))


@given(st.integers(1, 4000), st.integers(1, 64), st.integers(1, 2), st.booleans(), st.booleans())
def test_the_smallest_share_that_is_named_is_enough(n, batch_size, least, drop_last, drawn_rows):
    """Of the ids of a plan that draws; else of all samples. One row less than one (or two) a batch is refused."""
    steps = n // batch_size if drop_last else -(-n // batch_size)
    most = steps * batch_size if drop_last else n

    def spent(share):
        plan = drawn(n, share) if drawn_rows else EpochPlan(torch.arange(round(share * n)), smaller_batches=True)
        return made(plan, n, lambda: len(plan.ids), n, batch_size, drop_last, least=least)

    too_little = (least * steps - 1) / max(1, most)
    if not 0 < too_little < 1 or round(too_little * n) == 0:
        return
    few = "less than one a batch" if least == 1 else "less than the two a batch that BatchNorm needs"
    with pytest.raises(ValueError, match=f"{few}: the smallest share is") as said:
        spent(too_little)
    named = float(str(said.value).split("the smallest share is ")[1].split(". Give")[0])
    found = spent(named)
    assert found is None or found.rows >= least * steps
    assert named <= min(1, 1.01 * least * steps / most)


def test_an_order_of_unknown_length_is_refused():
    def unknown():
        raise TypeError("the length of this epoch is not known")

    with pytest.raises(ValueError, match="number of samples of an epoch, and the length of this epoch is not known"):
        made(drawn(16, 0.5), 16, unknown, 16, 4, False)


@given(st.integers(1, depth(200, 2000)), st.integers(1, 64), st.floats(0.05, 1.0), st.booleans())
def test_the_cost_is_the_share(n, batch_size, share, drop_last):
    """Within one sample of the epoch, whatever does not divide."""
    steps = n // batch_size if drop_last else -(-n // batch_size)
    most = steps * batch_size if drop_last else n
    if not most or round(share * most) < steps:
        return
    found = dealt(n, drawn(n, share), batch_size=batch_size, drop_last=drop_last)
    rows = most if found is None else found.rows
    assert abs(rows / most - share) <= 0.5 / most + 1e-9
    assert found is None or (found.steps == steps and found.rows <= found.candidates <= most)


def test_smaller_batches_go_on_after_any_step():
    cases = [(1, 1), (3, 4), (7, 7), (10, 33), (9, 100)]
    for sizes in (StepSizes(steps, rows, rows) for steps, rows in cases):
        parts = list(sizes.parts(sizes.rows))
        assert sizes.ends(sizes.rows).tolist() == [sum(parts[:step]) for step in range(sizes.steps + 1)]
        for step in range(sizes.steps + 1):
            assert sizes.step_after(sum(parts[:step]), sizes.rows) == step
            assert list(sizes.parts(sizes.rows, first=step)) == parts[step:]


def test_the_step_at_a_number_of_rows():
    sizes = StepSizes(steps=3, rows=4, candidates=4)
    assert [sizes.step_at(rows) for rows in (0, 1, 2, 4)] == [0, 1, 2, 3]
    with pytest.raises(
        ValueError, match="trained on 3 rows, which are not those of the first steps of an epoch with 4 rows in 3"
    ):
        sizes.step_at(3)
