"""IES against a transcription that keeps whole loss curves, its worked vector, and the threshold that comes from the noise."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from depth import depth
from helpers import HARD_KINDS, hard_losses, noted
from thresher import EpochPlan, Ies
from thresher.methods.ies import HISTORY, bends
from thresher.records import Records
from thresher.rng import seeded


def trained(method: Ies, curves: np.ndarray, epochs: int) -> list[EpochPlan]:
    """The plans of a training in which sample i has the loss curves[t, i] after epoch t; all of them are seen in each epoch."""
    records, plans = Records(method.columns(), curves.shape[1], torch.device("cpu")), []
    for epoch in range(epochs):
        plan = method.plan_epoch(records, epoch=epoch, epochs=epochs, generator=seeded(epoch))
        plan.check(curves.shape[1])
        records.remember(plan.remember)
        plans.append(plan)
        records.write(torch.arange(curves.shape[1]), {"loss": torch.from_numpy(curves[epoch])})
    return plans


def straightness(curve: list[float]) -> float:
    """The mean of the last three second differences of a curve, the older ones rounded; nan where there are fewer."""
    second = [abs(curve[t] - 2 * curve[t - 1] + curve[t - 2]) for t in range(2, len(curve))]
    if len(second) < 3:
        return math.nan
    return (second[-1] + sum(float(torch.tensor(value).bfloat16()) for value in second[-3:-1])) / 3


def transcribed(
    curves: np.ndarray, threshold: float | None, noise: float, epochs: int
) -> list[set[int]]:
    """Who is left out in each epoch; without a threshold it is set at 15 % of the epochs."""
    out: list[set[int]] = []
    for epoch in range(epochs):
        means = [
            straightness([float(x) for x in curves[:epoch, i]]) for i in range(curves.shape[1])
        ]
        known = sorted(x for x in means if math.isfinite(x))
        if threshold is None and epoch >= max(6, 0.15 * epochs) and known:
            threshold = noise * known[(len(known) - 1) // 2]
        below = {
            i for i, x in enumerate(means) if epoch >= 6 and threshold is not None and x < threshold
        }
        if len(below) == len(means):
            below.remove(max(below, key=lambda i: (means[i], i)))
        out.append(below)
    return out


@pytest.mark.parametrize("threshold", ["noise", 0.25])
@pytest.mark.parametrize("kind", HARD_KINDS)
def test_the_plans_are_those_of_the_paper(kind: str, threshold: Any) -> None:
    """Losses are multiples of a power of two, so that differences in single precision are exact."""
    for number in range(depth(4, 30)):
        first = np.float32(hard_losses(kind, number, most=12)) * np.float32(
            2.0**30 if kind == "tiny" else 1
        )
        r = np.random.default_rng(number)
        steps = r.normal(0, 0.3, (14, len(first))) * (
            np.abs(first[None]) + (0 if kind == "tiny" else 0.1)
        )
        with np.errstate(invalid="ignore", over="ignore"):
            curves = (first[None] + np.cumsum(steps, 0) / 20).astype(np.float32)
        unit = {"huge": 2.0**120, "tiny": 2.0**-120}.get(kind, 2.0**-6)
        curves = (np.round(curves / unit) * unit).astype(np.float32)
        noise = float(r.choice([0.5, 1.0, 2.0]))
        expected = transcribed(curves, None if threshold == "noise" else threshold, noise, 14)
        plans = trained(Ies(threshold, noise), curves, 14)
        for epoch, (plan, out) in enumerate(zip(plans, expected, strict=True)):
            refreshed = set() if plan.refresh is None else set(plan.refresh.tolist())
            with noted(f"instance {number}, epoch {epoch}"):
                assert refreshed == set(range(len(first))) - set(plan.ids.tolist())
                assert refreshed == out


def test_worked_vector() -> None:
    """Losses 1, .5, .3, .2, .15, .12 have the second differences .3, .1, .05, .02 and the means .15, .0567."""
    history = {name: torch.full((1,), torch.nan, dtype=dtype) for name, dtype in HISTORY.items()}
    means = []
    for loss in (1.0, 0.5, 0.3, 0.2, 0.15, 0.12):
        mean, history = bends(torch.tensor([loss]), history)
        means.append(mean.item())
    assert np.isnan(means[:4]).all()
    assert means[4:] == pytest.approx([0.15, 0.0567], rel=2**-8)
    curves = np.float32([1.0, 0.5, 0.3, 0.2, 0.15, 0.12, 0.1])[:, None].repeat(2, 1)
    curves[:, 1] = [1, 2, 3, 4, 5, 6, 7]  # straight
    plans = trained(Ies(0.002), curves, 7)
    assert [len(plan.ids) for plan in plans] == [2] * 6 + [1]
    assert plans[6].ids.tolist() == [0]


def test_the_threshold_is_set_once_from_the_median() -> None:
    r = np.random.default_rng(0)
    curves = np.cumsum(r.normal(0, 0.1, (40, 101)), 0).astype(np.float32)
    curves[10:] = curves[10] + (curves[10:] - curves[10]) / 100  # later all curves are flat
    plans = trained(Ies(noise=1.0), curves, 40)
    assert [len(plan.ids) for plan in plans[:6]] == [101] * 6
    assert len(plans[6].ids) == 51  # the lower half of 101 is below the median
    assert len(plans[20].ids) == 1, (
        "a threshold that moved with the curves would leave out half of them for ever"
    )


def test_a_loss_that_is_lost_keeps_the_sample_for_five_epochs() -> None:
    curves = np.full((16, 2), 1.0, np.float32)
    curves[7, 0] = np.nan
    kept = [
        0 in plan.ids.tolist()
        for plan in trained(Ies(0.1), np.float32(curves + np.arange(16)[:, None] ** 2 * [0, 1]), 16)
    ]
    assert kept == [True] * 6 + [False] * 2 + [True] * 5 + [False] * 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("threshold", 0),
        ("threshold", "auto"),
        ("threshold", float("nan")),
        ("noise", 0),
        ("target", 1),
    ],
)
def test_settings_out_of_range_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^Ies: `{name}` "):
        Ies(**{name: value})


def test_a_target_needs_epochs_after_the_first_six() -> None:
    method = Ies(target=0.3)
    records = Records(method.columns(), 4, torch.device("cpu"))
    with pytest.raises(
        ValueError,
        match=r"^Ies: `target`=0.3 cannot be met in 8 epochs: only 2 of them leave out .* Lower it to 0.225",
    ):
        method.plan_epoch(records, epoch=0, epochs=8, generator=seeded(0))
