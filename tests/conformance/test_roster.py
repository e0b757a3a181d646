"""Every method of this package keeps the promises of `thresher.testing.check_method`.

A new method is found by itself, with its default settings. It needs a line in `CASES` only for other settings, or where it
has a setting without a default.
"""

from typing import Any

import numpy as np
import pytest
import torch

import thresher
from depth import depth
from thresher import methods
from thresher.methods.contract import check_declaration
from thresher.scores import Scores
from thresher.testing import check_method
from thresher.testing.check import CHECK_SAMPLES
from thresher_lab.training.placebo import placebo_of, why_no_placebo


def some_scores(unknown: list[int]) -> Scores:
    """With ties, and samples without a score."""
    values = torch.from_numpy(np.random.default_rng(0).gamma(1.0, 1.0, CHECK_SAMPLES).round(1))
    values[unknown] = torch.nan
    return Scores(torch.arange(CHECK_SAMPLES), values, labels=torch.arange(CHECK_SAMPLES) % 3)


COMPLETE, SCORES = some_scores([]), some_scores([3, 17])
CASES: dict[str, list[dict[str, Any]]] = {
    "full": [{}],
    "uniform": [{}, {"keep": 0.01}, {"keep": 1.0}],
    "kakurenbo": [
        {},
        {"max_fraction": 0.0},
        {"move_back": False},
        {"drop_top": 0.1, "first_epoch_hides": True},
        {
            "schedule": ((0, 1), (3, 0.5)),
            "warmup_epochs": 2,
            "adjust_lr": True,
            "reduce_fraction": True,
            "tau": 0.1,
        },
        # Not candidates="threshold": of one sample it may hide the one, and says so.
        {
            "confidence": "batch",
            "lr_fraction": "scheduled",
            "refresh": "train",
            "merge": "sum",
            "tau": 0.9,
        },
    ],
    "infobatch": [
        {},
        {"prune_fraction": 0.9, "threshold": 0.8, "delta": 1.0, "rescale": "ratio"},
        {"prune_fraction": 0.0},
        {"target": 0.4},
    ],
    "seta": [
        {},
        {"groups": 3, "window": 0.4, "delta": 0.3, "prune_fraction": 0.5},
        {"target": 0.6, "window": 0.5},
    ],
    "order_dp": [{}, {"keep": 0.01, "pool": 0.01}, {"keep": 0.7, "pool": 1.0}],
    "repb": [{}, {"prune_fraction": 0.9}, {"target": 0.6}],
    "ies": [
        {},
        {"threshold": 0.05},
        {"noise": 2.0},
    ],  # not a target, which takes more epochs than the training of the check
    "ucb": [
        {},
        {"every": 3, "c": 0.0},
        {"explore": "epsilon", "epsilon": 0.5, "keep": 0.3, "alpha": 1.0},
    ],
    "rcap": [{}, {"keep": 0.05, "beta": 0.1}, {"keep": 0.9, "beta": 3.0}],
    "rs2": [{}, {"keep": 1.0}, {"replace": True, "keep": 0.3}],
    "importance_sampling": [
        {},
        {"weights": "unbiased", "losses": "last", "keep": 0.3},
        {"first_epoch": "uniform", "keep": 0.5},
    ],
    "grad_match": [
        {"every": 2, "batch_size": 4, "keep": 0.3},
        {},
        {"every": 1, "per": "class", "gradient": "bias", "penalty": 0.5},
        {"every": 3, "per": "class_gradient", "penalty": 0.5, "first": 0, "fill": False},
        {"every": 2, "batch_size": 4, "runs": "consecutive", "warm_start": 0.5},
    ],
    "forgetting": [
        {"start": 1, "fraction": 0.3},
        {},
        {"start": 0.1, "hide": "once", "never_learned": "cut", "fraction": 0.5},
    ],
    "epoch_selective_backprop": [
        {},
        {"beta": 3.0, "bins": 7, "min_probability": 0.1},
        {"percentile": "rank", "beta": 1.0},
    ],
    "ccs": [
        {"scores": SCORES},
        {"scores": SCORES, "keep": 0.5, "drop_hardest": 0.2, "strata": 5, "seed": 1},
    ],
    "prune": [
        {"scores": SCORES},
        {"scores": SCORES, "keep": 0.3, "which": "easy"},
        {"scores": SCORES, "keep": 0.5, "which": "window", "offset": 0.2, "per_class_floor": 0.4},
    ],
    "selective_backprop": [
        {},
        {"keep": 0.3},
        {"keep": 1.0},
        {"beta": 0.0},
        {"beta": 3.0, "history": 7, "min_probability": 0.1, "warmup_steps": 2},
    ],
    "random_backprop": [{}, {"keep": 0.01}, {"keep": 1.0}],
    "uniform_rows": [{}, {"keep": 0.25, "least": 2}, {"keep": 1.0}],
    "big_loss": [{}, {"keep": 0.1}, {"keep": 1.0}],
    "small_loss": [{}, {"keep": 0.1}],
    "gradient_norm": [{}, {"keep": 0.1}],
    "ada_boost": [{}, {"keep": 0.1}],
    "ada_selection": [
        {},
        {
            "keep": 0.2,
            "pool": ("gradient_norm", "ada_boost", "coreset_extremes", "coreset_center", "uniform"),
        },
        {
            "importance": "softmax",
            "average": "picked",
            "uniform": "flat",
            "normalise": False,
            "beta": -0.5,
            "curriculum": False,
            "stop_after": 2,
        },
    ],
    "coreset_extremes": [{}, {"keep": 0.2}],
    "coreset_center": [{}, {"keep": 0.2}],
    "rho_loss": [{"irreducible": COMPLETE, "keep": 0.3}, {"irreducible": COMPLETE}],
    "batch_importance": [
        {},
        {"threshold": 0.0, "exponent": 0.5},
        {"keep": 0.1, "threshold": 1.0, "smoothing": 0.0},
    ],
    "div_bs": [{}, {"keep": 0.3, "gradient": "outputs", "sample": True}],
    "threshold_keep": [{}, {"keep": 0.3, "history": 20}],
}


CASES |= {name: [{}] for name in methods.BUILT_IN if name not in CASES}


def test_every_line_is_a_registered_method() -> None:
    assert set(CASES) == set(methods.BUILT_IN), "a line of the roster has no method of this name"


ALL_CASES = ("grad_match",)  # whose settings decide what its full pass collects


def cases_of(name: str) -> list[dict[str, Any]]:
    """Returns the last settings of a method, which are the least like its defaults, in `make test`; all in `make verify`."""
    cases = CASES[name]
    return depth(cases if name in ALL_CASES else cases[-1:], cases)


ROSTER = [
    pytest.param(
        name, settings, id="-".join([name, *(f"{key}={value}" for key, value in settings.items())])
    )
    for name in CASES
    for settings in cases_of(name)
]
WITH_PLACEBO = [
    one for one in ROSTER if not why_no_placebo(methods.create(one.values[0], **one.values[1]))
]


@pytest.mark.usefixtures("shared_traces")
@pytest.mark.parametrize(("name", "settings"), ROSTER)
def test_it_keeps_every_promise(name: str, settings: dict[str, Any]) -> None:
    check_method(methods.create(name, **settings))


@pytest.mark.parametrize(("name", "settings"), WITH_PLACEBO)
def test_its_placebo_declares_what_it_needs(name: str, settings: dict[str, Any]) -> None:
    """Also where settings decide what is needed."""
    check_declaration(placebo_of(methods.create(name, **settings)))


@pytest.mark.parametrize("name", CASES)
def test_the_registry_tells_the_truth(name: str) -> None:
    method, info = methods.create(name, **CASES[name][0]), methods.infos()[name]
    assert method.stage == info.stage
    assert methods.name_of(method) == name
    assert info.summary
    assert getattr(thresher, type(method).__name__) is type(method)
