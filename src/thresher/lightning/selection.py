"""`Selection`: the callback that has a LightningModule trained on a choice of samples."""

import inspect
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from thresher import rng
from thresher.lightning.checks import check_length, check_loader_of, check_module, check_schedulers, check_trainer
from thresher.lightning.epoch_batches import EpochBatches
from thresher.lightning.process_states import gathered, own_state
from thresher.lightning.stand_ins import CriterionInPlace, StandIns
from thresher.run.attach import attach
from thresher.run.pace import PacedLR
from thresher.run.run import Run
from thresher.subset.parallel import trains_inside

GIVEN_BY_TRAINER = {"method", "loader", "criterion", "model", "optimizer", "epochs", "device", "process_group"}
"""Arguments of `attach` that are no settings: `Selection` has its own, or Lightning knows them."""


class Selection(Callback):
    """Trains a LightningModule on the samples that a method chooses; the module and the Trainer stay as they are.

    While `fit` trains, the run stands in the place of the named attributes, and `self.thresher` is the run itself, for modules
    that call `self.thresher.criterion` or `self.thresher.reduce` in `training_step`. Schedulers with interval="step" are paced
    as by `Run.pace`, validation comes as often as in full training, and checkpoints have the state of the run. See
    docs/frameworks.md for what is supported.

    Args:
        method: Method, list of methods or share of the cost, as `thresher.attach` takes it.
        criterion: Name of the attribute of the module that is its criterion; or a criterion that is no attribute, as
            `thresher.attach` takes it, which the module calls as `self.thresher.criterion`; None where it calls
            `self.thresher.reduce` alone.
        model: Name of the attribute of the module that is its network, which `training_step` calls; None where the method
            needs no network.
        settings: Other arguments of `thresher.attach`: `forward`, `forward_passes`, `scoring`, `proxy`, `signals`,
            `seed`, `on_nonfinite`, `spend`, `divide` and `collate_keeps_rows`.

    Raises:
        TypeError: A setting is no argument of `thresher.attach`, or one that Lightning knows.
        ValueError: `fit` is called with something that is not supported; nothing was changed.

    Example:
        >>> import lightning, torch, thresher.lightning
        >>> class Classifier(lightning.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.net, self.criterion = torch.nn.Linear(1, 2), torch.nn.CrossEntropyLoss()
        ...     def training_step(self, batch, batch_idx):
        ...         return self.criterion(self.net(batch[0]), batch[1])
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
        >>> data = torch.utils.data.TensorDataset(torch.arange(8.0).unsqueeze(1), torch.arange(8) % 2)
        >>> selection = thresher.lightning.Selection(thresher.UniformSubset(keep=0.5))
        >>> quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
        >>> trainer = lightning.Trainer(max_epochs=3, accelerator="cpu", callbacks=[selection], logger=False, **quiet)
        >>> trainer.fit(Classifier(), torch.utils.data.DataLoader(data, batch_size=2))
        >>> selection.run.cost.backward, selection.run.cost.full_backward
        (12, 24)
    """

    def __init__(
        self,
        method: Any,
        criterion: Any = "criterion",
        model: str | None = "net",
        **settings: Any,
    ) -> None:
        known = set(inspect.signature(attach).parameters) - GIVEN_BY_TRAINER
        if unknown := sorted(set(settings) - known):
            raise TypeError(f"Selection: {', '.join(unknown)}: no such setting; there are {', '.join(sorted(known))}")
        self.method, self.criterion, self.model, self.settings = method, criterion, model, settings
        self._run: Run | None = None
        self._saved: dict[str, Any] | None = None
        self._saved_schedulers: list[Any] = []
        self._stand_ins = StandIns()
        self._own_loader: DataLoader[Any] | None = None
        self._batches: EpochBatches | None = None
        self._full = self._length = 0
        self._before: rng.RandomStates = {}
        self._generators: list[Any] = []

    @property
    def state_key(self) -> str:
        """Name of the state in a checkpoint."""
        return "thresher.lightning.Selection"

    @property
    def run(self) -> Run:
        """The run of the `fit` in progress or, after it, of the last one, with its cost, history and records.

        Of several processes each has a run of its own, whose cost and records are those of its part of the samples.

        Raises:
            ValueError: No training has begun in this process.
        """
        if self._run is None:
            raise ValueError(
                "thresher.lightning.Selection.run: no training has begun in this process; call trainer.fit first. With "
                "strategy='ddp_spawn', the run is in the processes that fit starts: read it in on_train_end of a callback."
            )
        return self._run

    # Lightning's hooks, in the order in which they are called

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks the trainer, and has the random states noted at the moment when Lightning begins to iterate the loader."""
        if stage != "fit":
            return
        check_trainer(trainer)
        self._run, self._batches, self._saved = None, None, None
        source = trainer.fit_loop._data_source
        made = source.dataloader

        def dataloader() -> Any:
            loader = made()
            self._generators = _generators_of(loader)
            self._before = rng.capture(trainer.strategy.root_device, self._generators)
            return loader

        self._stand_ins.put(source, "dataloader", dataloader)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keeps the states of the schedulers until these are paced."""
        if trainer.state.fn != "fit":
            return
        if self.state_key not in checkpoint["callbacks"]:
            raise ValueError(
                "thresher.lightning.Selection: the checkpoint of fit(ckpt_path=...) was saved without this callback, or before "
                "the training began, and has no state of the run: records and plans would begin anew in the middle of the "
                "training. Load the weights alone, by load_from_checkpoint of your module, and call fit without ckpt_path."
            )
        self._saved_schedulers, checkpoint["lr_schedulers"] = checkpoint["lr_schedulers"], []

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the state of the run until it is attached."""
        self._saved = state_dict

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks the module and its schedulers."""
        check_module(pl_module, {"criterion": self.criterion, "model": self.model})
        check_schedulers(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attaches the run, and goes on where the checkpoint was saved."""
        self._own_loader = loader = check_loader_of(trainer)
        parts = {"criterion": self.criterion, "model": self.model}
        own = {part: getattr(pl_module, name) if isinstance(name, str) else name for part, name in parts.items()}
        optimizer, epochs = trainer.optimizers[0], trainer.max_epochs
        assert epochs is not None
        assert trainer.model is not None
        if own["model"] is not None:
            trains_inside(own["model"], trainer.model)
        self._run = run = attach(
            self.method,
            loader=loader,
            optimizer=optimizer,
            epochs=epochs,
            device=trainer.strategy.root_device,
            **own,
            **self.settings,
        )
        check_length(run.loader, self.method, processes=trainer.world_size)
        self._stand_ins.put(pl_module, "thresher", run)
        if isinstance(self.criterion, str):
            self._stand_ins.put(pl_module, self.criterion, CriterionInPlace(own["criterion"], run))
        if self.model is not None:
            self._stand_ins.put(pl_module, self.model, run.model)
        self._full = int(trainer.num_training_batches)
        for config in trainer.lr_scheduler_configs:
            if config.interval == "step" and not config.reduce_on_plateau:
                config.scheduler = run.pace(config.scheduler, int(trainer.estimated_stepping_batches))
        self._load(trainer, run)
        self._iterate(trainer, run)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ends the epoch after its last step: before validation and before checkpoints."""
        if trainer.is_last_batch and not trainer.fast_dev_run and self._batches is not None:  # pyright: ignore[reportAttributeAccessIssue]
            self._batches.finish()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the run, or those of the runs of all processes; nothing before the training began."""
        if self._batches is None:
            return {}
        return {"run": gathered(self.run.state_dict()), "batches": self._length}

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Puts the states of the schedulers as without pace into the checkpoint, so that it loads without the callback, too."""
        if self.state_key not in checkpoint["callbacks"]:
            return
        schedulers, paces = checkpoint["lr_schedulers"], []
        for number, config in enumerate(trainer.lr_scheduler_configs):
            pace = None
            if isinstance(config.scheduler, PacedLR):
                pace = dict(schedulers[number])
                schedulers[number] = pace.pop("scheduler")
            paces.append(pace)
        checkpoint["callbacks"][self.state_key]["paces"] = paces
        checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)  # the run has the place in the epoch

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leaves the module as it was."""
        self._leave(trainer, together=False)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leaves the module as it was."""
        if stage == "fit":
            self._leave(trainer)

    # Parts

    def _load(self, trainer: Any, run: Run) -> None:
        """Loads the state of the checkpoint, if there is one."""
        if self._saved is None:
            return
        states = zip(trainer.lr_scheduler_configs, self._saved_schedulers, self._saved["paces"], strict=False)
        for config, state, pace in states:
            if (pace is None) == isinstance(config.scheduler, PacedLR):
                raise ValueError(
                    f"thresher.lightning.Selection: the checkpoint was saved with another interval of {config.name or 'a'} "
                    f"scheduler than interval={config.interval!r}, and its state counts other steps. Use the same interval."
                )
            config.scheduler.load_state_dict(state if pace is None else {"scheduler": state, **pace})
        run.load_state_dict(own_state(self._saved["run"]))

    def _iterate(self, trainer: Any, run: Run) -> None:
        """Has Lightning iterate the loader of the run, whose first pass draws where the pass of the user's loader has drawn."""
        loop, device, saved = trainer.fit_loop, trainer.strategy.root_device, self._saved
        combined, fetcher = loop._combined_loader, loop._data_fetcher
        self._own_loader._iterator = None  # pyright: ignore[reportOptionalMemberAccess]  # lets its persistent workers go
        self._batches = EpochBatches(run.loader, lambda length: self._begin_epoch(trainer, length), resumes=saved is not None)
        combined.flattened = [self._batches]
        if saved is None:
            now = rng.capture(device, self._generators)
            rng.restore(self._before, device, self._generators)
            iter(fetcher)
            rng.restore(now, device, self._generators)
            return
        self._begin_epoch(trainer, saved["batches"])
        if loop.epoch_loop.restarted_on_train_batch_end and trainer.is_last_batch:
            loop.max_batches = saved["batches"]  # by it Lightning sees, before the next batch, that this epoch was over
        iter(fetcher)
        self._saved, self._saved_schedulers = None, []

    def _begin_epoch(self, trainer: Any, length: int) -> None:
        """Tells Lightning after which batches of an epoch of this length it validates."""
        self._length, trainer.fit_loop.max_batches = length, self._full
        every = trainer.val_check_interval
        if trainer._val_check_time_interval is not None or trainer.check_val_every_n_epoch is None:
            return  # by time, or by the number of all batches
        if isinstance(every, int):
            trainer.val_check_batch = max(1, every * length // self._full)
        else:
            trainer.val_check_batch = float("inf") if every == 1.0 else max(1, int(length * every))

    def _leave(self, trainer: Any, *, together: bool = True) -> None:
        """Puts back what the run stood in for, and detaches it.

        Args:
            trainer: Trainer that has the callback.
            together: Whether all processes do so.
        """
        self._stand_ins.take_away()
        loader, self._own_loader = self._own_loader, None
        if loader is None:
            return
        trainer.fit_loop._combined_loader.flattened = [loader]
        if self._run is not None:
            self._run.detach(together=together)


def _generators_of(loader: Any) -> list[Any]:
    """Returns the generators that a loader draws from, each once."""
    found = [getattr(loader, "generator", None), getattr(getattr(loader, "sampler", None), "generator", None)]
    return list({id(one): one for one in found if one is not None}.values())
