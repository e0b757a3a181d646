"""`thresher observe`: its files, of a training with classes and of a regression with texts."""

import re
import textwrap

import numpy as np
import pyarrow.parquet as pq
import pytest
import typer
from typer.testing import CliRunner

from thresher import DataMap
from thresher_lab.cli.observe import observe
from thresher_lab.cli.precision import precision
from thresher_lab.cli.prune import prune
from thresher_lab.comparison.observing import observed
from thresher_lab.recipes.running import task_of
from thresher_lab.report import observed as page_of
from thresher_lab.training.loop import train
from thresher_lab.training.specs import MethodSpec

TASK = "digits@200"
app = typer.Typer()
app.command()(observe)

SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset

def build(seed):
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 1)
    data = TensorDataset(torch.randn(40, 3), torch.randn(40, 1))
    return {"model": model, "data": DataLoader(data, 8, shuffle=True), "criterion": torch.nn.MSELoss(),
            "optimizer": torch.optim.SGD(model.parameters(), 0.1), "evaluate": lambda model: 0.0,
            "show": lambda number: f"row {number}" if number % 3 != 1 else 1 if number % 2 else 1 / 0}
"""


def called(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_it_writes_the_table_and_the_page(tmp_path):
    done = called("--task", TASK, "--epochs", 3, "--out", tmp_path / "map")
    assert done.exit_code == 0, done.output
    table = pq.read_table(tmp_path / "map" / "map.parquet")
    assert table.num_rows == 200 and set(table.column("times_seen").to_pylist()) == {3}
    page = (tmp_path / "map" / "map.html").read_text()
    for said in (
        "digits@200: a data map",
        "200 samples, 3 epochs",
        "The likeliest wrong labels of each class",
        "Plotly.newPlot",
        'alt="sample ',  # the samples of the dataset
    ):
        assert said in page
    found = DataMap({name: np.array(table.column(name)) for name in table.column_names})
    assert re.search("of the samples " + ", ".join(map(str, found.suspects(8))), done.output)
    pruned = typer.Typer()
    pruned.command()(prune)
    kept = [
        str(tmp_path / "map" / "map.parquet"),
        "--keep",
        "0.9",
        "--which",
        "easy",
        "--out",
        str(tmp_path / "kept.txt"),
    ]
    assert (
        "180 of 200 samples kept: the easiest by suspicion"
        in CliRunner().invoke(pruned, kept).output
    )
    assert not {*map(int, (tmp_path / "kept.txt").read_text().split())} & {*found.suspects(20)}
    again = called("--task", TASK, "--out", tmp_path / "map")
    assert again.exit_code == 1 and "is there already" in str(again.exception)
    assert (
        called("--task", TASK, "--epochs", 1, "--out", tmp_path / "map", "--force", "-q").exit_code
        == 0
    )


def test_the_training_is_full_training():
    found, training = observed(TASK, epochs=2)
    task = task_of(TASK)
    data = task.load(task.find(None))
    expected = train(task, data, MethodSpec("full", {}), seed=0, epochs=2)
    assert training.evaluate(training.model) == expected["metric"]["value"]
    assert len(found["id"]) == 200


def test_of_numbers_with_texts_of_ones_own(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(SCRIPT))
    done = called(f"{path}:build", "--epochs", 2, "--out", tmp_path / "map")
    assert done.exit_code == 0, done.output + str(done.exception)
    page = (tmp_path / "map" / "map.html").read_text()
    assert "Plotly" not in page and "<h2>Classes</h2>" not in page and "row 2" in page
    assert "must be a text, a PIL image" in page  # of a sample that cannot be shown
    assert "ZeroDivisionError: division by zero" in page


def columns(n=6):
    labels = np.arange(n) % 2
    numbers = {
        name: np.linspace(0, 1, n)
        for name in ("confidence", "variability", "suspicion", "loss", "aum")
    }
    counts = {name: np.arange(n) for name in ("id", "forgetting", "learned_at")}
    return {**counts, "label": labels, "times_seen": np.array([1] * (n - 1) + [0]), **numbers}


def test_classes_with_the_least_confidence_come_first():
    rows = page_of.class_rows(DataMap(columns()), ["cat", "dog"])
    assert [name for name, _ in rows] == ["dog", "cat"]
    assert rows[1][1] == ["3", "0.400", "0.400", "2.00", "33.3"] and rows[0][1] == [
        "2",
        "0.400",
        "0.400",
        "2.00",
        "0.0",
    ]
    named = columns() | {"label": np.array(["cat", "dog"])[np.arange(6) % 2]}
    assert page_of.class_rows(DataMap(named), None) == rows
    only = columns() | {"times_seen": np.array([1, 0, 1, 0, 1, 0])}
    assert [name for name, _ in page_of.class_rows(DataMap(only), None)] == ["0"]


def test_a_large_map_is_drawn_in_part(monkeypatch):
    monkeypatch.setattr(page_of, "MOST_DRAWN", 3)
    assert page_of.rows_to_draw(DataMap(columns(10))).tolist() == [0, 3, 6]


def test_a_loader_without_a_batch_is_refused(tmp_path):
    path = tmp_path / "none.py"
    path.write_text(
        textwrap.dedent(SCRIPT).replace(
            "DataLoader(data, 8, shuffle=True)",
            "DataLoader(data, 64, shuffle=True, drop_last=True)",
        )
    )
    with pytest.raises(ValueError, match="observe: a loader of 40 samples has no batch"):
        observed(f"{path}:build", epochs=1)


def test_columns_are_those_of_the_library():
    found, _ = observed(TASK, epochs=1)
    assert (
        isinstance(found, DataMap) and found.suspects(5).tolist() == found.suspects()[:5].tolist()
    )


def test_answers_tell_how_many_labels_are_wrong(tmp_path):
    done = called("--task", TASK, "--epochs", 2, "--out", tmp_path / "map")
    assert "answer in" in done.output and "answers.csv" in done.output
    cards = re.findall(
        r'data-id="(\d+)" data-rank="(\d+)"', (tmp_path / "map/review.html").read_text()
    )
    assert len(cards) == 50
    answers = tmp_path / "answers.csv"
    rows = [f"{number},{rank},{str(int(rank) <= 20).lower()}" for number, rank in cards]
    answers.write_text("\n".join(["id,rank,wrong", *rows]))
    command = typer.Typer()
    command.command()(precision)

    def estimated(*paths):
        return CliRunner().invoke(command, [str(path) for path in paths])

    done = estimated(tmp_path / "map/map.parquet", answers)
    assert done.exit_code == 0 and re.search(r"after rank (19|20)\.", done.output)
    for paths, message in (
        ((tmp_path / "none.parquet", answers), "none.parquet: no such file"),
        ((answers, answers), "is no table of `thresher observe`"),
    ):
        assert message in str(estimated(*paths).exception)
