"""A checkpoint file: the states of the parts of a training, written after each epoch, from which training continues."""

import json
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map_only

from thresher.experiments.training.processes import number_of_processes, of_each_process, of_first, own_rank
from thresher.experiments.training.store import whole


class Stateful(Protocol):
    """The interface of an object that a checkpoint can hold."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, as tensors and plain values."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Restores a state."""
        ...


class Checkpoint:
    """The state of one training in a file, which is written whole or not at all.

    Several processes save and load it together; the first one writes and reads the file.

    Args:
        path: Path of the file, which need not exist yet.
        identity: Values by name that distinguish this training from others; the file of another training is refused, and so is
            that of another number of processes.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path = path
        own = {**identity, "number of processes": number_of_processes()}
        self.identity: dict[str, Any] = json.loads(json.dumps(own, default=repr))

    def save(self, parts: Mapping[str, Stateful], own: Mapping[str, Stateful] | None = None, **values: Any) -> None:
        """Writes the states of the parts and some plain values, and replaces the file that was there before.

        Args:
            parts: Parts by name that are the same in all processes.
            own: Parts by name of which each process has another state. Default: none.
            **values: Plain values.
        """
        states = {name: part.state_dict() for name, part in (own or {}).items()}
        of_each = of_each_process(tree_map_only(torch.Tensor, torch.Tensor.cpu, states))
        if own_rank() == 0:
            states = {name: part.state_dict() for name, part in parts.items()}
            with whole(self.path) as file:
                torch.save({"identity": self.identity, "parts": states, "own": of_each, "values": values}, file)

    def load(self, parts: Mapping[str, Stateful], own: Mapping[str, Stateful] | None = None) -> dict[str, Any]:
        """Restores the states of the parts from the file.

        Args:
            parts: Parts by name that are the same in all processes.
            own: Parts by name of which each process has another state. Default: none.

        Returns:
            The plain values; empty if there is no file.

        Raises:
            ValueError: The file is damaged or belongs to another training; no part was changed.
        """
        found = of_first(self._read() if own_rank() == 0 and self.path.is_file() else None)
        if found is None:
            return {}
        for name, part in parts.items():
            part.load_state_dict(found["parts"][name])
        for name, part in (own or {}).items():
            part.load_state_dict(found["own"][own_rank()][name])
        return found["values"]

    @property
    def epochs_in(self) -> Path:
        """Path of the file for the finished epochs of every sample, which belong to the checkpoint, see `Recording`."""
        return self.path.with_name(f"{self.path.name}.epochs")

    def delete(self) -> None:
        """Deletes the file and that of the finished epochs, if there are any."""
        if own_rank():
            return
        self.path.unlink(missing_ok=True)
        self.epochs_in.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any]:
        try:
            found = torch.load(self.path, map_location="cpu", weights_only=True)
            held = found["identity"]
        except (EOFError, KeyError, RuntimeError, TypeError, UnpicklingError, ValueError) as error:
            what = type(error).__name__  # The message of torch would advise to load the file with weights_only=False.
            raise ValueError(f"{self.path} is damaged ({what}); delete it, and the training starts anew") from error
        for name, value in self.identity.items():
            if held.get(name) != value:
                raise ValueError(
                    f"{self.path} is of another training: its {name} is {held.get(name)}, here it is {value}; give another "
                    "folder, or delete this file"
                )
        return found
