"""One command in several processes that torchrun or accelerate launch has started: they train together, and one of them speaks.

The first process prints. What another one would print is kept back, and shown only where that process fails and the first one
does not. A process that has failed says so in the store of the process group, and the others then end at once and in silence:
nobody waits for it, and there is one message.
"""

import io
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from datetime import timedelta
from typing import Any

TOGETHER = ("compare", "reproduce", "train")
"""Commands that all processes run together."""
TRAIN_ALONE = ("advise", "demo", "league", "observe", "score", "time-to-target")
"""Other commands that train."""

ENDED = "thresher: a process has failed and said why"
"""Key of the store that is there as soon as a process has failed, and its message is printed."""
FIRST_SPEAKS_S = 3.0
"""Time in seconds that another process gives the first one to fail, too, and to say why."""
LOOKS_S = 0.2
"""Time in seconds between two looks at what the other processes say."""
PATIENCE = timedelta(hours=12)
"""Time that processes wait for one another: the first one evaluates alone. A failure ends them all without it."""


def check_command(name: str | None) -> None:
    """Refuses a command that several processes cannot run, and ends all but the first where one is enough.

    Args:
        name: Name of the command.

    Raises:
        ValueError: The command trains, and not in several processes.
        SystemExit: One process is enough, and this is another one.
    """
    processes = os.environ.get("WORLD_SIZE", "1")
    if processes == "1" or name in TOGETHER:
        return
    if name in TRAIN_ALONE:
        raise ValueError(
            f"`{name}` trains in one process, and torchrun or accelerate launch has started {processes} (WORLD_SIZE). Start it "
            f"by itself. The commands that train in several processes are {', '.join(TOGETHER)}."
        )
    if os.environ["RANK"] != "0":
        raise SystemExit(0)


def as_one_of_several(run: Callable[[], None]) -> None:
    """Runs the command line in this process, one of several, and exits.

    Args:
        run: Function that runs the command line, and raises SystemExit.
    """
    rank = int(os.environ["RANK"])
    said = io.StringIO()
    store = _joined()
    watch = threading.Event()
    threading.Thread(target=_end_with_others, args=(store, watch), daemon=True).start()
    code: Any = 1
    try:
        if rank == 0:
            run()
        else:
            with redirect_stdout(io.StringIO()), redirect_stderr(said):
                run()
    except SystemExit as left:
        code = left.code
    except BaseException:
        traceback.print_exc(file=sys.stderr if rank == 0 else said)
    if code:
        _say_once(store, rank, said.getvalue())
    watch.set()
    sys.exit(code)


def _joined() -> Any:
    """Joins the processes, and returns the store that all of them see.

    Raises:
        SystemExit: The processes do not find each other on devices of a kind that accelerate knows.
    """
    import torch
    from accelerate import PartialState
    from torch import distributed
    from torch.distributed.rendezvous import rendezvous

    if not torch.accelerator.is_available():
        os.environ["ACCELERATE_USE_CPU"] = "true"
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("true", "1", "yes")
    if on_cpu:
        device = torch.device("cpu")
    else:
        device = torch.accelerator.current_accelerator(check_available=True)
    store, rank, size = next(rendezvous("env://"))
    if not distributed.is_initialized():
        backend = distributed.get_default_backend_for_device(device or "cpu")
        distributed.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=PATIENCE
        )
    if PartialState(cpu=on_cpu).num_processes != size:
        kind = "the CPU" if device is None else f"devices of the kind {device.type}"
        message = f"thresher: accelerate does not train in several processes on {kind}; ACCELERATE_USE_CPU=true takes the CPU"
        sys.exit(message if rank == 0 else 1)
    return store


def _end_with_others(store: Any, watch: threading.Event) -> None:
    """Ends this process without a word as soon as another one has failed and said why."""
    while not watch.wait(LOOKS_S):
        try:
            failed = store.check([ENDED])
        except RuntimeError:
            return  # the process that held the store is gone
        if failed and not watch.is_set():
            os._exit(1)


def _say_once(store: Any, rank: int, said: str) -> None:
    """Prints why this process failed, if the first one has not, and ends the others.

    Args:
        store: The store.
        rank: Number of this process.
        said: Message that was kept back.
    """
    if rank:
        time.sleep(FIRST_SPEAKS_S)  # where the first process fails, too, this one ends here
        print(f"process {rank} of {os.environ['WORLD_SIZE']}: {said.strip()}", file=sys.stderr)  # noqa: T201
    store.set(ENDED, str(rank))
    time.sleep(3 * LOOKS_S)  # the others end before they notice that this one is gone
