"""IterableDataset.

Library: datasets
State: works with methods that choose in each batch, and with a share
Refused: an epoch method: "an IterableDataset, whose samples have no index"

The samples of a stream have no ids: nothing is recorded, and epoch methods are refused. Save `run.state_dict()` alone. A
resumed run reads the stream from the beginning of its epoch, which `set_epoch` names, and warns if it begins with other
labels. It refuses to go on in mid-epoch with a stream that has loaded a state.
"""

from torch import nn
from torch.utils.data import DataLoader

import thresher


def train(method, dataset, model, optimizer, epochs, workers=0):
    stream = dataset.to_iterable_dataset(num_shards=2).shuffle(seed=0, buffer_size=8).with_format("torch")
    loader = DataLoader(stream, 4, num_workers=workers)
    criterion, forward = nn.CrossEntropyLoss(), lambda model, batch: (model(batch["x"]), batch["y"])
    run = thresher.attach(
        method, loader=loader, criterion=criterion, model=model, optimizer=optimizer, epochs=epochs, forward=forward
    )
    for epoch in range(run.epoch, epochs):
        stream.set_epoch(epoch)
        for batch in run.loader:
            loss = run.criterion(run.model(batch["x"]), batch["y"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return run
