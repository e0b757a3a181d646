"""TDDS: how unevenly the predictions of a sample move from epoch to epoch, with late epochs counting most.

Zhang et al., "Spanning Training Progress: Temporal Dual-Depth Scoring (TDDS) for Enhanced Dataset Pruning", CVPR 2024,
arXiv:2311.13611. Samples that vary most are kept. How windows are combined is a reading of the published description: a moving
average that starts at 0, in which the newest window has the share `decay`.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from thresher.score_table import Scores
from thresher.scores._common import PassCounts, checked_history, checked_window, of_history


def movements(probabilities: Tensor) -> Tensor:
    """Returns how far predictions move from epoch to epoch: the sum over the classes of |q log(q / p)|, where p moves to q.

    Args:
        probabilities: Probabilities of the classes after each epoch, shape (T, N, C).

    Returns:
        Movements, shape (T - 1, N); a probability of 0 counts as 1e-8.

    Example:
        >>> import torch
        >>> movements(torch.tensor([[[0.5, 0.5]], [[0.25, 0.75]]]))
        tensor([[0.4774]])
    """
    logs = probabilities.clamp(min=1e-8).log()
    return (probabilities[1:] * (logs[1:] - logs[:-1])).abs().sum(-1)


def tdds(
    probabilities: Any,
    *,
    window: int = 10,
    decay: float = 0.9,
    labels: Tensor | None = None,
    trained: PassCounts = (0, 0),
    provenance: Mapping[str, Any] | None = None,
) -> Scores:
    """Scores each sample by the moving average, over windows of epochs, of how unevenly its predictions move within a window.

    Args:
        probabilities: Probabilities of all classes after each epoch, shape (T, N, C), T > `window`.
        window: Number of movements, each from one epoch to the next, in a window, 2 or more. Default and published: 10.
        decay: Weight of the newest window in the moving average, (0, 1]. Default and published: 0.9.
        labels: Classes, shape (N,), int64. Default: None, there are no classes.
        trained: Cost of the scores, `(forward, backward)`: numbers of samples that went through forward and backward passes, to
            train and to compute the probabilities. Default: (0, 0).
        provenance: Facts about the training run, such as its epochs and seed. Default: none.

    Returns:
        Scores of all N samples, 0 or more; NaN if a probability is not finite.

    Raises:
        TypeError: `probabilities` are not floating-point numbers.
        ValueError: `probabilities` are empty or have another shape, or a setting is out of its range.

    Example:
        >>> import torch
        >>> history = torch.tensor([[[0.5, 0.5], [0.5, 0.5]], [[0.5, 0.5], [0.9, 0.1]], [[0.5, 0.5], [0.9, 0.1]]])
        >>> tdds(history, window=2).values
        tensor([0.0000, 0.4391])
    """
    history = checked_history("tdds", "probabilities", probabilities, 3)
    checked_window("tdds", window, len(history) - 1)
    if not 0 < decay <= 1:
        raise ValueError(
            f"tdds: `decay`, the weight of the newest window, must be within (0, 1], got {decay!r}"
        )
    windows = movements(history).unfold(0, window, 1)
    average = windows.new_zeros(windows.shape[1])
    for deviations in (windows - windows.mean(-1, keepdim=True)).norm(dim=-1):
        average = decay * deviations + (1 - decay) * average
    settings = {"epochs": len(history), "window": window, "decay": decay}
    return of_history("tdds", average, labels, trained, provenance, **settings)
