"""Several batches before their losses.

Library: torch
State: works with `ids=run.ids_of(x)`
Refused: `ids=run.ids`: "but batch 0 has no loss yet"

Thresher finds the rows without `ids=` if losses are computed from tensors of the batch, or from outputs of `run.model` for them. Here
the inputs are new tensors. Save a state after the `while` loop: after the last batch of an epoch, it gives a warning.
"""

from itertools import islice

from torch.nn import functional as F
from torch.utils.data import DataLoader

import thresher


def train(method, dataset, model, optimizer, epochs, workers=0):
    loader = DataLoader(dataset, 4, shuffle=True, num_workers=workers)
    run = thresher.attach(
        method, loader=loader, criterion=None, model=model, optimizer=optimizer, epochs=epochs
    )
    for _ in range(run.epoch, epochs):
        batches = iter(run.loader)
        while group := list(islice(batches, 3)):
            for x, y in group:
                losses = F.cross_entropy(run.model(2 * x), y, reduction="none")
                loss = run.reduce(losses, ids=run.ids_of(x))
                (loss / len(group)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return run
