"""Scores of training dynamics against transcriptions sample by sample, in plain Python, and prunings by them that win."""

import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from depth import depth
from helpers import over_instances
from thresher import rng
from thresher.scores import (
    Scores,
    aum,
    class_probabilities,
    d2,
    dual,
    dyn_unc,
    sample_features,
    tdds,
)
from thresher.scores.aum import margins
from thresher.scores.d2 import nearest
from thresher.scores.dual import beta_density
from thresher.testing import Toy, beats_uniform

NUMBERS = depth(range(40), range(400))


def history_of(r: np.random.Generator, epochs: int, n: int, classes: int = 0) -> np.ndarray:
    """Probabilities with ties, exact zeros and ones, constant samples, and some that are not finite."""
    shape = (epochs, n, classes) if classes else (epochs, n)
    values = r.random(shape)
    if r.random() < 0.5:
        values = np.round(values * 4) / 4
    values[:, r.random(n) < 0.2] = 1.0
    values[:, r.random(n) < 0.2] = 0.25
    if classes:
        values = (values + 1e-12) / (values + 1e-12).sum(-1, keepdims=True)
    values = values.astype(np.float32)
    bad = r.random(n) < 0.15
    values[int(r.integers(epochs)), bad] = r.choice([math.nan, math.inf])
    return values


def same(found: Scores, expected: list[float]) -> None:
    assert found.values.tolist() == pytest.approx(
        [v if math.isfinite(v) else math.nan for v in expected], rel=1e-5, abs=1e-6, nan_ok=True
    )


def deviation(values: list[float]) -> float:
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


def windows(values: list[float], size: int) -> list[list[float]]:
    return [values[start : start + size] for start in range(len(values) - size + 1)]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@over_instances(NUMBERS)
def test_area_under_the_margin(number: int) -> None:
    r = np.random.default_rng(number)
    epochs, n, c = int(r.integers(1, 6)), int(r.choice([1, 2, 9])), int(r.choice([2, 5]))
    outputs, labels = history_of(r, epochs, n, c), r.integers(0, c, n)
    expected = []
    for i in range(n):
        gaps = [
            row[labels[i]] - max(float(v) for j, v in enumerate(row) if j != labels[i])
            for row in outputs[:, i].tolist()
        ]
        expected.append(-mean(gaps))
    found = margins(torch.from_numpy(outputs), torch.from_numpy(labels).expand(epochs, n))
    same(aum(found), expected)


@over_instances(NUMBERS)
def test_dynamic_uncertainty(number: int) -> None:
    r = np.random.default_rng(number)
    epochs, n = int(r.integers(3, 9)), int(r.choice([1, 2, 9]))
    window = int(r.integers(2, epochs))
    history = history_of(r, epochs, n)
    columns = history.T.astype(float).tolist()
    same(
        dyn_unc(history, window=window),
        [mean([deviation(w) for w in windows(one, window)]) for one in columns],
    )
    in_code = []
    for one in columns:
        entered = windows([p for p in one[:-1] if p != 0], window)
        in_code.append(10 * mean([deviation(w) for w in entered]) if entered else math.nan)
    same(dyn_unc(history, window=window, as_in_code=True), in_code)


def test_worked_vector_of_dynamic_uncertainty() -> None:
    history = torch.tensor([[0.1], [0.5], [0.9], [0.9]])
    assert dyn_unc(history, window=2, as_in_code=True).values.item() == pytest.approx(2.828427)
    assert dyn_unc(history, window=2).values.item() == pytest.approx(2 * 0.2828427 / 3)


@over_instances(NUMBERS)
def test_difficulty_times_uncertainty(number: int) -> None:
    r = np.random.default_rng(number)
    epochs, n = int(r.integers(2, 9)), int(r.choice([1, 2, 9]))
    window = int(r.integers(2, epochs + 1))
    history = history_of(r, epochs, n)
    expected = [
        mean([10 * deviation(w) * (1 - mean(w)) for w in windows(one, window)])
        for one in history.T.astype(float).tolist()
    ]
    same(dual(history, window=window), expected)


def moved_by(p: float, q: float) -> float:
    return abs(q * math.log(max(q, 1e-8) / max(p, 1e-8))) if math.isfinite(p + q) else math.nan


@over_instances(NUMBERS)
def test_movements_within_a_window(number: int) -> None:
    r = np.random.default_rng(number)
    epochs, n, c = int(r.integers(4, 9)), int(r.choice([1, 2, 9])), int(r.choice([2, 5]))
    window, decay = int(r.integers(2, epochs - 1)), float(r.choice([0.5, 0.9, 1.0]))
    history = history_of(r, epochs, n, c)
    expected = []
    for rows in history.transpose(1, 0, 2).astype(float).tolist():
        moved = []
        for before, after in itertools.pairwise(rows):
            moved.append(sum(moved_by(p, q) for p, q in zip(before, after, strict=True)))
        average = 0.0
        for part in windows(moved, window):
            middle = mean(part)
            average = (
                decay * math.sqrt(sum((one - middle) ** 2 for one in part)) + (1 - decay) * average
            )
        expected.append(average)
    same(tdds(history, window=window, decay=decay), expected)


@over_instances(depth(range(30), range(300)))
def test_the_draw_of_dual(number: int) -> None:
    """Keys are log(score * density) - log(waiting time); samples without a chance come last, those not finite have NaN."""
    r = np.random.default_rng(number)
    n, pruned, exponent = (
        int(r.choice([1, 3, 20])),
        float(r.choice([0.1, 0.5, 0.9])),
        float(r.choice([1.0, 4.0])),
    )
    history = history_of(r, 4, n)
    scores = dual(history, window=3).values.double().numpy()
    easy = history.astype(float).mean(0)
    known = np.flatnonzero(np.isfinite(scores))
    if not len(known):
        return
    best = sorted(known, key=lambda i: (-scores[i], i))[:10]
    anchor = np.mean([easy[i] for i in best])
    b = 15 * (1 - anchor) * (1 - pruned**exponent)
    a = 16 - b
    waits = torch.empty(n, dtype=torch.float64).exponential_(generator=rng.seeded(7)).numpy()
    found = dual(history, window=3, pruned=pruned, exponent=exponent, seed=7).values.tolist()
    keys = {}
    for i in known:
        p = easy[i]
        inside = 0 < p < 1 and scores[i] > 0
        keys[i] = (
            math.log(scores[i])
            + (a - 1) * math.log(p)
            + (b - 1) * math.log(1 - p)
            - math.log(waits[i])
            if inside
            else -math.inf
        )
    certain = [i for i in known if keys[i] > -math.inf]
    assert sorted(certain, key=lambda i: found[i]) == sorted(certain, key=lambda i: keys[i])
    assert all(math.isnan(found[i]) for i in range(n) if i not in known)
    if certain and 0 < anchor < 1:
        assert all(
            found[i] < min(found[j] for j in certain)
            for i in known
            if keys[i] == -math.inf and easy[i] > 0
        )


def test_the_more_is_pruned_the_easier_samples_are_drawn() -> None:
    r = np.random.default_rng(0)
    easy = r.random(400)
    history = np.clip(easy + 0.1 * r.normal(size=(10, 400)), 0.001, 0.999)
    means = []
    for pruned in (0.1, 0.95):
        order = dual(history, window=5, pruned=pruned).values.argsort(descending=True)
        means.append(easy[order[:40].numpy()].mean())
    assert means[1] > means[0] + 0.02


def test_density_of_beta() -> None:
    x = torch.linspace(0.01, 0.99, 9, dtype=torch.float64)
    for a, b in ((2.0, 3.0), (0.5, 15.5)):
        exact = torch.distributions.Beta(
            torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
        ).log_prob(x)
        assert torch.allclose(beta_density(x, a, b), exact)


@pytest.mark.parametrize("score", [aum, dyn_unc, dual, tdds])
def test_cost_labels_and_origin(score: Callable[..., Scores]) -> None:
    history = torch.rand(11, 3, 2).softmax(-1) if score is tdds else torch.rand(11, 3)
    found = score(history, labels=torch.tensor([0, 1, 0]), trained=(7, 5), provenance={"seed": 3})
    assert (found.forward, found.backward, found.name) == (7, 5, score.__name__)
    assert (
        found.labels is not None
        and found.provenance["seed"] == 3
        and found.provenance["epochs"] == 11
    )


@pytest.mark.parametrize("score", [aum, dyn_unc, dual, tdds])
def test_histories_of_another_form_are_refused(score: Callable[..., Scores]) -> None:
    name, argument = score.__name__, "margins" if score is aum else "probabilities"
    with pytest.raises(
        TypeError, match=f"{name}: `{argument}` must be floating-point numbers, got torch.int64"
    ):
        score(torch.ones(12, 3, dtype=torch.int64))
    with pytest.raises(
        ValueError,
        match=rf"{name}: `{argument}` must have shape \(epochs, samples.*\), got \(12,\)",
    ):
        score(torch.ones(12))
    with pytest.raises(ValueError, match=rf"{name}: `{argument}` must have shape"):
        score(torch.ones(0, 3, 2) if score is tdds else torch.ones(0, 3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: dyn_unc(torch.rand(5, 2), window=6),
            r"dyn_unc: `window` must be a whole number .* within \[2, 5\], got 6",
        ),
        (lambda: dyn_unc(torch.rand(5, 2), window=5, as_in_code=True), r"within \[2, 4\], got 5"),
        (
            lambda: dual(torch.rand(5, 2), window=1),
            r"dual: `window` must be .* within \[2, 5\], got 1",
        ),
        (
            lambda: tdds(torch.rand(5, 2, 2), window=5),
            r"tdds: `window` must be .* within \[2, 4\], got 5",
        ),
        (lambda: tdds(torch.rand(5, 2, 2), window=2.0), r"tdds: `window` must be .*, got 2.0"),
        (
            lambda: tdds(torch.rand(5, 2, 2), window=2, decay=0.0),
            r"tdds: `decay`, the weight .* within \(0, 1\], got 0.0",
        ),
        (
            lambda: dual(torch.rand(5, 2), window=2, pruned=1.0),
            r"dual: `pruned` must be a share within \(0, 1\), got 1.0",
        ),
        (
            lambda: dual(torch.rand(5, 2), window=2, exponent=0.0),
            "dual: `exponent` must be a finite number above 0, got 0.0",
        ),
    ],
)
def test_settings_out_of_range_are_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_probabilities_of_a_model() -> None:
    model = nn.Linear(3, 4)
    x, y = torch.randn(7, 3), torch.arange(7) % 4
    found, classes = class_probabilities(model, DataLoader(TensorDataset(x, y), 3, shuffle=True))
    assert (
        torch.allclose(found, model(x).softmax(1), atol=1e-6)
        and torch.equal(classes, y)
        and not found.requires_grad
    )
    with pytest.raises(ValueError, match="class_probabilities: targets are not classes"):
        class_probabilities(model, DataLoader(TensorDataset(x, x), 3))
    with pytest.raises(
        ValueError,
        match=r"class_probabilities: outputs must score classes, shape \(n, classes\), got \(3,\)",
    ):
        class_probabilities(nn.Flatten(0), DataLoader(TensorDataset(x[:, :1], y), 3))


@pytest.mark.parametrize("k", [1, 4, 29])
@pytest.mark.parametrize("levels", [2, 5, 1000])
def test_of_equally_near_neighbours_those_with_lower_ids_are_taken(k: int, levels: int) -> None:
    features = np.random.default_rng(levels).integers(0, levels, (30, 2)).astype(np.float64)
    ids, distances = nearest(torch.from_numpy(features), k)
    for i in range(30):
        others = sorted(
            (float(np.hypot(*(features[i] - features[j]))), j) for j in range(30) if j != i
        )[:k]
        assert ids[i].tolist() == [j for _, j in others]
        assert distances[i] == pytest.approx([distance for distance, _ in others])


def test_features_are_what_the_last_layer_is_given() -> None:
    x, y = torch.randn(7, 2), torch.arange(7) % 3
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 3)).train()
    found, classes = sample_features(model, DataLoader(TensorDataset(x, y), 3, shuffle=True))
    torch.testing.assert_close(found, model[1](model[0](x)).detach())
    assert torch.equal(classes, y) and model.training
    assert sample_features(model, DataLoader(TensorDataset(x, x), 3))[1] is None
    with pytest.raises(
        ValueError, match=r"one row of features per sample is needed, shape \(n, D\)"
    ):
        sample_features(
            model, DataLoader(TensorDataset(torch.randn(4, 5, 2), torch.zeros(4, 5)), 2)
        )


EPOCHS = 3


def dynamics(toy: Toy) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Probabilities after each of a few epochs, those of the labels, and what they cost."""
    torch.manual_seed(toy.seed)
    model, n = toy.model(), len(toy.x)
    optimizer = torch.optim.SGD(model.parameters(), lr=toy.lr)
    found = []
    for _ in range(EPOCHS):
        for x, y in toy.loader():
            optimizer.zero_grad()
            toy.criterion(model(x), y).backward()
            optimizer.step()
        found.append(class_probabilities(model, DataLoader(TensorDataset(toy.x, toy.y), 256))[0])
    history, labels = torch.stack(found), toy.y.expand(EPOCHS, n)
    return (
        history,
        history.gather(2, labels[..., None]).squeeze(2),
        {"trained": (2 * EPOCHS * n, EPOCHS * n)},
    )


def by_aum(toy: Toy) -> Scores:
    history, _, cost = dynamics(toy)
    return aum(margins(history, toy.y.expand(EPOCHS, -1)), **cost)


WINNERS: dict[str, tuple[Callable[[Toy], Any], float]] = {
    "aum": (lambda toy: thresher.Prune(by_aum(toy), keep=0.25), 0.1),
    "d2": (lambda toy: thresher.Prune(d2(by_aum(toy), toy.x), keep=0.25), 0.1),
    "dyn_unc": (
        lambda toy: thresher.Prune(
            dyn_unc(dynamics(toy)[1], window=EPOCHS, **dynamics(toy)[2]), keep=0.25
        ),
        0.1,
    ),
    "dual": (
        lambda toy: thresher.Prune(
            dual(dynamics(toy)[1], window=EPOCHS, **dynamics(toy)[2]), keep=0.25
        ),
        0.1,
    ),
    "tdds": (
        lambda toy: thresher.Prune(
            tdds(dynamics(toy)[0], window=EPOCHS - 1, **dynamics(toy)[2]), keep=0.25
        ),
        0.1,
    ),
    "ccs": (lambda toy: thresher.Ccs(by_aum(toy), keep=0.25, strata=10), 0.1),
}


@pytest.mark.usefixtures("shared_traces")
@pytest.mark.parametrize("name", WINNERS)
def test_pruning_by_it_beats_random_samples_of_equal_cost(name: str) -> None:
    """With the cost of the scores counted, on the planted problem that has few hard samples."""
    method, margin = WINNERS[name]
    contest = beats_uniform(method, "redundant", (0, 1, 2))
    assert contest.gain > margin
    assert contest.gain > 3 * contest.standard_error
