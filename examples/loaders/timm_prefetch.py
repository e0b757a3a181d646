"""PrefetchLoader.

Library: timm
State: works with `prefetcher.loader = run.loader`
Refused: the prefetcher itself: "which wraps one. Pass its `loader`"

Pass the wrapped DataLoader to `attach`, and let the prefetcher iterate `run.loader`. The prefetcher scales images, so passes that
Thresher adds must do so, too: use `forward=`. It fetches one batch ahead, which a run that resumes within an epoch leaves out, with a
warning: save between epochs.
"""

import torch
from timm.data import create_loader
from torch import nn

import thresher


def train(method, dataset, model, optimizer, epochs, workers=0):
    prefetcher = create_loader(
        dataset, (3, 8, 8), 4, is_training=True, num_workers=workers, device=torch.device("cpu")
    )

    def forward(model, batch):
        return model((batch[0].float() - prefetcher.mean) / prefetcher.std), batch[1]

    loader, criterion = prefetcher.loader, nn.CrossEntropyLoss()
    run = thresher.attach(
        method,
        loader=loader,
        criterion=criterion,
        model=model,
        optimizer=optimizer,
        epochs=epochs,
        forward=forward,
    )
    prefetcher.loader = run.loader
    for _ in range(run.epoch, epochs):
        for x, y in prefetcher:
            loss = run.criterion(run.model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return run
