import re
from dataclasses import replace

import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import TensorDataset

from subset_cases import optional
from thresher_lab.recipes import schema as loading
from thresher_lab.recipes.datasets import TrainAndTest
from thresher_lab.recipes.schema import Recipe
from thresher_lab.recipes.task import (
    LearningRateFactor,
    RecipeTask,
    WeightAverage,
    criterion_of,
    one_method,
    optimizer_of,
    start_from,
)
from thresher_lab.tasks.base import Data, Task

CONTENT = """
title: a recipe
paper: {title: a paper, where: a table}
data: {name: rows, kind: task, task: line, samples: 40, shape: [1]}
model: {source: task, name: perceptron, arguments: {width: 8}}
method: "kakurenbo:max_fraction=0.2:warmup_epochs=4"
epochs: 8
batch: {workers: 4, per_worker: 5}
optimizer: {name: sgd, lr: 0.1, lr_per: worker, momentum: 0.9}
loss: {name: mse}
metric: -loss
published: []
"""


def content(**more):
    return yaml.safe_load(CONTENT) | more


@pytest.fixture
def of(tmp_path):
    """A recipe in a file of its own."""

    def make(**more):
        file = tmp_path / "mine.yaml"
        file.write_text(yaml.safe_dump(content(**more)))
        return RecipeTask.of(str(file))

    return make


def test_is_what_a_comparison_trains(of):
    task = of()
    assert (
        task.name == f"recipe:{task.file}"
        and RecipeTask.of("resnet50-a").name == "recipe:resnet50-a"
    )
    assert (
        task.recipe["batch"] == {"workers": 4, "per_worker": 5, "accumulate": 1}
        and "published" not in task.recipe
    )
    assert task.find(None) is None
    training = task.training(task.load(None), 3)
    assert training.loader.batch_size == 20 and training.metric == "-loss"
    assert training.optimizer.param_groups[0]["lr"] == pytest.approx(0.4)
    assert isinstance(training.schedule, LearningRateFactor) and training.schedule.epochs == 8
    assert training.evaluate(training.model) < 0


def test_the_seed_decides_weights_and_order_and_nothing_else_is_touched(of):
    task = of()
    data = task.load(None)
    state = torch.get_rng_state()
    first, again, other = (task.training(data, seed) for seed in (1, 1, 2))
    orders = [next(iter(training.loader))[0] for training in (first, again, other)]
    weights = [training.model.state_dict()["1.weight"] for training in (first, again, other)]
    for same, different, reference in (
        (orders[1], orders[2], orders[0]),
        (weights[1], weights[2], weights[0]),
    ):
        assert torch.equal(same, reference) and not torch.equal(different, reference)
    assert torch.equal(torch.get_rng_state(), state)


def test_testing_draws_nothing(of):
    training = of().training(of().load(None), 0)
    state = torch.get_rng_state()
    training.evaluate(training.model)
    assert torch.equal(torch.get_rng_state(), state)


def test_counts_of_epochs_in_the_method_shrink_with_the_training(of):
    assert of().spec().given["warmup_epochs"] == 4
    assert replace(of(), shortened=4).spec().given["warmup_epochs"] == 2
    assert replace(of(), shortened=80).spec().given["warmup_epochs"] == 4
    assert (
        of().spec("uniform:keep=0.5+selective_backprop:keep=0.5").name
        == "uniform+selective_backprop"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kakurembo", "no method 'kakurembo'; did you mean 'kakurenbo'? There are ada_boost"),
        (
            "kakurenbo:tau=2",
            "kakurenbo:tau=2: Kakurenbo: `tau` must be a number within [0, 1], got 2",
        ),
        (
            "full,uniform",
            "one method is wanted, those of several stages joined by a plus; got 'full,uniform'",
        ),
    ],
)
def test_a_wrong_method_is_told_with_its_place(of, text, message):
    task = of(method=text)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{task.file}: method: {message}')}"):
        task.spec()
    with pytest.raises(ValueError, match=f"^--method: {re.escape(message)}"):
        of().spec(text)


def test_scores_that_are_not_there(of, tmp_path):
    task = of(method=f"prune:scores={tmp_path / 'el2n.parquet'}:keep=0.5")
    command = f"`thresher score --task recipe:{task.file} --data DIR --out {tmp_path / 'el2n.parquet'}` makes it"
    with pytest.raises(
        FileNotFoundError, match=f"mine.yaml: method: no file of scores .*{re.escape(command)}"
    ):
        task.spec()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"data": content()["data"] | {"task": "lime"}},
            "no task 'lime'; did you mean 'line'\\? There are digits",
        ),
        (
            {"data": content()["data"] | {"shape": [2]}},
            r"data.shape: \(2,\), but samples of the task line have shape \(1,\)",
        ),
        (
            {"model": {"source": "thresher", "name": "resnet1"}},
            "model.name: no network 'resnet1'; did you mean 'resnet18'\\? There are",
        ),
        (
            {"model": content()["model"] | {"arguments": {"layers": 3}}},
            "model.arguments: .*'layers'",
        ),
        (
            {"model": {"source": "thresher", "name": "unet", "arguments": {"size": 3}}},
            "model.arguments: .*'size'",
        ),
        (
            {"optimizer": {"name": "sgd", "lr": 1, "arguments": {"speed": 3}}},
            "optimizer.arguments: .*'speed'",
        ),
        (
            {"model": content()["model"] | {"pretrained": "resnet50"}},
            "model.pretrained: it starts from the weights of resnet50",
        ),
    ],
)
def test_what_cannot_be_is_told_with_the_file(of, change, message):
    task = of(**change)
    with pytest.raises(ValueError, match=f"^{re.escape(str(task.file))}: {message}"):
        task.training(task.load(task.find(None)), 0)


def test_weights_are_for_recipes_that_start_from_some(of, tmp_path):
    with pytest.raises(
        ValueError, match="--weights .*model.pt: `model.pretrained` names no recipe to start from"
    ):
        replace(of(), weights=tmp_path / "model.pt").build(0)


def test_data_that_is_not_there_is_told_with_the_file(of, tmp_path):
    task = of(data={"name": "images", "kind": "folder", "samples": 3, "classes": 2})
    with pytest.raises(
        FileNotFoundError,
        match=f"^{re.escape(str(task.file))}: data: images is not there by itself",
    ):
        task.find(None)
    with pytest.raises(
        FileNotFoundError, match=f"data: no folder {re.escape(str(tmp_path / 'train'))} and no"
    ):
        task.find(tmp_path)


def small(**more):
    return Recipe.model_validate(content(**more))


def optimizer(**settings):
    return optimizer_of(small(optimizer=settings), nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)))


def test_optimizers():
    optional("timm")
    sgd = optimizer(name="sgd", lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.01)
    assert isinstance(sgd, torch.optim.SGD) and len(sgd.param_groups) == 1
    assert [sgd.defaults[name] for name in ("lr", "momentum", "nesterov", "weight_decay")] == [
        0.1,
        0.8,
        True,
        0.01,
    ]
    assert isinstance(
        optimizer(name="adamw", lr=0.1, arguments={"betas": [0.5, 0.6]}), torch.optim.AdamW
    )
    assert type(optimizer(name="lamb", lr=0.1)).__name__ == "Lamb"
    rmsprop = optimizer(name="rmsprop", lr=0.1, momentum=0.7, arguments={"alpha": 0.5})
    assert (type(rmsprop).__name__, rmsprop.defaults["momentum"], rmsprop.defaults["alpha"]) == (
        "RMSpropTF",
        0.7,
        0.5,
    )


def test_norms_and_biases_may_go_without_weight_decay():
    groups = optimizer(name="sgd", lr=0.1, weight_decay=0.01, decay_norms=False).param_groups
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [
        (1, 0.01),
        (3, 0.0),
    ]


def test_losses():
    classes = {"name": "x", "kind": "folder", "samples": 3, "classes": 2}
    hard = criterion_of(small(data=classes, loss={"label_smoothing": 0.1, "class_weights": [1, 3]}))
    soft = criterion_of(small(data=classes, loss={"label_smoothing": 0.1, "soft_targets": True}))
    assert hard.label_smoothing == 0.1 and hard.weight.tolist() == [1, 3]
    assert soft.label_smoothing == 0.0 and isinstance(criterion_of(small()), nn.MSELoss)


def test_soft_targets_are_what_label_smoothing_is():
    outputs, labels = torch.randn(6, 4), torch.arange(6) % 4
    rows = torch.eye(4)[labels] * 0.9 + 0.1 / 4
    assert torch.allclose(
        nn.CrossEntropyLoss()(outputs, rows),
        nn.CrossEntropyLoss(label_smoothing=0.1)(outputs, labels),
    )


def test_the_average_is_measured(of):
    task = of(ema={"decay": 0.9, "steps": 2}, schedule={"warmup_epochs": 1})
    data = Data(
        TensorDataset(torch.randn(60, 1), torch.randn(60, 1)), torch.randn(4, 1), torch.randn(4, 1)
    )
    training = task.training(
        TrainAndTest(data.train, TensorDataset(data.test_inputs, data.test_targets)), 0
    )
    average = training.evaluate.average
    assert isinstance(average, WeightAverage) and average.model is training.model
    before = training.evaluate(training.model)
    training.optimizer.step()
    training.optimizer.step()
    nn.init.zeros_(training.model[-1].weight)
    assert average.model is not training.model and training.evaluate(
        training.model
    ) == pytest.approx(before)


@pytest.fixture
def network():
    return nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.Linear(2, 4))


def test_weights_to_start_from(network, tmp_path):
    other = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.Linear(2, 9))
    torch.save(other.state_dict(), tmp_path / "model.pt")
    head = network[2].weight.clone()
    start_from(network, tmp_path / "model.pt")
    assert torch.equal(network[0].weight, other[0].weight) and torch.equal(network[2].weight, head)


def test_weights_that_do_not_fit_change_nothing(network, tmp_path):
    file, before = tmp_path / "model.pt", network[0].weight.clone()
    with pytest.raises(FileNotFoundError, match="--weights .*model.pt: no such file"):
        start_from(network, file)
    for damaged in (b"", b"no weights at all"):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="--weights .*model.pt: not a file of weights"):
            start_from(network, file)
    torch.save([1, 2], file)
    with pytest.raises(ValueError, match="not a file of weights"):
        start_from(network, file)
    for other, message in (
        (
            nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(2), nn.Linear(2, 4)),
            r"0.bias is \(5,\) there and \(2,\) here",
        ),
        (
            nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 4)),
            r"1.bias is none there and \(2,\) here",
        ),
    ):
        torch.save(other.state_dict(), file)
        with pytest.raises(ValueError, match=f"of another network: {message}"):
            start_from(network, file)
    assert torch.equal(network[0].weight, before)


def test_a_recipe_of_the_package_is_read_once_more_by_its_name():
    task = RecipeTask.of("wrn-28-10")
    assert (
        task.settings == loading.read_recipe(task.file)
        and isinstance(task.task, Task)
        and task.task.name == "cifar100"
    )
    assert (
        one_method(task.settings.method, "").label
        == "kakurenbo:max_fraction=0.3:tau=0.7:warmup_epochs=1"
    )


@pytest.mark.parametrize(
    "name", ["adaselection-line", "adaselection-bike", "adaselection-wikitext2"]
)
def test_recipes_of_tasks_have_their_shapes(name, tmp_path):
    task = RecipeTask.of(name)
    text = tmp_path / "wiki.train.tokens"
    text.write_text("the cat sat on the mat\n" * 120)
    try:
        found = task.find(text if name == "adaselection-wikitext2" else None)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    data = task.load(found)
    assert len(data.train) == task.settings.data.samples or name == "adaselection-wikitext2"
    x, y = data.train[0]
    outputs = task.build(0)(x[None])
    assert (
        outputs.shape == y[None].shape
        if task.settings.loss.name == "mse"
        else outputs.shape == (1, 8192, 64)
    )
