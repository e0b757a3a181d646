"""litdata's StreamingDataset.

Library: litdata
State: works behind a map-style dataset of five lines

A stream has no ids, so that no epoch can be planned. A dataset that reads samples by number has them: all methods work, in one
process or several, and a run resumes in the middle of an epoch. What is lost: the order of the stream's shards and their
prefetching. A random order reads each shard many times, so keep the data on a local disk. Without the wrapper, methods that
choose in each batch work, as `attach(0.5)`.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import thresher


class MapStyle(Dataset):
    def __init__(self, stream):
        self.stream = stream

    def __len__(self):
        return len(self.stream)

    def __getitem__(self, index):
        sample = self.stream[index]
        return torch.tensor(sample["x"]), sample["y"]


def train(method, stream, model, optimizer, epochs, workers=0):
    loader, criterion = DataLoader(MapStyle(stream), 4, shuffle=True, num_workers=workers), nn.CrossEntropyLoss()
    run = thresher.attach(method, loader=loader, criterion=criterion, model=model, optimizer=optimizer, epochs=epochs)
    for _ in range(run.epoch, epochs):
        for x, y in run.loader:
            loss = run.criterion(run.model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return run
