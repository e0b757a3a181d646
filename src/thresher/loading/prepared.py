"""The end of an epoch, as accelerate reads it while gradients are accumulated."""

from typing import Any


class PreparedLoader:
    """Tells a loader that accelerate prepared where an epoch begins and ends, as its own iteration would have done.

    `Accelerator.accumulate` steps at the last batch of an epoch, whatever the number of accumulated batches. It reads from the
    loader that was iterated last which batch that is; a loader that it did not prepare is left alone.

    Args:
        loader: The user's loader.

    Example:
        >>> import torch
        >>> loader = PreparedLoader(torch.utils.data.DataLoader([1, 2]))
        >>> loader.begin(), loader.yielded(1, last=True), loader.end(whole=True)
        (None, None, None)
    """

    def __init__(self, loader: Any) -> None:
        names = ("begin", "end", "end_of_dataloader", "gradient_state", "iteration", "set_epoch")
        self._loader = loader if all(hasattr(loader, name) for name in names) else None
        self._begun = False

    def begin(self) -> None:
        """Begins an epoch; one that was left early ends."""
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
