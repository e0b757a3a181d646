"""Records with hard values, and plans that are cut into those of shards, for tests of several folders."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thresher import EpochPlan
from thresher.distributed.plan import part_of_plan
from thresher.records import Records
from thresher.rng import seeded
from thresher.shards import Shard

HARD = np.float32([0.0, -0.0, 0.5, 0.5, 1.0, 1e-42, -1e-42, -2.0, 3e38, np.nan, np.inf, -np.inf])

OF_PLANS = ("last", "slope", "bend", "bend_before", "mean", "variance")
"""Columns of numbers that plans write."""


def hard_columns(n: int, seed: int) -> dict[str, Tensor]:
    """Values of the columns of all epoch methods: ties, signed zeros, denormals, NaN and infinities among other numbers."""
    r = np.random.default_rng(seed)
    loss = np.where(r.random(n) < 0.6, r.gamma(0.7, 1.0, n).astype(np.float32), r.choice(HARD, n))
    uncertainty = np.where(r.random(n) < 0.8, r.random(n), r.choice([0.0, 0.5, np.nan, -np.inf], n)).astype(np.float32)
    return {
        "loss": torch.from_numpy(loss),
        "uncertainty": torch.from_numpy(uncertainty),
        "correct": torch.from_numpy(r.random(n) < 0.8),
        "confidence": torch.from_numpy(r.choice(np.float32([0.2, 0.7, 0.70001, 1.0]), n)),
        "forgetting": torch.from_numpy(r.integers(-1, 8, n)),
        "label": torch.from_numpy(r.integers(-1, 5, n)),
        "epoch": torch.from_numpy(r.choice([-1, 20, 39], n)),
        "left_out": torch.from_numpy(r.integers(0, 20, n)),
        **{name: torch.from_numpy(r.random(n) < 0.4) for name in ("kept", "used")},
        **{name: torch.from_numpy(np.where(r.random(n) < 0.9, r.gamma(0.7, 1.0, n), np.nan)) for name in OF_PLANS},
        **{name: torch.from_numpy(r.permutation(loss)) for name in ("batch_loss", "score")},
    }


def records_of(method: Any, values: Mapping[str, Tensor]) -> Records:
    """Records of a method with these values; columns for which there is none stay as they are."""
    records = Records(method.columns(), len(next(iter(values.values()))), torch.device("cpu"))
    for name in set(records) & set(values):
        records[name].copy_(values[name])
    return records


def planned(method: Any, records: Mapping[str, Tensor], *, epoch: int = 40, epochs: int = 100, seed: int = 0) -> EpochPlan:
    return method.plan_epoch(records, epoch=epoch, epochs=epochs, generator=seeded(seed, epoch))


def planned_part(method: Any, records: Mapping[str, Tensor], shard: Shard, **when: int) -> EpochPlan:
    """The part of a plan that a shard has."""
    return part_of_plan(planned(method, records, **when), shard)


def assert_one_plan(parts: list[EpochPlan], whole: EpochPlan) -> None:
    """Checks that the plans of the shards are that of one process, bit for bit."""
    for name in ("ids", "weights", "refresh"):
        found, expected = [getattr(part, name) for part in parts], getattr(whole, name)
        assert (expected is None) == all(one is None for one in found) == any(one is None for one in found), name
        assert expected is None or torch.equal(torch.cat(found).view(torch.uint8), expected.view(torch.uint8)), name
    for part in parts:
        assert dict(part.facts) == dict(whole.facts)
        for name in ("lr_scale", "drawn", "smaller_batches", "note"):
            assert getattr(part, name) == getattr(whole, name), name
        assert list(part.remember) == list(whole.remember)
    for name, values in whole.remember.items():
        joined = torch.cat([part.remember[name] for part in parts])
        assert torch.equal(joined.view(torch.uint8), values.view(torch.uint8)), name
