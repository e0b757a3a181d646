from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn import functional as F

import thresher
from depth import depth
from thresher_lab.recipes.running import task_of
from thresher_lab.tasks import contours
from thresher_lab.tasks.base import training_subset
from thresher_lab.tasks.contours import FineTuning
from thresher_lab.tasks.networks import VisionTransformer
from thresher_lab.tasks.pictures import training_images
from thresher_lab.training.loop import train
from thresher_lab.training.specs import MethodSpec


@pytest.mark.parametrize("name", [task.name for task in contours.CONTOUR_TASKS])
def test_a_network_fits_its_contours_and_seeds_fix_it(name):
    task = task_of(name)
    state = torch.get_rng_state()
    model, same, other = (task.build(seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert task.build(0)(torch.zeros(2, 1, 32, 32)).shape == (2, 50)
    assert all(torch.equal(value, model[key]) for key, value in same.items())
    assert not torch.equal(model["positions"], other["positions"])


def test_a_backward_pass_over_some_rows_gives_their_gradients():
    network = partial(VisionTransformer, 32, classes=50, depth=depth(1, 4))
    task = replace(task_of("contours"), network=network)
    x, y = torch.randn(6, 1, 32, 32, generator=torch.Generator().manual_seed(0)), torch.arange(6)
    plain, wrapped = task.build(0), task.build(0)
    subset = thresher.subset_backward(wrapped, strict=True)
    for model in (plain, subset):
        F.cross_entropy(model(x), y, reduction="none")[[1, 4]].mean().backward()
    for expected, got in zip(plain.parameters(), wrapped.parameters(), strict=True):
        assert torch.allclose(got.grad, expected.grad, atol=1e-5)


def test_pretraining_is_selected_from_and_judged_by_what_comes_after():
    task = replace(task_of("contours-digits@50"), tuning=FineTuning(epochs=depth(1, 2)))
    data = task.load(task.find(None))
    few = replace(
        training_subset(data.downstream, 50),
        test_inputs=data.downstream.test_inputs[:50],
        test_targets=data.downstream.test_targets[:50],
    )
    data = replace(
        data, test_inputs=data.test_inputs[:10], test_targets=data.test_targets[:10], downstream=few
    )
    run = train(task, data, MethodSpec("uniform", {"keep": 0.5}), seed=1, epochs=2)
    assert run["metric"]["name"] == "downstream accuracy" and 0 <= run["metric"]["value"] <= 1
    assert [entry["kept"] for entry in run["history"]] == [25, 25] and run["cost"]["backward"] == 50
    assert all(
        0 <= entry["accuracy"] <= 1 and "downstream accuracy" not in entry
        for entry in run["history"]
    )
    again = train(task, data, MethodSpec("uniform", {"keep": 0.5}), seed=1, epochs=2)
    assert again["metric"] == run["metric"]


def test_recipes_tell_how_the_network_is_tuned():
    task = task_of("contours-digits")
    other = replace(task, tuning=replace(task.tuning, epochs=3))
    assert {**other.recipe, "tuning_epochs": task.tuning.epochs} == task.recipe
    assert other.recipe["tuning_epochs"] == 3 and other.recipe["lr"] == task.lr
    assert not any(name.startswith("tuning") for name in task_of("contours").recipe)


def test_contours_can_be_looked_at():
    drawn = training_images("contours-digits@50")
    assert drawn.shape == (50, 32, 32) and (drawn.min(), drawn.max()) == (0, 255)
