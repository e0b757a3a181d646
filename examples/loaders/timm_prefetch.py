"""PrefetchLoader.

Library: timm
State: works with `prefetcher.loader = run.loader`
Refused: the prefetcher itself: "which wraps one. Pass its `loader`"

The prefetcher is no DataLoader: the one inside is given to `attach`, and the prefetcher then iterates what the run chooses. It
scales the images, which passes of the run itself must do as well: `forward=` says how, and methods without such passes do not
need it. It asks for one batch ahead. A run that goes on from a state that was saved in mid-epoch leaves this batch out, and a
warning says so: save between epochs.
"""

import torch
from timm.data import create_loader
from torch import nn

import thresher


def train(method, dataset, model, optimizer, epochs, workers=0):
    prefetcher = create_loader(dataset, (3, 8, 8), 4, is_training=True, num_workers=workers, device=torch.device("cpu"))

    def forward(model, batch):
        return model((batch[0].float() - prefetcher.mean) / prefetcher.std), batch[1]

    loader, criterion = prefetcher.loader, nn.CrossEntropyLoss()
    run = thresher.attach(
        method, loader=loader, criterion=criterion, model=model, optimizer=optimizer, epochs=epochs, forward=forward
    )
    prefetcher.loader = run.loader
    for _ in range(run.epoch, epochs):
        for x, y in prefetcher:
            loss = run.criterion(run.model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return run
