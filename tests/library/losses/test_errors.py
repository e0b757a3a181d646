"""Gradients of single samples' losses with respect to outputs, and the signals made of them: against autograd and loops."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from loss_cases import errors, signals
from thresher.losses import adapt

B, C, T = 7, 5, 3


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def indices(*shape, top=C, seed=1):
    return torch.randint(top, shape, generator=torch.Generator().manual_seed(seed))


def by_autograd(losses_of, outputs, n):
    """The gradient of each sample's mean loss, one backward pass a sample."""
    leaf = outputs.clone().requires_grad_()
    rows = []
    for i in range(n):
        (gradient,) = torch.autograd.grad(losses_of(leaf, i), leaf)
        rows.append(gradient.reshape(n, -1)[i])
    return torch.stack(rows)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(B, C), (B, C, T), (B, C, 2, 2)], ids=str)
def test_cross_entropy_over_indices(shape, smoothing):
    outputs, targets = randn(*shape) * 3, indices(B, *shape[2:])
    ignored = torch.zeros_like(targets, dtype=torch.bool)
    if len(shape) > 2:
        ignored = indices(*targets.shape, top=2).bool()
        ignored[0] = True
        ignored[1] = False
        targets = targets.masked_fill(ignored, -100)

    def loss(leaf, i):
        losses = F.cross_entropy(
            leaf, targets, reduction="none", label_smoothing=smoothing
        ).reshape(B, -1)[i]
        return losses.sum() / (~ignored).reshape(B, -1)[i].sum().clamp(min=1)

    found = errors(
        adapt(nn.CrossEntropyLoss(label_smoothing=smoothing)), outputs, targets, B, repeat=None
    )
    assert torch.allclose(found, by_autograd(loss, outputs, B), atol=1e-6)
    if len(shape) > 2:
        assert not found[0].any()


def test_cross_entropy_with_an_ignored_index_that_is_no_class():
    targets = indices(B)
    targets[2] = 255
    found = errors(adapt(nn.CrossEntropyLoss(ignore_index=255)), randn(B, C), targets, B)
    assert not found[2].any() and bool(found[[0, 1, 3]].any(1).all())


def test_class_weights_do_not_count():
    outputs, targets = randn(B, C), indices(B)
    weighted = adapt(nn.CrossEntropyLoss(weight=torch.arange(1.0, C + 1)))
    assert torch.equal(
        errors(weighted, outputs, targets, B),
        errors(adapt(nn.CrossEntropyLoss()), outputs, targets, B),
    )


def test_flattened_tokens():
    outputs, targets = randn(B * T, C), indices(B * T)
    found = errors(adapt(nn.CrossEntropyLoss()), outputs, targets, B, repeat=T)

    def loss(leaf, i):
        return F.cross_entropy(leaf, targets, reduction="none").reshape(B, T)[i].mean()

    assert found.shape == (B, T * C)
    assert torch.allclose(found, by_autograd(loss, outputs, B), atol=1e-6)


def test_probabilities_as_targets():
    outputs, targets = randn(B, C), randn(B, C, seed=5).softmax(1)
    found = errors(adapt(nn.CrossEntropyLoss()), outputs, targets, B)
    loss = lambda leaf, i: F.cross_entropy(leaf, targets, reduction="none")[i]  # noqa: E731
    assert torch.allclose(found, by_autograd(loss, outputs, B), atol=1e-6)


def test_outputs_after_the_softmax_are_taken_before_it():
    outputs, targets = randn(B, C), indices(B)
    wanted = errors(adapt(nn.CrossEntropyLoss()), outputs, targets, B)
    assert torch.allclose(
        errors(adapt(nn.NLLLoss()), outputs.log_softmax(1), targets, B), wanted, atol=1e-6
    )
    right = indices(B, C, top=2).float()
    before = errors(adapt(nn.BCEWithLogitsLoss()), outputs, right, B)
    assert torch.allclose(
        errors(adapt(nn.BCELoss()), outputs.sigmoid(), right, B), before, atol=1e-6
    )


@pytest.mark.parametrize(
    "criterion",
    [nn.MSELoss(), nn.SmoothL1Loss(), nn.BCEWithLogitsLoss(), lambda o, t: (o - t) ** 4],
)
def test_any_criterion(criterion):
    outputs, targets = randn(B, C), indices(B, C, top=2).float()
    plain = (
        getattr(nn, type(criterion).__name__)(reduction="none")
        if isinstance(criterion, nn.Module)
        else criterion
    )
    found = errors(adapt(criterion), outputs, targets, B)
    assert torch.allclose(
        found, by_autograd(lambda leaf, i: plain(leaf, targets)[i].mean(), outputs, B), atol=1e-6
    )
    norms = signals(adapt(criterion), outputs, targets, B, wanted={"grad_norm"})["grad_norm"]
    assert norms.tolist() == pytest.approx(found.norm(dim=1).tolist())


def test_norms_of_one_label_a_sample():
    outputs, targets = randn(B, C) * 2, indices(B)
    wanted = {"grad_norm", "el2n", "margin", "entropy", "correct"}
    found = signals(adapt(nn.CrossEntropyLoss()), outputs, targets, B, wanted=wanted)
    for i, (z, y) in enumerate(zip(outputs.double().numpy(), targets.tolist(), strict=True)):
        p = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
        assert found["el2n"][i] == pytest.approx(math.dist(p, np.eye(C)[y]), rel=1e-5)
        assert found["grad_norm"][i] == pytest.approx(math.dist(p, np.eye(C)[y]), rel=1e-5)
        assert found["margin"][i] == pytest.approx(
            p[y] - max(p[k] for k in range(C) if k != y), rel=1e-4, abs=1e-6
        )
        assert found["entropy"][i] == pytest.approx(-sum(v * math.log(v) for v in p), rel=1e-5)
        assert bool(found["correct"][i]) == (int(z.argmax()) == y)


def test_the_worked_example_of_el2n():
    log_probs = torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.3, 0.2]]).log()
    found = signals(adapt(nn.NLLLoss()), log_probs, torch.tensor([0, 0]), 2, wanted={"el2n"})
    assert found["el2n"].tolist() == pytest.approx([0.374166, 0.616441], abs=1e-6)


def test_means_over_valid_positions():
    outputs, targets = randn(B, C, T), indices(B, T)
    targets[0, 1:] = -100
    targets[1] = -100
    adapter = adapt(nn.CrossEntropyLoss())
    whole = signals(adapter, outputs, targets, B, wanted={"el2n", "margin", "entropy"})
    first = signals(
        adapter, outputs[:, :, 0], targets[:, 0], B, wanted={"el2n", "margin", "entropy"}
    )
    for name in ("el2n", "margin", "entropy"):
        assert whole[name][0] == pytest.approx(first[name][0].item(), rel=1e-5)
        assert whole[name][1] == 0


def test_two_classes_and_one():
    for c in (1, 2):
        found = signals(
            adapt(nn.CrossEntropyLoss()),
            torch.zeros(1, c),
            torch.tensor([0]),
            1,
            wanted={"margin", "entropy"},
        )
        assert found["margin"].item() == pytest.approx(1.0 if c == 1 else 0.0)
        assert found["entropy"].item() == pytest.approx(math.log(c))


def test_what_is_not_finite_shows():
    outputs = randn(B, C)
    outputs[3, 1] = math.nan
    found = signals(
        adapt(nn.CrossEntropyLoss()), outputs, indices(B), B, wanted={"grad_norm", "el2n"}
    )
    assert (
        found["grad_norm"].isnan().tolist()
        == found["el2n"].isnan().tolist()
        == [i == 3 for i in range(B)]
    )


@pytest.mark.parametrize(
    ("outputs", "wanted", "message"),
    [
        (randn(B, C), {"el2n"}, "`el2n` is not defined for criterion MSELoss"),
        (randn(B, C), {"margin", "entropy"}, "`entropy` and `margin` are not defined"),
        ({"out": randn(B, C)}, {"grad_norm"}, "`grad_norm` is not defined"),
    ],
)
def test_signals_that_there_are_not(outputs, wanted, message):
    adapter = (
        adapt(lambda o, t: o["out"].mean(1)) if isinstance(outputs, dict) else adapt(nn.MSELoss())
    )
    with pytest.raises(ValueError, match=message):
        signals(adapter, outputs, randn(B, C), B, wanted=wanted)


def test_a_loss_without_gradient():
    with pytest.raises(ValueError, match="`grad_norm` is not defined"):
        signals(
            adapt(lambda o, t: (o > t).float()), randn(B, C), randn(B, C), B, wanted={"grad_norm"}
        )


@pytest.mark.parametrize(
    "criterion",
    [nn.NLLLoss(ignore_index=0), nn.CrossEntropyLoss(ignore_index=0, label_smoothing=0.1)],
)
def test_outputs_stay_as_they_are(criterion):
    log_probs, targets = randn(B, C).log_softmax(1), indices(B)
    before = log_probs.clone()
    errors(adapt(criterion), log_probs, targets, B)
    signals(
        adapt(criterion), log_probs, targets, B, wanted={"el2n", "grad_norm", "margin", "entropy"}
    )
    assert torch.equal(log_probs, before)


def test_one_class_a_sample():
    for targets, expected in (
        (torch.tensor([2, 0]), [2, 0]),
        (torch.tensor([[0.1, 0.9, 0.0], [0.6, 0.4, 0.0]]), [1, 0]),
    ):
        found = signals(adapt(nn.CrossEntropyLoss()), randn(2, 3), targets, 2, wanted={"label"})
        assert found["label"].tolist() == expected and found["label"].dtype == torch.int64


@pytest.mark.parametrize(
    ("n", "targets"),
    [
        (2, torch.zeros(4, dtype=torch.int64)),
        (3, torch.zeros(3, 2, dtype=torch.int64)),
        (3, torch.zeros(3, C, 2)),
    ],
)
def test_targets_without_one_class_a_sample(n, targets):
    outputs = randn(4, C) if n == 2 else randn(3, C, 2)
    message = rf"one class per sample is needed: targets of shape \({n},\), int64, or probabilities of shape \({n}, C\), got "
    with pytest.raises(ValueError, match=message):
        signals(adapt(nn.CrossEntropyLoss()), outputs, targets, n, 4 // n, wanted={"label"})


def focal(outputs, targets):
    likelihood = F.cross_entropy(outputs, targets, reduction="none")
    return (1 - (-likelihood).exp()) ** 2 * likelihood


@pytest.mark.parametrize(
    ("criterion", "plain"),
    [
        (nn.MultiMarginLoss(), nn.MultiMarginLoss(reduction="none")),
        (focal, focal),
        (nn.BCEWithLogitsLoss(pos_weight=torch.arange(1.0, C + 1)), None),
        (nn.BCEWithLogitsLoss(weight=torch.arange(1.0, C + 1)), None),
        (nn.KLDivLoss(reduction="batchmean", log_target=True), None),
        (nn.KLDivLoss(reduction="mean"), None),
    ],
    ids=["margin", "focal", "pos_weight", "weight", "log_target", "mean"],
)
def test_criteria_whose_gradient_is_not_that_of_cross_entropy(criterion, plain):
    outputs = randn(B, C)
    if plain is not None:
        targets = indices(B)
        loss = lambda leaf, i: plain(leaf, targets)[i]  # noqa: E731
        given = outputs
    elif isinstance(criterion, nn.KLDivLoss):
        targets = randn(B, C, seed=5).softmax(1)
        targets = targets.log() if criterion.log_target else targets
        over = 1 if criterion.reduction == "batchmean" else C
        per = nn.KLDivLoss(reduction="none", log_target=criterion.log_target)
        loss = lambda leaf, i: per(leaf.log_softmax(1), targets)[i].sum() / over  # noqa: E731
        given = outputs.log_softmax(1)
    else:
        targets = indices(B, C, top=2).float()
        one = nn.BCEWithLogitsLoss(
            weight=criterion.weight, pos_weight=criterion.pos_weight, reduction="none"
        )
        loss = lambda leaf, i: one(leaf, targets)[i].mean()  # noqa: E731
        given = outputs
    found = errors(adapt(criterion), given, targets, B)
    assert torch.allclose(found, by_autograd(loss, outputs, B), atol=1e-6)


def test_targets_that_are_logarithms():
    outputs, targets = randn(B, C).log_softmax(1), randn(B, C, seed=3).softmax(1)
    plain = signals(
        adapt(nn.KLDivLoss(reduction="batchmean")), outputs, targets, B, wanted={"el2n", "margin"}
    )
    adapter = adapt(nn.KLDivLoss(reduction="batchmean", log_target=True))
    logs = signals(adapter, outputs, targets.log(), B, wanted={"el2n", "margin"})
    assert torch.allclose(plain["el2n"], logs["el2n"], atol=1e-6) and torch.allclose(
        plain["margin"], logs["margin"], atol=1e-6
    )
