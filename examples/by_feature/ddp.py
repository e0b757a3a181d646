"""The training of base.py in several processes, with DistributedDataParallel.

torchrun --standalone --nproc_per_node=2 examples/by_feature/ddp.py [FOLDER]

With a folder it saves after each epoch, and the same command goes on from there, also with another number of processes.
"""

import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

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


class Weights:
    def __init__(self, *parts):
        self.parts = parts

    def state_dict(self):
        return dict(zip(("model", "optimizer"), get_state_dict(*self.parts), strict=True))

    def load_state_dict(self, state):
        set_state_dict(
            *self.parts, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )


def main():
    distributed.init_process_group("gloo")  # "nccl" where each process has a GPU
    torch.manual_seed(0)
    train, test = data()
    model = DistributedDataParallel(network())
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=64 // distributed.get_world_size(), sampler=sampler)
    run = thresher.attach(
        thresher.Kakurenbo(max_fraction=0.4),
        loader=loader, criterion=criterion, model=model, optimizer=optimizer, epochs=EPOCHS,
    )  # fmt: skip
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    parts = {"run": run, "weights": Weights(model, optimizer), "scheduler": scheduler}
    saved = [path.parent for folder in sys.argv[1:] for path in Path(folder).glob("*/.metadata")]
    if saved:
        checkpoint.load(parts, checkpoint_id=max(saved))  # pyright: ignore
    for epoch in range(run.epoch, EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in run.loader:  # was: loader
            loss = run.criterion(run.model(x), y)  # was: criterion(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        if sys.argv[1:]:
            checkpoint.save(parts, checkpoint_id=Path(sys.argv[1], f"{run.epoch:03}"))  # pyright: ignore
    if distributed.get_rank() == 0:
        print(f"test accuracy {accuracy(model.module, test):.3f}")
        print(run.cost)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
