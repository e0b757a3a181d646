"""The contract of a method, checked on an instance. Authors of a method call it in a test, whatever the stage of the method.

    def test_mine() -> None:
        thresher.testing.check_method(Mine(keep=0.3))

The questions are hard on purpose: many ties, single samples, and losses that are equal, huge, or not finite. They are the same
in every run. Afterwards the global random states are as before.
"""

from collections.abc import Mapping
from typing import Any

from thresher.testing.answer_checks import (
    check_determinism,
    check_kept,
    check_not_finite,
    check_order,
    check_plans,
    check_random_states,
)
from thresher.testing.declaration_checks import check_bytes, check_interface, check_value
from thresher.testing.promise import Check
from thresher.testing.questions import SignalGenerator
from thresher.testing.shard_checks import check_shards
from thresher.testing.state_checks import check_inputs, check_state
from thresher.testing.subjects import CHECK_EPOCHS, CHECK_SAMPLES, subject_of
from thresher.testing.training_checks import check_device, check_training, check_waiting

CHECKS: tuple[Check, ...] = (
    check_value,
    check_interface,
    check_bytes,
    check_random_states,
    check_determinism,
    check_plans,
    check_kept,
    check_not_finite,
    check_inputs,
    check_order,
    check_shards,
    check_state,
    check_waiting,
    check_device,
    check_training,
)
"""Every check, in the order in which they run."""


def check_method(
    method: Any,
    *,
    signals: Mapping[str, SignalGenerator] | None = None,
    epochs: int = CHECK_EPOCHS,
    samples: int = CHECK_SAMPLES,
) -> None:
    """Checks every promise of a method: its declaration, its answers to hard questions, and a training with it.

    Args:
        method: Instance of the method, of any stage.
        signals: Functions `(generator, n) -> (n,)` that draw values of signals that Thresher does not know, by name;
            `generator` is a `numpy.random.Generator`. Default: None.
        epochs: Length of the training that the method is asked about; choose it so that the method leaves out samples.
            Default: 20.
        samples: Size of the dataset, for a method that needs to know it (such as one with a score of every sample).
            Default: 50.

    Raises:
        ContractError: The method breaks a promise; the message names the method and the promise.
        ValueError: The method needs a signal that Thresher does not know and that `signals` lacks.

    Example:
        >>> from thresher import SelectiveBackprop
        >>> class Misspelt(SelectiveBackprop):
        ...     def actve(self, progress, step):
        ...         return progress > 0.1
        >>> try:
        ...     check_method(Misspelt(keep=0.5))
        ... except AssertionError as error:
        ...     print(str(error).split(". ")[0])
        Misspelt.actve is neither a setting nor part of the contract of methods; the nearest name is 'active'
    """
    subject = subject_of(method, signals, epochs, samples)
    for check in CHECKS:
        if method.stage in check.stage_names:
            check(subject.method, signals=signals, epochs=epochs, samples=samples)
