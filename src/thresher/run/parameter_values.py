"""Whether the parameters of a model change while nothing else shows a training, as in one with forward passes only."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy


class ParameterValues:
    """Two values of each parameter, at the time when this object was made.

    The values are compared, and not the versions: an evaluation may exchange parameters for averaged ones and put them back.

    Args:
        parameters: Function that returns the parameters; None where there is no model.
    """

    def __init__(self, parameters: Callable[[], Iterable[Tensor]] | None) -> None:
        some = [] if parameters is None else [one for one in parameters() if not is_lazy(one) and one.numel()]
        self._held = [(one, _values(one).clone()) for one in some if one.layout is torch.strided]

    def changed(self) -> bool:
        """Returns whether a value is another one now; this waits for the device."""
        return any(not torch.equal(_values(one).to(then.device), then) for one, then in self._held)


def _values(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    for _ in range(tensor.dim() - 1):
        tensor = tensor[0]
    return tensor[:: max(1, len(tensor) - 1)] if tensor.dim() else tensor
