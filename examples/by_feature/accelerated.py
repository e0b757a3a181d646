"""The training of base.py with accelerate, in one process or in several.

torchrun --standalone --nproc_per_node=2 examples/by_feature/accelerated.py

With GPUs, `accelerate launch` starts one process for each of them.
"""

import torch
from accelerate import Accelerator
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
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(train, batch_size=64 // accelerator.num_processes, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    run = thresher.attach(
        thresher.Kakurenbo(max_fraction=0.4),
        loader=loader, criterion=criterion, model=model, optimizer=optimizer, epochs=EPOCHS,
    )  # fmt: skip
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    for _ in range(EPOCHS):
        for x, y in run.loader:  # was: loader
            loss = run.criterion(run.model(x), y)  # was: criterion(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    if accelerator.is_main_process:
        print(f"test accuracy {accuracy(accelerator.unwrap_model(model), test):.3f}")
        print(run.cost)
    accelerator.end_training()


if __name__ == "__main__":
    main()
