"""The loops of scripts that compute losses by themselves: autoencoders, diffusion, contrastive learning."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from scripts.images import IMAGES, LABELS, ConvNet
from scripts.kit import B, Kit, N, normal, script

FLAT = torch.sigmoid(IMAGES[:, 0].flatten(1))
NOISE, VIEWS = normal(N, 3, 8, 8, seed=5), IMAGES + 0.2 * normal(N, 3, 8, 8, seed=6)


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.mu, self.logvar = nn.Linear(64, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.fc3, self.fc4 = nn.Linear(4, 16), nn.Linear(16, 64)

    def forward(self, x):
        h = F.relu(self.fc1(x))
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.exp(0.5 * logvar) * (
            torch.randn_like(mu) if self.training and self.noisy else 0
        )
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar

    noisy = True


def elbo(recon, x, mu, logvar):
    bce = F.binary_cross_entropy(recon, x, reduction="none").sum(1)
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), 1)


def _vae_losses(model):
    recon, mu, logvar = model(FLAT)
    return elbo(recon, FLAT, mu, logvar)


@script(
    "pytorch/examples: vae/main.py",
    _vae_losses,
    note="the losses by sample, and `run.reduce(losses, outputs=...)` instead of their sum",
    refused={"kakurenbo": "criterion"},
)
def vae(kit: Kit) -> None:
    model = VAE()
    model.noisy = kit.rate > 0
    optimizer = torch.optim.Adam(model.parameters(), kit.rate)
    loader = DataLoader(TensorDataset(FLAT, LABELS), B, shuffle=True)
    run = kit.attach(loader=loader, criterion=None, model=model, optimizer=optimizer)
    for _ in range(kit.epochs):
        for _, (data, _) in enumerate(run.loader):
            optimizer.zero_grad()
            recon, mu, logvar = run.model(data)
            loss = run.reduce(elbo(recon, data, mu, logvar), outputs=recon)
            loss.backward()
            optimizer.step()


@script(
    "diffusers: train_unconditional.py",
    lambda model: F.mse_loss(model(IMAGES + NOISE), NOISE, reduction="none").mean((1, 2, 3)),
    note="`reduction='none'` and `run.reduce(losses, outputs=...)`",
    refused={"kakurenbo": "criterion"},
)
def diffusion(kit: Kit) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 3, 3, padding=1))
    optimizer = torch.optim.AdamW(model.parameters(), kit.rate, weight_decay=0)
    loader = DataLoader(TensorDataset(IMAGES, NOISE), B, shuffle=True)
    run = kit.attach(loader=loader, criterion=None, model=model, optimizer=optimizer)
    for _ in range(kit.epochs):
        for clean, noise in run.loader:
            noisy = clean + noise
            pred = run.model(noisy)
            losses = F.mse_loss(pred, noise, reduction="none").mean((1, 2, 3))
            loss = run.reduce(losses, outputs=pred, targets=noise)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@script(
    "sthalles/SimCLR: two views, a loss of each against all",
    None,
    note="the losses by sample, and `run.reduce(losses, targets=...)`",
    refused={"kakurenbo": "criterion"},
)
def simclr(kit: Kit) -> None:
    model = ConvNet(outputs=8)
    optimizer = kit.sgd(model)
    loader = DataLoader(TensorDataset(IMAGES, VIEWS, LABELS), B, shuffle=True, drop_last=True)
    run = kit.attach(loader=loader, criterion=None, model=model, optimizer=optimizer)
    for _ in range(kit.epochs):
        for first, second, labels in run.loader:
            features = F.normalize(run.model(torch.cat([first, second])), dim=1)
            n = len(labels)
            similarity = (features @ features.T / 0.5).masked_fill(
                torch.eye(2 * n, dtype=torch.bool), float("-inf")
            )
            of_views = F.cross_entropy(similarity, torch.arange(2 * n).roll(n), reduction="none")
            loss = run.reduce((of_views[:n] + of_views[n:]) / 2, targets=labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
