"""Dataset.

Library: datasets
State: works

With `with_format("torch")` or `set_format("torch")`, batches are dicts of tensors. Only passes that Thresher adds need `forward=`, which
calls the model on such a batch.
"""

from torch import nn
from torch.utils.data import DataLoader

import thresher


def train(method, dataset, model, optimizer, epochs, workers=0):
    loader = DataLoader(dataset.with_format("torch"), 4, shuffle=True, num_workers=workers)
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
    for _ in range(run.epoch, epochs):
        for batch in run.loader:
            loss = run.criterion(run.model(batch["x"]), batch["y"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return run
