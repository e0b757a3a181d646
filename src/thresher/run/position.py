"""The position of a run in training, and what full training would have computed up to this position."""

from collections.abc import Mapping
from typing import Any

from thresher.cost import Cost
from thresher.loading.epoch_order import OrderPlace


class Position:
    """The position in the current epoch, from which a saved run resumes.

    Args:
        cost: Counts what full training would have computed.
        seed: Random seed of the plans.
    """

    def __init__(self, cost: Cost, seed: int) -> None:
        self._cost = cost
        self.seed = seed
        self.epoch = 0
        """Number of the epoch in progress or, between epochs, of the one that comes next."""
        self.active = False
        """Whether an epoch has begun and was not ended."""
        self.resumed = False
        """Whether the next pass over the loader goes on with an interrupted epoch."""
        self.ran_out = True
        """Whether the loop has asked for a batch after the last one."""
        self.saved_left = False
        """Whether a state was saved after the loop had left the epoch by `break`."""
        self.place = OrderPlace()
        """Place in the order of the epoch."""
        self._samples = 0
        self._at_begin = False, OrderPlace()

    def begin(self) -> bool:
        """Begins a loop over the loader, and returns whether it continues an interrupted epoch."""
        resumed = self.resumed
        # Kept for a pass without training, which is taken back.
        self._at_begin = resumed, self.place if resumed else OrderPlace()
        if not resumed:
            self.place = OrderPlace()
            self._samples = 0
        self.active = True
        self.resumed = False
        self.ran_out = False
        return resumed

    def move(self, place: OrderPlace, samples: int) -> None:
        """Moves to the position after a batch.

        Args:
            place: Position after the batch.
            samples: Number of samples of the epoch that full training would have consumed by the end of the batch.
        """
        # Only the difference: earlier samples are counted already, perhaps by the run that was saved.
        self._count(samples - self._samples)
        self.place = place
        self._samples = samples

    def finish(self, samples: int) -> None:
        """Moves to the end of a complete epoch, in which full training would have consumed all samples.

        Args:
            samples: Number of samples of an epoch of full training.
        """
        # A stream may have been longer than its length.
        self._count(max(0, samples - self._samples))

    def end(self) -> None:
        """Moves to the beginning of the next epoch."""
        self.epoch += 1
        self.active = False
        self.place = OrderPlace()
        self._samples = 0

    @property
    def before_pass(self) -> OrderPlace:
        """Position in the epoch at which the current loop began."""
        return self._at_begin[1]

    def take_back(self, samples: int) -> None:
        """Moves back to where the loop began, because nothing was trained.

        Args:
            samples: Number of samples of the epoch that full training would have consumed before the loop began.
        """
        self._count(samples - self._samples)
        self.active, self.place = self._at_begin
        self.resumed = self.active
        self._samples = samples

    def _count(self, samples: int) -> None:
        # Full training makes one pass of each kind for a sample.
        self._cost.full_forward += samples
        self._cost.full_backward += samples

    def load(self, state: Mapping[str, Any], samples: int) -> None:
        """Loads the position of a saved run.

        Args:
            state: State of the run.
            samples: Number of samples of the epoch that full training would have consumed by the saved position.
        """
        names = ("seed", "epoch", "active", "ran_out", "left")
        self.seed, self.epoch, self.active, self.ran_out, self.saved_left = (
            state[name] for name in names
        )
        self.place = place_of(state)
        self.resumed = self.active
        self._samples = samples


def place_of(state: Mapping[str, Any]) -> OrderPlace:
    """Returns the position in the order of the epoch from a saved state."""
    return OrderPlace(state["consumed"], state["stayed"], state["checksum"])
