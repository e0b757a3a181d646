"""Every example runs, and differs from base.py by its feature alone."""

import difflib
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "by_feature"
FILES = sorted(FOLDER.glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_runs(path):
    done = subprocess.run([sys.executable, "-W", "error", path], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    accuracy = float(done.stdout.split("test accuracy ")[1].split()[0])
    assert accuracy > 0.9
    assert "of full training" in done.stdout


@pytest.mark.parametrize("path", [path for path in FILES if path.stem != "base"], ids=lambda path: path.stem)
def test_differs_by_one_feature(path):
    base = (FOLDER / "base.py").read_text().splitlines()
    lines = path.read_text().splitlines()
    changed = [line for line in difflib.ndiff(base, lines) if line[0] in "+-" and line[1:].strip()]
    assert 0 < len(changed) < 35


def test_there_are_three_beside_the_base():
    assert {path.stem for path in FILES} >= {"base", "resume", "accumulation", "own_loss"}
