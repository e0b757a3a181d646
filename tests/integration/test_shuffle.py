"""A run over a `Shuffle`: the order of the loop without a run, less what the plan leaves out, gone on with at any place."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import thresher
from depth import depth
from helpers import assert_same, changed
from thresher import Shuffle, rng
from thresher.permutation import Permutation

N, B = 50, 4
CPU = torch.device("cpu")


def order(epoch, n=N, seed=0):
    return Permutation(n, seed, epoch).piece(0, n).tolist()


class Noisy(Dataset):
    """Draws from all global random states, as an augmentation does."""

    def __len__(self):
        return N

    def __getitem__(self, i):
        noise = random.random() + float(np.random.rand()) + torch.rand(())
        return torch.tensor([float(i), float(i % 7)]) + 0.1 * noise, torch.tensor(i % 3)


class Training:
    """A loop that names its epochs or not, with a run or without."""

    def __init__(self, method=None, *, data=None, shuffle=None, attached=True, **settings):
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.2), nn.Linear(8, 3))
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1, momentum=0.9)
        data = Noisy() if data is None else data
        self.shuffle = Shuffle(data, seed=5) if shuffle is None else shuffle
        loader, self.run = DataLoader(data, B, sampler=self.shuffle, **settings), None
        self.loader, self.call, self.criterion = loader, self.net, nn.CrossEntropyLoss()
        if attached:
            self.run = thresher.attach(
                method or thresher.FullData(),
                loader=loader,
                criterion=self.criterion,
                model=self.net,
                optimizer=self.optimizer,
                epochs=6,
            )
            self.loader, self.call, self.criterion = (
                self.run.loader,
                self.run.model,
                self.run.criterion,
            )
        self.log = []

    def epoch(self, *, batches=None):
        """Trains an epoch, or so many batches of it."""
        for done, (x, y) in enumerate(self.loader, 1):
            loss = self.criterion(self.call(x), y)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.log.append((loss.detach(), None if self.run is None else self.run.ids))
            if done == batches:
                break

    def ids(self):
        return [i for _, ids in self.log for i in ids.tolist()]

    def result(self):
        return {
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "losses": [loss for loss, _ in self.log],
            "rng": rng.capture(CPU),
            "epoch": self.shuffle.epoch,
        }


PLAIN = [{}, {"drop_last": True}, {"generator": True}]
WORKERS = [{"num_workers": 2, **settings} for settings in ({"persistent_workers": True}, *PLAIN)]


@pytest.mark.parametrize("settings", PLAIN + depth(WORKERS[:1], WORKERS), ids=str)
def test_full_data_is_the_loop_without_a_run(settings):
    made = []
    for attached in (False, True):
        own = {"generator": torch.Generator().manual_seed(9)} if "generator" in settings else {}
        training = Training(attached=attached, **{**settings, **own})
        training.epoch()
        training.epoch(batches=5)
        training.shuffle.set_epoch(7)
        training.epoch()
        training.epoch()
        made.append((training.result(), own and own["generator"].get_state()))
        if attached:
            assert (
                training.ids()[: training.run.loader.candidates]
                == order(0, seed=5)[: training.run.loader.candidates]
            )
    assert_same(made[1], made[0])
    assert made[0][0]["epoch"] == 9


def test_the_plan_leaves_samples_out_of_the_order():
    training = Training(thresher.UniformSubset(keep=0.6))
    for epoch in range(3):
        training.log.clear()
        kept = set(training.run.plan.ids.tolist())
        assert len(training.run.loader) == len(kept) // B + bool(len(kept) % B)
        training.epoch()
        assert training.ids() == [i for i in order(epoch, seed=5) if i in kept]


DATA = TensorDataset(
    torch.randn(N, 2, generator=torch.Generator().manual_seed(1)), torch.arange(N) % 3
)
PLANS = {
    "full": thresher.FullData(),
    "uniform": thresher.UniformSubset(keep=0.6),
    "infobatch": thresher.InfoBatch(),
    "kakurenbo": thresher.Kakurenbo(max_fraction=0.5, tau=0.3),
    "winnow": thresher.Winnow(share=0.4),
}


def resumed(method, stop, *, mid=0, **settings):
    """Trains four epochs, once without and once with an interruption after `stop` = (epochs, batches)."""

    def make():
        return Training(method, data=DATA, **settings)

    whole = make()
    for _ in range(4):
        whole.epoch()
    first = make()
    for _ in range(stop[0]):
        first.epoch()
    if stop[1]:
        first.epoch(batches=stop[1])
    state = copy.deepcopy(first.run.state_dict())
    parts = copy.deepcopy((first.net.state_dict(), first.optimizer.state_dict()))
    second = make()
    for _ in range(mid):
        next(iter(second.loader))  # a run in use, whose sampler has counted
    second.net.load_state_dict(parts[0])
    second.optimizer.load_state_dict(parts[1])
    second.run.load_state_dict(state)
    assert_same(changed(second.run.state_dict(), rng=0), changed(state, rng=0))
    second.log = first.log
    while second.run.epoch < 4:
        second.epoch()
    assert_same([ids for _, ids in second.log], [ids for _, ids in whole.log])
    assert_same(second.result(), whole.result())
    assert_same(
        *(
            changed(run.state_dict(), cost=0, rng=0, epoch_start=0)
            for run in (second.run, whole.run)
        )
    )


OTHER_LOADERS = (
    {"num_workers": 2},
    {"drop_last": True},
    {"num_workers": 1, "persistent_workers": True},
)
EVERY_LOADER = [(method, number) for method in PLANS for number in range(3)]
quiet = pytest.mark.filterwarnings(
    "ignore:.*but before the end of the loop over run.loader",
    "ignore:Loss and uncertainty",
    "ignore:.*two forward",
)


@quiet
@pytest.mark.parametrize("stop", [(0, 1), (2, 0), (2, 3), (2, 5)])
@pytest.mark.parametrize("method", PLANS)
def test_a_run_goes_on_where_it_was_interrupted(method, stop):
    resumed(PLANS[method], stop)


@quiet
@pytest.mark.parametrize(("method", "last"), [("full", 13), ("uniform", 8), ("winnow", 13)])
def test_a_run_goes_on_after_the_last_batch(method, last):
    resumed(PLANS[method], (1, last))


@quiet
@pytest.mark.parametrize(
    ("method", "settings"), depth([("uniform", 0), ("winnow", 1), ("infobatch", 2)], EVERY_LOADER)
)
def test_a_run_goes_on_with_other_loaders(method, settings):
    settings = OTHER_LOADERS[settings]
    resumed(PLANS[method], (1, 2), mid=1, **settings)


@quiet
@pytest.mark.parametrize(
    "methods",
    [
        [thresher.InfoBatch(), thresher.SelectiveBackprop(keep=0.5)],
        thresher.ImportanceSampling(losses="last"),
    ],
    ids=["in the batch", "drawn"],
)
def test_a_run_of_other_kinds_goes_on(methods):
    resumed(methods, (2, 2))


def test_a_broken_epoch_and_a_look_take_an_order_as_without_a_run():
    training = Training()
    next(iter(training.loader))
    training.epoch(batches=2)
    training.log.clear()
    training.epoch()
    assert training.ids() == order(2, seed=5) and training.run.epoch == 2


@pytest.mark.filterwarnings("ignore:.*has not computed the loss of a batch")
def test_an_evaluation_of_the_rest_of_an_epoch_is_taken_back():
    first = Training(thresher.UniformSubset(keep=0.6), data=DATA)
    first.epoch(batches=3)
    kept = set(first.run.plan.ids.tolist())
    second = Training(thresher.UniformSubset(keep=0.6), data=DATA)
    second.run.load_state_dict(first.run.state_dict())
    rest = [i for i in order(0, seed=5) if i in kept][3 * B :]
    with torch.no_grad(), pytest.warns(UserWarning, match="does not count as an epoch"):
        for x, _ in second.loader:
            second.call(x)
    assert second.run.state_dict()["ranks"][0]["rows"] == 3 * B
    second.epoch()
    assert second.ids() == rest and second.run.epoch == 1
    second.log.clear()
    second.shuffle.set_epoch(1)
    kept = set(second.run.plan.ids.tolist())
    second.epoch()
    assert second.ids() == [i for i in order(1, seed=5) if i in kept]


def test_a_state_from_before_the_first_batch():
    """Workers have begun an order of which the loop has seen nothing."""
    first = Training(data=DATA, num_workers=1)
    first.epoch()
    unseen = iter(first.loader)
    assert first.shuffle.epoch == 2
    second = Training(data=DATA)
    second.run.load_state_dict(first.run.state_dict())
    del unseen
    second.epoch()
    assert second.ids() == order(1, seed=5)


def test_a_drawn_epoch_takes_no_order():
    first = Training(thresher.ImportanceSampling(losses="last"), data=DATA)
    first.epoch()
    first.epoch()
    assert first.shuffle.epoch == 1
    unseen = iter(first.loader)
    second = Training(thresher.ImportanceSampling(losses="last"), data=DATA)
    second.run.load_state_dict(first.run.state_dict())
    assert second.shuffle.epoch == 1
    del unseen


class Damaged(TensorDataset):
    bad = None

    def __getitem__(self, i):
        if i == self.bad:
            raise OSError("cannot be read")
        return super().__getitem__(i)

    __getitems__ = None


def train_on_what_can_be_read(training, batches=None):
    """Returns how many batches could not be read."""
    failed, done, passes = 0, 0, iter(training.loader)
    while done != batches:
        try:
            x, y = next(passes)
        except OSError:
            failed += 1
        except StopIteration:
            break
        else:
            training.criterion(training.call(x), y).backward()
            training.optimizer.step()
            training.log.append((None, training.run.ids))
            done += 1
    return failed


@pytest.mark.parametrize("method", ["full", "uniform"])
def test_a_batch_that_cannot_be_read_is_left_behind(method):
    data = Damaged(*DATA.tensors)
    sound, whole, first, second = (Training(PLANS[method], data=data) for _ in range(4))
    sound.epoch(batches=2)
    data.bad = sound.ids()[-1]
    train_on_what_can_be_read(whole)
    failed = train_on_what_can_be_read(first, 4)
    second.run.load_state_dict(first.run.state_dict())
    second.log = first.log
    failed += train_on_what_can_be_read(second)
    assert second.ids() == whole.ids() and failed == 1


def interrupted(method="uniform", **settings):
    training = Training(PLANS[method], data=DATA, **settings)
    training.epoch()
    training.epoch(batches=2)
    return training.run.state_dict()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Training(PLANS["uniform"], data=DATA, shuffle=Shuffle(DATA, seed=6)),
            r"in the middle of an epoch by a loader with Shuffle\(seed=5\) over 50 samples, but this one has Shuffle\(seed=6\)",
        ),
        (
            lambda: Training(PLANS["uniform"], data=DATA, shuffle=list(range(N))),
            "this one has another sampler",
        ),
    ],
)
def test_another_order_is_refused_in_the_middle_of_an_epoch(make, message):
    state, other = interrupted(), make()
    before = other.run.state_dict()
    with pytest.raises(ValueError, match=message):
        other.run.load_state_dict(state)
    assert_same(other.run.state_dict(), before)


def test_another_order_between_epochs():
    state = Training(data=DATA).run.state_dict()
    other = Training(data=DATA, shuffle=Shuffle(DATA, seed=6))
    with pytest.warns(
        UserWarning, match=r"by a loader with Shuffle\(seed=5\).*this one has Shuffle\(seed=6\)"
    ):
        other.run.load_state_dict(state)
    Training(data=DATA, shuffle=list(range(N))).run.load_state_dict(state)
    plain = Training(data=DATA, shuffle=list(range(N))).run.state_dict()
    assert plain["ranks"][0]["shuffle"] is None
    other.shuffle.set_epoch(4)
    other.run.load_state_dict(plain)
    assert other.shuffle.epoch == 4


def test_a_state_of_another_sampler_is_refused_within_an_epoch():
    state, training = changed(interrupted(), shuffle=None), Training(PLANS["uniform"], data=DATA)
    before = training.run.state_dict()
    with pytest.raises(
        ValueError, match="by a loader with another sampler, but this one has Shuffle"
    ):
        training.run.load_state_dict(state)
    assert_same(training.run.state_dict(), before)


def test_another_epoch_in_the_middle_of_one_is_refused():
    training = Training(PLANS["uniform"], data=DATA)
    training.run.load_state_dict(interrupted())
    training.shuffle.set_epoch(4)
    with pytest.raises(
        RuntimeError,
        match="epoch 1 of its Shuffle, but the sampler is now set to epoch 4. Load the state again",
    ):
        iter(training.loader)
    training.run.load_state_dict(interrupted())
    training.shuffle.set_epoch(1)
    training.epoch()
    training.log.clear()
    kept = set(training.run.plan.ids.tolist())
    training.epoch()
    assert training.ids() == [i for i in order(2, seed=5) if i in kept]


def test_a_run_does_not_begin_in_the_middle_by_set_epoch():
    training = Training()
    training.shuffle.set_epoch(1, consumed=8)
    with pytest.raises(
        ValueError, match=r"consumed=8, which is for loaders without a run.*Load run.state_dict\(\)"
    ):
        training.epoch()


def test_samplers_of_other_sizes():
    for size in (20, 51):
        with pytest.raises(
            ValueError,
            match=f"Shuffle is made for {size} samples, but the dataset of the loader has 50",
        ):
            Training(shuffle=Shuffle(range(size)))


def test_processes_that_share_the_ids_are_refused():
    with pytest.raises(
        ValueError,
        match="a Shuffle for 2 processes, but there is no process group of several processes",
    ):
        Training(shuffle=Shuffle(range(N), num_replicas=2, rank=0))
    Training(shuffle=Shuffle(range(N), num_replicas=1, rank=0)).epoch()


class Backwards(Shuffle):
    def __iter__(self):
        return iter([*super().__iter__()][::-1])


def test_a_sampler_that_is_made_of_it_is_filtered_as_it_comes():
    training = Training(PLANS["uniform"], shuffle=Backwards(range(N), seed=5))
    kept = set(training.run.plan.ids.tolist())
    training.epoch()
    assert training.ids() == [i for i in order(0, seed=5)[::-1] if i in kept]
