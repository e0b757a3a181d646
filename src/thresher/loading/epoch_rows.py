"""The rows of an epoch, as the user's sampler and the plan give them, for one process or one of several."""

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thresher.distributed.kept import HeldPlan
from thresher.distributed.order import Keeps
from thresher.loading.control import OrderPlace
from thresher.loading.dealing import Deal
from thresher.loading.order import IdBatchSampler, KnownEnd, Order


class Weights(Protocol):
    """The weights that the plan of an epoch gives to samples."""

    def weights(self, ids: NDArray[np.int64]) -> Tensor | None:
        """Returns the weights of samples of the epoch, shape (k,), float32; None where all are 1."""
        ...


class EpochRows(NamedTuple):
    """The rows of an epoch.

    Attributes:
        order: Ids of the epoch.
        keeps: Function of ids that returns which of them stay; None where all do.
        stayed: Number of ids that stayed before the place that an interrupted epoch has reached, where the order begins at the
            place; None where it begins with the first id.
        weights: Weights of the samples.
    """

    order: Order
    keeps: Keeps | None
    stayed: int | None
    weights: Weights


class EpochOrders(Protocol):
    """The orders of the user's sampler; `UserOrder` in one process, `SharedOrder` in several."""

    n: int
    sampler: Any
    streams: bool

    @property
    def is_free(self) -> bool:
        """Whether the order is a plain shuffle, which a plan with an order of its own may replace."""
        ...

    @property
    def yields_once(self) -> bool:
        """Whether no sample can come twice in an epoch."""
        ...

    @property
    def sizes(self) -> Any:
        """Batch size and `drop_last`, as attributes of an object."""
        ...

    def ids_of_sampler(self) -> Tensor | None:
        """Returns the ids that the sampler can yield, shape (K,), int64, ascending; None where these are all ids."""
        ...

    def generators(self) -> list[torch.Generator]:
        """Returns the generators that the loader draws from."""
        ...

    def candidates(self, seen: int) -> int:
        """Returns the number of ids per epoch of full training; for a stream without a length `seen`."""
        ...

    def samples_of(self, plan: HeldPlan) -> int:
        """Returns the number of samples in an epoch that follows a plan; it raises TypeError where that is not known."""
        ...

    def length(self, plan: HeldPlan | None) -> KnownEnd:
        """Returns what is known of the end of an epoch before it is reached."""
        ...

    def deal(self, plan: HeldPlan, sizes: IdBatchSampler, everything: int | None, seen: int, *, least: int = 1) -> Deal | None:
        """Returns how the smaller batches of a plan are made; None where an epoch has full batches."""
        ...

    def of_epoch(self, plan: HeldPlan, place: OrderPlace, sizes: IdBatchSampler, everything: int | None) -> EpochRows:
        """Returns the rows of an epoch."""
        ...

    def consumed_at(self, drawn: int, stayed: int, deal: Deal | None) -> int:
        """Returns how many ids of full training were consumed at a place of an epoch's order."""
        ...

    def state_dict(self) -> dict[str, Any] | None:
        """Returns what the orders of the sampler depend on, as plain values; None where that need not be saved."""
        ...

    def load_state_dict(self, state: Any, *, active: bool, consumed: int) -> None:
        """Goes on with the orders of a run that was saved."""
        ...
