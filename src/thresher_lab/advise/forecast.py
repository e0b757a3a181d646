"""What each method would save, from a probe, and whether any choice of samples can help.

Two numbers of the probe say it. `rho = mean(s)^2 / mean(s^2)`, with the gradient norms s of the samples, is 1 where all are
alike. A draw in proportion to s, with the weights that keep the mean, has the noise of the gradient of all samples with a share
rho of them, and no draw with such weights does better (Katharopoulos & Fleuret, arXiv:1803.00942). All samples are alike to a
network that has learned nothing yet, and rho falls as it learns: it counts once it has stopped falling. And `half_share` is the
time of half a batch as a share of that of a whole one: 0.5 where time is spent on samples, 1 where it is spent on steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import thresher
from thresher.methods import defines, requirements_of
from thresher.records import EPOCH, Column
from thresher.selection import on_host
from thresher_lab.advise.pace import Pace
from thresher_lab.training.samples import distribution
from thresher_lab.training.specs import Spec

GRADIENT_NORM = "grad_norm"
"""Signal that the spread is taken of: the norm of the gradient of a sample's loss with respect to the outputs."""
ALIKE = 0.8
"""Value of rho from which samples are too much alike: with the forward passes by which rows are found, the best draw gains
about 6 %. In short probes it was above on two trainings where Winnow was tied with smaller batches (text 0.99, relief
0.90), and below on those where it was better (Fashion-MNIST 0.39, ResNet-8 0.73)."""
FALLING = 0.03
"""Fall of rho, and share by which the loss falls, from one epoch of the probe to the next, up to which rho has settled."""
BY_STEPS = 0.9
"""Time of half a batch, as a share of that of a whole one, from which steps and not samples cost the time."""
INPUT_BOUND = 0.5
"""Share of a step spent waiting for the loader from which the input pipeline decides what can be saved."""
THRESHOLDS = 64
"""Number of thresholds that the best draw is looked for among."""


@dataclass(frozen=True)
class Outlook:
    """What the probe says about any choice of samples.

    Attributes:
        rho: Evenness of the gradient norms in the last epoch of the probe, (0, 1]; None where the criterion does not give them.
        before: Evenness in the epoch before; None where there is none.
        gain: Factor by which the best draw in the batch lowers noise times cost, with its forward pass over all rows, at least
            1; None where `rho` is None.
        half_share: Time to compute half a batch, as a share of that of a whole one.
        waiting: Share of a step that is spent waiting for the loader.
        learned: Share by which the mean loss fell in the last epoch of the probe; None where that is not known.
    """

    rho: float | None
    before: float | None
    gain: float | None
    half_share: float
    waiting: float
    learned: float | None = None

    @property
    def settled(self) -> bool:
        """Whether rho has stopped falling, so that it says something about the rest of the training.

        It stays near 1 before a network has learned anything, too: while the loss still falls, nothing has settled.
        """
        known = self.rho is not None and self.before is not None and self.before - self.rho < FALLING
        return known and (self.learned is None or self.learned < FALLING)

    @property
    def alike(self) -> bool:
        """Whether the samples are so much alike that no choice beats a random one by much."""
        return self.rho is not None and self.rho >= ALIKE and self.settled

    @property
    def by_steps(self) -> bool:
        """Whether a step takes its time whatever its batch has, so that smaller batches save none."""
        return self.half_share > BY_STEPS and self.waiting < INPUT_BOUND

    @property
    def hopeless(self) -> bool:
        """Whether neither a choice of samples nor smaller batches can help."""
        return self.alike and self.by_steps

    def as_dict(self) -> dict[str, Any]:
        """Returns the values and what they say, by name."""
        said = {name: getattr(self, name) for name in ("settled", "alike", "by_steps", "hopeless")}
        return asdict(self) | said


def outlook_of(norms: Sequence[NDArray[np.float32]], pace: Pace, losses: Sequence[NDArray[np.float32]] = ()) -> Outlook:
    """Returns what gradient norms, losses and times say.

    Args:
        norms: Gradient norm of each sample, shape (N,), after each epoch of the probe; values that are not finite do not count.
            Empty where they are not known.
        pace: Times of a step of full training.
        losses: Loss of each sample after each epoch, as the norms. Default: not known.
    """
    learned = _fall(losses)
    known = [values[np.isfinite(values)].astype(np.float64) for values in norms]
    if not known or not all(values.any() for values in known):
        return Outlook(None, None, None, pace.half_share, pace.waiting, learned)
    ratio = (pace.backward + pace.optimizer) / max(pace.forward, 1e-12)
    before = evenness(known[-2]) if len(known) > 1 else None
    return Outlook(evenness(known[-1]), before, best_gain(known[-1], ratio), pace.half_share, pace.waiting, learned)


def _fall(losses: Sequence[NDArray[np.float32]]) -> float | None:
    """Returns the share by which the mean of the finite losses fell from the last epoch but one; None without two epochs."""
    before, last = ([float(values[np.isfinite(values)].mean(dtype=np.float64)) for values in losses[-2:]] + [0.0, 0.0])[:2]
    return (before - last) / abs(before) if len(losses) > 1 and before else None


def evenness(norms: NDArray[np.float64]) -> float:
    """Returns rho: the squared mean of gradient norms over the mean of their squares.

    Args:
        norms: Gradient norms, shape (N,), 0 or more, not all 0.

    Example:
        >>> evenness(np.array([1.0, 1.0])), evenness(np.array([0.0, 0.0, 0.0, 1.0]))
        (1.0, 0.25)
    """
    return float(np.mean(norms) ** 2 / np.mean(norms**2))


def best_gain(norms: NDArray[np.float64], backward_to_forward: float) -> float:
    """Returns the factor by which the best unbiased draw within a batch lowers noise times cost, compared with all rows.

    All rows are put forward, and row i is put backward with the chance p = min(1, norm / threshold) and the weight 1 / p. The
    noise is mean(norm^2 / p) and the cost 1 + ratio * mean(p); the threshold is the best one. A smaller batch has the same
    noise times cost as the whole one, so that a gain of 1 means: a smaller batch does the same.

    Args:
        norms: Gradient norms, shape (N,), 0 or more, not all 0.
        backward_to_forward: Time of a backward pass as a multiple of that of a forward pass, 0 or more.

    Example:
        >>> best_gain(np.ones(4), 2.0)
        1.0
    """
    positive = norms[norms > 0]
    thresholds = np.quantile(positive, np.linspace(0, 1, THRESHOLDS))
    whole = np.mean(norms**2) * (1 + backward_to_forward)
    gains = [1.0]
    for threshold in thresholds:
        chances = np.minimum(1.0, positive / threshold)
        noise = np.sum(positive**2 / chances) / len(norms)
        gains.append(float(whole / (noise * (1 + backward_to_forward * np.sum(chances) / len(norms)))))
    return max(gains)


def forecast(
    spec: Spec,
    refusal: str | None,
    pace: Pace,
    own: Mapping[str, float],
    signals: Sequence[Mapping[str, Tensor]],
    epochs: int,
    seed: int,
) -> dict[str, Any]:
    """Returns what one method would do to the training time: an entry of `methods` in the advice.

    Args:
        spec: The method.
        refusal: Reason why the method cannot be attached; None where it can.
        pace: Times of a step of full training.
        own: Seconds that each method computes for a batch, by label.
        signals: Signals of the samples after each epoch of the probe: name to tensor of shape (seen,).
        epochs: Number of epochs of the planned training.
        seed: Random seed of the draws of plans.
    """
    method: Any = spec.create()
    refreshes, stage = requirements_of(method).refresh is not None, _stage_of(method)
    row: dict[str, Any] = {"method": spec.label, "stage": stage, "settings": spec.settings, "refreshes": refreshes}
    if refusal is not None:
        return row | {"refused": refusal}
    compute = own[spec.label]
    row |= {"refused": None, "compute_s": compute}
    if stage == "batch":
        saves = 1 - pace.step(compute) / pace.full
        return row | {"saves": saves, "at_most": saves, "left_out": None, "forwarded": None}
    in_batches = spec.batch.get("spend", "batches" if requirements_of(method).smaller_batches else "steps") == "batches"
    by_losses = planned_shares(method, signals, epochs, seed)
    if_learned = planned_shares(method, [all_learned(signals[-1])], epochs, seed)
    saves = saved_by_plans(pace, compute, *by_losses, in_batches=in_batches)
    at_most = max(saves, saved_by_plans(pace, compute, *if_learned, in_batches=in_batches))
    return row | {"saves": saves, "at_most": at_most, "left_out": by_losses[0], "forwarded": by_losses[1]}


def is_foreseeable(method: Any) -> bool:
    """Returns whether a method chooses in the batch, or plans epochs by nothing but the signals of one epoch."""
    if _stage_of(method) != "epoch" or defines(method, "full_pass"):
        return _stage_of(method) == "batch"
    return all(column.merge in ("last", "sum", "plan") and column.signal != EPOCH for column in method.columns().values())


def planned_shares(method: Any, signals: Sequence[Mapping[str, Tensor]], epochs: int, seed: int) -> tuple[float, float]:
    """Returns the shares of the samples of all epochs that a method leaves out, and that it only forwards.

    Args:
        method: Method that plans epochs.
        signals: Signals after the first, second, ... epoch; the last ones stand for all later epochs.
        epochs: Number of epochs of the training.
        seed: Random seed of the draws of plans.
    """
    n, generator = len(signals[0]["loss"]), torch.Generator().manual_seed(seed)
    planned = {name: column for name, column in method.columns().items() if column.merge == "plan"}
    remembered = {name: torch.full((n,), column.fill, dtype=column.dtype) for name, column in planned.items()}
    left_out = forwarded = 0
    for epoch in range(epochs):
        records = _records_from(method, signals[min(max(epoch, 1), len(signals)) - 1]) | remembered
        plan = method.plan_epoch(records, epoch=epoch, epochs=epochs, generator=generator)
        remembered |= plan.remember
        left_out += n - len(plan.ids)
        forwarded += 0 if plan.refresh is None else len(plan.refresh)
    return left_out / n / epochs, forwarded / n / epochs


def saved_by_plans(pace: Pace, compute: float, left_out: float, forwarded: float, *, in_batches: bool = False) -> float:
    """Returns the share of the time that plans save.

    Args:
        pace: Times of a step of full training.
        compute: Seconds that the method computes for a batch.
        left_out: Share of the samples that are left out, [0, 1]; they are not loaded, unless they are forwarded.
        forwarded: Share of the samples that are loaded for a forward pass only, [0, 1].
        in_batches: Whether there are as many steps as in full training, with smaller batches. Default: False, fewer steps.
    """
    kept = 1 - left_out
    trained = pace.step(compute * pace.of_smaller(kept), kept) if in_batches else kept * pace.step(compute)
    return 1 - (trained + forwarded * pace.step(pace.scoring)) / pace.full


def all_learned(signals: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the signals of samples that are all learned but one: no loss, right, and certain."""
    learned = {name: torch.ones_like(values) for name, values in signals.items()}
    learned["loss"] = torch.zeros_like(signals["loss"])
    learned["loss"][-1] = 1.0
    return learned


def loss_summary(signals: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns how the losses are distributed: see `samples.distribution`.

    Besides, `below_mean` is the share of the samples with a loss below the mean, and `trusted` the share that is right and
    confident; None where these signals were not recorded.
    """
    loss = on_host(signals["loss"])
    finite = loss[np.isfinite(loss)]
    below = float(np.count_nonzero(finite < finite.mean(dtype=np.float64)) / len(loss)) if len(finite) else 0.0
    summary = distribution(loss) | {"below_mean": below, "trusted": None}
    if "correct" in signals and "confidence" in signals:
        sure = on_host(signals["confidence"]) >= np.float32(thresher.Kakurenbo.tau)
        summary["trusted"] = float((sure & (on_host(signals["correct"]) != 0)).mean())
    return summary


def columns_of(spec: Spec) -> dict[str, Column]:
    """Returns the columns that a method records of the loop; none where it does not plan epochs."""
    method: Any = spec.create()
    columns: dict[str, Column] = method.columns() if _stage_of(method) == "epoch" else {}
    return {name: column for name, column in columns.items() if column.merge != "plan"}


def _stage_of(method: Any) -> str | None:
    """Returns the stage of a method; None for a list of methods of several stages."""
    return getattr(method, "stage", None)


def _records_from(method: Any, signals: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns signals under the names of a method's columns, without those that the training does not give."""
    columns: dict[str, Column] = method.columns()
    recorded = {name: column for name, column in columns.items() if (column.signal or name) in signals}
    return {name: signals[column.signal or name].to(column.dtype) for name, column in recorded.items()}
