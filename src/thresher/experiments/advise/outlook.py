"""Whether any choice of samples can help on a training, from how unlike the samples are and from what smaller batches cost.

Two numbers of the probe say it. `rho = mean(s)^2 / mean(s^2)`, with the gradient norms s of the samples, is 1 where all are
alike. A draw in proportion to s, with the weights that keep the mean, has the noise of the gradient of all samples with a share
rho of them, and no draw with such weights does better (Katharopoulos & Fleuret, arXiv:1803.00942). All samples are alike to a
network that has learned nothing yet, and rho falls as it learns: it counts once it has stopped falling. And `half_share` is the
time of half a batch as a share of that of a whole one: 0.5 where time is spent on samples, 1 where it is spent on steps.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thresher.experiments.advise.pace import Pace

GRADIENT_NORM = "grad_norm"
"""Signal that the spread is taken of: the norm of the gradient of a sample's loss with respect to the outputs."""
ALIKE = 0.8
"""Value of rho from which samples are too much alike: with the forward passes by which rows are found, the best draw gains
about 6 %. In short probes it was above on two trainings where Winnow was not told from smaller batches (text 0.99, relief
0.90), and below on those where it was better (Fashion-MNIST 0.39, ResNet-8 0.73)."""
FALLING = 0.03
"""Fall of rho from one epoch of the probe to the next up to which it has settled."""
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
    """

    rho: float | None
    before: float | None
    gain: float | None
    half_share: float
    waiting: float

    @property
    def settled(self) -> bool:
        """Whether rho has stopped falling, so that it says something about the rest of the training."""
        return self.rho is not None and self.before is not None and self.before - self.rho < FALLING

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


def outlook_of(norms: Sequence[NDArray[np.float32]], pace: Pace) -> Outlook:
    """Returns what gradient norms and times say.

    Args:
        norms: Gradient norm of each sample, shape (N,), after each epoch of the probe; values that are not finite do not count.
            Empty where they are not known.
        pace: Times of a step of full training.
    """
    known = [values[np.isfinite(values)].astype(np.float64) for values in norms]
    if not known or not all(values.any() for values in known):
        return Outlook(None, None, None, pace.half_share, pace.waiting)
    ratio = (pace.backward + pace.optimizer) / max(pace.forward, 1e-12)
    before = evenness(known[-2]) if len(known) > 1 else None
    return Outlook(evenness(known[-1]), before, best_gain(known[-1], ratio), pace.half_share, pace.waiting)


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
