"""RePb against a transcription that counts by hand, its weights, and how far they are from unbiased."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from depth import depth
from helpers import HARD_KINDS, hard_losses, noted, winners
from thresher import RePb
from thresher.records import Records
from thresher.rng import seeded

EPOCHS = 7


def transcribed(
    batches: list[list[tuple[float, float]]], rho: Fraction, key: int
) -> list[dict[int, float]]:
    """The weight of each sample that is kept, epoch by epoch; a batch is (loss, mean of its batch) by sample and epoch."""
    n = len(batches[0])
    times, last = [1] * n, list(batches[0])
    plans = [dict.fromkeys(range(n), 1.0)]
    for epoch in range(1, EPOCHS):
        doubtful = [
            i
            for i, (loss, mean) in enumerate(last)
            if math.isfinite(loss) and math.isfinite(mean) and loss < mean
        ]
        stay = max(1, math.floor((1 - rho) * len(doubtful)))
        kept = winners(stay, seeded(key, epoch), doubtful) if doubtful else set()
        kept |= set(range(n)) - set(doubtful)
        for i in kept:
            times[i] += 1
            # A loss of -inf stands for a sample without a label, which keeps its record.
            if batches[epoch][i][0] != -math.inf:
                last[i] = batches[epoch][i]
        plans.append({i: min((epoch + 1) / times[i], float(1 / (1 - rho))) for i in kept})
    return plans


@pytest.mark.parametrize("kind", HARD_KINDS)
def test_the_plans_are_those_of_the_paper(kind: str) -> None:
    for number in range(depth(10, 50)):
        r = np.random.default_rng(number)
        one = np.array(hard_losses(kind, number), np.float32)
        losses, means = ([r.permutation(one) for _ in range(EPOCHS)] for _ in range(2))
        rho = Fraction(int(r.choice([10, 29, 50, 90])), 100)
        both: Any = [
            list(zip(a.tolist(), b.tolist(), strict=True))
            for a, b in zip(losses, means, strict=True)
        ]
        expected = transcribed(both, rho, number)
        method = RePb(float(rho))
        records = Records(method.columns(), len(losses[0]), torch.device("cpu"))
        for epoch in range(EPOCHS):
            plan = method.plan_epoch(
                records, epoch=epoch, epochs=EPOCHS, generator=seeded(number, epoch)
            )
            weights = torch.ones(len(plan.ids)) if plan.weights is None else plan.weights
            with noted(f"instance {number}, epoch {epoch}"):
                assert dict(zip(plan.ids.tolist(), weights.tolist(), strict=True)) == pytest.approx(
                    expected[epoch]
                )
            records.remember(plan.remember)
            signals = {
                "loss": torch.from_numpy(losses[epoch]),
                "batch_loss": torch.from_numpy(means[epoch]),
            }
            records.write(plan.ids, {name: values[plan.ids] for name, values in signals.items()})


def test_in_the_long_run_the_weights_are_nearly_unbiased_and_in_the_first_epochs_too_small() -> (
    None
):
    """As the card says: the sum of the weights over all samples is N where the method is unbiased."""
    method, n, epochs = RePb(0.5), 2000, 60
    records = Records(method.columns(), n, torch.device("cpu"))
    easy = torch.arange(n) < 1500
    totals = []
    for epoch in range(epochs):
        plan = method.plan_epoch(records, epoch=epoch, epochs=epochs, generator=seeded(epoch))
        totals.append(len(plan.ids) / n if plan.weights is None else float(plan.weights.sum()) / n)
        records.remember(plan.remember)
        records.write(
            plan.ids,
            {
                "loss": torch.where(easy, 0.1, 2.0)[plan.ids],
                "batch_loss": torch.ones(len(plan.ids)),
            },
        )
    assert totals[0] == 1 and totals[1] == pytest.approx(1 - 0.375)
    assert totals[2] < 0.9
    assert totals[-1] == pytest.approx(1, abs=0.06)


def test_a_target_widens_the_choice_where_too_few_are_below_the_mean() -> None:
    method, n = RePb(target=0.6), 1000
    records = Records(method.columns(), n, torch.device("cpu"))
    records["loss"].copy_(torch.linspace(0, 1, n))
    records["batch_loss"].fill_(0.2)
    plan = method.plan_epoch(records, epoch=1, epochs=10, generator=seeded(0))
    assert len(plan.ids) == n - round(0.6 * 10 / 9 * n)
    assert set(range(750, 1000)) <= set(plan.ids.tolist()), "those far above the mean are safe"


@pytest.mark.parametrize(
    ("name", "value"),
    [("prune_fraction", 0), ("prune_fraction", 1), ("target", -0.1), ("target", True)],
)
def test_settings_out_of_range_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^RePb: `{name}` "):
        RePb(**{name: value})
