"""A training in several processes ends without being aborted at the exit."""

import subprocess
import sys

from thresher.distributed import world

SCRIPT = """
import atexit, sys, threading, time
import torch.distributed as dist
from thresher.distributed.world import ProcessWorld

atexit.register(lambda: print(*events))  # called after what was registered later
events = []
dist.init_process_group(sys.argv[1], store=dist.HashStore(), rank=0, world_size=1)
if len(sys.argv) > 2:
    ProcessWorld(), ProcessWorld()
dist.destroy_process_group()
at_exit = threading.main_thread()
threading.Thread(target=lambda: (at_exit.join(), time.sleep(0.03), events.append("freed")), daemon=True).start()
events.append("over")
"""


def test_threads_that_free_their_tensors_late_have_time_before_the_interpreter_is_torn_down():
    for given, expected in ((["gloo", "attached"], "over freed"), (["gloo"], "over")):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, *given],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert done.stdout.strip() == expected, done.stderr


def test_the_time_is_waited_for_once(monkeypatch):
    asked = []
    monkeypatch.setattr(world.atexit, "register", lambda *given: asked.append(given))
    world._let_threads_of_gloo_end.cache_clear()
    world._let_threads_of_gloo_end()
    world._let_threads_of_gloo_end()
    assert asked == [(world.time.sleep, world.BEFORE_EXIT_S)]
    world._let_threads_of_gloo_end.cache_clear()  # nothing was registered for this process
