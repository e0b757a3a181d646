"""A run that was interrupted and resumed computes what the uninterrupted one does, bit for bit."""

import copy
import io
import random
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

import thresher
from depth import depth
from helpers import assert_same, changed, signed

N, B, EPOCHS = 60, 8, 5
pytestmark = pytest.mark.usefixtures("shared_traces")

METHODS = {
    "full": thresher.FullData(),
    "uniform": thresher.UniformSubset(keep=0.6),
    "kakurenbo": thresher.Kakurenbo(max_fraction=0.5, tau=0.3, drop_top=0.05),
    "kakurenbo, official": thresher.Kakurenbo(
        max_fraction=0.5,
        tau=0.1,
        confidence="batch",
        lr_fraction="scheduled",
        refresh="train",
        merge="sum",
    ),
    "infobatch": thresher.InfoBatch(),
    "infobatch, target": thresher.InfoBatch(target=0.3),
    "repb, target": thresher.RePb(target=0.3),
    "ucb": thresher.Ucb(every=2),
    "rcap": thresher.Rcap(),
    "rs2": thresher.Rs2(keep=0.6),
    "winnow": thresher.Winnow(share=0.3, least_agreement=-1),
}

SB = thresher.SelectiveBackprop
BATCH = {
    "once": (SB(keep=0.4), {"forward_passes": "once"}),
    "once, beta": (SB(beta=1.0, history=50), {"forward_passes": "once"}),
    "auto": (SB(keep=0.4), {}),
    "twice": (SB(keep=0.4), {"forward_passes": "twice"}),
    "twice, beta": (SB(beta=1.0, history=50), {"forward_passes": "twice"}),
    "stale": (SB(keep=0.4), {"forward_passes": thresher.Scoring(every_epochs=2)}),
    "random": (thresher.RandomBackprop(keep=0.4), {}),
    "random, filled": (thresher.RandomBackprop(keep=0.4), {"forward_passes": "twice"}),
    "infobatch": ([thresher.InfoBatch(), SB(keep=0.5)], {"forward_passes": "twice"}),
    "kakurenbo": (
        [thresher.Kakurenbo(max_fraction=0.5, tau=0.3), SB(beta=1.0)],
        {"forward_passes": "once"},
    ),
}


def generator():
    return torch.Generator().manual_seed(11)


class Shuffled(Sampler):
    """A sampler that draws from Python's generator."""

    def __iter__(self):
        order = list(range(N))
        random.shuffle(order)
        return iter(order)

    def __len__(self):
        return N


LOADERS = {
    "shuffle": lambda data: DataLoader(data, B, shuffle=True),
    "computed": lambda data: DataLoader(data, B, sampler=thresher.Shuffle(data)),
    "in order": lambda data: DataLoader(data, B),
    "own generator": lambda data: DataLoader(data, B, shuffle=True, generator=generator()),
    "drop last": lambda data: DataLoader(data, B, shuffle=True, drop_last=True),
    "weighted": lambda data: DataLoader(
        data, B, sampler=WeightedRandomSampler(torch.arange(1.0, N + 1), N)
    ),
    "with replacement": lambda data: DataLoader(
        data, B, sampler=RandomSampler(data, replacement=True, generator=generator())
    ),
    "custom": lambda data: DataLoader(data, B, sampler=Shuffled()),
    "workers": lambda data: DataLoader(data, B, shuffle=True, num_workers=2),
    "workers, own generator": lambda data: DataLoader(
        data, B, shuffle=True, num_workers=2, generator=generator()
    ),
    "workers, with replacement": lambda data: DataLoader(
        data, B, sampler=RandomSampler(data, replacement=True, generator=generator()), num_workers=2
    ),
    "persistent workers": lambda data: DataLoader(
        data, B, shuffle=True, num_workers=2, persistent_workers=True
    ),
}


class Training:
    """Everything a checkpoint must restore."""

    def __init__(self, method, make_loader, **settings):
        norm = nn.Sequential(
            nn.Unflatten(1, (8, 2)), nn.BatchNorm1d(8), nn.Flatten()
        )  # a batch may have one sample
        self.net = nn.Sequential(
            nn.Linear(6, 16), norm, nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4)
        )
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.05, momentum=0.9)
        data = TensorDataset(
            torch.randn(N, 6, generator=torch.Generator().manual_seed(1)), torch.arange(N) % 4
        )
        self.loader = make_loader(data)
        self.run = thresher.attach(
            method,
            loader=self.loader,
            criterion=nn.CrossEntropyLoss(),
            model=self.net,
            optimizer=self.optimizer,
            epochs=EPOCHS,
            **settings,
        )
        self.scheduler = thresher.ProgressLR(self.optimizer, self.run, lambda p: 1 - p)
        self.log = []

    def train(self, *, stop=None):
        """Until all epochs are done, or until `stop` = (epoch, batches of it)."""
        while self.run.epoch < EPOCHS:
            epoch = self.run.epoch
            if stop == (epoch, 0):
                return
            for done, (x, y) in enumerate(self.run.loader, 1):
                plan = None if self.run.loader.streams else self.run.plan
                loss = self.run.criterion(self.run.model(x), y)
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.scheduler.step()
                self.log.append(
                    (epoch, self.run.ids.clone(), loss.detach().clone(), plan and plan.lr_scale)
                )
                if stop == (epoch, done):
                    return

    def save(self):
        saved = io.BytesIO()
        parts = {
            "net": self.net,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "run": self.run,
        }
        torch.save({name: part.state_dict() for name, part in parts.items()}, saved)
        return saved.getvalue()

    def load(self, saved):
        state = torch.load(io.BytesIO(saved), weights_only=True)
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.run.load_state_dict(state["run"])

    def result(self):
        run = self.run
        plan = None if run.loader.streams else run.plan
        return {
            "net": self.net.state_dict(),
            "momentum": self.optimizer.state_dict(),
            "records": dict(run.records),
            "cost": {**vars(run.cost), "backward_to_forward": None},
            "history": run.history,
            "plan": plan and [plan.ids, plan.weights, plan.refresh, plan.lr_scale],
            "trained": run.trained,
            "batch stage": run.state_dict()["ranks"][0]["batch_stage"],
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "generator": [g.get_state() for g in run.loader.generators()],
            "progress": run.progress,
        }


def compare(method, make_loader, stop, **settings):
    torch.manual_seed(0)
    random.seed(0)
    whole = Training(method, make_loader, **settings)
    whole.train()
    expected = whole.result()

    torch.manual_seed(0)
    random.seed(0)
    first = Training(method, make_loader, **settings)
    first.train(stop=stop)
    saved = first.save()
    torch.manual_seed(99)
    random.seed(99)
    second = Training(method, make_loader, **settings)
    second.load(saved)
    saved = second.save()  # what was loaded and not gone on with is saved as it was
    torch.randn(
        3
    )  # between loading and the next iter the loop may draw: it would have drawn before, too
    second.run.load_state_dict(torch.load(io.BytesIO(saved), weights_only=True)["run"])
    if stop[1]:
        assert second.run.progress == first.run.progress
    second.train()
    assert_same([*first.log, *second.log], whole.log)
    assert_same(second.result(), expected)


WITHOUT_WORKERS = [(name, "shuffle", stop) for name in METHODS for stop in [(3, 0), (3, 3)]]
WITH_WORKERS = depth(
    [(name, "workers", (3, 3)) for name in ("kakurenbo, official",)],
    [(name, "workers", stop) for name in METHODS for stop in [(3, 0), (3, 3)]],
)


@pytest.mark.parametrize(("method", "workers", "stop"), [*WITHOUT_WORKERS, *WITH_WORKERS])
def test_methods(method, workers, stop):
    compare(METHODS[method], LOADERS[workers], stop)


SEEN_WITH_WORKERS = ("workers", "workers, own generator")  # by the tests above and below


@pytest.mark.parametrize(
    "name", depth([name for name in LOADERS if name not in SEEN_WITH_WORKERS], LOADERS)
)
def test_loaders(name):
    compare(METHODS["kakurenbo"], LOADERS[name], (3, 3))


@pytest.mark.filterwarnings("ignore:.*but before the end of the loop over run.loader")
@pytest.mark.parametrize("name", ["own generator", "shuffle"])
@pytest.mark.parametrize("batch", [1, 6, 7, 8])
def test_every_place_of_an_epoch(name, batch):
    compare(METHODS["full"], LOADERS[name], (2, batch))


def test_between_epochs_with_persistent_workers():
    """The workers of the first training were running when the next epoch began, and drew no seed."""
    loader = partial(DataLoader, batch_size=B, shuffle=True, num_workers=1, persistent_workers=True)
    compare(METHODS["infobatch"], lambda data: loader(data, generator=generator()), (1, 0))


@pytest.mark.parametrize("batch", depth([7], [1, 7]))
def test_every_place_of_an_epoch_with_workers(batch):
    compare(METHODS["infobatch"], LOADERS["workers, own generator"], (2, batch))


def test_an_interrupted_epoch_keeps_what_the_plan_was_made_from():
    """The records have moved on since the plan of the epoch in progress was made: the plan is saved, not made again."""
    training = Training(METHODS["kakurenbo"], LOADERS["shuffle"])
    training.train(stop=(3, 3))
    before = training.run.plan
    other = Training(METHODS["kakurenbo"], LOADERS["shuffle"])
    other.load(training.save())
    assert torch.equal(other.run.plan.ids, before.ids)
    assert other.run.epoch == 3
    assert other.run.progress == training.run.progress


def test_states_of_another_method_or_n_are_refused():
    state = Training(METHODS["kakurenbo"], LOADERS["shuffle"]).run.state_dict()
    other = Training(METHODS["infobatch"], LOADERS["shuffle"]).run
    before = other.state_dict()
    with pytest.raises(ValueError, match="'kakurenbo'.*'infobatch'"):
        other.load_state_dict(state)
    same = Training(METHODS["kakurenbo"], LOADERS["shuffle"]).run
    with pytest.raises(ValueError, match="17 samples.*60"):
        same.load_state_dict(changed(state, n=17))
    with pytest.raises(ValueError, match="version 0.*version 12"):
        same.load_state_dict({**state, "version": 0})
    with pytest.raises(
        ValueError, match="version 7.*version 12.*the version of thresher that saved it"
    ):
        same.load_state_dict({**state, "version": 7})
    with pytest.raises(ValueError, match=r"columns \{'loss'"):
        same.load_state_dict(signed({**state, "records": {"loss": state["records"]["loss"]}}))
    with pytest.warns(UserWarning, match="saved with"):
        same.load_state_dict(changed(state, settings="Kakurenbo(max_fraction=0.1)"))
    assert_same(other.state_dict()["records"], before["records"])


def test_without_restoring_random_states():
    training = Training(METHODS["full"], LOADERS["shuffle"])
    training.train(stop=(1, 0))
    state = training.run.state_dict()
    torch.manual_seed(123)
    before = torch.get_rng_state()
    training.run.load_state_dict(state, restore_rng=False)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_batch_that_was_not_credited_is_warned_about():
    training = Training(METHODS["full"], LOADERS["shuffle"])
    batches = iter(training.run.loader)
    x, y = next(batches)
    with pytest.warns(UserWarning, match="has not computed the loss of a batch"):
        training.run.state_dict()
    training.run.criterion(training.run.model(x), y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training.run.state_dict()


class Forgetful(Sampler):
    """A sampler with a state of its own, which no checkpoint knows."""

    def __init__(self):
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        return iter(
            torch.randperm(N, generator=torch.Generator().manual_seed(self.passes)).tolist()
        )

    def __len__(self):
        return N


def test_a_sampler_that_does_not_repeat_is_told():
    def loader(data):
        return DataLoader(data, B, sampler=Forgetful())

    training = Training(METHODS["full"], loader)
    training.train(stop=(2, 3))
    other = Training(METHODS["full"], loader)
    other.load(training.save())
    with pytest.raises(RuntimeError, match="Forgetful did not repeat"):
        iter(other.run.loader)


# Selection in the batch


@pytest.mark.parametrize("stop", depth([(3, 2)], [(2, 0), (3, 2)]))
@pytest.mark.parametrize("name", BATCH)
def test_batch_methods(name, stop):
    method, settings = BATCH[name]
    compare(method, LOADERS["shuffle"], stop, **settings)


@pytest.mark.parametrize("name", depth(["twice, beta"], ["once, beta", "twice, beta"]))
def test_batch_methods_with_workers(name):
    method, settings = BATCH[name]
    compare(method, LOADERS["workers, own generator"], (1, 2), **settings)


@pytest.mark.filterwarnings("ignore:.*but before the end of the loop over run.loader")
@pytest.mark.parametrize(
    "loader", depth(["drop last", "computed"], ["shuffle", "computed", "drop last", "weighted"])
)
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_every_place_of_a_gathered_epoch(batch, loader):
    """24 of 60 rows make three batches of eight: rows wait after the first two, none after the last."""
    compare(SB(keep=0.4), LOADERS[loader], (1, batch), forward_passes="twice")


def test_rows_wait_where_an_epoch_is_interrupted():
    """So that the tests above are about something."""
    training = Training(SB(keep=0.75), LOADERS["shuffle"], forward_passes="twice")
    training.train(stop=(1, 1))
    (own,) = training.run.state_dict()["ranks"]
    assert len(own["waiting"]["ids"]) == 4
    other = Training(SB(keep=0.75), LOADERS["shuffle"], forward_passes="twice")
    other.load(training.save())
    assert_same(other.run.state_dict()["ranks"][0]["waiting"], own["waiting"])


class Stream(IterableDataset):
    """Samples in an order of their own; each worker reads its part."""

    def __init__(self):
        self.x = torch.randn(N, 6, generator=torch.Generator().manual_seed(1))

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        begin, step = (0, 1) if info is None else (info.id, info.num_workers)
        return ((self.x[i], torch.tensor(i % 4)) for i in range(begin, N, step))


class Known(Stream):
    def __len__(self):
        return N


@pytest.mark.parametrize("stop", [(2, 0), (0, 1), (2, 2)])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("once, beta", Stream),
        ("twice", Stream),
        ("twice, beta", Known),
        ("random", Stream),
        ("random, filled", Known),
    ],
)
def test_streams(name, kind, stop):
    method, settings = BATCH[name]
    compare(method, lambda _: DataLoader(kind(), B), stop, **settings)


def test_streams_with_workers():
    compare(
        BATCH["twice, beta"][0],
        lambda _: DataLoader(Stream(), B, num_workers=2),
        (1, 2),
        forward_passes="twice",
    )


@pytest.mark.parametrize("stop", [(2, 0), (0, 1), (2, 2), (1, 7)])
@pytest.mark.parametrize(("kind", "workers"), [(Stream, 0), (Known, 0), *depth([], [(Stream, 2)])])
def test_streams_at_a_share(kind, workers, stop):
    compare(0.3, lambda _: DataLoader(kind(), B, num_workers=workers), stop)


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_every_place_of_a_gathered_stream(batch):
    compare(SB(keep=0.4), lambda _: DataLoader(Stream(), B), (1, batch), forward_passes="twice")


def test_loading_into_a_run_in_use():
    """Losses that were not written yet belong to what was, and rows that waited do too."""
    first = Training(SB(keep=0.4), LOADERS["shuffle"], forward_passes="twice")
    first.train(stop=(1, 1))
    used = copy.deepcopy(first.save())
    expected = torch.load(io.BytesIO(used), weights_only=True)["run"]
    with pytest.warns(UserWarning, match="continues within epoch 1"):
        first.train(stop=(1, 2))
    x, y = next(iter(first.run.loader))
    first.run.criterion(first.run.model(x), y)
    first.load(used)
    state = first.run.state_dict()
    for saved in (state, expected):
        saved["ranks"][0]["cost"]["backward_to_forward"] = 0  # a measured time
        del saved["ranks"][0]["rng"], saved["digest"]
    assert_same(state, expected)


@pytest.mark.parametrize(
    ("saved", "loaded", "message"),
    [
        ("twice", "once", "forward_passes='twice', but this run has 'once'"),
        ("once", "twice", "forward_passes='once', but this run has 'twice'"),
        ("once", "stale", "forward_passes='once', but this run has 'twice'"),
        ("random, filled", "random", "forward_passes='twice', but this run has 'once'"),
        ("random", "random, filled", "forward_passes='once', but this run has 'twice'"),
        ("random", "once", "'random_backprop', but this run has 'selective_backprop'"),
        (
            "once",
            "infobatch",
            r"'selective_backprop', but this run has 'infobatch\+selective_backprop'",
        ),
        (
            "kakurenbo",
            "once",
            r"'kakurenbo\+selective_backprop', but this run has 'selective_backprop'",
        ),
    ],
)
def test_states_of_another_batch_method_are_refused(saved, loaded, message):
    runs = []
    for name in (saved, loaded):
        method, settings = BATCH[name]
        runs.append(Training(method, LOADERS["shuffle"], **settings).run)
    before = runs[1].state_dict()
    with pytest.raises(ValueError, match=message):
        runs[1].load_state_dict(runs[0].state_dict())
    assert_same({**runs[1].state_dict(), "rng": 0}, {**before, "rng": 0})


def test_other_settings_of_the_same_method_are_said():
    state = Training(SB(keep=0.4), LOADERS["shuffle"], forward_passes="once").run.state_dict()
    other = Training(SB(keep=0.3), LOADERS["shuffle"], forward_passes="once").run
    with pytest.warns(UserWarning, match=r"saved with .*keep=0.4.*this run has .*keep=0.3"):
        other.load_state_dict(state)
