"""Columns that print as a table."""

from typing import Any

from numpy.typing import NDArray

MOST_PRINTED = 20
"""Largest number of groups that a printed `GroupTable` shows."""


class GroupTable(dict[str, NDArray[Any]]):
    """Columns by name, each of shape (G,), that print as a table. See `DataMap.by`.

    Example:
        >>> import numpy as np
        >>> GroupTable(group=np.array(["Al", "Bo"]), loss=np.array([0.5, 0.1234]))
        group   loss
        Al       0.5
        Bo     0.123
    """

    def __repr__(self) -> str:
        columns = []
        for name, column in self.items():
            whole = name == "group" or column.dtype.kind in "iu"
            cells = [str(value) if whole else f"{value:.3g}" for value in column[:MOST_PRINTED]]
            width = max(map(len, [name, *cells]))
            align = str.ljust if name == "group" else str.rjust
            columns.append([align(cell, width) for cell in [name, *cells]])
        lines = ["  ".join(cells) for cells in zip(*columns, strict=True)]
        if (more := len(next(iter(self.values()))) - MOST_PRINTED) > 0:
            lines.append(f"({more:,} more)")
        return "\n".join(lines)
