"""IterableDataset.

Library: datasets
State: works with methods that choose in each batch, and with a share
Refused: an epoch method: "an IterableDataset, whose samples have no index"

The samples of a stream have no ids, so nothing is recorded, and methods that plan epochs raise an error. Save only
`run.state_dict()`, not the state of the stream: with a stream that has loaded a state, a run cannot resume within an epoch. A
resumed run reads the stream from the beginning of its epoch (set by `set_epoch`), and warns if the first labels differ.
"""

from torch import nn
from torch.utils.data import DataLoader

import thresher


def train(method, dataset, model, optimizer, epochs, workers=0):
    stream = (
        dataset.to_iterable_dataset(num_shards=2)
        .shuffle(seed=0, buffer_size=8)
        .with_format("torch")
    )
    loader = DataLoader(stream, 4, num_workers=workers)
    criterion, forward = nn.CrossEntropyLoss(), lambda model, batch: (model(batch["x"]), batch["y"])
    run = thresher.attach(
        method,
        loader=loader,
        criterion=criterion,
        model=model,
        optimizer=optimizer,
        epochs=epochs,
        forward=forward,
    )
    for epoch in range(run.epoch, epochs):
        stream.set_epoch(epoch)
        for batch in run.loader:
            loss = run.criterion(run.model(batch["x"]), batch["y"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return run
