"""Table of scores: a number for each sample of a dataset, with the origin and the cost of the scores."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

METADATA = b"thresher"
"""Key in the metadata of the Parquet file whose value is JSON with everything that is not a column."""


@dataclass(frozen=True, eq=False, repr=False)
class Scores:
    """Table with a score for each sample, larger for harder samples. Tables with equal contents are equal.

    Args:
        ids: Ids of the samples that have a score, shape (K,), int64, ascending.
        values: Scores of these samples, shape (K,), stored as float32; NaN or infinite if no score could be computed.
        name: Name of the score, such as "el2n". Default: "score".
        labels: Classes of these samples, shape (K,), int64. Default: None, there are no classes.
        forward: Number of samples that were put through a forward pass to get the scores, 0 or more. Default: 0.
        backward: Number of samples that were put through a backward pass to get the scores, 0 or more. Default: 0.
        provenance: Origin of the scores (models, epochs, seeds, versions), of types that JSON can hold. Default: empty.

    Raises:
        TypeError: `ids` or `labels` are not int64, or `provenance` has a type that JSON cannot hold.
        ValueError: The shapes differ, `ids` are not ascending from 0 on, or a cost is negative.

    Example:
        >>> scores = Scores(torch.tensor([0, 2]), torch.tensor([0.5, 1.5]), "el2n", forward=2)
        >>> scores.dense(4)
        tensor([0.5000,    nan, 1.5000,    nan])
        >>> len(scores), scores.without_cost().forward
        (2, 0)
    """

    ids: Tensor
    values: Tensor
    name: str = "score"
    labels: Tensor | None = None
    forward: int = 0
    backward: int = 0
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ids = _on_host(self.ids)
        values = _on_host(self.values).float()
        # -0.0 becomes 0.0, and every NaN the same NaN: tables with equal values then have equal bits.
        values = torch.where(values.isnan(), torch.nan, values + 0.0)
        labels = None if self.labels is None else _on_host(self.labels)
        for name, column in (("ids", ids), ("labels", labels)):
            if column is not None and column.dtype != torch.int64:
                raise TypeError(f"Scores: `{name}` must be int64, got {column.dtype}")
        shapes = [tuple(column.shape) for column in (ids, values, labels) if column is not None]
        if ids.dim() != 1 or len(set(shapes)) != 1:
            raise ValueError(
                f"Scores: `ids`, `values` and `labels` must have the same shape (K,), got {shapes}"
            )
        if len(ids) and (int(ids[0]) < 0 or not bool((ids[1:] > ids[:-1]).all())):
            raise ValueError("Scores: `ids` must be ascending from 0 on, without repeats")
        if self.forward < 0 or self.backward < 0:
            raise ValueError(
                f"Scores: `forward` and `backward` must be 0 or more, got {self.forward} and {self.backward}"
            )
        try:
            provenance = json.loads(json.dumps(dict(self.provenance)))
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"Scores: `provenance` must have types that JSON can hold: {error}"
            ) from error
        written = {"ids": ids, "values": values, "labels": labels, "provenance": provenance}
        for name, value in (
            written | {"forward": int(self.forward), "backward": int(self.backward)}
        ).items():
            object.__setattr__(self, name, value)

    def dense(self, n: int) -> Tensor:
        """Returns the scores of all samples of a dataset; NaN for a sample without a score.

        Args:
            n: Number of samples in the dataset.

        Returns:
            Scores in the order of the ids, shape (n,), float32.

        Raises:
            ValueError: The scores belong to another dataset: an id is outside [0, n), or every sample has a score and there
                are not n of them.
        """
        samples = self.samples
        complete = samples == len(self.ids)
        if samples > n or (complete and samples != n):
            raise ValueError(
                f"Scores: `{self.name}` is of {samples}{'' if complete else ' or more'} samples, but the dataset has {n}. "
                "Score this dataset; a sample may have the score NaN."
            )
        return torch.full((n,), torch.nan, dtype=torch.float32).index_copy_(
            0, self.ids, self.values
        )

    @property
    def samples(self) -> int:
        """The last id plus one, which is the number of samples in the dataset if its last sample has a score."""
        return int(self.ids[-1]) + 1 if len(self.ids) else 0

    def without_cost(self) -> "Scores":
        """Returns the same scores with a cost of 0, for scores that are computed anyway or whose cost is counted elsewhere."""
        return replace(self, forward=0, backward=0)

    @staticmethod
    def mean(several: "Sequence[Scores]") -> "Scores":
        """Returns the mean score of each sample over several tables, such as the tables of several runs; costs are added up.

        Args:
            several: Tables of the same samples and classes, one or more. A mean is finite only if all its scores are.

        Raises:
            ValueError: `several` is empty, or the tables have different samples or classes.
        """
        if not several:
            raise ValueError("Scores.mean: pass one or more scores, got none")
        first = several[0]
        for other in several[1:]:
            same = torch.equal(first.ids, other.ids) and (first.labels is None) == (
                other.labels is None
            )
            if not same or (
                first.labels is not None
                and other.labels is not None
                and not first.labels.equal(other.labels)
            ):
                raise ValueError(
                    f"Scores.mean: {other!r} has other samples or classes than {first!r}"
                )
        names = list(dict.fromkeys(scores.name for scores in several))
        return Scores(
            first.ids,
            torch.stack([scores.values for scores in several]).double().mean(0),
            names[0] if len(names) == 1 else f"mean of {', '.join(names)}",
            labels=first.labels,
            forward=sum(scores.forward for scores in several),
            backward=sum(scores.backward for scores in several),
            provenance={"mean_of": [dict(scores.provenance) for scores in several]},
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a Parquet file with the columns id, score and, if there are classes, label; its metadata has the rest.

        Args:
            path: File to write; its folder is created if needed.

        Raises:
            ImportError: pyarrow is not installed.
        """
        pa, pq = pyarrow()
        columns = {"id": self.ids, "score": self.values} | (
            {} if self.labels is None else {"label": self.labels}
        )
        table = pa.table({name: column.numpy() for name, column in columns.items()})
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            pq.write_table(
                table.replace_schema_metadata({METADATA: self._metadata()}),
                unfinished,
                write_page_checksum=True,
            )
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "Scores":
        """Reads a file that `save` wrote, or any Parquet file with the columns id and score.

        Args:
            path: File to read; its rows may have any order.

        Raises:
            ImportError: pyarrow is not installed.
            FileNotFoundError: The file does not exist.
            ValueError: The file is damaged or has other columns; the message names the file.
        """
        pa, pq = pyarrow()
        with Path(path).open("rb") as file:
            try:
                table = pq.read_table(file, page_checksum_verification=True)
                facts = json.loads((table.schema.metadata or {}).get(METADATA, b"{}"))
            except (pa.ArrowException, OSError, ValueError, NotImplementedError) as error:
                raise ValueError(f"{path}: damaged, or not a Parquet file: {error}") from error
        if not {"id", "score"} <= set(table.column_names):
            have = ", ".join(table.column_names) or "none"
            raise ValueError(
                f"{path}: scores must have the columns id, score and, if there are classes, label; this file has {have}"
            )
        try:
            return _from_table(table, facts)
        except (pa.ArrowException, ValueError, TypeError, AttributeError, KeyError) as error:
            raise ValueError(f"{path}: {error}") from error

    def _metadata(self) -> str:
        facts = {
            "name": self.name,
            "forward": self.forward,
            "backward": self.backward,
            "provenance": self.provenance,
        }
        return json.dumps(facts, sort_keys=True)

    @cached_property
    def _digest(self) -> str:
        columns = [
            column.numpy().tobytes()
            for column in (self.ids, self.values, self.labels)
            if column is not None
        ]
        return hashlib.sha256(b"".join([self._metadata().encode(), *columns])).hexdigest()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Scores):
            return self._digest == other._digest
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self._digest)

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"<Scores {self.name} of {len(self)} samples, {self._digest[:12]}>"


def _on_host(column: Any) -> Tensor:
    return torch.as_tensor(column).detach().cpu().clone()


def pyarrow() -> tuple[Any, Any]:
    """Returns the modules `pyarrow` and `pyarrow.parquet`.

    Raises:
        ImportError: pyarrow is not installed.

    Example:
        >>> [module.__name__ for module in pyarrow()]
        ['pyarrow', 'pyarrow.parquet']
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ImportError(
            "the Parquet files of scores and samples need pyarrow: pip install pyarrow"
        ) from error
    return pa, pq


def _from_table(table: Any, facts: Any) -> Scores:
    """Returns the scores of a Parquet table, sorted by id.

    Args:
        table: Table of pyarrow with the columns id, score and possibly label.
        facts: Content of the metadata.

    Raises:
        ValueError: The metadata is not a dict, or a column has missing values.
    """
    if not isinstance(facts, dict):
        raise ValueError(f"unexpected metadata: {facts!r}")
    kinds = {"id": "int64", "score": "float32", "label": "int64"}
    names = [name for name in kinds if name in table.column_names]
    for name in names:
        if name != "score" and table.column(name).null_count:
            raise ValueError(f"the column {name} has missing values")
    columns = {
        name: torch.from_numpy(
            table.column(name).cast(kinds[name], safe=name != "score").to_numpy().copy()
        )
        for name in names
    }
    order = columns["id"].argsort(stable=True)
    ids, values, labels = (columns[name][order] if name in columns else None for name in kinds)
    assert ids is not None
    assert values is not None
    known = {
        name: facts[name] for name in ("name", "forward", "backward", "provenance") if name in facts
    }
    return Scores(ids, values, labels=labels, **known)
