"""Every example runs, and differs from base.py only by its feature; sft.py has a model of its own, too.

finetune.py is a training of its own, see test_finetune.py.
"""

import difflib
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lightning_cases  # noqa: F401  # prepares the import of lightning
from depth import DEEP, in_verify

FOLDER = Path(__file__).parents[2] / "examples" / "by_feature"
FILES = sorted(path for path in FOLDER.glob("*.py") if path.stem != "finetune")


SEVERAL = ("ddp", "fsdp", "accelerated")
"""Examples for several processes."""


@in_verify
@pytest.mark.parametrize("name", SEVERAL)
def test_runs_in_two_processes(name):
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        FOLDER / f"{name}.py",
    ]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split("test accuracy ")[1].split()[0]) > 0.9
    whole = (
        "7,680" if name == "accelerated" else "7,500"
    )  # half of them in each process; accelerate fills the last batch up
    assert done.stdout.count("of full training") == 1 and f"of {whole} samples" in done.stdout


@pytest.mark.skipif(not DEEP, reason="two trainings in processes; make verify runs it")
@pytest.mark.parametrize("processes", [1, 3])
def test_goes_on_with_another_number_of_processes(processes, tmp_path):
    """All of its epochs are over: it has the weights, the records and what all processes have computed."""
    said = []
    for number in (2, processes):
        launch = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={number}",
        ]
        command = [*launch, FOLDER / "ddp.py", tmp_path / "saved"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.split("\n")[0])
    assert said[0] == said[1] and "test accuracy 0.9" in said[0]
    assert len([*(tmp_path / "saved").glob("*/.metadata")]) == 10


@pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing:FutureWarning"
)  # trl has the former name
@pytest.mark.parametrize(
    "path", [path for path in FILES if path.stem not in SEVERAL[:2]], ids=lambda path: path.stem
)
def test_runs(path, capsys):
    for package in ("trl", "peft") if path.stem == "sft" else ():
        pytest.importorskip(package)
    if DEEP and path.stem == "base":  # one real process
        done = subprocess.run(
            [sys.executable, "-W", "error", path],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        printed = done.stdout
    else:
        with torch.random.fork_rng():
            runpy.run_path(str(path), run_name="__main__")
        printed = capsys.readouterr().out
    accuracy = float(printed.split("test accuracy ")[1].split()[0])
    assert accuracy > (0.8 if path.stem == "sft" else 0.9)
    assert "of full training" in printed


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.stem not in ("base", "sft")], ids=lambda path: path.stem
)
def test_differs_by_one_feature(path):
    base = (FOLDER / "base.py").read_text().splitlines()
    lines = path.read_text().splitlines()
    changed = [line for line in difflib.ndiff(base, lines) if line[0] in "+-" and line[1:].strip()]
    assert 0 < len(changed) < 60


def test_there_are_three_beside_the_base():
    assert {path.stem for path in FILES} >= {"base", "resume", "accumulation", "own_loss"}
