import pytest
import torch

from thresher.experiments.tasks import images, task_of


@pytest.mark.parametrize("name", [task.name for task in images.TASKS])
def test_networks_fit_their_images_and_seeds_fix_them(name):
    task = task_of(name)
    state = torch.get_rng_state()
    model, same, other = task.build(3), task.build(3), task.build(4)
    assert torch.equal(torch.get_rng_state(), state)
    side = 8 if name == "digits" else 28
    assert model(torch.zeros(2, 1, side, side)).shape == (2, 10)
    weights, others = model.state_dict(), other.state_dict()
    assert all(
        torch.equal(value, weights[key]) or "running" in key or "num_" in key for key, value in same.state_dict().items()
    )
    first = next(iter(weights))
    assert first.endswith("weight") and not torch.equal(weights[first], others[first])


def test_resnet8_has_eight_layers_of_weights():
    kinds = [type(part).__name__ for part in task_of("fashion-mnist-resnet8").build(0).modules()]
    shortcuts = 2
    assert kinds.count("Conv2d") - shortcuts + kinds.count("Linear") == 8
