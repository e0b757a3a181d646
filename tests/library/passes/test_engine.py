"""Own forward passes leave no trace; one engine reads outputs, features and labels."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from thresher import subset_backward
from thresher.passes.engine import (
    answers,
    check_plain,
    device_of_model,
    isolated_pass,
    labels_or_none,
    plain_forward,
)

CPU = torch.device("cpu")


def draw_everywhere():
    return torch.rand(1).item(), float(np.random.rand()), random.random()


@pytest.mark.parametrize("training", [False, True])
def test_modes_and_random_states_are_put_back(training):
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    model[1].eval()
    own = torch.Generator().manual_seed(3)
    before = (
        torch.get_rng_state(),
        np.random.get_state()[1].copy(),
        random.getstate(),
        own.get_state(),
    )
    with isolated_pass([model], devices=[CPU], generators=[own], training=training):
        assert [part.training for part in model.modules()] == [training] * 3
        assert not torch.is_grad_enabled()
        draw_everywhere()
        torch.rand(1, generator=own)
    assert [part.training for part in model.modules()] == [True, True, False]
    assert torch.is_grad_enabled()
    after = torch.get_rng_state(), np.random.get_state()[1], random.getstate(), own.get_state()
    assert (
        torch.equal(before[0], after[0]) and (before[1] == after[1]).all() and before[2] == after[2]
    )
    assert torch.equal(before[3], after[3])


def test_modes_are_put_back_after_an_error_and_inside_a_wrapped_model():
    inner = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    model = subset_backward(inner)
    with pytest.raises(RuntimeError, match="stop"), isolated_pass([model], devices=[CPU]):
        assert not inner.training
        raise RuntimeError("stop")
    assert inner.training and model.training


@pytest.mark.parametrize(
    ("dtype", "expected"), [(None, None), (torch.float32, None), (torch.bfloat16, torch.bfloat16)]
)
def test_autocast(dtype, expected):
    with isolated_pass([nn.Linear(1, 1)], devices=[CPU], dtype=dtype):
        found = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    assert found is expected


def test_answers_of_several_models():
    models = [nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))]
    x, y = torch.randn(5, 3), torch.arange(5)
    (found,) = answers(models, [((x, y), 5)], plain_forward, features=True)
    assert (
        torch.equal(found[0].outputs, models[0](x))
        and torch.equal(found[0].feature, x)
        and found[0].head is models[0]
    )
    assert torch.equal(found[1].feature, models[1][0](x)) and found[1].head is models[1][1]
    assert found[0].targets is y and found[0].layout.n == 5
    (plain,) = answers(models, [((x, y), 5)], plain_forward)
    assert plain[0].feature is None is plain[0].head


def test_a_batch_that_is_one_tensor_is_inputs_and_targets():
    x = torch.randn(4, 3)
    outputs, targets = plain_forward(nn.Identity(), x)
    assert outputs is x is targets


@pytest.mark.parametrize("batch", [{"x": 1}, (1, 2, 3), "text"])
def test_a_batch_that_does_not_tell_inputs_from_targets(batch):
    with pytest.raises(
        ValueError,
        match=f"`forward` is needed: a batch that is {type(batch).__name__} is not a pair",
    ):
        plain_forward(nn.Identity(), batch)
    with pytest.raises(ValueError, match="`forward` is needed: Rule makes passes, and a batch"):
        check_plain(batch, "Rule makes passes, and ")


def test_device_of_a_model():
    assert device_of_model(nn.Linear(1, 1, device="meta")) == torch.device("meta")
    assert device_of_model(nn.BatchNorm1d(2, affine=False, device="meta")) == torch.device("meta")
    assert device_of_model(nn.ReLU()) is None


def test_labels_by_one_rule():
    assert labels_or_none(torch.tensor([2, 0], dtype=torch.int32), 2).tolist() == [2, 0]
    assert labels_or_none(torch.tensor([[0.2, 0.8], [1.0, 0.0]]), 2).tolist() == [1, 0]
    for no_class in (
        torch.tensor([0.5, 0.1]),
        torch.tensor([1, 2, 3]),
        torch.zeros(2, 3, dtype=torch.int64),
        "text",
        None,
    ):
        assert labels_or_none(no_class, 2) is None


def test_several_targets_of_a_regression_are_no_classes():
    """Largest of several values is no class: only probabilities are, which are not negative and add up to 1."""
    assert labels_or_none(torch.tensor([[1.5, 2.0], [0.3, -1.0]]), 2) is None
    assert labels_or_none(torch.tensor([[0.2, 0.2], [0.5, 0.5]]), 2) is None
