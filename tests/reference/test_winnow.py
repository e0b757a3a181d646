"""Winnow against a transcription of its rule, sample by sample in plain Python."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from depth import depth
from helpers import over_instances
from thresher import EpochPlan, Winnow
from thresher.methods.winnow import agreement, spread_of
from thresher.records import NEVER_SEEN, Records
from thresher.rng import seeded, uniform

CPU = torch.device("cpu")
MASK = 2**64 - 1


def planned(
    method, uncertainty, loss=None, credit=None, *, epoch=1, epochs=100, key=0
) -> EpochPlan:
    records = Records(method.columns(), len(uncertainty), CPU)
    records["uncertainty"].copy_(torch.as_tensor(uncertainty))
    records["loss"].copy_(torch.as_tensor(uncertainty if loss is None else loss))
    if credit is not None:
        records["credit"].copy_(torch.as_tensor(credit))
    return method.plan_epoch(records, epoch=epoch, epochs=epochs, generator=seeded(key, epoch))


def transcribed_hash(base: int, i: int) -> float:
    bits = ((i + 1) * 0x9E3779B97F4A7C15 + base) & MASK
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & MASK
    bits ^= bits >> 31
    return ((bits >> 41) + 0.5) * 2.0**-23


def transcribed(scores: list[float], credit: list[float], k: int) -> tuple[list[int], list[float]]:
    """The visited samples and the credits after the epoch; samples without a score have the largest one."""
    scores = [score if score >= 0 else max(1.0, *scores) for score in scores]
    low, high = 0.0, 1e6
    for _ in range(200):  # the factor with which the visits add up to k
        factor = (low + high) / 2
        low, high = (
            (factor, high)
            if sum(min(1.0, factor * score) for score in scores) < k
            else (low, factor)
        )
    due = [own + min(1.0, high * score) for own, score in zip(credit, scores, strict=True)]
    visited = sorted(sorted(range(len(due)), key=lambda i: (-due[i], i))[:k])
    return visited, [value - (i in visited) for i, value in enumerate(due)]


@over_instances(range(depth(40, 200)))
def test_the_most_overdue_samples_are_visited_as_the_rule_says(number):
    draws = np.random.default_rng(number)
    n = int(draws.integers(1, 60))
    scores = draws.choice([0.0, -0.0, 0.125, 0.5, 0.75, np.nan, NEVER_SEEN], n).tolist()
    credit = draws.random(n).astype(np.float32).tolist()
    share = float(draws.integers(1, 100)) / 100
    plan = planned(Winnow(share), scores, credit=credit)
    visited, after = transcribed(scores, credit, max(1, round(share * n)))
    assert plan.ids.tolist() == visited
    assert plan.remember["credit"].tolist() == pytest.approx(after, abs=1e-4)


def test_random_numbers_are_those_of_the_transcription_and_uniform():
    u = uniform(2**62 - 1, range(100_000))
    assert u[:50].tolist() == [np.float32(transcribed_hash(2**62 - 1, i)) for i in range(50)]
    assert u.min() > 0 and u.max() < 1 and abs(u.mean() - 0.5) < 0.005
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.02
    assert np.array_equal(uniform(7, range(10, 20)), uniform(7, range(30))[10:20])


def test_a_sample_is_visited_as_often_as_its_score_says():
    """Of scores 1 and 3, the second kind is visited three times as often, and each sample to within about one visit."""
    scores, credit, visits = [0.25, 0.75] * 50, None, np.zeros(100)
    for epoch in range(40):
        plan = planned(Winnow(0.25), scores, credit=credit, epoch=epoch)
        visits[plan.ids] += 1
        credit = plan.remember["credit"]
    assert visits.sum() == 1000
    assert (np.abs(visits[::2] - 5) <= 1.5).all() and (np.abs(visits[1::2] - 15) <= 1.5).all()


def test_samples_that_were_never_seen_come_first_and_at_random():
    found = [
        set(planned(Winnow(0.25), [NEVER_SEEN] * 8, key=key).ids.tolist()) for key in range(40)
    ]
    assert set.union(*found) == set(range(8)) and len({*map(frozenset, found)}) > 10
    unseen = planned(
        Winnow(0.5), [0.1, NEVER_SEEN, 0.1, NEVER_SEEN, 0.1, float("nan")], credit=[0.0] * 6
    )
    assert unseen.ids.tolist() == [1, 3, 5]


def test_a_sample_of_no_uncertainty_comes_last():
    assert planned(Winnow(0.66), [0.0, 1e-6, 0.5], credit=[0.5] * 3).ids.tolist() == [1, 2]


def test_a_credit_is_at_first_a_random_number_of_the_seed_the_epoch_and_the_id():
    base = int(torch.randint(2**62, (), generator=seeded(0, 1)))
    after = planned(Winnow(0.5), [0.5] * 50).remember["credit"].numpy()
    first = uniform(base, range(50))
    visited = np.isin(np.arange(50), planned(Winnow(0.5), [0.5] * 50).ids.numpy())
    assert np.allclose(after, first + 0.5 - visited, atol=1e-6)


def test_the_plan_of_an_epoch():
    plan = planned(Winnow(share=0.25, lr_scale=0.5), [0.1] * 9)
    assert (plan.smaller_batches, plan.drawn, plan.lr_scale, plan.weights) == (
        True,
        False,
        0.5,
        None,
    )
    assert len(plan.ids) == 2 and plan.facts["actual_fraction"] == 1 - 2 / 9
    assert planned(Winnow(share=0.0625), [0.1] * 9).lr_scale == 1


def test_share_1_is_full_training():
    plan = planned(Winnow(share=1), [0.1] * 9)
    assert not plan.smaller_batches and len(plan.ids) == 9 and plan.lr_scale == 1


def test_the_rows_differ_from_epoch_to_epoch_and_repeat_with_the_seed():
    one, same, other = (planned(Winnow(), [0.5] * 50, epoch=epoch).ids for epoch in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)


def test_the_loss_as_a_score():
    loss, credit = torch.rand(200).bfloat16().float(), torch.rand(200)
    plan = planned(Winnow(score="loss"), torch.ones(200), loss, credit)
    assert plan.ids.tolist() == transcribed(loss.tolist(), credit.tolist(), 100)[0]


# The agreement of loss and uncertainty


def test_agreement_is_the_rank_correlation():
    draws = np.random.default_rng(0)
    loss, uncertainty = draws.random(500), draws.random(500)
    loss[:200] = uncertainty[:200]
    ranks = [np.argsort(np.argsort(values)) for values in (loss, uncertainty)]
    assert agreement(loss, uncertainty) == pytest.approx(np.corrcoef(ranks[0], ranks[1])[0, 1])
    assert (
        agreement(loss, np.full(500, NEVER_SEEN)) is None
        and agreement(loss[:31], uncertainty[:31]) is None
    )
    assert agreement(np.arange(40.0), np.append(np.arange(39.0), np.nan)) == pytest.approx(1)
    many = np.arange(300_000.0)
    assert agreement(many, many**3) == pytest.approx(1)


def test_the_spread_is_the_standard_deviation_over_the_mean():
    values = np.random.default_rng(0).random(500)
    some = values[np.arange(500) % 7 > 0]
    values[::7] = NEVER_SEEN
    mean = math.fsum(some) / len(some)
    by_hand = math.sqrt(math.fsum((value - mean) ** 2 for value in some) / len(some)) / mean
    assert spread_of(values) == pytest.approx(by_hand)
    assert spread_of(np.zeros(50)) == 0
    many = np.tile([1.0, 3.0, 5.0], 100_000)
    assert spread_of(many) == pytest.approx(math.sqrt(8 / 3) / 3, rel=0.01)


@pytest.mark.parametrize(("spread", "doubted"), [(0.13, False), (0.15, True)])
def test_nearly_equal_uncertainties_say_nothing_about_labels(spread, doubted):
    draws = np.random.default_rng(0)
    uncertainty = 0.5 * (1 + spread * draws.choice([-1.0, 1.0], 400))
    for score in ("uncertainty", "loss"):
        plan = planned(Winnow(score=score), uncertainty, draws.random(400), epoch=40)
        assert plan.facts["agreement"] < 0.2 and plan.facts["spread"] == pytest.approx(
            spread, abs=0.006
        )
        assert bool(plan.facts["uniform"]) == bool(plan.note) == doubted


def test_equal_values_share_their_mean_rank():
    loss, uncertainty = np.random.default_rng(0).integers(0, 4, (2, 500)).astype(float)
    ranks = [stats.rankdata(values) for values in (loss, uncertainty)]
    assert agreement(loss, uncertainty) == pytest.approx(np.corrcoef(ranks[0], ranks[1])[0, 1])
    assert agreement(loss, np.ones(500)) is None and agreement(np.zeros(500), uncertainty) is None


def test_a_training_of_few_epochs_is_not_judged():
    uncertainty, loss = torch.rand(200), torch.rand(200)
    generator = torch.Generator().manual_seed(0)
    records = {
        "uncertainty": uncertainty.bfloat16(),
        "loss": loss.bfloat16(),
        "credit": torch.rand(200),
    }
    facts = [
        Winnow().plan_epoch(records, epoch=epoch, epochs=4, generator=generator).facts
        for epoch in range(4)
    ]
    assert [one["uniform"] for one in facts] == [0, 0, 0, 1]


def test_many_wrong_labels_make_the_draw_uniform_and_are_told():
    uncertainty, loss = torch.rand(200), torch.rand(200)
    doubted, uniform = (
        planned(Winnow(), uncertainty, loss, epoch=40),
        planned(Winnow(), [NEVER_SEEN] * 200, epoch=40),
    )
    assert doubted.facts["uniform"] == 1 and "rank correlation below 0.5" in doubted.note
    assert torch.equal(doubted.ids, uniform.ids)
    for trusted in (
        planned(Winnow(), uncertainty, uncertainty, epoch=40),
        planned(Winnow(), uncertainty, loss, epoch=10),  # too early to tell
        planned(Winnow(least_agreement=-1), uncertainty, loss, epoch=40),
    ):
        assert trusted.facts["uniform"] == 0 and not trusted.note
        assert not torch.equal(trusted.ids, uniform.ids)


def test_drawing_by_the_loss_where_labels_may_be_wrong_is_told():
    uncertainty = torch.rand(2000)
    loss = uncertainty + 0.8 * torch.rand(2000)
    plan = planned(Winnow(score="loss"), uncertainty, loss, epoch=40)
    assert 0.5 < plan.facts["agreement"] < 0.85 and "prefers samples with wrong labels" in plan.note
    assert not planned(Winnow(score="loss"), uncertainty, uncertainty, epoch=40).note


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"share": 0}, r"`share` must be a number within \(0, 1\], got 0"),
        ({"share": 1.5}, "`share`"),
        ({"score": "entropy"}, "`score` must be 'uncertainty' or 'loss', got 'entropy'"),
        ({"lr_scale": 0}, r"`lr_scale` must be a number within \(0, inf\), got 0"),
        ({"lr_scale": "auto"}, "`lr_scale`"),
        ({"lr_scale": True}, "`lr_scale`"),
        ({"least_agreement": 2}, r"`least_agreement` must be a number within \[-1, 1\], got 2"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Winnow(**settings)
