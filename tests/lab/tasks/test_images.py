import pytest
import torch

from thresher_lab.recipes.running import task_of
from thresher_lab.tasks import TASKS, images

COLORED = ("cifar10", "cifar100", "svhn")


@pytest.mark.parametrize("name", [task.name for task in images.IMAGE_TASKS])
def test_networks_fit_their_images_and_seeds_fix_them(name):
    task = task_of(name)
    state = torch.get_rng_state()
    model, same, other = task.build(3), task.build(3), task.build(4)
    assert torch.equal(torch.get_rng_state(), state)
    shape = {"digits": (1, 8, 8), **dict.fromkeys(COLORED, (3, 32, 32))}.get(name, (1, 28, 28))
    assert model(torch.zeros(2, *shape)).shape == (2, 100 if name == "cifar100" else 10)
    weights, others = model.state_dict(), other.state_dict()
    assert all(
        torch.equal(value, weights[key]) or "running" in key or "num_" in key
        for key, value in same.state_dict().items()
    )
    first = next(iter(weights))
    assert first.endswith("weight") and not torch.equal(weights[first], others[first])


def test_resnet8_has_eight_layers_of_weights():
    kinds = [type(part).__name__ for part in task_of("fashion-mnist-resnet8").build(0).modules()]
    shortcuts = 2
    assert kinds.count("Conv2d") - shortcuts + kinds.count("Linear") == 8


@pytest.mark.parametrize("name", COLORED)
def test_colored_images_are_trained_as_in_the_paper_of_ada_selection_with_our_weight_decay(name):
    recipe = {
        "optimize": "sgd",
        "lr": 0.01,
        "batch_size": 128,
        "momentum": 0.9,
        "weight_decay": 5e-4,
    }
    assert task_of(name).recipe == recipe


@pytest.mark.parametrize("name", COLORED)
def test_colored_images_come_from_a_folder_of_the_user(name, tmp_path):
    with pytest.raises(FileNotFoundError, match=f"{name}: none of its files is in {tmp_path}"):
        task_of(name).find(tmp_path)


def test_classes_that_have_names_give_them():
    counts = {
        task.name: None if task.classes is None else len({*task.classes}) for task in TASKS.values()
    }
    assert counts["cifar100"] == 100 and counts["cifar10"] == 10 and counts["digits"] is None
    assert {count for name, count in counts.items() if name.startswith("fashion-mnist")} == {10}
