"""Fine-tuning: a pretrained network gets a new head and is trained on other samples, without selection."""

import copy
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset


@dataclass(frozen=True)
class FineTuning:
    """Settings of fine-tuning on all samples in every epoch, with AdamW.

    Args:
        epochs: Number of epochs.
        lr: Largest learning rate; it rises in the first fifth and falls as a cosine.
        batch_size: Number of samples per batch.
        weight_decay: Weight decay of AdamW.
    """

    epochs: int = 10
    lr: float = 1e-3
    batch_size: int = 32
    weight_decay: float = 0.05

    def tune(self, model: nn.Module, samples: TensorDataset, seed: int) -> nn.Module:
        """Trains a copy of the model with a new head; the model itself does not change.

        Args:
            model: Network with an `nn.Linear` as `head`, on any device.
            samples: Dataset of inputs and class labels, shape (N,), int64.
            seed: Random seed of the new head and of the order of the samples.

        Returns:
            The copy, with one output per class.

        Raises:
            TypeError: The model has no `head` that is an `nn.Linear`.
        """
        tuned = with_new_head(model, int(samples.tensors[1].max()) + 1, seed).train()
        device = next(tuned.parameters()).device
        loader = DataLoader(samples, self.batch_size, shuffle=True, generator=torch.Generator().manual_seed(seed))
        optimizer = AdamW(tuned.parameters(), self.lr, weight_decay=self.weight_decay)
        steps = self.epochs * len(loader)
        schedule = OneCycleLR(optimizer, self.lr, steps, pct_start=0.2, cycle_momentum=False)
        for _ in range(self.epochs):
            for x, y in loader:
                F.cross_entropy(tuned(x.to(device)), y.to(device)).backward()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        return tuned


def with_new_head(model: nn.Module, classes: int, seed: int) -> nn.Module:
    """Returns a copy of a model with a new, untrained linear layer as `head`; the global random state does not change.

    Raises:
        TypeError: The model has no `head` that is an `nn.Linear`.
    """
    head = getattr(model, "head", None)
    if not isinstance(head, nn.Linear):
        raise TypeError(
            f"fine-tuning replaces `head`, an nn.Linear, of the model; {type(model).__name__} has {type(head).__name__} there"
        )
    tuned = copy.deepcopy(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tuned.head = nn.Linear(head.in_features, classes).to(head.weight.device)
    return tuned
