"""`thresher audit`: what it prints, its exit code, and the files that it refuses."""

import json

import pytest
from typer.testing import CliRunner

from thresher_lab.cli.app import app

TRAINING = """
import torch
from torch.utils.data import DataLoader, TensorDataset

DATA = TensorDataset(torch.arange(40.0), torch.arange(40) % 4)

def shuffled():
    return DataLoader(DATA, 8, shuffle=True)

def build(seed):
    return torch.nn.Linear(1, 4), DataLoader(DATA, 8, sampler=[*range(39)]), None

def as_dict(seed=0):
    return {"data": DataLoader(DATA, 8, shuffle=True)}

def nothing():
    return 3
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    path = tmp_path / f"audited_{tmp_path.name}.py"
    path.write_text(TRAINING)
    monkeypatch.syspath_prepend(str(tmp_path))
    return path


def called(*words):
    return CliRunner().invoke(app, ["audit", *map(str, words)])


@pytest.mark.parametrize("function", ["shuffled", "as_dict"])
def test_a_loader_that_is_right(script, function):
    found = called(f"{script}:{function}", "--world", "1")
    assert found.exit_code == 0 and len(found.output.splitlines()) <= 15
    assert "40 samples; 5 batches and 40 rows an epoch" in found.output


def test_its_parts_are_announced(script):
    found = called(f"{script}:shuffled", "--world", "1,2", "--epochs", "2")
    lines = [line for line in found.stderr.splitlines() if line.startswith("audit: ")]
    assert [line.split()[1] for line in lines] == [
        "loading",
        *["reading"] * 2,
        "resuming",
        "reading",
    ]
    assert lines[-1] == "audit: reading 2 epochs in 2 processes" and "audit:" not in found.stdout
    assert not called(f"{script}:shuffled", "--world", "1", "--quiet").stderr


def test_a_problem_is_an_exit_code(script, tmp_path):
    found = called(f"{script}:build", "--world", "1", "--json", tmp_path / "found.json")
    assert found.exit_code == 1
    written = json.loads((tmp_path / "found.json").read_text())
    assert any("1 of 40 samples never come" in one for one in written["problems"])


def test_two_processes_that_share_samples(script):
    found = called(f"{script}:shuffled", "--world", "2", "--epochs", "2")
    assert found.exit_code == 1 and "come in more than one process" in found.output


@pytest.mark.parametrize(
    ("name", "message"),
    [("nothing", "must return a DataLoader, got int"), ("other", "has no function other")],
)
def test_functions_that_make_no_loader(script, name, message):
    found = called(f"{script}:{name}", "--world", "1")
    assert found.exit_code != 0 and isinstance(found.exception, ValueError)
    assert message in str(found.exception)


@pytest.mark.parametrize("word", ["training", "nowhere.py:build", "training.py"])
def test_other_words_are_refused(word):
    assert called(word).exit_code == 2
