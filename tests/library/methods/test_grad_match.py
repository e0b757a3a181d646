"""Parts of GRAD-MATCH by hand; the whole of it is in tests/reference."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from thresher import EpochPlan, GradMatch, attach
from thresher.methods._matching_pursuit import (
    match_classes,
    match_runs,
    run_atoms,
)
from thresher.methods.contract import full_pass_names
from thresher.records import Records
from thresher.rng import seeded

CPU = torch.device("cpu")


def known(n: int, classes: int = 4, width: int = 3, seed: int = 0) -> dict[str, torch.Tensor]:
    """What a passed of a classifier tells."""
    r = np.random.default_rng(seed)
    labels = r.integers(classes, size=n)
    logits = r.normal(size=(n, classes))
    probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    error, feature = probs - np.eye(classes)[labels], np.abs(r.normal(size=(n, width)))
    told = {"error": torch.from_numpy(error).float(), "feature": torch.from_numpy(feature).float()}
    return told | {"label": torch.from_numpy(labels)}


def planned(
    method: GradMatch,
    passed: dict[str, torch.Tensor],
    *,
    epoch: int = 1,
    epochs: int = 100,
    records: Any = None,
    seed: int = 0,
) -> EpochPlan:
    records = Records(method.columns(), len(passed["error"]), CPU) if records is None else records
    told = {name: passed[name] for name in method.full_pass(epoch, epochs)}
    plan = method.plan_epoch(
        {**records, **told}, epoch=epoch, epochs=epochs, generator=seeded(seed, epoch)
    )
    plan.check(len(passed["error"]))
    return plan


def weights_of(plan: EpochPlan) -> dict[int, float]:
    assert plan.weights is not None
    return dict(zip(plan.ids.tolist(), plan.weights.tolist(), strict=True))


# Matching pursuit


# Gradients by their factors


def test_float32_gradients_are_multiplied_in_double_precision() -> None:
    error = np.array([[1.0], [1e-5]], np.float32)
    atoms = run_atoms(error, np.float32([[1], [1]]), 2)
    assert atoms.energy == pytest.approx(((1 + 1e-5) / 2) ** 2, rel=1e-10)


def test_runs_are_weighed_as_a_whole() -> None:
    error = np.array([[3.0, 0], [1, 0], [0, 1], [0, 1], [1, 0]])
    order = np.array([0, 1, 2, 3, 4])
    weight, distance = match_runs(
        error, np.empty((5, 0)), order, 2, 2
    )  # means (2, 0), (0, 1), (1, 0); target (3, 1)
    assert weight == pytest.approx([1.5, 1.5, 0, 0, 0])
    assert distance == pytest.approx(1 / math.sqrt(10))
    weight, distance = match_runs(error, np.empty((5, 0)), order, 2, 3)  # two runs at most
    assert weight == pytest.approx([1.5, 1.5, 1, 1, 0])
    assert distance == pytest.approx(0, abs=1e-6)
    weight, _ = match_runs(error, np.empty((5, 0)), np.array([4, 2, 3, 1, 0]), 1, 1)
    assert weight == pytest.approx([5 / 3, 0, 0, 0, 0])


def test_the_row_of_the_own_class() -> None:
    """Errors at other outputs do not matter then: one sample matches the class's bias exactly."""
    error = np.array([[-0.5, 0.5, 0.0], [-0.9, 0.1, 0.8], [-0.2, 0.0, 0.2], [0.3, -0.3, 0.0]])
    labels = np.array([0, 0, 0, 1])
    weight, distance = match_classes(error, np.empty((4, 0)), labels, 1, own_row=True)
    assert weight == pytest.approx([0, 1.6 / 0.9, 0, 1])
    assert distance == pytest.approx(0, abs=1e-6)
    _, distance = match_classes(error, np.empty((4, 0)), labels, 1, own_row=False)
    assert distance > 0.1


# When it selects


def passes_at(method: GradMatch, epochs: int) -> list[int]:
    return [epoch for epoch in range(epochs) if method.full_pass(epoch, epochs)]


@pytest.mark.parametrize(
    ("settings", "epochs", "expected"),
    [
        ({}, 45, [1, 21, 41]),
        ({"first": 0}, 45, [0, 20, 40]),
        ({"every": 1, "first": 3}, 6, [3, 4, 5]),
        ({"warm_start": 0.5}, 300, list(range(15, 300, 20))),
        ({"warm_start": 0.5, "first": 30}, 100, [30, 50, 70, 90]),
        ({"warm_start": 0.29, "keep": 0.1, "every": 50}, 100, [3, 53]),
        ({"warm_start": 1.0, "keep": 0.3, "every": 50}, 100, [30, 80]),
        ({"keep": 1}, 100, []),
        ({"first": 100}, 100, []),
    ],
)
def test_epochs_of_selections(settings: dict[str, Any], epochs: int, expected: list[int]) -> None:
    assert passes_at(GradMatch(**settings), epochs) == expected


def test_what_it_looks_at() -> None:
    assert GradMatch().full_pass(1, 10) == ("error", "feature")
    assert GradMatch(gradient="bias").full_pass(1, 10) == ("error",)
    assert GradMatch(per="class_gradient").full_pass(1, 10) == ("error", "feature", "label")
    assert full_pass_names(GradMatch(per="class", gradient="bias"), 60) == {"error", "label"}
    assert GradMatch().full_pass(2, 10) == ()


@pytest.mark.parametrize("per", ["batch", "class", "class_gradient"])
def test_a_subset_stays_until_the_next_selection(per: str) -> None:
    """The method remembers nothing; a run stores what a plan says."""
    method, n = GradMatch(0.2, every=3, per=per, batch_size=5), 60
    records = Records(method.columns(), n, CPU)
    plans = []
    for epoch in range(7):
        plans.append(planned(method, known(n, seed=epoch), epoch=epoch, epochs=7, records=records))
        records.remember(plans[-1].remember)
    assert [bool(plan.remember) for plan in plans] == [
        False,
        True,
        False,
        False,
        True,
        False,
        False,
    ]
    assert plans[0].ids.tolist() == list(range(n)) and plans[0].weights is None
    assert plans[0].facts == {"scheduled_fraction": 0.0, "actual_fraction": 0.0}
    subsets = [weights_of(plan) for plan in plans[1:]]
    assert subsets[0] == subsets[1] == subsets[2] != subsets[3] == subsets[4] == subsets[5]
    assert all(plan.facts["actual_fraction"] == 1 - len(plan.ids) / n for plan in plans)


# What it selects


def test_published_defaults() -> None:
    settings = {
        "keep": 0.1,
        "every": 20,
        "per": "batch",
        "batch_size": 20,
        "gradient": "full",
        "penalty": 0.0,
    }
    more = {"tolerance": 0.0, "first": 1, "warm_start": 0.0, "runs": "shuffled", "fill": True}
    more["weights_divisor"] = "weights"
    assert GradMatch() == GradMatch(**settings, **more)


def test_four_bytes_a_sample() -> None:
    assert (
        Records(GradMatch().columns(), 3, CPU).bytes_per_sample
        == GradMatch.card.bytes_per_sample
        == 4
    )
    assert not Records(GradMatch().columns(), 3, CPU).signals


def test_weights_that_keep_the_length_of_the_gradient() -> None:
    """The bias of two classes has one direction, which a batch matches exactly."""
    passed = known(100, classes=2)
    settings = {"gradient": "bias", "batch_size": 10, "fill": False}
    whole = passed["error"].double().mean(0)
    plans = {
        divisor: planned(GradMatch(0.1, weights_divisor=divisor, **settings), passed)
        for divisor in ("weights", "samples")
    }
    plan = plans["samples"]
    assert plan.weights is not None
    assert (passed["error"][plan.ids] * plan.weights[:, None]).double().mean(
        0
    ).tolist() == pytest.approx(whole.tolist(), rel=1e-5)
    assert plan.ids.tolist() == plans["weights"].ids.tolist()
    assert set(weights_of(plans["weights"]).values()) == {1.0}


def test_the_seed_changes_permutation_and_filling_only() -> None:
    consecutive = GradMatch(0.1, batch_size=5, runs="consecutive")
    passed = known(100)
    assert weights_of(planned(consecutive, passed, seed=1)) == weights_of(
        planned(consecutive, passed, seed=2)
    )
    shuffled = GradMatch(0.1, batch_size=5)
    assert weights_of(planned(shuffled, passed, seed=1)) != weights_of(
        planned(shuffled, passed, seed=2)
    )


@pytest.mark.parametrize(("fill", "kept"), [(True, 10), (False, 1)])
@pytest.mark.parametrize("per", ["batch", "class", "class_gradient"])
def test_gradients_of_zero_match_nothing(per: str, fill: bool, kept: int) -> None:
    passed = {name: torch.zeros_like(values) for name, values in known(100).items()}
    plan = planned(GradMatch(0.1, per=per, fill=fill), passed)
    assert len(plan.ids) == kept and set(weights_of(plan).values()) == {1.0}
    assert plan.facts["matched"] == 0 and plan.facts["matching_error"] == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep": 0}, r"`keep` is the share kept, within \(0, 1\], got 0"),
        ({"keep": 2}, r"`keep` is the share kept, within \(0, 1\], got 2"),
        ({"keep": True}, r"`keep` is the share kept, within \(0, 1\], got True"),
        ({"every": 0}, "`every` must be a whole number of 1 or more, got 0"),
        ({"every": 2.0}, "`every` must be a whole number of 1 or more, got 2.0"),
        ({"batch_size": 0}, "`batch_size` must be a whole number of 1 or more, got 0"),
        ({"batch_size": True}, "`batch_size` must be a whole number of 1 or more, got True"),
        ({"first": -1}, "`first` must be a whole number of 0 or more, got -1"),
        (
            {"per": "sample"},
            r"`per` must be one of \('batch', 'class', 'class_gradient'\), got 'sample'",
        ),
        ({"gradient": "weights"}, r"`gradient` must be one of \('full', 'bias'\), got 'weights'"),
        ({"runs": "sorted"}, r"`runs` must be one of \('shuffled', 'consecutive'\), got 'sorted'"),
        (
            {"weights_divisor": "losses"},
            r"`weights_divisor` must be one of \('weights', 'samples'\), got 'losses'",
        ),
        ({"fill": "random"}, r"`fill` must be one of \(True, False\), got 'random'"),
        (
            {"per": "class_gradient", "gradient": "bias"},
            "`per`='class_gradient' needs `gradient`='full', got 'bias'",
        ),
        ({"penalty": -1}, r"`penalty` must be a number within \[0, inf\), got -1"),
        ({"penalty": math.inf}, r"`penalty` must be a number within \[0, inf\), got inf"),
        ({"penalty": math.nan}, r"`penalty` must be a number within \[0, inf\), got nan"),
        ({"tolerance": 1}, r"`tolerance` must be a number within \[0, 1\), got 1"),
        ({"tolerance": -0.1}, r"`tolerance` must be a number within \[0, 1\), got -0.1"),
        ({"memory": 0}, r"`memory` must be a number within \(0, inf\), got 0"),
        ({"warm_start": 1.1}, r"`warm_start` must be a number within \[0, 1\], got 1.1"),
        (
            {"warm_start": math.nan},
            r"`warm_start` must be a number within \[0, 1\], got nan",
        ),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^GradMatch: {message}"):
        GradMatch(**settings)


# Memory


def test_attach_refuses_mini_batches_that_cannot_be_held() -> None:
    """64,059 mini-batches have 4.1e9 inner products, and the 6,406 that are chosen have theirs again."""
    data = torch.utils.data.TensorDataset(torch.zeros(1_281_167))
    model = torch.nn.Linear(1, 2)
    settings: dict[str, Any] = {
        "criterion": torch.nn.CrossEntropyLoss(),
        "model": model,
        "epochs": 5,
    }
    loader = torch.utils.data.DataLoader(data, 128, shuffle=True)
    said = (
        "^GradMatch: a selection holds the inner products of 64,059 mini-batches of 1,281,167 samples, which take 33.6 GiB, "
        "and `memory` allows 4 GiB: use `batch_size`=58 or more, or raise `memory`$"
    )
    with pytest.raises(ValueError, match=said):
        attach(GradMatch(), loader=loader, **settings)
    attach(GradMatch(batch_size=58), loader=loader, **settings).detach()
    attach(GradMatch(memory=40), loader=loader, **settings).detach()
    attach(GradMatch(keep=1.0), loader=loader, **settings).detach()


def test_pruning_counts() -> None:
    method = GradMatch(memory=1e-6, batch_size=1)
    method.check(torch.arange(10))
    with pytest.raises(
        ValueError,
        match=r"^GradMatch: .* 12 mini-batches of 12 samples, which take 0.0 GiB, and `memory` allows",
    ):
        method.check(torch.arange(12))


def test_a_selection_refuses_classes_that_cannot_be_held() -> None:
    """A class of 100, of which ten are chosen: a thousand numbers of 8 bytes."""
    records = known(400) | {"weight": torch.zeros(400), "label": torch.arange(400) % 4}
    for memory, held in ((1000 / 2**27, True), (999 / 2**27, False)):
        method = GradMatch(keep=0.1, per="class", every=1, memory=memory)
        method.check(torch.arange(400))
        if held:
            assert len(method.plan_epoch(records, epoch=1, epochs=5, generator=seeded(0)).ids) == 40
            continue
        with pytest.raises(
            ValueError,
            match=r"^GradMatch: .* 10 of 100 samples of a class, which take .* use `per`='batch', or raise",
        ):
            method.plan_epoch(records, epoch=1, epochs=5, generator=seeded(0))
