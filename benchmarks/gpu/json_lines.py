"""Results as lines of JSON, which are written as they come and tell what is there already."""

import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import thresher


class OtherResultsError(ValueError):
    """A file has results of another device, other versions or other sizes."""


def about_machine(device: torch.device, *, smoke: bool) -> dict[str, Any]:
    """Returns the device, the versions and whether sizes are small: the first line of a file."""
    named = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    versions = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "numpy": np.__version__,
        "thresher": thresher.__version__,
    }
    return {
        "device": device.type,
        "device_name": named,
        "python": platform.python_version(),
        **versions,
        "smoke": smoke,
    }


class JsonLines:
    """A file of results; each has a name.

    Args:
        path: File, made with its first line if it is not there.
        device: Device of the results.
        smoke: Whether sizes are small.

    Raises:
        OtherResultsError: The file was written elsewhere.
    """

    def __init__(self, path: Path, device: torch.device, *, smoke: bool) -> None:
        self.path, self.first = path, about_machine(device, smoke=smoke)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            self._append(self.first)
        elif (was := self._read()[0]) != self.first:
            differ = ", ".join(
                f"{name} {was.get(name)} and not {now}"
                for name, now in self.first.items()
                if was.get(name) != now
            )
            raise OtherResultsError(f"{path} has results of {differ}; give another --out")

    def results(self) -> list[dict[str, Any]]:
        """Returns the results so far."""
        return self._read()[1:]

    def names(self) -> set[str]:
        """Returns the names of the results so far."""
        return {line["name"] for line in self.results()}

    def forget_failures(self) -> None:
        """Removes the results that are errors, so that they are made again."""
        kept = [
            line
            for line in self._read()
            if line.get("error") is None or line.get("outcome") == "skipped"
        ]
        self.path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")

    def add(self, name: str, **values: Any) -> None:
        """Writes a result.

        Args:
            name: Its name.
            **values: Its values, as JSON has them.
        """
        self._append({"name": name, **values})

    def _append(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _read(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]


def print_table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Prints rows in columns, and says nothing where there are none."""
    if not rows:
        return
    texts = [
        [f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row]
        for row in (head, *rows)
    ]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    sys.stdout.flush()
