"""A file from which an interrupted training goes on: the states of its parts, written after each epoch."""

import json
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch

from thresher.experiments.training.store import whole


class Stateful(Protocol):
    """What a checkpoint can hold."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Go on from there."""
        ...


class Checkpoint:
    """The state of one training, which is there whole or not at all.

    Args:
        path: Of the file, which need not be there yet.
        identity: What tells the training from others, by name; a file of another one is refused.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path = path
        self.identity: dict[str, Any] = json.loads(json.dumps(identity, default=repr))

    def save(self, parts: Mapping[str, Stateful], **values: Any) -> None:
        """Write the states of the parts, and plain values; what was there before is replaced."""
        states = {name: part.state_dict() for name, part in parts.items()}
        with whole(self.path) as file:
            torch.save({"identity": self.identity, "parts": states, "values": values}, file)

    def load(self, parts: Mapping[str, Stateful]) -> dict[str, Any]:
        """Put the parts where the file has them.

        Returns:
            The plain values; none where there is no file.

        Raises:
            ValueError: The file is damaged, or of another training; nothing was changed.
        """
        if not self.path.is_file():
            return {}
        found = self._read()
        for name, part in parts.items():
            part.load_state_dict(found["parts"][name])
        return found["values"]

    def delete(self) -> None:
        """The training has ended."""
        self.path.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any]:
        try:
            found = torch.load(self.path, map_location="cpu", weights_only=True)
            held = found["identity"]
        except (EOFError, KeyError, RuntimeError, TypeError, UnpicklingError, ValueError) as error:
            what = type(error).__name__  # torch's message goes on to advise against what keeps such files safe
            raise ValueError(f"{self.path} is damaged ({what}); delete it, and the training starts anew") from error
        for name, value in self.identity.items():
            if held.get(name) != value:
                raise ValueError(
                    f"{self.path} is of another training: its {name} is {held.get(name)}, here it is {value}; give another "
                    "folder, or delete this file"
                )
        return found
