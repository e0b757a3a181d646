"""FastCollateMixup.

Library: timm
State: works with `ids=run.ids_of(y)`
Refused: the lines without `ids=`: "The rows of a batch are not its samples in order"

Mixing in the collate function. The loss of a row is recorded for the sample given by `ids=`. Methods for which Thresher adds forward
passes, such as KAKURENBO and `forward_passes="twice"`, are not supported, nor is `mode="half"`.
"""

import torch
from timm.data import FastCollateMixup, create_loader
from torch import nn

import thresher


def train(method, dataset, classes, model, optimizer, epochs, workers=0):
    collate = FastCollateMixup(mixup_alpha=0.8, num_classes=classes)
    prefetcher = create_loader(
        dataset,
        (3, 8, 8),
        4,
        is_training=True,
        num_workers=workers,
        collate_fn=collate,
        device=torch.device("cpu"),
    )
    loader, criterion = prefetcher.loader, nn.CrossEntropyLoss()
    run = thresher.attach(
        method, loader=loader, criterion=criterion, model=model, optimizer=optimizer, epochs=epochs
    )
    prefetcher.loader = run.loader
    for _ in range(run.epoch, epochs):
        for x, y in prefetcher:
            loss = run.criterion(run.model(x), y, ids=run.ids_of(y))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return run
