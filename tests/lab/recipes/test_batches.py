from dataclasses import replace

import pytest

from thresher_lab.recipes import schema as loading
from thresher_lab.recipes import task as task_module
from thresher_lab.recipes.batches import rate_note, rate_of, with_batch
from thresher_lab.recipes.running import SmokeTask, identity
from thresher_lab.recipes.task import RecipeTask


def of(name):
    return loading.read_recipe(loading.file_of(name))


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("resnet50-a", 0.25),
        ("efficientnet-b3", 0.25),
        ("deepcam", 0.5),
        ("deit-tiny-fractal3k", 0.5),
    ],
)
def test_the_rate_follows_the_samples_of_a_step(name, factor):
    """Sgd and rmsprop in proportion, adamw and lamb by the square root."""
    recipe = of(name)
    changed = with_batch(recipe, recipe.batch.size // 16, 4)
    assert (changed.batch.size, changed.batch.step) == (
        recipe.batch.size // 16,
        recipe.batch.step // 4,
    )
    assert (
        rate_of(changed) == pytest.approx(factor * rate_of(recipe))
        and changed.schedule == recipe.schedule
    )
    note = rate_note(recipe, changed)
    assert note is not None and "\n" not in note
    assert f"{rate_of(recipe):.6g} -> {rate_of(changed):.6g} ({recipe.optimizer.name}: " in note


def test_as_many_samples_per_step_have_the_same_rate():
    recipe = of("resnet50-a")
    assert recipe.optimizer.lr_per == "worker", "or the rate could not be that of other workers"
    changed = with_batch(recipe, 128, 8)
    assert changed.batch.step == recipe.batch.step and rate_of(changed) == rate_of(recipe)
    assert rate_note(recipe, changed) is None


def test_nothing_changes_where_nothing_is_given():
    recipe = of("wrn-28-10")
    assert with_batch(recipe) is recipe and with_batch(recipe, recipe.batch.size, 1) is recipe
    assert with_batch(recipe, accumulate=2).batch.step == 2 * recipe.batch.step


def test_another_batch_is_another_training():
    task = RecipeTask.of("wrn-28-10")
    spec = task.spec()
    one, other = (
        identity(task.batched(size, many), spec, 0) for size, many in ((128, 8), (64, 16))
    )
    assert len({str(found) for found in (one, other, identity(task, spec, 0))}) == 3
    assert identity(task.batched(), spec, 0) == identity(task, spec, 0)


def test_counts_of_batches_in_the_method_grow_with_their_number(tmp_path):
    task = RecipeTask.of("selective-backprop-cifar10")
    assert (
        task.spec().given["warmup_steps"] == 391
        and task.batched(32, 4).spec().given["warmup_steps"] == 4 * 391
    )
    assert task.batched(accumulate=4).spec().given["warmup_steps"] == 391, (
        "steps of a batch method are batches"
    )
    small = SmokeTask.at("selective-backprop-cifar10", tmp_path)
    assert (
        small.batched(8).spec().given["warmup_steps"]
        == 16
        == 2 * small.spec().given["warmup_steps"]
    )


def test_the_average_of_weights_counts_steps(tmp_path, monkeypatch):
    sizes, real = [], task_module.decay_of
    monkeypatch.setattr(
        task_module,
        "decay_of",
        lambda ema, batch, epochs: sizes.append(batch) or real(ema, batch, epochs),
    )
    task = SmokeTask.at("resnet50", tmp_path, shortened=100)
    data = task.load(task.find(None))
    kinds = [
        task.batched(16).training(data, 0),
        task.batched(8, 2).training(data, 0),
        task.batched(8).training(data, 0),
    ]
    averages = [training.evaluate.average for training in kinds]
    assert averages[0]._copied == averages[1]._copied == round(averages[2]._copied / 2 + 0.1) > 0
    assert sizes == [16, 16, 8], "the samples of a step"
    assert [training.accumulate for training in kinds] == [1, 2, 1]


def test_a_recipe_of_ones_own_may_accumulate(tmp_path):
    recipe = of("wrn-28-10")
    batch = recipe.batch.model_copy(update={"accumulate": 4})
    task = replace(RecipeTask.of("wrn-28-10"), settings=recipe.model_copy(update={"batch": batch}))
    assert task.batched().settings.batch.step == 4 * recipe.batch.step
    assert task.batched(batch_size=256).settings.batch.step == recipe.batch.step
