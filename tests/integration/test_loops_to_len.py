"""Loops that stop at `len(run.loader)` equal loops that exhaust it, bit for bit: records, history, state, random numbers."""

import io
import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import thresher
from depth import depth
from helpers import assert_same

N, C, EPOCHS = 40, 4, 3
SB = thresher.SelectiveBackprop(keep=0.5)
HIDING = thresher.Kakurenbo(max_fraction=0.25, tau=0.0, move_back=False, reduce_fraction=False)
METHODS = {
    "refresh": (HIDING, {}),
    "weights": (thresher.InfoBatch(), {}),
    "once": ([HIDING, SB], {"forward_passes": "once"}),
    "twice": ([HIDING, SB], {"forward_passes": "twice"}),
    "no losses": (thresher.RandomBackprop(keep=0.5), {"forward_passes": "twice"}),
    "smaller batches": (thresher.Winnow(0.5), {}),
}
MEASURED = "backward_to_forward"
SIZES = [(8, False), (3, True), (5, True), (7, True)]
"""Batch sizes, and whether a last batch that is not full is dropped. With 3, 39 candidates give 13 rows, and 12 are trained."""


def until_exhausted(run):
    yield from run.loader


def counted(run):
    for _, batch in zip(range(len(run.loader)), run.loader, strict=False):
        yield batch


def sliced(run):
    yield from itertools.islice(run.loader, len(run.loader))


def broken(run):
    last = len(run.loader)
    for number, batch in enumerate(run.loader, 1):
        yield batch
        if number == last:
            break


def held(run):
    batches = iter(run.loader)
    for _ in range(len(run.loader)):
        yield next(batches)


LOOPS = {"zip": counted, "islice": sliced, "break": broken, "next": held}


class Augmented(Dataset):
    """Samples that are drawn anew whenever they are read."""

    def __len__(self):
        return N

    def __getitem__(self, i):
        return torch.randn(6, generator=torch.Generator().manual_seed(i)) + 0.1 * torch.randn(
            6
        ), i % C


class Training:
    def __init__(self, name, size=8, drop_last=False, workers=0):
        torch.manual_seed(0)
        method, settings = METHODS[name]
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, C))
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1)
        self.run = thresher.attach(
            method,
            loader=DataLoader(
                Augmented(), size, shuffle=True, drop_last=drop_last, num_workers=workers
            ),
            criterion=nn.CrossEntropyLoss(),
            model=self.net,
            optimizer=self.optimizer,
            epochs=EPOCHS,
            **settings,
        )

    def step(self, batch):
        x, y = batch
        self.run.criterion(self.run.model(x), y).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def epoch(self, loop):
        for batch in loop(self.run):
            self.step(batch)

    def seen(self):
        """All that remains of the training; `ran_out` is whether the loop has asked for a further batch."""
        state = self.run.state_dict()
        (own,) = state["ranks"]
        del own["ran_out"], own["cost"][MEASURED], state["digest"]
        saved = io.BytesIO()
        torch.save(
            {"run": state, "net": self.net.state_dict(), "random": torch.get_rng_state()}, saved
        )
        saved.seek(0)
        cost = {name: value for name, value in vars(self.run.cost).items() if name != MEASURED}
        return torch.load(saved) | {
            "cost": cost,
            "history": self.run.history[:],
            "trained": self.run.trained.clone(),
        }


def trained(loop, *settings):
    training, found = Training(*settings), []
    for epoch in range(EPOCHS):
        training.epoch(loop)
        found.append(training.seen())
        assert training.run.epoch == epoch + 1
        assert training.run.history[-1]["complete"]
    return found


@pytest.mark.parametrize(
    ("name", "size"),
    depth(
        [
            ("refresh", SIZES[0]),
            ("weights", SIZES[3]),
            ("once", SIZES[0]),
            ("twice", SIZES[0]),
            ("twice", SIZES[1]),
        ],
        [*itertools.product(METHODS, SIZES)],
    ),
)
def test_without_workers(name, size):
    expected = trained(until_exhausted, name, *size)
    for loop in depth(["islice", "next"], [*LOOPS]):
        assert_same(trained(LOOPS[loop], name, *size), expected)


@pytest.mark.parametrize(
    ("name", "size", "loops"),
    depth(
        [("once", SIZES[0], ["islice"]), ("twice", SIZES[1], ["next"])],
        [*itertools.product(METHODS, SIZES[:2], [[*LOOPS]])],
    ),
)
def test_with_workers(name, size, loops):
    expected = trained(until_exhausted, name, *size, 2)
    for loop in loops:
        assert_same(trained(LOOPS[loop], name, *size, 2), expected)


def test_candidates_that_make_no_further_batch_are_not_scored():
    """13 candidate batches give one row each: the last row makes no batch of three, and 36 candidates are enough."""
    training = Training("twice", 3, True)
    training.epoch(until_exhausted)
    cost = training.run.cost
    assert (cost.scoring, cost.backward, cost.full_forward) == (36, 12, 39)


@pytest.mark.parametrize(("size", "drop_last"), depth(SIZES[:2], SIZES))
def test_resumed_at_the_last_batch(size, drop_last):
    """The rest of the epoch is empty, and costs nothing."""
    training, other = Training("twice", size, drop_last), Training("twice", size, drop_last)
    for batch in training.run.loader:
        training.step(batch)
        state, net = (
            training.run.state_dict(),
            {name: value.clone() for name, value in training.net.state_dict().items()},
        )
    for _ in range(EPOCHS - 1):
        training.epoch(until_exhausted)
    other.run.load_state_dict(state)
    other.net.load_state_dict(net)
    assert list(other.run.loader) == []
    for _ in range(EPOCHS - 1):
        other.epoch(until_exhausted)
    assert_same(other.net.state_dict(), training.net.state_dict())
    assert (other.run.cost.scoring, other.run.history) == (
        training.run.cost.scoring,
        training.run.history,
    )
