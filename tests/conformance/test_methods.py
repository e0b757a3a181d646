"""What single methods refuse and answer; the promises that all keep are in test_roster.py."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from thresher import methods, rng
from thresher.records import Records

REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "uniform": [
        ({"keep": value}, rf"`keep` is the share kept, within \(0, 1\], got {value}")
        for value in (0, -0.1, 1.01, math.nan)
    ],
    "kakurenbo": [
        ({"max_fraction": 1.0}, r"`max_fraction` must be a number within \[0, 1\), got 1.0"),
        (
            {"max_fraction": -0.1},
            r"`max_fraction` must be a number within \[0, 1\), got -0.1",
        ),
        (
            {"max_fraction": math.nan},
            r"`max_fraction` must be a number within \[0, 1\), got nan",
        ),
        ({"drop_top": 1.0}, r"`drop_top` must be a number within \[0, 1\), got 1.0"),
        ({"drop_top": -0.5}, r"`drop_top` must be a number within \[0, 1\), got -0.5"),
        (
            {"max_fraction": 0.5, "drop_top": 0.5},
            r"`max_fraction` \+ `drop_top` must stay below 1, got 0.5 \+ 0.5",
        ),
        ({"tau": 1.1}, r"`tau` must be a number within \[0, 1\], got 1.1"),
        ({"tau": math.nan}, r"`tau` must be a number within \[0, 1\], got nan"),
        ({"warmup_epochs": -1}, r"`warmup_epochs` must be a whole number of 0 or more, got -1"),
        ({"schedule": [(0.1, 1)]}, r"`schedule`: milestones must start at 0, got \[\(0.1, 1.0\)\]"),
        ({"schedule": [(0, 1), (30, 2)]}, r"`schedule`: values must be within \[0, 1\]"),
        ({"confidence": "rows"}, r"`confidence` must be one of \('class', 'batch'\), got 'rows'"),
        (
            {"lr_fraction": "none"},
            r"`lr_fraction` must be one of \('actual', 'scheduled'\), got 'none'",
        ),
        ({"refresh": True}, r"`refresh` must be one of \('eval', 'train'\), got True"),
        ({"merge": "mean"}, r"`merge` must be one of \('scatter', 'sum'\), got 'mean'"),
        ({"candidates": 0.3}, r"`candidates` must be one of \('sort', 'threshold'\), got 0.3"),
    ],
    "infobatch": [
        (
            {"prune_fraction": 1.0},
            r"`prune_fraction` must be a number within \[0, 1\), got 1.0",
        ),
        (
            {"prune_fraction": -0.1},
            r"`prune_fraction` must be a number within \[0, 1\), got -0.1",
        ),
        (
            {"prune_fraction": math.nan},
            r"`prune_fraction` must be a number within \[0, 1\), got nan",
        ),
        ({"delta": 1.1}, r"`delta` must be a number within \[0, 1\], got 1.1"),
        ({"delta": "1"}, r"`delta` must be a number within \[0, 1\], got '1'"),
        ({"delta": -0.1}, r"`delta` must be a number within \[0, 1\], got -0.1"),
        (
            {"threshold": "median"},
            r"`threshold` must be 'mean' or a quantile within \(0, 1\), got 'median'",
        ),
        ({"threshold": 1.0}, r"`threshold` must be 'mean' or a quantile within \(0, 1\), got 1.0"),
        ({"threshold": 0}, r"`threshold` must be 'mean' or a quantile within \(0, 1\), got 0"),
        ({"rescale": "sum"}, r"`rescale` must be 'mass' or 'ratio', got 'sum'"),
    ],
    "selective_backprop": [
        *(
            ({"keep": value}, rf"`keep` is the share kept, within \(0, 1\], got {value!r}")
            for value in (0, -0.1, 1.01, math.nan, "half")
        ),
        *(
            ({"beta": value}, rf"`beta` must be a number within \[0, inf\), got {value!r}")
            for value in (-0.1, math.nan, math.inf, "one")
        ),
        (
            {"keep": 0.5, "beta": 0.0},
            "`keep` .* exclude each other, got keep=0.5 and beta=0.0; give one of them",
        ),
        ({"history": 0}, "`history` must be a whole number of 1 or more, got 0"),
        ({"history": 10.0}, "`history` must be a whole number of 1 or more, got 10.0"),
        *(
            (
                {"min_probability": value},
                rf"`min_probability` must be a number within \[0, 1\], got {value}",
            )
            for value in (-0.1, 1.1, math.nan)
        ),
        ({"warmup_steps": -1}, "`warmup_steps` must be a whole number of 0 or more, got -1"),
    ],
    "random_backprop": [
        ({"keep": value}, rf"`keep` is the share kept, within \(0, 1\], got {value}")
        for value in (0, -0.1, 1.01, math.nan)
    ],
}


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        pytest.param(name, settings, message, id=f"{name}-{settings}")
        for name, cases in REFUSED.items()
        for settings, message in cases
    ],
)
def test_settings_out_of_range_are_refused_by_name(
    name: str, settings: dict[str, Any], message: str
) -> None:
    class_name = methods.load(name).__name__
    with pytest.raises(ValueError, match=f"^{class_name}: {message}"):
        methods.create(name, **settings)


@pytest.mark.parametrize("name", sorted(methods.BUILT_IN))
def test_unknown_settings_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'fraction_of_nothing'"):
        methods.create(name, fraction_of_nothing=1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["kakurenbo", "infobatch"])
def test_a_sample_without_a_finite_loss_weighs_what_it_did(name: str, value: float) -> None:
    method, n = methods.create(name), 50
    records = Records(method.columns(), n, torch.device("cpu"))
    draws = np.random.default_rng(0)
    records.write(
        torch.arange(n), {name: torch.from_numpy(draws.random(n)) for name in records.signals}
    )
    records["loss"][10:] = value
    for epoch in range(20):
        plan = method.plan_epoch(records, epoch=epoch, epochs=20, generator=rng.seeded(epoch))
        assert plan.weights is None or bool((plan.weights[plan.ids >= 10] == 1).all())
        assert epoch or plan.lr_scale == 1
