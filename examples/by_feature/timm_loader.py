"""Train a model of timm with its prefetching loader, which puts images on the device and scales them there.

docs/loaders.md shows what else of timm is used with Thresher.
"""

import timm
import torch
from PIL import Image
from sklearn.datasets import load_digits
from timm.data import create_loader
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import thresher

EPOCHS = 10


def data():
    pixels, labels = load_digits(return_X_y=True)
    x = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    return TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])


class Images(Dataset):
    transform = None  # create_loader sets it

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        x, y = self.data[i]
        return self.transform(Image.fromarray((x[0] * 255).byte().numpy())), int(y)


def network():
    return timm.create_model("test_resnet", in_chans=1, num_classes=10)


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
    scale = {"mean": (0.0,), "std": (1.0,), "device": torch.device("cpu")}
    prefetcher = create_loader(
        Images(train), (1, 8, 8), 64, is_training=True, no_aug=True, num_workers=0, **scale
    )
    run = thresher.attach(
        thresher.Kakurenbo(max_fraction=0.4),
        loader=prefetcher.loader, criterion=criterion, model=model, optimizer=optimizer, epochs=EPOCHS,
        forward=lambda model, batch: (model(batch[0] / 255), batch[1]),
    )  # fmt: skip
    prefetcher.loader = run.loader
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    for _ in range(EPOCHS):
        for x, y in prefetcher:
            loss = run.criterion(run.model(x), y)  # was: criterion(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    print(f"test accuracy {accuracy(model, test):.3f}")
    print(run.cost)


if __name__ == "__main__":
    main()
