"""A proxy: a small model that is trained beside the large one and chooses the rows that the large one is given."""

import math
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer


@dataclass(frozen=True, eq=False)
class Proxy:
    """A small model by whose signals the rows of a batch are chosen, before the large model sees them, and which learns along.

    The run puts each candidate batch through the proxy; the rows that the method leaves out go neither through the forward nor
    through the backward pass of the trained model. In each `every`-th step the proxy takes a step of its own optimizer on the
    rows that it chose, with the criterion of the training, before the loop sees the batch. The rule is that of airbench96
    (github.com/KellerJordan/cifar10-airbench), which trains on the half of each batch with the largest losses.

    The run steps the optimizer and leaves all else to the loop: schedule the learning rate of the proxy beside that of the
    model, and save the states of both. What the proxy computes is part of `run.cost`.

    Args:
        model: The proxy, on the device of the trained model. Its passes are made in training mode, as in airbench.
        optimizer: Optimizer of the proxy's parameters alone.
        every: Number of batches from one step of the proxy to the next, 1 or more. Default and published: 4.
        cost: Cost of a forward pass of the proxy in forward passes of the trained model, > 0. Default None: the ratio of the
            floating-point operations that torch.utils.flop_counter counts on the first batch; 1 where it counts none.

    Raises:
        TypeError: `model` is no module, or `optimizer` no optimizer.
        ValueError: `every` or `cost` is out of its range, or the optimizer has none of the proxy's parameters, or others.

    Example:
        >>> import torch
        >>> small = nn.Linear(8, 2)
        >>> Proxy(small, torch.optim.SGD(small.parameters(), lr=0.1)).every
        4
    """

    model: nn.Module
    optimizer: Optimizer
    every: int = 4
    cost: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise TypeError(f"Proxy: `model` must be a torch.nn.Module, got {type(self.model).__name__}")
        if not isinstance(self.optimizer, Optimizer):
            raise TypeError(f"Proxy: `optimizer` must be a torch.optim.Optimizer, got {type(self.optimizer).__name__}")
        if not (isinstance(self.every, int) and not isinstance(self.every, bool) and self.every >= 1):
            raise ValueError(f"Proxy: `every` must be a whole number of 1 or more, got {self.every!r}")
        if self.cost is not None and not (
            isinstance(self.cost, int | float) and not isinstance(self.cost, bool) and 0 < self.cost < math.inf
        ):
            raise ValueError(f"Proxy: `cost` must be a finite number above 0, or None, got {self.cost!r}")
        own = {id(one) for one in self.model.parameters()}
        stepped = {id(one) for group in self.optimizer.param_groups for one in group["params"]}
        if not stepped or not stepped <= own:
            raise ValueError(
                "Proxy: `optimizer` must have parameters of the proxy and no others, got "
                f"{len(stepped & own)} of its own and {len(stepped - own)} others; make it of proxy.parameters()"
            )
