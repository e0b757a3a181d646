"""What a run stores about each sample with `attach(observe=True)`, and the data map: a table computed from it.

Swayamdipta et al., "Dataset Cartography", EMNLP 2020, arXiv:2009.10795: confidence, variability. Pleiss et al., "Identifying
Mislabeled Data using the Area Under the Margin Ranking", NeurIPS 2020, arXiv:2001.10528: AUM. Toneva et al., "An Empirical
Study of Example Forgetting", ICLR 2019, arXiv:1812.05159: forgetting.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from os.path import isfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Subset

from thresher.group_table import GroupTable
from thresher.methods.forgetting import UNSEEN_TURNS, turns
from thresher.records import NEVER_SEEN, Column, Records
from thresher.reviewing import PrecisionTable, precision_by_rank, read_answers, spread_ranks
from thresher.samplers.stratified import codes_of, labels_of, same_classes
from thresher.score_table import Scores
from thresher.sheet import SampleCard, plot_package, read_sample, write_sheet

MOST_SEEN = torch.iinfo(torch.int16).max
OPTIONAL = frozenset({"label_probability", "logit_margin", "correct", "predicted"})
"""Signals that only a classification loss defines. Without them, as for a regression, a run stores only losses."""


def added(old: Tensor, new: Tensor) -> Tensor:
    """Adds new values to the sum of each sample; -inf means no value, and adds nothing.

    Args:
        old: Sums so far, shape (n,).
        new: New values, shape (n,).
    """
    return torch.where(new == NEVER_SEEN, old, old + new)


def added_square(old: Tensor, new: Tensor) -> Tensor:
    """Adds the squares of new values to the sum of each sample; -inf means no value, and adds nothing.

    Args:
        old: Sums so far, shape (n,).
        new: New values, shape (n,).
    """
    return torch.where(new == NEVER_SEEN, old, old + new.to(old.dtype).square())


def times_counted(old: Tensor, new: Tensor) -> Tensor:
    """Counts how many values each sample has had, at most 32,767; -inf means no value.

    Args:
        old: Numbers so far, shape (n,), int16.
        new: New values, shape (n,).
    """
    return (old.int() + (new != NEVER_SEEN)).clamp(max=MOST_SEEN)


def turned(old: Tensor, new: Tensor) -> Tensor:
    """Counts how often the prediction for each sample has changed from wrong to right or back, as `thresher.Forgetting` does.

    Args:
        old: Numbers so far, shape (n,), int16.
        new: Whether the prediction is right, shape (n,); -inf if that is not known.
    """
    if new.dtype is torch.bool:
        return turns(old, new)
    return torch.where(new == NEVER_SEEN, old, turns(old, new))


def streak(old: Tensor, new: Tensor) -> Tensor:
    """Counts how many of the last predictions for each sample were right without a break, at most 32,767.

    Args:
        old: Numbers so far, shape (n,), int16.
        new: Whether the prediction is right, shape (n,); -inf if that is not known.
    """
    return torch.where(new > 0, (old.int() + 1).clamp(max=MOST_SEEN), 0)


def last_class(old: Tensor, new: Tensor) -> Tensor:
    """Returns the class that was predicted last; a new value below 0, such as -inf, means no prediction.

    Args:
        old: Classes so far, shape (n,), int32; -1 means none.
        new: New classes, shape (n,).
    """
    return torch.where(new < 0, old, new).int()


OBSERVED: Mapping[str, Column] = {
    "probability_sum": Column(torch.float32, signal="label_probability", merge=added),
    "probability_squares": Column(torch.float32, signal="label_probability", merge=added_square),
    "margin_sum": Column(torch.float32, signal="logit_margin", merge=added),
    "turns": Column(torch.int16, fill=UNSEEN_TURNS, signal="correct", merge=turned),
    "streak": Column(torch.int16, signal="correct", merge=streak),
    "predicted": Column(torch.int32, fill=-1, signal="predicted", merge=last_class),
    "seen": Column(torch.int16, signal="loss", merge=times_counted),
    "last_loss": Column(torch.bfloat16, fill=NEVER_SEEN, signal="loss"),
    # In float32, large losses that change little would have a wrong spread.
    "loss_sum": Column(torch.float64, signal="loss", merge=added),
    "loss_squares": Column(torch.float64, signal="loss", merge=added_square),
}
"""Columns that a run stores: 40 bytes per sample; 24 if the criterion is known to be a classification loss, 20 if it is known
not to be one. Labels take 4 more."""

OF_TOKENS: Mapping[str, Column] = {
    "loss_sum": OBSERVED["loss_sum"],
    "tokens": Column(torch.int32, signal="tokens"),
}
"""Further columns for the token losses of a language model: 12 bytes per sample."""

TOKEN_LOSSES = ("loss", "smoothed_loss", "dft_loss")
"""Names of token losses."""

STORED = dict.fromkeys((*OBSERVED, *OF_TOKENS))
"""Names of all columns that a data map is computed from."""

HARDER = {
    "suspicion": 1,
    "loss": 1,
    "loss_mean": 1,
    "variability": 1,
    "forgetting": 1,
    "confidence": -1,
    "aum": -1,
}
"""Columns that measure how hard a sample is; times this sign, they are larger for harder samples."""

LEAST_VISITS = 3
LEAST_AGREEMENT = 0.5
"""Below these, `DataMap.caution` warns: the median number of visits, and the share of last predictions that are right."""
LEAST_GAIN = 0.4
"""Share of what guessing the largest class gets wrong that the network must get right."""


OF_ANY_LOSS = ("loss_sum", "loss_squares")
"""Columns that are only needed if the criterion may be something other than a classification loss."""


def least_agreement(largest: float) -> float:
    """Returns the share of right predictions from which the suspicions can be relied on.

    Args:
        largest: Share of the largest class, [0, 1].

    Example:
        >>> least_agreement(0.1), least_agreement(0.5)
        (0.5, 0.7)
    """
    return max(LEAST_AGREEMENT, largest + LEAST_GAIN * (1 - largest))


class DataMap(Mapping[str, NDArray[Any]]):
    """Table of each sample's losses and predictions in training: a mapping from column names to arrays of shape (N,).

    Every loss has these columns:

    - `id`: position in the dataset, int64.
    - `times_seen`: number of batches in which the sample had a loss; a sample that is twice in one batch counts once.
    - `loss`: last loss.
    - `suspicion`: larger means that the label is more likely wrong, [0, 1]. It is 1 - `confidence` or, without that column,
      the share of samples with a smaller `loss_mean`.
    - `label`: class, if it is known.
    - `file`: name of the file, if the dataset lists one per sample.

    A classification loss adds these columns, computed over all batches with the sample (its visits):

    - `confidence`, `variability`: mean and standard deviation of the probability of its label, [0, 1]. In 100 visits, rounding
      changes `variability` by less than 0.002.
    - `aum`: mean of the logit of its label minus the largest other logit.
    - `forgetting`: how often a right prediction became wrong.
    - `learned_at`: the visit, counted from 1, from which on every prediction was right; 0 if the last one was wrong.
    - `predicted`: class of the last prediction, if samples have one class each.

    Language models in Transformers (causal, masked, or an encoder with a decoder) add `tokens`, the number of tokens that counted
    in the last visit, and `loss_mean` and `perplexity`: the mean token loss, and exp of it. With the loss `dft` of SFTTrainer or
    label smoothing, they add `dft_loss_mean` or `smoothed_loss_mean` instead, and no perplexity.

    Other losses add `loss_mean` and `loss_spread`, the mean and the standard deviation of the loss. A sample that was never
    seen has 0 as its counts and `learned_at`, -1 as `predicted`, and NaN in the other computed columns.

    Args:
        columns: The columns by name, each of shape (N,).
        dataset: Map-style dataset of the samples, for `sheet`. Default: not known.
        names: Names of the classes by number, for `sheet`. Default: not known.

    Example:
        >>> data_map = DataMap({"id": np.array([0, 1]), "suspicion": np.array([0.1, 0.9]), "times_seen": np.array([3, 3])})
        >>> data_map.suspects(1), len(data_map), data_map
        (array([1]), 3, DataMap(2 samples: id, suspicion, times_seen)
        Median number of visits: 3.)
    """

    def __init__(
        self,
        columns: Mapping[str, NDArray[Any]],
        dataset: Any = None,
        names: Mapping[int, str] | None = None,
    ) -> None:
        self._columns = dict(columns)
        self._dataset = dataset
        self._names = names or {}

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self._columns:
            raise KeyError(f"no column {name!r}; use one of {', '.join(self._columns)}")
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        lines = [f"DataMap({len(self['id']):,} samples: {', '.join(self)})"]
        if self._seen.any():
            lines.append(f"Median number of visits: {self._visits:g}.")
        if self._agreement is not None:
            lines[-1] += f" The last predictions agree with {self._agreement:.0%} of the labels."
        return "\n".join(filter(None, (*lines, self.caution)))

    @property
    def _seen(self) -> NDArray[np.bool_]:
        return self["times_seen"] > 0

    @property
    def _visits(self) -> float:
        return float(np.median(self["times_seen"][self._seen]))

    @property
    def _agreement(self) -> float | None:
        """Share of the last predictions that are right; None if samples have no single class or were not seen."""
        # Samples that the loader leaves out have no predictions.
        seen = self._seen
        known = "predicted" in self and seen.any()
        return float((self["learned_at"][seen] > 0).mean()) if known else None

    @property
    def caution(self) -> str:
        """Why not to rely on the suspicions yet, as the table shows it; "" if it shows no reason. See docs/observe.md.

        It cannot show that a network has learned wrong labels by heart.
        """
        seen = self._seen
        if not seen.any() or self._visits < LEAST_VISITS:
            return (
                f"Caution: half of the samples or more were seen fewer than {LEAST_VISITS} times."
            )
        right = self._agreement
        if right is None:
            return ""
        largest = 0.0
        guessing = ""
        if "label" in self:
            counts = Counter(self["label"][seen].tolist())
            del counts[-1]  # not known
            largest = max(counts.values(), default=0) / seen.sum()
            guessing = f"; always guessing the largest class agrees with {largest:.0%}"
        if right < least_agreement(largest):
            return f"Caution: the last predictions agree with only {right:.0%} of the labels{guessing}."
        return ""

    def suspects(self, count: int | None = None, *, by_class: bool = False) -> NDArray[np.int64]:
        """Returns ids of samples, int64, the likeliest wrong label first; samples that were never seen are left out.

        Args:
            count: Number of ids, 0 or more. Default: all.
            by_class: Whether samples are compared only within their class, to keep a hard class from filling the list: samples
                are sorted by their rank in the class divided by the size of the class. Default: False.

        Raises:
            ValueError: The classes are not known, or `count` is no whole number of 0 or more.

        Example:
            >>> columns = {"id": np.arange(4), "suspicion": np.array([0.9, 0.8, 0.1, 0.3]), "label": np.array([0, 0, 1, 1])}
            >>> data_map = DataMap(columns | {"times_seen": np.ones(4, dtype=np.int64)})
            >>> data_map.suspects(2), data_map.suspects(2, by_class=True)
            (array([0, 1]), array([0, 3]))
        """
        if count is not None and (not isinstance(count, int | np.integer) or count < 0):
            raise ValueError(
                f"suspects: `count` must be a whole number of 0 or more, got {count!r}"
            )
        seen = np.flatnonzero(self["times_seen"] > 0)
        suspicion = self["suspicion"][seen]
        # Samples without a finite suspicion had no finite loss, so they come first.
        order = np.argsort(-np.nan_to_num(suspicion, nan=np.inf, posinf=np.inf), kind="stable")
        if by_class:
            if "label" not in self:
                raise ValueError(
                    "suspects: the classes are not known: pass run.data_map(labels=...)"
                )
            labels = self["label"][seen][order]
            place = np.empty(len(seen))
            for one in np.unique(labels):
                rows = np.flatnonzero(labels == one)
                place[rows] = np.arange(len(rows)) / len(rows)
            order = order[np.argsort(place, kind="stable")]
        return self["id"][seen[order[:count]]]

    def review(self, n: int = 50, *, seed: int = 0) -> dict[str, NDArray[np.int64]]:
        """Returns samples spread over the whole ranking, for a person to say which labels are wrong; see `precision`.

        The first of the ranking are drawn more densely.

        Args:
            n: Number of samples, 5 or more. Default: 50.
            seed: Seed of the draw. Default: 0.

        Returns:
            A dictionary with `id`, int64, and `rank`, the place in `suspects()` counted from 1, int64, sorted by rank. `sheet`
            takes it.

        Raises:
            ValueError: `n` is below 5, or no sample has a loss.

        Example:
            >>> columns = {"id": np.arange(9), "suspicion": np.arange(9) / 9, "times_seen": np.ones(9)}
            >>> DataMap(columns).review(9)["id"]
            array([8, 7, 6, 5, 4, 3, 2, 1, 0])
        """
        ids = self.suspects()
        if n < 5 or not len(ids):
            raise ValueError(
                f"review: `n` must be 5 or more and samples must have losses, got {n} and {len(ids)} samples"
            )
        ranks = spread_ranks(len(ids), n, seed)
        return {"id": ids[ranks - 1], "rank": ranks}

    def precision(self, reviewed: Mapping[int, bool] | str | PathLike[str]) -> PrecisionTable:
        """Estimates how many labels are wrong from a person's answers about the samples of `review`.

        The estimate assumes that the share of wrong labels falls along the ranking. Answer every sample of `review`: if you pick
        samples yourself, the numbers are wrong.

        Args:
            reviewed: Whether the label is wrong, by id; or the file that a sheet saves, with the columns `id`, `rank` and
                `wrong`, in which samples without an answer are left out.

        Returns:
            A dictionary of arrays of shape (B,), one value for each of up to five depths, that prints as a table:

            - `first`: number of first suspects, int64.
            - `wrong`: estimated number of wrong labels among them, int64, with a 95 % interval, `low` to `high`.
            - `share`: estimated share of wrong labels at this rank, [0, 1], with a 95 % interval, `share_low` to `share_high`.

            Its attribute `depth` is the last rank with an answer at which at least one in five labels is estimated to be wrong.

        Raises:
            TypeError: `reviewed` is no mapping from ids to booleans, and no path.
            ValueError: A sample is not in the ranking, has another rank or has two answers; no sample has an answer; the answers
                are not spread over the ranking; or the file lacks a column.

        Example:
            >>> columns = {"id": np.arange(4), "suspicion": np.array([0.9, 0.8, 0.1, 0.3]), "times_seen": np.ones(4)}
            >>> found = DataMap(columns).precision({0: True, 1: True, 2: False, 3: False})
            >>> found["wrong"], found.depth
            (array([2]), 2)
        """
        answers = read_answers(reviewed)
        ranks = self._rank_by_id()
        odd = [
            number for number, (rank, _) in answers.items() if rank not in (None, ranks.get(number))
        ]
        if odd := odd or [number for number in answers if number not in ranks]:
            raise ValueError(
                f"precision: sample {odd[0]} has the rank {ranks.get(odd[0])} in this table; pass answers to `review()` of the same table"
            )
        rows = sorted((ranks[number], wrong) for number, (_, wrong) in answers.items())
        return precision_by_rank(
            np.array([rank for rank, _ in rows], dtype=np.int64),
            np.array([wrong for _, wrong in rows], dtype=np.bool_),
            len(ranks),
        )

    def _rank_by_id(self) -> dict[int, int]:
        return {number: rank for rank, number in enumerate(self.suspects().tolist(), 1)}

    def by(self, source: Any, count: int | None = None, *, at_least: int = 20) -> GroupTable:
        """Compares groups of samples, such as the annotators, the series of windows, or the customers of rows.

        Samples that were never seen are left out. Hard classes come first in `by("label")`, whether or not their labels are wrong.

        Args:
            source: Name of a column of the table; or the group of each sample, shape (N,), numbers or strings. Other objects
                are grouped by their text, such as "None".
            count: Number of first suspects whose share in each group is computed, 1 or more. Default: a tenth of the samples
                that were seen, at least 1.
            at_least: Smaller groups are pooled as "other", because the mean of a few samples says little. Default: 20 samples.

        Returns:
            A dictionary of arrays of shape (G,), sorted by `loss_mean` or, without it, by `suspicion`, the largest first:

            - `group`: value of `source`.
            - `samples`: number of samples of the group, int64.
            - `loss_mean`: mean of the column `loss_mean`; `loss`, the mean of the last losses, if there is no such column.
            - `suspicion`: mean suspicion, [0, 1].
            - `suspects`: share of the group's samples that are among the first `count` of `suspects`, [0, 1].
            - `relative`: `suspects` divided by the mean share of suspects of its samples' classes. Only if classes are known.

            `relative` is above 1 if the group has more suspects than others with its classes. A group without a sample that was
            seen comes last, with NaN. A group with a loss of NaN comes first.

        Raises:
            KeyError: The table has no such column.
            ValueError: `source` does not have one value per sample, `count` is below 1, or `at_least` below 0.

        Example:
            >>> columns = {"id": np.arange(4), "loss": np.ones(4), "suspicion": np.array([0.9, 0.1, 0.7, 0.3])}
            >>> DataMap(columns | {"times_seen": np.full(4, 5)}).by(["Bo", "Al", "Bo", "Al"], 1, at_least=2)
            group  samples  loss  suspicion  suspects
            Bo           2     1        0.8       0.5
            Al           2     1        0.2         0
        """
        values = self[source] if isinstance(source, str) else np.asarray(source)
        rows = len(self["id"])
        if values.shape != (rows,):
            raise ValueError(
                f"by: `source` must have one value for each of the {rows} samples of the loader's dataset, in its order, got "
                f"shape {values.shape}; for a Subset, pass the values at its indices"
            )
        if values.dtype.kind == "O":
            # Objects of several types, such as strings and NaN, have no order.
            values = values.astype(str)
        groups, codes = np.unique(values, return_inverse=True)
        seen = self["times_seen"] > 0
        if count is None:
            count = max(1, int(seen.sum()) // 10)
        if count < 1 or at_least < 0:
            raise ValueError(
                f"by: `count` must be 1 or more and `at_least` 0 or more, got {count} and {at_least}"
            )
        codes = codes[seen]
        samples = np.bincount(codes, minlength=len(groups))
        small = samples < at_least
        if small.any():
            # A group that the source itself names "other" joins them: two rows of one name would not be told apart.
            small |= groups.astype(str) == "other"
            groups = np.array([*groups[~small].tolist(), "other"], dtype=object)
            codes = np.where(small, len(groups) - 1, np.cumsum(~small) - 1)[codes]
            samples = np.bincount(codes, minlength=len(groups))

        def mean(column: NDArray[Any]) -> NDArray[np.float64]:
            sums = np.bincount(codes, weights=column, minlength=len(groups))
            return sums / np.where(samples > 0, samples, np.nan)

        suspected = np.isin(self["id"], self.suspects(count))[seen]

        # A mean of ranks, which `suspicion` is without classes, would hide how large the losses are.
        loss = "loss_mean" if "loss_mean" in self else "loss"
        table = {
            "group": groups,
            "samples": samples,
            loss: mean(self[loss][seen]),
            "suspicion": mean(self["suspicion"][seen]),
            "suspects": mean(suspected),
        }
        if "label" in self:
            _, labels, sizes = np.unique(
                self["label"][seen], return_inverse=True, return_counts=True
            )
            expected = mean((np.bincount(labels, weights=suspected) / sizes)[labels])
            table["relative"] = table["suspects"] / np.where(expected > 0, expected, np.nan)
        key = table.get("loss_mean", table["suspicion"])
        place = np.where(samples > 0, np.nan_to_num(key, nan=np.inf, posinf=np.inf), -np.inf)
        order = np.argsort(-place, kind="stable")
        return GroupTable({name: column[order] for name, column in table.items()})

    def scores(self, name: str = "suspicion") -> Scores:
        """Returns a column as `Scores` (larger is harder) for `thresher.Prune` and `thresher prune`, with a cost of 0.

        Args:
            name: Name of the column, one of `HARDER`; confidence and AUM are negated. Default: "suspicion".

        Raises:
            ValueError: The table has no such column, or the column does not measure how hard a sample is.

        Example:
            >>> columns = {"id": np.arange(2), "aum": np.array([3.0, -1.0]), "times_seen": np.ones(2)}
            >>> DataMap(columns).scores("aum").values
            tensor([-3.,  1.])
        """
        if name not in HARDER or name not in self:
            there = ", ".join(one for one in self if one in HARDER)
            raise ValueError(
                f"scores: no column {name!r} that measures how hard a sample is; use one of {there}"
            )
        labels = self.get("label")
        if labels is None or labels.dtype.kind not in "iu":
            classes = None
        else:
            classes = torch.from_numpy(labels.astype(np.int64))
        values = HARDER[name] * self[name].astype(np.float64)
        return Scores(
            torch.from_numpy(self["id"].astype(np.int64)), torch.from_numpy(values), name, classes
        )

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        """Returns the table as an Arrow stream, which pandas, polars and others read; needs pyarrow."""
        return self._table().__arrow_c_stream__(requested_schema)

    def to_parquet(self, path: str | Path) -> None:
        """Writes the table to a Parquet file; needs pyarrow.

        Args:
            path: The file.
        """
        from pyarrow import parquet

        parquet.write_table(self._table(), path)

    def to_pandas(self) -> Any:
        """Returns the table as a pandas DataFrame; needs pandas."""
        import pandas  # pyright: ignore[reportMissingImports]

        return pandas.DataFrame(self._columns)

    def _table(self) -> Any:
        import pyarrow

        return pyarrow.table(self._columns)

    def plot(self, path: str | Path, *, most: int = 20_000) -> None:
        """Plots the data map: confidence over variability, colored by how often a right prediction became wrong.

        Args:
            path: File of the picture, such as "map.png".
            most: Largest number of samples in the plot, evenly spaced. Default: 20,000.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: The loss is not a classification loss, so there is no confidence.
        """
        if "confidence" not in self:
            raise ValueError(
                "plot: a data map shows confidence and variability, which only a classification loss defines"
            )
        rows = np.flatnonzero(self["times_seen"] > 0)
        rows = rows[:: max(1, -(-len(rows) // most))]
        figure = plot_package("matplotlib.figure").Figure(figsize=(7, 6), layout="constrained")
        axes = figure.add_subplot()
        drawn = axes.scatter(
            self["variability"][rows],
            self["confidence"][rows],
            c=self["forgetting"][rows],
            s=6,
            alpha=0.5,
            cmap="viridis",
        )
        axes.set(
            xlabel="variability",
            ylabel="confidence",
            title=f"Data map of {len(self['id']):,} samples",
            ylim=(-0.02, 1.02),
        )
        figure.colorbar(drawn, label="forgotten")
        figure.savefig(path)

    def sheet(
        self,
        path: str | Path,
        count: int | Mapping[str, NDArray[np.int64]] = 100,
        *,
        by_class: bool = False,
        classes: Sequence[str] | None = None,
        show: Callable[[int], Any] | None = None,
    ) -> None:
        """Draws the first suspects: pictures or texts, with id, file, label and predicted class; needs `thresher[plot]`.

        Samples are shown as the dataset returns them. If it augments at random, they are not the versions that the network
        saw. Global random states stay as they are.

        Args:
            path: File that ends in .png or .html. On an HTML page, each sample has the buttons "wrong" and "right", and a button
                saves the answers for `precision`.
            count: Number of samples, 1 or more; or the table of `review`. Default: 100.
            by_class: Whether samples are compared only within their class, as in `suspects`. Default: False.
            classes: Names of the classes by number. Default: the list `classes` of the dataset or, without one, numbers.
            show: Function from an id to a picture or a text. Default: the sample in the dataset, or the first part of a tuple;
                a sample that is neither picture nor text is shown as its row of the table. A pair of answers, that is, a dict with
                "chosen" and "rejected", is shown side by side.

        Raises:
            ImportError: Pillow or matplotlib is not installed.
            TypeError: A sample is an array that is no picture, or `show` returns neither a picture nor a text.
            ValueError: The file does not end in .png or .html, `count` is below 1, or no sample has a loss.

        Example:
            >>> columns = {"id": np.arange(2), "suspicion": np.array([0.1, 0.9]), "times_seen": np.array([3, 3])}
            >>> DataMap(columns, ["a text", "another text"]).sheet("suspects.html", 1)
            >>> "another text" in Path("suspects.html").read_text()
            True
        """
        path = Path(path)
        if path.suffix.lower() not in (".png", ".html"):
            raise ValueError(f"sheet: `path` must end in .png or .html, got {path}")
        if isinstance(count, Mapping):
            ids = count["id"]
            which = f"{len(ids)} of {len(self['id']):,} samples, spread over the ranking"
        elif not isinstance(count, int | np.integer) or count < 1:
            raise ValueError(
                f"sheet: `count` must be 1 or more, or the table of `review`, got {count}"
            )
        else:
            ids = self.suspects(count, by_class=by_class)
            which = f"The {len(ids)} most suspicious of {len(self['id']):,} samples"
        if not len(ids):
            raise ValueError("sheet: no sample has a loss yet; train before you draw the suspects")
        cards = [self.card(number, classes=classes, show=show) for number in ids.tolist()]
        source = "show=" if show is not None else "the dataset"
        if show is None and not isinstance(cards[0].shown, str):
            source = "the dataset, augmentation included"
        ranks = self._rank_by_id()
        write_sheet(
            path, f"{which}, read from {source}", cards, [ranks[number] for number in ids.tolist()]
        )

    def card(
        self,
        number: int,
        *,
        classes: Sequence[str] | None = None,
        show: Callable[[int], Any] | None = None,
    ) -> SampleCard:
        """Returns what `sheet` shows of a sample.

        Args:
            number: Id of the sample.
            classes: Names of the classes, see `sheet`.
            show: Function from an id to a picture or a text, see `sheet`.

        Raises:
            KeyError: The table has no such sample.

        Example:
            >>> columns = {"id": np.arange(2), "suspicion": np.array([0.1, 0.9]), "times_seen": np.array([3, 3])}
            >>> card = DataMap(columns, ["a text", "another text"]).card(1)
            >>> card.shown, card.lines
            ('another text', ['1', 'suspicion 0.9'])
        """
        rows = np.flatnonzero(self["id"] == number)
        if not len(rows):
            raise KeyError(f"card: no sample {number}; use one of the column id")
        values: dict[str, Any] = {name: column[rows[0]] for name, column in self.items()}
        numbers = {
            name: f"{name} {value:.3g}"
            for name, value in values.items()
            if self[name].dtype.kind in "iuf" and name not in ("id", "label", "predicted")
        }
        names = self._names if classes is None else dict(enumerate(classes))
        label, predicted = (
            "" if values.get(name, -1) == -1 else str(names.get(values[name], values[name]))
            for name in ("label", "predicted")
        )
        if isinstance(values.get("label"), str) and not names:
            predicted = ""  # a number, whose name is not known
        mean = next(name for name in ("confidence", "loss_mean", "suspicion") if name in values)
        lines = [
            str(number),
            label if predicted in ("", label) else f"{label} → {predicted}",
            numbers[mean],
            "/".join(Path(values.get("file", "")).parts[-2:]),
        ]
        shown = read_sample(number, self._dataset, show, "\n".join(numbers.values()))
        return SampleCard([line for line in lines if line], shown)


def data_map(records: Mapping[str, Tensor], labels: Any = None, loss: str = "loss") -> DataMap:
    """Computes the data map, a table with one row per sample, from the sums that were stored in training.

    Args:
        records: Stored columns by name (the keys of `OBSERVED` and `OF_TOKENS`), tensors of shape (N,) on the CPU.
        labels: Classes of the samples, shape (N,). Default: not known.
        loss: Name of a token loss. Default: "loss", a cross-entropy.

    Returns:
        NumPy arrays of shape (N,) by name, such as "loss", "confidence" (mean probability of the label), "variability", "aum",
        "forgetting" and "suspicion"; without classes "loss_mean" and "loss_spread". NaN for a sample that was never seen.

    Example:
        >>> records = {name: torch.full((2,), column.fill, dtype=column.dtype) for name, column in OBSERVED.items()}
        >>> for name, value in {"seen": 2, "probability_sum": 1.0, "probability_squares": 0.5, "turns": 1}.items():
        ...     records[name][0] = value
        >>> data_map(records)["confidence"]
        array([0.5, nan])
    """
    known = {name: records[name].double().numpy() for name in STORED if name in records}
    seen = known["seen"]
    times = np.where(seen > 0, seen, np.nan)
    columns: dict[str, NDArray[Any]] = {"id": np.arange(len(seen))}
    if labels is not None:
        columns["label"] = np.asarray(labels)
    columns["times_seen"] = seen.astype(np.int64)
    columns["loss"] = np.where(seen > 0, known["last_loss"], np.nan)
    # If it was not known before training whether the criterion is a classification loss, the turns show it: only a
    # classification loss counts them.
    of_classes = (
        "loss_squares" not in known
        or known.get("turns", seen[:0]).max(initial=UNSEEN_TURNS) > UNSEEN_TURNS
    )
    if of_classes:
        columns["confidence"] = mean = known["probability_sum"] / times
        columns["variability"] = np.sqrt(
            np.maximum(known["probability_squares"] / times - mean**2, 0)
        )
        columns["aum"] = known["margin_sum"] / times
        columns["forgetting"] = np.maximum(known["turns"], 0).astype(np.int64) // 2
        columns["learned_at"] = np.where(known["streak"] > 0, seen - known["streak"] + 1, 0).astype(
            np.int64
        )
        if known["predicted"].max(initial=-1) >= 0:
            columns["predicted"] = known["predicted"].astype(np.int64)
        columns["suspicion"] = 1 - mean
        if "tokens" in known:
            columns[f"{loss}_mean"] = known["loss_sum"] / times
            columns["tokens"] = known["tokens"].astype(np.int64)
        if "tokens" in known and loss == "loss":
            with np.errstate(over="ignore"):
                columns["perplexity"] = np.exp(columns["loss_mean"])
        return DataMap(columns)
    columns["loss_mean"] = mean = known["loss_sum"] / times
    columns["loss_spread"] = np.sqrt(np.maximum(known["loss_squares"] / times - mean**2, 0))
    columns["suspicion"] = _ranks(mean)
    return DataMap(columns)


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns for each value the share of the known values that are smaller; NaN for NaN."""
    known = np.sort(values[~np.isnan(values)])
    ranks = np.searchsorted(known, values) / max(1, len(known))
    return np.where(np.isnan(values), np.nan, ranks)


def map_of(
    records: Records,
    dataset: Any,
    labels: Any = None,
    on_mismatch: Callable[[], None] | None = None,
    *,
    has_classes: bool = True,
    loss: str = "loss",
) -> DataMap:
    """Returns the data map of a run.

    Args:
        records: Records with the columns of `OBSERVED`.
        dataset: Dataset of the run, which may hold the classes.
        labels: Classes of the samples, shape (N,). Default: the classes of the dataset, or of the criterion if they differ.
        on_mismatch: Function that is called if the criterion got other classes than the dataset has. Default: none.
        has_classes: Whether the loss may be one of classes. If not, the dataset is not searched for them. Default: True.
        loss: Name of a token loss. Default: "loss".
    """
    columns = {name: records[name].cpu() for name in (*STORED, "stratum") if name in records}
    seen = columns.pop("stratum", torch.full((1,), -1, dtype=torch.int64)).long().numpy()
    names: dict[int, str] = {}
    if labels is None:
        with suppress(ValueError):
            if has_classes:
                stored = labels_of(dataset)
                codes_of(stored)  # refuses the targets of a regression
                labels = stored
        held = np.asarray(seen if labels is None else labels)
        # Labels that are not numbers, such as strings, only need to form the same classes as the numbers of the criterion.
        if held.dtype.kind in "biuf":
            alike = ((held == seen) | (seen < 0)).all()
        else:
            alike = same_classes(codes_of(held), seen)
        if not alike and on_mismatch is not None:
            on_mismatch()
        if not alike or (labels is None and seen.max() >= 0):
            labels = np.maximum(seen, -1)
        if alike:
            names = _names_of(dataset, held, seen)
    elif len(labels) != records.n:
        raise ValueError(
            f"data_map: `labels` must be the class of each of {records.n} samples, got {len(labels)}"
        )
    table = data_map(columns, labels, loss)
    files = files_of(dataset)
    if files is not None:
        table = {**table, "file": np.array(files, dtype=object)}
    return DataMap(table, dataset, names)


def _names_of(dataset: Any, labels: NDArray[Any], seen: NDArray[np.int64]) -> dict[int, str]:
    """Returns the known names of the classes by the numbers that the criterion gets."""
    if labels.dtype.kind in "OSU":
        numbers, rows = np.unique(seen, return_index=True)
        return dict(zip(numbers.tolist(), labels[rows].tolist(), strict=True))
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    classes = getattr(dataset, "classes", None)
    if isinstance(classes, list | tuple):
        return dict(enumerate(classes))
    return {}


def files_of(dataset: Any) -> list[str] | None:
    """Returns the names of the files of a dataset that lists one per sample, as ImageFolder and YOLO's do; None for others.

    Args:
        dataset: Map-style dataset, or a `Subset` of one.

    Example:
        >>> class Files(list):
        ...     samples = [(torch.__file__, 0), (np.__file__, 1)]
        >>> len(files_of(Files("ab"))), files_of([1, 2])
        (2, None)
    """
    if isinstance(dataset, Subset):
        files = files_of(dataset.dataset)
        return None if files is None else [files[i] for i in dataset.indices]
    for name in ("samples", "imgs", "im_files", "files"):
        rows = getattr(dataset, name, None)
        if isinstance(rows, list | tuple) and rows and len(rows) == len(dataset):
            files = [row[0] if isinstance(row, tuple) else row for row in rows]
            # Datasets of texts have lists of strings with these names, too, so the first entry must be an existing file. The
            # function of pathlib for this check raises an error for a long text.
            if all(isinstance(file, str | PathLike) for file in files) and isfile(files[0]):  # noqa: PTH113
                return [*map(str, files)]
    return None
