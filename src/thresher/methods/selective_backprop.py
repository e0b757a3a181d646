"""Selective-Backprop: backward passes only for the samples of a batch whose losses are large among the recent ones.

Jiang et al., "Accelerating Deep Learning by Focusing on the Biggest Losers", arXiv:1910.00762.
Original code: github.com/angelajiang/SelectiveBackprop. Biased towards hard samples by design; nothing is re-weighted.

As in the code the percentile is strict and the batch's own losses are part of the history, so that the smallest loss of
the history is never chosen. Where the code goes beyond the paper or against it:
- It trains on everything in epoch 0 and does not fill the history meanwhile: `warmup_steps`, the steps of an epoch.
- Its `topk` keeps everything (a sample size fixed to 0), and `lowk` and `randomk` do what `topk` does. `keep` is what
  `topk` says it is: a fixed number of the largest losses, so that every batch has the same size.
- Its beta is 3 on the command line and 1 in the research scripts.
- Its least probability is a setting, 0 by default: `min_probability`.
- A loss that is NaN or infinite has a percentile there; here it is kept and never counted.
KAKURENBO's comparison with it (once an epoch, histogram of all last losses) and Composer's (a fixed number drawn by rank)
are other algorithms of the same name.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thresher.methods import State
from thresher.plans import BatchPlan
from thresher.selection import share


def largest_losses(loss: Tensor, k: int) -> Tensor:
    """Positions of the `k` largest losses; those that are not finite come first of all, ties go to the later position.

    Args:
        loss: Shape (n,).
        k: How many, 1 or more; all where there are fewer.

    Returns:
        Positions, shape (min(k, n),), int64, the largest last.
    """
    ascending = torch.where(loss.isfinite(), loss, math.inf).argsort(stable=True)
    return ascending[max(0, len(loss) - k) :]


def remembered(history: Tensor, loss: Tensor, size: int) -> Tensor:
    """The last `size` losses once `loss` has come in; those that are not finite take their place as NaN.

    Args:
        history: Losses so far, oldest first, shape (h,), float32.
        loss: The newest, shape (n,), float32.
        size: How many to remember.

    Returns:
        Shape (min(size, h + n),), float32, on the device of `loss`.
    """
    room = max(0, size - len(loss))
    older = history[max(0, len(history) - room) :].to(loss.device, non_blocking=True)
    newest = loss[max(0, len(loss) - size) :]
    return torch.cat((older, torch.where(newest.isfinite(), newest, math.nan)))


def percentile(loss: Tensor, history: Tensor) -> Tensor:
    """Share of the finite losses in `history` that are strictly below each loss; 1 for a loss that is not finite.

    Args:
        loss: Shape (n,), float32.
        history: Shape (h,), float32.

    Returns:
        Shape (n,), float32, within [0, 1]; all 1 where `history` has no finite loss.
    """
    finite = history.isfinite()
    ascending = torch.where(finite, history, math.inf).sort().values
    below = torch.searchsorted(ascending, loss.contiguous()).float()
    return torch.where(loss.isfinite() & finite.any(), below / finite.sum(), 1.0)


@dataclass(frozen=True)
class SelectiveBackprop:
    """Train on the samples of each batch with large losses: a fixed share of it, or by chance of the loss's percentile.

    With `beta`, sample i is chosen with probability max(min_probability, q_i ** beta), q_i being the share of the recent
    losses that are below its own. Of losses whose distribution stays this keeps 1 / (1 + beta) (`expected_keep`): 80 %
    for 0.25, 50 % for 1, 33 % for 2, 25 % for 3; with a history of h a little less, the mean of (j / h) ** beta over
    j < h. A sample without a finite loss is always chosen with `beta`, and before all others with `keep`.

    Args:
        keep: Share kept of each batch, (0, 1]: the floor(keep * n) largest losses, at least one. None: by `beta`.
        beta: Selectivity, 0 or more; 0 keeps everything. Default 1 where `keep` is not given. Original code: 3 on
            the command line, 1 in the research scripts.
        history: R, how many of the last losses make the percentiles, 1 or more; with `beta` only. Published: 1024.
        min_probability: Least chance of any sample, [0, 1]; with `beta` only. Published: 0.
        warmup_steps: Steps that train on everything and remember nothing. Published: those of the first epoch.

    Raises:
        ValueError: A setting out of range, or both `keep` and `beta`.
    """

    stage: ClassVar[Literal["batch"]] = "batch"
    signals: ClassVar[tuple[str, ...]] = ("loss",)
    keep: float | None = None
    beta: float | None = None
    history: int = 1024
    min_probability: float = 0.0
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        if self.keep is None and self.beta is None:
            object.__setattr__(self, "beta", 1.0)
        if self.keep is not None and self.beta is not None:
            raise ValueError(
                "SelectiveBackprop: `keep` (a fixed share) and `beta` (chance by percentile) exclude each other, got "
                f"keep={self.keep} and beta={self.beta}; give one of them"
            )
        if self.keep is not None and not (isinstance(self.keep, int | float) and 0 < self.keep <= 1):
            raise ValueError(f"SelectiveBackprop: `keep` is the share kept, within (0, 1], got {self.keep!r}")
        if self.beta is not None and not (isinstance(self.beta, int | float) and 0 <= self.beta < math.inf):
            raise ValueError(f"SelectiveBackprop: `beta` must be a finite number of 0 or more, got {self.beta!r}")
        if not (isinstance(self.history, int) and self.history >= 1):
            raise ValueError(f"SelectiveBackprop: `history` must be a whole number of 1 or more, got {self.history!r}")
        if not 0 <= self.min_probability <= 1:
            raise ValueError(
                f"SelectiveBackprop: `min_probability` is a probability, within [0, 1], got {self.min_probability}"
            )
        if self.warmup_steps < 0:
            raise ValueError(f"SelectiveBackprop: `warmup_steps` must be 0 or more, got {self.warmup_steps}")

    @property
    def expected_keep(self) -> float:
        """Share of the samples that is kept in the long run: `keep`, or 1 / (1 + beta), more with a `min_probability`."""
        if self.keep is not None:
            return float(self.keep)
        if not self.beta:
            return 1.0
        # Integral of max(m, q ** beta) over q in [0, 1].
        lifted = self.min_probability ** (1 + 1 / self.beta)
        return (1 + self.beta * lifted) / (1 + self.beta)

    def init_state(self) -> State:
        """With `beta` the history, still empty: its length is how far it is filled."""
        return {} if self.keep is not None else {"history": torch.empty(0, dtype=torch.float32)}

    def count(self, n: int) -> int | None:
        """A fixed share of each batch with `keep`; chance with `beta`."""
        return None if self.keep is None or self.warmup_steps else max(1, share(self.keep, n))

    def plan_batch(
        self, signals: Mapping[str, Tensor], state: State, *, step: int, generator: torch.Generator
    ) -> tuple[BatchPlan, State]:
        """The rows with large losses. Chosen in the order of the ids: another order of the rows gives the same samples."""
        ids = signals["id"]
        if step < self.warmup_steps:
            return self._plan(torch.arange(len(ids), device=ids.device), len(ids), 0.0), dict(state)
        by_id = ids.argsort(stable=True)
        loss = signals["loss"].detach()[by_id]
        if self.keep is not None:
            picked, state = largest_losses(loss, max(1, share(self.keep, len(ids)))), dict(state)
        else:
            history = remembered(state["history"], loss.float(), self.history)
            picked, state = self._drawn(loss.float(), history, generator), {**state, "history": history}
        return self._plan(by_id[picked].sort().values, len(ids), 1 - self.expected_keep), state

    def _drawn(self, loss: Tensor, history: Tensor, generator: torch.Generator) -> Tensor:
        """Positions drawn by the percentiles; how many is known to the device alone, so that this waits for it."""
        chance = percentile(loss, history).pow(self.beta or 0.0).clamp(min=self.min_probability)
        draws = torch.rand(len(loss), generator=generator, dtype=torch.float32)
        return (draws.to(loss.device, non_blocking=True) < chance).nonzero().flatten()

    @staticmethod
    def _plan(rows: Tensor, n: int, scheduled: float) -> BatchPlan:
        return BatchPlan(rows, facts={"scheduled_fraction": scheduled, "actual_fraction": 1 - len(rows) / max(1, n)})
