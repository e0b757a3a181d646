"""Own passes give the losses of the loop, or the run says so; they leave the buffers of the model as they are."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from thresher.passes.extra_passes import WrittenBuffers

WARNING = (
    "losses that the run computes in its own forward passes differ from the losses of the loop"
)
METHODS = {
    "hides": lambda: (thresher.Kakurenbo(adjust_lr=False), {}),
    "twice": lambda: (
        thresher.SelectiveBackprop(keep=0.5),
        {"forward_passes": thresher.Scoring(dtype=torch.float32)},
    ),
}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def attached(method, model=None, *, targets=None, step=True, **settings):
    x, y = torch.randn(48, 6) + 1, torch.arange(48) % 3
    chosen, more = METHODS[method]()
    model = model or nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(TensorDataset(x, y if targets is None else targets(y)), 8, drop_last=True)
    settings = {"criterion": nn.CrossEntropyLoss(), "epochs": 4, **more, **settings}
    run = thresher.attach(
        chosen, loader=loader, model=model, optimizer=optimizer if step else None, **settings
    )
    return run, optimizer


def train(run, optimizer, loss, epochs=3):
    for _ in range(epochs):
        for x, y in run.loader:
            optimizer.zero_grad()
            loss(run, x, y).backward()
            optimizer.step()


def plain(run, x, y):
    return run.criterion(run.model(x), y)


OTHERS = {
    "normalized": lambda run, x, y: run.criterion(run.model((x - 1) * 2), y),
    "scaled": lambda run, x, y: run.criterion(run.model(x) * 3, y),
    "added": lambda run, x, y: (lambda out: run.criterion(out, y) + run.criterion(out * 2, y))(
        run.model(x)
    ),
    "reduced": lambda run, x, y: (
        lambda out: run.reduce(
            2 * nn.functional.cross_entropy(out, y, reduction="none"), outputs=out, targets=y
        )
    )(run.model(x)),
}


@pytest.mark.parametrize("step", [True, False])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("loop", OTHERS)
def test_losses_other_than_the_loop_s_are_told_once(method, loop, step):
    run, optimizer = attached(method, step=step)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(run, optimizer, OTHERS[loop])
    told = [str(one.message) for one in said if WARNING in str(one.message)]
    assert (
        len(told) == 1
        and "8 of 8 samples" in told[0]
        and "attach(forward=lambda model, batch" in told[0]
    )


def in_place(run, x, y):
    ids = run.ids
    return run.criterion(run.model(x.sub_(1)), y, ids=ids)


@pytest.mark.parametrize("method", METHODS)
def test_batches_that_the_loop_changes_in_place_are_told_once(method):
    run, optimizer = attached(method)
    with pytest.warns(
        UserWarning,
        match="changes its batches in place .*(decides about|chooses) samples .*forward=",
    ) as told:
        train(run, optimizer, in_place)
    assert len([one for one in told if "in place" in str(one.message)]) == 1


def test_batches_that_are_changed_in_place_beside_a_forward_are_not_told():
    run, optimizer = attached("hides", forward=lambda model, batch: (model(batch[0] - 1), batch[1]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(run, optimizer, in_place)


def test_a_forward_that_does_the_same_is_silent():
    run, optimizer = attached(
        "hides", forward=lambda model, batch: (model((batch[0] - 1) * 2), batch[1])
    )
    train(run, optimizer, OTHERS["normalized"])
    assert not run._timeline.comparison.pending and run._timeline.comparison._times == 0


class Random(nn.Module):
    """Reads and writes buffers, and draws."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        self.register_buffer("queue", torch.zeros(5))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        hidden = nn.functional.dropout(self.norm(self.first(x)), 0.5, self.training) + self.queue
        self.queue.mul_(0.5).add_(hidden.detach().mean(0))
        self.count = self.count + len(x)
        return self.last(hidden)


@pytest.mark.parametrize("method", METHODS)
def test_dropout_and_buffers_are_those_of_the_loop_s_pass(method):
    """No alarm, no trace: the buffers have seen the batches of the loop alone."""
    run, optimizer = attached(method, model := Random())
    seen = []
    train(run, optimizer, lambda run, x, y: (seen.append(len(x)), plain(run, x, y))[1])
    assert run._timeline.comparison._times == 0
    assert model.count == sum(seen) and model.norm.num_batches_tracked == len(seen)


def test_the_comparison_changes_no_bit(monkeypatch):
    def result():
        torch.manual_seed(0)
        run, optimizer = attached("hides", model := Random())
        train(run, optimizer, plain)
        return [
            *model.state_dict().values(),
            run.records["loss"],
            torch.get_rng_state(),
        ], run.cost.forward - run.cost.comparing

    with_it = result()
    monkeypatch.setattr("thresher.passes.loss_comparison.TIMES", 0)
    without = result()
    assert with_it[1] == without[1] and all(
        torch.equal(a, b) for a, b in zip(with_it[0], without[0], strict=True)
    )


def test_a_prefetcher_and_a_model_called_directly_are_compared():
    run, optimizer = attached("hides")
    with pytest.warns(UserWarning, match=WARNING):
        for x, y in list(run.loader):
            OTHERS["scaled"](run, x, y).backward()
            optimizer.step()
    run, optimizer = attached("hides", model := nn.Linear(6, 3))
    with pytest.warns(UserWarning, match=WARNING):
        train(run, optimizer, lambda run, x, y: run.criterion(model(x * 2), y))


def test_random_losses_of_a_model_called_directly_are_not_compared():
    run, optimizer = attached("hides", model := nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5)))
    train(run, optimizer, lambda run, x, y: run.criterion(model(x), y))
    assert not run._timeline.comparison.pending and 0 < run.cost.comparing < len(run.ids) * 2


@pytest.mark.parametrize("method", METHODS)
def test_an_error_of_a_pass_names_forward_in_the_first_epoch(method):
    run, optimizer = attached(method, targets=lambda y: y.view(-1, 1).int())
    with pytest.raises(
        ValueError,
        match=r"`forward` is needed: \w+ makes extra forward passes.*multi-target.*attach\(forward=",
    ) as error:
        train(run, optimizer, lambda run, x, y: run.criterion(run.model(x), y.squeeze(1).long()))
    assert run.epoch == 0 and isinstance(error.value.__cause__, RuntimeError)


def test_without_memory_the_training_goes_on(monkeypatch):
    run, optimizer = attached("hides")

    def full(*_):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(run._timeline._parts.passes, "repeat", full)
    with pytest.warns(UserWarning, match="not enough memory to compare"):
        train(run, optimizer, plain, epochs=1)


def test_only_buffers_that_a_pass_writes_are_copied_from_then_on():
    model, written = Random().eval(), WrittenBuffers()
    for _ in range(2):
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        objects = dict(model.named_buffers())
        with torch.no_grad(), written.untouched(model):
            model(torch.randn(4, 6))
        assert all(
            torch.equal(before[name], buffer) and objects[name] is buffer
            for name, buffer in model.named_buffers()
        )
        assert {name for _, name in written._written[model]} == {"queue", "count"}


def test_batches_that_cannot_be_compared_are_not_looked_for_in_every_epoch(monkeypatch):
    monkeypatch.setattr("thresher.passes.loss_comparison.PATIENCE", 4)
    run, _ = attached("hides", step=False, epochs=5)
    pending = []
    for _ in range(4):
        for x, y in run.loader:
            run.criterion(
                run.model(x), y
            )  # without a backward pass there is nothing to compare with
            pending.append(run._timeline.comparison.pending)
    assert pending[0] and pending[6] and not any(pending[12:])


class Counting(nn.Linear):
    """Its forward depends on how often it ran, which it counts in attributes of several kinds."""

    def __init__(self):
        super().__init__(6, 3)
        self.calls, self.seen, self.table = 0, [], {"calls": [0], "all": torch.zeros(1)}
        self.counts = SimpleNamespace(calls=0)
        self.same = self.seen

    def forward(self, input):  # noqa: A002
        self.calls += 1
        self.seen.append(len(input))
        self.table["calls"][0] += 1
        self.table["all"] += 1
        self.counts.calls += 1
        self.last = input
        scale = (
            self.calls
            + len(self.same)
            + self.table["calls"][0]
            + float(self.table["all"])
            + self.counts.calls
        )
        return super().forward(input) / scale


@pytest.mark.parametrize("wrap", [lambda net: net, nn.Sequential])
def test_the_comparison_leaves_attributes_of_the_model_as_they_are(wrap):
    """And it sees them as the pass of the loop did, so that the losses are the same."""
    net = Counting()
    seen, table = net.seen, net.table["all"]
    run, optimizer = attached("hides", wrap(net))
    made = []
    repeat = run._timeline.comparison._passes.repeat
    run._timeline.comparison._passes.repeat = lambda *given: made.append(repeat(*given)) or made[-1]
    train(run, optimizer, plain, epochs=1)
    assert (
        len(made) == 1
        and net.calls == len(net.seen) == net.counts.calls == 6
        and net.table["calls"] == [6]
    )
    assert net.seen is net.same is seen and net.table["all"] is table and table == 6


class Untraceable(nn.Linear):
    """A model whose backward pass costs all rows, because its forward pass depends on values."""

    def forward(self, x):
        return super().forward(x) if float(x.detach().sum()) > -1e9 else x


def untraceable(loss, batches=None, **settings):
    torch.manual_seed(0)
    model = Untraceable(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = TensorDataset(torch.randn(48, 6) + 1, torch.arange(48) % 3)
    loader = DataLoader(data, 8, drop_last=True, collate_fn=batches)
    method, criterion = thresher.SelectiveBackprop(keep=0.5), nn.CrossEntropyLoss()
    run = thresher.attach(
        method,
        loader=loader,
        model=model,
        criterion=criterion,
        optimizer=optimizer,
        epochs=4,
        **settings,
    )
    for _ in range(3):
        for batch in run.loader:
            optimizer.zero_grad()
            loss(run, *(batch.values() if isinstance(batch, dict) else batch)).backward()
            optimizer.step()
    return run


def as_dict(samples):
    x, y = torch.utils.data.default_collate(samples)
    return {"x": x, "y": y}


@pytest.mark.filterwarnings("ignore:(?!subset_backward needs):UserWarning")
@pytest.mark.parametrize(
    ("loss", "batches", "own"),
    [
        (plain, None, True),
        (OTHERS["scaled"], None, False),
        (plain, as_dict, False),
    ],
    ids=["the same losses", "other losses", "no pair"],
)
def test_a_run_changes_to_passes_of_its_own_only_where_they_were_seen_to_agree(loss, batches, own):
    """Else the plain backward pass goes on: what a run may do later never ends a training."""
    run = untraceable(loss, batches)
    assert run.history[0]["selected"] == 24
    assert (run.cost.backward < run.cost.full_backward) is own
