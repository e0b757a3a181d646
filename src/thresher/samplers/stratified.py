"""Batches that are stratified samples: a class has the same share of each batch as of the dataset, up to whole numbers.

The rows of an epoch are sorted by stratum (class and score) and cut into groups of neighbors, each of as many rows as there are
batches. Each batch gets one row of every group. The golden ratio decides which batch gets which row of a group, so that several
consecutive batches together are even closer to the shares. The gradient of such a batch varies less than that of a random one
(docs/stratified.md).
"""

import reprlib
import zlib
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Sampler, Subset, TensorDataset

from thresher.samplers.epochs import BatchComposer
from thresher.samplers.shuffle import Shuffle
from thresher.selection import chunks

GOLDEN = (5**0.5 - 1) / 2
LARGEST_KEY = 2**16
"""Number of keys of a radix sort: classes times levels of the score."""
FEWEST_LEVELS = 16
"""Smallest number of levels of the score in a class, however many classes there are."""

BY_ONE_ORDER = 32
"""Number of consecutive batches whose rows are shuffled by the same permutation."""


def strata_keys(codes: NDArray[Any] | None, scores: NDArray[Any] | None) -> NDArray[Any] | None:
    """Returns a sort key for each row: by class, and by score within it, ascending in one class and descending in the next.

    Args:
        codes: Class of each row, shape (k,), integers; -1 for an unknown class. None: no classes.
        scores: Score of each row, shape (k,), floats; values that are not finite count as the smallest. None: no scores.

    Returns:
        Sort keys, shape (k,), in the smallest dtype that is enough of uint16, uint32 and uint64; None if there are neither
        classes nor scores.
    """
    known = scores if codes is None else codes
    if known is None or not len(known):
        return None
    low, high = (0, 0) if codes is None else (int(codes.min()), int(codes.max()))
    classes = high - low + 1
    levels = 1 if scores is None else max(FEWEST_LEVELS, LARGEST_KEY // classes)
    kinds = classes * levels
    wide = np.uint32 if kinds <= 2**32 else np.uint64
    keys = np.zeros(len(known), dtype=np.uint16 if kinds <= LARGEST_KEY else wide)
    least, scale = _scale(scores, levels)
    for part in chunks(len(keys)):
        if codes is None:
            key = np.zeros(len(keys[part]), dtype=np.int64)
        else:
            key = codes[part].astype(np.int64) - low
        if scores is not None:
            level = (np.where(np.isfinite(scores[part]), scores[part] - least, 0) * scale).astype(
                np.int64
            )
            # Ascending in one class, descending in the next, so that neighbors are alike even in a group with rows of both.
            key = key * levels + np.where(key % 2 == 1, levels - 1 - level, level)
        keys[part] = key
    return keys


def _scale(scores: NDArray[Any] | None, levels: int) -> tuple[np.float32, np.float32]:
    """Returns the smallest finite score, and the number of levels per unit of the score, 0 if all scores are the same."""
    ends = [np.inf, -np.inf]
    for part in chunks(0 if scores is None else len(scores)):
        finite = scores[part][np.isfinite(scores[part])]  # pyright: ignore[reportOptionalSubscript]
        ends = [min(ends[0], finite.min(initial=np.inf)), max(ends[1], finite.max(initial=-np.inf))]
    width = ends[1] - ends[0]
    return np.float32(ends[0] if width >= 0 else 0), np.float32(
        (levels - 1) / width if 0 < width < np.inf else 0
    )


def arrange_rows(
    rows: NDArray[Any], sizes: NDArray[np.int64], generator: np.random.Generator
) -> NDArray[Any]:
    """Takes rows sorted by stratum, and returns them in an order whose batches are stratified.

    Args:
        rows: Rows, shape (k,), sorted by stratum.
        sizes: Number of rows of each batch, shape (batches,), 1 or more; they add up to k. If sizes differ, rows are first
            divided among the sizes: all batches of one size together get rows at equal distances in `rows`.
        generator: Random generator. It decides in which batch each group of neighboring rows begins, and the order within
            batches.

    Returns:
        The rows, batch after batch, shape (k,); their order within a batch is random.
    """
    begins = np.concatenate([[0], sizes.cumsum()])
    order = np.empty_like(rows)
    # Sizes that differ by one, as those of smaller batches, are dealt together.
    common = int(np.sort(sizes)[(len(sizes) - 1) // 2])
    regular = (sizes == common) | (sizes == common + 1)
    # Other sizes: a short last batch, or full batches among smaller ones.
    for size in np.unique(sizes[~regular]).tolist():
        batches = np.flatnonzero(sizes == size)
        sample, rows = _take_evenly(rows, size * len(batches), generator)
        _deal(sample, size, begins[batches], order, generator)
    batches = np.flatnonzero(regular)
    # The one further row of larger batches first, then equally many for all.
    larger = np.flatnonzero(sizes == common + 1)
    sample, rows = _take_evenly(rows, len(larger), generator)
    _deal(sample, 1, begins[larger] + common, order, generator)
    _deal(rows, common, begins[batches], order, generator)
    return order


def _take_evenly(
    rows: NDArray[Any], k: int, generator: np.random.Generator
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Returns k rows at equal distances, and the others."""
    if k == 0:
        return rows[:0], rows
    places = _even_positions(len(rows), k, generator)
    return rows[places], np.delete(rows, places)


def _even_positions(n: int, k: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """Returns k of n positions, at equal distances, beginning with a random one."""
    return ((np.arange(k) + generator.random()) * (n / k)).astype(np.int64)


def _deal(
    rows: NDArray[Any],
    size: int,
    begins: NDArray[np.int64],
    order: NDArray[Any],
    generator: np.random.Generator,
) -> None:
    """Distributes sorted rows over batches of one size, which begin at the positions `begins` of `order`."""
    steps = len(begins)
    if not steps or not size:
        return
    # The j-th row of a group goes to the batch whose number is the rank of the fraction of j * GOLDEN, shifted by a random
    # start.
    by_batch = np.argsort((np.arange(steps) * GOLDEN) % 1.0)
    dealt = np.empty((size, steps), dtype=rows.dtype)
    starts = generator.integers(steps, size=size)
    for group, start in zip(range(size), starts.tolist(), strict=True):
        turned = rows[group * steps : (group + 1) * steps][by_batch]
        dealt[group, start:] = turned[: steps - start]
        dealt[group, :start] = turned[steps - start :]
    contiguous = steps == 1 or bool((np.diff(begins) == size).all())
    # A view of `order`, so that the rows are written in place.
    if contiguous:
        columns = order[begins[0] : begins[0] + size * steps].reshape(steps, size)
    else:
        columns = np.empty_like(dealt.T, order="C")
    # torch transposes by blocks that fit the cache; NumPy does not.
    torch.from_numpy(columns).copy_(torch.from_numpy(dealt).t())
    # Mixup pairs rows by their positions in a batch, so no position may belong to a class.
    for first in range(0, steps, BY_ONE_ORDER):
        some = columns[first : first + BY_ONE_ORDER]
        some[:] = some[:, generator.permutation(size)]
    if not contiguous:
        for begin, batch in zip(begins.tolist(), columns, strict=True):
            order[begin : begin + size] = batch


class StratifiedBatchSampler(BatchComposer):
    """Sampler of batches in which every class has the same share as in the dataset, as closely as whole numbers allow.

    Use it as `DataLoader(dataset, batch_sampler=StratifiedBatchSampler(labels, 64))`, with or without a `thresher.Run`. Every
    sample comes once per epoch. The number of rows of a class in a batch is within 2 of its share, and closer over several
    batches. The gradient of such a batch varies less than the gradient of a random batch, which helps when training is short.
    Classes are not balanced: a rare class stays rare.

    The first loop over the sampler yields epoch 0, and each further loop the next epoch. After `set_epoch(e)`, the next loop
    yields epoch `e`. No global random state is used.

    With W processes, each process gets every W-th batch, so the batches of one step are also stratified together. The batches
    are the same for any W. If their number is not divisible by W, the first batches come again.

    Args:
        labels: Class of each sample: list, array or tensor of numbers or strings, shape (N,), or of several columns, shape
            (N, columns), where each combination of values is a class. See `labels_of`.
        batch_size: Number of rows of a batch (of one process), 1 or more.
        scores: Score of each sample, shape (N,), such as a loss: within each class, batches then also have small and large
            scores in the same shares as the dataset. Default: none.
        drop_last: Whether to leave out rows that do not fill a batch (a stratified sample, new in each epoch), and the last
            batches if the processes cannot get equally many. Default: False, for a smaller last batch.
        seed: Random seed. Default: 0.
        num_replicas: Number of processes that share the batches. Default: the world size of torch.distributed if it is
            initialized, else 1. Pass num_replicas=1, rank=0 if other code divides the data among processes, such as
            `accelerator.prepare`.
        rank: Number of this process, within [0, num_replicas). Default: the rank in torch.distributed, or 0.

    Attributes:
        epoch: Number of the next epoch, which the next loop over the sampler yields.

    Raises:
        TypeError: `seed` or `batch_size` is not an integer.
        ValueError: `batch_size` is below 1, `labels` are empty, `scores` do not fit them, or `num_replicas` and `rank` do not
            fit together.

    Example:
        >>> sampler = StratifiedBatchSampler(["cat"] * 4 + ["dog"] * 8, batch_size=3)
        >>> [sorted(batch)[0] < 4 <= sorted(batch)[1] for batch in sampler]
        [True, True, True, True]
        >>> len(sampler), sampler.epoch
        (4, 1)
    """

    def __init__(
        self,
        labels: ArrayLike | Tensor,
        batch_size: int,
        *,
        scores: ArrayLike | None = None,
        drop_last: bool = False,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(seed, num_replicas, rank, drop_last, batch_size=batch_size)
        self.codes = codes_of(labels)
        self.batch_size = self._rows_per_item = batch_size
        n = len(self.codes)
        values = None if scores is None else np.asarray(scores, dtype=np.float32)
        if values is not None and values.shape != (n,):
            raise ValueError(
                f"StratifiedBatchSampler: `scores` must have shape ({n},), got {values.shape}"
            )
        self.sampler = Shuffle(n, seed, num_replicas=num_replicas, rank=rank, drop_last=drop_last)
        """Random order of the ids, for code that reads `sampler` of a batch sampler; an attached run computes its own order."""
        keys = strata_keys(self.codes, values)
        self._sorted = np.argsort(keys, kind="stable").astype(np.int32 if n < 2**31 else np.int64)  # pyright: ignore
        self._keys = keys
        ends = group_ends(keys[self._sorted])  # pyright: ignore[reportOptionalSubscript]
        self._checksum = zlib.crc32(ends.data, zlib.crc32(self._sorted.data))

    @property
    def samples(self) -> int:
        """Number of samples of the dataset."""
        return len(self.codes)

    def compose(
        self, ids: NDArray[np.int64], epoch: int, batches: int | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the batches of an epoch; see `BatchComposer.compose`."""
        generator = np.random.default_rng((self.seed, epoch))
        wanted = np.zeros(self.samples, dtype=np.bool_)
        wanted[ids] = True
        rows = self._sorted[wanted[self._sorted]]
        keys = self._keys[rows]  # pyright: ignore[reportOptionalSubscript]
        shuffle_within(rows, group_ends(keys), generator)
        ends = self._cut_rows(len(rows), batches)
        rows, _ = _take_evenly(rows, int(ends[-1]), generator)
        if len(rows):
            rows = arrange_rows(rows, np.diff(ends), generator)
        return rows.astype(np.int64), ends

    def settings(self) -> dict[str, Any]:
        """Returns the settings that determine the order, as plain values; for the labels and scores a checksum."""
        return super().settings() | {"labels": self._checksum}


def group_ends(keys: NDArray[Any]) -> NDArray[np.int64]:
    """Returns where each group of equal neighbors ends, after a leading 0.

    Args:
        keys: Keys, shape (k,).

    Example:
        >>> group_ends(np.array([3, 3, 5]))
        array([0, 2, 3])
    """
    return np.concatenate([[0], np.flatnonzero(keys[1:] != keys[:-1]) + 1, [len(keys)]])


def shuffle_within(
    rows: NDArray[Any], ends: NDArray[np.int64], generator: np.random.Generator
) -> None:
    """Shuffles rows within each group of neighbors, in place.

    Args:
        rows: Rows, shape (k,).
        ends: Positions at which groups begin, and the end of the last group, ascending, from 0 to k.
        generator: Random generator.
    """
    for begin, end in pairwise(ends.tolist()):
        generator.shuffle(rows[begin:end])


def codes_of(labels: Any) -> NDArray[Any]:
    """Returns the class of each sample as a number from 0 on; some numbers may have no sample.

    Args:
        labels: List, array or tensor, shape (N,) or (N, columns); with several columns each combination is a class.

    Returns:
        Numbers, shape (N,), in the smallest unsigned dtype that is enough.

    Raises:
        ValueError: There are no labels, they have more than two dimensions, or they are neither numbers nor strings; or most
            of them are different fractions.

    Example:
        >>> codes_of(["b", "a", "b"]), codes_of([[0, 1], [0, 2], [0, 1]])
        (array([1, 0, 1], dtype=uint8), array([0, 1, 0], dtype=uint8))
    """
    values = values_of(labels)
    if values.ndim not in (1, 2) or not values.size:
        raise ValueError(
            f"labels must have shape (N,) or (N, columns), with at least one sample, got shape {values.shape}"
        )
    # Integers within a small range need no sort.
    if (
        values.ndim == 1
        and values.dtype.kind in "iu"
        and int(values.max()) - int(values.min()) < LARGEST_KEY
    ):
        return (values - values.min()).astype(
            np.min_scalar_type(int(values.max()) - int(values.min()))
        )
    kinds, codes = np.unique(values, return_inverse=True, axis=0 if values.ndim == 2 else None)
    # Values like the targets of a regression would make almost each sample a class of its own.
    if (
        values.dtype.kind == "f"
        and len(values) < 2 * len(kinds)
        and (values != values.round()).any()
    ):
        raise ValueError(
            f"labels must be classes, got {len(kinds):,} different numbers for {len(values):,} samples. Group them, as with "
            "labels = np.digitize(values, np.quantile(values, [0.25, 0.5, 0.75]))"
        )
    return codes.reshape(-1).astype(np.min_scalar_type(len(kinds) - 1))


def values_of(labels: Any) -> NDArray[Any]:
    """Returns labels as an array of numbers or strings.

    Raises:
        ValueError: The labels are something else, such as dicts or lists of different lengths.
    """
    if isinstance(labels, Sampler):
        # Trainer(devices=2) of Lightning creates the batch sampler anew, with a DistributedSampler in the place of the labels.
        raise TypeError(
            f"labels must be numbers or strings, got {type(labels).__name__}. With Lightning, pass "
            "use_distributed_sampler=False to the Trainer: the batch sampler divides its batches among the processes itself."
        )
    try:
        if isinstance(labels, Tensor):
            values = labels.detach().cpu().numpy()
        else:
            values = np.asarray(labels)
    except (TypeError, ValueError, RuntimeError):
        values = np.empty(0, dtype=object)
    kinds = set(map(type, values.flat)) if values.dtype == object else {values.dtype.type}
    if len(kinds) != 1 or not issubclass(
        kinds.pop(), str | bytes | int | float | np.number | np.bool_
    ):
        raise ValueError(
            f"labels must be numbers or strings, one or several per sample, got {reprlib.repr(labels)}"
        )
    return values


def same_classes(codes: NDArray[Any], seen: NDArray[Any]) -> bool:
    """Returns whether two lists of classes divide the samples in the same way, whatever the names of the classes.

    Args:
        codes: Class of each sample, shape (N,), numbers from 0 on.
        seen: Class of each sample in the other list, shape (N,), integers; below 0 if unknown.

    Example:
        >>> same_classes(np.array([0, 1, 1]), np.array([7, 5, -1])), same_classes(np.array([0, 1, 1]), np.array([7, 5, 7]))
        (True, False)
    """
    known = seen >= 0
    # The other name of each class, by any of its samples; all its samples must agree, and no two classes may share a name.
    names = np.full(int(codes.max(initial=0)) + 1, -1, dtype=seen.dtype)
    names[codes[known]] = seen[known]
    used = names[names >= 0]
    return bool((names[codes[known]] == seen[known]).all()) and len(np.unique(used)) == len(used)


NAMES = ("targets", "labels", "label")
"""Names of attributes, and of columns, that hold the classes of a dataset."""


def labels_of(dataset: Any) -> Any:
    """Returns the classes that a dataset stores, as those of torchvision, Hugging Face and others do.

    No sample is loaded. Classes are read from an attribute or column `targets`, `labels` or `label`, or from the last tensor of
    a TensorDataset if it has integers, also inside a `Subset` or a `ConcatDataset`. Only one number or string per sample counts
    as a class, not dicts, boxes or names of files.

    Args:
        dataset: Map-style dataset.

    Returns:
        Classes: a list, array or tensor of shape (N,).

    Raises:
        ValueError: No classes were found in the dataset.

    Example:
        >>> from torch.utils.data import Subset, TensorDataset
        >>> data = TensorDataset(torch.rand(4, 2), torch.tensor([1, 0, 1, 2]))
        >>> labels_of(Subset(data, [0, 3])).tolist()
        [1, 2]
    """
    if isinstance(dataset, Subset):
        return np.asarray(labels_of(dataset.dataset))[np.asarray(dataset.indices)]
    if isinstance(dataset, ConcatDataset):
        return np.concatenate([np.asarray(labels_of(part)) for part in dataset.datasets])
    candidates = [getattr(dataset, name) for name in NAMES if hasattr(dataset, name)]
    candidates += [
        dataset[name] for name in NAMES if name in (getattr(dataset, "column_names", None) or ())
    ]
    if isinstance(dataset, TensorDataset) and not dataset.tensors[-1].is_floating_point():
        candidates.append(dataset.tensors[-1])
    for labels in candidates:
        with suppress(IndexError, TypeError, ValueError):
            values = values_of(labels)
            # Strings that are all different are file names, not classes.
            if values.shape == (len(dataset),) and not (
                isinstance(values[0], str) and len({*values.tolist()}) == len(values)
            ):
                return labels
    raise ValueError(
        f"{type(dataset).__name__} has no classes in {', '.join(NAMES)}: pass them yourself, such as "
        "labels=[label for _, label in dataset]"
    )
