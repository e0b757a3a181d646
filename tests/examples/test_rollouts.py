"""The example of reinforcement learning learns from a quarter of its rollouts."""

import runpy
from pathlib import Path

import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "rollouts.py"


def test_it_learns(capsys):
    with torch.random.fork_rng():
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    assert float(printed.split("test accuracy ")[1].split(";")[0]) > 0.8
    assert int(printed.split("; ")[1].split("%")[0]) > 5
