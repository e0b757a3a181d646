"""StatefulDataLoader.

Library: torchdata
State: works: `run.loader.state_dict()` has the position
Refused: a loader that was given a state before attach: "was given a state before attach"

`run.loader.state_dict()` is the state of the run: the position in the epoch, its order and plan, and the records. A script that
saves the state of its loader resumes exactly, with any number of workers.
"""

from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader  # pyright: ignore[reportMissingImports]

import thresher


def train(method, dataset, model, optimizer, epochs, workers=0):
    loader, criterion = (
        StatefulDataLoader(dataset, 4, shuffle=True, num_workers=workers),
        nn.CrossEntropyLoss(),
    )
    run = thresher.attach(
        method, loader=loader, criterion=criterion, model=model, optimizer=optimizer, epochs=epochs
    )
    for _ in range(run.epoch, epochs):  # continues where run.loader.load_state_dict(state) left off
        for x, y in run.loader:
            loss = run.criterion(run.model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()  # from here, state = run.loader.state_dict() can be saved with model and optimizer
    return run
