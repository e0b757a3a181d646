"""An unchanged LightningModule trains on a choice of samples, as a plain loop with `thresher.attach` does."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import thresher
from depth import depth
from helpers import assert_same
from lightning_cases import (
    BATCH,
    EPOCHS,
    Classifier,
    N,
    dataset,
    fit,
    last_rate_of_full_training,
    lightning,
    network,
    outcome,
    train_loader,
    trainer,
)
from thresher.lightning import Selection

pytestmark = [
    pytest.mark.usefixtures("shared_traces"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
]

callbacks, Tuner = lightning.pytorch.callbacks, lightning.pytorch.tuner.Tuner
FULL = -(-N // BATCH)
METHODS = {
    "infobatch": thresher.InfoBatch(),
    "kakurenbo": thresher.Kakurenbo(max_fraction=0.4, tau=0.5),
    "selective_backprop": thresher.SelectiveBackprop(keep=0.4),
    "winnow": thresher.Winnow(0.5, least_agreement=-1),
}


@pytest.mark.parametrize(
    ("schedule", "workers"),
    depth(
        [("step", 2), ("late", 0)],
        [(name, workers) for name in ("step", "late", "epoch") for workers in (0, 2)],
    ),
)
def test_full_data_changes_nothing(schedule, workers):
    plain, selected = (Classifier(schedule, draws=True) for _ in range(2))
    expected = outcome(plain, fit(plain, workers=workers, validate=True))
    assert_same(
        outcome(
            selected, fit(selected, Selection(thresher.FullData()), workers=workers, validate=True)
        ),
        expected,
    )
    assert selected.validated == plain.validated
    assert selected.estimates == plain.estimates


@pytest.mark.parametrize(
    "settings",
    [{"accumulate_grad_batches": 3}, {"precision": "bf16-mixed", "gradient_clip_val": 0.1}],
)
def test_full_data_with_a_generator_and_settings_of_the_trainer(settings):
    def trained(*callbacks):
        module, generator = Classifier("step"), torch.Generator().manual_seed(5)
        loader = train_loader(2, generator=generator, persistent_workers=True)
        made = fit(module, *callbacks, loader=loader, **settings)
        return outcome(module, made) | {
            "generator": generator.get_state(),
            "steps": made.global_step,
        }

    assert_same(trained(Selection(thresher.FullData())), trained())


class LeavesEpoch(Classifier):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if self.trainer.current_epoch == 0 and batch_idx == 2 else None


@pytest.mark.parametrize(
    ("kind", "settings"), [(LeavesEpoch, {}), (Classifier, {"fast_dev_run": 3})]
)
def test_full_data_changes_nothing_in_shorter_trainings(kind, settings):
    plain, selected = (kind("step") for _ in range(2))
    expected = outcome(plain, fit(plain, **settings))
    assert_same(
        outcome(selected, fit(selected, Selection(thresher.FullData()), **settings)), expected
    )
    assert selected.batches == plain.batches < EPOCHS * FULL


def by_hand(method, epochs=EPOCHS, accumulate=1):
    """The same training as a plain loop."""
    torch.manual_seed(0)
    net, criterion, loader = network(), nn.CrossEntropyLoss(label_smoothing=0.1), train_loader()
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    run = thresher.attach(
        method, loader=loader, criterion=criterion, model=net, optimizer=optimizer, epochs=epochs
    )
    steps = epochs * -(-FULL // accumulate)
    scheduler = run.pace(
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=steps), steps
    )
    for _ in range(epochs):
        last = len(run.loader)
        for number, (x, y) in enumerate(run.loader, 1):
            (run.criterion(run.model(x), y) / accumulate).backward()
            if number % accumulate == 0 or number == last:
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
    return net, run, optimizer


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_equals_a_plain_loop(method, accumulate):
    net, run, optimizer = by_hand(method, accumulate=accumulate)
    module, selection = Classifier("step"), Selection(method)
    trained = fit(module, selection, accumulate_grad_batches=accumulate)
    assert_same(module.net.state_dict(), net.state_dict())
    assert_same(trained.optimizers[0].state_dict()["state"], optimizer.state_dict()["state"])
    assert_same(
        [dict(entry) for entry in selection.run.history], [dict(entry) for entry in run.history]
    )
    counted = (
        "forward",
        "backward",
        "refresh",
        "scoring",
        "steps",
        "full_forward",
        "full_backward",
    )
    assert [getattr(selection.run.cost, name) for name in counted] == [
        getattr(run.cost, name) for name in counted
    ]
    assert (run.cost.refresh > 0) == isinstance(method, thresher.Kakurenbo)
    assert_same(selection.run.records.state_dict(), run.records.state_dict())
    total = EPOCHS * -(-FULL // accumulate)
    assert set(module.estimates) == {total}
    assert (
        trained.optimizers[0].param_groups[0]["lr"]
        == optimizer.param_groups[0]["lr"]
        == last_rate_of_full_training(total)
    )


def test_validation_comes_in_every_epoch():
    module, selection = Classifier(), Selection(METHODS["infobatch"])
    fit(module, selection, validate=True)
    lengths = [-(-entry["kept"] // BATCH) for entry in selection.run.history]
    assert min(lengths) < FULL
    assert [epoch for epoch, _ in module.validated] == list(range(EPOCHS))
    assert [batches for _, batches in module.validated] == torch.tensor(lengths).cumsum(0).tolist()
    assert module.batches == sum(lengths)


@pytest.mark.parametrize("interval", [0.5, 7])
def test_validation_at_shares_of_an_epoch(interval):
    module = Classifier()
    fit(
        module,
        Selection(thresher.UniformSubset(keep=0.5)),
        validate=True,
        val_check_interval=interval,
    )
    assert module.validated == [
        (epoch, 7 * epoch + batches) for epoch in range(EPOCHS) for batches in (3, 6)
    ]


def test_validation_by_the_number_of_all_batches():
    module = Classifier()
    settings = {"val_check_interval": 10, "check_val_every_n_epoch": None}
    fit(module, Selection(thresher.UniformSubset(keep=0.5)), validate=True, **settings)
    assert [batches for _, batches in module.validated] == [10, 20]


def test_schedulers_by_epoch_are_left_alone():
    module = Classifier("epoch")
    trained = fit(module, Selection(METHODS["infobatch"]))
    assert trained.optimizers[0].param_groups[0]["lr"] == 0
    assert isinstance(
        trained.lr_scheduler_configs[0].scheduler, torch.optim.lr_scheduler.CosineAnnealingLR
    )


def test_a_scheduler_by_a_metric_is_left_alone():
    plain, selected = Classifier("plateau"), Classifier("plateau")
    expected = outcome(plain, fit(plain, validate=True))
    assert_same(
        outcome(selected, fit(selected, Selection(thresher.FullData()), validate=True)), expected
    )


class Named(Classifier):
    """Names the run in its step."""

    def training_step(self, batch, batch_idx):
        outputs = self.net(batch[0])
        losses = nn.functional.cross_entropy(
            outputs, batch[1], label_smoothing=0.1, reduction="none"
        )
        return self.thresher.reduce(losses, outputs=outputs, targets=batch[1])


class NamedCriterion(Classifier):
    def training_step(self, batch, batch_idx):
        return self.thresher.criterion(self.net(batch[0]), batch[1])


def test_a_module_that_names_the_run():
    modules = [Classifier(None), NamedCriterion(None), Named(None)]
    criteria = ["criterion", nn.CrossEntropyLoss(label_smoothing=0.1), None]
    runs = []
    for module, criterion in zip(modules, criteria, strict=True):
        selection = Selection(thresher.FullData(), criterion=criterion)
        fit(module, selection)
        runs.append(selection.run.cost.backward)
        assert not hasattr(module, "thresher")
    assert_same(modules[0].state_dict(), modules[1].state_dict())
    assert runs == [EPOCHS * N] * 3
    for name, value in modules[0].state_dict().items():
        assert torch.allclose(modules[2].state_dict()[name], value, atol=1e-4), name


def test_a_data_map_of_the_training():
    plain, observed = Classifier(None), Classifier(None)
    fit(plain)
    selection = Selection(thresher.FullData(), observe=True)
    fit(observed, selection)
    assert_same(plain.state_dict(), observed.state_dict())
    found = selection.run.data_map()
    assert (found["times_seen"] == EPOCHS).all() and (
        (found["confidence"] > 0) & (found["confidence"] < 1)
    ).all()


class OfModule(Classifier):
    def train_dataloader(self):
        return train_loader()


class Data(lightning.LightningDataModule):
    def train_dataloader(self):
        return train_loader()


def test_where_the_loader_comes_from():
    trained = []
    for module, data in (
        (Classifier(), train_loader()),
        (OfModule(), None),
        (Classifier(), Data()),
    ):
        torch.manual_seed(0)
        trainer(Selection(METHODS["kakurenbo"])).fit(module, data)
        trained.append(module.state_dict())
    assert_same(trained[1], trained[0])
    assert_same(trained[2], trained[0])


class Failing(Classifier):
    def training_step(self, batch, batch_idx):
        if self.trainer.current_epoch == 1:
            assert isinstance(self.criterion, thresher.lightning.selection.CriterionInPlace)
            assert self.criterion.label_smoothing == 0.1
            assert self.net is self.thresher.model
            raise KeyError("a failure")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("module", [Classifier, Failing])
def test_the_module_is_as_it_was(module):
    module = module()
    before, names, loader = dict(vars(module)), list(module.state_dict()), train_loader()
    net, criterion = module.net, module.criterion
    selection = Selection(METHODS["selective_backprop"])
    made = trainer(selection)
    if isinstance(module, Failing):
        with pytest.raises(KeyError, match="a failure"):
            made.fit(module, loader)
    else:
        made.fit(module, loader)
    assert module.net is net
    assert module.criterion is criterion
    assert set(vars(module)) - set(before) <= {"_hparams"}  # Lightning sets it in any fit
    assert list(module.state_dict()) == names
    assert "dataloader" not in vars(made.fit_loop._data_source)
    thresher.attach(  # the loader and the optimizer are free again
        thresher.FullData(),
        loader=loader,
        criterion=criterion,
        model=net,
        optimizer=made.optimizers[0],
        epochs=1,
    ).detach()


def test_a_second_fit_and_a_validation_after_it():
    module, selection = Classifier(), Selection(METHODS["infobatch"])
    made = trainer(selection)
    for _ in range(2):
        made.fit_loop.epoch_progress.reset()
        made.fit_loop.epoch_loop.automatic_optimization.optim_progress.reset()
        made.fit(module, train_loader())
        assert len(selection.run.history) == EPOCHS
    assert made.validate(module, DataLoader(dataset(), batch_size=50), verbose=False)


class Tuned(Classifier):
    """A module whose learning rate and batch size a search can set."""

    def __init__(self):
        super().__init__(None)
        self.lr, self.batch_size = 0.05, 4

    def train_dataloader(self):
        return train_loader(batch_size=self.batch_size)

    def val_dataloader(self):
        return DataLoader(dataset(), batch_size=50)


def searched(search, method, tuner):
    """A training after a search."""
    torch.manual_seed(0)
    module, chosen = Tuned(), [] if method is None else [Selection(method)]
    made = trainer(*chosen, *([] if tuner else [search()]))
    if tuner:
        Tuner(made).lr_find(module, num_training=30)
    made.fit(module)
    return module, made


@pytest.mark.parametrize(
    ("search", "tuner"),
    [
        (None, True),
        (lambda: callbacks.LearningRateFinder(num_training_steps=30), False),
        (lambda: callbacks.BatchSizeFinder(max_trials=4, steps_per_trial=2), False),
    ],
)
@pytest.mark.filterwarnings("ignore:`weights_only` was not set")
def test_a_search_before_the_training(search, tuner, tmp_path, monkeypatch):
    """Searches of Lightning train on all samples, by themselves; the run begins with the training."""
    monkeypatch.chdir(tmp_path)
    plain, full = searched(search, None, tuner), searched(search, thresher.FullData(), tuner)
    assert_same(outcome(*full), outcome(*plain))
    assert (full[0].lr, full[0].batch_size) == (plain[0].lr, plain[0].batch_size) != (0.05, 4)
    _, made = searched(search, thresher.UniformSubset(keep=0.5), tuner)
    (selection,) = [one for one in made.callbacks if isinstance(one, Selection)]
    assert selection.run.epoch == EPOCHS and selection.run.cost.ratio() < 0.6


def test_fast_dev_run():
    module, selection = Classifier("late"), Selection(METHODS["kakurenbo"])
    fit(module, selection, validate=True, fast_dev_run=2)
    assert module.batches == 2
    assert len(module.validated) == 1


@pytest.mark.parametrize("passes", ["once", "twice"])
def test_forward_passes(passes):
    module, selection = (
        Classifier(None),
        Selection(METHODS["selective_backprop"], forward_passes=passes),
    )
    fit(module, selection, validate=True)
    assert len(module.validated) == EPOCHS
    assert selection.run.cost.scoring == (EPOCHS * N if passes == "twice" else 0)


def test_bfloat16_has_one_forward_pass_and_no_fall_back():
    module, selection = Classifier("step"), Selection(thresher.SelectiveBackprop(keep=0.5))
    fit(module, selection, precision="bf16-mixed")
    run = selection.run
    assert run.model.module.fallback is None
    assert run.cost.forward == run.cost.full_forward == EPOCHS * N
    assert run.cost.backward == EPOCHS * ((N // BATCH) * (BATCH // 2) + max(1, N % BATCH // 2))
