"""Orders chosen samples such that batches are stratified by class, and by score if a score is stored."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from thresher.methods.contract import EpochMethod, requirements_of, title_given
from thresher.plans import EpochPlan
from thresher.records import Column
from thresher.samplers.stratified import (
    StratifiedBatchSampler,
    arrange_rows,
    codes_of,
    group_ends,
    labels_of,
    same_classes,
    shuffle_within,
    strata_keys,
)
from thresher.selection import chunks, on_host

STRATUM = "stratum"
"""Column of the records, and signal, with the class of each sample, as `losses.signals.strata` gives it."""
STRATUM_COLUMN = Column(torch.int32, fill=-1, signal=STRATUM)
OTHER_LABELS = (
    "The labels stored in {} differ from the labels that the criterion gets, as with a `target_transform`. Stratified batches "
    "and run.data_map() use the labels of the criterion, except with attach(stratify=labels) and data_map(labels=...). This "
    "warning is given once."
)
NO_CLASSES = (
    "stratify='class': the dataset stores no classes, and losses come with no class per sample, as in regression, with several "
    "labels per sample, or from run.reduce without targets=. So batches are not stratified by class. Pass stratify=labels, the "
    "class of each sample, shape (N,)."
)
SCORES = ("uncertainty", "loss")
"""Columns by which the rows of a class are spread over the batches: the first of these that is recorded counts."""


def why_not_stratified(method: EpochMethod, *, streams: bool, free: bool) -> str:
    """Returns why the batches of a run cannot be stratified; "" if they can.

    Args:
        method: The epoch method.
        streams: Whether the loader iterates over an IterableDataset.
        free: Whether the order of the loader is a plain shuffle, which may be replaced.
    """
    if streams:
        return "`loader` iterates over an IterableDataset, whose order cannot be chosen"
    if not free:
        return "the loader's sampler sets another order: use shuffle=True"
    if requirements_of(method).order == "plan":
        return f"{title_given(method)} draws the order of training"
    return ""


def given_codes(labels: Any, loader: DataLoader[Any]) -> NDArray[Any] | None:
    """Returns the class of each sample if it is known before training; None if it is learned from the losses.

    Args:
        labels: Argument of `attach`; None for the classes in the loader's batch sampler or, without, in the dataset.
        loader: The loader.

    Raises:
        ValueError: There are more or fewer labels than samples.
    """
    samples = len(loader.dataset)  # pyright: ignore[reportArgumentType]
    if labels is None and isinstance(loader.batch_sampler, StratifiedBatchSampler):
        return loader.batch_sampler.codes
    try:
        codes = codes_of(labels_of(loader.dataset) if labels is None else labels)
    except ValueError:
        if labels is not None:
            raise
        return None
    if len(codes) != samples:
        raise ValueError(
            f"`stratify` must have the class of each of {samples} samples, got {len(codes)}"
        )
    return codes


@dataclass(frozen=True, eq=False)
class Strata:
    """What the batches of a run are stratified by.

    Args:
        codes: Class of each sample of the dataset, shape (N,), integers; None if the run learns them from the losses.
        on_mismatch: Function that is called if the criterion gets other classes, which are then used. Default None: `codes` are
            always used.
    """

    codes: NDArray[Any] | None = None
    on_mismatch: Callable[[], None] | None = None

    def has_classes(self, records: Mapping[str, Tensor]) -> bool:
        """Returns whether the class of a sample is known: in advance, or from the losses recorded so far."""
        return self.codes is not None or (
            STRATUM in records and bool((records[STRATUM] >= 0).any())
        )

    def in_order(
        self,
        plan: EpochPlan,
        records: Mapping[str, Tensor],
        steps: NDArray[np.int64],
        generator: torch.Generator,
        *,
        ranks: int,
        by_rows: bool,
    ) -> EpochPlan:
        """Returns a plan in stratified order; unchanged if neither classes nor scores are known.

        Args:
            plan: Chosen samples of an epoch.
            records: Records of all samples.
            steps: Number of rows of all processes in each step, shape (steps,).
            generator: Random generator.
            ranks: Number of processes that share each step.
            by_rows: Whether W processes get every W-th row of the order, rather than every W-th batch.
        """
        ids = plan.ids.numpy()
        recorded = _read_column(records, (STRATUM,), ids)
        codes = recorded if self.codes is None else self.codes[ids]
        if (
            self.on_mismatch is not None
            and codes is not None
            and recorded is not None
            and not same_classes(codes, recorded)
        ):
            self.on_mismatch()
            codes = recorded
        keys = strata_keys(codes, scores := _read_column(records, SCORES, ids))
        # Drawn before it is known whether there are classes, so that later draws of the plan do not depend on that.
        numbers = np.random.default_rng(int(torch.randint(2**62, (), generator=generator)))
        if keys is None or not len(keys) or (keys == keys[0]).all():
            return plan
        by_score = scores is not None
        # At 10^8 samples each of these columns is hundreds of megabytes.
        del codes, scores, recorded
        sorted_rows = np.argsort(keys, kind="stable").astype(
            np.int32 if len(ids) < 2**31 else np.int64
        )
        # Within a class the order is random; a stable sort would leave it in that of the ids.
        if not by_score:
            shuffle_within(sorted_rows, group_ends(keys[sorted_rows]), numbers)
        del keys
        rows = _deal(sorted_rows, steps, by_rows, ranks, numbers)
        ordered = np.empty_like(ids)
        for part in chunks(len(ids)):
            ordered[part] = ids[rows[part]]
        weights = None if plan.weights is None else plan.weights[torch.from_numpy(rows)]
        return replace(plan, ids=torch.from_numpy(ordered), weights=weights, drawn=True)


def _read_column(
    records: Mapping[str, Tensor], names: tuple[str, ...], ids: NDArray[Any]
) -> NDArray[Any] | None:
    """Returns a column of some samples: the first that is recorded; None if none is."""
    for name in names:
        if name in records:
            column = records[name].index_select(0, torch.from_numpy(ids).to(records[name].device))
            return on_host(column if name == STRATUM else column.float())
    return None


def _deal(
    rows: NDArray[Any],
    steps: NDArray[np.int64],
    by_rows: bool,
    ranks: int,
    numbers: np.random.Generator,
) -> NDArray[Any]:
    """Returns sorted rows in the order of training, in which the part of each rank in a step is stratified.

    Args:
        rows: Rows, shape (k,), sorted by stratum.
        steps: Number of rows of all ranks in each step.
        by_rows: Whether row p of the order belongs to rank p % W. If False, batch b belongs to rank b % W.
        ranks: Number of ranks W.
        numbers: Random generator.
    """
    # Rows that no rank gets make a last step; padding rows, repeated from the start, are in none.
    ends = np.minimum(np.append(0, steps.cumsum()), len(rows))
    sizes = np.diff(np.append(ends, len(rows)))
    sizes = sizes[sizes > 0]
    if ranks == 1:
        return arrange_rows(rows, sizes, numbers)
    order = arrange_rows(np.arange(len(rows), dtype=rows.dtype), sizes, numbers)
    begin = 0
    for end in sizes.cumsum().tolist():
        # Of a last step that cannot be shared equally, the ranks get any rows.
        if (end - begin) % ranks == 0:
            # Every W-th row in the order of the strata. Turned, so that the first is not always that of rank 0, and in a random
            # order: no place in a batch may belong to a class, as mixup pairs rows by their places.
            by_rank = np.roll(np.sort(order[begin:end]), numbers.integers(ranks)).reshape(-1, ranks)
            by_rank = numbers.permutation(by_rank)
            order[begin:end] = (by_rank if by_rows else by_rank.T).ravel()
        begin = end
    return rows[order]
