"""MultiEpochsDataLoader.

Library: timm
State: refused: pass a DataLoader with `persistent_workers=True`
Refused: the loader of this class: "To keep workers alive, use persistent_workers=True"

This class keeps workers alive, and reads batches of the next epoch before its plan exists. `persistent_workers=True`, the default of
`create_loader`, also keeps workers alive.
"""

from timm.data import create_loader
from torch import nn

import thresher


def train(method, dataset, model, optimizer, epochs, workers=0):
    loader = create_loader(
        dataset, (3, 8, 8), 4, is_training=True, use_prefetcher=False, num_workers=workers
    )
    criterion = nn.CrossEntropyLoss()
    run = thresher.attach(
        method, loader=loader, criterion=criterion, model=model, optimizer=optimizer, epochs=epochs
    )
    for _ in range(run.epoch, epochs):
        for x, y in run.loader:
            loss = run.criterion(run.model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return run
