"""SeTa against a transcription: k-means in exact arithmetic, the window of the published settings, and the draws."""

import math
import struct
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from depth import depth
from helpers import HARD_KINDS, hard_losses, noted, winners
from thresher import EpochPlan, SeTa
from thresher.methods.seta import in_window, k_means
from thresher.records import Records
from thresher.rng import seeded


def planned(
    method: SeTa, loss: list[float], *, epoch: int = 1, epochs: int = 20, key: int = 0
) -> EpochPlan:
    records = Records(method.columns(), len(loss), torch.device("cpu"))
    records["loss"].copy_(torch.tensor(loss))
    return method.plan_epoch(records, epoch=epoch, epochs=epochs, generator=seeded(key, epoch))


def middle(value: float) -> float:
    """The middle of the bin of a loss: the upper half of its bits."""
    bits = struct.unpack("<I", struct.pack("<f", value + 0.0))[0]
    return struct.unpack("<f", struct.pack("<I", bits >> 16 << 16 | 1 << 15))[0]


def groups_of(loss: list[float], groups: int) -> dict[int, int]:
    """Lloyd's k-means of the finite losses, sample by sample, from groups of equal numbers."""
    value = {i: Fraction(middle(x)) for i, x in enumerate(loss) if math.isfinite(x)}
    levels = sorted(set(value.values()))
    members = {level: [i for i in value if value[i] == level] for level in levels}
    found: dict[Fraction, int] = {}
    before = 0
    for level in levels:
        place = Fraction(2 * before + len(members[level]), 2)
        found[level] = min(int(place * min(groups, len(levels)) / len(value)), groups - 1)
        before += len(members[level])
    for _ in range(100):
        means = []
        for group in sorted(set(found.values())):
            inside = [x for x in levels if found[x] == group]
            means.append(
                sum(x * len(members[x]) for x in inside) / sum(len(members[x]) for x in inside)
            )
        again = {x: sum(x >= (a + b) / 2 for a, b in pairwise(means)) for x in levels}
        if again == found:
            break
        found = again
    numbers = {group: k for k, group in enumerate(sorted(set(found.values())))}
    return {i: numbers[found[x]] for i, x in value.items()}


def transcribed(loss: list[float], method: SeTa, epoch: int, epochs: int, key: int) -> set[int]:
    everyone = set(range(len(loss)))
    if epoch == 0:
        return everyone
    finite = {i for i in everyone if math.isfinite(loss[i])}
    inside = finite
    if epoch + 1 <= Fraction(str(method.delta)) * epochs:
        group = groups_of(loss, method.groups) if finite else {}
        count = len(set(group.values()))
        width = max(1, round(method.window * count))
        start = epoch % (max(1, count - width + 1))
        inside = {i for i in finite if start <= group[i] < start + width}
    kept = math.floor((1 - Fraction(str(method.prune_fraction))) * len(inside))
    if not kept and finite == everyone:
        kept = 1
    return winners(kept, seeded(key, epoch), inside) | (everyone - finite)


@pytest.mark.parametrize("kind", HARD_KINDS)
def test_the_plan_is_that_of_the_paper(kind: str) -> None:
    for number in range(depth(12, 60)):
        loss = hard_losses(kind, number)
        r = np.random.default_rng(number)
        method = SeTa(
            prune_fraction=float(r.choice([0, 0.1, 0.5, 0.9])),
            groups=int(r.choice([1, 2, 5, 40])),
            window=float(r.choice([0.2, 0.5, 0.9, 1.0])),
            delta=float(r.choice([0.5, 0.875])),
        )
        epoch = int(r.integers(0, 20))
        with noted(f"instance {number}"):
            plan = planned(method, loss, epoch=epoch, key=number)
            assert set(plan.ids.tolist()) == transcribed(loss, method, epoch, 20, number)
            assert plan.weights is None


def test_the_window_of_the_published_settings() -> None:
    """Five groups, of which 4.5 are rounded to four: the start alternates, from the second epoch on."""
    group = np.arange(5, dtype=np.int16)
    starts = [int(np.flatnonzero(in_window(group, 5, 0.9, epoch))[0]) for epoch in range(1, 5)]
    assert starts == [1, 0, 1, 0]
    assert all(in_window(group, 5, 0.9, epoch).sum() == 4 for epoch in range(1, 5))


def test_k_means_finds_groups_that_are_far_apart() -> None:
    r = np.random.default_rng(0)
    values = np.sort(np.concatenate([r.normal(centre, 0.01, 50) for centre in (1, 5, 20)]))
    assert np.bincount(k_means(values, np.ones(150, np.int64), 3)).tolist() == [50, 50, 50]


def test_one_outlier_does_not_put_all_others_into_one_bin() -> None:
    loss = [*np.linspace(0.1, 1, 99).tolist(), 1e30]
    plan = planned(SeTa(prune_fraction=0, groups=2, window=0.5, delta=1), loss, epoch=2)
    assert plan.ids.tolist() == list(range(99))


@pytest.mark.parametrize(
    ("name", "value"),
    [("prune_fraction", 1), ("prune_fraction", -0.1), ("groups", 0), ("groups", 1001), ("groups", 2.5), ("window", 0),
     ("window", 1.1), ("delta", 1.5), ("target", 0.95)],
)  # fmt: skip
def test_settings_out_of_range_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^SeTa: `{name}` "):
        SeTa(**{name: value})
