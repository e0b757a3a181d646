"""A small training that a method is attached to, which can be interrupted, saved and resumed."""

import io
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from thresher.methods.full import FullData
from thresher.plans import EpochPlan
from thresher.run.attach import attach
from thresher.testing.questions import SIGNAL_GENERATORS, comparable, comparable_plan
from thresher.testing.subjects import ContractError, Subject


class AttachedTraining:
    """A linear model on a small problem, with a method attached.

    Args:
        subject: The method.
        **settings: Other arguments of `thresher.attach`.

    Example:
        >>> from thresher import UniformSubset
        >>> from thresher.testing.subjects import subject_of
        >>> training = AttachedTraining(subject_of(UniformSubset(keep=0.5), None, epochs=4, samples=16))
        >>> training.train(stop=(1, 1))
        >>> [len(ids) for _, ids, *_ in training.log]
        [8, 8]
        >>> training.run.detach()
    """

    EPOCHS, BATCH = 4, 8

    def __init__(self, subject: Subject, **settings: Any) -> None:
        n = subject.samples
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(n, 6, generator=generator)
        self.y = (self.x @ torch.randn(6, 3, generator=generator)).argmax(1)
        torch.manual_seed(0)
        self.net = nn.Linear(6, 3)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.3, momentum=0.5)
        own = sorted(set(subject.generators) - set(SIGNAL_GENERATORS))
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
        self.planned: dict[int, EpochPlan] = {}

    def loss(self, net: nn.Module | None = None) -> float:
        """Returns the mean loss over the samples that were trained on.

        Args:
            net: Network that is asked. Default: the one that was trained.
        """
        ids = sorted({i for _, of_batch, *_ in self.log for i in of_batch})
        with torch.no_grad():
            return nn.functional.cross_entropy((net or self.net)(self.x[ids]), self.y[ids]).item()

    def train(self, stop: tuple[int, int] | None = None) -> None:
        """Trains to the end, or until some batches of an epoch are done.

        Args:
            stop: Number of an epoch, and the number of its batches after which training stops. Default: None.
        """
        while self.run.epoch < self.EPOCHS:
            epoch = self.run.epoch
            for done, (x, y) in enumerate(self.run.loader, 1):
                self.optimizer.zero_grad()
                loss = self.run.criterion(self.run.model(x), y)
                loss.backward()
                self.optimizer.step()
                self.log.append([epoch, self.run.ids.tolist(), loss.item(), self.run.plan.lr_scale])
                self.planned.setdefault(epoch, self.run.plan)
                if stop == (epoch, done):
                    return

    def save(self, subject: Subject) -> Any:
        """Returns a checkpoint that was written and read again.

        Args:
            subject: The method, which an error names.
        """
        parts = {"net": self.net, "optimizer": self.optimizer, "run": self.run}
        return save_and_load(subject, {name: part.state_dict() for name, part in parts.items()})

    def load(self, state: Any) -> None:
        """Restores a checkpoint."""
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.run.load_state_dict(state["run"])

    def result(self) -> Any:
        """Returns everything that a resumed training must have in common with one that was not interrupted."""
        run = self.run
        states = [self.net.state_dict(), self.optimizer.state_dict()]
        return comparable([*states, dict(run.records), comparable_plan(run.plan), run.history])


def save_and_load(subject: Subject, state: Any) -> Any:
    """Returns a state after `torch.save` and `torch.load(weights_only=True)`.

    Args:
        subject: The method, which the error names.
        state: Tensors and plain values in nested dicts, lists and tuples.

    Raises:
        ContractError: The state cannot be saved or loaded.

    Example:
        >>> from thresher import UniformSubset
        >>> from thresher.testing.subjects import subject_of
        >>> save_and_load(subject_of(UniformSubset(keep=0.5), None, epochs=4, samples=16), {"seen": torch.arange(3)})
        {'seen': tensor([0, 1, 2])}
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
