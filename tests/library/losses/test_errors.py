"""Gradients of single samples' losses with respect to outputs, and the signals made of them: against autograd and loops."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from thresher.attribution.rows import RowLayout
from thresher.losses.adapters import adapt
from thresher.losses.signals import as_classes, class_errors, of_classes

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
        losses = F.cross_entropy(leaf, targets, reduction="none", label_smoothing=smoothing).reshape(B, -1)[i]
        return losses.sum() / (~ignored).reshape(B, -1)[i].sum().clamp(min=1)

    found = adapt(nn.CrossEntropyLoss(label_smoothing=smoothing)).errors(outputs, targets, RowLayout(B, None))
    assert torch.allclose(found, by_autograd(loss, outputs, B), atol=1e-6)
    if len(shape) > 2:
        assert not found[0].any()


def test_cross_entropy_with_an_ignored_index_that_is_no_class():
    targets = indices(B)
    targets[2] = 255
    found = adapt(nn.CrossEntropyLoss(ignore_index=255)).errors(randn(B, C), targets, RowLayout(B))
    assert not found[2].any() and bool(found[[0, 1, 3]].any(1).all())


def test_class_weights_do_not_count():
    outputs, targets = randn(B, C), indices(B)
    weighted = adapt(nn.CrossEntropyLoss(weight=torch.arange(1.0, C + 1)))
    assert torch.equal(
        weighted.errors(outputs, targets, RowLayout(B)), adapt(nn.CrossEntropyLoss()).errors(outputs, targets, RowLayout(B))
    )


def test_flattened_tokens():
    outputs, targets = randn(B * T, C), indices(B * T)
    found = adapt(nn.CrossEntropyLoss()).errors(outputs, targets, RowLayout(B, T))

    def loss(leaf, i):
        return F.cross_entropy(leaf, targets, reduction="none").reshape(B, T)[i].mean()

    assert found.shape == (B, T * C)
    assert torch.allclose(found, by_autograd(loss, outputs, B), atol=1e-6)


def test_probabilities_as_targets():
    outputs, targets = randn(B, C), randn(B, C, seed=5).softmax(1)
    found = adapt(nn.CrossEntropyLoss()).errors(outputs, targets, RowLayout(B))
    loss = lambda leaf, i: F.cross_entropy(leaf, targets, reduction="none")[i]  # noqa: E731
    assert torch.allclose(found, by_autograd(loss, outputs, B), atol=1e-6)


def test_outputs_after_the_softmax_are_taken_before_it():
    outputs, targets = randn(B, C), indices(B)
    wanted = adapt(nn.CrossEntropyLoss()).errors(outputs, targets, RowLayout(B))
    assert torch.allclose(adapt(nn.NLLLoss()).errors(outputs.log_softmax(1), targets, RowLayout(B)), wanted, atol=1e-6)
    right = indices(B, C, top=2).float()
    before = adapt(nn.BCEWithLogitsLoss()).errors(outputs, right, RowLayout(B))
    assert torch.allclose(adapt(nn.BCELoss()).errors(outputs.sigmoid(), right, RowLayout(B)), before, atol=1e-6)


@pytest.mark.parametrize("criterion", [nn.MSELoss(), nn.SmoothL1Loss(), nn.BCEWithLogitsLoss(), lambda o, t: (o - t) ** 4])
def test_any_criterion(criterion):
    outputs, targets = randn(B, C), indices(B, C, top=2).float()
    plain = getattr(nn, type(criterion).__name__)(reduction="none") if isinstance(criterion, nn.Module) else criterion
    found = adapt(criterion).errors(outputs, targets, RowLayout(B))
    assert torch.allclose(found, by_autograd(lambda leaf, i: plain(leaf, targets)[i].mean(), outputs, B), atol=1e-6)
    norms = adapt(criterion).signals(outputs, targets, RowLayout(B), {"grad_norm"})["grad_norm"]
    assert norms.tolist() == pytest.approx(found.norm(dim=1).tolist())


def test_norms_of_one_label_a_sample():
    outputs, targets = randn(B, C) * 2, indices(B)
    wanted = {"grad_norm", "el2n", "margin", "entropy", "correct"}
    found = adapt(nn.CrossEntropyLoss()).signals(outputs, targets, RowLayout(B), wanted)
    for i, (z, y) in enumerate(zip(outputs.double().numpy(), targets.tolist(), strict=True)):
        p = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
        assert found["el2n"][i] == pytest.approx(math.dist(p, np.eye(C)[y]), rel=1e-5)
        assert found["grad_norm"][i] == pytest.approx(math.dist(p, np.eye(C)[y]), rel=1e-5)
        assert found["margin"][i] == pytest.approx(p[y] - max(p[k] for k in range(C) if k != y), rel=1e-4, abs=1e-6)
        assert found["entropy"][i] == pytest.approx(-sum(v * math.log(v) for v in p), rel=1e-5)
        assert bool(found["correct"][i]) == (int(z.argmax()) == y)


def test_the_worked_example_of_el2n():
    log_probs = torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.3, 0.2]]).log()
    found = of_classes(log_probs, torch.tensor([0, 0]), {"el2n"}, n=2)
    assert found["el2n"].tolist() == pytest.approx([0.374166, 0.616441], abs=1e-6)


def test_means_over_valid_positions():
    outputs, targets = randn(B, C, T), indices(B, T)
    targets[0, 1:] = -100
    targets[1] = -100
    adapter = adapt(nn.CrossEntropyLoss())
    whole = adapter.signals(outputs, targets, RowLayout(B), {"el2n", "margin", "entropy"})
    first = adapter.signals(outputs[:, :, 0], targets[:, 0], RowLayout(B), {"el2n", "margin", "entropy"})
    for name in ("el2n", "margin", "entropy"):
        assert whole[name][0] == pytest.approx(first[name][0].item(), rel=1e-5)
        assert whole[name][1] == 0


def test_two_classes_and_one():
    for c in (1, 2):
        found = of_classes(torch.zeros(1, c).log_softmax(1), torch.tensor([0]), {"margin", "entropy"}, n=1)
        assert found["margin"].item() == pytest.approx(1.0 if c == 1 else 0.0)
        assert found["entropy"].item() == pytest.approx(math.log(c))


def test_what_is_not_finite_shows():
    outputs = randn(B, C)
    outputs[3, 1] = math.nan
    found = adapt(nn.CrossEntropyLoss()).signals(outputs, indices(B), RowLayout(B), {"grad_norm", "el2n"})
    assert found["grad_norm"].isnan().tolist() == found["el2n"].isnan().tolist() == [i == 3 for i in range(B)]


@pytest.mark.parametrize(
    ("outputs", "wanted", "message"),
    [
        (randn(B, C), {"el2n"}, "`el2n` is not defined for criterion MSELoss"),
        (randn(B, C), {"margin", "entropy"}, "`entropy` and `margin` are not defined"),
        ({"out": randn(B, C)}, {"grad_norm"}, "`grad_norm` is not defined"),
    ],
)
def test_signals_that_there_are_not(outputs, wanted, message):
    adapter = adapt(lambda o, t: o["out"].mean(1)) if isinstance(outputs, dict) else adapt(nn.MSELoss())
    with pytest.raises(ValueError, match=message):
        adapter.signals(outputs, randn(B, C), RowLayout(B), wanted)


def test_a_loss_without_gradient():
    with pytest.raises(ValueError, match="`grad_norm` is not defined"):
        adapt(lambda o, t: (o > t).float()).signals(randn(B, C), randn(B, C), RowLayout(B), {"grad_norm"})


def test_class_errors_do_not_change_their_input():
    log_probs, targets = randn(B, C).log_softmax(1), indices(B)
    before = log_probs.clone()
    class_errors(log_probs, targets, valid=targets > 0, smoothing=0.1)
    assert torch.equal(log_probs, before)


def test_one_class_a_sample():
    assert as_classes(torch.tensor([2, 0], dtype=torch.int32), 2).tolist() == [2, 0]
    assert as_classes(torch.tensor([[0.1, 0.9], [0.6, 0.4]]), 2).tolist() == [1, 0]


@pytest.mark.parametrize("targets", [torch.zeros(3), torch.zeros(2, dtype=torch.int64), torch.zeros(3, 2, 2), [1, 2, 3]])
def test_targets_without_one_class_a_sample(targets):
    message = r"one class per sample is needed: targets of shape \(3,\), int64, or probabilities of shape \(3, C\)"
    with pytest.raises(ValueError, match=message):
        as_classes(targets, 3)


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
        one = nn.BCEWithLogitsLoss(weight=criterion.weight, pos_weight=criterion.pos_weight, reduction="none")
        loss = lambda leaf, i: one(leaf, targets)[i].mean()  # noqa: E731
        given = outputs
    found = adapt(criterion).errors(given, targets, RowLayout(B))
    assert torch.allclose(found, by_autograd(loss, outputs, B), atol=1e-6)


def test_targets_that_are_logarithms():
    outputs, targets = randn(B, C).log_softmax(1), randn(B, C, seed=3).softmax(1)
    plain = adapt(nn.KLDivLoss(reduction="batchmean")).signals(outputs, targets, RowLayout(B), {"el2n", "margin"})
    adapter = adapt(nn.KLDivLoss(reduction="batchmean", log_target=True))
    logs = adapter.signals(outputs, targets.log(), RowLayout(B), {"el2n", "margin"})
    assert torch.allclose(plain["el2n"], logs["el2n"], atol=1e-6) and torch.allclose(plain["margin"], logs["margin"], atol=1e-6)
