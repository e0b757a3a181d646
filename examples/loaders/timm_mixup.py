"""Mixup in the loop.

Library: timm
State: works with `ids=run.ids_of(y)`
Refused: the lines without `ids=`: "outputs of the model for inputs that were changed in place"

The loss of a mixed row is recorded for the sample given by `ids=`. Get the ids before `Mixup` changes the batch in place. Passes
that Thresher adds, such as KAKURENBO's refresh, use the samples without mixing, and a warning says so.
"""

from timm.data import Mixup
from torch import nn
from torch.utils.data import DataLoader

import thresher


def train(method, dataset, classes, model, optimizer, epochs, workers=0):
    loader = DataLoader(dataset, 4, shuffle=True, drop_last=True, num_workers=workers)
    mixup = Mixup(mixup_alpha=0.8, num_classes=classes)
    criterion = nn.CrossEntropyLoss()
    run = thresher.attach(
        method, loader=loader, criterion=criterion, model=model, optimizer=optimizer, epochs=epochs
    )
    for _ in range(run.epoch, epochs):
        for x, y in run.loader:
            ids = run.ids_of(y)
            x, y = mixup(x, y)
            loss = run.criterion(run.model(x), y, ids=ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return run
