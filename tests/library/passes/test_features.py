"""Features are the input of the linear layer that ran last, wherever it was registered."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from thresher.scores import grand

LOADER = DataLoader(TensorDataset(torch.randn(5, 4), torch.arange(5) % 2), 3)


class Reversed(nn.Module):
    """Registers its head first."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 2)
        self.body = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.body(x))


def test_the_layer_that_ran_last_counts_not_the_one_registered_last():
    """The norm of the gradient of that layer is that of the errors times that of its input and bias."""
    model = Reversed()
    x, y = LOADER.dataset.tensors
    error = model(x).softmax(1) - nn.functional.one_hot(y, 2)
    expected = error.norm(dim=1) * (model.body(x).square().sum(1) + 1).sqrt()
    torch.testing.assert_close(grand(model, LOADER, nn.CrossEntropyLoss()).values.float(), expected)


def test_each_forward_pass_is_taken_once_and_the_hooks_go():
    model, calls = Reversed(), []

    def forward(model, batch):
        calls.append(1)
        return model(batch[0]) if len(calls) == 1 else torch.zeros(2, 2), batch[1]

    with pytest.raises(ValueError, match=r"Reversed calls no nn\.Linear"):
        grand(model, LOADER, nn.CrossEntropyLoss(), forward=forward)
    assert len(calls) == 2 and not any(part._forward_pre_hooks for part in model.modules())


def test_a_model_without_a_linear_layer():
    with pytest.raises(ValueError, match=r"ReLU has no nn\.Linear$"):
        grand(nn.ReLU(), LOADER, nn.CrossEntropyLoss())
