"""The states of the runs of several processes in one checkpoint, which the first process writes."""

import importlib
import io
from typing import Any

import torch
from torch import distributed

from thresher.run.several import has_group


def gathered(state: dict[str, Any]) -> Any:
    """Returns what belongs into a checkpoint; all processes call it together.

    Args:
        state: State of the run of this process.

    Returns:
        The state itself where there is no process group; else, in the first process, the states of all of them as bytes, one
        tensor of uint8 for each, and None in the others.
    """
    if not has_group():
        return state
    written = io.BytesIO()
    torch.save(state, written)
    states: list[Any] | None = [None] * distributed.get_world_size() if distributed.get_rank() == 0 else None
    distributed.gather_object(torch.frombuffer(bytearray(written.getvalue()), dtype=torch.uint8), states)
    return states


def own_state(saved: Any) -> dict[str, Any]:
    """Returns the state of the run of this process.

    Args:
        saved: Result of `gathered` in the process that wrote the checkpoint.

    Raises:
        ValueError: The checkpoint was saved by another number of processes.
    """
    before: int | None = len(saved) if isinstance(saved, list) else None
    now = distributed.get_world_size() if has_group() else None
    if before != now:
        raise ValueError(
            f"thresher.lightning.Selection: the checkpoint was saved {_said(before)}, and this training runs {_said(now)}. "
            "Go on with as many, and with the same strategy."
        )
    if not isinstance(saved, list):
        return saved
    importlib.import_module("torch.distributed.tensor")  # torch.load knows DTensors once it is imported
    return torch.load(io.BytesIO(saved[distributed.get_rank()].numpy().tobytes()), weights_only=True, map_location="cpu")


def _said(processes: int | None) -> str:
    return "without a process group" if processes is None else f"by {processes} processes with a strategy of several devices"
