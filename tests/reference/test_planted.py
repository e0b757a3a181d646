"""On problems with a known answer a method beats random samples of its own counted cost, or its card says why it need not."""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import thresher
from depth import DEEP, depth
from thresher import methods
from thresher.scores import Scores
from thresher.testing import Toy, beats_uniform, planted
from thresher.testing.toys import PLANTED, train_and_score, train_model

SEEDS = (0, 1, 2)
pytestmark = pytest.mark.usefixtures("shared_traces")


def irreducible(toy: Toy) -> thresher.RhoLoss:
    """By a model that was trained for long on held-out samples; as in the paper that is not counted."""
    other = replace(toy, x=toy.held_out[0], y=toy.held_out[1], lr=5 * toy.lr)
    model = train_model(thresher.FullData(), other, epochs=20)[0]
    with torch.no_grad():
        losses = nn.functional.cross_entropy(model(toy.x), toy.y, reduction="none")
    return thresher.RhoLoss(Scores(torch.arange(len(losses)), losses), keep=0.25)


def pruned(toy: Toy) -> thresher.Prune:
    """By the error norm of a model that was trained for two epochs, which counts."""
    model = train_model(thresher.FullData(), toy, epochs=2)[0]
    with torch.no_grad():
        norms = (model(toy.x).softmax(1) - nn.functional.one_hot(toy.y, 2)).norm(dim=1)
    n = len(norms)
    return thresher.Prune(Scores(torch.arange(n), norms, forward=3 * n, backward=2 * n), keep=0.25)


def covered(toy: Toy) -> thresher.Ccs:
    """By the same scores, with every stratum of them."""
    return thresher.Ccs(pruned(toy).scores, keep=0.25, strata=10)


class Win(NamedTuple):
    """Where a method must win, and by how much at least on average; where seeds differ much, by how many of them."""

    toy: str
    margin: float
    method: Any
    seeds: tuple[int, ...] = SEEDS


WINS: dict[str, Win] = {
    "big_loss": Win("redundant", 0.2, thresher.BigLoss(keep=0.25)),
    "selective_backprop": Win("redundant", 0.1, thresher.SelectiveBackprop(beta=2.0)),
    "gradient_norm": Win("redundant", 0.2, thresher.GradientNorm(keep=0.25)),
    "ada_boost": Win("redundant", 0.2, thresher.AdaBoost(keep=0.25)),
    "coreset_extremes": Win("redundant", 0.2, thresher.CoresetExtremes(keep=0.25)),
    "kakurenbo": Win("redundant", 0.1, thresher.Kakurenbo(max_fraction=0.5, tau=0.5)),
    "infobatch": Win("redundant", 0.15, thresher.InfoBatch(prune_fraction=0.8)),
    "epoch_selective_backprop": Win(
        "redundant", 0.1, thresher.EpochSelectiveBackprop(beta=2.0, percentile="rank")
    ),
    "importance_sampling": Win(
        "redundant", 0.3, thresher.ImportanceSampling(losses="last", keep=0.3)
    ),
    "forgetting": Win("redundant", 0.05, thresher.Forgetting(fraction=0.5, start=2)),
    "prune": Win("redundant", 0.1, pruned),
    "ccs": Win("redundant", 0.1, covered),
    "winnow": Win("redundant", 0.2, thresher.Winnow(least_agreement=-1)),
    "seta": Win("rare", 0.12, thresher.SeTa()),
    "order_dp": Win("redundant", 0.1, thresher.OrderDp()),
    "repb": Win("redundant", 0.15, thresher.RePb(prune_fraction=0.8)),
    "ies": Win("redundant", 0.07, thresher.Ies(target=0.3)),
    "ucb": Win("redundant", 0.15, thresher.Ucb(keep=0.3)),
    "rcap": Win("redundant", 0.14, thresher.Rcap(keep=0.3, beta=1 / 3)),
    "rs2": Win("skewed", 0.45, thresher.Rs2()),
    "small_loss": Win("noisy", 0.15, thresher.SmallLoss(keep=0.5)),
    "ada_selection": Win("redundant", 0.15, thresher.AdaSelection(keep=0.25)),
    "rho_loss": Win("redundant", 0.1, irreducible),
    "coreset_center": Win("outliers", 0.5, thresher.CoresetCenter(keep=0.5)),
    "batch_importance": Win(
        "skewed", 0.2, thresher.BatchImportance(keep=0.25, threshold=0.0), tuple(range(12))
    ),
    "threshold_keep": Win("skewed", 0.4, thresher.ThresholdKeep()),
    "div_bs": Win("redundant", 0.15, thresher.DivBS(keep=0.1)),
    "grad_match": Win("skewed", 0.4, thresher.GradMatch(keep=0.25, every=1, batch_size=4)),
}


QUICK = (
    "ada_selection",
    "infobatch",
    "kakurenbo",
    "prune",
    "selective_backprop",
    "small_loss",
    "winnow",
)
"""Methods of every stage and kind of signal, which `make test` tries; `make verify` tries all."""


@pytest.mark.parametrize("name", sorted(methods.BUILT_IN))
def test_it_beats_random_samples_of_equal_cost(name: str, request: pytest.FixtureRequest) -> None:
    if name == "full":
        pytest.skip("full training is what costs are counted against")
    if name not in WINS:
        caveat = methods.load(name).card.caveat  # type: ignore[attr-defined]
        assert caveat, f"{name} wins nowhere and its card does not say so"
        pytest.skip(caveat)
    win = WINS[name]
    if name not in QUICK and not DEEP:
        pytest.skip("make verify runs it")
    if methods.load(name).stage == "batch":  # at the cost of one forward pass
        request.getfixturevalue("newer_torch")
    contest = beats_uniform(win.method, win.toy, win.seeds)
    assert contest.gain > win.margin
    assert contest.gain > 3 * contest.standard_error


def test_large_losses_lose_where_some_samples_are_far_off() -> None:
    """The problems tell methods apart: what wins on one loses on another."""
    contest = beats_uniform(thresher.BigLoss(keep=0.25), "outliers", SEEDS)
    assert contest.gain < -0.1
    assert contest.gain < -2 * contest.standard_error


def test_random_samples_do_not_beat_themselves() -> None:
    contest = beats_uniform(thresher.RandomBackprop(keep=0.5), "noisy", depth(SEEDS[:1], SEEDS))
    assert contest.method == contest.uniform
    assert contest.cost == pytest.approx(0.5, abs=0.01)


def test_what_costs_more_than_full_training_competes_with_a_longer_training() -> None:
    contest = beats_uniform(thresher.ImportanceSampling(), "redundant", (0,))
    assert contest.cost > 1.2
    toy = planted("redundant", 0)
    assert contest.uniform == (
        train_and_score(thresher.FullData(), toy, epochs=round(contest.cost * toy.epochs)).score,
    )


@pytest.mark.parametrize("name", PLANTED)
def test_a_problem_is_the_same_every_time(name: str) -> None:
    one, same, other = planted(name, 3), planted(name, 3), planted(name, 4)
    assert torch.equal(one.x, same.x)
    assert torch.equal(one.y, same.y)
    assert not torch.equal(one.x, other.x)
    state = torch.get_rng_state()
    scores = [train_and_score(thresher.FullData(), toy, epochs=1).score for toy in (one, same)]
    assert scores[0] == pytest.approx(scores[1])
    assert torch.equal(torch.get_rng_state(), state)


def test_no_such_problem() -> None:
    with pytest.raises(
        ValueError,
        match="^no planted problem 'easy'; there are redundant, noisy, outliers, skewed, rare$",
    ):
        planted("easy", 0)


def test_a_contest_says_how_sure_it_is() -> None:
    contest = beats_uniform(thresher.RandomBackprop(keep=0.5), "noisy", (0,))
    assert contest.standard_error == float("inf")
