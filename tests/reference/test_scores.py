"""Static scores and pruning against transcriptions that share nothing with the library.

Networks are written out neuron by neuron in Python's own numbers, sets and orders are Python's, counts are exact fractions.
"""

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from depth import depth
from helpers import over_instances
from thresher import Prune, SelectiveBackprop
from thresher.methods.prune import keep_in_batch
from thresher.rng import seeded
from thresher.scores import (
    Scores,
    disagreement,
    el2n,
    forgetting,
    grand,
    irreducible,
    memorisation,
    prototypes,
)
from thresher.scores.disagreement import disagreement_of
from thresher.scores.forgetting import events_in_history
from thresher.scores.grand import last_layer
from thresher.scores.memorisation import difference
from thresher.scores.prototypes import to_nearest

# A network with one hidden layer, by hand


class ByHand:
    """tanh(W x + b), then V h + c; nested lists of Python numbers."""

    def __init__(self, model):
        first, _, last = model
        self.w, self.b = first.weight.tolist(), first.bias.tolist()
        self.v, self.c = (
            last.weight.tolist(),
            [0.0] * last.out_features if last.bias is None else last.bias.tolist(),
        )
        self.has_bias = last.bias is not None

    def hidden(self, x):
        return [
            math.tanh(sum(w * xi for w, xi in zip(row, x, strict=True)) + b)
            for row, b in zip(self.w, self.b, strict=True)
        ]

    def outputs(self, x):
        h = self.hidden(x)
        return [
            sum(v * hi for v, hi in zip(row, h, strict=True)) + c
            for row, c in zip(self.v, self.c, strict=True)
        ]

    def probs(self, x):
        z = self.outputs(x)
        top = max(z)
        e = [math.exp(zi - top) for zi in z]
        return [ei / sum(e) for ei in e]

    def loss(self, x, y):
        z = self.outputs(x)
        top = max(z)
        return math.log(sum(math.exp(zi - top) for zi in z)) + top - z[y]

    def error(self, x, y):
        return [p - (k == y) for k, p in enumerate(self.probs(x))]

    def gradients(self, x, y):
        """All partial derivatives of the loss, those of the last layer first."""
        g, h = self.error(x, y), self.hidden(x)
        last = [gk * hj for gk in g for hj in h] + (g if self.has_bias else [])
        back = [
            sum(g[k] * self.v[k][j] for k in range(len(g))) * (1 - h[j] ** 2) for j in range(len(h))
        ]
        return last, [bj * xi for bj in back for xi in x] + back

    def answer(self, x):
        z = self.outputs(x)
        return z.index(max(z))


def norm(values):
    return math.sqrt(sum(value * value for value in values))


class Instance:
    """A few samples, networks and a loader in an order of its own."""

    def __init__(self, number, *, models=None):
        r = np.random.default_rng(number)
        g = torch.Generator().manual_seed(number)
        self.n, inputs, hidden, self.classes = (
            int(r.integers(low, high)) for low, high in ((1, 18), (1, 4), (1, 5), (2, 5))
        )
        scale = float(r.choice([0.1, 1.0, 30.0]))
        x = torch.randn(self.n, inputs, generator=g).round(decimals=1)
        if r.random() < 0.3:
            x[:] = x[0]  # all alike
        y = torch.randint(self.classes, (self.n,), generator=g)
        self.models = []
        for _ in range(models or int(r.integers(1, 4))):
            net = nn.Sequential(
                nn.Linear(inputs, hidden),
                nn.Tanh(),
                nn.Linear(hidden, self.classes, bias=bool(r.random() < 0.7)),
            )
            for parameter in net.parameters():
                parameter.data = torch.randn(parameter.shape, generator=g) * scale
            self.models.append(net)
        self.loader = DataLoader(
            TensorDataset(x, y),
            batch_size=int(r.integers(1, 8)),
            shuffle=True,
            drop_last=bool(r.random() < 0.5),
        )
        self.samples = list(zip(x.tolist(), y.tolist(), strict=True))
        self.by_hand = [ByHand(model) for model in self.models]
        self.r = r


def near(values):
    return pytest.approx(values, rel=2e-4, abs=2e-5)


@over_instances(depth(range(10), range(40)))
def test_error_norms(number):
    one = Instance(number)
    expected = [
        sum(norm(net.error(x, y)) for net in one.by_hand) / len(one.by_hand) for x, y in one.samples
    ]
    found = el2n(one.models, one.loader)
    assert found.values.tolist() == near(expected)
    assert found.ids.tolist() == list(range(one.n)) and found.labels.tolist() == [
        y for _, y in one.samples
    ]
    assert (found.forward, found.backward) == (one.n * len(one.models), 0)


@over_instances(depth(range(10), range(40)))
def test_gradient_norms(number):
    one = Instance(number)
    last, whole = [], []
    for x, y in one.samples:
        parts = [net.gradients(x, y) for net in one.by_hand]
        last.append(sum(norm(head) for head, _ in parts) / len(parts))
        whole.append(sum(norm(head + rest) for head, rest in parts) / len(parts))
    assert grand(one.models, one.loader, nn.CrossEntropyLoss()).values.tolist() == near(last)
    found = grand(
        one.models, one.loader, nn.CrossEntropyLoss(reduction="sum"), layer="all", trained=(5, 7)
    )
    assert found.values.tolist() == near(whole)
    passes = one.n * len(one.models)
    assert (found.forward, found.backward) == (passes + 5, passes + 7)


@over_instances(depth(range(10), range(40)))
def test_irreducible_losses(number):
    one = Instance(number, models=3)
    halves = [
        torch.tensor(sorted(one.r.permutation(one.n)[: one.n // 2].tolist()), dtype=torch.int64)
        for _ in range(2)
    ]
    members = [set(half.tolist()) for half in halves] + [set()]
    expected = []
    for i, (x, y) in enumerate(one.samples):
        losses = [
            net.loss(x, y)
            for net, member in zip(one.by_hand, members, strict=True)
            if i not in member
        ]
        expected.append(sum(losses) / len(losses))
    held_out = [*halves, torch.empty(0, dtype=torch.int64)]
    found = irreducible(one.models, one.loader, nn.CrossEntropyLoss(), trained_on=held_out)
    assert found.values.tolist() == near(expected)


@over_instances(depth(range(10), range(40)))
def test_memorised_samples(number):
    one = Instance(number, models=4)
    members = [
        set(one.r.permutation(one.n)[: one.r.integers(0, one.n + 1)].tolist()) for _ in one.models
    ]
    expected = []
    for i, (x, y) in enumerate(one.samples):
        inside = [
            net.answer(x) == y
            for net, member in zip(one.by_hand, members, strict=True)
            if i in member
        ]
        outside = [
            net.answer(x) == y
            for net, member in zip(one.by_hand, members, strict=True)
            if i not in member
        ]
        expected.append(
            sum(inside) / len(inside) - sum(outside) / len(outside) if inside and outside else None
        )
    ids = [torch.tensor(sorted(member), dtype=torch.int64) for member in members]
    found = memorisation(one.models, ids, one.loader).values.tolist()
    assert [None if math.isnan(value) else value for value in found] == [
        None if e is None else near(e) for e in expected
    ]


@over_instances(depth(range(10), range(40)))
def test_disagreement(number):
    one = Instance(number, models=int(2 + number % 3))

    def entropy(p):
        return -sum(pi * math.log(pi) for pi in p if pi > 0)

    of = {"entropy": [], "mutual_information": [], "variation_ratio": []}
    for x, _ in one.samples:
        probs = [net.probs(x) for net in one.by_hand]
        mean = [sum(column) / len(probs) for column in zip(*probs, strict=True)]
        answers = [net.answer(x) for net in one.by_hand]
        of["entropy"].append(entropy(mean))
        of["mutual_information"].append(entropy(mean) - sum(map(entropy, probs)) / len(probs))
        of["variation_ratio"].append(1 - max(answers.count(a) for a in answers) / len(answers))
    for kind, expected in of.items():
        assert disagreement(one.models, one.loader, kind=kind).values.tolist() == near(expected), (
            kind
        )


# Forgetting


def counted(history, never_learned):
    """One sample's history of 0 and 1."""
    if 1 not in history:
        return {"presentations": len(history), "infinite": math.inf, "zero": 0}[never_learned]
    return "".join(map(str, history)).count("10")


@pytest.mark.parametrize("never_learned", ["presentations", "infinite", "zero"])
@over_instances(depth(range(10), range(40)))
def test_forgetting_events(number, never_learned):
    r = np.random.default_rng(number)
    history = r.random((int(r.integers(1, 9)), int(r.integers(1, 30)))) < r.choice([0.1, 0.5, 0.9])
    expected = [counted(column, never_learned) for column in history.T.astype(int).tolist()]
    assert (
        forgetting(torch.from_numpy(history), never_learned=never_learned).values.tolist()
        == expected
    )


HISTORIES = {"a": "011010", "b": "111111", "c": "000000", "d": "001111", "e": "101010"}


def test_worked_vector_of_forgetting():
    correct = torch.tensor([[digit == "1" for digit in row] for row in HISTORIES.values()]).T
    assert events_in_history(correct).tolist() == [2, 0, 0, 0, 3]
    original = forgetting(correct)
    assert original.values.tolist() == [2, 0, 6, 0, 3]
    assert forgetting(correct, never_learned="infinite").values.tolist() == [2, 0, math.inf, 0, 3]
    kakurenbo = forgetting(correct, never_learned="zero")
    assert kakurenbo.values.tolist() == [2, 0, 0, 0, 3]
    names = list(HISTORIES)

    def removed(scores):
        left = [set(Prune(scores, keep=kept / 5).kept(5).tolist()) for kept in range(5, 0, -1)]
        return [names[(before - after).pop()] for before, after in pairwise(left)]

    assert removed(original) == ["b", "d", "a", "e"]
    assert set(removed(kakurenbo)[:3]) == {"b", "c", "d"}
    assert names[int(Prune(forgetting(correct, never_learned="infinite"), keep=0.2).kept(5))] == "c"


# Worked vectors of the others


class Fixed(nn.Module):
    """The same probabilities for every sample."""

    def __init__(self, probs):
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(probs).log())

    def forward(self, x):
        return self.logits.expand(len(x), -1)


def test_worked_vector_of_el2n():
    first, second = (0.7, 0.2, 0.1), (0.5, 0.3, 0.2)
    loader = DataLoader(TensorDataset(torch.zeros(1, 1), torch.tensor([0])))
    assert float(el2n(Fixed(first), loader).values) == pytest.approx(0.374166, abs=1e-6)
    assert float(el2n(Fixed(second), loader).values) == pytest.approx(0.616441, abs=1e-6)
    mean = float(el2n([Fixed(first), Fixed(second)], loader).values)
    assert mean == pytest.approx(0.495304, abs=1e-6) and mean != pytest.approx(0.494975, abs=1e-6)
    assert float(el2n(Fixed((0.0, 1.0, 0.0)), loader).values) == pytest.approx(math.sqrt(2))
    assert float(el2n(Fixed((1.0, 0.0, 0.0)), loader).values) == 0


def test_worked_vector_of_grand():
    error, feature = torch.tensor([[-0.3, 0.2, 0.1]]), torch.tensor([[1.0, 2.0, 2.0]])
    assert float(last_layer(error, feature)) == pytest.approx(1.183216, abs=1e-6)
    assert float(last_layer(error, feature, bias=False)) == pytest.approx(3 * 0.374166, abs=1e-5)


def test_worked_vector_of_pruning():
    values = [0.3, 0.9, 0.1, 0.5, 0.5, 0.2, 0.7, 0.4]
    assert Prune(Scores(torch.arange(8), values), keep=0.75).kept(8).tolist() == [0, 1, 3, 4, 6, 7]


def test_worked_vector_of_diet_selective_backprop():
    assert keep_in_batch(0.25, 0.5) == pytest.approx(2 / 3) and keep_in_batch() == keep_in_batch(
        0.25, 0.5
    )
    assert keep_in_batch(0.25, 0.625) == pytest.approx(1 / 2)
    kept = Prune(Scores(torch.arange(16), torch.arange(16.0))).kept(16)
    method = SelectiveBackprop(keep=keep_in_batch())
    signals = {"id": kept, "loss": torch.arange(12.0)}
    plan, _ = method.plan_batch(signals, method.init_state(), step=0, generator=seeded(0))
    assert len(plan.rows) == 8  # of 16


CORNERS = [(1.0, 0.0), (0.9, 0.1), (0.0, 1.0), (0.1, 0.9), (0.6, 0.6)]
DISTANCES = [0.042883, 0.016745, 0.00153, 0.00153, 0.118366]


def unit(vector):
    return [value / norm(vector) for value in vector]


def test_worked_vector_of_prototypes():
    features = torch.tensor(CORNERS)
    groups = [[unit(CORNERS[i]) for i in group] for group in ((0, 1, 4), (2, 3))]
    centroids = torch.tensor(
        [[sum(column) / len(group) for column in zip(*group, strict=True)] for group in groups]
    )
    assert to_nearest(features, centroids).tolist() == pytest.approx(DISTANCES, abs=1e-6)
    loader = DataLoader(TensorDataset(features, torch.zeros(5, dtype=torch.int64)), batch_size=2)
    found = prototypes(nn.Linear(2, 2), loader, 2, seed=3)
    assert found.values.tolist() == pytest.approx(DISTANCES, abs=1e-6)
    assert sorted(Prune(found, keep=0.4, which="easy").kept(5).tolist()) == [2, 3]


@over_instances(depth(range(20), range(100)))
def test_distances_to_centroids(number):
    r = np.random.default_rng(number)
    n, k, d = (int(r.integers(1, high)) for high in (20, 5, 6))
    features, centroids = r.normal(size=(n, d)), r.normal(size=(k, d)) * r.choice([1e-3, 1.0, 1e6])
    expected = []
    for f in features.tolist():
        cosines = [
            sum(a * b for a, b in zip(f, c, strict=True)) / norm(f) / norm(c)
            for c in centroids.tolist()
        ]
        expected.append(min(1 - cosine for cosine in cosines))
    assert to_nearest(
        torch.from_numpy(features), torch.from_numpy(centroids)
    ).tolist() == pytest.approx(expected, abs=1e-9)


def test_disagreement_of_members_that_are_sure_of_different_things():
    probs = torch.tensor([[[1.0, 0.0], [1.0, 0.0]], [[0.0, 1.0], [1.0, 0.0]]])
    assert disagreement_of(probs, "entropy").tolist() == pytest.approx([math.log(2), 0])
    assert disagreement_of(probs, "mutual_information").tolist() == pytest.approx([math.log(2), 0])
    assert disagreement_of(probs, "variation_ratio").tolist() == [0.5, 0]


def test_memorisation_by_hand():
    correct = torch.tensor([[1, 1, 0], [0, 1, 0], [1, 1, 1]], dtype=torch.bool)
    member = torch.tensor([[1, 0, 1], [0, 0, 1], [1, 1, 1]], dtype=torch.bool)
    found = difference(correct, member).tolist()
    assert found[:2] == [1.0, 0.0] and math.isnan(found[2])


# Pruning


def transcribed(values, labels, *, keep, which, offset, floor):
    """The samples kept: `values` and `labels` by id, None for those that have none."""
    n = len(values)
    known = [i for i, value in enumerate(values) if value is not None and math.isfinite(value)]
    unknown = [i for i in range(n) if i not in known]
    count = max(1, math.floor(Fraction(keep) * n))
    hardest = sorted(known, key=lambda i: (values[i], i), reverse=True)
    if which == "easy":
        order = unknown + hardest[::-1]
    else:
        cut = min(math.floor(Fraction(offset) * n), len(known), n - count)
        order = unknown + hardest[cut:] + hardest[:cut][::-1]
    kept = set()
    for label in {label for label in labels if label is not None}:
        members = [i for i in order if labels[i] == label]
        kept |= set(members[: math.ceil(Fraction(floor) * len(members))])
    for i in order:
        if len(kept) >= count:
            break
        kept.add(i)
    return sorted(kept)


def hard_values(r, n):
    kind = r.integers(4)
    values = r.gamma(1.0, 1.0, n)
    if kind == 1:
        values = r.choice([0.0, -0.0, 0.25, 3.0], n)
    elif kind == 2:
        values = r.choice([1e-30, 3e38, -1e30, 0.0, 1.0], n) * r.random(n)
    elif kind == 3:
        values = np.full(n, 2.5)
    values = values.astype(np.float32)
    spoilt = r.random(n) < r.choice([0.0, 0.2, 1.0], p=[0.5, 0.4, 0.1])
    values[spoilt] = r.choice([np.nan, np.inf, -np.inf], int(spoilt.sum()))
    return values


def hard_pruning(number):
    r = np.random.default_rng(number)
    n = int(r.choice([1, 2, 3, 10, 57, 100]))
    which = str(r.choice(["hard", "easy", "window"]))
    settings = {
        "keep": str(r.choice(["0.29", "0.57", "0.5", "0.01", "1", "0.75"])),
        "which": which,
        "offset": "0",
        "floor": str(r.choice(["0", "0", "0.29", "0.5", "0.9", "1"])),
    }
    if which == "window":
        settings["offset"] = str(
            r.choice(["0", "0.14", "0.25", str(1 - Fraction(settings["keep"]))])
        )
        if Fraction(settings["offset"]) > 1 - Fraction(settings["keep"]):
            settings["offset"] = "0"
    ids = (
        np.arange(n)
        if r.random() < 0.6
        else np.union1d(r.choice(n, int(r.integers(1, n + 1))), [n - 1])
    )
    return (
        settings,
        n,
        ids.astype(np.int64),
        hard_values(r, len(ids)),
        r.choice([3, 7, 2**40], len(ids)).astype(np.int64),
    )


NUMBERS = depth(range(80), range(400))


@over_instances(NUMBERS)
def test_hard_prunings(number):
    settings, n, ids, values, labels = hard_pruning(number)
    by_id, classes = [None] * n, [None] * n
    for i, value, label in zip(ids.tolist(), values.tolist(), labels.tolist(), strict=True):
        by_id[i], classes[i] = value, label
    expected = transcribed(by_id, classes, **settings)
    scores = Scores(
        torch.from_numpy(ids), torch.from_numpy(values), labels=torch.from_numpy(labels)
    )
    keep, offset, floor = (float(Fraction(settings[name])) for name in ("keep", "offset", "floor"))
    kept = Prune(scores, keep, settings["which"], offset, floor).kept(n)
    assert kept.dtype == torch.int64 and kept.tolist() == expected
    if settings["floor"] == "0":
        assert len(kept) == max(1, math.floor(Fraction(settings["keep"]) * n))


def test_the_prunings_are_hard():
    """Every way to choose, ties, missing and unusable scores, single samples, and classes that need more than `keep`."""
    met = set()
    for number in NUMBERS:
        settings, n, ids, values, labels = hard_pruning(number)
        met |= {settings["which"], "one" if n == 1 else "many"}
        met |= {"tied"} if len(set(values.tolist())) < len(values) else set()
        met |= {"partial"} if len(ids) < n else set()
        met |= {"nothing finite"} if not np.isfinite(values).any() else set()
        met |= (
            {"floor above keep"}
            if Fraction(settings["floor"]) > Fraction(settings["keep"])
            else set()
        )
        met |= (
            {"to the end"}
            if Fraction(settings["offset"]) == 1 - Fraction(settings["keep"]) != 0
            else set()
        )
    assert met == {
        "hard", "easy", "window", "one", "many", "tied", "partial", "nothing finite", "floor above keep", "to the end",
    }  # fmt: skip
