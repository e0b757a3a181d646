"""GRAD-MATCH against a transcription that writes every gradient down and solves by least squares from scratch each time."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import nnls

from depth import depth
from helpers import over_instances
from thresher import EpochPlan, GradMatch
from thresher.methods._matching_pursuit import Atoms, Match, match
from thresher.records import Records
from thresher.rng import seeded

CPU = torch.device("cpu")


def atoms_of(vectors: np.ndarray, target: np.ndarray) -> Atoms:
    return Atoms(lambda i: vectors @ vectors[i], vectors @ target, float(target @ target))


def least_squares(
    vectors: np.ndarray, target: np.ndarray, penalty: float, own: float = 0.0
) -> tuple[np.ndarray, float]:
    """Weights and squared distance, of min |target - w vectors|^2 + penalty |w|^2; `own` comes on top of the target."""
    k = len(vectors)
    matrix = np.vstack([vectors.T, math.sqrt(penalty) * np.eye(k)])
    wanted = np.concatenate([target, np.zeros(k)])
    weights = np.linalg.lstsq(matrix, wanted, rcond=None)[0] if k else np.empty(0)
    return weights, float(np.sum((wanted - matrix @ weights) ** 2)) + own


@dataclass
class Pursuit:
    """What the transcription found, and what it met on the way."""

    chosen: list[int] = field(default_factory=list)
    weights: np.ndarray = field(default_factory=lambda: np.empty(0))
    left: float = 0.0
    events: set[str] = field(default_factory=set)


def transcribed(
    vectors: np.ndarray, target: np.ndarray, budget: int, penalty: float, tolerance: float
) -> Pursuit:
    found, tried, rest = Pursuit(), set(), target
    size = float(np.linalg.norm(target))
    while len(found.chosen) < budget:
        if np.linalg.norm(rest) <= max(tolerance, 1e-6) * size:
            found.events.add("close enough")
            break
        along = [(float(vector @ rest), -j) for j, vector in enumerate(vectors) if j not in tried]
        most, minus = max(along, default=(0.0, 0))
        if most <= 1e-12 * max(float(vector @ target) for vector in vectors):
            found.events.add("nothing points there")
            break
        tried.add(-minus)
        new = vectors[-minus]
        _, apart = least_squares(vectors[found.chosen], new, penalty, own=penalty)
        if apart <= 1e-9 * (new @ new + penalty):
            found.events.add("nothing new")
            continue
        found.chosen.append(-minus)
        while True:
            found.weights, _ = least_squares(vectors[found.chosen], target, penalty)
            if not found.chosen or found.weights.min() > 0:
                break
            found.events.add("given back")
            del found.chosen[int(found.weights.argmin())]
        rest = target - found.weights @ vectors[found.chosen]
    found.left = float(np.linalg.norm(rest))
    return found


def same(found: Match, expected: Pursuit, vectors: np.ndarray, target: np.ndarray) -> None:
    """Equal vectors may stand for each other."""
    assert vectors[found.chosen].tolist() == vectors[expected.chosen].tolist()
    assert found.weights == pytest.approx(expected.weights, rel=1e-6, abs=1e-12)
    assert math.sqrt(found.residual) == pytest.approx(
        expected.left, rel=1e-4, abs=3e-7 * float(np.linalg.norm(target))
    )
    assert len(set(found.chosen.tolist())) == len(found.chosen)
    assert (found.weights > 0).all()


# Vectors of the dossier


@pytest.mark.parametrize(
    ("vectors", "target", "budget", "penalty", "chosen", "weights", "left"),
    [
        ([(1, 0), (0, 1), (1, 1), (2, 1)], (4, 3), 1, 0, [3], [2.2], 0.8944),
        ([(1, 0), (0, 1), (1, 1), (2, 1)], (4, 3), 2, 0, [3, 1], [2, 1], 0),
        ([(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0)], (2, 2, 1), 1, 0, [3], [2], 1),
        ([(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0)], (2, 2, 1), 2, 0, [3, 2], [2, 1], 0),
        (
            [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0)],
            (2, 2, 1),
            2,
            0.5,
            [3, 2],
            [1.6, 0.6667],
            0.6566,
        ),
    ],
)
def test_vectors_of_the_dossier(
    vectors: Any, target: Any, budget: int, penalty: float, chosen: Any, weights: Any, left: float
):
    vectors, target = np.array(vectors, float), np.array(target, float)
    found = match(atoms_of(vectors, target), budget, penalty=penalty)
    assert found.chosen.tolist() == chosen
    assert found.weights == pytest.approx(weights, abs=5e-5)
    assert math.sqrt(found.residual) == pytest.approx(left, abs=5e-5)
    same(found, transcribed(vectors, target, budget, penalty, 0.0), vectors, target)


# Matching pursuit on hard random instances


def pursuit_instance(seed: int) -> tuple[np.ndarray, np.ndarray, int, float, float]:
    r = np.random.default_rng(seed)
    n, d = int(r.integers(1, 25)), int(r.integers(1, 12))
    vectors = r.normal(size=(n, d))
    kind = seed % 8
    if kind == 1:
        vectors = vectors[r.integers(n, size=n)]  # many of them equal
    elif kind == 2:
        vectors = np.abs(vectors)
    elif kind == 3:
        vectors *= 10.0 ** r.integers(-3, 4, size=(n, 1))
    elif kind == 4:
        vectors[r.random(n) < 0.4] = 0
    elif kind == 5:
        vectors = r.normal(size=(n, 2)) @ r.normal(size=(2, d))  # a plane
    elif kind == 6:
        vectors = np.abs(vectors[:1]) + 3 + vectors * r.choice([1e-5, 1])  # all alike
    target = vectors.sum(0) if r.random() < (0 if kind == 6 else 0.6) else r.normal(size=d)
    if kind == 6:
        target = np.abs(target)
    if kind == 7:
        vectors, target = vectors * 1e25, target * 1e25
    penalty = float(r.choice([0, 0, 0.5, 5])) * (1e50 if kind == 7 else 1)
    return vectors, target, int(r.integers(1, n + 3)), penalty, float(r.choice([0, 0, 0.1, 0.5]))


PURSUITS = depth([*range(52), 190], range(400))


@over_instances(PURSUITS)
def test_pursuit(seed: int) -> None:
    vectors, target, budget, penalty, tolerance = pursuit_instance(seed)
    expected = transcribed(vectors, target, budget, penalty, tolerance)
    found = match(atoms_of(vectors, target), budget, penalty=penalty, tolerance=tolerance)
    same(found, expected, vectors, target)
    # The weights are the best that there are for these vectors, and better ones above zero need other vectors.
    if len(found.chosen):
        scale = float(np.abs(vectors).max())
        chosen_atoms = (
            np.vstack([vectors[found.chosen].T, math.sqrt(penalty) * np.eye(len(found.chosen))])
            / scale
        )
        weights, _ = nnls(
            chosen_atoms, np.concatenate([target, np.zeros(len(found.chosen))]) / scale
        )
        assert found.weights == pytest.approx(weights, rel=1e-5, abs=1e-9)


def test_the_pursuits_are_hard() -> None:
    events: dict[str, int] = {}
    for seed in PURSUITS:
        for event in transcribed(*pursuit_instance(seed)).events:
            events[event] = events.get(event, 0) + 1
    assert set(events) == {"close enough", "nothing points there", "nothing new", "given back"}
    assert min(events.values()) >= depth(1, 4), events


@over_instances(depth(range(5), range(20)))
def test_of_independent_vectors_in_a_cone_it_is_the_best_nonnegative_fit(seed: int) -> None:
    """Nothing is given back there, so that it ends where `nnls` does."""
    r = np.random.default_rng(seed)
    vectors = np.linalg.qr(r.normal(size=(12, 8)))[0].T * r.uniform(0.5, 2, size=(8, 1))
    target = r.normal(size=12)
    found = match(atoms_of(vectors, target), 8)
    weights, distance = nnls(vectors.T, target)
    assert sorted(found.chosen.tolist()) == np.flatnonzero(weights).tolist()
    assert found.weights == pytest.approx(weights[found.chosen])
    assert math.sqrt(found.residual) == pytest.approx(distance)


# The whole method


@dataclass
class Instance:
    settings: dict[str, Any]
    error: np.ndarray
    feature: np.ndarray
    labels: np.ndarray


def instance(seed: int) -> Instance:
    r = np.random.default_rng(seed)
    kind = ("plain", "one", "nonfinite", "sorted", "zeros", "huge", "rare", "lost")[seed % 8]
    n = 1 if kind == "one" else int(r.integers(2, 60))
    classes, width = int(r.integers(2, 6)), int(r.integers(1, 6))
    labels = r.integers(classes, size=n)
    if kind == "sorted":
        labels = np.sort(labels)
    if kind == "rare":
        labels[1:] = 0
    logits = r.normal(size=(n, classes)) * r.choice([0.1, 1, 4])
    probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    smoothing = r.choice([0.0, 0.1])  # the error at the label may be above zero then
    error = probs - (1 - smoothing) * np.eye(classes)[labels] - smoothing / classes
    feature = np.maximum(r.normal(size=(n, width)), 0)
    if kind == "zeros":
        error[r.random(n) < 0.7] = 0  # known by heart
    if kind == "huge":
        feature *= 1e15
    error, feature = error.astype(np.float32), feature.astype(np.float32)
    if kind in ("nonfinite", "lost"):
        bad = r.random(n) < (0.2 if kind == "nonfinite" else 1.0)
        error[bad, 0] = r.choice([math.nan, math.inf, -math.inf], int(bad.sum()))
        worse = r.random(n) < 0.1
        feature[worse, -1] = math.nan
    per = str(r.choice(["batch", "class", "class_gradient"]))
    settings = {
        "per": per,
        "keep": float(r.choice([0.1, 0.29, 0.5, 0.9])),
        "batch_size": int(r.choice([1, 3, 8, 100])),
        "gradient": "full" if per == "class_gradient" else str(r.choice(["full", "bias"])),
        "penalty": float(r.choice([0.0, 0.5])),
        "tolerance": float(r.choice([0.0, 0.1])),
        "runs": str(r.choice(["shuffled", "consecutive"])),
        "fill": bool(r.random() < 0.7),
        "weights_divisor": str(r.choice(["weights", "samples"])),
    }
    return Instance(settings, error, feature, labels)


def planned(
    method: GradMatch,
    error: np.ndarray,
    feature: np.ndarray,
    seed: int,
    labels: np.ndarray | None = None,
) -> EpochPlan:
    records: dict[str, Any] = dict(Records(method.columns(), len(error), CPU))
    labels = error.argmin(1) if labels is None else labels
    known = {
        "error": torch.from_numpy(error),
        "feature": torch.from_numpy(feature),
        "label": torch.from_numpy(labels),
    }
    records |= {name: known[name] for name in method.full_pass(1, 100)}
    plan = method.plan_epoch(records, epoch=1, epochs=100, generator=seeded(seed, 1))
    plan.check(len(error))
    return plan


def written_down(error: np.ndarray, feature: np.ndarray, full: bool) -> np.ndarray:
    """The gradient of a sample, number by number."""
    inputs = [1.0, *(feature.tolist() if full else [])]
    return np.array([float(e) * float(h) for e in error for h in inputs])


def expected_of(given: Instance, seed: int) -> tuple[dict[int, float], int, list[int]]:
    """Weight of each matched sample, how many are wanted beside those that cannot be matched, and these."""
    settings, n, full = given.settings, len(given.error), given.settings["gradient"] == "full"
    good = [
        i
        for i in range(n)
        if np.isfinite(given.error[i]).all() and (not full or np.isfinite(given.feature[i]).all())
    ]
    lost = [i for i in range(n) if i not in good]
    wanted = max(0, max(1, math.floor(settings["keep"] * n + 1e-9)) - len(lost))
    matched: dict[int, float] = {}
    if not wanted:
        return matched, wanted, lost
    gradients = {i: written_down(given.error[i], given.feature[i], full) for i in good}
    limits = settings["penalty"], settings["tolerance"]
    if settings["per"] == "batch":
        order = torch.randperm(len(good), generator=seeded(seed, 1)).tolist()
        order = order if settings["runs"] == "shuffled" else sorted(order)
        queue = [good[i] for i in order]
        runs = []
        while queue:
            runs.append([queue.pop(0) for _ in range(min(settings["batch_size"], len(queue)))])
        means = np.array([sum(gradients[i] for i in run) / len(run) for run in runs])
        found = transcribed(
            means, means.sum(0), math.ceil(wanted / settings["batch_size"]), *limits
        )
        for j, weight in zip(found.chosen, found.weights, strict=True):
            matched |= dict.fromkeys(runs[j], weight)
        return matched, wanted, lost
    for label in range(given.error.shape[1]):
        members = [i for i in good if given.labels[i] == label]
        if not members:
            continue
        columns = 1 + (given.feature.shape[1] if full else 0)
        own = (
            slice(label * columns, (label + 1) * columns)
            if settings["per"] == "class_gradient"
            else slice(None)
        )
        vectors = np.array([gradients[i][own] for i in members])
        found = transcribed(
            vectors, vectors.sum(0), math.ceil(wanted * len(members) / len(good) - 1e-9), *limits
        )
        matched |= {
            members[j]: weight for j, weight in zip(found.chosen, found.weights, strict=True)
        }
    return matched, wanted, lost


NUMBERS = depth([*range(48), 212, 300], range(400))


@over_instances(NUMBERS)
def test_agrees_with_the_transcription(seed: int) -> None:
    given = instance(seed)
    matched, wanted, lost = expected_of(given, seed)
    plan = planned(GradMatch(**given.settings), given.error, given.feature, seed, given.labels)
    assert (
        plan.weights is not None and plan.refresh is None and plan.lr_scale == 1 and not plan.drawn
    )
    found = dict(zip(plan.ids.tolist(), plan.weights.tolist(), strict=True))
    assert all(found[i] == 1 for i in lost)
    filled = set(found) - set(matched) - set(lost)
    lacking = wanted - len(matched) if given.settings["fill"] else int(not matched and not lost)
    assert len(filled) == max(0, lacking)
    assert set(matched) <= set(found)
    inside = {**matched, **dict.fromkeys(filled, 1.0)}
    total = (
        sum(inside.values())
        if given.settings["weights_divisor"] == "weights"
        else len(given.error) - len(lost)
    )
    for i, weight in inside.items():
        assert found[i] == pytest.approx(weight * len(inside) / total, rel=1e-5)
    assert plan.facts["matched"] == len(matched)
    assert plan.facts["scheduled_fraction"] == 1 - given.settings["keep"]
    assert plan.facts["actual_fraction"] == pytest.approx(1 - len(found) / len(given.error))
    (remembered,) = plan.remember.values()
    assert {i: w for i, w in enumerate(remembered.tolist()) if w} == found


def test_the_instances_are_hard() -> None:
    seen: dict[str, int] = {}
    for seed in NUMBERS:
        given = instance(seed)
        matched, wanted, lost = expected_of(given, seed)
        n, size = len(given.error), given.settings["batch_size"]
        batch = given.settings["per"] == "batch"
        met = {
            "filled": given.settings["fill"] and 0 < len(matched) < wanted,
            "short": not given.settings["fill"] and 0 < len(matched) < wanted,
            "more than wanted": len(matched) > wanted,
            "lost": 0 < len(lost) < n,
            "all lost": len(lost) == n,
            "last run shorter": batch and bool((n - len(lost)) % size) and n - len(lost) > size,
            "uneven": len({round(w, 6) for w in matched.values()}) > 1,
            "nothing matched": not matched and wanted > 0,
        }
        for name, is_so in met.items():
            seen[name] = seen.get(name, 0) + bool(is_so)
    assert min(seen.values()) >= depth(1, 3), seen


@pytest.mark.parametrize("per", ["batch", "class", "class_gradient"])
def test_the_weighted_gradient_is_close_to_that_of_all_data(per: str) -> None:
    """Much closer than that of as many samples drawn at random, all weighing the same."""
    r = np.random.default_rng(0)
    n, classes, width, size = 2000, 10, 32, 10
    labels = r.integers(classes, size=n)
    centers = r.normal(size=(classes, width))
    feature = np.maximum(centers[labels] + r.normal(size=(n, width)), 0).astype(np.float32)
    logits = feature @ centers.T / 4
    probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    error = (probs - np.eye(classes)[labels]).astype(np.float32)
    gradients = error[:, :, None] * np.hstack([np.ones((n, 1)), feature])[:, None]
    plan = planned(GradMatch(0.2, per=per, batch_size=size), error, feature, 0, labels)
    assert plan.weights is not None and len(plan.ids) == pytest.approx(0.2 * n, abs=size + classes)

    def away(ids: Any, weights: Any) -> float:
        """Distance from the gradient of what is matched as a whole, over its size; a common factor is the learning rate's."""
        weight = np.zeros(n)
        weight[ids] = weights
        missing = total = 0.0
        for group in range(1 if per == "batch" else classes):
            rows = slice(None) if per == "batch" else labels == group
            outputs = group if per == "class_gradient" else slice(None)
            wanted = gradients[rows][:, outputs].sum(0).ravel()
            found = np.tensordot(weight[rows], gradients[rows][:, outputs], 1).ravel()
            missing += np.sum((wanted - found * (wanted @ found) / (found @ found)) ** 2)
            total += wanted @ wanted
        return math.sqrt(missing / total)

    at_random = [away(r.choice(n, len(plan.ids), replace=False), 1.0) for _ in range(5)]
    assert away(plan.ids.numpy(), plan.weights.numpy()) < 0.5 * min(at_random)
