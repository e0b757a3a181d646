"""A small training that a method is attached to: run through, or interrupted, saved and resumed."""

import io
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from thresher.methods.full import FullData
from thresher.run.attach import attach
from thresher.testing.subjects import DRAWS, ContractError, Subject, content, plain


class Training:
    """A linear model on a small problem, attached."""

    EPOCHS, BATCH = 4, 8

    def __init__(self, subject: Subject, **settings: Any) -> None:
        n = subject.samples
        draws = torch.Generator().manual_seed(5)
        self.x = torch.randn(n, 6, generator=draws)
        self.y = (self.x @ torch.randn(6, 3, generator=draws)).argmax(1)
        torch.manual_seed(0)
        self.net = nn.Linear(6, 3)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.3, momentum=0.5)
        own = sorted(set(subject.draws) - set(DRAWS))
        method = [subject.method, FullData()] if subject.method.stage == "before" else subject.method
        self.run = attach(
            method,
            loader=DataLoader(TensorDataset(self.x, self.y), self.BATCH, shuffle=True),
            criterion=nn.CrossEntropyLoss(),
            model=self.net,
            optimizer=self.optimizer,
            epochs=self.EPOCHS,
            signals=(lambda outputs, _: {name: outputs.square().mean(1) for name in own}) if own else None,
            **settings,
        )
        self.log: list[Any] = []
        self.planned: dict[int, list[int]] = {}

    def loss(self) -> float:
        """Over all samples."""
        with torch.no_grad():
            return nn.functional.cross_entropy(self.net(self.x), self.y).item()

    def train(self, stop: tuple[int, int] | None = None) -> None:
        """To the end, or until some batches of an epoch are done."""
        while self.run.epoch < self.EPOCHS:
            epoch = self.run.epoch
            for done, (x, y) in enumerate(self.run.loader, 1):
                self.optimizer.zero_grad()
                loss = self.run.criterion(self.run.model(x), y)
                loss.backward()
                self.optimizer.step()
                self.log.append([epoch, self.run.ids.tolist(), loss.item(), self.run.plan.lr_scale])
                self.planned.setdefault(epoch, self.run.plan.ids.tolist())
                if stop == (epoch, done):
                    return

    def save(self, subject: Subject) -> Any:
        """A checkpoint that was written and read again."""
        parts = {"net": self.net, "optimizer": self.optimizer, "run": self.run}
        return saved(subject, {name: part.state_dict() for name, part in parts.items()})

    def load(self, state: Any) -> None:
        """Go on from a checkpoint."""
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.run.load_state_dict(state["run"])

    def result(self) -> Any:
        """Everything that a resumed training must have in common with one that was not interrupted."""
        run = self.run
        return plain([self.net.state_dict(), self.optimizer.state_dict(), dict(run.records), content(run.plan), run.history])


def saved(subject: Subject, state: Any) -> Any:
    """A state as torch.save and torch.load(weights_only=True) give it back.

    Raises:
        ContractError: They do not.
    """
    buffer = io.BytesIO()
    try:
        torch.save(state, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=True)
    except Exception as error:
        raise ContractError(
            f"{subject.name}: its state does not load with weights_only=True ({type(error).__name__}); keep tensors and plain "
            "values in it"
        ) from error
