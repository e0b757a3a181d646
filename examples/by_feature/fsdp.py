"""The training of base.py in several processes that share the parameters of the model, with fully_shard.

torchrun --standalone --nproc_per_node=2 examples/by_feature/fsdp.py

A model that is sharded has no part that one process could call alone, so the method is one that needs no passes of its own.
"""

import torch
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
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


def main():
    distributed.init_process_group("gloo")  # "nccl" where each process has a GPU
    torch.manual_seed(0)
    train, test = data()
    model = network()
    fully_shard(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=64 // distributed.get_world_size(), sampler=sampler)
    run = thresher.attach(
        thresher.Winnow(share=0.5),
        loader=loader, criterion=criterion, model=model, optimizer=optimizer, epochs=EPOCHS,
    )  # fmt: skip
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in run.loader:  # was: loader
            loss = run.criterion(run.model(x), y)  # was: criterion(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    found = accuracy(model, test)  # all processes call the model
    if distributed.get_rank() == 0:
        print(f"test accuracy {found:.3f}")
        print(run.cost)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
