import re
from pathlib import Path

import pytest
import yaml

from thresher.methods.ada_selection import AdaSelection
from thresher_lab.recipes import schema as loading
from thresher_lab.recipes.running import reduced
from thresher_lab.recipes.schema import Recipe
from thresher_lab.recipes.task import one_method

NAMES = loading.recipe_names()


def content(name="resnet50-a"):
    return yaml.safe_load(loading.file_of(name).read_bytes())


def written(tmp_path, given):
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(given))
    return file


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_is_whole(name):
    recipe = loading.read_recipe(loading.file_of(name))
    assert recipe.published and recipe.notes and recipe.not_given
    method = one_method(recipe.method, name)
    assert method.name in (
        "full",
        "kakurenbo",
        "ada_selection",
        "selective_backprop",
        "prune+selective_backprop",
    )
    unknown = {name.split(".")[0] for name in recipe.not_given} - set(Recipe.model_fields)
    assert not unknown, "what is not given is told by field"
    small = reduced(recipe, loading.file_of(name))
    changed = {
        field for field in Recipe.model_fields if getattr(small, field) != getattr(recipe, field)
    }
    assert changed <= {"batch", "data", "pictures", "ema", "model", "optimizer"}
    assert type(small.pictures) is type(recipe.pictures) and small.schedule == recipe.schedule


def test_there_is_one_for_every_experiment():
    assert len(NAMES) == 21 and sorted(NAMES) == NAMES
    assert sum(name.startswith("adaselection-") for name in NAMES) == 6
    assert sum(name.startswith("diet-sb-") for name in NAMES) == 3
    assert sum(name.startswith("selective-backprop-") for name in NAMES) == 3


def test_settings_are_those_of_the_table():
    """Rows of table 2, written down a second time."""
    table = {
        "resnet50": (600, 2048, "sgd", 1e-5, "cosine"),
        "resnet50-a": (100, 1024, "sgd", 5e-5, "step"),
        "resnet50-b": (600, 1024, "sgd", 2e-5, "cosine_after_warmup"),
        "efficientnet-b3": (100, 1024, "rmsprop", 1e-5, "step"),
        "wrn-28-10": (200, 1024, "sgd", 5e-4, "step"),
        "deit-tiny-fractal3k": (80, 512, "adamw", 0.05, "cosine_iter"),
        "deit-tiny-cifar10": (1000, 768, "sgd", 1e-4, "cosine_iter"),
        "deit-tiny-cifar100": (1000, 768, "sgd", 1e-4, "cosine_iter"),
    }
    for name, row in table.items():
        recipe = loading.read_recipe(loading.file_of(name))
        optimizer = recipe.optimizer
        got = (
            recipe.epochs,
            recipe.batch.size,
            optimizer.name,
            optimizer.weight_decay,
            recipe.schedule.decay,
        )
        assert got == row, name
    last = loading.read_recipe(loading.file_of("resnet50"))
    assert (last.loss.label_smoothing, last.ema and (last.ema.decay, last.ema.steps)) == (
        0.1,
        (0.99998, 32),
    )


def test_the_fraction_decays_at_the_published_epochs():
    changes = {
        "resnet50": [200, 400],
        "resnet50-b": [200, 400],
        "deit-tiny-fractal3k": [30, 60],
        "wrn-28-10": [60, 120, 160],
    }
    for name, epochs in changes.items():
        recipe = loading.read_recipe(loading.file_of(name))
        method = one_method(recipe.method, name).create()
        fractions = [method.fraction(epoch, recipe.epochs) for epoch in range(1, recipe.epochs)]
        assert [
            e + 1 for e in range(1, len(fractions)) if fractions[e] != fractions[e - 1]
        ] == epochs, name


def test_a_recipe_of_ones_own(tmp_path):
    recipe = loading.read_recipe(written(tmp_path, content() | {"epochs": 7}))
    assert recipe.epochs == 7 and recipe.model.name == "resnet50"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epoch": 3}, "epoch: no such field; there are paper, title, data, model"),
        (
            {"optimizer": {"name": "sgd", "lr": 0.1, "speed": 1}},
            "optimizer.speed: no such field; there are name, lr, lr_per",
        ),
        ({"pictures": {"mirror": 1}}, "pictures.mirror: no such field; there are train_crop"),
        (
            {"optimizer": {"name": "sgd", "lr": 0}},
            "optimizer.lr: input should be greater than 0; got 0",
        ),
        ({"optimizer": {"name": "sgd"}}, "optimizer.lr: this field is missing"),
        (
            {"published": [{"what": "accuracy", "where": "table"}]},
            "published.0.value: this field is missing",
        ),
        (
            {"published": [{"what": "", "where": "", "value": 1, "unit": 2}]},
            "published.0.unit: no such field; there are what",
        ),
        (
            {"epochs": "many"},
            "epochs: input should be a valid integer, unable to parse string as an integer; got 'many'",
        ),
        (
            {"schedule": {"decay": "step"}},
            "schedule: decay: step takes `rate` and either `epochs` or `every`",
        ),
        ({"schedule": {"decay": "cosine", "rate": 0.1}}, "schedule: decay: step takes `rate`"),
        (
            {"data": {"name": "x", "kind": "task", "samples": 1, "shape": [1]}},
            "data: `task` is the name of a task",
        ),
        (
            {"data": {"name": "x", "kind": "folder", "samples": 1, "shape": [1]}},
            "data: `shape` is that of a sample",
        ),
    ],
)
def test_a_wrong_field_is_named_with_its_file(tmp_path, change, message):
    file = written(tmp_path, content() | change)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{file}: {message}')}") as caught:
        loading.read_recipe(file)
    assert "pydantic" not in str(caught.value)


def test_every_mistake_has_a_line(tmp_path):
    with pytest.raises(
        ValueError, match=r"mine.yaml: epochs: .*\n.*mine.yaml: epoch: no such field"
    ):
        loading.read_recipe(written(tmp_path, content() | {"epoch": 3, "epochs": 0}))


def test_files_of_the_package_are_named_as_in_the_repository(tmp_path, monkeypatch):
    folder = tmp_path / "recipes"
    folder.mkdir()
    monkeypatch.setattr(loading, "folder", lambda: folder)
    (folder / "mine.yaml").write_text("epochs: [")
    with pytest.raises(ValueError, match=r"^recipes/mine.yaml: not YAML: while parsing"):
        loading.read_recipe(loading.file_of("mine"))
    (folder / "mine.yaml").write_text("- 1")
    with pytest.raises(
        ValueError, match=r"^recipes/mine.yaml: a recipe has fields such as paper, .*; got \[1\]"
    ):
        loading.read_recipe(loading.file_of("mine"))


def test_a_wrong_field_of_smoke_says_so(tmp_path):
    file = written(tmp_path, content() | {"smoke": {"model": {"width": 3}}})
    with pytest.raises(
        ValueError, match=r"mine.yaml: smoke.model.width: no such field; there are source"
    ):
        reduced(loading.read_recipe(file), file)


def test_no_such_recipe(tmp_path):
    with pytest.raises(
        ValueError,
        match="no recipe 'resnet51'; did you mean 'resnet50'\\? There are adaselection-bike, .* and your own as FILE.yaml",
    ):
        loading.file_of("resnet51")
    with pytest.raises(
        FileNotFoundError, match="other.yaml: no such file; `thresher recipes` lists"
    ):
        loading.file_of(str(tmp_path / "other.yaml"))


def test_the_files_lie_beside_the_code():
    assert loading.folder() == Path(loading.__file__).parent
    assert len(list(loading.folder().glob("*.yaml"))) == len(loading.recipe_names()) == 21


def test_scores_are_made_with_the_network_of_the_recipe():
    """A task alone would train its own network."""
    told = {}
    for name in loading.recipe_names():
        recipe = loading.read_recipe(loading.file_of(name))
        texts = (*recipe.notes, *recipe.not_given.values(), recipe.method)
        told[name] = re.findall(r"thresher score --task (\S+)", " ".join(texts))
        assert bool(told[name]) == ("scores=" in recipe.method), name
    assert all(one == f"recipe:{name}" for name, found in told.items() for one in found)


def test_the_page_lists_every_recipe_with_its_epochs():
    page = (Path(__file__).parents[3] / "docs" / "recipes.md").read_text()
    for name in loading.recipe_names():
        [row] = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        recipe = loading.read_recipe(loading.file_of(name))
        assert f"{recipe.epochs:,} epochs" in row and f"batch {recipe.batch.size:,}" in row, name
    assert f"lists the {len(loading.recipe_names())} recipes" in page


@pytest.mark.parametrize("data", ["bike", "cifar10", "cifar100", "line", "svhn", "wikitext2"])
def test_recipes_of_adaselection_name_the_settings_that_they_train_with(data):
    method = AdaSelection()
    recipe = loading.read_recipe(loading.file_of(f"adaselection-{data}"))
    words = recipe.not_given["method"]
    assert f"beta is {method.beta:g} and gamma is {method.gamma:g}, the defaults" in words
    assert "Equations 2 to 4 are reconstructed" in words
