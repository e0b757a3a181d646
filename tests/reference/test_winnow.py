"""Winnow against a transcription of its rule, sample by sample in plain Python."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from depth import depth
from helpers import over_instances
from thresher import EpochPlan, Winnow
from thresher.methods.winnow import agreement, draw_keys, spread_of, uniform
from thresher.records import NEVER_SEEN, Records
from thresher.rng import seeded

CPU = torch.device("cpu")
MASK = 2**64 - 1


def planned(method, uncertainty, loss=None, *, epoch=1, epochs=100, key=0) -> EpochPlan:
    records = Records(method.columns(), len(uncertainty), CPU)
    records["uncertainty"].copy_(torch.as_tensor(uncertainty))
    records["loss"].copy_(torch.as_tensor(uncertainty if loss is None else loss))
    return method.plan_epoch(records, epoch=epoch, epochs=epochs, generator=seeded(key, epoch))


def transcribed_hash(base: int, i: int) -> float:
    bits = ((i + 1) * 0x9E3779B97F4A7C15 + base) & MASK
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & MASK
    bits ^= bits >> 31
    return ((bits >> 41) + 0.5) * 2.0**-23


def transcribed_order(scores: list[float], base: int) -> list[int]:
    """All samples, the first to be drawn first: those without a score, then by -log(u) / score."""
    unseen = [i for i, score in enumerate(scores) if not score >= 0]
    seen = [i for i, score in enumerate(scores) if score >= 0]
    key = {i: -math.log(transcribed_hash(base, i)) / scores[i] if scores[i] else math.inf for i in seen}
    return sorted(unseen, key=lambda i: -transcribed_hash(base, i)) + sorted(seen, key=lambda i: (key[i], i))


@over_instances(range(depth(40, 200)))
def test_keys_order_samples_as_the_rule_does(number):
    draws = np.random.default_rng(number)
    n = int(draws.integers(1, 60))
    scores = draws.choice([0.0, 1e-30, 0.1, 0.5, 1.0, 1e30, np.nan, NEVER_SEEN, draws.random()], n).astype(np.float32)
    base = int(draws.integers(0, 2**62))
    keys = draw_keys(scores, n, base)
    finite = [i for i in range(n) if not math.isinf(float(keys[i]))]
    found = [int(i) for i in np.argsort(keys, kind="stable") if int(i) in set(finite)]
    expected = [i for i in transcribed_order(scores.tolist(), base) if i in set(finite)]
    ties = len({float(keys[i]) for i in finite}) < len(finite)
    assert ties or found == expected
    assert not np.isnan(keys).any()


def test_random_numbers_are_those_of_the_transcription_and_uniform():
    u = uniform(2**62 - 1, range(100_000))
    assert u[:50].tolist() == [np.float32(transcribed_hash(2**62 - 1, i)) for i in range(50)]
    assert u.min() > 0 and u.max() < 1 and abs(u.mean() - 0.5) < 0.005
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.02
    assert np.array_equal(uniform(7, range(10, 20)), uniform(7, range(30))[10:20])


def test_a_sample_is_drawn_in_proportion_to_its_score():
    """Of two candidates with scores 1 and 3, the second is drawn three times in four."""
    scores = np.tile(np.array([1.0, 3.0], dtype=np.float32), 20_000)
    keys = draw_keys(scores, len(scores), 5).reshape(-1, 2)
    assert abs((keys[:, 1] < keys[:, 0]).mean() - 0.75) < 0.01


def test_samples_that_were_never_seen_come_first_and_at_random():
    plan = planned(Winnow(paced=False), [0.9, NEVER_SEEN, 0.9, NEVER_SEEN, float("nan")])
    assert plan.keys is not None
    assert set(plan.keys.argsort()[:3].tolist()) == {1, 3, 4}
    firsts = {int(planned(Winnow(paced=False), [NEVER_SEEN] * 4, key=key).keys.argmin()) for key in range(40)}  # pyright: ignore
    assert firsts == {0, 1, 2, 3}


def test_a_sample_of_no_uncertainty_comes_last():
    plan = planned(Winnow(paced=False), [0.0, 1e-6, 0.5])
    assert plan.keys is not None and plan.keys.argmax() == 0


def test_the_plan_of_an_epoch():
    plan = planned(Winnow(share=0.25, width=3, lr_scale=0.5, paced=False), [0.1] * 9)
    assert (plan.smaller_batches, plan.share, plan.width, plan.lr_scale, plan.weights) == (True, 0.25, 3, 0.5, None)
    assert plan.ids.tolist() == list(range(9)) and plan.facts["actual_fraction"] == 0.75
    assert planned(Winnow(share=0.0625, paced=False), [0.1] * 9).lr_scale == 0.5


def test_share_1_is_full_training():
    plan = planned(Winnow(share=1, paced=False), [0.1] * 9)
    assert not plan.smaller_batches and plan.keys is None and plan.lr_scale == 1


def test_the_draw_differs_from_epoch_to_epoch_and_repeats_with_the_seed():
    one, same, other = (planned(Winnow(paced=False), [0.5] * 50, epoch=epoch).keys for epoch in (1, 1, 2))
    assert one is not None and same is not None and other is not None
    assert torch.equal(one, same) and not torch.equal(one, other)


def test_the_loss_as_a_score():
    loss = torch.rand(200)
    keys = planned(Winnow(score="loss", paced=False), torch.ones(200), loss).keys
    by_hand = draw_keys(loss.bfloat16().float().numpy(), 200, int(torch.randint(2**62, (), generator=seeded(0, 1))))
    assert keys is not None and torch.equal(keys, torch.from_numpy(by_hand))


# The agreement of loss and uncertainty


def test_agreement_is_the_rank_correlation():
    draws = np.random.default_rng(0)
    loss, uncertainty = draws.random(500), draws.random(500)
    loss[:200] = uncertainty[:200]
    ranks = [np.argsort(np.argsort(values)) for values in (loss, uncertainty)]
    assert agreement(loss, uncertainty) == pytest.approx(np.corrcoef(ranks[0], ranks[1])[0, 1])
    assert agreement(loss, np.full(500, NEVER_SEEN)) is None and agreement(loss[:31], uncertainty[:31]) is None
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
        plan = planned(Winnow(score=score, paced=False), uncertainty, draws.random(400), epoch=40)
        assert plan.facts["agreement"] < 0.2 and plan.facts["spread"] == pytest.approx(spread, abs=0.006)
        assert bool(plan.facts["uniform"]) == bool(plan.note) == doubted


def test_equal_values_share_their_mean_rank():
    loss, uncertainty = np.random.default_rng(0).integers(0, 4, (2, 500)).astype(float)
    ranks = [stats.rankdata(values) for values in (loss, uncertainty)]
    assert agreement(loss, uncertainty) == pytest.approx(np.corrcoef(ranks[0], ranks[1])[0, 1])
    assert agreement(loss, np.ones(500)) is None and agreement(np.zeros(500), uncertainty) is None


def test_a_training_of_few_epochs_is_not_judged():
    uncertainty, loss = torch.rand(200), torch.rand(200)
    generator = torch.Generator().manual_seed(0)
    records = {"uncertainty": uncertainty.bfloat16(), "loss": loss.bfloat16()}
    facts = [Winnow(paced=False).plan_epoch(records, epoch=epoch, epochs=4, generator=generator).facts for epoch in range(4)]
    assert [one["uniform"] for one in facts] == [0, 0, 0, 1]


def test_many_wrong_labels_make_the_draw_uniform_and_are_told():
    uncertainty, loss = torch.rand(200), torch.rand(200)
    doubted, uniform = (
        planned(Winnow(paced=False), uncertainty, loss, epoch=40),
        planned(Winnow(paced=False), [NEVER_SEEN] * 200, epoch=40),
    )
    assert doubted.facts["uniform"] == 1 and "rank correlation below 0.5" in doubted.note
    assert doubted.keys is not None and uniform.keys is not None and torch.equal(doubted.keys, uniform.keys)
    for trusted in (
        planned(Winnow(paced=False), uncertainty, uncertainty, epoch=40),
        planned(Winnow(paced=False), uncertainty, loss, epoch=10),  # too early to tell
        planned(Winnow(least_agreement=-1, paced=False), uncertainty, loss, epoch=40),
    ):
        assert trusted.facts["uniform"] == 0 and not trusted.note
        assert trusted.keys is not None and not torch.equal(trusted.keys, uniform.keys)


def test_drawing_by_the_loss_where_labels_may_be_wrong_is_told():
    uncertainty = torch.rand(2000)
    loss = uncertainty + 0.8 * torch.rand(2000)
    plan = planned(Winnow(score="loss", paced=False), uncertainty, loss, epoch=40)
    assert 0.5 < plan.facts["agreement"] < 0.85 and "prefers samples with wrong labels" in plan.note
    assert not planned(Winnow(score="loss", paced=False), uncertainty, uncertainty, epoch=40).note


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"share": 0}, r"`share` is a share of the cost, within \(0, 1\], got 0"),
        ({"share": 1.5}, "`share`"),
        ({"score": "entropy"}, "`score` must be 'uncertainty' or 'loss', got 'entropy'"),
        ({"width": 0.5}, "`width` is a number of candidates per row, 1 or more, got 0.5"),
        ({"width": float("inf")}, "`width`"),
        ({"lr_scale": 0}, "`lr_scale` must be 'auto' or a positive number, got 0"),
        ({"lr_scale": "share"}, "`lr_scale`"),
        ({"lr_scale": True}, "`lr_scale`"),
        ({"least_agreement": 2}, r"`least_agreement` is a correlation, within \[-1, 1\], got 2"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Winnow(**settings)
