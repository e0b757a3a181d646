"""GREATS against a transcription with whole gradients, row by row, and the alignment that a run computes for it."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from depth import depth
from helpers import over_instances
from thresher import Greats, Scoring
from thresher.methods.greats import picked_by_utility
from thresher.rng import seeded


def transcribed(
    alignment: list[float], gradients: list[np.ndarray], k: int, lr: float
) -> list[int]:
    chosen: list[int] = []
    while len(chosen) < k:
        best, best_worth = -1, -math.inf
        for i in range(len(alignment)):
            if i in chosen:
                continue
            worth = math.inf
            if math.isfinite(alignment[i]) and np.isfinite(gradients[i]).all():
                worth = alignment[i]
                for j in chosen:
                    overlap = float(np.vdot(gradients[i], gradients[j]))
                    worth -= lr * overlap if math.isfinite(overlap) else 0.0
            if worth >= best_worth:
                best, best_worth = i, worth
        chosen.append(best)
    return chosen


@over_instances(depth(range(60), range(600)))
def test_rows(number: int) -> None:
    """On a grid of quarters, where sums and products are exact, so that ties are ties."""
    r = np.random.default_rng(number)
    n, lr, keep = (
        int(r.choice([1, 2, 6, 16])),
        float(r.choice([0.0, 0.5, 2.0])),
        float(r.choice([0.1, 0.5, 1.0])),
    )
    scale = float(r.choice([1.0, 2.0**40]))
    error, feature = (r.integers(-4, 5, (n, width)) / 4 * scale for width in (3, 2))
    alignment = r.integers(-8, 9, n) / 4 * scale
    if r.random() < 0.3:
        error[:], feature[:], alignment[:] = error[0], feature[0], alignment[0]
    for values in (error, feature, alignment):
        bad = r.random(n) < r.choice([0.0, 0.15, 1.0], p=[0.8, 0.15, 0.05])
        values[bad] = r.choice([math.nan, math.inf, -math.inf])
    with np.errstate(invalid="ignore"):
        gradients = [np.outer(e, h) for e, h in zip(error, feature, strict=True)]
    k = max(1, math.floor(keep * n))
    ids = np.sort(r.permutation(100)[:n]) + 2**40
    order = r.permutation(n)
    signals = {"alignment": alignment, "error": error, "feature": feature}
    given = {name: torch.from_numpy(values[order]).float() for name, values in signals.items()}
    plan, state = Greats(keep, lr).plan_batch(
        {"id": torch.from_numpy(ids[order]), **given}, {}, step=0, generator=seeded(0)
    )
    assert sorted(order[plan.rows.numpy()].tolist()) == sorted(
        transcribed(alignment.tolist(), gradients, k, lr)
    )
    assert plan.weights is None and state == {}


def test_worked_vector() -> None:
    products = torch.zeros(4, 4)
    products[0, 1] = products[1, 0] = 2.5
    assert picked_by_utility(torch.tensor([3.0, 2.9, 1.0, 0.5]), products, 2, 1.0).tolist() == [
        0,
        2,
    ]
    assert picked_by_utility(torch.tensor([3.0, 2.9, 1.0, 0.5]), products, 2, 0.0).tolist() == [
        0,
        1,
    ]


def test_the_order_is_that_of_both_terms_of_the_code() -> None:
    """The code ranks rows by lr times the alignment, less lr squared times the products with the chosen rows."""
    r, lr = np.random.default_rng(0), 0.3
    gradients, validation = r.normal(size=(16, 5)), r.normal(size=5)
    utility, order = lr * gradients @ validation, []
    for _ in range(8):
        order.append(int(utility.argmax()))
        utility = utility - lr**2 * gradients @ gradients[order[-1]]
        utility[order] = -math.inf
    alignment, products = (
        torch.from_numpy(gradients @ validation),
        torch.from_numpy(gradients @ gradients.T),
    )
    assert picked_by_utility(alignment, products, 8, lr).tolist() == order


def test_nothing_of_an_empty_batch() -> None:
    signals = {
        "id": torch.arange(0),
        "alignment": torch.empty(0),
        "error": torch.empty(0, 2),
        "feature": torch.empty(0, 3),
    }
    assert len(Greats().plan_batch(signals, {}, step=0, generator=seeded(0))[0].rows) == 0


@pytest.mark.parametrize("keep", [0.1, 0.5])
def test_the_realized_share(keep: float) -> None:
    shapes = {"alignment": (128,), "error": (128, 3), "feature": (128, 4)}
    signals = {name: torch.randn(shape, generator=seeded(1)) for name, shape in shapes.items()}
    plan, _ = Greats(keep).plan_batch(
        {"id": torch.arange(128), **signals}, {}, step=0, generator=seeded(0)
    )
    assert len(plan.rows) / 128 == pytest.approx(keep, abs=0.01)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep": 0}, r"`keep` is the share kept, within \(0, 1\], got 0"),
        ({"lr": -1.0}, r"`lr` must be a number within \[0, inf\), got -1.0"),
        ({"lr": math.inf}, r"`lr` must be a number within \[0, inf\), got inf"),
        ({"lr": True}, r"`lr` must be a number within \[0, inf\), got True"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^Greats: {message}"):
        Greats(**settings)


def attached(method: Any, model: nn.Module, **settings: Any) -> Any:
    data = TensorDataset(torch.randn(12, 4, generator=seeded(2)), torch.arange(12) % 3)
    return thresher.attach(
        method,
        loader=DataLoader(data, 6),
        criterion=nn.CrossEntropyLoss(),
        model=model,
        epochs=1,
        **settings,
    )


def test_the_rows_are_those_whose_gradients_are_along_that_of_the_validation_batch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3, bias=False))
    beside = torch.randn(7, 4, generator=seeded(3)), torch.arange(7) % 3
    run = attached(
        Greats(keep=0.34, lr=0.05), model, forward_passes=Scoring(validation=lambda: beside)
    )
    next(iter(run.loader))
    x, y = (tensor[:6] for tensor in run.loader.dataset.tensors)

    def gradient(inputs: torch.Tensor, targets: torch.Tensor) -> np.ndarray:
        (found,) = torch.autograd.grad(F.cross_entropy(model(inputs), targets), model[2].weight)
        return found.double().numpy()

    own = [gradient(x[i : i + 1], y[i : i + 1]) for i in range(6)]
    alignment = [float((one * gradient(*beside)).sum()) for one in own]
    expected = sorted(transcribed(alignment, own, 2, 0.05))
    assert run.ids[:2].tolist() == expected
    assert run.cost.scoring == 2 * 6 + 2 * 7, (
        "both candidate batches, and the validation batch beside each"
    )


def test_it_needs_a_validation_batch() -> None:
    for passes in ("auto", Scoring()):
        with pytest.raises(
            ValueError,
            match=r"Greats needs a validation batch: pass attach\(forward_passes=thresher.Sco",
        ):
            attached(Greats(), nn.Linear(4, 3), forward_passes=passes)
    with pytest.raises(
        TypeError, match="Scoring: `validation` must be a function that returns a .* got tuple"
    ):
        Scoring(validation=(torch.zeros(1), torch.zeros(1)))  # type: ignore[arg-type]
