"""Stop in the middle of an epoch and resume there, with the same result. Only the checkpoint differs from base.py.

The run is saved like the model and the optimizer. The resumed epoch continues after the last batch that was trained on.
"""

import io

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


def main():
    torch.manual_seed(0)
    train, test = data()
    model = network()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    loader = DataLoader(train, batch_size=64, shuffle=True)
    run = thresher.attach(
        thresher.Kakurenbo(max_fraction=0.4),
        loader=loader, criterion=criterion, model=model, optimizer=optimizer, epochs=EPOCHS,
    )  # fmt: skip
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "run": run}
    checkpoint = io.BytesIO()
    while run.epoch < EPOCHS:
        for x, y in run.loader:  # was: loader
            loss = run.criterion(run.model(x), y)  # was: criterion(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if run.progress > 0.3 and not checkpoint.tell():
                torch.save({name: part.state_dict() for name, part in parts.items()}, checkpoint)
                break  # the machine goes down ...
        else:
            scheduler.step()
            continue
        checkpoint.seek(0)  # ... and another one takes over
        saved = torch.load(checkpoint, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        print(f"resumes in epoch {run.epoch}, after {100 * run.progress:.1f} % of the training")
    print(f"test accuracy {accuracy(model, test):.3f}")
    print(run.cost)


if __name__ == "__main__":
    main()
