"""A training that is resumed at the start, in the middle or at the end of an epoch trains on the samples that it would have had.

With the samplers and methods of Thresher, in Lightning, Trainer and accelerate, in one process and in two.
"""

import json

import pytest
import torch.multiprocessing as mp

import resumed_trainings as trainings
from depth import depth

WORLDS = depth([2], [1, 2])


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Folders with a file for each case, by the number of processes; the processes start once."""
    folders = {}
    for world in WORLDS:
        folders[world] = tmp_path_factory.mktemp(f"world{world}")
        mp.start_processes(
            trainings.run_table, (world, str(folders[world])), nprocs=world, start_method="fork"
        )
    return folders


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("number", range(len(trainings.CASES)))
def test_resumed_training(number, world, tables):
    framework, sampler, settings = trainings.CASES[number]
    found = json.loads((tables[world] / f"{number}.json").read_text())
    if framework == "Lightning" and "method" not in settings:
        # Lightning warns that a plain loader begins the epoch again.
        assert found.pop("middle").endswith("warned")
    if framework == "Lightning, position set":
        assert found.pop("middle") == "ok; warned"
    assert set(found.values()) == {"ok"}, (framework, sampler, settings, found)
