"""What `thresher.lightning.Selection` refuses, by name, before it changes anything."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

import thresher
from lightning_cases import Classifier, dataset, fit, lightning, train_loader, trainer
from thresher.lightning import Selection

pytestmark = pytest.mark.filterwarnings(
    "ignore:You defined a `validation_step`", "ignore:`max_epochs` was not set"
)


def refused(match, module=None, loader=None, method=None, callbacks=(), selection=None, **settings):
    module = module or Classifier(None)
    before = dict(vars(module))
    selection = selection or Selection(method or thresher.InfoBatch())
    with pytest.raises(ValueError, match=match):
        trainer(selection, *callbacks, **settings).fit(
            module, train_loader() if loader is None else loader
        )
    assert set(vars(module)) - set(before) <= {"_hparams"}
    assert selection._run is None or selection.run.cost.forward == 0
    assert selection.state_dict() == {}


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs=1"),
        ({"max_steps": 5}, "max_epochs=4, max_steps=5"),
        ({"max_epochs": -1}, "max_epochs=-1"),
        ({"limit_train_batches": 3}, "limit_train_batches=3"),
        ({"limit_train_batches": 1}, "limit_train_batches=1"),
        ({"limit_train_batches": 0.5}, "limit_train_batches=0.5"),
        ({"overfit_batches": 2}, "overfit_batches=2"),
    ],
)
@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_settings_of_the_trainer(settings, match):
    refused(match, **settings)


class Sharded(lightning.pytorch.strategies.FSDPStrategy):
    """Stands for the strategies that do not have the whole model in each process."""


def test_strategies():
    """`fit` would start the processes before it calls the hook."""
    selection, made = Selection(thresher.InfoBatch()), trainer(devices=2, strategy="ddp")
    selection.setup(made, Classifier(None), "validate")
    made.strategy.__class__ = Sharded
    with pytest.raises(
        ValueError, match="Sharded is not supported. Use one device, or .*strategy='ddp'"
    ):
        selection.setup(made, Classifier(None), "fit")


def test_averaging_of_weights():
    refused(
        "StochasticWeightAveraging",
        callbacks=[lightning.pytorch.callbacks.StochasticWeightAveraging(0.1)],
    )


class Searching(lightning.pytorch.callbacks.LearningRateFinder):
    """Searches again and again, as in Lightning's documentation."""

    def on_fit_start(self, *args):
        pass

    def on_train_epoch_start(self, trainer, pl_module):
        self.lr_find(trainer, pl_module)


def test_searches_during_the_training():
    refused(
        "Searching, a subclass of LearningRateFinder, is not supported. It may search during training.*Tuner",
        callbacks=[Searching()],
    )


def test_a_search_before_a_training_that_goes_on(tmp_path):
    made = fit(Classifier(None), Selection(thresher.InfoBatch()), max_epochs=2)
    made.save_checkpoint(tmp_path / "saved.ckpt")
    module = Classifier(None)
    module.lr = 0.05
    with pytest.raises(
        ValueError,
        match=r"LearningRateFinder or BatchSizeFinder with fit\(ckpt_path=...\) is not supported",
    ):
        fit(module, Selection(thresher.InfoBatch()), lightning.pytorch.callbacks.LearningRateFinder(),
            ckpt_path=tmp_path / "saved.ckpt")  # fmt: skip
    assert not module.batches


class Manual(Classifier):
    def __init__(self):
        super().__init__(None)
        self.automatic_optimization = False


class Iterates(Classifier):
    def training_step(self, dataloader_iter):
        pass


class Taken(Classifier):
    thresher = 1


class WithProperty(Classifier):
    @property
    def loss(self):
        return self.criterion


@pytest.mark.filterwarnings(
    "ignore:Found `dataloader_iter`", "ignore:You are using the `dataloader_iter`"
)
def test_modules():
    refused("automatic_optimization=False", Manual())
    refused("dataloader_iter", Iterates(None))
    refused("an attribute `thresher`", Taken(None))
    refused(
        "`model` is 'backbone'.*its child modules are: net, criterion",
        selection=Selection(0.5, model="backbone"),
    )
    refused(
        "`criterion` is 'loss', a property",
        WithProperty(None),
        selection=Selection(0.5, criterion="loss"),
    )
    compiled = Classifier(None)
    compiled._compiler_ctx = {"compiler": "dynamo"}
    refused(r"torch.compile\(module\)", compiled)


class Stream(IterableDataset):
    def __iter__(self):
        yield from dataset()


def test_loaders():
    refused(
        "over Stream, an IterableDataset", loader=DataLoader(Stream(), batch_size=8), method=0.5
    )
    refused("of the type list", loader=[train_loader(), train_loader()])
    sampler = WeightedRandomSampler(torch.ones(109), 109)
    refused(
        "InfoBatch with a WeightedRandomSampler, which may repeat",
        loader=train_loader(sampler=sampler, shuffle=False),
    )
    fit(
        Classifier(None),
        Selection(thresher.SelectiveBackprop(keep=0.5)),
        loader=train_loader(sampler=sampler, shuffle=False),
    )


class Scheduled(Classifier):
    frequency = 1

    def configure_optimizers(self):
        made = super().configure_optimizers()
        made["lr_scheduler"]["frequency"] = self.frequency
        return made


def test_schedulers():
    module = Scheduled("step")
    module.frequency = 2
    refused("frequency=2", module)
    accumulation = lightning.pytorch.callbacks.GradientAccumulationScheduler({0: 1, 2: 2})
    refused("and a GradientAccumulationScheduler", Classifier("step"), callbacks=[accumulation])
    fit(Classifier("epoch"), Selection(thresher.InfoBatch()), accumulation)


def test_arguments():
    with pytest.raises(AttributeError, match="no training has begun in this process.*ddp_spawn"):
        _ = Selection(0.5).run
    assert not hasattr(Selection(0.5), "run")
    with pytest.raises(
        TypeError,
        match="Selection: epochs, lr: no such setting; the settings are collate_keeps_rows, .*spend",
    ):
        Selection(0.5, epochs=3, lr=1)


def test_an_epoch_of_unknown_length():
    chance = (
        thresher.SelectiveBackprop(beta=1.0)
        if "beta" in thresher.SelectiveBackprop.__dataclass_fields__
        else None
    )
    assert chance is not None
    selection = Selection(chance, forward_passes="twice")
    refused("the length of this epoch is not known.*forward_passes='once'", selection=selection)


def test_a_sampler_that_yields_more_than_it_says():
    class Longer(torch.utils.data.Sampler):
        def __len__(self):
            return 16

        def __iter__(self):
            yield from range(24)

    with pytest.raises(RuntimeError, match="more batches than the 2"):
        fit(
            Classifier(None),
            Selection(thresher.FullData()),
            loader=train_loader(sampler=Longer(), shuffle=False),
        )


def test_checkpoints(tmp_path):
    module = Classifier("late")
    fit(module).save_checkpoint(tmp_path / "without")
    refused_module = Classifier("late")
    with pytest.raises(ValueError, match="was saved without this callback"):
        fit(refused_module, Selection(thresher.InfoBatch()), ckpt_path=tmp_path / "without")
    selection = Selection(thresher.UniformSubset(keep=0.5))
    fit(Classifier("late"), selection, max_epochs=2).save_checkpoint(tmp_path / "with")
    with pytest.warns(
        UserWarning, match="callbacks used to create the checkpoint need to be provided"
    ):
        resumed = fit(Classifier("late"), ckpt_path=tmp_path / "with")
    assert resumed.lr_scheduler_configs[0].scheduler.last_epoch == 2 * 14 + 2 * 14
    with pytest.raises(ValueError, match="another interval"):
        fit(
            Classifier("epoch"),
            Selection(thresher.UniformSubset(keep=0.5)),
            ckpt_path=tmp_path / "with",
        )


def test_without_lightning(monkeypatch):
    import importlib
    import sys

    for name in [name for name in sys.modules if name.startswith("thresher.lightning")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'thresher\[lightning\]'"):
        importlib.import_module("thresher.lightning")


def test_the_network_need_not_be_named():
    fit(Classifier(None), Selection(thresher.InfoBatch(), model=None))
    with pytest.raises(ValueError, match="model"):
        fit(Classifier(None), Selection(thresher.Kakurenbo(), model=None))
    assert isinstance(Classifier().net, nn.Sequential)
