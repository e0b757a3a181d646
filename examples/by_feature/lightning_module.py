"""Train with Lightning: a callback has the samples chosen. The LightningModule is as for full training.

The extra `lightning` installs what is needed: `pip install 'thresher[lightning]'`.
"""

import lightning
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


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.criterion = network(), nn.CrossEntropyLoss()

    def training_step(self, batch, _):
        return self.criterion(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)]


def main():
    torch.manual_seed(0)
    train, test = data()
    model = Digits()
    loader = DataLoader(train, batch_size=64, shuffle=True)
    selection = thresher.lightning.Selection(
        thresher.Kakurenbo(max_fraction=0.4)
    )  # criterion="criterion", model="net"
    trainer = lightning.Trainer(
        max_epochs=EPOCHS, callbacks=[selection], logger=False, enable_checkpointing=False
    )
    trainer.fit(model, loader)
    print(f"test accuracy {accuracy(model.net, test):.3f}")
    print(selection.run.cost)


if __name__ == "__main__":
    main()
