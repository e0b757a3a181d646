"""The user's model as a run trains it: with `subset_backward`, inside of wrappers for several processes."""

import warnings
from typing import Any

import torch
from torch import distributed, nn

from thresher.attribution.meter import Meter
from thresher.subset import SubsetBackward, subset_backward
from thresher.subset.compilers import compiled_like, given
from thresher.subset.parallel import CallInside, averages, data_parallel, inside

COMPILED_AROUND = (
    "`model` is torch.compile around subset_backward, and torch.compile would compute the backward pass of all rows. The model "
    "is trained without that wrapper, with right gradients and more slowly. Write subset_backward(torch.compile(model)), or "
    "leave subset_backward out and give attach the model that torch.compile returned."
)


class Trained:
    """The model of a run, whose backward pass may cost only the chosen rows.

    Args:
        model: Argument of `attach`.
        subset: Whether the backward pass is to cost only the chosen rows. A model that was made for this is left as it is.

    Attributes:
        module: Module that `run.model` stands for; None where `attach` was given no model.
        call: Function that runs a forward pass of the training; None where this is a call of `module`.
    """

    def __init__(self, model: nn.Module | None, *, subset: bool) -> None:
        as_given: Any = model
        if subset:
            model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper would compile the backward pass of all rows
        self.module, self.call = model, None
        self._parallel, self._averages = data_parallel(model), averages(model)
        self._parts = [] if model is None else [part for part in model.modules() if isinstance(part, SubsetBackward)]
        self._whole = _innermost(model)
        if self._parts and model is not as_given and given(as_given).options is not None:
            warnings.warn(COMPILED_AROUND, stacklevel=4)
        if model is None or self._parts or not subset:
            return
        self._whole = made = subset_backward(as_given if self._parallel is None else compiled_like(as_given, inside(model)))
        self._parts = [made]
        if self._parallel is None:
            self.module = made
        else:
            self.call = CallInside(self._parallel, made)

    @property
    def is_plain(self) -> bool:
        """Whether the model turned out not to be traceable, so that its backward pass costs all rows."""
        return any(part.fallback is not None for part in self._parts)

    def is_plain_anywhere(self) -> bool:
        """Returns whether the model turned out not to be traceable in any process that trains it; all get the same answer."""
        if self._averages is None:
            return self.is_plain
        found = torch.tensor(self.is_plain, dtype=torch.int32, device=self._averages.device)
        distributed.all_reduce(found, op=distributed.ReduceOp.MAX, group=self._averages.process_group)
        return bool(found)

    def report_to(self, meter: Meter) -> None:
        """Has the model report the samples that go backward, where its backward pass costs the chosen rows only.

        Args:
            meter: Meter that counts them.
        """
        if not self._parts:
            return
        self._parts[0].meter = meter
        if self._parts[0] is not self._whole:
            meter.make_unknown(
                "only a part of the model has the backward pass of subset_backward, and the cost of the rest depends on its "
                "operations; wrap the whole model in subset_backward, unless its blocks are sharded one by one"
            )


def _innermost(model: nn.Module | None) -> nn.Module | None:
    """Returns what is inside of wrappers around a whole model, down to that of `subset_backward`."""
    while model is not None and not isinstance(model, SubsetBackward):
        model = getattr(model, "_orig_mod", getattr(model, "module", None))
    return model
