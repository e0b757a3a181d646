"""How many labels are wrong: ids spread over the ranking of a data map, and what a person's answers about them show.

The ranking is cut into five blocks, each larger than the one before by about the same factor, because wrong labels crowd at the
top. In each block, one rank is drawn at random from each of as many equal parts as there are questions for the block.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thresher.group_table import GroupTable
from thresher.warning import warn

BLOCKS = 5
FIRST_BLOCK = 25
"""Size of the first block."""
TAIL = 0.025
"""Chance of an error on each side of an interval."""
COLUMNS = ("id", "rank", "wrong")
"""Columns of a file of answers."""
WORTH_A_LOOK = 0.2
"""Share of wrong labels below which a table says that fewer than one in five is wrong."""


class PrecisionTable(GroupTable):
    """Columns by name, each of shape (B,), that print as a table. See `DataMap.precision`.

    Attributes:
        depth: Last rank with an answer at which at least one in five labels is estimated to be wrong; 0 if there is none.

    Example:
        >>> precision_by_rank(np.arange(1, 5), np.array([True, True, False, False]), 4)
        first  wrong  low  high  share  share_low  share_high
            4      2    2     2      0          0       0.932
        Fewer than one in five labels is wrong after rank 2.
    """

    depth = 0

    def __repr__(self) -> str:
        sentence = f"Fewer than one in five labels is wrong after rank {self.depth:,}."
        if self["share"][-1] >= WORTH_A_LOOK:
            sentence = f"At least one in five labels is wrong up to rank {self.depth:,}, the last one with an answer."
        return f"{super().__repr__()}\n{sentence}"


def block_ends(samples: int) -> NDArray[np.int64]:
    """Returns the last rank of each block of the ranking.

    Args:
        samples: Number of ranks.

    Example:
        >>> block_ends(10_000)
        array([   25,   112,   500,  2236, 10000])
    """
    ends = np.geomspace(min(FIRST_BLOCK, samples), samples, BLOCKS)
    return np.unique(np.rint(ends).astype(np.int64))


def spread_ranks(samples: int, count: int, seed: int) -> NDArray[np.int64]:
    """Returns ranks, counted from 1, that are drawn from all blocks, sorted.

    Args:
        samples: Number of ranks.
        count: Number of ranks to draw; all if there are fewer.
        seed: Random seed.

    Example:
        >>> spread_ranks(4, 9, seed=0)
        array([1, 2, 3, 4])
    """
    generator = np.random.default_rng(seed)
    drawn = []
    ends = block_ends(samples).tolist()
    # A block that is too small leaves its share to the larger ones. The last blocks of a short ranking are the smallest.
    blocks = sorted(pairwise([0, *ends]), key=lambda block: block[1] - block[0])
    for place, (start, end) in enumerate(blocks):
        share = min(end - start, round((count - len(drawn)) / (len(blocks) - place)))
        parts = np.rint(np.linspace(start, end, share + 1)).astype(np.int64)
        drawn += (1 + generator.integers(parts[:-1], parts[1:])).tolist()
    return np.array(sorted(drawn), dtype=np.int64)


def read_answers(reviewed: Any) -> dict[int, tuple[int | None, bool]]:
    """Returns the rank, if it is known, and whether the label is wrong, by id.

    Args:
        reviewed: Mapping from ids to booleans, or the path of a file with the columns `id`, `rank` and `wrong`, which has `true`,
            `false`, or nothing for a sample without an answer.

    Raises:
        TypeError: It is neither, or an answer is no boolean.
        ValueError: The file has another answer, two about a sample, or no such column.
    """
    if isinstance(reviewed, str | PathLike):
        # Spreadsheets write a mark of the encoding first.
        with Path(reviewed).open(newline="", encoding="utf-8-sig") as file:
            table = csv.DictReader(file)
            if not {*COLUMNS} <= {*(table.fieldnames or ())}:
                raise ValueError(
                    f"precision: {reviewed} must have the columns {', '.join(COLUMNS)}, separated by commas"
                )
            every = [*table]
        rows = [row for row in every if row["wrong"]]
        known = {"true": True, "false": False, "TRUE": True, "FALSE": False}
        if odd := {row["wrong"] for row in rows} - known.keys():
            raise ValueError(
                f"precision: {reviewed} has the answer {min(odd)!r}; use true, false, or nothing"
            )
        answers: dict[int, tuple[int | None, bool]]
        answers = {int(row["id"]): (int(row["rank"]), known[row["wrong"]]) for row in rows}
        if len(answers) < len(rows):
            raise ValueError(f"precision: {reviewed} has two answers about a sample; keep one")
        # Who looks for wrong labels may click nothing below the others.
        last = max((int(row["rank"]) for row in rows), default=0)
        skipped = sum(int(row["rank"]) < last for row in every if not row["wrong"])
        if skipped and all(wrong for _, wrong in answers.values()):
            warn(
                f'precision: all answers are "wrong", and {skipped} samples between them have none, and are left out. If their '
                'labels are right, answer "right": without these answers, the number of wrong labels is too large.'
            )
        return answers
    if not isinstance(reviewed, Mapping) or not all(
        isinstance(wrong, bool | np.bool_) for wrong in reviewed.values()
    ):
        raise TypeError(
            "precision: pass a mapping from ids to booleans (True: the label is wrong), such as {17: True, 4: False}, or the path "
            "of the file that a sheet saves"
        )
    return {int(number): (None, bool(wrong)) for number, wrong in reviewed.items()}


def bounds(wrong: int, count: int) -> tuple[float, float]:
    """Returns the exact 95 % interval of a share (Clopper and Pearson, Biometrika 1934).

    Args:
        wrong: Number of wrong labels, 0 to `count`.
        count: Number of labels.

    Example:
        >>> [round(end, 3) for end in bounds(2, 10)]
        [0.025, 0.556]
    """

    def at_most(most: int, share: float) -> float:
        # Logarithms, because the number of ways is too large for a float beyond 1,000 labels.
        odds = math.log(share / (1 - share))
        start = math.lgamma(count + 1) + count * math.log(1 - share)
        return sum(
            math.exp(start + k * odds - math.lgamma(k + 1) - math.lgamma(count - k + 1))
            for k in range(most + 1)
        )

    def share_where(most: int, chance: float) -> float:
        """Returns the share at which `most` wrong labels or fewer have a chance; the chance falls with the share."""
        low = 0.0
        high = 1.0
        for _ in range(40):
            middle = (low + high) / 2
            if at_most(most, middle) > chance:
                low = middle
            else:
                high = middle
        return low

    least = share_where(wrong - 1, 1 - TAIL) if wrong > 0 else 0.0
    most = share_where(wrong, TAIL) if wrong < count else 1.0
    return least, most


def falling(values: Sequence[float]) -> NDArray[np.float64]:
    """Returns the closest values that never rise (the mean squared difference is the smallest).

    Args:
        values: The values in order.

    Example:
        >>> falling([1, 0, 1, 0])
        array([1. , 0.5, 0.5, 0. ])
    """
    pools: list[tuple[float, int]] = []
    for value in values:
        total = float(value)
        size = 1
        while pools and pools[-1][0] / pools[-1][1] <= total / size:
            total += pools[-1][0]
            size += pools.pop()[1]
        pools.append((total, size))
    return np.concatenate([np.full(size, total / size) for total, size in pools])


def precision_by_rank(
    ranks: NDArray[np.int64], wrong: NDArray[np.bool_], samples: int
) -> PrecisionTable:
    """Returns how many labels are wrong, by rank, from answers to ranks that `spread_ranks` drew. See `DataMap.precision`.

    The interval of a number adds up those of the blocks (MOVER; Zou and Donner, Statistics in Medicine 2008). The answers that
    come before a rank bound its share from above, and those from it on from below, because the share falls.

    Args:
        ranks: Ranks with an answer, counted from 1, sorted, shape (n,).
        wrong: Whether the label is wrong, shape (n,).
        samples: Number of ranks.

    Raises:
        ValueError: There is no answer, or the answers do not cover a block evenly.
    """
    if not len(ranks):
        raise ValueError("precision: no sample has an answer; answer the samples of `review()`")
    rows = []
    start = 0
    number = below = above = 0.0
    fitted = falling(wrong.tolist())
    # Few answers have wide intervals; many reach to ranks with other shares.
    near = max(4, len(ranks) // 5)
    for end in block_ends(samples).tolist():
        if start >= ranks[-1]:
            break
        inside = (ranks > start) & (ranks <= end)
        found = int(wrong[inside].sum())
        count = int(inside.sum())
        size = end - start
        deeper = int((inside & (ranks > start + size / 2)).sum())
        # Half of the ranks that are drawn lie in each half of a block. Answers to the first ranks alone would count for all.
        uneven = abs(deeper - count / 2) > math.sqrt(count) or (count > 1 and not deeper)
        if not count or (count < size and uneven):
            raise ValueError(
                f"precision: the answers do not cover the ranks {start + 1:,} to {end:,} evenly; answer every sample that `review()` "
                "returns, not only the first ones"
            )
        least, most = bounds(found, count)
        if count < size:
            number += size * found / count
            below += (size * (found / count - least)) ** 2
            above += (size * (most - found / count)) ** 2
        else:
            number += found
        before = wrong[ranks <= end][-near:]
        after = wrong[ranks >= end][:near]
        rows.append(
            {
                "first": end,
                "wrong": round(number),
                "low": max(0, math.floor(number - math.sqrt(below))),
                "high": min(end, math.ceil(number + math.sqrt(above))),
                "share": fitted[ranks <= end][-1],
                "share_low": bounds(int(after.sum()), len(after))[0] if len(after) else 0.0,
                "share_high": bounds(int(before.sum()), len(before))[1],
            }
        )
        start = end
    table = PrecisionTable({name: np.array([row[name] for row in rows]) for name in rows[0]})
    worth = ranks[fitted >= WORTH_A_LOOK]
    table.depth = int(worth[-1]) if len(worth) else 0
    return table
