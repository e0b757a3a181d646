"""A batch method chooses by the signals of a small model, the proxy, that the run trains along."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thresher.attribution.rows import RowLayout
from thresher.losses.base import DIVISOR_SHARE
from thresher.methods.contract import requirements_of, way_around
from thresher.passes.engine import Answer
from thresher.passes.scoring import Scoring
from thresher.plans import BatchPlan
from thresher.run.batch_selection import (
    BatchStage,
    BeforeForward,
    Tools,
    part_of_batch,
    part_of_divisor,
    take_samples,
    times,
    without_ignored,
)
from thresher.shards import World


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


def check_proxy(
    proxy: Any, method: Any, forward_passes: str, scoring: Scoring | None, model: Any, optimizer: Any, world: World
) -> None:
    """Validates the argument `proxy` of `attach`.

    Args:
        proxy: Argument of `attach`.
        method: The batch method; None where there is none.
        forward_passes: Argument of `attach`.
        scoring: Argument of `attach`.
        model: Argument of `attach`.
        optimizer: Argument of `attach`.
        world: Processes that train together.

    Raises:
        TypeError: `proxy` is no `Proxy`.
        ValueError: It contradicts another argument, or several processes train together.
    """
    if proxy is None:
        return
    if not isinstance(proxy, Proxy):
        raise TypeError(f"`proxy` must be a thresher.Proxy(model, optimizer), got {type(proxy).__name__}")
    if method is None or not requirements_of(method).signals:
        who = "none was given" if method is None else f"{type(method).__name__} does not"
        raise ValueError(f"`proxy` is for methods that choose in the batch by losses or other signals; {who}; leave it out")
    if "feature" in requirements_of(method).signals:
        raise ValueError(
            f"`proxy`: {type(method).__name__} needs the input of the last nn.Linear, and a proxy gives its outputs only"
            f"{way_around(method, 'feature')}"
        )
    if forward_passes == "once":
        raise ValueError(
            "`proxy` chooses before the loop's forward pass, and forward_passes='once' in it: leave `forward_passes` out for "
            "batches of the chosen rows, or use 'twice', which fills batches up"
        )
    if scoring is not None and (scoring.model is not None or scoring.losses is not None or scoring.every_epochs > 1):
        raise ValueError(
            "`proxy` gives the losses to choose by: of `scoring` it takes `dtype` and `input_scale`, not `model`, `losses` or "
            "`every_epochs`"
        )
    if proxy.model is model or proxy.optimizer is optimizer:
        which = "model" if proxy.model is model else "optimizer"
        raise ValueError(f"`proxy` has the {which} that attach was given; it needs a smaller model and an optimizer of its own")
    if world.size > 1:
        raise ValueError(
            f"`proxy` is trained by one process, and {world.size} processes would each train another one. Train in one "
            "process, or choose in the loop's own forward pass, with forward_passes='once'."
        )


class ProxyForward(BeforeForward):
    """A batch method chooses by the signals of a proxy, which takes a step on the chosen rows from time to time.

    Args:
        tools: Parts of the run.
        stage: The batch method at work.
        scoring: Precision of the proxy's passes, and the size of their inputs.
        proxy: The proxy.
        fills: Whether chosen rows are filled up to full batches.
    """

    def __init__(self, tools: Tools, stage: BatchStage, scoring: Scoring, proxy: Proxy, *, fills: bool) -> None:
        super().__init__(tools, stage, scoring, fills=fills)
        self._proxy, self._ratio = proxy, proxy.cost

    @property
    def scores(self) -> bool:
        """False: it is another model whose losses rows are chosen by."""
        return False

    @property
    def sees_labels(self) -> bool:
        """True: the proxy is given every candidate batch."""
        return True

    def choose(self, batch: Any, ids: Tensor, epoch: int) -> BatchPlan:
        """Returns the rows of a candidate batch that the loop sees; the proxy may learn from them."""
        tools, stage, n = self._tools, self._stage, len(ids)
        if self._is_inactive(stage):
            return stage.whole(n, tools.device)
        turn, rest = divmod(stage.step, self._proxy.every)
        step, learns = stage.step, rest == 0
        passed = tools.passes.by_proxy(
            self._proxy.model, batch, n, self._scoring, learns=learns, also=tools.beside(fills=self.fills)
        )
        with passed as (answer, found):
            shares = found.pop(DIVISOR_SHARE, None)
            plan = stage.plan(ids.to(tools.device, non_blocking=True), without_ignored(found))
            if learns and len(plan.rows):
                self._learn(answer, plan)
        if self._ratio is None:
            own, whole = (tools.passes.flops(model, batch, n, self._scoring) for model in (self._proxy.model, None))
            self._ratio = own / whole if own and whole else 1.0
        self._count(n, step, forward=True)
        if learns:
            self._count(len(plan.rows), turn, forward=False)
        return part_of_batch(plan, n, shares) if tools.by_batch else plan

    def _learn(self, answer: Answer, plan: BatchPlan) -> None:
        """Takes a step on the chosen rows; one without a finite gradient changes nothing but the state of the optimizer."""
        criterion, layout, optimizer = self._tools.reader.criterion, answer.layout, self._proxy.optimizer
        assert criterion is not None
        with torch.enable_grad():
            outputs, targets = (take_samples(tree, plan, layout) for tree in (answer.outputs, answer.targets))
            if plan.weights is None:
                value = criterion.value(outputs, targets)
            else:
                small = RowLayout(len(plan.rows), layout.repeat)
                value = criterion.measure(outputs, targets, small, weights=plan.weights, wanted=set()).value
            value = value.mean()  # of a criterion with reduction="none", which the loop reduces
            if self._tools.by_batch:
                value = times(value, part_of_divisor(criterion, answer.targets, layout, plan.rows, plan.weights, None))
            optimizer.zero_grad()
            value.backward()
        gradients = [one.grad for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
        finite = torch.stack([one.isfinite().all() for one in gradients]).all()
        for one in gradients:
            one.copy_(torch.where(finite, one, 0))
        optimizer.step()

    def _count(self, rows: int, turn: int, *, forward: bool) -> None:
        """Counts a pass of the proxy as a part of a pass of the trained model; over many turns the parts add up."""
        assert self._ratio is not None
        cost = self._attributor.meter.cost
        part = math.floor(self._ratio * rows * (turn + 1)) - math.floor(self._ratio * rows * turn)
        if forward:
            cost.forward += part
            cost.scoring += part
        else:
            cost.backward += part

    def warn_if_in_vain(self, keep: float) -> None:
        """Warns of no cost: what the proxy costs is counted, and differs from one proxy to another."""
        self.warn_of_labels()
