"""The model that the loop trains, whose backward pass may run on the chosen rows only."""

from typing import Any

import torch
from torch import distributed, nn

from thresher.attribution.cost_meter import Meter
from thresher.distributed.wrappers import CallInside, SubsetModule, averages, data_parallel, inside
from thresher.torch_internals import without_compiler
from thresher.warning import warn

COMPILED_AROUND = (
    "`model` is torch.compile around subset_backward, and torch.compile would compute the backward pass of all rows. The model "
    "is trained without this wrapper: gradients are right, but training is slower. Write "
    "subset_backward(torch.compile(model)), or pass torch.compile(model) to attach."
)


class TrainedModel:
    """The model of a run, whose backward pass may run on the chosen rows only.

    Args:
        model: Argument of `attach`.
        subset: Whether to wrap the model such that its backward pass runs on the chosen rows only; not done twice.

    Attributes:
        module: Module that `run.model` stands for; None if `attach` was given no model.
        call: Function that runs a forward pass of the loop; None if this is a call of `module`.
    """

    def __init__(self, model: nn.Module | None, *, subset: bool) -> None:
        as_given: Any = model
        # The wrapper of torch.compile would compile the backward pass of all rows.
        if subset:
            model = without_compiler(model)
        self.module = model
        self.call = None
        self._parallel = data_parallel(model)
        self._averages = averages(model)
        if model is None:
            self._subset_modules = []
        else:
            self._subset_modules = [
                part for part in model.modules() if isinstance(part, SubsetModule)
            ]
        self._inner_model = _unwrap(model)
        if model is None or not subset:
            return
        # Loaded here, as it loads torch's compiler: other runs need neither.
        from thresher.subset import subset_backward
        from thresher.subset.compilers import compiled_like, given

        if self._subset_modules:
            if model is not as_given and given(as_given).options is not None:
                warn(COMPILED_AROUND)
            return
        # A model that torch.compile returned is compiled inside of the wrapper; one in DistributedDataParallel is wrapped
        # inside of it, so that gradients are still reduced.
        if self._parallel is None:
            as_compiled = as_given
        else:
            as_compiled = compiled_like(as_given, inside(model))
        self._inner_model = subset_model = subset_backward(as_compiled)
        self._subset_modules = [subset_model]
        if self._parallel is None:
            self.module = subset_model
        else:
            self.call = CallInside(self._parallel, subset_model)

    @property
    def tracing_s(self) -> float:
        """Seconds that tracing and compiling have taken."""
        return sum(part.tracing_s for part in self._subset_modules)

    @property
    def is_plain(self) -> bool:
        """Whether the model turned out not to be traceable, so that its backward pass costs all rows."""
        return bool(self.why_plain())

    def why_plain(self) -> str:
        """Returns why the model could not be traced; "" if it was, or has not been tried."""
        return next(
            (part.fallback for part in self._subset_modules if part.fallback is not None), ""
        )

    def is_plain_anywhere(self, can_score: bool) -> bool:
        """Returns whether the model turned out not to be traceable in any process that trains it; all get the same answer.

        Args:
            can_score: Whether this process can choose in another way; if one cannot, the answer is False.
        """
        if self._averages is None:
            return self.is_plain and can_score
        # All processes choose in the same way, or one would wait for a scoring pass that the others do not make.
        flags = torch.tensor(
            [self.is_plain, not can_score], dtype=torch.int32, device=self._averages.device
        )
        distributed.all_reduce(
            flags, op=distributed.ReduceOp.MAX, group=self._averages.process_group
        )
        plain, unable = flags.tolist()
        return bool(plain) and not unable

    def report_to(self, meter: Meter) -> None:
        """Makes the model report its backward passes to a meter, if they may run on the chosen rows only.

        Args:
            meter: Meter that counts them.
        """
        if not self._subset_modules:
            return
        self._subset_modules[0].meter = meter
        # How many rows the backward pass of the other parts of the model costs depends on their operations.
        if self._subset_modules[0] is not self._inner_model:
            meter.make_unknown(
                "only a part of the model is wrapped in subset_backward, and the cost of the rest is unknown; wrap the whole "
                "model, unless its blocks are sharded one by one"
            )


def _unwrap(model: nn.Module | None) -> nn.Module | None:
    """Returns what is inside of wrappers around a whole model, down to the wrapper of `subset_backward`."""
    while model is not None and not isinstance(model, SubsetModule):
        model = getattr(model, "_orig_mod", getattr(model, "module", None))
    return model
