"""Bls in a training: its scores are moving means of the losses of batches, and the rest is InfoBatch."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from helpers import HARD_KINDS, hard_losses
from thresher import Bls, InfoBatch
from thresher.records import Records
from thresher.rng import seeded

N, BATCH, ALPHA = 22, 8, 0.75


Seen = list[list[tuple[list[int], float, float]]]
"""The ids of each batch of each epoch, its mean loss, and the scalar that the loop gets."""


def trained(method: Any, *, one_loss: bool = False, epochs: int = 3) -> tuple[thresher.Run, Seen]:
    """Trains, and returns the run and what the loop saw; the last batch of the first epoch is partial."""
    x = torch.randn(N, 3, generator=seeded(1))
    y = (x[:, 0] > 0).long()
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.randn(2, 3, generator=seeded(2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(
        TensorDataset(x, y, torch.arange(N)), BATCH, shuffle=True, generator=seeded(3)
    )
    criterion = None if one_loss else nn.CrossEntropyLoss()
    run = thresher.attach(
        method, loader=loader, criterion=criterion, model=model, optimizer=optimizer, epochs=epochs
    )
    seen = []
    for _ in range(epochs):
        batches = []
        for inputs, targets, ids in run.loader:
            outputs = run.model(inputs)
            loss = nn.functional.cross_entropy(outputs, targets)
            value = (
                run.reduce(loss.expand(len(ids)), ids=run.ids)
                if one_loss
                else run.criterion(outputs, targets)
            )
            batches.append((ids.tolist(), loss.item(), value.item()))
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        seen.append(batches)
    return run, seen


def transcribed(seen: Seen) -> list[float]:
    score = [math.nan] * N
    for batches in seen:
        for ids, loss, _ in batches:
            for i in ids:
                score[i] = loss if math.isnan(score[i]) else ALPHA * score[i] + (1 - ALPHA) * loss
    return score


@pytest.mark.parametrize("one_loss", [False, True])
@pytest.mark.filterwarnings("ignore:.*BatchNorm.*")
def test_scores_are_moving_means_of_the_losses_of_batches(one_loss: bool) -> None:
    run, seen = trained(Bls(alpha=ALPHA, delta=1.0), one_loss=one_loss)
    assert [len(ids) for ids, _, _ in seen[0]] == [8, 8, 6]
    assert sum(len(ids) for ids, _, _ in seen[2]) < N
    np.testing.assert_allclose(run.records["score"].numpy(), transcribed(seen), rtol=1e-5)
    if (
        one_loss
    ):  # times the mean of the weights of the batch, which add up to the number of samples
        for epoch in seen:
            assert sum(len(ids) * value / loss for ids, loss, value in epoch) == pytest.approx(
                N, rel=1e-5
            )


@pytest.mark.parametrize("kind", HARD_KINDS)
def test_the_plan_is_that_of_infobatch_by_the_scores(kind: str) -> None:
    for number in range(10):
        loss = torch.tensor(hard_losses(kind, number))
        plans = []
        for method, name in ((InfoBatch(0.7), "loss"), (Bls(0.7), "score")):
            records = Records(method.columns(), len(loss), torch.device("cpu"))
            records[name].copy_(loss)
            plans.append(method.plan_epoch(records, epoch=1, epochs=9, generator=seeded(number)))
        one, other = plans
        assert torch.equal(one.ids, other.ids)
        assert (one.weights is None) == (other.weights is None)
        assert one.weights is None or (
            other.weights is not None and torch.equal(one.weights, other.weights)
        )


@pytest.mark.parametrize("alpha", [1, -0.1, math.nan])
def test_alpha_out_of_range_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match="^Bls: `alpha` must be a number within"):
        Bls(alpha=alpha)


def test_errors_name_this_method() -> None:
    with pytest.raises(ValueError, match="^Bls: `delta` "):
        Bls(delta=2)
