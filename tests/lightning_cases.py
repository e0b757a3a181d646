"""Trainings with Lightning for tests: a module with dropout, its data, and a quiet Trainer."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from thresher_lab.tasks import vision

vision.prepare()
import lightning  # noqa: E402

N, BATCH, EPOCHS = 109, 8, 4
"""109 samples in batches of 8: 14 batches per epoch, the last one with 5 samples."""


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(N, 6, generator=generator)
    noise = torch.randn(N, generator=generator)
    return TensorDataset(x, (x[:, 0] + x[:, 1] ** 2 + 0.3 * noise > 0.5).long())


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2)
        )


def train_loader(workers: int = 0, **settings: Any) -> DataLoader[Any]:
    settings = {"batch_size": BATCH, "shuffle": True, "num_workers": workers} | settings
    return DataLoader(dataset(), **settings)


class Classifier(lightning.LightningModule):
    """A module that knows nothing of selection; it draws random numbers in its hooks where `draws` says so."""

    def __init__(self, schedule="step", draws=False, accumulate=1):
        super().__init__()
        self.net, self.criterion = network(), nn.CrossEntropyLoss(label_smoothing=0.1)
        self.schedule, self.draws, self.accumulate = schedule, draws, accumulate
        self.rates, self.estimates, self.validated, self.batches = [], [], [], 0

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.criterion(self(x), y)
        self.log("loss", loss)
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        self.estimates.append(self.trainer.estimated_stepping_batches)
        self.batches += 1
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("validation", self.criterion(self(batch[0]), batch[1]))

    def on_validation_end(self):
        if not self.trainer.sanity_checking:
            self.validated.append((self.trainer.current_epoch, self.batches))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)
        if self.schedule is None:
            return optimizer
        steps = self.trainer.estimated_stepping_batches
        made = {
            "step": lambda: torch.optim.lr_scheduler.OneCycleLR(
                optimizer, max_lr=0.2, total_steps=steps
            ),
            "late": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * 14),
            "plateau": lambda: torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, factor=0.5, patience=0
            ),
            "epoch": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS),
        }[self.schedule]()
        interval = "epoch" if self.schedule in ("epoch", "plateau") else "step"
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": made, "interval": interval, "monitor": "validation"},
        }

    def _draw(self):
        if self.draws:
            torch.rand(1)

    def on_fit_start(self):
        self._draw()

    def on_train_start(self):
        self._draw()

    def on_train_epoch_start(self):
        self._draw()

    def on_train_epoch_end(self):
        self._draw()


def trainer(*callbacks: Any, **settings: Any) -> lightning.Trainer:
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    quiet |= {
        "enable_checkpointing": any(
            isinstance(one, lightning.pytorch.callbacks.Checkpoint) for one in callbacks
        )
    }
    return lightning.Trainer(callbacks=list(callbacks), **quiet | {"max_epochs": EPOCHS} | settings)


def fit(
    module, *callbacks, workers=0, loader=None, validate=False, ckpt_path=None, seed=0, **settings
):
    """Trains a module, from the same random states each time, and returns its trainer."""
    torch.manual_seed(seed)
    validation = (
        DataLoader(dataset(), batch_size=50, generator=torch.Generator()) if validate else None
    )
    made = trainer(*callbacks, **settings)
    made.fit(
        module, train_loader(workers) if loader is None else loader, validation, ckpt_path=ckpt_path
    )
    return made


def last_rate_of_full_training(total):
    optimizer = torch.optim.SGD(network().parameters(), 0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=total)
    for _ in range(total):
        optimizer.step()
        scheduler.step()
    return scheduler.get_last_lr()[0]


class Saves(lightning.pytorch.callbacks.Checkpoint):
    """Saves a checkpoint after every step, every validation and every epoch."""

    def __init__(self, folder):
        self.folder, self.paths = folder, []

    def _save(self, trainer, what):
        if not trainer.sanity_checking:
            path = self.folder / f"{len(self.paths)}-{what}-{trainer.current_epoch}.ckpt"
            self.paths.append(path)
            trainer.save_checkpoint(path)

    def on_train_batch_end(self, trainer, *_):
        self._save(trainer, "last" if trainer.is_last_batch else "step")

    def on_validation_end(self, trainer, *_):
        self._save(trainer, "validation")

    def on_train_epoch_end(self, trainer, *_):
        self._save(trainer, "epoch")

    def of_epoch(self, epoch, *kinds):
        """A checkpoint of each kind of one epoch; of its steps the one after the second."""
        return [
            [path for path in self.paths if f"-{what}-{epoch}." in path.name][what == "step"]
            for what in kinds
        ]


def outcome(module, trained) -> dict[str, Any]:
    """Everything that a training leaves behind."""
    return {
        "parameters": module.state_dict(),
        "optimizer": trained.optimizers[0].state_dict(),
        "random": torch.get_rng_state(),
        "rates": module.rates,
        "metrics": dict(trained.callback_metrics),
    }
