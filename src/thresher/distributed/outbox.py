"""Rows that a rank notes during an epoch, on the device, until they travel to their owners."""

from collections.abc import Mapping

import torch
from torch import Tensor

BLOCK = 2**16
"""Number of rows that are noted in one piece of memory."""


class Outbox:
    """Rows that are noted on the device until they travel; nothing waits for the device.

    Example:
        >>> outbox = Outbox()
        >>> outbox.add({"id": torch.tensor([4, 2]), "loss": torch.tensor([0.5, 1.5])})
        >>> len(outbox), outbox.rows()["id"]
        (2, tensor([4, 2]))
    """

    def __init__(self) -> None:
        self._pieces: list[dict[str, Tensor]] = []
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    def add(self, rows: Mapping[str, Tensor]) -> None:
        """Notes rows.

        Args:
            rows: Values by field, each of shape (n,); the fields and their data types are those of the first call.
        """
        n, done = len(next(iter(rows.values()))), 0
        while done < n:
            place = self._rows % BLOCK
            if not place:
                self._pieces.append({name: values.new_empty(BLOCK) for name, values in rows.items()})
            part = min(n - done, BLOCK - place)
            for name, piece in self._pieces[-1].items():
                piece[place : place + part] = rows[name][done : done + part]
            done += part
            self._rows += part

    def rows(self) -> dict[str, Tensor]:
        """Returns all rows in the order in which they were noted; without fields where there are none."""
        if not self._pieces:
            return {}
        return {name: torch.cat([piece[name] for piece in self._pieces])[: self._rows] for name in self._pieces[0]}

    def clear(self) -> None:
        """Forgets all rows."""
        self._pieces, self._rows = [], 0
