"""The variance of gradients of stratified batches: where classes have gradients of their own, where not, and in words."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from thresher_lab.advise.variance import VarianceRatio, about_strata, variance_ratio


def ratio(inputs, targets, held=True, size=8):
    model = nn.Linear(inputs.shape[1], 4)
    data = TensorDataset(inputs, targets) if held else TensorDataset(inputs, targets.float())

    def backward(batch):
        nn.functional.cross_entropy(model(batch[0]), batch[1].long()).backward()

    found = variance_ratio(DataLoader(data, size), backward, list(model.parameters()), 0)
    assert all(one.grad is None for one in model.parameters())
    return found


def test_classes_with_gradients_of_their_own_vary_less_in_stratified_batches():
    torch.manual_seed(0)
    targets = torch.arange(1000) % 4
    apart = ratio(torch.eye(4)[targets] * 3 + 0.3 * torch.randn(1000, 4), targets)
    assert apart.low <= apart.ratio <= apart.high < 0.35


def test_classes_that_say_nothing_about_gradients_do_not():
    torch.manual_seed(0)
    data = torch.randn(1000, 6)
    model = nn.Linear(6, 1)
    loader = DataLoader(TensorDataset(data, torch.randint(0, 4, (1000,))), 8)
    found = variance_ratio(loader, lambda batch: model(batch[0]).square().mean().backward(), list(model.parameters()), 0)
    assert 0.7 < found.ratio < 1.3


def test_it_is_not_known_without_classes_or_with_few_batches():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([])

    targets = torch.arange(1000) % 4
    assert ratio(torch.randn(1000, 3), targets, held=False) is None
    assert ratio(torch.randn(90, 3), targets[:90]) is None
    assert variance_ratio(DataLoader(Stream(), 4), lambda _: None, [], 0) is None


@pytest.mark.parametrize(
    ("found", "steps", "said"),
    [
        (None, 100, "is not known: the dataset must hold classes"),
        (VarianceRatio(0.95, 0.8, 1.1).as_dict(), 100, "(0.80 to 1.10): no clear gain by stratify='class'."),
        (
            VarianceRatio(0.5, 0.4, 0.6).as_dict(),
            900,
            "has 0.50 of the variance of random ones (0.40 to 0.60), as batches 2.0",
        ),
        (
            VarianceRatio(0.5, 0.4, 0.6).as_dict(),
            9000,
            "up to 2,000 steps, and no longer ones; this one has 9,000.",
        ),
    ],
)
def test_it_is_said_in_words(found, steps, said):
    assert said in about_strata(found, steps)
