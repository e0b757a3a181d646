"""Loaders that accelerate prepared: where an epoch ends, as accelerate reads it, and how batches are dealt out."""

import sys
from typing import Any

from thresher.loading.dealt import DealtRows


class EpochFlags:
    """What accelerate reads of the loader that a loop iterates.

    Args:
        gradient_state: State of accelerate, in which loaders in use are noted.
    """

    def __init__(self, gradient_state: Any) -> None:
        self.gradient_state = gradient_state
        self.end_of_dataloader, self.remainder, self.iteration = False, -1, 0

    def begin(self) -> None:
        """Notes that the loader is in use."""
        self.end_of_dataloader = False
        self.gradient_state._add_dataloader(self)

    def end(self) -> None:
        """Notes that the loader is not in use any more."""
        self.gradient_state._remove_dataloader(self)

    def set_epoch(self, epoch: int) -> None:
        """Does nothing: the user's loader was not prepared, and counts no epochs."""


class PreparedLoader:
    """Shows accelerate where an epoch begins and ends, as the iteration of a loader that it prepared would have done.

    `Accelerator.accumulate` steps at the last batch of an epoch, whatever the number of accumulated batches. It reads from the
    loader that was iterated last which batch that is. Where accelerate is not in use, nothing is done.

    Args:
        loader: The user's loader.

    Example:
        >>> import torch
        >>> loader = PreparedLoader(torch.utils.data.DataLoader([1, 2]))
        >>> loader.begin(), loader.yielded(1, last=True), loader.end(whole=True)
        (None, None, None)
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader if is_prepared(loader) else None
        self._begun = False

    def begin(self) -> None:
        """Begins an epoch; one that was left early ends."""
        accelerate = sys.modules.get("accelerate.state")
        if self._loader is None and accelerate is not None:
            self._loader = EpochFlags(accelerate.GradientState())  # one for all; a loop may prepare its parts after `attach`
        if self._loader is not None:
            self.end(whole=False)
            self._loader.begin()
            self._loader.set_epoch(self._loader.iteration)
            self._begun = True

    def yielded(self, rows: int, *, last: bool) -> None:
        """Notes a batch before the loop sees it.

        Args:
            rows: Number of its rows.
            last: Whether it is the last one of the epoch.
        """
        if self._loader is None:
            return
        self._loader.end_of_dataloader = last
        if last and self._loader.remainder != rows:
            self._loader.remainder = 0  # `gather_for_metrics` cuts the last batch to this many rows, where there are any

    def end(self, *, whole: bool) -> None:
        """Ends the epoch.

        Args:
            whole: Whether every batch was asked for; else it is over where the last one was yielded.
        """
        if self._loader is not None and self._begun:
            self._loader.iteration += whole or self._loader.end_of_dataloader
            self._loader.end()
            self._begun = False


def is_prepared(loader: Any) -> bool:
    """Whether accelerate prepared a loader, whose own iteration tells accelerate where an epoch begins and ends."""
    names = ("begin", "end", "end_of_dataloader", "remainder", "gradient_state", "iteration", "set_epoch")
    return all(hasattr(loader, name) for name in names)


def is_shard_of_accelerate(batches: Any) -> bool:
    """Whether a batch sampler is one by which accelerate deals out the batches of another one."""
    loaders = sys.modules.get("accelerate.data_loader")
    return loaders is not None and isinstance(batches, loaders.BatchSamplerShard)


def inner_sampler(batches: Any) -> Any:
    """Returns the sampler of a batch sampler, inside of one of accelerate and of `DealtRows`."""
    sampler = (batches.batch_sampler if is_shard_of_accelerate(batches) else batches).sampler
    return sampler.whole if isinstance(sampler, DealtRows) else sampler


def is_seeded_by_epoch(sampler: Any) -> bool:
    """Whether a sampler is the shuffle of accelerate that seeds its generator by the epoch, before each of its orders."""
    loaders = sys.modules.get("accelerate.data_loader")
    return loaders is not None and type(sampler) is loaders.SeedableRandomSampler


def share_states(loader: Any) -> None:
    """Gives all processes the random states of the first one, as a loader that accelerate prepared does before each epoch."""
    if getattr(loader, "rng_types", None) is not None:
        sys.modules["accelerate.data_loader"].synchronize_rng_states(loader.rng_types, loader.synchronized_generator)
