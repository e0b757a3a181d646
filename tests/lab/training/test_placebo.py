"""A placebo decides as its method does, by the signals of other samples."""

import numpy as np
import pytest
import torch

import thresher
from thresher import methods, rng
from thresher.methods.order_dp import NEW_SAMPLE
from thresher.records import NEVER_SEEN
from thresher.scores import Scores
from thresher_lab.training.placebo import placebo_of, why_no_placebo


def planned(method, records, key=0):
    return method.plan_epoch(records, epoch=2, epochs=10, generator=rng.seeded(key, 2))


def test_an_epoch_method_hides_as_many_of_other_samples():
    loss = torch.arange(100.0)
    records = {
        "loss": loss,
        "correct": torch.ones(100, dtype=torch.bool),
        "confidence": torch.ones(100),
    }
    method = thresher.Kakurenbo(0.3, reduce_fraction=False)
    own, permuted = planned(method, records), planned(placebo_of(method), records)
    assert len(own.ids) == len(permuted.ids) == 70
    assert own.ids.tolist() == list(range(30, 100)) != permuted.ids.tolist()
    assert torch.equal(records["loss"], loss) and torch.equal(loss, torch.arange(100.0))


def test_columns_of_a_sample_stay_together_and_unseen_samples_in_place():
    seen = {}

    class Looks(thresher.Kakurenbo):
        def plan_epoch(self, records, **settings):
            seen.update(records)
            return super().plan_epoch(records, **settings)

    loss = torch.arange(50.0)
    loss[[3, 7]] = NEVER_SEEN
    planned(
        placebo_of(Looks()), {"loss": loss, "correct": loss > 20, "confidence": loss.clone() / 50}
    )
    assert (seen["loss"] == NEVER_SEEN).nonzero().flatten().tolist() == [3, 7]
    assert sorted(seen["loss"].tolist()) == sorted(loss.tolist()) and not torch.equal(
        seen["loss"], loss
    )
    there = seen["loss"] >= 0
    assert torch.equal(seen["confidence"][there], seen["loss"][there] / 50)
    assert torch.equal(seen["correct"][there], seen["loss"][there] > 20)


def test_new_samples_of_a_finite_mark_stay_in_place():
    """OrderDp takes new samples first, by the largest number that there is."""
    loss = torch.arange(20.0)
    loss[[3, 7]] = NEW_SAMPLE
    plan = planned(placebo_of(thresher.OrderDp(keep=0.2, pool=1.0)), {"loss": loss})
    assert len(plan.ids) == 4 and {3, 7} < set(plan.ids.tolist()) != {3, 7, 18, 19}


def test_a_batch_method_chooses_by_the_losses_of_other_rows():
    method = thresher.BigLoss(keep=0.25)
    counts = np.zeros(8)
    for step in range(400):
        signals = {"loss": torch.arange(8.0), "id": torch.arange(8)}
        plan, _ = placebo_of(method).plan_batch(
            signals, method.init_state(), step=step, generator=rng.seeded(0, step)
        )
        counts[plan.rows.numpy()] += 1
    assert counts.sum() == 800 and counts.min() > 60


def test_it_is_the_method_otherwise():
    method = thresher.Winnow(0.25)
    permuted = placebo_of(method)
    assert isinstance(permuted, thresher.Winnow) and permuted.share == 0.25
    assert permuted.requires == method.requires
    assert permuted.columns() == method.columns() and "Placebo" in repr(permuted)


def test_what_only_the_id_leads_to_is_permuted_with_the_losses():
    """The irreducible losses: without them in the order, the placebo would still choose by them."""
    known = Scores(torch.arange(8), torch.tensor([0.0, 9, 9, 9, 9, 9, 9, 9], dtype=torch.float64))
    method = thresher.RhoLoss(known, keep=0.125)
    counts, state = np.zeros(8), method.init_state()
    for step in range(400):
        signals = {"loss": torch.ones(8), "id": torch.arange(8)}
        plan, state = placebo_of(method).plan_batch(
            signals, state, step=step, generator=rng.seeded(0, step)
        )
        counts[plan.rows.numpy()] += 1
    assert counts.sum() == 400 and counts.max() < 100


def test_counts_are_permuted_among_the_samples_that_were_seen():
    method = thresher.Forgetting(fraction=0.25, start=1)
    turns = torch.ones(40, dtype=torch.int16)
    turns[:8] = -1  # never seen
    turns[8:20] = 9  # forgotten often
    hidden = torch.zeros(40)
    for key in range(200):
        own, permuted = (
            planned(of, {"forgetting": turns}, key) for of in (method, placebo_of(method))
        )
        assert (
            len(own.refresh) == len(permuted.refresh) == 10
            and own.refresh.min() >= 20
            and permuted.refresh.min() >= 8
        )
        hidden[permuted.refresh] += 1
    assert float(hidden[8:20].mean()) == pytest.approx(float(hidden[20:].mean()), rel=0.15)


def test_the_results_of_a_full_pass_are_permuted_and_what_was_remembered_stays():
    method = thresher.GradMatch(keep=0.25, every=1, per="class", gradient="bias", first=0)
    error = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    error[:4] *= 100
    error[39] = torch.nan
    records = {"error": error, "label": torch.arange(40) % 2, "weight": torch.zeros(40)}
    kept = torch.zeros(40)
    for key in range(200):
        plan = planned(placebo_of(method), records, key)
        assert 39 in plan.ids
        kept[plan.ids] += 1
    own = planned(method, records)
    assert own.ids[:4].tolist() == [0, 1, 2, 3]
    assert float(kept[:4].mean()) == pytest.approx(float(kept[4:39].mean()), rel=0.25)
    between = planned(
        placebo_of(thresher.GradMatch(keep=0.25, every=50)), {"weight": torch.arange(40) % 2.0}
    )
    assert between.ids.tolist() == list(range(1, 40, 2))


CHOOSES_BY_NOTHING = {
    "full",
    "uniform",
    "random_backprop",
    "rs2",
    "uniform_rows",
}


@pytest.mark.parametrize("name", sorted(set(methods.BUILT_IN) - {"ccs", "prune", "rho_loss"}))
def test_who_chooses_by_signals_has_one(name):
    method = methods.create(name)
    if name not in CHOOSES_BY_NOTHING:
        assert why_no_placebo(method) == "" and isinstance(placebo_of(method), type(method))
        return
    with pytest.raises(
        ValueError,
        match=f"{type(method).__name__} chooses without losses or scores: there is nothing to",
    ):
        placebo_of(method)


def test_there_is_none_of_a_method_that_records_nothing():
    class Halves:
        stage = "epoch"

        def columns(self):
            return {}

    assert (
        why_no_placebo(Halves())
        == "Halves chooses without losses or scores: there is nothing to permute"
    )


def test_there_is_none_before_training():
    scores = Scores(torch.arange(4), torch.arange(4, dtype=torch.float64))
    with pytest.raises(
        ValueError, match="Prune decides before training; a placebo is for methods of"
    ):
        placebo_of(thresher.Prune(scores))
