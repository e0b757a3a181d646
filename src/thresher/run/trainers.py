"""What the integrations with trainers of other libraries share."""

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from thresher.loading.loader import SelectedLoader
from thresher.loading.samplers import inner_sampler
from thresher.methods.contract import title_given
from thresher.methods.full import FullData
from thresher.run.run import Run


class TrainerRun:
    """The parts of a run that an integration needs besides the members of `Run`.

    Args:
        run: The run.

    Attributes:
        cost: Counters of the run. Unlike `run.cost`, reading them ends no epoch.
        trains_in_full: Whether no method leaves anything out.
        only_counts: Whether nothing is left out, and nothing is recorded either.
    """

    def __init__(self, run: Run) -> None:
        self.cost = run._parts.cost
        self._attributor = run._parts.attributor
        self._config = run._parts.config
        self.trains_in_full = self._config.trains_in_full
        self.only_counts = self.trains_in_full and not self._config.given.observe

    def samples_come_first(self) -> None:
        """Assumes from now on that samples are along the first dimension of every tensor of a batch."""
        self._attributor.samples_come_first()

    @property
    def chooser_of_rows(self) -> Any:
        """Method whose rows are chosen in the loop's forward pass, with a loss divided by these rows; None for others."""
        config = self._config
        if config.mode.is_in_forward and not config.by_batch:
            return config.batch_method
        return None


@dataclass(frozen=True)
class Integration:
    """The selection for a trainer of another library: its checks, with errors that say what its users can do.

    Args:
        selection: Name of its class.
        trainer: Name of the trainer.
        needs_length: Sentences that say why the trainer needs the number of batches, and how to make it known.
        way_out: Sentence that names a sampler with each sample once.
    """

    selection: str
    trainer: str
    needs_length: str
    way_out: str

    def not_supported(self, what: str, way_out: str) -> ValueError:
        """Returns the error for a setting that is not supported.

        Args:
            what: Name of the setting, and its value.
            way_out: Sentences that say why, and what to do.
        """
        return ValueError(f"{self.selection}: {what} is not supported. {way_out}")

    def batches_in_epoch(self, loader: SelectedLoader) -> int:
        """Returns the number of batches of an epoch, which trainers need to know when the epoch begins.

        Args:
            loader: Loader of a run.

        Raises:
            ValueError: The number is not known before the epoch is over.
        """
        try:
            return len(loader)
        except TypeError as error:
            raise ValueError(f"{self.selection}: {error} {self.needs_length}") from error

    def check_length(self, run: Run) -> None:
        """Checks that the number of batches of every epoch is known when the epoch begins.

        Raises:
            ValueError: The sampler may repeat samples, and the method leaves some out before the epoch; or a batch method keeps
                a random number of rows, which are gathered into full batches.
        """
        loader = run.loader
        config = run._parts.config
        method = config.epoch_method
        self.batches_in_epoch(loader)
        # With several processes, `attach` has already checked that the sampler has a known length.
        if config.world.size == 1 and not loader.yields_once and not isinstance(method, FullData):
            sampler = type(inner_sampler(loader.batch_sampler)).__name__
            raise self.not_supported(
                f"{title_given(method)} with a {sampler}, which may repeat samples,",
                f"{self.trainer} needs to know the number of batches of an epoch when it begins. {self.way_out}",
            )

    def check_processes(self, checkpoint: Any, before: int, now: int) -> None:
        """Checks that a checkpoint was saved by as many processes as there are now."""
        if before != now:
            raise ValueError(
                f"{self.selection}: {checkpoint} was saved by {before} processes, but now there are {now}. Use the same number."
            )


def trl_class(kind: type, names: Container[str] | None = None) -> type | None:
    """Returns the class of TRL that a trainer is one of; None if it is none of these.

    Args:
        kind: Class of a trainer.
        names: Names of classes of TRL. Default: all.
    """
    for base in kind.__mro__:
        if base.__module__.startswith("trl.") and (names is None or base.__name__ in names):
            return base
    return None
