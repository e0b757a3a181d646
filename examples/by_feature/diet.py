"""Diet Selective-Backprop: prune the dataset by EL2N scores, then train on the hardest samples of each batch.

It differs from base.py by the scores, which come from two networks trained for one epoch, and by a list of two methods.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from thresher.scores import el2n

EPOCHS = 10
BEFORE, IN_TOTAL = (
    0.25,
    0.5,
)  # shares of the samples: pruned before training, and left out altogether


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


def scores(loader):
    models = [network(), network()]
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    passes = len(models) * len(loader.dataset)
    return el2n(models, loader, trained=(passes, passes))  # run.cost counts these passes


def main():
    torch.manual_seed(0)
    train, test = data()
    model = network()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    loader = DataLoader(train, batch_size=64, shuffle=True)
    run = thresher.attach(
        [
            thresher.Prune(scores(loader), keep=1 - BEFORE, per_class_floor=0.6),  # else a whole class may be easy enough to go
            thresher.SelectiveBackprop(keep=thresher.keep_in_batch(BEFORE, IN_TOTAL)),
        ],
        loader=loader, criterion=criterion, model=model, optimizer=optimizer, epochs=EPOCHS,
    )  # fmt: skip
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    for _ in range(EPOCHS):
        for x, y in run.loader:  # was: loader
            loss = run.criterion(run.model(x), y)  # was: criterion(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    print(f"test accuracy {accuracy(model, test):.3f}")
    print(run.cost)


if __name__ == "__main__":
    main()
