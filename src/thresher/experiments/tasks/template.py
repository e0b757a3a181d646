"""Your own training, as `thresher compare` takes it.

    thresher compare {path}:build --methods kakurenbo,infobatch --epochs 10 --out runs/mine

`compare` calls build(seed) anew for every run and writes the loop itself: forward pass, criterion, backward pass, optimizer
step. Replace what stands below by yours. It runs as it is, on 1,797 small pictures of digits.
"""

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def build(seed: int) -> tuple[Any, ...]:
    """Everything that one run needs, new each time; the same seed must give the same weights and the same order."""
    torch.manual_seed(seed)

    # Data: any map-style dataset of pairs (input, target) in a DataLoader. Shuffle with a generator of its own: every method
    # sees the same order.
    pixels, labels = load_digits(return_X_y=True)
    x = torch.tensor(pixels, dtype=torch.float32) / 16
    y = torch.tensor(labels)
    train, test = TensorDataset(x[:1400], y[:1400]), (x[1400:], y[1400:])
    data = DataLoader(train, batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(seed))

    # Model, loss and optimizer, as you have them. The loss takes outputs and targets and is the mean over the
    # batch, as PyTorch's losses are.
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    # What the comparison is about: a number after each epoch, larger is better (for a loss, return it negative). Values from
    # 0 to 1 are shown in percent. Its time is not counted.
    def evaluate(model: nn.Module) -> float:
        device = next(model.parameters()).device
        model.eval()
        with torch.inference_mode():
            right = model(test[0].to(device)).argmax(1) == test[1].to(device)
        model.train()
        return right.float().mean().item()

    # Optional: a factor on the learning rate, of the share of training that is done (0 to 1). Do not step a scheduler of
    # your own: runs that train for fewer epochs must decay within them.
    def schedule(done: float) -> float:
        return 1 - done

    return model, data, criterion, optimizer, evaluate, schedule
