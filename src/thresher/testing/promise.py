"""A check of one promise: a callable that examines a method and leaves no random state or warning behind."""

import warnings
from collections.abc import Callable, Mapping
from functools import update_wrapper
from typing import Any

from thresher import rng
from thresher.testing.questions import CPU, SignalGenerator
from thresher.testing.subjects import CHECK_EPOCHS, CHECK_SAMPLES, subject_of


class Check:
    """A check of one promise that methods make; its arguments are those of `thresher.testing.check_method`.

    Args:
        examine: Function of a subject that raises `ContractError` where the promise is broken.
        stage_names: Stages whose methods make the promise.

    Example:
        >>> from thresher import UniformSubset
        >>> @promise("epoch")
        ... def check_keep(subject):
        ...     subject.expect(subject.method.keep > 0.5, "keeps half of the samples or less")
        >>> check_keep(UniformSubset(keep=0.3))
        Traceback (most recent call last):
        ...
        thresher.testing.subjects.ContractError: UniformSubset: keeps half of the samples or less
    """

    def __init__(self, examine: Callable[[Any], None], stage_names: tuple[str, ...]) -> None:
        update_wrapper(self, examine)
        self._examine, self.stage_names = examine, stage_names

    def __call__(
        self,
        method: Any,
        *,
        signals: Mapping[str, SignalGenerator] | None = None,
        epochs: int = CHECK_EPOCHS,
        samples: int = CHECK_SAMPLES,
    ) -> None:
        """Checks a method.

        Args:
            method: Instance of the method, of one of the stages of this check.
            signals: Functions that draw values of signals that Thresher does not know, by name. Default: None.
            epochs: Length of the training that the method is asked about. Default: 20.
            samples: Size of the dataset that the method is asked about. Default: 50.

        Raises:
            ContractError: The method breaks the promise.
        """
        with rng.undisturbed(CPU), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            self._examine(subject_of(method, signals, epochs, samples))


def promise(*stage_names: str) -> Callable[[Callable[[Any], None]], Check]:
    """Returns a decorator that makes a check of methods out of a function of a subject.

    Args:
        *stage_names: Stages whose methods make the promise: "before", "epoch" or "batch".

    Example:
        >>> @promise("batch", "epoch")
        ... def check_nothing(subject):
        ...     '''Checks nothing.'''
        >>> check_nothing.__doc__, check_nothing.stage_names
        ('Checks nothing.', ('batch', 'epoch'))
    """

    def decorate(examine: Callable[[Any], None]) -> Check:
        return Check(examine, stage_names)

    return decorate
