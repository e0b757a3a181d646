"""The way of rows to the ranks that hold the records of their samples: one exchange, then an order by rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thresher.distributed.layout import ShardLayout, to_owners
from thresher.shards import World

PLACE = "#place"
"""Field of the rows that travel: the place of the sample in the block of its rank."""

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
)
"""Data types that travel, by their number in a message."""


@dataclass(frozen=True, eq=False)
class Arrivals:
    """Rows of the samples of one block, in the order of the ranks that sent them and of their writing.

    Args:
        places: Places of the samples in the block, shape (k,), int64.
        ranks: Ranks that sent the rows, shape (k,), ascending.
        fields: Values by name, each of shape (k,), on the host.

    Example:
        Sample 5 was written by two ranks, twice by the first one:

        >>> arrivals = Arrivals(np.array([5, 2, 5, 5]), np.array([0, 0, 0, 1]), {})
        >>> arrivals.last, [turn.tolist() for turn in arrivals.turns]
        (array([1, 2]), [[1, 0], [2], [3]])
    """

    places: NDArray[np.int64]
    ranks: NDArray[np.int64]
    fields: Mapping[str, Tensor]

    def _sorted(self) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64]]:
        """Returns the rows by place, marks of the first one of each place, and the first one of the place of each row."""
        order = np.argsort(self.places, kind="stable")
        places = self.places[order]
        first = np.ones(len(order), dtype=np.bool_)
        first[1:] = places[1:] != places[:-1]
        starts = np.flatnonzero(first)
        return order, first, starts[np.cumsum(first) - 1]

    @property
    def last(self) -> NDArray[np.int64]:
        """One row per sample: the last one of the lowest rank that sent one."""
        order, first, start = self._sorted()
        lowest = self.ranks[order] == self.ranks[order[start]]
        goes_on = np.zeros_like(lowest)
        goes_on[:-1] = lowest[1:] & ~first[1:]
        return order[lowest & ~goes_on]

    @property
    def turns(self) -> list[NDArray[np.int64]]:
        """All rows in groups that have each sample once at most: the first rows of the samples, the second rows, and so on."""
        order, _, start = self._sorted()
        turn = np.arange(len(order)) - start
        return [order[turn == number] for number in range(int(turn.max(initial=-1)) + 1)]


def common_dtypes(rows: Mapping[str, Tensor], names: Sequence[str], world: World) -> dict[str, torch.dtype]:
    """Returns the data types of fields that only ranks with rows know; all ranks call it.

    Args:
        rows: Fields by name; empty where this rank has no rows.
        names: Names of the fields.
        world: The ranks.

    Returns:
        Data types by name, to which those of all ranks are promoted; bool where no rank has rows.
    """
    if not names:
        return {}
    own = [DTYPES.index(rows[name].dtype) if rows else 0 for name in names]
    found = {}
    for name, numbers in zip(names, world.gather(np.array(own)).T.tolist(), strict=True):
        found[name] = DTYPES[numbers[0]]
        for number in numbers[1:]:
            found[name] = torch.promote_types(found[name], DTYPES[number])
    return found


def send_home(
    ids: NDArray[np.int64], rows: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], layout: ShardLayout, world: World
) -> Arrivals:
    """Sends rows to the ranks that hold the records of their samples; all ranks call it.

    A row travels with 4 bytes for its place and the bytes of its fields.

    Args:
        ids: Ids of the rows, shape (k,); a sample may have several rows.
        rows: Fields by name, each of shape (k,); may be empty where k is 0.
        dtypes: Data types with which the fields travel, the same on all ranks.
        layout: Blocks of the ranks.
        world: The ranks.

    Returns:
        The rows that came to this rank.
    """
    packed = np.empty(len(ids), dtype=[(PLACE, np.uint32), *((name, numpy_dtype(dtype)) for name, dtype in dtypes.items())])
    for name, values in rows.items():
        packed[name] = on_host_as_bits(values.to(dtypes[name]))
    order, ends = to_owners(ids, layout)
    packed[PLACE] = ids % layout.per
    arrived = world.exchange(np.split(packed[order], ends))
    every = np.concatenate(arrived)
    ranks = np.repeat(np.arange(world.size), [len(part) for part in arrived])
    fields = {name: from_bits(every[name], dtype) for name, dtype in dtypes.items()}
    return Arrivals(every[PLACE].astype(np.int64), ranks, fields)


def on_host_as_bits(tensor: Tensor) -> NDArray[Any]:
    """Returns a tensor as a NumPy array; bfloat16, which NumPy does not have, as int16 with the same bits.

    Args:
        tensor: Tensor of any data type, on any device.
    """
    return (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).detach().cpu().numpy()


def from_bits(values: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """Returns the tensor of which `on_host_as_bits` made an array.

    Args:
        values: The array.
        dtype: Data type of the tensor.
    """
    tensor = torch.from_numpy(np.array(values))
    return tensor.view(dtype) if dtype is torch.bfloat16 else tensor


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Returns the data type of the arrays that `on_host_as_bits` makes.

    Args:
        dtype: Data type of the tensor.
    """
    return on_host_as_bits(torch.empty(0, dtype=dtype)).dtype
