"""FastCollateMixup.

Library: timm
State: works with `ids=run.ids_of(y)`
Refused: the lines without `ids=`: "The rows of a batch are not its samples in order"

It mixes in the collate function, and a mixed row is of two samples. Its loss is recorded for the sample that you name: the one
whose row it was. Methods that make passes of the run itself, as KAKURENBO and `forward_passes="twice"`, are refused.
`mode="half"` has half as many rows as samples, and is refused.
"""

import torch
from timm.data import FastCollateMixup, create_loader
from torch import nn

import thresher


def train(method, dataset, classes, model, optimizer, epochs, workers=0):
    collate = FastCollateMixup(mixup_alpha=0.8, num_classes=classes)
    prefetcher = create_loader(
        dataset, (3, 8, 8), 4, is_training=True, num_workers=workers, collate_fn=collate, device=torch.device("cpu")
    )
    loader, criterion = prefetcher.loader, nn.CrossEntropyLoss()
    run = thresher.attach(method, loader=loader, criterion=criterion, model=model, optimizer=optimizer, epochs=epochs)
    prefetcher.loader = run.loader
    for _ in range(run.epoch, epochs):
        for x, y in prefetcher:
            loss = run.criterion(run.model(x), y, ids=run.ids_of(y))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return run
