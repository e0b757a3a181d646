"""A process is killed, torchrun starts all of them again, and the training goes on as if nothing had happened."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from depth import DEEP

SCRIPT = Path(__file__).parents[1] / "elastic_training.py"
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it, gloo finds the address of the killed process in the store of torchrun's agent."""


@pytest.mark.skipif(not DEEP, reason="two trainings in processes that torchrun starts")
def test_the_plans_and_weights_of_an_undisturbed_training(tmp_path):
    found = {}
    for name, killed in (("whole", ()), ("killed", ("33",))):
        folder = tmp_path / name
        folder.mkdir()
        launch = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node=2",
            "--max-restarts=1",
        ]
        command, environment = [*launch, SCRIPT, folder, *killed], os.environ | OWN_STORE
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        found[name] = [torch.load(folder / f"found-{rank}") for rank in range(2)]
    for own, whole in zip(found["killed"], found["whole"], strict=True):
        assert own["first"] == 30 and whole["first"] == 0
        assert [ids.tolist() for ids in own["rows"]] == [ids.tolist() for ids in whole["rows"][30:]]
        assert all(
            torch.equal(one, other)
            for one, other in zip(own["weights"], whole["weights"], strict=True)
        )
