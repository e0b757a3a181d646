"""A training in several processes ends without being aborted at the exit."""

import subprocess
import sys

from thresher.distributed import world

SCRIPT = """
import atexit, weakref
import torch.distributed as dist
from thresher.distributed.world import ProcessWorld

class Trainer:
    pass

def main():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    trainer = Trainer()
    trainer.group, trainer.itself = ProcessWorld(), trainer  # a cycle, as of DistributedDataParallel and its hooks
    dist.destroy_process_group()
    return weakref.ref(trainer)

atexit.register(lambda: print("freed" if left() is None else "alive"))  # called after what was registered later
left = main()
"""


def test_what_holds_a_process_group_in_a_cycle_is_freed_before_the_exit():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["freed"], done.stdout + done.stderr


def test_the_collection_is_asked_for_once(monkeypatch):
    asked = []
    monkeypatch.setattr(world.atexit, "register", asked.append)
    world._free_groups_before_exit.cache_clear()
    world._free_groups_before_exit()
    world._free_groups_before_exit()
    assert asked == [world.gc.collect]
