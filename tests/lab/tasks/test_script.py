from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from thresher_lab.recipes.running import task_of
from thresher_lab.tasks.script import RETURN_TYPES, Script, errors_placed

MADE = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def build(seed):
    torch.manual_seed(seed)
    model = nn.Linear(2, 2)
    data = DataLoader(TensorDataset(torch.randn(8, 2), torch.zeros(8, dtype=torch.int64)), batch_size=4, shuffle=True)
    return model, data, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), lambda model: 1.0
"""


def script(folder, text=MADE, function="build"):
    path = folder / "mine.py"
    path.write_text(text)
    return task_of(f"{path}:{function}")


def test_what_it_makes(tmp_path):
    task = script(tmp_path)
    assert (
        isinstance(task, Script)
        and task.name == f"{tmp_path / 'mine.py'}:build"
        and task.find(None) is None
    )
    made = task.training(task.load(None), 3)
    torch.manual_seed(3)
    assert torch.equal(made.model.weight, nn.Linear(2, 2).weight) and len(made.loader.dataset) == 8
    assert (
        made.schedule(0.5) == 1.0 and made.metric == "metric" and made.evaluate(made.model) == 1.0
    )


def test_a_schedule_may_come_last(tmp_path):
    task = script(
        tmp_path, MADE.replace("lambda model: 1.0", "lambda model: 1.0, lambda done: 1 - done")
    )
    assert task.training(task.load(None), 0).schedule(0.25) == 0.75


def test_it_may_import_what_lies_beside_it(tmp_path):
    (tmp_path / "beside_this_script.py").write_text("VALUE = 0.5")
    task = script(
        tmp_path,
        MADE.replace(
            "import torch\n", "import torch\nfrom beside_this_script import VALUE\n", 1
        ).replace("1.0", "VALUE"),
    )
    assert task.training(task.load(None), 0).evaluate(None) == 0.5


def test_another_version_is_another_recipe(tmp_path):
    before = script(tmp_path).recipe
    assert (
        script(tmp_path).recipe
        == before
        != script(tmp_path, MADE.replace("lr=0.1", "lr=0.2")).recipe
    )
    assert script(tmp_path, "# A comment changes no training.\n" + MADE + "\n").recipe == before


def test_errors_of_the_file_have_its_line(tmp_path):
    task = script(tmp_path, MADE.replace("lambda model: 1.0", "lambda model: model.nothing"))
    made = task.training(task.load(None), 0)
    line = next(
        number
        for number, text in enumerate(task.path.read_text().split("\n"), 1)
        if "nothing" in text
    )
    with (
        pytest.raises(
            ValueError, match=f"mine.py, line {line}: AttributeError: .* has no attribute 'nothing'"
        ),
        errors_placed(task),
    ):
        made.evaluate(made.model)
    with pytest.raises(ZeroDivisionError), errors_placed(task):
        _ = 1 / 0
    with pytest.raises(ZeroDivisionError), errors_placed(task_of("digits")):
        _ = 1 / 0


def test_another_version_of_what_lies_beside_it_is_another_recipe(tmp_path):
    (tmp_path / "beside_it.py").write_text("import beside_that")
    (tmp_path / "beside_that.py").write_text("VALUE = 1")
    before = script(tmp_path, "from beside_it import *\n" + MADE).recipe
    (tmp_path / "beside_that.py").write_text("VALUE = 2")
    assert script(tmp_path, "from beside_it import *\n" + MADE).recipe != before


def test_a_name_that_is_taken(tmp_path):
    path = tmp_path / "random.py"
    path.write_text(MADE)
    with pytest.raises(
        ValueError, match="there is a module 'random' already; give the file another name"
    ):
        task_of(f"{path}:build")


def test_no_file_and_no_function(tmp_path):
    with pytest.raises(FileNotFoundError, match="none.py: no such file; `thresher init"):
        task_of(f"{tmp_path / 'none.py'}:build")
    with pytest.raises(ValueError, match="mine.py has no 'make'; it defines build"):
        script(tmp_path, function="make")
    with pytest.raises(ValueError, match="mine.py has no 'buld'; did you mean 'build'?"):
        script(tmp_path, function="buld")
    with pytest.raises(ValueError, match="mine.py, line 2: "):
        script(tmp_path, "import torch\ndef build(:\n")
    with pytest.raises(ValueError, match="has no 'build'; it defines nothing"):
        script(tmp_path, "")


@pytest.mark.parametrize(
    "text",
    [
        "build = max",
        "import torch as build",
        "if True:\n    build = max",
        "class build: pass",
        "build: object = max",
        "build, b = max, min",
        "for build in [max]: pass",
    ],
)
def test_names_may_be_bound_in_other_ways(tmp_path, text):
    assert script(tmp_path, text).function == "build"


def test_a_folder_is_of_no_use(tmp_path):
    with pytest.raises(ValueError, match="reads its data itself"):
        script(tmp_path).find(tmp_path)


class Stream(IterableDataset):
    def __iter__(self):
        yield torch.zeros(2)


def parts(**others):
    model = nn.Linear(2, 2)
    whole = {
        "model": model,
        "data": DataLoader(TensorDataset(torch.zeros(4, 2)), shuffle=True),
        "criterion": nn.MSELoss(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "evaluate": float,
    }
    return tuple((whole | others).values())


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            None,
            "a tuple of model, data, criterion, optimizer, evaluate and, if wanted, schedule, or a dict .*; got NoneType",
        ),
        (parts()[:4], "schedule, or a dict with these names; got 4 of them"),
        (parts(model="resnet"), "a torch Module as model; got str"),
        (parts(data=[1, 2]), "a torch DataLoader as data; got list"),
        (parts(optimizer=None), "a torch Optimizer as optimizer; got NoneType"),
        (parts(evaluate=0.5), "something that can be called as evaluate; got float"),
        (parts(schedule="cosine"), "something that can be called as schedule; got str"),
        (parts(data=DataLoader(Stream())), "data over a dataset with a length"),
    ],
)
def test_what_it_returns_is_checked(made, message):
    with pytest.raises(ValueError, match=message) as raised:
        Script(Path("mine.py"), "build").training(lambda seed: made, 0)
    assert str(raised.value).startswith("mine.py, line ") and "build(seed) must return" in str(
        raised.value
    )


def test_where_an_error_came_from(tmp_path):
    task = script(tmp_path, "def build(seed):\n    return seed / 0\n")
    with pytest.raises(ZeroDivisionError) as raised:
        task.training(task.load(None), 1)
    assert task.place_of(raised.value) == f"{tmp_path / 'mine.py'}, line 2: "
    assert task.place_of(ValueError("elsewhere")) == ""


def named(**others):
    return dict(zip(RETURN_TYPES, parts(), strict=True)) | others


def labeled(labels):
    return DataLoader(
        TensorDataset(torch.zeros(len(labels), 2), torch.tensor(labels)), shuffle=True
    )


def test_a_dict_may_have_more():
    data = labeled([0, 1, 2, 1])
    also = {
        "schedule": lambda done: 1 - done,
        "metric": "top-1",
        "classes": ["cat", "dog", "cow"],
        "show": str,
    }
    made = Script(Path("mine.py"), "build").training(lambda seed: named(data=data, **also), 0)
    assert made.loader is data and made.schedule(0.25) == 0.75 and made.show is str
    assert (made.metric, made.classes) == ("top-1", ["cat", "dog", "cow"])
    bare = Script(Path("mine.py"), "build").training(lambda seed: named(), 0)
    assert (bare.metric, bare.classes, bare.show, bare.schedule(0.5)) == ("metric", None, None, 1.0)


def test_names_of_classes_without_known_labels_are_taken_and_it_is_said():
    made = named(classes=("a", "b"))
    with pytest.warns(
        UserWarning,
        match=r"cannot be shown, and .*: the dataset of mine.py, line .*: build\(seed\) holds no class .* `targets`",
    ):
        assert Script(Path("mine.py"), "build").training(lambda seed: made, 0).classes == ("a", "b")


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (
            {"clases": ["a"]},
            "a dict with model, .* classes, show, forward, predict; got 'clases', too",
        ),
        ({"metric": 3}, "a text as metric; got int"),
        ({"metric": " "}, "a line of 1 to 40 characters as metric; got ' '"),
        ({"metric": "a\nb"}, r"a line of 1 to 40 characters as metric; got 'a\\nb'"),
        ({"metric": "m" * 41}, "a line of 1 to 40 characters as metric; got 'mmm"),
        (
            {"metric": "cost"},
            "a metric with a name of its own; 'cost' is another number of each epoch",
        ),
        ({"metric": "forward"}, "'forward' is another number of each epoch"),
        ({"metric": "weight_loss"}, "'weight_loss' is another number of each epoch"),
        ({"classes": "cat"}, "a list of names as classes; got str"),
        ({"classes": ["cat", 1]}, "names of 1 to 40 characters as classes; class 1 has 1"),
        ({"classes": ["cat", ""]}, "names of 1 to 40 characters as classes; class 1 has ''"),
        ({"classes": ["cat", "cat"]}, "another name for each class as classes; 'cat' comes twice"),
        (
            {"classes": ["cat"], "data": labeled([0, 2])},
            "all classes as classes; got 1, and the data has labels up to 2",
        ),
        ({"show": "cat.png"}, "something that can be called as show; got str"),
        ({"optimizer": 1}, "a torch Optimizer as optimizer; got int"),
    ],
)
def test_names_and_what_they_stand_for_are_checked(others, message):
    made = named(**others)
    with pytest.raises(ValueError, match=message) as raised:
        Script(Path("mine.py"), "build").training(lambda seed: made, 0)
    assert str(raised.value).startswith("mine.py, line ") and "build(seed) must return" in str(
        raised.value
    )


def test_what_is_missing_is_named():
    made = named()
    del made["model"], made["evaluate"]
    with pytest.raises(
        ValueError, match="a dict with model, .*; got one without model and evaluate"
    ):
        Script(Path("mine.py"), "build").training(lambda seed: made, 0)


def test_the_first_sample_is_shown_before_anything_is_trained():
    def show(number):
        return [number]

    with pytest.raises(
        ValueError, match=r"show\(0\) must return a PIL image, .* or a text; got list"
    ) as raised:
        Script(Path("mine.py"), "build").training(lambda seed: named(show=show), 0)
    assert str(raised.value).startswith(f"mine.py, line {show.__code__.co_firstlineno}: ")


@pytest.mark.parametrize("make", [lambda: 0, lambda *, seed: 0, lambda seed, more: 0])
def test_a_function_that_does_not_take_a_seed_says_so(make):
    with pytest.raises(
        ValueError, match=r"mine.py, line \d+: build must take one argument, the seed"
    ):
        Script(Path("mine.py"), "build").training(make, 0)


def test_a_model_that_was_trained_before_is_refused():
    made, task = named(), Script(Path("mine.py"), "build")
    task.training(lambda seed: made, 0)
    with pytest.raises(
        ValueError,
        match="must return a new model from each call; got the one of an earlier call, which may be",
    ):
        task.training(lambda seed: made, 1)
    task.training(lambda seed: named(), 1)


def test_a_loader_in_the_order_of_its_dataset_is_said():
    data = DataLoader(TensorDataset(torch.zeros(4, 2)), batch_size=2)
    with pytest.warns(
        UserWarning,
        match=r"the loader of mine.py, line \d+: build\(seed\) does not shuffle: every epoch",
    ):
        Script(Path("mine.py"), "build").training(lambda seed: named(data=data), 0)
