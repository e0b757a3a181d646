"""Features are the input of the linear layer that ran last, wherever it was registered."""

import pytest
import torch
from torch import nn

from thresher.passes.engine import watch_last_linear


class Reversed(nn.Module):
    """Registers its head first."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 2)
        self.body = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.body(x))


def test_the_layer_that_ran_last_counts_not_the_one_registered_last():
    model, x = Reversed(), torch.randn(5, 4)
    with watch_last_linear(model) as last:
        model(x)
        layer, feature = last.take()
    assert layer is model.head
    assert torch.equal(feature, model.body(x))


def test_each_forward_pass_is_taken_once_and_the_hooks_go():
    model = Reversed()
    with watch_last_linear(model) as last:
        model(torch.randn(5, 4))
        last.take()
        with pytest.raises(ValueError, match=r"Reversed has no nn\.Linear that runs"):
            last.take()
    assert not any(part._forward_pre_hooks for part in model.modules())


def test_a_model_without_a_linear_layer():
    with pytest.raises(ValueError, match=r"ReLU has no nn\.Linear$"), watch_last_linear(nn.ReLU()):
        pass
