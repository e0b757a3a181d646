import pytest
import torch
from torch.utils.data import TensorDataset

from thresher_lab.recipes.running import task_of
from thresher_lab.tasks import TASKS, images
from thresher_lab.tasks.base import Data

COLORED = ("cifar10", "cifar100", "svhn")


@pytest.mark.parametrize("name", [task.name for task in images.IMAGE_TASKS])
def test_networks_fit_their_images_and_seeds_fix_them(name):
    task = task_of(name)
    state = torch.get_rng_state()
    model, same, other = task.build(3), task.build(3), task.build(4)
    assert torch.equal(torch.get_rng_state(), state)
    shape = (3, 32, 32) if name.startswith(COLORED) else (1, 28, 28)
    shape = (1, 8, 8) if name == "digits" else shape
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


@pytest.mark.parametrize("name", ["cifar10-resnet8", "cifar10-resnet20"])
def test_cifar10_is_trained_on_new_crops_in_each_epoch(name):
    task = task_of(name)
    pictures, labels = torch.rand(6, 3, 32, 32) + 1, torch.arange(6)
    data = Data(TensorDataset(pictures, labels), pictures, labels)
    loader = task.training(data, 0).loader
    torch.manual_seed(0)
    [(first, targets)], [(second, others)] = list(loader), list(loader)
    assert not torch.equal(first[targets.argsort()], second[others.argsort()])
    assert (first == 0).any() and {*first.unique().tolist()} <= {0.0, *pictures.unique().tolist()}
    torch.manual_seed(0)
    [(again, _)] = list(task.training(data, 0).loader)
    assert torch.equal(first, again)


def test_the_learning_rate_on_cifar10_falls_in_three_steps():
    factors = [TASKS["cifar10-resnet8"].lr_factor(done / 40) for done in (0, 11, 12, 24, 32, 39)]
    assert factors == pytest.approx([1, 1, 0.2, 0.04, 0.008, 0.008])
