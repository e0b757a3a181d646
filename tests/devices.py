"""The device that tests of the main paths run on, and a small training for them, with torch and the library alone."""

import copy
import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import thresher

DEVICE = torch.device(os.environ.get("THRESHER_DEVICE", "cpu"))
if DEVICE.type == "cuda" and DEVICE.index is None:
    DEVICE = torch.device("cuda", 0)  # as tensors name it

needs_cuda = pytest.mark.skipif(
    DEVICE.type != "cuda", reason="needs a GPU; run with THRESHER_DEVICE=cuda"
)

N, BATCH, FEATURES, CLASSES = 96, 16, 6, 4
X = torch.randn(N, FEATURES, generator=torch.Generator().manual_seed(0))
Y = ((X[:, :2] > 0).long() * torch.tensor([1, 2])).sum(1)


def network(device: torch.device, *, dropout: float = 0.2, norm: bool = True) -> nn.Sequential:
    """Returns a small classifier with random numbers and buffers; the same weights on every device."""
    torch.manual_seed(1)
    layers = [
        nn.Linear(FEATURES, 16),
        nn.BatchNorm1d(16) if norm else nn.Identity(),
        nn.ReLU(),
        nn.Dropout(dropout),
    ]
    return nn.Sequential(*layers, nn.Linear(16, CLASSES)).to(device)


def loader_on(device: torch.device, kind: str = "tensors") -> DataLoader[Any]:
    """Returns a loader of `X` and `Y`: "tensors" on the device whole, "host" as a DataLoader whose batches the run moves."""
    if kind == "tensors":
        return thresher.TensorLoader(X.to(device), Y.to(device), batch_size=BATCH)
    return DataLoader(TensorDataset(X, Y), BATCH, shuffle=True)


class SmallTraining:
    """A training that can stop within an epoch, be saved and be loaded.

    Args:
        method: Method to attach; None trains without Thresher.
        device: Device of the network.
        kind: Kind of loader, see `loader_on`.
        epochs: Number of epochs.
        lr: Learning rate.
        model: Network to train. Default: `network(device)`.
        **settings: Further arguments of `attach`.
    """

    def __init__(self, method, device, *, kind="tensors", epochs=3, lr=0.1, model=None, **settings):
        self.device, self.epochs, self.losses, self.ids = device, epochs, [], []
        self.net = network(device) if model is None else model
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr, momentum=0.9)
        self.loader, self.run = loader_on(device, kind), None
        if method is not None:
            given = {
                "loader": self.loader,
                "criterion": nn.CrossEntropyLoss(),
                "model": self.net,
                "optimizer": self.optimizer,
            }
            self.run = thresher.attach(method, epochs=epochs, **given, **settings)
        torch.manual_seed(2)

    def train(self, *, stop=None):
        """Trains to the end, or stops after so many steps."""
        if self.run is None:
            loader, call, criterion = self.loader, self.net, nn.CrossEntropyLoss()
        else:
            loader, call, criterion = self.run.loader, self.run.model, self.run.criterion
        for _ in range(self.epochs if self.run is None else self.epochs - self.run.epoch):
            for x, y in loader:
                loss = criterion(call(x.to(self.device)), y.to(self.device))
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.losses.append(loss.detach())
                if self.run is not None:
                    self.ids.append(self.run.ids.tolist())
                if stop is not None and len(self.losses) == stop:
                    return self
        return self

    def save(self):
        return copy.deepcopy(
            [self.net.state_dict(), self.optimizer.state_dict(), self.run.state_dict()]
        )

    def load(self, saved):
        for part, state in zip((self.net, self.optimizer, self.run), saved, strict=True):
            part.load_state_dict(state)

    def result(self):
        """Weights, momentum, losses, and the random states of host and device."""
        states = [torch.get_rng_state()] + (
            [torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else []
        )
        momentum = [state["momentum_buffer"] for state in self.optimizer.state.values()]
        return [self.net.state_dict(), momentum, self.losses, states]


class SmallAttention(nn.Module):
    """One block of a transformer, as models of text and images have it, and a classifier."""

    def __init__(self, width: int = 32, heads: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps shape (B, length, width) to (B, CLASSES)."""
        n, length, width = x.shape
        q, k, v = (
            self.qkv(self.norm(x))
            .view(n, length, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0.0
        )
        return self.out((x + mixed.transpose(1, 2).reshape(n, length, width)).mean(1))


def small_conv_net() -> nn.Module:
    """Returns a convolutional classifier of images of shape (B, 3, 8, 8)."""
    first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU())
    return nn.Sequential(
        first,
        nn.Conv2d(8, 16, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    )


def assert_subset_gradients(
    model, x, *, rows=(1, 4, 5, 9), dtype=None, share=1e-5, may_fall_back=False, **options
):
    """Compares the gradients of some rows with those of the plain model; the model must not have fallen back to it.

    Args:
        model: Network on the device.
        x: Batch of inputs.
        rows: Rows that are kept.
        dtype: Type of autocast. Default: none.
        share: Largest difference of gradients over the largest entry of all.
        may_fall_back: Whether the plain model may stand in. Default: False.
        **options: Further arguments of `subset_backward`.
    """
    # `thresher.subset` imports torch's compiler, which few of these tests need.
    from thresher.subset import kept_rows, subset_backward

    chosen, fast = torch.tensor(rows, device=x.device), subset_backward(model, **options)
    found = []
    for call, kept in (
        (model, lambda out: out[chosen]),
        (fast, lambda out: kept_rows(out, chosen)),
    ):
        for parameter in model.parameters():
            parameter.grad = None
        torch.manual_seed(5)
        with torch.autocast(x.device.type, dtype=dtype, enabled=dtype is not None):
            out = call(x)
        kept(out).float().square().sum().backward()
        found.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    assert may_fall_back or fast.fallback is None, fast.fallback
    largest = max(float(gradient.abs().max()) for gradient in found[0].values())
    for name, wanted in found[0].items():
        torch.testing.assert_close(
            found[1][name],
            wanted,
            rtol=0,
            atol=share * largest,
            msg=lambda text, name=name: f"{name}: {text}",
        )
    return fast
