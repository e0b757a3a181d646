"""Settings of the user's DataLoader: which of them the rebuilt loader gets, and a check that the user has not changed them."""

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from thresher.loading.collate_check import UnknownRows, checked
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
"""Settings that the rebuilt loader gets from the user's loader."""


def loader_settings(loader: DataLoader[Any]) -> dict[str, Any]:
    """Returns the settings of a DataLoader as keyword arguments for another loader.

    Args:
        loader: The loader. Its dataset, sampler and batch size are not among the settings.

    Example:
        >>> loader = DataLoader(range(6), batch_size=2, pin_memory=True)
        >>> DataLoader(range(3), batch_size=3, **loader_settings(loader)).pin_memory
        True
    """
    return {name: getattr(loader, name) for name in KEPT_SETTINGS}


OF_THE_USER = {
    *KEPT_SETTINGS,
    "dataset",
    "sampler",
    "batch_sampler",
    "batch_size",
    "drop_last",
    "in_order",
}
"""Attributes that, if the user sets them on the run's loader, are set on the user's loader instead."""


class OfUser(Uncopied):
    """Base class of the run's loader: reads and sets attributes of the user's loader."""

    _user: DataLoader[Any]

    def __repr__(self) -> str:
        user = self._user
        if isinstance(user.dataset, IterableDataset):
            samples = "a stream"
        else:
            samples = f"{self.n:,} samples"
        return f"{type(self).__name__}({samples}, {type(user).__name__} with batch_size={user.batch_size})"

    def __getattr__(self, name: str) -> Any:
        # Private names belong to the run's loader. Without this check, reading `_user` before it is set would recurse forever.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._user, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # A loop that sets, say, batch_size on run.loader means its own loader, which accepts or refuses the value.
        if name in OF_THE_USER:
            setattr(self._user, name, value)
        else:
            object.__setattr__(self, name, value)


class SettingsAtAttach:
    """The settings of the user's DataLoader when the run was attached. They must not change afterward.

    Args:
        user: The user's DataLoader over a map-style dataset.
        unknown_rows: Results of comparing batches with their samples.
    """

    def __init__(self, user: DataLoader[Any], unknown_rows: UnknownRows) -> None:
        self._user = user
        self._unknown_rows = unknown_rows
        self._known = self._now(user)

    @staticmethod
    def _now(user: DataLoader[Any]) -> dict[str, Any]:
        batches: Any = user.batch_sampler
        of_batches = {
            "batch_size": getattr(batches, "batch_size", None),
            "drop_last": getattr(batches, "drop_last", None),
            "sampler": inner_sampler(batches),
        }
        return loader_settings(user) | {
            f"batch_sampler.{name}": value for name, value in of_batches.items()
        }

    def rebuilt(self, batch_sampler: Any) -> DataLoader[Any]:
        """Returns a loader with the same settings and another batch sampler."""
        settings = {name: self._known[name] for name in KEPT_SETTINGS}
        settings["collate_fn"] = checked(
            self._user, collate_keeps_rows=self._unknown_rows.collate_keeps_rows
        )
        return DataLoader(self._user.dataset, batch_sampler=batch_sampler, **settings)

    def check(self) -> None:
        """Checks that no setting was changed after `attach`, because the plans and the rebuilt loader depend on them.

        Raises:
            ValueError: A setting has another value than when the run was attached.
        """
        for name, value in self._now(self._user).items():
            # By identity, because == of a user's sampler or function can mean anything. Numbers are compared by value.
            if value is not (known := self._known[name]) and not (
                isinstance(value, int | float) and value == known
            ):
                # A repr of an object with attributes, such as a sampler, would only show its address.
                before, after = (
                    type(setting).__name__ if hasattr(setting, "__dict__") else repr(setting)
                    for setting in (known, value)
                )
                raise ValueError(
                    f"`loader.{name}` was changed from {before} to {after} after `attach`. Change it back, or call "
                    "run.detach() and attach again."
                )


def checked_batch_size(sizes: Any) -> int:
    """Returns the batch size of a batch sampler.

    Raises:
        ValueError: The batch size is not a whole number of at least 1.
    """
    size = sizes.batch_size
    # In Python, True is an integer and would pass as a batch size of 1.
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(
            f"`loader.batch_sampler.batch_size` must be a whole number of at least 1, got {size!r}"
        )
    return size
