"""Let AdaSelection mix a selector of your own with its selectors. Only the method differs from base.py.

Any batch method can be in the pool: one of the library, such as `thresher.DivBS(keep=0.4)`, or a class with these members.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher

EPOCHS = 10


@dataclass(frozen=True)
class NearBoundary:
    """Votes for the 40 % of a batch whose class is decided least: the smallest margins."""

    stage: ClassVar[Literal["batch"]] = "batch"
    requires: ClassVar = thresher.Requirements(signals=("margin",))

    def init_state(self):
        return {}

    def plan_batch(self, signals, state, *, step, generator):
        margin = signals["margin"]
        return thresher.BatchPlan(margin.argsort()[: self.count(len(margin))].sort().values), state

    def count(self, n):
        return max(1, int(0.4 * n))


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


def main():
    torch.manual_seed(0)
    train, test = data()
    model = network()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    loader = DataLoader(train, batch_size=64, shuffle=True)
    run = thresher.attach(
        thresher.AdaSelection(keep=0.4, pool=("big_loss", "uniform", NearBoundary())),
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
    print(
        {
            name: round(value, 2)
            for name, value in run.history[-1].items()
            if name.startswith("weight_")
        }
    )


if __name__ == "__main__":
    main()
