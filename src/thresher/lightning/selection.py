"""`Selection`: a callback with which Lightning trains on selected samples."""

from collections.abc import Callable, Iterator
from typing import Any

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.utils.data import DataLoader, IterableDataset

from thresher import rng
from thresher.distributed.wrappers import trains_inside
from thresher.loading.loader import SelectedLoader
from thresher.loading.order import generators_of
from thresher.loading.settings import OfUser
from thresher.run.attach import attach, check_further_settings
from thresher.run.learning_rate import PacedLR
from thresher.run.run import Run
from thresher.run.trainers import Integration

LIGHTNING_TRAINER = Integration(
    "thresher.lightning.Selection",
    "Lightning",
    "Lightning needs the number of batches to know when to validate and when accumulation ends. Use shuffle=True, or "
    "forward_passes='once' for a method that chooses within a batch.",
    "Use shuffle=True.",
)
not_supported = LIGHTNING_TRAINER.not_supported


class EpochBatches(OfUser):
    """Loader for Lightning that yields the batches of a run. Other attributes are read from the user's DataLoader.

    Args:
        loader: Loader of the run.
        begins: Function that is called when an epoch begins, with the number of batches of the epoch.
        resumes: Whether the first epoch continues a saved run. Then it begins with its first batch and not with the iterator,
            because Lightning creates an iterator before the hooks of the epoch, and may then create another.
    """

    def __init__(
        self, loader: SelectedLoader, begins: Callable[[int], None], *, resumes: bool
    ) -> None:
        self._user: Any = loader
        self._begins = begins
        self._resumes = resumes
        self._current: Iterator[Any] = iter(())
        self._length: int | None = None

    def __len__(self) -> int:
        """Number of batches of the epoch that began last. Lightning asks for it after training, too."""
        return len(self._user) if self._length is None else self._length

    def __iter__(self) -> Iterator[Any]:
        begun = None if self._resumes else self._begin()
        self._resumes = False
        self._current = self._yield(begun)
        return self._current

    def _begin(self) -> Iterator[Any]:
        batches = iter(self._user)
        self._length = LIGHTNING_TRAINER.batches_in_epoch(self._user)
        self._begins(self._length)
        return batches

    def _yield(self, begun: Iterator[Any] | None) -> Iterator[Any]:
        yield from self._begin() if begun is None else begun

    def finish(self) -> None:
        """Ends the epoch in progress, as the end of a `for` loop does.

        Raises:
            RuntimeError: The epoch has another batch.
        """
        if next(self._current, None) is not None:
            raise RuntimeError(
                f"The epoch has more batches than the {len(self._user)} that its loader announced: the __len__ of its "
                "sampler is wrong. Correct it, or use shuffle=True."
            )


_NOTHING = object()


class StandIns:
    """Replaces attributes of objects for a while.

    Replacements are put into the `__dict__` of an object, where Python looks first. A child module of an `nn.Module` stays
    registered, so `parameters`, `state_dict` and `train` work as before.

    Example:
        >>> import torch
        >>> class Net(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.head = torch.nn.Linear(1, 2)
        >>> net, stand_ins = Net(), StandIns()
        >>> stand_ins.put(net, "head", "a stand-in")
        >>> net.head, list(net.state_dict())
        ('a stand-in', ['head.weight', 'head.bias'])
        >>> stand_ins.take_away()
        >>> net.head
        Linear(in_features=1, out_features=2, bias=True)
    """

    def __init__(self) -> None:
        self._put: list[tuple[dict[str, Any], str, Any, Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Replaces an attribute by a value.

        Args:
            owner: Object that has the attribute.
            name: Name of the attribute.
            value: Value that replaces the attribute.
        """
        attributes = vars(owner)
        self._put.append((attributes, name, attributes.get(name, _NOTHING), value))
        attributes[name] = value

    def take_away(self) -> None:
        """Restores every attribute, except attributes that other code has set since."""
        while self._put:
            attributes, name, before, value = self._put.pop()
            if attributes.get(name, _NOTHING) is value:
                del attributes[name]
                if before is not _NOTHING:
                    attributes[name] = before


class CriterionInPlace:
    """The criterion of a run as a replacement of the module's criterion, whose attributes can be read as before.

    Args:
        own: Criterion that the module had.
        run: Run that was attached with it.
    """

    def __init__(self, own: Any, run: Run) -> None:
        self._own = own
        self._run = run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the criterion of the run."""
        return self._run.criterion(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._own, name)


def check_trainer(trainer: Any) -> None:
    """Checks that the settings of the trainer are supported.

    Args:
        trainer: Trainer that has the callback, before its model is set up.

    Raises:
        ValueError: A setting is not supported.
    """
    if type(trainer.strategy) not in (SingleDeviceStrategy, DDPStrategy):
        raise not_supported(
            f"Trainer(strategy=) with {type(trainer.strategy).__name__}",
            "Use one device, or data parallelism with a model that fits into the memory of each device: strategy='ddp'.",
        )
    if every := trainer.reload_dataloaders_every_n_epochs:
        raise not_supported(
            f"Trainer(reload_dataloaders_every_n_epochs={every})",
            "Thresher remembers each sample from epoch to epoch: use one loader for all epochs.",
        )
    if (
        trainer.max_epochs is None
        or trainer.max_epochs < 0
        or (trainer.max_steps != -1 and not trainer.fast_dev_run)
    ):
        raise not_supported(
            f"Trainer(max_epochs={trainer.max_epochs}, max_steps={trainer.max_steps})",
            "A method needs the number of epochs in advance, and decides how many steps each has: give only max_epochs.",
        )
    _check_limits(trainer)
    if any(
        isinstance(callback, callbacks.StochasticWeightAveraging) for callback in trainer.callbacks
    ):
        raise not_supported(
            "The callback StochasticWeightAveraging",
            "Its last pass, for BatchNorm layers, would see only the selected samples, and it replaces the scheduler. Average "
            "the weights with lightning.pytorch.callbacks.WeightAveraging, or with torch.optim.swa_utils after training.",
        )
    finders = (callbacks.LearningRateFinder, callbacks.BatchSizeFinder)
    for kind in map(type, trainer.callbacks):
        if issubclass(kind, finders) and kind not in finders:
            what = f"{kind.__name__}, a subclass of {kind.__mro__[1].__name__},"
            raise not_supported(
                what,
                "It may search during training. Use the callback of Lightning itself, or Tuner.",
            )


def _check_limits(trainer: Any) -> None:
    for name, none in (("overfit_batches", 0.0), ("limit_train_batches", 1.0)):
        got = getattr(trainer, name)
        if not trainer.fast_dev_run and (got != none or type(got) is not float):
            raise not_supported(
                f"Trainer({name}={got!r})",
                "An epoch would end early, and the method would see no losses of the other samples: give a loader over "
                "torch.utils.data.Subset(dataset, ids).",
            )


def check_module(module: LightningModule, names: dict[str, Any]) -> None:
    """Checks that the named attributes of a module can be replaced.

    Args:
        module: LightningModule that is trained.
        names: Names of attributes of the module, by the argument of `Selection` that has the name; other values than strings
            are skipped.

    Raises:
        ValueError: The module optimizes by itself, is compiled, or does not have the attributes.
    """
    if not module.automatic_optimization:
        raise not_supported(
            "A module with automatic_optimization=False",
            "Thresher follows one optimizer that Lightning steps: use automatic optimization, or thresher.attach in a loop.",
        )
    if module._compiler_ctx is not None:
        raise not_supported(
            "trainer.fit(torch.compile(module))",
            "The losses of a compiled training_step cannot be assigned to samples. Compile a part, as in self.net = "
            "torch.compile(net).",
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise not_supported(
            "training_step(self, dataloader_iter)",
            "Take the batch as argument: training_step(self, batch, batch_idx).",
        )
    if hasattr(module, "thresher"):
        raise not_supported(
            "A module with an attribute `thresher`",
            "During training, this attribute is the run: give yours another name.",
        )
    for argument, name in names.items():
        if isinstance(name, str):
            _check_attribute(module, argument, name)


def _check_attribute(module: LightningModule, argument: str, name: str) -> None:
    kind = type(module)
    if not hasattr(module, name):
        children = ", ".join(child for child, _ in module.named_children()) or "none"
        raise ValueError(
            f"thresher.lightning.Selection: `{argument}` is {name!r}, and {kind.__name__} has no such attribute; its child "
            f"modules are: {children}. Pass the name of the attribute that training_step calls; or give {argument}=None, and "
            "call self.thresher there."
        )
    if hasattr(getattr(kind, name, None), "__set__"):
        raise ValueError(
            f"thresher.lightning.Selection: `{argument}` is {name!r}, a property of {kind.__name__}, which Thresher cannot "
            "replace. Pass the name of the attribute that the property returns."
        )


def check_loader_of(trainer: Any) -> DataLoader[Any]:
    """Returns the training loader of a trainer.

    Args:
        trainer: Trainer that has made its loader.

    Raises:
        ValueError: There are several loaders, the loader is not a DataLoader with a map-style dataset, or Lightning wraps its
            sampler for several processes.
    """
    loader = trainer.train_dataloader
    if not isinstance(loader, DataLoader):
        raise not_supported(
            f"A training loader of the type {type(loader).__name__}",
            "Give one torch.utils.data.DataLoader.",
        )
    if isinstance(loader.dataset, IterableDataset):
        raise not_supported(
            f"A loader over {type(loader.dataset).__name__}, an IterableDataset",
            "Give a DataLoader of a dataset with __getitem__ and __len__; or use thresher.attach in a loop.",
        )
    if isinstance(loader.sampler, DistributedSamplerWrapper):
        raise not_supported(
            f"A sampler of your own on {trainer.world_size} devices, which Lightning puts into a DistributedSamplerWrapper,",
            "Use shuffle=True or no sampler; or Trainer(use_distributed_sampler=False) and a loader whose sampler is a "
            "torch.utils.data.DistributedSampler, or a thresher.Shuffle with num_replicas= and rank=.",
        )
    return loader


def check_schedulers(trainer: Any) -> None:
    """Checks that `Run.pace` can adapt the schedulers that count steps.

    Args:
        trainer: Trainer whose optimizers are set up.

    Raises:
        ValueError: A scheduler with interval="step" is not called after every step of the optimizer.
    """
    for config in trainer.lr_scheduler_configs:
        if config.interval != "step" or config.reduce_on_plateau:
            continue
        if config.frequency != 1:
            raise not_supported(
                f"A scheduler with interval='step' and frequency={config.frequency}",
                "A shorter epoch would step it too seldom. Use frequency=1, or interval='epoch'.",
            )
        if any(
            isinstance(callback, callbacks.GradientAccumulationScheduler)
            for callback in trainer.callbacks
        ):
            raise not_supported(
                "A scheduler with interval='step' and a GradientAccumulationScheduler",
                "The number of steps of full training is then unknown. Use Trainer(accumulate_grad_batches=), or "
                "interval='epoch'.",
            )


class Selection(Callback):
    """Trains a LightningModule on the samples that a method chooses; the module and the Trainer do not change.

    While `fit` trains, `run.criterion` and `run.model` replace the named attributes, and `self.thresher` is the run, for
    modules that call `self.thresher.criterion` or `self.thresher.reduce` in `training_step`. Schedulers with interval="step"
    are adapted as by `Run.pace`, validation comes as often as in full training, and checkpoints have the state of the run. See
    docs/frameworks.md for what is supported.

    Args:
        method: Method, list of methods or share of the cost, as `thresher.attach` takes it.
        criterion: Name of the module's attribute that is the criterion; or a criterion, as `thresher.attach` takes it, if the
            module calls `self.thresher.criterion`; or None if it only calls `self.thresher.reduce`.
        model: Name of the module's attribute that is the network and that `training_step` calls; None if the method needs no
            network.
        settings: Other arguments of `thresher.attach`: `forward`, `forward_passes`, `signals`, `seed`, `spend`, `stratify`,
            `on_nonfinite`, `observe` and `collate_keeps_rows`.

    Raises:
        TypeError: A setting is not an argument of `thresher.attach`, or Lightning sets it itself.
        ValueError: A setting of the trainer, the module or the loader is not supported. Raised by `fit`, before anything is
            changed.

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
        check_further_settings(settings)
        self.method = method
        self.criterion = criterion
        self.model = model
        self.settings = settings
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
        """The `thresher.Run` of the current or last call of `fit`, with its cost, history and stored losses.

        With several processes, each has its own run, with the cost of its part of the samples.

        Raises:
            AttributeError: `fit` has not begun in this process.
        """
        if self._run is None:
            raise AttributeError(
                "thresher.lightning.Selection.run: no training has begun in this process; call trainer.fit first. With "
                "strategy='ddp_spawn', the run is in the processes that fit starts: read it in on_train_end of a callback."
            )
        return self._run

    # Lightning's hooks, in the order in which they are called

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks the trainer, and arranges that random states are saved when Lightning begins to iterate over the loader."""
        if stage != "fit":
            return
        check_trainer(trainer)
        self._run = None
        self._batches = None
        self._saved = None
        self._searches = False
        source = trainer.fit_loop._data_source
        make_loader = source.dataloader

        def dataloader() -> Any:
            loader = make_loader()
            self._generators = generators_of(getattr(loader, "sampler", None), loader)
            self._before = rng.capture(trainer.strategy.root_device, self._generators)
            return loader

        self._stand_ins.put(source, "dataloader", dataloader)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keeps the states of the schedulers until training starts."""
        if trainer.state.fn != "fit" or self._searches:
            return
        if self.state_key not in checkpoint["callbacks"]:
            raise ValueError(
                "thresher.lightning.Selection: the checkpoint of fit(ckpt_path=...) was saved without this callback, or before "
                "training began, so it has no state of the run: the method would start again in the middle of training. Load "
                "the weights with load_from_checkpoint of your module, and call fit without ckpt_path."
            )
        self._saved_schedulers, checkpoint["lr_schedulers"] = checkpoint["lr_schedulers"], []

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the state of the run until training starts."""
        self._saved = state_dict

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks the module and its schedulers."""
        check_module(pl_module, {"criterion": self.criterion, "model": self.model})
        check_schedulers(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attaches the run, and continues where the checkpoint was saved."""
        self._own_loader = loader = check_loader_of(trainer)
        parts = {"criterion": self.criterion, "model": self.model}
        members = {
            part: getattr(pl_module, name) if isinstance(name, str) else name
            for part, name in parts.items()
        }
        optimizer = trainer.optimizers[0]
        epochs = trainer.max_epochs
        assert epochs is not None
        assert trainer.model is not None
        if members["model"] is not None:
            trains_inside(members["model"], trainer.model)
        self._run = run = attach(
            self.method,
            loader=loader,
            optimizer=optimizer,
            epochs=epochs,
            device=trainer.strategy.root_device,
            **members,
            **self.settings,
        )
        LIGHTNING_TRAINER.check_length(run)
        self._stand_ins.put(pl_module, "thresher", run)
        if isinstance(self.criterion, str):
            self._stand_ins.put(
                pl_module, self.criterion, CriterionInPlace(members["criterion"], run)
            )
        if self.model is not None:
            self._stand_ins.put(pl_module, self.model, run.model)
        self._full = int(trainer.num_training_batches)
        for config in trainer.lr_scheduler_configs:
            if config.interval == "step" and not config.reduce_on_plateau:
                config.scheduler = run.pace(
                    config.scheduler, int(trainer.estimated_stepping_batches)
                )
        self._load(trainer, run)
        self._iterate(trainer, run)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ends the epoch of the run after its last step, before validation and checkpoints."""
        if trainer.is_last_batch and not trainer.fast_dev_run and self._batches is not None:  # pyright: ignore[reportAttributeAccessIssue]
            self._batches.finish()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the run, a dict; empty before training began. Lightning saves the state of process 0."""
        if self._batches is None:
            return {}
        return {"run": self.run.state_dict(), "batches": self._length}

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Puts the states of the original schedulers into the checkpoint, so that it also loads without the callback."""
        if self.state_key not in checkpoint["callbacks"]:
            self._searches = True  # only LearningRateFinder and BatchSizeFinder save before the training, to put this back
            if self._saved is not None:
                raise not_supported(
                    "LearningRateFinder or BatchSizeFinder with fit(ckpt_path=...)",
                    "After the search, Lightning would begin with the first epoch: resume without this callback.",
                )
            return
        schedulers = checkpoint["lr_schedulers"]
        paces = []
        for number, config in enumerate(trainer.lr_scheduler_configs):
            pace = None
            if isinstance(config.scheduler, PacedLR):
                pace = dict(schedulers[number])
                schedulers[number] = pace.pop("scheduler")
            paces.append(pace)
        checkpoint["callbacks"][self.state_key]["paces"] = paces
        checkpoint["loops"]["fit_loop"]["state_dict"].pop(
            "combined_loader", None
        )  # the run has the place in the epoch

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Restores the module."""
        self._leave(trainer, together=False)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restores the module."""
        if stage == "fit":
            self._leave(trainer)

    # Parts

    def _load(self, trainer: Any, run: Run) -> None:
        """Loads the state of the checkpoint, if there is one."""
        if self._saved is None:
            return
        states = zip(
            trainer.lr_scheduler_configs, self._saved_schedulers, self._saved["paces"], strict=False
        )
        for config, state, pace in states:
            if (pace is None) == isinstance(config.scheduler, PacedLR):
                raise ValueError(
                    f"thresher.lightning.Selection: the checkpoint was saved with another interval of {config.name or 'a'} "
                    f"scheduler than interval={config.interval!r}, so its step count does not fit. Use the same interval."
                )
            config.scheduler.load_state_dict(
                state if pace is None else {"scheduler": state, **pace}
            )
        LIGHTNING_TRAINER.check_processes(
            "the checkpoint", len(self._saved["run"]["ranks"]), trainer.world_size
        )
        run.load_state_dict(self._saved["run"])

    def _iterate(self, trainer: Any, run: Run) -> None:
        """Makes Lightning iterate over the loader of the run. Its first pass draws the random numbers of the user's loader."""
        loop = trainer.fit_loop
        device = trainer.strategy.root_device
        saved = self._saved
        combined = loop._combined_loader
        fetcher = loop._data_fetcher
        self._own_loader._iterator = None  # pyright: ignore[reportOptionalMemberAccess]  # lets its persistent workers go
        self._batches = EpochBatches(
            run.loader, lambda length: self._begin_epoch(trainer, length), resumes=saved is not None
        )
        combined.flattened = [self._batches]
        if saved is None:
            now = rng.capture(device, self._generators)
            rng.restore(self._before, device, self._generators)
            iter(fetcher)
            rng.restore(now, device, self._generators)
            return
        self._begin_epoch(trainer, saved["batches"])
        if loop.epoch_loop.restarted_on_train_batch_end and trainer.is_last_batch:
            loop.max_batches = saved[
                "batches"
            ]  # by it Lightning sees, before the next batch, that this epoch was over
        iter(fetcher)
        self._saved = None
        self._saved_schedulers = []

    def _begin_epoch(self, trainer: Any, length: int) -> None:
        """Tells Lightning after which batches of an epoch of this length it validates."""
        self._length = length
        trainer.fit_loop.max_batches = self._full
        every = trainer.val_check_interval
        if trainer._val_check_time_interval is not None or trainer.check_val_every_n_epoch is None:
            return  # by time, or by the number of all batches
        if isinstance(every, int):
            trainer.val_check_batch = max(1, every * length // self._full)
        elif every == 1.0:
            trainer.val_check_batch = float("inf")
        else:
            trainer.val_check_batch = max(1, int(length * every))

    def _leave(self, trainer: Any, *, together: bool = True) -> None:
        """Restores the replaced attributes and the loader, and detaches the run.

        Args:
            trainer: Trainer that has the callback.
            together: Whether all processes do so.
        """
        self._stand_ins.take_away()
        loader = self._own_loader
        self._own_loader = None
        if loader is None:
            return
        trainer.fit_loop._combined_loader.flattened = [loader]
        if self._run is not None:
            self._run.detach(together=together)
