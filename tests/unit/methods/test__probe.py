"""The probe: which samples are held back, when they are evaluated, what that costs, and when a network falls behind."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from depth import depth
from helpers import over_instances
from thresher.methods._probe import GIVEN_BACK, HELD, WAS_BEHIND, HeldBack, Rise, rise
from thresher.records import NEVER_SEEN, Column, Records
from thresher.rng import seeded
from thresher.testing.check import comparable

CPU = torch.device("cpu")
N, EPOCHS = 120, 10
EVERY = HeldBack(samples=40, times=EPOCHS)


def table(n: int = N) -> Records:
    return Records({"loss": Column(torch.bfloat16, fill=NEVER_SEEN), **EVERY.columns()}, n, CPU)


def looked(records: Records, epoch: int, probe: HeldBack = EVERY, key: int = 0) -> Any:
    look = probe.look(records, epoch=epoch, epochs=EPOCHS, generator=seeded(key, epoch))
    records.remember(look.remember)
    return look


def evaluated(losses: list[np.ndarray], key: int = 0) -> list[Any]:
    """Returns the looks of a training in which the held-back samples have these losses, one evaluation after the other."""
    records = table()
    looks = [looked(records, 0, key=key)]
    held = torch.from_numpy(looks[0].held)
    for epoch, values in enumerate(losses, start=1):
        records["loss"][~held] = torch.rand(N - EVERY.samples).bfloat16()
        records["loss"][held] = torch.as_tensor(values).bfloat16()
        looks.append(looked(records, epoch, key=key))
    return looks


def risen(best: np.ndarray, now: np.ndarray) -> Rise:
    found = rise(best, now)
    assert found is not None
    return found


# When, and what it costs


def test_evaluations_are_evenly_spread_and_never_after_the_last_epoch():
    assert [epoch for epoch in range(10) if HeldBack(40, 4).due(epoch, 10)] == [1, 3, 5, 7]
    assert [epoch for epoch in range(12) if HeldBack(40, 3).due(epoch, 12)] == [2, 5, 8]
    assert not HeldBack(40, 4).due(-1, 10) and not HeldBack(40, 4).due(12, 10)


@given(st.integers(3, 40), st.integers(1, 60))
def test_there_are_as_many_evaluations_as_asked_for_or_as_epochs_allow(times, epochs):
    due = [epoch for epoch in range(epochs) if HeldBack(40, times).due(epoch, epochs)]
    assert len(due) == min(times, epochs - 1) and epochs - 1 not in due
    gaps = np.diff([-1, *due, epochs - 1])
    assert gaps.max() - gaps.min() <= 1


@given(st.integers(3, 12), st.integers(4, 40), st.integers(200, 5000), st.floats(0.1, 0.6), st.integers(32, 60))
def test_trained_samples_and_evaluations_are_the_budget(times, epochs, n, share, samples):
    probe = HeldBack(samples, times)
    passes = sum(probe.due(epoch, epochs) for epoch in range(epochs))
    spent = 3 * epochs * probe.rows(share, n, epochs) + samples * passes
    assert spent == pytest.approx(3 * epochs * share * n)


@pytest.mark.parametrize(
    ("share", "n", "epochs", "message"),
    [
        (0.5, 100, 3, "compares 3 evaluations at least, and a training of 3 epochs has 2 of them: leave `probe` out"),
        (0.9, 100, 10, "holds back 40 of 100 samples, and at share=0.9 each epoch is to train on 79 of the 60 that are left"),
        (0.1, 100, 10, "each epoch is to train on 0 of the 60 that are left: hold back fewer samples"),
        (0.5, 30, 10, "holds back 40 of 30 samples, and at share=0.5 each epoch is to train on 4 of the 0 that are left"),
    ],
)
def test_probes_that_do_not_fit_are_refused(share, n, epochs, message):
    with pytest.raises(ValueError, match=f"^Winnow: `probe` .*{message}"):
        HeldBack(40, 8).rows(share, n, epochs)


# Which samples


def test_held_back_samples_are_drawn_once_uniformly_and_by_the_seed():
    records = table()
    first = looked(records, 0)
    assert first.held.sum() == 40 and not first.fell and first.facts == {"guard": 0.0}
    assert all(np.array_equal(looked(records, epoch, key=9).held, first.held) for epoch in (1, 2, 5))
    assert np.array_equal(looked(table(), 0).held, first.held)
    often = np.mean([looked(table(), 0, key=key).held for key in range(300)], axis=0)
    assert np.abs(often - 40 / N).max() < 0.12


def test_marks_of_held_back_samples_are_not_finite():
    records = table()
    held = looked(records, 0).held
    assert np.array_equal(~records["held_back"].float().isfinite().numpy(), held)
    assert Records(EVERY.columns(), 1, CPU).bytes_per_sample == 4


# The rise of the losses


def transcribed_rise(best: list[float], now: list[float]) -> tuple[float, float] | None:
    """Mean and standard error of the differences, sample by sample."""
    pairs = [(b, n) for b, n in zip(best, now, strict=True) if math.isfinite(b)]
    if len(pairs) < 2:
        return None
    pairs = [(b, n if math.isfinite(n) else float(np.finfo(np.float32).max)) for b, n in pairs]
    ordered = sorted(b for b, _ in pairs)
    place = 0.9 * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    large = ordered[below] + (place - below) * (ordered[above] - ordered[below])
    scale = large - ordered[0] if large > ordered[0] else 1.0
    differences = [math.log(1 + max(n - ordered[0], 0) / scale) - math.log(1 + (b - ordered[0]) / scale) for b, n in pairs]
    mean = math.fsum(differences) / len(differences)
    variance = math.fsum((d - mean) ** 2 for d in differences) / (len(differences) - 1)
    return mean, math.sqrt(variance / len(differences))


@over_instances(range(depth(40, 400)))
def test_the_rise_is_that_of_the_transcription(number):
    draws = np.random.default_rng(number)
    n = int(draws.integers(0, 60))
    pool = [0.0, 1.0, -1.0, 1e4, math.nan, math.inf, -math.inf, *draws.gamma(1.0, 1.0, 20)]
    best, now = (draws.choice(pool, n).astype(np.float32) for _ in range(2))
    found, expected = rise(best, now), transcribed_rise(best.tolist(), now.tolist())
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert tuple(found) == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_a_few_growing_losses_are_no_damage_and_many_are():
    best = np.random.default_rng(0).gamma(1.0, 0.3, 500)
    surer = np.where(best > np.quantile(best, 0.92), 3 * best, 0.5 * best)
    assert surer.mean() > best.mean() and not risen(best, surer).behind
    worse = best + np.random.default_rng(1).normal(0.1, 0.2, 500)
    assert risen(best, worse).behind and not risen(worse, best).behind


def test_half_of_the_samples_lost_and_half_sure_is_a_rise():
    """As where a network of two classes diverges: no loss of a half, and huge losses of the other half."""
    best = np.random.default_rng(0).gamma(1.0, 0.4, 80)
    assert risen(best, np.where(np.arange(80) % 2, 1e9, 0.0)).behind


def test_chance_rarely_looks_like_a_rise():
    """Of networks that are equally good at different samples, three standard errors separate about one pair in 700."""
    draws = np.random.default_rng(2)
    pairs = (hard * draws.lognormal(0, 0.4, (2, 200)) for hard in draws.gamma(1.0, 1.0, (2000, 200)))
    assert sum(risen(best, now).behind for best, now in pairs) <= 12


def test_a_rise_of_every_loss_by_the_same_is_behind_and_none_is_not():
    for best in (np.ones(50), np.zeros(50), np.arange(50.0), -np.arange(50.0)):
        assert not risen(best, best).behind and risen(best, best + 100).behind and not risen(best, best - 100).behind


# A whole training


def transcribed_training(losses: list[list[float]]) -> list[tuple[bool, float]]:
    """Whether the network has fallen behind after each evaluation, and the mark of the held-back samples."""
    best, behind_before, fell, states = [math.nan] * len(losses[0]), False, False, list[tuple[bool, float]]()
    for now in losses:
        found = None if fell else transcribed_rise(best, now)
        behind = found is not None and found[0] > 3 * found[1]
        fell = fell or (behind and behind_before)
        if not fell and (found is None or found[0] < 0):
            best = now
        behind_before = behind
        states.append((fell, GIVEN_BACK if fell else WAS_BEHIND if behind else HELD))
    return states


@over_instances(range(depth(30, 300)))
def test_a_training_is_judged_as_by_the_transcription(number):
    draws = np.random.default_rng(number)
    level = draws.choice([0.5, 1.0, 2.0], EPOCHS - 1)
    losses = [torch.as_tensor(draws.gamma(2.0, one / 2, 40)).bfloat16().float().numpy() for one in level]
    for values in losses:
        values[draws.random(40) < draws.choice([0.0, 0.0, 0.1, 1.0])] = draws.choice([math.nan, math.inf])
    records = table()
    held = torch.from_numpy(looked(records, 0).held)
    expected = transcribed_training([values.tolist() for values in losses])
    for epoch, values in enumerate(losses, start=1):
        records["loss"][held] = torch.from_numpy(values).bfloat16()
        look = looked(records, epoch)
        marks = records["held_back"].float()[held]
        assert (look.fell, set(marks.tolist())) == (expected[epoch - 1][0], {expected[epoch - 1][1]})
        assert look.facts["guard"] == float(look.fell) and all(math.isfinite(value) for value in look.facts.values())


def test_two_bad_evaluations_in_a_row_end_it_and_one_does_not():
    draws = np.random.default_rng(0)
    good = draws.gamma(2.0, 0.2, 40)
    bad = good + draws.gamma(2.0, 0.5, 40)
    assert [look.fell for look in evaluated([good, bad, good, bad, good])] == [False] * 6
    looks = evaluated([good, bad, bad, good, good])
    assert [look.fell for look in looks] == [False, False, False, True, True, True]
    assert not looks[3].held.any() and looks[3].facts["probe_loss"] == pytest.approx(bad.mean(), rel=0.01)
    assert looks[4].remember == {} and looks[4].facts == {"guard": 1.0}


def test_records_are_compared_only_after_an_evaluation():
    probe, records = HeldBack(40, 3), table()
    held = torch.from_numpy(looked(records, 0, probe).held)
    records["loss"][held] = 1.0
    assert all("probe_loss" not in looked(records, epoch, probe).facts for epoch in (1, 4, 6))
    assert looked(records, 5, probe).facts == {"guard": 0.0, "probe_loss": 1.0}  # due after epochs 2, 4 (by index) and 7


def test_a_network_whose_losses_are_not_finite_is_never_its_own_best():
    draws = np.random.default_rng(0)
    good = draws.gamma(2.0, 0.2, 40)
    lost = np.full(40, math.nan)
    looks = evaluated([lost, good, lost, lost])
    assert [look.fell for look in looks] == [False, False, False, False, True]
    assert "probe_loss" not in looks[1].facts and "probe_loss" in looks[2].facts


def test_looking_changes_no_record():
    records = table()
    looked(records, 0)
    records["loss"].copy_(torch.rand(N))
    before = {name: column.clone() for name, column in records.items()}
    for epoch in range(EPOCHS):
        EVERY.look(records, epoch=epoch, epochs=EPOCHS, generator=seeded(0, epoch))
    assert comparable(dict(records)) == comparable(before)
