import json
import subprocess
import sys

import pytest
import yaml
from typer.testing import CliRunner

from thresher_lab import cli
from thresher_lab.cli.app import app
from thresher_lab.cli.recipes import flat
from thresher_lab.recipes import schema as loading
from thresher_lab.recipes.running import SmokeTask


def said(*words):
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def refused(monkeypatch, capsys, *words):
    """The message of a mistake, which ends the command with 2."""
    monkeypatch.setattr(sys, "argv", ["thresher", *map(str, words)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    captured = capsys.readouterr()
    assert not captured.out
    return captured.err


def test_all_are_listed_with_a_published_number():
    lines = said("recipes").splitlines()
    assert [
        line.split()[0] for line in lines[1:] if not line.startswith(" ")
    ] == loading.recipe_names()
    [line] = [line for line in lines if line.startswith("wrn-28-10")]
    assert "2310.10102" in line and "77.49" in " ".join(lines)


@pytest.mark.parametrize("name", loading.recipe_names())
def test_one_is_shown_whole(name):
    shown, recipe = (
        " ".join(said("recipes", name).split()),
        loading.read_recipe(loading.file_of(name)),
    )
    assert recipe.method.split(":")[0] in shown and f"thresher train {name}" in shown
    assert all(
        str(one.value) in shown and one.where.split()[0] in shown for one in recipe.published
    )
    words = {word for text in (*recipe.notes, *recipe.not_given.values()) for word in text.split()}
    assert words <= set(shown.split())


def test_settings_that_are_not_used_are_left_out():
    assert dict(flat({"a": {"b": 0, "c": None, "d": []}, "e": "x"})) == {"a.b": "0", "e": "x"}


def test_listed_without_torch():
    code = """
import sys
sys.argv = ["thresher", "recipes", "resnet50-a"]
from thresher_lab.cli import main
try:
    main()
finally:
    heavy = {"torch", "numpy", "scipy", "accelerate", "sklearn"} & set(sys.modules)
    assert not heavy, heavy
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "12984" in done.stdout


def test_mistakes_are_one_message(monkeypatch, capsys, tmp_path):
    assert "no recipe 'resnet51'; did you mean 'resnet50'? There are adaselection-bike" in refused(
        monkeypatch, capsys, "recipes", "resnet51"
    )
    assert "no recipe 'resnet51'" in refused(monkeypatch, capsys, "train", "resnet51", "--smoke")
    wanted = "recipes/resnet50.yaml: data: ImageNet-1K is not there by itself: --data DIR with train/ with a folder"
    out = tmp_path / "out"
    assert wanted in refused(monkeypatch, capsys, "train", "resnet50", "--out", out)
    message = refused(
        monkeypatch, capsys, "train", "resnet50", "--data", tmp_path / "nothing", "--out", out
    )
    assert f"recipes/resnet50.yaml: data: no folder {tmp_path / 'nothing' / 'train'}" in message
    file = tmp_path / "mine.yaml"
    file.write_text(
        yaml.safe_dump(yaml.safe_load(loading.file_of("resnet50").read_text()) | {"speed": 3})
    )
    assert f"{file}: speed: no such field; there are paper" in refused(
        monkeypatch, capsys, "train", file, "--out", out
    )
    assert "--method: no method 'best'" in refused(
        monkeypatch, capsys, "train", "resnet50", "--smoke", "--method", "best"
    )
    assert not out.exists()


def test_a_recipe_is_trained_and_says_what_came_of_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(
        app,
        ["train", "adaselection-line", "--epochs", "1", "--workers", "0"],
        catch_exceptions=False,
    )
    assert done.exit_code == 0, done.output
    assert "A small MLP on a straight line: ada_selection:keep=0.3 twice, 1 epochs" in done.stderr
    assert "published: AdaSelection, mean loss (rank) 8.42 (1.8) (tables 4 and 3)" in done.stdout
    assert (
        "runs/adaselection-line/results.json" in done.stdout and "learning rate" not in done.stderr
    )
    assert (tmp_path / "runs" / "adaselection-line" / "model.pt").is_file()


def test_another_batch_is_told_with_its_rate(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["train", "adaselection-line", "--smoke", "--epochs", "1", "--quiet", "--out", "out"]
    told = [
        CliRunner()
        .invoke(app, [*words, "--batch-size", size, "--accumulate", "4"], catch_exceptions=False)
        .stderr
        for size in ("8", "4")
    ]
    small = SmokeTask.at("adaselection-line", tmp_path).settings
    assert small.batch.size == 16
    rates = f"{small.optimizer.lr:.6g} -> {2 * small.optimizer.lr:.6g}"
    assert told[0].startswith(
        f"32 samples per step in place of 16: learning rate {rates} (sgd: in proportion to"
    )
    assert len(told[0].splitlines()) == 1 and not told[1]
    batch = json.loads((tmp_path / "out" / "results.json").read_text())["recipe"]["batch"]
    assert batch == {"workers": 1, "per_worker": 4, "accumulate": 4}
