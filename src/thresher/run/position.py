"""Where a run is in its training, and what full training would have computed up to there."""

from collections.abc import Mapping
from typing import Any

from thresher.cost import Cost
from thresher.loading.epoch_order import OrderPlace


class Position:
    """The place in the epoch in progress, from which a saved run goes on.

    Args:
        cost: Counts what full training would have computed.
        seed: Random seed of the plans.
    """

    def __init__(self, cost: Cost, seed: int) -> None:
        self._cost, self.seed = cost, seed
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
        """Begins a pass over the loader, and returns whether it goes on with an interrupted epoch."""
        resumed = self.resumed
        # Kept for a pass without training, which is taken back.
        self._at_begin = resumed, self.place if resumed else OrderPlace()
        if not resumed:
            self.place, self._samples = OrderPlace(), 0
        self.active, self.resumed, self.ran_out = True, False, False
        return resumed

    def move(self, place: OrderPlace, samples: int) -> None:
        """Goes on to the place after a batch.

        Args:
            place: The place.
            samples: Number of samples of full training that are behind it in the epoch.
        """
        # Only the difference: what lies before is counted already, also by the run that was saved.
        self._count(samples - self._samples)
        self.place, self._samples = place, samples

    def finish(self, samples: int) -> None:
        """Goes to the end of a complete epoch: what its plan left out, full training would have trained on.

        Args:
            samples: Number of samples of an epoch of full training.
        """
        # A stream may have been longer than its length.
        self._count(max(0, samples - self._samples))

    def end(self) -> None:
        """Goes to the beginning of the next epoch."""
        self.epoch += 1
        self.active, self.place, self._samples = False, OrderPlace(), 0

    @property
    def before_pass(self) -> OrderPlace:
        """Place in the epoch where the pass in progress began."""
        return self._at_begin[1]

    def take_back(self, samples: int) -> None:
        """Goes back to where the pass began, in which nothing was trained.

        Args:
            samples: Number of samples of full training that were behind that place.
        """
        self._count(samples - self._samples)
        self.active, self.place = self._at_begin
        self.resumed, self._samples = self.active, samples

    def _count(self, samples: int) -> None:
        # Full training makes one pass of each kind for a sample.
        self._cost.full_forward += samples
        self._cost.full_backward += samples

    def load(self, state: Mapping[str, Any], samples: int) -> None:
        """Goes on at the position of a saved run.

        Args:
            state: State of the run.
            samples: Number of samples of full training that are behind it in its epoch.
        """
        names = ("seed", "epoch", "active", "ran_out", "left")
        self.seed, self.epoch, self.active, self.ran_out, self.saved_left = (state[name] for name in names)
        self.place, self.resumed, self._samples = place_of(state), self.active, samples


def place_of(state: Mapping[str, Any]) -> OrderPlace:
    """Returns the place in the order of the epoch that a state has."""
    return OrderPlace(state["consumed"], state["stayed"], state["checksum"])
