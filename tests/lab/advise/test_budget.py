import pytest

from thresher_lab.advise.budget import equal_seeds


@pytest.mark.parametrize(
    ("losses", "expected"), [([0.3, 0.2], []), ([0.3, 0.3], [[0, 1]]), ([None, None], [])]
)
def test_seeds_of_a_trainer_are_told_apart_by_the_loss_of_the_evaluation(losses, expected):
    """Two seeds can be equally accurate; without a loss nothing is known."""
    runs = [
        {"method": "full", "seed": seed, "metric": {"name": "eval_accuracy", "value": 1.0},
         "history": [{"eval_accuracy": 1.0, "eval_loss": loss}]}
        for seed, loss in enumerate(losses)
    ]  # fmt: skip
    assert equal_seeds(runs) == expected
