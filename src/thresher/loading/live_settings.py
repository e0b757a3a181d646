"""Settings of the user's DataLoader that may change between epochs: followed as the DataLoader itself would have done."""

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from thresher.loading.collate_check import CheckedCollate, UnknownRows, checked
from thresher.loading.samplers import inner_sampler
from thresher.loading.uncopied import Uncopied

KEPT_SETTINGS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
)
"""Settings that the rebuilt loader has from the user's."""

OF_THE_USER = {*KEPT_SETTINGS, "dataset", "sampler", "batch_sampler", "batch_size", "drop_last", "in_order"}
"""Attributes that are set on the user's loader, which takes or refuses them."""


class OfUser(Uncopied):
    """Base of a loader that shows the attributes of the user's loader as its own, and sets them there."""

    _user: DataLoader[Any]

    def __repr__(self) -> str:
        user = self._user
        samples = "a stream" if isinstance(user.dataset, IterableDataset) else f"{self.n:,} samples"
        return f"{type(self).__name__}({samples}, {type(user).__name__} with batch_size={user.batch_size})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._user, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OF_THE_USER:
            setattr(self._user, name, value)
        else:
            object.__setattr__(self, name, value)


class LiveSettings:
    """The settings of the user's DataLoader, as they were when the last epoch began.

    Args:
        user: The user's DataLoader over a map-style dataset.
        sampler: Sampler of its batches when the run was attached.
        sizes: Batch size and `drop_last`, as they are now.
        unknown_rows: Result of the check of its collate function.
    """

    def __init__(self, user: DataLoader[Any], sampler: Any, sizes: Any, unknown_rows: UnknownRows) -> None:
        self._user, self._sampler, self._sizes, self._unknown_rows = user, sampler, sizes, unknown_rows
        self._known = self._now()

    def rebuilt(self, batch_sampler: Any) -> DataLoader[Any]:
        """Returns a loader of the same settings with another batch sampler."""
        settings = self._known | {"collate_fn": self._collate()}
        return DataLoader(self._user.dataset, batch_sampler=batch_sampler, **settings)

    def follow(self, rebuilt: DataLoader[Any], *, workers_stay: bool) -> None:
        """Gives a rebuilt loader the settings that have changed.

        Args:
            rebuilt: Loader that `rebuilt` has made.
            workers_stay: Whether persistent workers run, which keep the collate function that they were started with.

        Raises:
            ValueError: The batches have another sampler.
        """
        sampler = inner_sampler(self._user.batch_sampler)
        if sampler is not self._sampler:
            raise ValueError(
                f"`loader.batch_sampler.sampler` was changed from {type(self._sampler).__name__} to "
                f"{type(sampler).__name__} after `attach`, but the plans of a run are made for the samples of the first. "
                "Put the first sampler back, or call run.detach() and attach again."
            )
        now = self._now()
        changed = {name for name in KEPT_SETTINGS if now[name] is not self._known[name]}
        self._known = now
        if "collate_fn" in changed and not workers_stay:
            self._unknown_rows.reason = None
        for name in changed:
            setattr(rebuilt, name, self._collate() if name == "collate_fn" else now[name])
        if isinstance(rebuilt.collate_fn, CheckedCollate):
            rebuilt.collate_fn.batch_size = checked_batch_size(self._sizes)

    def _collate(self) -> Any:
        return checked(self._user, declared=self._unknown_rows.declared)

    def _now(self) -> dict[str, Any]:
        return {name: getattr(self._user, name) for name in KEPT_SETTINGS}


def checked_batch_size(sizes: Any) -> int:
    """Returns the batch size of a batch sampler.

    Raises:
        ValueError: It is not a whole number of at least 1.
    """
    size = sizes.batch_size
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"`loader.batch_sampler.batch_size` must be a whole number of at least 1, got {size!r}")
    return size
