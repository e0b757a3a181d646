"""What a loader and the run that it belongs to tell each other."""

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from thresher.distributed.kept import HeldPlan
from thresher.plans import BatchPlan


class OrderPlace(NamedTuple):
    """A place in the order of an epoch, between two batches.

    Attributes:
        consumed: Number of ids of the order that come before it; 0 at the beginning.
        stayed: Number of these that the plan let stay.
        checksum: Checksum of those that stayed.
    """

    consumed: int = 0
    stayed: int = 0
    checksum: int = 0


class EpochStart(NamedTuple):
    """Where an epoch begins.

    Attributes:
        plan: The plan of the epoch; None for a stream.
        place: OrderPlace in its order, which an interrupted epoch has reached.
    """

    plan: HeldPlan | None
    place: OrderPlace


class EpochControl(Protocol):
    """What a loader asks of the run that it belongs to, and reports to it."""

    def begin(self) -> EpochStart:
        """Begins an epoch, or goes on with an interrupted one."""
        ...

    @property
    def held(self) -> HeldPlan:
        """Returns the plan of the epoch in progress or, between epochs, of the one that comes next."""
        ...

    def choose(self, batch: Any, ids: Tensor) -> BatchPlan:
        """Returns the rows of a candidate batch that the loop sees."""
        ...

    def count(self, n: int) -> int | None:
        """Returns how many rows of a candidate batch of n stay; None where that is not known."""
        ...

    def yielded(self, batch: Any, ids: Tensor, place: OrderPlace, weights: Tensor | None, *, last: bool, asks_on: bool) -> None:
        """Notes a batch on the device, the ids of its rows, the place after it, weights, and whether it is the last one.

        `asks_on` tells whether the loop is known to ask for a further batch; it may, where that is not known.
        """
        ...

    def left(self, *, exhausted: bool) -> None:
        """Notes that the loop has left the pass: all batches were asked for, or its iterator is gone."""
        ...
