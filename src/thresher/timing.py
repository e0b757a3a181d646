"""Measures what the time of a training run is spent on.

At any moment, the time counts for one part: loading or a step, which full training has, too, or a part of Thresher, such as
planning. It is the time of the host, which does not wait for the work that it queues on an accelerator.
"""

import time
from collections.abc import Iterable, Mapping
from typing import Any

OUTSIDE = "outside"
LOADING = "loading"
STEPS = "steps"
"""Parts of the training loop: work outside training, waiting for a batch, and training steps."""

PLANNING = "planning"
REFRESH = "refresh"
SCORING_PASS = "scoring"
TRACING = "tracing"
ATTRIBUTION = "attribution"
"""Parts of Thresher, which full training does not have."""

PARTS = (LOADING, STEPS, PLANNING, REFRESH, SCORING_PASS, TRACING, ATTRIBUTION)


class Timing:
    """Divides the time of a training run among the parts in `PARTS`.

    Example:
        >>> timing = Timing()
        >>> _ = timing.switch(STEPS)
        >>> list(timing.close(epoch=0, tracing_s=0.0))
        ['epoch', 'seconds', 'loading_s', 'steps_s', 'planning_s', 'refresh_s', 'scoring_s', 'tracing_s', 'attribution_s']
    """

    def __init__(self) -> None:
        self.attribution_s = 0.0
        """Seconds within steps that were spent on assigning losses to samples. Added up by that code itself, because calls of
        `switch` would cost more."""
        self.entries: list[dict[str, Any]] = []
        """The time of each epoch that this process has finished, as `close` returns it."""
        self._part = OUTSIDE
        self._since = time.perf_counter()
        self._spent: dict[str, float] = dict.fromkeys((OUTSIDE, *PARTS), 0.0)

    def switch(self, to: str) -> str:
        """Ends the current part: adds the time since the last call to it. Begins the part `to`, and returns the ended part.

        Args:
            to: Part that the time from now on counts for.
        """
        now = time.perf_counter()
        before = self._part
        self._spent[before] += now - self._since
        self._part = to
        self._since = now
        return before

    def close(self, *, epoch: int, tracing_s: float) -> dict[str, Any]:
        """Ends an epoch, and returns its entry: `seconds`, and the seconds of each part.

        Args:
            epoch: Number of the epoch.
            tracing_s: Seconds within steps that were spent on tracing the model.
        """
        self.switch(self._part)
        spent = self._spent
        for part, seconds in ((TRACING, tracing_s), (ATTRIBUTION, self.attribution_s)):
            moved = min(seconds, spent[STEPS])
            spent[STEPS] -= moved
            spent[part] += moved
        entry = {
            "epoch": epoch,
            "seconds": sum(spent[part] for part in PARTS),
            **{f"{part}_s": spent[part] for part in PARTS},
        }
        self.entries.append(entry)
        self._restart()
        return entry

    def drop(self) -> None:
        """Discards the time since the end of the last epoch, because it was not training."""
        self.switch(OUTSIDE)
        self._restart()

    def forget(self) -> None:
        """Discards the time of all epochs, when a saved run is loaded: its first epochs may have run on another machine."""
        self.entries.clear()
        self.drop()

    def _restart(self) -> None:
        self._spent = dict.fromkeys(self._spent, 0.0)
        self.attribution_s = 0.0


def time_by_part(entries: Iterable[Mapping[str, float]]) -> str:
    """Returns the time of some epochs and its parts as text; parts of less than 1 % are left out.

    Args:
        entries: Entries of `run.times`, at least one.

    Example:
        >>> time_by_part([{"seconds": 3.0, "steps_s": 2.0, "refresh_s": 1.0}, {"seconds": 2.25, "steps_s": 2.25}])
        '5.25 s of wall time (steps 4.25 s, refresh 1 s)'
    """
    entries = [*entries]
    seconds = sum(entry["seconds"] for entry in entries)
    parts = {part: sum(entry.get(f"{part}_s", 0.0) for entry in entries) for part in PARTS}
    text = ", ".join(
        f"{part} {value:.3g} s" for part, value in parts.items() if value >= 0.01 * seconds
    )
    return f"{seconds:.3g} s of wall time ({text})"
