"""A small network beside the trained one: it learns from every row, and chooses those that the trained one learns from.

The rule of the mask of airbench96 (github.com/KellerJordan/cifar10-airbench), except that the small network learns in every
step from the whole batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.winnow.tasks import plain_cnn
from thresher.methods.winnow import draw_keys
from thresher.selection import Values, on_host
from thresher_lab.tasks.base import Data, Task

Score = Literal["loss", "uncertainty"]

quarter_cnn = partial(plain_cnn, 4)
"""Makes the network of the tasks with a quarter of its channels and features."""


def operations(network: nn.Module, inputs: Tensor) -> int:
    """Returns the number of floating-point operations of a forward and a backward pass.

    Args:
        network: Network; its gradients are left as they are.
        inputs: Inputs, as in training.
    """
    counter = FlopCounterMode(display=False)
    with counter:
        torch.autograd.grad(network(inputs).sum(), list(network.parameters()))
    return counter.get_total_flops()


@dataclass(frozen=True)
class Beside:
    """What a training with a small network beside it did.

    Attributes:
        model: Trained network.
        rows: Number of rows that it was trained on.
        batches: Number of rows that the small network was trained on.
        share: Operations of the small network for a row, as a share of those of the trained one.
    """

    model: nn.Module
    rows: int
    batches: int
    share: float


def chosen(score: Score, losses: Tensor, uncertainties: Tensor, k: int, base: int) -> Tensor:
    """Returns the rows that the trained network learns from.

    Args:
        score: "loss": the rows with the largest losses. "uncertainty": rows drawn in proportion to their uncertainties.
        losses: Losses of the small network, shape (n,).
        uncertainties: Its uncertainties, shape (n,).
        k: Number of rows, 0 to n.
        base: Number that the draw depends on, within [0, 2**62).

    Returns:
        Row numbers, shape (k,), int64.
    """
    if score == "loss":
        return losses.topk(k).indices
    values: Values = on_host(uncertainties)
    return torch.from_numpy(draw_keys(values, len(values), base)).topk(k, largest=False).indices


def train_beside(
    task: Task,
    data: Data,
    *,
    score: Score,
    budget: float,
    seed: int,
    epochs: int,
    proxy: Callable[[], nn.Module] = quarter_cnn,
) -> Beside:
    """Trains a network on the rows that a small network chooses, which is trained beside it on all rows.

    Both have the optimizer, the rate and the schedule of the task.

    Args:
        task: Task to train.
        data: Data of the task.
        score: Rule of the choice, see `chosen`.
        budget: Share of the cost of full training that both networks have together.
        seed: Random seed.
        epochs: Number of epochs.
        proxy: Function that creates the small network.

    Raises:
        ValueError: The small network alone costs the budget.
    """
    torch.manual_seed(seed)
    training = task.training(data, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        small = proxy()
    example = next(iter(task.loader(data, seed)))[0]
    share = operations(small, example) / operations(training.model, example)
    if share >= budget:
        raise ValueError(f"the small network costs {share:.3f} of full training, and both may cost {budget}: make it smaller")
    optimizers = training.optimizer, task.optimizer(small)
    generator = torch.Generator().manual_seed(seed)
    steps, step, rows, batches = epochs * len(training.loader), 0, 0, 0
    for _ in range(epochs):
        for x, y in training.loader:
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] = task.lr * training.schedule(step / steps)
            losses, uncertainties = _learn(small, optimizers[1], x, y)
            step, batches = step + 1, batches + len(y)
            k = round((budget - share) * batches) - rows
            if not k:
                continue
            kept = chosen(score, losses, uncertainties, k, int(torch.randint(2**62, (), generator=generator)))
            training.criterion(training.model(x[kept]), y[kept]).backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
            rows += k
    return Beside(training.model, rows, batches, share)


def _learn(small: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Makes a step of the small network, and returns the losses and uncertainties that it had before the step."""
    outputs = small(x)
    losses = F.cross_entropy(outputs, y, reduction="none")
    losses.mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return losses.detach(), 1 - outputs.detach().softmax(1).square().sum(1)
