"""The length of a run in steps."""


class Length:
    """The length of a run: all epochs, or a share of them that ends after the nearest step.

    Args:
        share: Share of the epochs to train, (0, 1].
        epochs: Number of epochs of full training.
        samples: Number of samples in an epoch.
        batch_size: Number of samples in every batch of an epoch but the last.

    Attributes:
        steps: Number of steps of each epoch; None for an epoch that is not cut short.
        samples: Number of samples that the whole run trains on, with repeats.
    """

    def __init__(self, share: float, epochs: int, samples: int, batch_size: int) -> None:
        wanted = share * epochs * samples
        whole = min(epochs, int(wanted / samples + 1e-9))
        left = wanted - whole * samples
        rest = max(round(left / batch_size), 0 if whole else 1)
        if rest * batch_size >= samples or samples - left < abs(rest * batch_size - left):
            whole, rest = whole + 1, 0
        self.steps: list[int | None] = [None] * whole + [rest] * (rest > 0)
        self.samples = whole * samples + rest * batch_size
        self._stretch = len(self.steps) * samples / self.samples

    def progress(self, of_epochs: float) -> float:
        """Returns the share of this run that is done, given the share of its epochs if all of them were whole."""
        return min(1.0, of_epochs * self._stretch)
