"""Two processes with workers are killed in mid-epoch; one, two or three go on, and no sample is lost or comes twice."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from depth import in_verify
from thresher.samplers import WeightedSampler

N, K, B = 300, 240, 6

PROCESS = """
import json, os, sys, time
from pathlib import Path
import torch
from torch import distributed
from torch.utils.data import DataLoader
from thresher.samplers import WeightedSampler

folder, rank, size, name, state = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], json.loads(sys.argv[5])
distributed.init_process_group("gloo", init_method=f"file://{folder}/{name}.group", rank=rank, world_size=size)
sampler = WeightedSampler([1 + i % 3 for i in range(300)], 240, seed=4)
if state:
    sampler.load_state_dict(state)
else:
    sampler.set_epoch(2)
first = sampler.state_dict()
loader = DataLoader(range(300), 6, sampler=sampler, num_workers=2)
with open(folder / f"{name}.{rank}", "w", buffering=1) as log:
    for step, ids in enumerate(loader, 1):
        log.write(json.dumps(ids.tolist()) + "\\n")
        rows = torch.tensor(len(ids))
        distributed.all_reduce(rows)
        if rank == 0:
            first["consumed"] += int(rows)
            (folder / "state.new").write_text(json.dumps({"state": first, "steps": step}))
            os.replace(folder / "state.new", folder / "state.json")
        distributed.barrier()
        time.sleep(0 if state else 0.05)
distributed.destroy_process_group()
"""


def start(folder, size, name, state=None):
    """Processes in sessions of their own, so that a signal reaches their workers, too."""
    settings = {"env": {**os.environ, "OMP_NUM_THREADS": "1"}, "start_new_session": True}
    return [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, folder, str(rank), str(size), name, json.dumps(state)],
            **settings,
        )
        for rank in range(size)
    ]


def steps(folder, size, name):
    """Batches of all processes, step by step."""
    logs = [(folder / f"{name}.{rank}").read_text().splitlines() for rank in range(size)]
    return [[json.loads(line) for line in lines] for lines in zip(*logs, strict=False)]


def in_order(steps):
    """The ids of all processes in the order that they share."""
    return [i for batches in steps for ids in zip(*batches, strict=True) for i in ids]


@in_verify
@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_killed_epoch_goes_on(tmp_path, after):
    processes = start(tmp_path, 2, "first")
    try:
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline:
            saved = tmp_path / "state.json"
            if saved.exists() and json.loads(saved.read_text())["steps"] >= 7:
                break
            time.sleep(0.02)
    finally:
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    saved = json.loads((tmp_path / "state.json").read_text())
    done = in_order(steps(tmp_path, 2, "first")[: saved["steps"]])
    assert 7 * 2 * B <= len(done) < K and saved["state"]["consumed"] == len(done)
    rest = start(tmp_path, after, "second", saved["state"])
    assert [process.wait(timeout=100) for process in rest] == [0] * after
    whole = WeightedSampler([1 + i % 3 for i in range(N)], K, seed=4)
    whole.set_epoch(2)
    order, seen = list(whole), done + in_order(steps(tmp_path, after, "second"))
    assert seen[:K] == order and seen[K:] == order[: len(seen) - K] and len(seen) - K < after
