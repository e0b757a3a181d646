import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from thresher_lab.advise.advise import about_outlook
from thresher_lab.advise.forecast import Outlook, best_gain, evenness, outlook_of
from thresher_lab.advise.pace import Pace

PACE = Pace(loader=0.0, forward=1.0, backward=1.5, optimizer=0.5, scoring=1.0, half=1.6)
NORMS = arrays(np.float64, st.integers(1, 40), elements=st.floats(0, 1e3).map(lambda x: round(x, 3))).filter(np.any)


@pytest.mark.parametrize(("rho", "gain"), [(0.8, 1.06), (0.5, 1.29), (0.33, 1.52), (0.17, 1.91), (0.1, 2.16)])
def test_the_best_draw_gains_what_it_does_on_gamma_distributed_norms(rho, gain):
    norms = np.random.default_rng(0).gamma(rho / (1 - rho), size=50_000)
    assert evenness(norms) == pytest.approx(rho, abs=0.01) and best_gain(norms, 2.0) == pytest.approx(gain, abs=0.03)


@given(NORMS, st.floats(0, 10))
def test_a_draw_never_gains_more_than_the_backward_passes_nor_than_the_norms_allow(norms, ratio):
    rho, gain = evenness(norms), best_gain(norms, ratio)
    assert 0 < rho <= 1 + 1e-9
    assert 1 <= gain <= min(1 + ratio, 1 / rho) * (1 + 1e-9)


@given(NORMS, st.floats(0.1, 5))
def test_no_threshold_that_is_tried_is_better_by_much(norms, ratio):
    def product(threshold):
        chances = [min(1.0, s / threshold) for s in norms]
        noise = sum(s * s / p for s, p in zip(norms, chances, strict=True) if s > 0) / len(norms)
        return noise * (1 + ratio * sum(chances) / len(norms))

    whole = sum(s * s for s in norms) / len(norms) * (1 + ratio)
    transcribed = max(1.0, *(whole / product(s) for s in norms if s > 0))
    assert best_gain(norms, ratio) == pytest.approx(transcribed, rel=0.05)


def outlook(rho=0.3, before=0.31, half=0.5, waiting=0.0):
    return Outlook(rho, before, None if rho is None else 1.5, half, waiting)


@pytest.mark.parametrize(
    ("given", "alike", "by_steps"),
    [
        ({}, False, False),
        ({"rho": 0.95, "before": 0.96}, True, False),
        ({"rho": 0.95, "before": 0.99}, False, False),
        ({"rho": 0.95, "before": None}, False, False),
        ({"rho": None, "before": None}, False, False),
        ({"half": 0.95}, False, True),
        ({"half": 0.95, "waiting": 0.6}, False, False),
        ({"rho": 0.95, "before": 0.95, "half": 0.95}, True, True),
    ],
)
def test_what_the_numbers_say(given, alike, by_steps):
    one = outlook(**given)
    assert (one.alike, one.by_steps, one.hopeless) == (alike, by_steps, alike and by_steps)
    assert one.as_dict()["hopeless"] is one.hopeless


def test_norms_that_are_not_known_or_all_0_say_nothing():
    assert outlook_of([], PACE) == Outlook(None, None, None, PACE.half_share, 0.0)
    assert outlook_of([np.zeros(3, np.float32)], PACE).rho is None
    unseen = np.array([1.0, 3.0, -np.inf, np.nan], np.float32)
    assert outlook_of([unseen], PACE).rho == pytest.approx(4 / 5) and outlook_of([unseen], PACE).before is None
    assert outlook_of([unseen, np.ones(3, np.float32)], PACE).before == pytest.approx(4 / 5)


def test_while_the_loss_falls_nothing_has_settled():
    norms, losses = [np.array([1.0, 1.01], np.float32)] * 2, [np.array([2.0, np.nan, 4.0], np.float32)]
    falls = outlook_of(norms, PACE, [*losses, np.array([2.0, 3.0, 3.0], np.float32)])
    assert falls.learned == pytest.approx(1 / 9) and not falls.settled and not falls.alike
    stays = outlook_of(norms, PACE, [*losses, np.array([3.0, 3.0, 2.95], np.float32)])
    assert stays.settled and stays.alike
    assert outlook_of(norms, PACE, losses).learned is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, ("rho 0.30", "1.5 times as much", "half a batch takes 50 %", "smaller batches save time, too")),
        ({"rho": 0.95, "before": 0.95}, ("much alike (rho 0.95)", "no choice beats a random one by much")),
        ({"rho": 0.95, "before": None}, ("still alike", "the probe was too short")),
        ({"rho": None}, ("does not show how unlike the samples are",)),
        ({"half": 0.95}, ("takes 95 % of the time of a whole one", "only fewer steps save time, as with spend='steps'")),
        ({"half": 0.95, "waiting": 0.7}, ("waiting for input takes longer than both",)),
    ],
)
def test_one_sentence_says_both(given, said):
    sentence = about_outlook(outlook(**given))
    assert all(words in sentence for words in said) and sentence.count(". ") == 0
