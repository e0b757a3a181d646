"""Writes the entries of `run.history`: facts about the chosen samples of each epoch, counts and losses."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thresher.attribution.rows import AttributionError
from thresher.methods.contract import requirements_of, title_given
from thresher.methods.full import FullData
from thresher.records import NEVER_SEEN
from thresher.run.parts import Parts
from thresher.warning import warn

# Masks and copies of all samples at once would take more memory than the column itself.
LOOKED_AT = 2**20
"""Number of losses that are checked together."""

NAMED = 5
"""Largest number of samples whose ids a message lists."""


def not_finite(losses: Tensor) -> tuple[int, NDArray[np.int64]]:
    """Returns the number of losses that are NaN or +inf, and the ids of the first of them; this waits for the device.

    Args:
        losses: Last loss of each sample, shape (N,), on any device; -inf stands for a sample that was never seen.

    Example:
        >>> not_finite(torch.tensor([0.5, float("nan"), float("-inf"), float("inf")]))
        (2, array([1, 3]))
    """
    pieces = losses.split(LOOKED_AT)
    # One comparison finds both: NaN compares false with everything, and inf is not less than itself. -inf passes, as it must.
    # All counts are read from the device at once.
    counts = torch.stack([len(piece) - (piece < torch.inf).sum() for piece in pieces]).tolist()
    first_ids = [np.empty(0, dtype=np.int64)]
    for number, piece in enumerate(pieces):
        if counts[number] and sum(map(len, first_ids)) < NAMED:
            positions = (piece < torch.inf).logical_not_().nonzero().flatten()[:NAMED]
            first_ids.append(positions.cpu().numpy() + number * LOOKED_AT)
    return sum(counts), np.concatenate(first_ids)[:NAMED]


def mean_loss(losses: Tensor) -> float | None:
    """Returns the mean of the finite losses, with four digits; None if no loss is finite.

    Args:
        losses: Last loss of each sample, shape (N,), on any device; -inf stands for a sample that was never seen.

    Example:
        >>> mean_loss(torch.tensor([0.5, float("nan"), float("-inf"), 1.5]))
        1.0
    """
    # A sum of millions of losses in float32 would lose digits.
    sums = torch.zeros(2, dtype=torch.float64, device=losses.device)
    for piece in losses.split(LOOKED_AT):
        finite = piece.isfinite()
        sums += torch.stack(
            [
                torch.where(finite, piece, 0).sum(dtype=torch.float64),
                finite.sum(dtype=torch.float64),
            ]
        )
    total, count = sums.tolist()
    # Rounded: the last bits of the losses depend on the number of processes that computed them.
    return float(f"{total / count:.4g}") if count else None


def _is_to_save(method: Any) -> bool:
    """Returns whether a method is there to leave samples out: its settings do not keep all of them."""
    # A method that draws the order of training, as in importance sampling, may draw as many samples as there are.
    draws = requirements_of(method).order == "plan"
    return not (
        draws
        or isinstance(method, FullData)
        or 1 in (getattr(method, "keep", 0), getattr(method, "share", 0))
    )


COUNTED = (
    "forward",
    "backward",
    "refresh",
    "scoring",
    "comparing",
    "steps",
    "full_forward",
    "full_backward",
)
"""Fields of `Cost` whose values per epoch are in the history."""


def _left_samples_out(entry: Mapping[str, Any]) -> bool:
    """Returns whether the method of a run left a sample out of an epoch, by the entry of the epoch."""
    counts = (
        ("backward", "full_backward"),
        ("selected", "candidates"),
        ("batch_selected", "batch_candidates"),
    )
    return any(entry.get(some, 0) < entry.get(every, 0) for some, every in counts)


class History:
    """Writes an entry when an epoch ends, and the counts of the epoch when its last step is over.

    Args:
        parts: Parts of the run.
    """

    def __init__(self, parts: Parts) -> None:
        self._config = parts.config
        self._cost = parts.cost
        self._records = parts.records
        self._accumulator = parts.accumulator
        self._timing = parts.timing
        self.entries: list[dict[str, Any]] = []
        """One entry per epoch that is over."""
        self._counted_before = dict.fromkeys(COUNTED, 0)
        self._traced_s = 0.0
        self._warned = False
        self.nothing_saved = ""
        """Text of the warning that no sample was left out of any epoch; "" if there was none."""

    def close(self, tracing_s: float) -> dict[str, Any] | None:
        """Adds the counts of the last epoch to its entry, and returns the entry; None if this was already done.

        Args:
            tracing_s: Seconds of the run's steps that tracing the model has taken.
        """
        # The last step of an epoch may come after its entry, so its counts are added later, and once.
        if not self.entries or "forward" in self.entries[-1]:
            return None
        self._accumulator.settle()
        entry = self.entries[-1]
        counted = asdict(self._cost)
        entry |= {name: counted[name] - self._counted_before[name] for name in COUNTED}
        self._counted_before = {name: counted[name] for name in COUNTED}
        before = self._traced_s
        self._traced_s = tracing_s
        self._timing.close(epoch=entry["epoch"], tracing_s=tracing_s - before)
        return entry

    def check(self) -> None:
        """Reads the results of checks on the device in the finished epoch, before its records are used.

        Raises:
            AttributionError: Targets on the device differed from the targets of the samples that the outputs belong to.
            FloatingPointError: Losses are not finite, with on_nonfinite="raise".
        """
        self._accumulator.settle()
        # Comparisons on a device are read once an epoch: read in the step they would make the host wait.
        doubts = self._accumulator.doubts
        self._accumulator.doubts = []
        # Every process takes part, even without doubts, because `total` needs all of them.
        if self._config.world.total(bool(doubts) and not bool(torch.stack(doubts).all())):
            raise AttributionError(
                "In the epoch that just ended, some targets differed from the targets of the samples that the outputs belong "
                "to, or `ids` were wrong or had a sample more than once. These losses were not recorded."
            )
        # Once per epoch, although the check runs again before a plan.
        if "loss" in self._records and self.entries and "nonfinite" not in self.entries[-1]:
            self._check_losses(self.entries[-1], self._records["loss"])

    def _check_losses(self, entry: dict[str, Any], losses: Tensor) -> None:
        # With another fill, samples that were never seen would look as if they had a loss.
        shows_seen = self._records.columns["loss"].fill == NEVER_SEEN
        mean_of = mean_loss if shows_seen else lambda _: None
        # Only process 0 has the records; the error below is raised in all processes.
        count, some, mean = self._config.world.from_first(
            lambda: (*not_finite(losses), mean_of(losses))
        )
        entry["nonfinite"] = count
        if mean is not None:
            entry["mean_loss"] = mean
        if not count:
            return
        message = f"{count} samples have a loss that is not finite (ids {some.tolist()}{' ...' if count > 5 else ''})"
        if self._config.given.on_nonfinite == "raise":
            raise FloatingPointError(f"{message}; attach(on_nonfinite='keep') trains on")
        if not self._warned:
            self._warned = True
            warn(
                f"{message}; they are kept for training and not scored. This warning is given once."
            )

    def warn_if_nothing_saved(self) -> None:
        """Warns if the method left no sample out of any epoch, after a last epoch whose plan has every sample."""
        names = " and ".join(title_given(one) for one in self._config.methods if _is_to_save(one))
        if not names or self._cost.unknown is not None or any(map(_left_samples_out, self.entries)):
            return
        back = sum(entry.get("moved_back", 0) for entry in self.entries)
        if back:
            moved = f", because {back:,} easy samples were moved back by `tau`: lower it"
        else:
            moved = ""
        self.nothing_saved = (
            f"{names} kept every sample in every epoch, so nothing was saved{moved}. Train for more epochs, or use "
            "thresher.FullData()."
        )
        warn(self.nothing_saved)

    def load(self, entries: Sequence[dict[str, Any]], tracing_s: float) -> None:
        """Loads the entries of a saved run.

        Args:
            entries: Entries of the saved run.
            tracing_s: Seconds of this run's steps that tracing the model has taken.
        """
        self.entries = [dict(entry) for entry in entries]
        # The counters continue those of the saved run, whose entries contain their part already.
        self._counted_before = {
            name: sum(entry.get(name, 0) for entry in entries) for name in COUNTED
        }
        self._traced_s = tracing_s
