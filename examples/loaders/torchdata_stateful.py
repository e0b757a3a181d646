"""StatefulDataLoader.

Library: torchdata
State: refused: pass a DataLoader with the same arguments
Refused: the loader of this class: "to save the position in an epoch, run.state_dict()"

It keeps a position in the epoch of its own, and a resumed run would skip once more what the loader has skipped. The state of a
run has the position, the order and the plan of the epoch.
"""

from torch import nn
from torch.utils.data import DataLoader

import thresher


def train(method, dataset, model, optimizer, epochs, workers=0):
    loader, criterion = DataLoader(dataset, 4, shuffle=True, num_workers=workers), nn.CrossEntropyLoss()
    run = thresher.attach(method, loader=loader, criterion=criterion, model=model, optimizer=optimizer, epochs=epochs)
    for _ in range(run.epoch, epochs):  # goes on where run.load_state_dict(state) has put it
        for x, y in run.loader:
            loss = run.criterion(run.model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()  # from here, state = run.state_dict() can be saved beside model and optimizer
    return run
