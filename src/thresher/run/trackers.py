"""Trackers of experiments, each with its own way to take numbers."""

from collections.abc import Callable, Mapping
from typing import Any

Log = Callable[[Mapping[str, float], int], object]


def log_of(tracker: Any) -> Log:
    """Returns a function that gives numbers by name, and their step, to a tracker.

    Args:
        tracker: Object with `add_scalar(name, value, step)`, such as TensorBoard's SummaryWriter; with
            `log_metrics(numbers, step=)`, such as the module mlflow or a logger of Lightning; with `log(numbers, step=)`, such
            as a run of W&B or a tracker of accelerate; or a function `(numbers, step)`.

    Raises:
        TypeError: The tracker has none of these.
    """
    if callable(add_scalar := getattr(tracker, "add_scalar", None)):

        def log_each(numbers: Mapping[str, float], step: int) -> None:
            for name, value in numbers.items():
                add_scalar(name, value, step)

        return log_each
    for name in ("log_metrics", "log"):
        if callable(taking := getattr(tracker, name, None)):
            return lambda numbers, step: taking(dict(numbers), step=step)
    if callable(tracker):
        return lambda numbers, step: tracker(dict(numbers), step)
    raise TypeError(
        f"run.log: `tracker` must have add_scalar, log_metrics or log, or be a function (numbers, step), got "
        f"{type(tracker).__name__}; for another tracker pass `lambda numbers, step: ...`"
    )
