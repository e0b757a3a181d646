"""The loader that Lightning iterates in the place of the user's DataLoader."""

from collections.abc import Callable
from typing import Any

from thresher.loading.live_settings import OfUser
from thresher.loading.loader import SelectedLoader


class EpochBatches(OfUser):
    """The batches of a run, one pass per epoch. Other attributes are those of the user's DataLoader.

    Args:
        loader: Loader of the run.
        begins: Function that is called when an epoch begins, with its number of batches.
        resumes: Whether the first pass goes on where a saved run stopped. It begins with its first batch, because Lightning
            asks for an iterator before the hooks that come before the epoch, and may then ask for another one.
    """

    def __init__(self, loader: SelectedLoader, begins: Callable[[int], None], *, resumes: bool) -> None:
        self._user: Any = loader
        self._begins, self._resumes = begins, resumes
        self._current: EpochPass | None = None
        self._length: int | None = None

    def __len__(self) -> int:
        """Number of batches of the epoch that began last: after the training, when Lightning asks too, there is no next one."""
        return len(self._user) if self._length is None else self._length

    def __iter__(self) -> "EpochPass":
        self._current = EpochPass(self._user, self._begin)
        if not self._resumes:
            self._current.begin()
        self._resumes = False
        return self._current

    def _begin(self, length: int) -> None:
        self._length = length
        self._begins(length)

    def finish(self) -> None:
        """Ends the epoch in progress, as a `for` loop does that asks for a further batch after the last one.

        Raises:
            RuntimeError: There was a further batch.
        """
        if self._current is not None:
            self._current.finish()


class EpochPass:
    """One pass over the batches of a run.

    Args:
        loader: Loader of the run.
        begins: Function that is called when the pass begins, with the number of batches of the epoch.
    """

    def __init__(self, loader: SelectedLoader, begins: Callable[[int], None]) -> None:
        self._loader, self._begins, self._batches = loader, begins, None

    def begin(self) -> None:
        """Begins the epoch, or goes on with an interrupted one."""
        self._batches = iter(self._loader)
        self._begins(length_of(self._loader))

    def __iter__(self) -> "EpochPass":
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            self.begin()
        assert self._batches is not None
        return next(self._batches)

    def finish(self) -> None:
        """Asks for a further batch after the last one.

        Raises:
            RuntimeError: There is one.
        """
        if self._batches is not None and next(self._batches, None) is not None:
            raise RuntimeError(
                f"The epoch has more batches than the {len(self._loader)} that its loader has named: its sampler does not "
                "yield as many ids as it says. Make the sampler's __len__ right, or use shuffle=True."
            )


def length_of(loader: SelectedLoader) -> int:
    """Returns the number of batches of an epoch, which Lightning needs to know when the epoch begins.

    Args:
        loader: Loader of a run.

    Raises:
        ValueError: It is not known before the epoch is over.
    """
    try:
        return len(loader)
    except TypeError as error:
        raise ValueError(
            f"thresher.lightning: {error} Lightning validates, and steps with the last batch of an accumulation, by the number "
            "of batches. Use shuffle=True; for a method that chooses in the batch, forward_passes='once'."
        ) from error
