"""Puts the rows of a plan into an order whose batches are stratified by class, and by score where one is recorded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from thresher.loading.stratified import StratifiedBatchSampler, arranged, codes_of, labels_of, same_classes, strata_keys
from thresher.methods.contract import EpochMethod, requirements_of
from thresher.plans import EpochPlan
from thresher.records import Column
from thresher.selection import chunks, on_host
from thresher.shards import World

STRATUM = "stratum"
"""Column of the records, and signal, with the class of each sample, as `losses.signals.strata` gives it."""
STRATUM_COLUMN = Column(torch.int32, fill=-1, signal=STRATUM)
OTHER_LABELS = (
    "The labels that {} holds are not those that the criterion gets, as with a `target_transform`. Stratified batches and "
    "run.data_map() have those of the criterion, but for attach(labels=...) and data_map(labels=...). This is said once."
)
SCORES = ("uncertainty", "loss")
"""Columns by which rows of a class are spread over the batches; the first one that is recorded."""


def why_not_stratified(method: EpochMethod, *, streams: bool, free: bool) -> str:
    """Returns why the batches of a run cannot be stratified; "" if they can.

    Args:
        method: The epoch method.
        streams: Whether the loader iterates over an IterableDataset.
        free: Whether the order of the loader is a plain shuffle, which another one may replace.
    """
    if streams:
        return "`loader` iterates over an IterableDataset, which has no epoch whose order could be chosen"
    if not free:
        return "the loader's sampler has an order of its own: use shuffle=True"
    return f"{type(method).__name__} draws the order of training" if requirements_of(method).order == "plan" else ""


def given_codes(labels: Any, loader: DataLoader[Any]) -> NDArray[Any] | None:
    """Returns the class of each sample where it is known before the training; None where it is to be recorded.

    Args:
        labels: Argument of `attach`; None for what the loader's sampler of batches has, or else the dataset holds.
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
        raise ValueError(f"`labels` must have the class of each of {samples} samples, got {len(codes)}")
    return codes


StepLayout = Callable[[EpochPlan], tuple[NDArray[np.int64], bool]]
"""Function of a drawn plan of all ranks: the rows of a rank in each step, and whether ranks are dealt row after row."""


@dataclass(frozen=True, eq=False)
class Strata:
    """What the batches of a run are stratified by.

    Args:
        codes: Class of each sample of the dataset, shape (N,), whole numbers; None where the run records it, if there are any.
        on_mismatch: Function that is called when the criterion gets other classes, which are used then. Default None: the codes
            are used, whatever the criterion gets.
    """

    codes: NDArray[Any] | None = None
    on_mismatch: Callable[[], None] | None = None

    def in_order(
        self, plan: EpochPlan, records: Mapping[str, Tensor], layout: StepLayout, world: World, generator: torch.Generator
    ) -> EpochPlan:
        """Returns a plan in the order of training; as it is where nothing is known to stratify it by.

        Args:
            plan: Part of the plan that is of this rank's block.
            records: Records of this rank.
            layout: Function of a plan that was drawn, see `StepLayout`.
            world: The ranks, which all call it together.
            generator: Random generator, in the same state on all ranks.

        Returns:
            The plan of all ranks, drawn.
        """
        # Records are of this rank's block, and ids are of all samples.
        first = 0 if world.size == 1 else records.shard.first  # pyright: ignore[reportAttributeAccessIssue]
        ids = plan.ids.numpy()
        own = ids - first if first else ids
        ids = world.join(ids)
        recorded = _recorded(records, (STRATUM,), own, world)
        codes = recorded if self.codes is None else self.codes[ids]
        if self.on_mismatch is not None and codes is not None and recorded is not None and not same_classes(codes, recorded):
            self.on_mismatch()
            codes = recorded
        keys = strata_keys(codes, scores := _recorded(records, SCORES, own, world))
        # Drawn before it is known whether there are classes, so that later draws of the plan do not depend on that.
        numbers = np.random.default_rng(int(torch.randint(2**62, (), generator=generator)))
        if keys is None or not len(keys) or (keys == keys[0]).all():
            return plan
        by_score = scores is not None
        # At 10^8 samples each of these columns is hundreds of megabytes.
        del codes, scores, recorded
        sorted_rows = np.argsort(keys, kind="stable").astype(np.int32 if len(ids) < 2**31 else np.int64)
        if not by_score:  # within a class the order is random
            for stratum in np.split(sorted_rows, np.flatnonzero(np.diff(keys[sorted_rows])) + 1):
                numbers.shuffle(stratum)
        del keys
        weights = None if plan.weights is None else world.join(plan.weights.numpy())
        # The number of rows of each step follows from the plan of all ranks, before the rows have their order.
        plan = replace(plan, ids=torch.from_numpy(ids), weights=None, drawn=True)
        rows = _dealt(sorted_rows, *layout(plan), world.size, numbers)
        ordered = np.empty_like(ids)
        for part in chunks(len(ids)):
            ordered[part] = ids[rows[part]]
        return replace(
            plan, ids=torch.from_numpy(ordered), weights=None if weights is None else torch.from_numpy(weights[rows])
        )


def _recorded(records: Mapping[str, Tensor], names: tuple[str, ...], rows: NDArray[Any], world: World) -> NDArray[Any] | None:
    """Returns a column of some rows, and of the rows of all other ranks: the first that is recorded; None if none is."""
    for name in names:
        if name in records:
            column = records[name].index_select(0, torch.from_numpy(rows).to(records[name].device))
            return world.join(on_host(column if name == STRATUM else column.float()))
    return None


def _dealt(
    rows: NDArray[Any], steps: NDArray[np.int64], by_rows: bool, ranks: int, numbers: np.random.Generator
) -> NDArray[Any]:
    """Returns sorted rows in the order that is dealt out to the ranks: each of them has batches that are stratified.

    Args:
        rows: Rows, shape (k,), sorted by stratum.
        steps: Number of rows of a rank in each step.
        by_rows: Whether place p of the order is a row of rank p % W, rather than every W-th batch one of a rank.
        ranks: Number of ranks W.
        numbers: Random generator.
    """
    sizes = np.repeat(steps, ranks)
    missing = int(sizes.sum()) - len(rows)
    if missing < 0:  # rows that no rank gets
        sizes = np.append(sizes, -missing)
    at = len(sizes) - 1
    while missing > 0:  # rows that the order is continued with, by its beginning
        less = min(missing, 1 if by_rows and ranks > 1 else int(sizes[at]))
        sizes[at] -= less
        missing, at = missing - less, at - 1
    order = arranged(rows, sizes[sizes > 0], numbers)
    if not by_rows or ranks == 1:
        return order
    begin = 0
    for some in sizes[: len(steps) * ranks].reshape(-1, ranks):
        end = begin + int(some.sum())
        places = np.arange(some.max())[:, None] < some  # in the last step, the first ranks may have one row more
        by_rank = np.full(places.T.shape, -1, dtype=order.dtype)
        by_rank[places.T] = order[begin:end]
        order[begin:end] = by_rank.T[places]
        begin = end
    return order
