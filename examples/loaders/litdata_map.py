"""litdata's StreamingDataset.

Library: litdata
State: works behind a small map-style dataset

As for MosaicML's, below. The length must be that of all chunks; `len(stream)` is only the share of this process.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import thresher


class MapStyle(Dataset):
    def __init__(self, stream):
        self.stream = stream

    def __len__(self):
        return sum(end - begin for begin, end in self.stream.region_of_interest)

    def __getitem__(self, index):
        sample = self.stream[index]
        return torch.tensor(sample["x"]), sample["y"]


def train(method, stream, model, optimizer, epochs, workers=0):
    loader, criterion = (
        DataLoader(MapStyle(stream), 4, shuffle=True, num_workers=workers),
        nn.CrossEntropyLoss(),
    )
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
