"""Several batches before their losses, as in accumulation by Transformers: `ids=` is right or refused, never wrong."""

import itertools
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

import thresher
from depth import depth
from thresher import AttributionError
from thresher.records import NEVER_SEEN

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*got no loss in an epoch:UserWarning",
    "ignore:.*the SGD of the run made no step:UserWarning",
)
N, B = 22, 4


class Indexed(Dataset):
    """Samples whose loss is their id, or near it; the index is beside them."""

    def __len__(self):
        return N

    def __getitem__(self, i):
        return torch.tensor([float(i), 1.0]), torch.tensor(i % 3), i


def randomising(samples):
    """As a collate function that masks random tokens."""
    x, y, i = default_collate(samples)
    return x + 0.25 * (torch.rand(len(x), 1) < 0.5), y, i


def mixing(samples):
    x, y, i = default_collate(samples)
    return 0.7 * x + 0.3 * x[torch.randperm(len(x))], y, i


COLLATES = {"plain": None, "randomising": randomising, "mixing": mixing}


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x[:, :1] * self.one


def hot(y):
    return F.one_hot(y, 3).float()


CALLS = {
    "criterion": lambda run, net, x, y, ids: run.criterion(run.model(x), y, ids=ids),
    "new targets": lambda run, net, x, y, ids: run.criterion(run.model(x), hot(y), ids=ids),
    "reduce": lambda run, net, x, y, ids: run.reduce(run.model(x)[:, 0] * 1.0, ids=ids),
    "of both": lambda run, net, x, y, ids: run.reduce(
        run.model(x)[:, 0] * 1.0, ids=ids, outputs=x, targets=y
    ),
    "model itself": lambda run, net, x, y, ids: run.criterion(net(x), y, ids=ids),
    "new inputs": lambda run, net, x, y, ids: run.criterion(run.model(x * 1.0), hot(y), ids=ids),
    "nothing beside": lambda run, net, x, y, ids: run.reduce(net(x)[:, 0] * 1.0, ids=ids),
}
"""Ways to call; of the last two, no tensor shows the batch."""
SHOWN = [name for name in CALLS if name not in ("new inputs", "nothing beside")]


class Loop:
    """A training that knows the loss of each sample, and counts what was refused."""

    def __init__(self, collate, call):
        torch.manual_seed(0)
        self.net, self.call = First(), CALLS[call]
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.0)
        self.run = thresher.attach(
            thresher.FullData(),
            loader=DataLoader(Indexed(), B, shuffle=True, collate_fn=COLLATES[collate]),
            criterion=lambda outputs, targets: outputs[:, 0],
            model=self.net,
            optimizer=self.optimizer,
            epochs=2,
        )
        self.expected = torch.full((N,), NEVER_SEEN)
        self.refused = []

    def loss(self, batch, ids):
        x, y, index = batch
        try:
            self.call(self.run, self.net, x, y, ids).backward()
        except AttributionError as error:
            self.refused.append(str(error))
        else:
            self.expected[index] = x[:, 0]

    def check(self):
        assert torch.equal(self.run.records["loss"], self.expected)
        assert all("run.ids_of(tensor)" in message for message in self.refused)
        return len(self.refused)


def indexed(ids):
    return ids[torch.arange(len(ids))]


GROUPS = [*itertools.product(COLLATES, [1, 2, 3])]
ACCUMULATED = [("plain", 1, 3), ("randomising", 2, 3), ("mixing", 3, 3)]


@pytest.mark.parametrize(
    ("collate", "ahead", "accumulated"),
    [*((*group, None) for group in GROUPS), *depth(ACCUMULATED, [(*group, 3) for group in GROUPS])],
)
def test_groups_of_batches(collate, ahead, accumulated):
    """With a step after each group, or after so many batches, wherever their group ends."""
    ways = [*itertools.product([False, True], [lambda ids: ids, indexed])]
    quick = ways[1:3] if accumulated is None else ways[1:2]
    for call, (reverse, change) in itertools.product(CALLS, depth(quick, ways)):
        for asks in (False, True):
            loop = Loop(collate, call)
            iterator, numbers = iter(loop.run.loader), itertools.count(1)
            while group := list(itertools.islice(iterator, ahead)):
                for batch in reversed(group) if reverse else group:
                    loop.loss(batch, change(loop.run.ids_of(batch[0]) if asks else loop.run.ids))
                    if accumulated is not None and next(numbers) % accumulated == 0:
                        loop.optimizer.step()
                if accumulated is None:
                    loop.optimizer.step()
            of_others = (
                0 if asks else sum(min(ahead, 6 - first) - 1 for first in range(0, 6, ahead))
            )
            refused = loop.check()
            if call in SHOWN or asks or ahead == 1:
                assert refused == of_others  # all but the last of each group
            else:
                assert of_others <= refused <= 6  # it may be of another batch that waits


@settings(max_examples=depth(40, 3000), deadline=None)
@given(st.data())
def test_batches_and_ids_in_any_order(data):
    """Some ids are of the latest batch, some of the right one and, where a tensor shows it, some of a wrong one."""
    call = data.draw(st.sampled_from([*CALLS]))
    loop, waiting = Loop(data.draw(st.sampled_from([*COLLATES])), call), []
    iterator, ahead = iter(loop.run.loader), data.draw(st.integers(1, 4))
    while True:
        waiting += itertools.islice(iterator, max(0, ahead - len(waiting)))
        if not waiting:
            break
        batch = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
        what = data.draw(st.sampled_from(["latest", "right", "right", "skip", "wrong"]))
        if what == "skip":
            continue
        other = (
            data.draw(st.sampled_from(waiting))
            if what == "wrong" and call in SHOWN and waiting
            else batch
        )
        ids = loop.run.ids if what == "latest" else loop.run.ids_of(other[1])
        loop.loss(batch, indexed(ids) if data.draw(st.booleans()) else ids)
        if data.draw(st.booleans()):
            loop.optimizer.step()
    loop.check()


@pytest.mark.parametrize("call", ["reduce", "new inputs"])
def test_a_loss_counts_for_its_own_batch(call):
    """And not for one that the loop asked for before: that one still waits, and its loss is right when it comes."""
    loop = Loop("mixing", call)
    first, second, *others, latest = loop.run.loader
    loop.run.ids_of(first[1])
    loop.loss(second, indexed(loop.run.ids_of(second[1])))
    loop.optimizer.step()
    for batch in (first, *others, latest):
        loop.loss(batch, indexed(loop.run.ids_of(batch[1])))
        loop.optimizer.step()
    assert loop.check() == 0 and loop.run.trained.tolist() == [1] * N


def test_ids_of_a_waiting_batch_are_not_those_of_a_batch_that_was_let_go():
    loop = Loop("plain", "reduce")
    iterator = iter(loop.run.loader)
    gone = next(iterator)
    outputs = loop.run.model(gone[0])
    loop.run.reduce(outputs[:, 0] * 1.0, ids=loop.run.ids).backward()
    loop.optimizer.step()
    x = [next(iterator) for _ in range(4)][1][0]
    with pytest.raises(
        AttributionError, match=r"not of the batch of an earlier step.*run.ids_of\(tensor\)"
    ):
        loop.run.reduce(loop.run.model(gone[0])[:, 0] * 2.0, ids=indexed(loop.run.ids_of(x)))


def test_a_loss_of_two_batches_is_of_the_ids_of_both():
    loop = Loop("mixing", "reduce")
    (x, y, i), (x2, y2, i2), *_ = loop.run.loader
    losses = torch.cat([loop.run.model(x)[:, 0] * 2, loop.run.model(x2)[:, 0] * 2])
    with pytest.raises(
        AttributionError, match="not of batch 0 or batch 1, from which outputs or targets come"
    ):
        loop.run.reduce(losses, ids=torch.cat([loop.run.ids_of(x), loop.run.ids[:B]]))
    loop.run.reduce(losses, ids=torch.cat([loop.run.ids_of(x), loop.run.ids_of(x2)]))
    assert loop.run.records["loss"].isfinite().sum() == 2 * B


def test_what_is_refused_forgets_no_loss_of_another_batch():
    """The memory of outputs that are gone is used again by those of the refused call."""
    loop = Loop("plain", "model itself")
    *batches, last = loop.run.loader
    for batch in batches:
        loop.loss(batch, loop.run.ids_of(batch[1]))
        loop.loss(last, loop.run.ids_of(batch[1]))
    assert loop.check() == len(batches)


@dataclass(frozen=True)
class Weighted:
    """Keeps all rows, and weighs them by their ids."""

    stage = "batch"
    requires = thresher.Requirements(signals=("loss",))

    def init_state(self):
        return {}

    def count(self, n):
        return n

    def plan_batch(self, signals, state, *, step, generator):
        return thresher.BatchPlan(
            torch.arange(len(signals["id"])), weights=1.0 + signals["id"].float()
        ), state


@pytest.mark.parametrize("change", [indexed, lambda ids: ids])
def test_weights_of_rows_are_those_of_older_batches_too(change):
    net = First()
    run = thresher.attach(
        Weighted(),
        loader=DataLoader(Indexed(), B, shuffle=True),
        criterion=lambda outputs, targets: outputs[:, 0],
        model=net,
        epochs=1,
        forward_passes="twice",
        forward=lambda model, batch: (model(batch[0]), batch[1]),
    )
    batches = list(itertools.islice(run.loader, 4))
    for x, _, index in batches:
        value = run.reduce(net(x)[:, 0], ids=change(run.ids_of(x)))
        torch.testing.assert_close(value, (x[:, 0] * (1.0 + index)).mean())
