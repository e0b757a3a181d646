"""A placebo decides as its method does, by the signals of other samples."""

import numpy as np
import pytest
import torch

import thresher
from thresher import rng
from thresher.methods._placebo import placebo_of
from thresher.records import NEVER_SEEN
from thresher.scores import Scores


def planned(method, records, key=0):
    return method.plan_epoch(records, epoch=2, epochs=10, generator=rng.seeded(key, 2))


def test_an_epoch_method_hides_as_many_of_other_samples():
    loss = torch.arange(100.0)
    records = {"loss": loss, "correct": torch.ones(100, dtype=torch.bool), "confidence": torch.ones(100)}
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
    planned(placebo_of(Looks()), {"loss": loss, "correct": loss > 20, "confidence": loss.clone() / 50})
    assert (seen["loss"] == NEVER_SEEN).nonzero().flatten().tolist() == [3, 7]
    assert sorted(seen["loss"].tolist()) == sorted(loss.tolist()) and not torch.equal(seen["loss"], loss)
    there = seen["loss"] >= 0
    assert torch.equal(seen["confidence"][there], seen["loss"][there] / 50)
    assert torch.equal(seen["correct"][there], seen["loss"][there] > 20)


def test_a_batch_method_chooses_by_the_losses_of_other_rows():
    method = thresher.BigLoss(keep=0.25)
    counts = np.zeros(8)
    for step in range(400):
        signals = {"loss": torch.arange(8.0), "id": torch.arange(8)}
        plan, _ = placebo_of(method).plan_batch(signals, method.init_state(), step=step, generator=rng.seeded(0, step))
        counts[plan.rows.numpy()] += 1
    assert counts.sum() == 800 and counts.min() > 60


def test_it_is_the_method_otherwise():
    method = thresher.Winnow(0.25)
    permuted = placebo_of(method)
    assert isinstance(permuted, thresher.Winnow) and permuted.share == 0.25 and permuted.requires == method.requires
    assert permuted.columns() == method.columns() and "Placebo" in repr(permuted)


def test_there_is_none_before_training():
    scores = Scores(torch.arange(4), torch.arange(4, dtype=torch.float64))
    with pytest.raises(ValueError, match="Prune decides before training; a placebo is for methods of"):
        placebo_of(thresher.Prune(scores))
