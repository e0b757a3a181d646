import pytest
import torch

from thresher_lab.recipes.running import task_of
from thresher_lab.tasks import TASKS


@pytest.mark.parametrize("name", ["digits", "mnist-5k"])
def test_data_of_packages_takes_no_folder(tmp_path, name):
    with pytest.raises(
        ValueError, match=f"--data .*the task {name} brings its data or has it from a package"
    ):
        task_of(name).find(tmp_path)


def test_unknown_task_lists_the_known():
    known = ", ".join(TASKS)
    with pytest.raises(
        ValueError, match=f"no task 'cifar'; did you mean 'cifar10'\\? There are {known}"
    ):
        task_of("cifar")
    with pytest.raises(
        ValueError, match="no task 'cifar'; did you mean 'cifar10'\\? There are digits"
    ):
        task_of("cifar@100")


def test_a_part_has_as_many_of_each_class_and_the_whole_test_set():
    whole, some = task_of("digits").load(None), task_of("digits@105").load(None)
    assert some.train.tensors[1].bincount().tolist() == [11] * 5 + [10] * 5
    assert torch.equal(some.test_inputs, whole.test_inputs) and torch.equal(
        some.test_targets, whole.test_targets
    )
    rows = {
        tuple(row.flatten().tolist()): number for number, row in enumerate(whole.train.tensors[0])
    }
    found = [rows[tuple(row.flatten().tolist())] for row in some.train.tensors[0]]
    assert found == sorted(set(found)) and whole.train.tensors[1][found].equal(
        some.train.tensors[1]
    )
    assert torch.equal(some.train.tensors[0], task_of("digits@105").load(None).train.tensors[0])


def test_a_part_is_the_task_otherwise():
    part, whole = task_of("fashion-mnist@20000"), task_of("fashion-mnist")
    assert (
        part.name == "fashion-mnist@20000"
        and part.recipe == whole.recipe
        and part.find is whole.find
    )


@pytest.mark.parametrize("samples", [9, 1439])
def test_parts_that_cannot_be(samples):
    with pytest.raises(
        ValueError, match=rf"has 10 to \d+ of them, as many of each class; got {samples}"
    ):
        task_of(f"digits@{samples}").load(None)


@pytest.mark.parametrize("name", ["digits@", "digits@x", "digits@0", "digits@-1", "digits@1.5"])
def test_parts_without_a_number(name):
    with pytest.raises(
        ValueError,
        match=f"task '{name}': write digits@SAMPLES, a number of training samples such as",
    ):
        task_of(name)


def test_a_recipe_is_a_task():
    assert task_of("recipe:resnet50-a").name == "recipe:resnet50-a"
    with pytest.raises(
        ValueError,
        match="no recipe 'resnet5'; did you mean 'resnet50'\\? There are adaselection-bike",
    ):
        task_of("recipe:resnet5")
