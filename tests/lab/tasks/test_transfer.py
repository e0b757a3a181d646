import copy

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from thresher_lab.tasks.contours import FineTuning, with_new_head


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(2, 8), nn.Linear(8, 5)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


@pytest.fixture
def model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Small()


@pytest.fixture
def samples():
    """Three classes around three points."""
    labels = torch.arange(90) % 3
    middles = 3 * torch.tensor([[0.0, 1.0], [1.0, -1.0], [-1.0, -1.0]])
    return TensorDataset(
        middles[labels] + 0.3 * torch.randn(90, 2, generator=torch.Generator().manual_seed(0)),
        labels,
    )


def alike(one, other):
    return all(
        torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items()
    )


def test_a_tuned_copy_answers_and_the_model_stays(model, samples):
    model.eval()
    before = copy.deepcopy(model)
    tuned = FineTuning(epochs=20, lr=0.02).tune(model, samples, seed=0)
    x, y = samples.tensors
    assert tuned(x).shape == (90, 3) and (tuned(x).argmax(1) == y).all()
    assert not torch.equal(tuned.body.weight, model.body.weight), "all of the network is tuned"
    assert (
        alike(model, before)
        and not model.training
        and all(p.grad is None for p in model.parameters())
    )


def test_tuning_depends_on_its_seed_alone(model, samples):
    tuned = []
    for at_large, seed in ((1, 0), (2, 0), (2, 1)):
        torch.manual_seed(at_large)
        state = torch.get_rng_state()
        tuned.append(FineTuning(epochs=2).tune(model, samples, seed))
        assert torch.equal(torch.get_rng_state(), state)
    assert alike(tuned[0], tuned[1]) and not alike(tuned[0], tuned[2])


def test_a_new_head_is_untrained_and_the_rest_is_the_model(model):
    one, same, other = (with_new_head(model, 7, seed) for seed in (0, 0, 1))
    assert (
        torch.equal(one.body.weight, model.body.weight) and one.body.weight is not model.body.weight
    )
    assert one.head.weight.shape == (7, 8) and alike(one, same) and not alike(one, other)


@pytest.mark.parametrize("model", [nn.Linear(2, 3), nn.ModuleDict({"head": nn.Conv2d(1, 1, 1)})])
def test_a_model_without_a_head(model):
    with pytest.raises(
        TypeError, match="fine-tuning replaces `head`, an nn.Linear, of the model; "
    ):
        with_new_head(model, 2, 0)
