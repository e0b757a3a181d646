"""The order in which the user's loader reads its dataset."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from thresher.loading.order import KnownEnd, Order, SamplerOrder, SequentialOrder, TensorOrder, shuffled
from thresher.plans import EpochPlan


class UserOrder:
    """The user's sampler, and what is known of the order that it yields.

    Args:
        loader: The user's loader.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader, self.dataset = loader, loader.dataset
        self.streams = isinstance(self.dataset, IterableDataset)
        self.n = 0 if self.streams else len(self.dataset)  # pyright: ignore[reportArgumentType]
        self.sampler: Any = None if self.streams else loader.batch_sampler.sampler  # pyright: ignore

    @property
    def is_known(self) -> bool:
        """Whether the sampler yields every id once, in an order that tensors can reproduce with the same random numbers."""
        kind = type(self.sampler)
        if kind not in (RandomSampler, SequentialSampler) or len(self.sampler.data_source) != self.n:
            return False
        return kind is SequentialSampler or (not self.sampler.replacement and self.sampler.num_samples == self.n)

    @property
    def is_free(self) -> bool:
        """Whether the order is a plain shuffle, which a plan with an order of its own may replace."""
        return self.is_known and isinstance(self.sampler, RandomSampler)

    def generators(self) -> list[torch.Generator]:
        """Returns the generators that the loader draws from."""
        found = [getattr(self.sampler, "generator", None), self._loader.generator]
        own = [generator for generator in found if isinstance(generator, torch.Generator)]
        return own[:1] if len(own) == 2 and own[0] is own[1] else own

    def of_epoch(self, plan: EpochPlan) -> Order:
        """Returns the ids of an epoch before its plan leaves samples out."""
        if plan.drawn:
            return TensorOrder(lambda: plan.ids)
        if not self.is_known:
            return SamplerOrder(self.sampler, self.n)
        if isinstance(self.sampler, SequentialSampler):
            return SequentialOrder(self.n)
        return shuffled(self.n, self.sampler.generator)

    def candidates(self, seen: int) -> int:
        """Returns the number of ids per epoch; for a stream without a length `seen`, the number in its last epoch."""
        if not self.streams:
            return len(self.sampler) if hasattr(self.sampler, "__len__") else self.n
        return seen if seen or not hasattr(self.dataset, "__len__") else len(self.dataset)  # pyright: ignore[reportArgumentType]

    def length(self, plan: EpochPlan | None) -> KnownEnd:
        """Returns what is known of the end of an epoch before it is reached.

        Args:
            plan: The plan of the epoch; None for a stream.
        """
        if plan is None:
            return KnownEnd(_known(lambda: len(self.dataset)))  # pyright: ignore[reportArgumentType]
        return KnownEnd(_known(lambda: self.samples_of(plan)), _known(lambda: len(self.sampler)))

    def samples_of(self, plan: EpochPlan) -> int:
        """Returns the number of samples in an epoch that follows a plan.

        Raises:
            TypeError: The plan leaves samples out of an order that is not known.
        """
        if len(plan.ids) == self.n and not plan.drawn:
            return len(self.sampler)
        if plan.drawn or self.is_known:
            return len(plan.ids)
        raise TypeError(
            f"the length of this epoch is not known before it is over: the plan leaves samples out of the order of "
            f"{type(self.sampler).__name__}, which may repeat or skip ids"
        )


def _known(number: Callable[[], int]) -> int | None:
    """Returns a number of samples; None where a sampler or a stream does not know it."""
    try:
        return number()
    except (TypeError, NotImplementedError):
        return None
