"""What `Selection` refuses: settings of Lightning under which a selection would be wrong."""

from typing import Any

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.utils.data import DataLoader, IterableDataset

from thresher.lightning.epoch_batches import length_of
from thresher.loading.loader import SelectedLoader
from thresher.methods.full import FullData
from thresher.run.checks import split_by_stage
from thresher.run.naming import method_of


def not_supported(what: str, way_out: str) -> ValueError:
    """Returns the error of a setting that is not supported.

    Args:
        what: Name of the setting and what was got.
        way_out: Sentences that say why, and what to do.
    """
    return ValueError(f"thresher.lightning.Selection: {what} is not supported. {way_out}")


def check_trainer(trainer: Any) -> None:
    """Refuses settings of the trainer.

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
            "Records and plans are for a fixed set of samples: use one loader for the whole training.",
        )
    if trainer.max_epochs is None or trainer.max_epochs < 0 or (trainer.max_steps != -1 and not trainer.fast_dev_run):
        raise not_supported(
            f"Trainer(max_epochs={trainer.max_epochs}, max_steps={trainer.max_steps})",
            "Methods need the number of epochs, and how many steps an epoch has depends on them: give max_epochs alone.",
        )
    _check_limits(trainer)
    if any(isinstance(callback, StochasticWeightAveraging) for callback in trainer.callbacks):
        raise not_supported(
            "The callback StochasticWeightAveraging",
            "Its last pass, for BatchNorm layers, would have the selected samples only, and it replaces the scheduler. Average "
            "the weights with lightning.pytorch.callbacks.WeightAveraging, or with torch.optim.swa_utils after the training.",
        )


def _check_limits(trainer: Any) -> None:
    for name, none in (("overfit_batches", 0.0), ("limit_train_batches", 1.0)):
        got = getattr(trainer, name)
        if not trainer.fast_dev_run and (got != none or type(got) is not float):
            raise not_supported(
                f"Trainer({name}={got!r})",
                "An epoch would be left before its end, and methods would learn nothing of the other samples: give a loader "
                "over torch.utils.data.Subset(dataset, ids).",
            )


def check_module(module: LightningModule, names: dict[str, Any]) -> None:
    """Refuses a module in which nothing can stand in the place of the named attributes.

    Args:
        module: Module of the training.
        names: Names of its attributes, by the argument of `Selection` that names them; values that are no strings name none.

    Raises:
        ValueError: The module optimizes by itself, is compiled, or does not have the attributes.
    """
    if not module.automatic_optimization:
        raise not_supported(
            "A module with automatic_optimization=False",
            "A run follows one optimizer that Lightning steps: use automatic optimization, or a loop with thresher.attach.",
        )
    if module._compiler_ctx is not None:
        raise not_supported(
            "trainer.fit(torch.compile(module))",
            "The losses of a compiled training_step cannot be credited to samples. Compile a part, as in self.net = "
            "torch.compile(net).",
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise not_supported(
            "training_step(self, dataloader_iter)", "Take the batch as argument: training_step(self, batch, batch_idx)."
        )
    if hasattr(module, "thresher"):
        raise not_supported(
            "A module with an attribute `thresher`", "During the training it is the run: give the attribute another name."
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
            f"modules are: {children}. Name the attribute that training_step calls, or give {argument}=None and call "
            "self.thresher there."
        )
    if hasattr(getattr(kind, name, None), "__set__"):
        raise ValueError(
            f"thresher.lightning.Selection: `{argument}` is {name!r}, a property of {kind.__name__}, which cannot be "
            "replaced. Name the attribute that it returns."
        )


def check_loader_of(trainer: Any) -> DataLoader[Any]:
    """Returns the training loader of a trainer.

    Args:
        trainer: Trainer that has made its loader.

    Raises:
        ValueError: There are several loaders, it is no DataLoader over samples with ids, or Lightning deals its order out to
            several processes by a wrapper.
    """
    loader = trainer.train_dataloader
    if not isinstance(loader, DataLoader):
        raise not_supported(f"A training loader of the type {type(loader).__name__}", "Give one torch.utils.data.DataLoader.")
    if isinstance(loader.dataset, IterableDataset):
        raise not_supported(
            f"A loader over {type(loader.dataset).__name__}, an IterableDataset",
            "Give a DataLoader of a dataset with __getitem__ and __len__. A loop with thresher.attach also takes streams.",
        )
    if isinstance(loader.sampler, DistributedSamplerWrapper):
        raise not_supported(
            f"A sampler of your own on {trainer.world_size} devices, which Lightning puts into a DistributedSamplerWrapper,",
            "Use shuffle=True or no sampler; or Trainer(use_distributed_sampler=False) and a loader whose sampler is a "
            "torch.utils.data.DistributedSampler, or a thresher.Shuffle with num_replicas= and rank=.",
        )
    return loader


def check_length(loader: SelectedLoader, method: Any, *, processes: int) -> None:
    """Refuses a run of which the number of batches of an epoch, now or later, is not known when it begins.

    Args:
        loader: Loader of the run.
        method: Method, or list of methods, as `attach` takes it.
        processes: Number of processes; of several, `attach` takes samplers of a known length only.

    Raises:
        ValueError: The sampler may repeat samples, and an epoch method leaves some out; or a batch method keeps rows by chance
            and fills them up to full batches.
    """
    length_of(loader)
    epoch_method = split_by_stage(method_of(method)).epoch
    if processes == 1 and not loader.yields_once and not isinstance(epoch_method, FullData):
        raise not_supported(
            f"{type(epoch_method).__name__} beside a {type(loader.sampler).__name__}, which may repeat samples,",
            "Lightning needs to know the number of batches of an epoch when it begins. Use shuffle=True.",
        )


def check_schedulers(trainer: Any) -> None:
    """Refuses schedulers that count steps in a way that cannot be paced.

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
                "An epoch that is shorter would call it too seldom. Use frequency=1, or interval='epoch'.",
            )
        if any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks):
            raise not_supported(
                "A scheduler with interval='step' beside GradientAccumulationScheduler",
                "How many steps full training makes is not known then. Use Trainer(accumulate_grad_batches=), or "
                "interval='epoch'.",
            )
