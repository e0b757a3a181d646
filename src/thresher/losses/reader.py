"""What a run reads of each sample: the signals of its criterion, and those that the user computes."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thresher.attribution.rows import Attribution, RowLayout
from thresher.losses.base import Criterion
from thresher.losses.signals import WIDE_SIGNALS

DIVISOR_SHARE = "divisor_share"
"""Name of the share of each sample in what the mean of the criterion is divided by, such as its number of valid labels."""

Signals = Callable[[Any, Any], Mapping[str, Tensor]]
"""`(outputs, targets) -> {name: (n,) tensor}`."""


class SignalReader:
    """Reads the signals that a run needs of each sample.

    Args:
        criterion: The user's criterion per sample; None where the loop calls `run.reduce` alone.
        own: The user's function for signals that cannot be computed from the criterion; None where there is none.
        recorded: Names of the signals, besides the loss, that the records need.
        chosen_by: Names of the signals, besides the loss, that records and batch method need.
    """

    def __init__(self, criterion: Criterion | None, own: Signals | None, *, recorded: set[str], chosen_by: set[str]) -> None:
        self.criterion, self._own = criterion, own
        self.recorded, self.chosen_by = recorded, chosen_by

    def measuring(self) -> Callable[..., tuple[Tensor, Any]]:
        """Returns the function that computes the scalar for the loop and the recorded signals, as attribution calls it.

        It is the criterion's own, which runs in every step, where the user computes no signals.
        """
        if self._own is None and self.criterion is not None:
            return partial(self.criterion.in_step, self.recorded)
        return self._measure_with_own

    def _measure_with_own(
        self, outputs: Any, targets: Any, attribution: Attribution, weights: Tensor | None, weights_over_n: Tensor | None
    ) -> tuple[Tensor, Any]:
        assert self.criterion is not None
        own = self._ask(outputs, targets, attribution.layout.n)
        wanted = self.recorded - own.keys()
        value, found = self.criterion.in_step(wanted, outputs, targets, attribution, weights, weights_over_n)
        return value, (found if isinstance(found, dict) else found.now()) | own

    def signals(
        self, outputs: Any, targets: Any, layout: RowLayout, wanted: set[str], *, all_count: bool = False
    ) -> dict[str, Tensor]:
        """Computes the wanted signals of each sample, shape (n,), `loss` among them.

        Args:
            outputs: Outputs of the model.
            targets: Targets of the batch.
            layout: How rows are samples.
            wanted: Names of the signals besides the loss.
            all_count: Whether it is known that no target is an ignored one.
        """
        assert self.criterion is not None
        own = self._ask(outputs, targets, layout.n)
        asked = wanted - own.keys() - {DIVISOR_SHARE}
        found = {**self.criterion.signals(outputs, targets, layout, asked, all_count=all_count), **own}
        if DIVISOR_SHARE in wanted:
            alike = torch.empty(layout.n, 1, device=found["loss"].device)
            found[DIVISOR_SHARE] = self.criterion.shares(alike, targets)
        return found

    def beside(
        self, outputs: Any, targets: Any, n: int, wanted: set[str], missing: Callable[[set[str]], str]
    ) -> dict[str, Tensor]:
        """Computes the wanted signals of samples whose losses are known already.

        Args:
            outputs: Outputs of the model; None where the caller did not pass them.
            targets: Targets of the batch; None where the caller did not pass them.
            n: Number of samples.
            wanted: Names of the signals besides the loss.
            missing: Function of the names of signals that cannot be computed, which returns the message of the error.

        Raises:
            ValueError: Outputs, targets or criterion are missing.
        """
        own = self._ask(outputs, targets, n)
        wanted = wanted - own.keys()
        if not wanted:
            return own
        if outputs is None or targets is None or self.criterion is None:
            raise ValueError(missing(wanted))
        with torch.no_grad():
            return {**self.criterion.read(outputs, targets, wanted, n), **own}

    def _ask(self, outputs: Any, targets: Any, n: int) -> dict[str, Tensor]:
        """Calls the user's function and checks its answer."""
        if self._own is None:
            return {}
        with torch.no_grad():
            found = dict(self._own(outputs, targets))
        for name, tensor in found.items():
            wide = name in WIDE_SIGNALS and name in self.chosen_by
            if not isinstance(tensor, Tensor) or (tensor.shape[:1] if wide else tensor.shape) != (n,):
                got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise ValueError(f"`signals` must return tensors of shape ({n},), got {got} for {name!r}")
        return {name: tensor for name, tensor in found.items() if name in self.chosen_by}
