"""MosaicML's StreamingDataset.

Library: streaming
State: works behind a small map-style dataset

The samples of a stream have no ids, so no epoch can be planned. A dataset that reads samples by number has ids: all methods
work, in one process or several, and a run can resume within an epoch. Its length must be `stream.size`; `len(stream)` is
only the share of this process. Make the stream with `StreamingDataset(..., batch_size=64)`; its own `shuffle` and
`epoch_size` no longer apply. You lose the order and prefetching of the stream's shards, and a random order reads each shard many
times, so keep the data on a local disk. Without the wrapper, methods that choose in each batch work, and `attach(0.5)` is
[`UniformRows(0.5)`](methods/uniform_rows.md): random rows of batches that are read whole. Pass `DataLoader(stream, 64)`,
because StreamingDataLoader is refused. To resume, load the stream's state with its place set to 0,
`stream.load_state_dict({**state, "sample_in_epoch": 0})`.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import thresher


class MapStyle(Dataset):
    def __init__(self, stream):
        self.stream = stream

    def __len__(self):
        return self.stream.size

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
