"""`attach`: the one way to attach a method to a training loop."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from thresher.losses.reader import Signals
from thresher.methods.contract import Method
from thresher.passes.engine import Forward
from thresher.passes.proxy import Proxy
from thresher.passes.scoring import Scoring
from thresher.run.assembly import build_run
from thresher.run.checks import Arguments, check
from thresher.run.naming import method_of
from thresher.run.run import Run


def attach(
    method: Method | float | str | Sequence[Method | float | str],
    *,
    loader: DataLoader[Any],
    criterion: Any,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    epochs: int,
    forward: Forward | None = None,
    forward_passes: Literal["auto", "once", "twice"] = "auto",
    scoring: Scoring | None = None,
    proxy: Proxy | None = None,
    signals: Signals | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    on_nonfinite: Literal["keep", "raise"] = "keep",
    spend: Literal["steps", "batches"] | None = None,
    divide: Literal["kept", "batch"] | None = None,
    process_group: Any = None,
    collate_keeps_rows: bool = False,
) -> Run:
    """Attaches a method to a training loop, which then iterates `run.loader` and calls `run.model` and `run.criterion`.

    Args:
        method: Method such as `Kakurenbo()`, its name in `thresher methods`, such as "kakurenbo", or a list with at most one
            per stage (before training, epoch, batch). 0.5, or "50%", is a share of the cost of full training: `Winnow(0.5)`.
        loader: Training DataLoader, whose settings and order are kept. Batch methods, and a share alone, also take streams.
        criterion: Loss of torch.nn, or function `(outputs, targets) -> per-sample losses`, which `run.criterion` averages; None
            if only `run.reduce` is called. Losses that the loop itself reduces come from a module with reduction="none".
        model: Model, whose outputs name their rows. Needed where the method makes forward passes of its own.
        optimizer: Optimizer; its steps are counted. Needed where the method scales the learning rate.
        epochs: Number of epochs of the whole training, 1 or more, to which schedules of methods refer.
        forward: Function `(model, batch) -> (outputs, targets)` of own passes. Default: `(model(batch[0]), batch[1])`.
        forward_passes: Where the losses come from by which a batch method chooses. "once": from the loop's own forward pass;
            `run.model` is `subset_backward(model)`, inside of DDP. "twice": from a pass before it, over every candidate batch.
            "auto": "once", and "twice" from the second epoch on where the model cannot be traced.
        scoring: Settings of the scoring pass with "twice": lower precision, stale losses, a proxy model, smaller inputs.
        proxy: Small model by whose losses the rows are chosen before the loop's forward pass, and which the run trains along.
        signals: Function `(outputs, targets) -> {name: (n,) tensor}` for signals that the criterion cannot give.
        seed: Random seed of all draws of the method; the loop's own random numbers are not touched.
        device: Device of batches and records. Default: the device of the model.
        on_nonfinite: Reaction to losses that are not finite, whose samples are always kept: "keep" warns, "raise" raises.
        spend: Way to spend plans: "steps", fewer steps; "batches", smaller ones, no LR scaled. Default None: the method's own.
        divide: Divisor of kept losses: "kept" for the rows kept, "batch" for all rows. Default: "kept", or what weights need.
        process_group: Process group of data parallelism. Default: the default group of torch.distributed, where there is one.
        collate_keeps_rows: Declaration that row i of each batch is sample i, for a collate_fn that draws random numbers for
            each row, as one that masks tokens. What it does not draw for is compared all the same. Default: all is compared.

    Example:
        >>> loader = DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 3), torch.arange(8) % 2), 2)
        >>> len(attach("uniform", loader=loader, criterion=nn.CrossEntropyLoss(), epochs=3).loader)
        3

    Raises:
        TypeError: An argument has the wrong type, or the samples of the dataset have no ids.
        ValueError: An argument is out of range, or something that the method needs is missing; nothing was changed.
    """
    training = (method_of(method), loader, criterion, model, optimizer, epochs, forward, forward_passes, scoring, signals)
    given = Arguments(*training, seed, device, on_nonfinite, spend, divide, proxy, collate_keeps_rows)
    return build_run(given, check(given, process_group))
