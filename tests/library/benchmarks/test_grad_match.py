"""The benchmark of GRAD-MATCH: that it measures what it says, runs, judges and writes."""

import pytest
import torch
from benchmarks import grad_match

from thresher import EpochPlan

TINY = ["--quick", "--n", "300", "--classes", "5", "--width", "8"]


def test_similarity_by_hand() -> None:
    layer = {
        "error": torch.tensor([[1.0, 0], [3, 0], [2, 3]]),
        "feature": torch.tensor([[0.0], [1.0], [1.0]]),
    }
    one = EpochPlan(torch.tensor([1]))
    # Bias: (2, 1) of all, (3, 0) of one. With the weights of the layer: (2, 5 / 3, 1, 1) and (3, 3, 0, 0).
    assert grad_match.similarity(layer, one, full=False) == pytest.approx((1 / 5**0.5, 6 / 5))
    energy = 4 + 25 / 9 + 2
    assert grad_match.similarity(layer, one, full=True) == pytest.approx(
        ((1 - 121 / (18 * energy)) ** 0.5, 11 / energy)
    )
    weighed = EpochPlan(torch.tensor([0, 2]), torch.tensor([4.0, 2.0]))  # (4, 3)
    assert grad_match.similarity(layer, weighed, full=False) == pytest.approx(
        (2 / (5 * 5**0.5), 11 / 5)
    )


def test_the_made_up_layer_is_that_of_a_classifier() -> None:
    layer = grad_match.made_up_layer(400, 100, 512)
    assert torch.allclose(layer["error"].sum(1), torch.zeros(400), atol=1e-5)
    assert (layer["feature"] >= 0).all()
    right = 1 + layer["error"].amin(1)
    assert 0.3 < right.mean() < 0.8
