import json

import pytest
import torch
import yaml

from thresher_lab.recipes.running import SmokeTask, run, task_of, with_batch_of
from thresher_lab.recipes.task import RecipeTask

CONTENT = """
title: a line
paper: {title: a paper, where: a table}
data: {name: line, kind: task, task: line, samples: 5000, shape: [1]}
model: {source: task, name: perceptron, arguments: {width: 8}}
method: "ada_selection:keep=0.25:forward_passes=twice"
epochs: 3
batch: {per_worker: 500}
optimizer: {name: sgd, lr: 0.01, momentum: 0.9}
schedule: {decay: step, rate: 0.1, epochs: [2]}
loss: {name: mse}
ema: {decay: 0.9, steps: 1}
metric: -loss
published: [{what: "loss", value: 1.5, where: a table}]
"""


def test_results_and_weights_are_written(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(CONTENT)
    task, seen = RecipeTask.of(str(file), shortened=2), []
    results = run(
        task, task.spec(), out=tmp_path / "out", seed=4, progress=lambda *told: seen.append(told)
    )
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    assert written == json.loads(json.dumps(results))
    assert list(written) == [
        "task",
        "epochs",
        "device",
        "processes",
        "versions",
        "recipe",
        "published",
        "runs",
    ]
    [trained] = written["runs"]
    assert (written["epochs"], trained["seed"], len(trained["history"])) == (2, 4, 2)
    assert (
        written["recipe"]["batch"]["per_worker"] == 500 and written["published"][0]["value"] == 1.5
    )
    assert [value for _, value in seen] == [entry["-loss"] for entry in trained["history"]]
    assert (
        trained["metric"] == {"name": "-loss", "value": seen[-1][1]}
        and trained["cost"]["backward"] == 2 * 1250
    )
    fields = {"forward", "backward", "steps", "cost", "wall_s", "cpu_s", "loss_histogram"}
    assert all(fields <= set(entry) for entry in trained["history"])

    model = task.build(0)
    model.load_state_dict(torch.load(tmp_path / "out" / "model.pt", weights_only=True))
    test = task.training(task.load(None), 0).evaluate
    assert test(model) != seen[-1][1], "its average is measured, which is that of another network"
    direct = RecipeTask.of(str(written_without_average(tmp_path)))
    assert direct.training(direct.load(None), 0).evaluate(model) == seen[-1][1]


def written_without_average(tmp_path):
    file = tmp_path / "direct.yaml"
    file.write_text(
        yaml.safe_dump(
            {name: value for name, value in yaml.safe_load(CONTENT).items() if name != "ema"}
        )
    )
    return file


def test_the_name_of_a_recipe_with_another_batch():
    assert (
        with_batch_of("recipe:wrn-28-10", None, None)
        == "recipe:wrn-28-10"
        == with_batch_of("recipe:wrn-28-10", 1024, 1)
    )
    named = with_batch_of("smoke:wrn-28-10", 4, None)
    assert (
        named == "smoke:wrn-28-10@4x1"
        and with_batch_of("recipe:wrn-28-10", None, 2) == "recipe:wrn-28-10@1024x2"
    )
    task = task_of(named)
    assert isinstance(task, SmokeTask) and task.settings.batch.step == 4 and task.before is not None
    assert task_of("digits@100").name == "digits@100"
    with pytest.raises(
        ValueError,
        match="--batch-size and --accumulate are for recipes, .*; set the batch of digits there",
    ):
        with_batch_of("digits", 8, None)
