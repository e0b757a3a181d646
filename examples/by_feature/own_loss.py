"""Use a loss that the loop computes itself. Only `run.reduce` in place of `run.criterion` differs from base.py.

`run.reduce` takes one loss per sample, records them and returns their weighted mean. The outputs and targets show which
samples the losses belong to, and whether each prediction was right and how confident it was. `attach` is given the same
function as `criterion`, so that the losses of hidden samples, which the run refreshes itself, are of the same kind.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher

EPOCHS = 10


def data():
    pixels, labels = load_digits(return_X_y=True)
    x = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    return TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])


def network():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def accuracy(model, dataset):
    x, y = dataset.tensors
    model.eval()
    with torch.no_grad():
        right = (model(x).argmax(1) == y).float().mean().item()
    model.train()
    return right


def losses_of(outputs, targets):
    penalty = 1e-3 * outputs.square().mean(1)
    return nn.functional.cross_entropy(outputs, targets, reduction="none") + penalty


def main():
    torch.manual_seed(0)
    train, test = data()
    model = network()
    criterion = losses_of
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    loader = DataLoader(train, batch_size=64, shuffle=True)
    run = thresher.attach(
        thresher.Kakurenbo(max_fraction=0.4),
        loader=loader, criterion=criterion, model=model, optimizer=optimizer, epochs=EPOCHS,
    )  # fmt: skip
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    for _ in range(EPOCHS):
        for x, y in run.loader:  # was: loader
            outputs = run.model(x)
            loss = run.reduce(losses_of(outputs, y), outputs=outputs, targets=y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    print(f"test accuracy {accuracy(model, test):.3f}")
    print(run.cost)


if __name__ == "__main__":
    main()
