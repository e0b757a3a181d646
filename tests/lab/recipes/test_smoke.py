import pytest
import torch
import yaml

from subset_cases import optional
from thresher.scores import Scores
from thresher_lab.recipes import running as smoke
from thresher_lab.recipes.running import SmokeTask, reduced, synthetic_data
from thresher_lab.recipes.task import RecipeTask


@pytest.fixture(autouse=True)
def vision():
    optional("timm")


def of(name, folder):
    return SmokeTask.at(name, folder / "made-up")


def test_reduced_sizes_and_all_else_as_it_was(tmp_path):
    small, full = of("resnet50", tmp_path).settings, RecipeTask.of("resnet50").settings
    assert (small.batch.size, small.data.samples, small.data.classes) == (16, 128, 3)
    assert (of("resnet50", tmp_path).epochs, small.epochs) == (8, 600), (
        "its schedules are gone through in 8 epochs"
    )
    assert small.pictures is not None and full.pictures is not None
    assert (small.pictures.train_crop, small.pictures.test_resize, small.pictures.test_crop) == (
        50,
        66,
        64,
    )
    assert small.pictures.auto_augment == full.pictures.auto_augment == "ta_wide"
    assert small.model.arguments["layers"] == [1, 1, 1, 1] and small.model.name == "resnet50"
    assert (small.schedule, small.loss, small.method) == (full.schedule, full.loss, full.method)
    assert small.ema is not None and small.ema.steps == 2 and small.ema.decay == 0.99998


def test_counts_in_the_method_shrink(tmp_path):
    assert of("resnet50", tmp_path).spec().given["warmup_epochs"] == 0
    assert of("selective-backprop-cifar10", tmp_path).spec().given["warmup_steps"] == 8
    assert of("wrn-28-10", tmp_path).spec("kakurenbo:warmup_epochs=50").given["warmup_epochs"] == 2


def test_scores_are_synthetic_data(tmp_path):
    spec = of("diet-sb-resnet18-cifar100", tmp_path).spec()
    assert Scores.load(spec.parts[0].given["scores"]).samples == 128


def test_no_folder_is_taken(tmp_path):
    with pytest.raises(
        ValueError, match="with --smoke the data is made up; leave out one of the two"
    ):
        of("resnet50", tmp_path).find(tmp_path)


def test_images_and_arrays_are_files_that_the_recipe_reads(tmp_path):
    for name, shape in (("resnet50-a", (3, 64, 64)), ("deepcam", (16, 16, 24))):
        task = of(name, tmp_path / name)
        found = task.load(task.find(None))
        x, y = found.train[5]
        assert (len(found.train), len(found.test), x.shape) == (128, 32, shape)
        assert y == found.train.targets[5] if name == "resnet50-a" else y.shape == shape[1:]


def test_data_of_tasks_has_their_shape(tmp_path):
    for name, inputs, targets in (
        ("adaselection-bike", (43,), (1,)),
        ("adaselection-wikitext2", (64,), (64,)),
        ("adaselection-svhn", (3, 16, 16), ()),
    ):
        data = synthetic_data(of(name, tmp_path).settings)
        n = 32 if name == "adaselection-wikitext2" else 128
        assert data.train.tensors[0].shape == (n, *inputs) and data.train.tensors[1].shape == (
            n,
            *targets,
        )
        assert data.test_inputs.shape == (32, *inputs) and data.test_targets.shape == (32, *targets)


def test_tokens_follow_each_other(tmp_path):
    x, y = synthetic_data(of("adaselection-wikitext2", tmp_path).settings).train.tensors
    assert torch.equal(x[:, 1:], y[:, :-1]) and int(x.max()) < 50


def test_some_training_images_are_in_a_wrong_class(tmp_path):
    data = synthetic_data(of("adaselection-svhn", tmp_path).settings)
    wrong = data.train.tensors[1] != torch.arange(128) % 3
    assert wrong.nonzero().flatten().tolist() == list(range(0, 128, 10))
    assert torch.equal(data.test_targets, torch.arange(32) % 3)


def test_it_starts_from_weights_of_the_other_recipe(tmp_path):
    task = of("deit-tiny-cifar10", tmp_path)
    other = SmokeTask.at("deit-tiny-fractal3k", tmp_path).build(1).state_dict()
    made = task.build(1).state_dict()
    assert torch.equal(made["blocks.0.attn.qkv.weight"], other["blocks.0.attn.qkv.weight"])
    assert made["head.weight"].shape == (3, 48)


def test_a_recipe_of_ones_own_may_say_what_is_smaller(tmp_path):
    content = yaml.safe_load(RecipeTask.of("wrn-28-10").file.read_text())
    content["smoke"] = {"batch": {"per_worker": 3}, "data": {"samples": 40}}
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(content))
    small = reduced(RecipeTask.of(str(file)).settings, file)
    assert (small.batch.size, small.data.samples, small.data.classes) == (3, 40, smoke.CLASSES)
