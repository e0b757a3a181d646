"""Selection in the batch against training loops that share nothing with the library.

With two forward passes: a loop over the user's own loader that scores every batch in evaluation mode, keeps what it
chooses in a deque, and takes a step whenever that holds a batch. With one: the user's own criterion on the chosen rows.
"""

import copy
import math
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from depth import depth
from helpers import assert_same, over_instances
from thresher import BatchPlan, EpochPlan, Scoring, SelectiveBackprop
from thresher.rng import seeds

C = 4
pytestmark = pytest.mark.usefixtures("shared_traces")


class Net(nn.Module):
    """Dropout and running statistics: evaluation mode computes something else, and training draws."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = (
            nn.Linear(5, 12),
            nn.BatchNorm1d(12, track_running_stats=True),
            nn.Linear(12, C),
        )

    def forward(self, x):
        hidden = self.norm(self.first(x)) if len(x) > 1 or not self.training else self.first(x)
        return self.last(F.dropout(hidden.relu(), 0.3, self.training))


# Two forward passes


@dataclass
class Chooser:
    """Selective-Backprop by the book: largest losses by (loss, id), or by the percentile in a deque."""

    keep: float | None
    beta: float | None
    size: int
    seed: int
    step: int = 0
    fifo: deque = field(default_factory=deque)

    def rows(self, ids, losses):
        order = sorted(range(len(ids)), key=lambda row: ids[row])
        if self.keep is not None:
            ranked = sorted(
                order, key=lambda row: losses[row] if math.isfinite(losses[row]) else math.inf
            )
            chosen = ranked[-max(1, math.floor(self.keep * len(ids) + 1e-9)) :]
        else:
            for row in order:
                self.fifo.append(losses[row])
                if len(self.fifo) > self.size:
                    self.fifo.popleft()
            known = [loss for loss in self.fifo if math.isfinite(loss)]
            seed = seeds(256, self.seed, self.step // 256, 1)[self.step % 256]
            draws = torch.rand(len(ids), generator=torch.Generator().manual_seed(seed)).tolist()
            chosen = []
            for row, draw in zip(order, draws, strict=True):
                below = sum(other < losses[row] for other in known)
                finite = math.isfinite(losses[row]) and known
                if draw < np.float32((below / len(known)) ** self.beta if finite else 1.0):
                    chosen.append(row)
        self.step += 1
        return sorted(chosen)


class ByHand:
    """The loop that scores, queues and steps, with a criterion that is plain cross-entropy."""

    def __init__(self, net, optimizer, batch_size, chooser, *, drop_last, stale, losses):
        self.net, self.optimizer, self.batch_size, self.chooser = (
            net,
            optimizer,
            batch_size,
            chooser,
        )
        self.drop_last, self.stale, self.losses = drop_last, stale, losses
        self.stored, self.chosen_ids, self.trained = {}, [], Counter()
        self.scored = self.steps = 0

    def score(self, epoch, x, y, ids):
        if self.losses is not None:
            return [self.losses[i] for i in ids]
        if epoch % self.stale:
            return [self.stored.get(i, -math.inf) for i in ids]
        self.net.eval()
        with torch.no_grad():
            found = F.cross_entropy(self.net(x), y, reduction="none").tolist()
        self.net.train()
        self.stored.update(zip(ids, found, strict=True))
        self.scored += len(ids)
        return found

    def train(self, rows):
        ids, xs, ys = zip(*rows, strict=True)
        outputs, y = self.net(torch.stack(xs)), torch.stack(ys)
        self.stored.update(
            zip(ids, F.cross_entropy(outputs, y, reduction="none").tolist(), strict=True)
        )
        F.cross_entropy(outputs, y).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.chosen_ids.append(list(ids))
        self.trained.update(ids)
        self.steps += 1

    def epoch(self, epoch, loader):
        queue = deque()
        before = self.steps
        for x, y, numbers in loader:
            ids = numbers.tolist()
            for row in self.chooser.rows(ids, self.score(epoch, x, y, ids)):
                queue.append((ids[row], x[row], y[row]))
            if len(queue) >= self.batch_size:
                self.train([queue.popleft() for _ in range(self.batch_size)])
        # An epoch of less than one batch is kept: otherwise it would have no step.
        if queue and (not self.drop_last or self.steps == before):
            self.train(list(queue))


def instance(seed):
    """Settings of a random run: sizes that leave a last partial batch, both ways to choose, stale and given losses."""
    r = np.random.default_rng(seed)
    n, size = int(r.integers(9, 70)), int(r.choice([1, 3, 4, 8]))
    keep = None if r.random() < 0.5 else float(r.choice([0.1, 0.33, 0.5, 0.75, 1.0]))
    beta = None if keep is not None else float(r.choice([0.0, 0.5, 1.0, 2.0]))
    stale = int(r.choice([1, 1, 2, 3]))
    losses = torch.from_numpy(r.gamma(1.0, 1.0, n).astype(np.float32)) if r.random() < 0.2 else None
    return {
        "n": n,
        "size": size,
        "keep": keep,
        "beta": beta,
        "history": int(r.choice([5, 20, 1024])),
        "drop_last": bool(r.random() < 0.3),
        "stale": stale,
        "losses": losses,
        "seed": int(r.integers(100)),
    }


NUMBERS = depth([*range(9), 10, 43, 49], range(60))


@over_instances(NUMBERS)
def test_two_forward_passes_are_the_loop_by_hand(number):
    """The same rows in the same batches, the same draws, and parameters equal to the last bit."""
    s = instance(number)
    torch.manual_seed(number)
    x, y = torch.randn(s["n"], 5), torch.randint(C, (s["n"],))
    net = Net()
    other = copy.deepcopy(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.2, momentum=0.9)
    method = SelectiveBackprop(
        keep=s["keep"], beta=s["beta"], **({"history": s["history"]} if s["keep"] is None else {})
    )
    run = thresher.attach(
        method,
        loader=DataLoader(TensorDataset(x, y), s["size"], shuffle=True, drop_last=s["drop_last"]),
        criterion=nn.CrossEntropyLoss(),
        model=net,
        optimizer=optimizer,
        epochs=4,
        seed=s["seed"],
        forward_passes=Scoring(every_epochs=s["stale"], losses=s["losses"]),
    )
    hand = ByHand(
        other,
        torch.optim.SGD(other.parameters(), 0.2, momentum=0.9),
        s["size"],
        Chooser(s["keep"], s["beta"], s["history"], s["seed"]),
        drop_last=s["drop_last"],
        stale=s["stale"],
        losses=None if s["losses"] is None else s["losses"].tolist(),
    )
    torch.manual_seed(1000 + number)
    seen = []
    for _ in range(4):
        first = len(seen)
        length = len(run.loader) if s["keep"] is not None else None
        for bx, by in run.loader:
            assert torch.equal(bx, x[run.ids]) and torch.equal(by, y[run.ids])
            seen.append(run.ids.tolist())
            run.criterion(run.model(bx), by).backward()
            optimizer.step()
            optimizer.zero_grad()
        epoch = seen[first:]
        assert length in (None, len(epoch))
        may_be_short = not s["drop_last"] or len(epoch) == 1
        assert all(len(batch) == s["size"] for batch in epoch[: len(epoch) - may_be_short])
    state = torch.get_rng_state()
    torch.manual_seed(1000 + number)
    loader = DataLoader(
        TensorDataset(x, y, torch.arange(s["n"])), s["size"], shuffle=True, drop_last=s["drop_last"]
    )  # the loop as it was
    for epoch in range(4):
        hand.epoch(epoch, loader)
    assert seen == hand.chosen_ids
    assert_same(net.state_dict(), other.state_dict())
    assert torch.equal(state, torch.get_rng_state())
    cost = run.cost
    assert (cost.scoring, cost.steps, cost.backward) == (
        hand.scored,
        hand.steps,
        sum(hand.trained.values()),
    )
    assert cost.forward - cost.comparing == cost.scoring + cost.backward
    assert run.trained.tolist() == [hand.trained[i] for i in range(s["n"])]
    candidates = s["n"] - s["n"] % s["size"] if s["drop_last"] else s["n"]
    assert cost.full_forward == cost.full_backward == 4 * candidates


def test_the_instances_are_hard():
    met = set()
    for number in NUMBERS:
        s = instance(number)
        met |= {"keep" if s["beta"] is None else "beta", "stale" if s["stale"] > 1 else "fresh"}
        met |= {"given"} if s["losses"] is not None else set()
        met |= {"drop last"} if s["drop_last"] else set()
        met |= {"partial"} if s["n"] % s["size"] else set()
        met |= {"short history"} if s["beta"] and s["history"] < s["n"] else set()
    assert met == {
        "keep",
        "beta",
        "stale",
        "fresh",
        "given",
        "drop last",
        "partial",
        "short history",
    }


@dataclass(frozen=True)
class Flags:
    """Keeps the rows that are flagged, whatever their losses; weights them where it is told to."""

    flags: tuple = field(repr=False)
    signals: tuple = ("loss",)

    weights: bool = False
    stage = "batch"

    @property
    def requires(self):
        return thresher.Requirements(signals=self.signals)

    def init_state(self):
        return {}

    def count(self, n):
        return None

    def plan_batch(self, signals, state, *, step, generator):
        rows = torch.tensor(
            [i for i, flag in enumerate(self.flags[step % len(self.flags)]) if flag == "1"]
        )
        rows = rows.long()
        return BatchPlan(
            rows, weights=signals["id"][rows].float() + 0.5 if self.weights else None
        ), state


@pytest.mark.parametrize(
    ("drop_last", "batches"), [(False, [[0, 2, 5, 8], [9, 10]]), (True, [[0, 2, 5, 8]])]
)
@pytest.mark.parametrize("signals", [("loss",), ()])
def test_worked_vector_d(drop_last, batches, signals):
    """Forward batches flagged 1010, 0100, 1110: a batch of four and, where it is not dropped, the two that are left."""
    run = thresher.attach(
        Flags(("1010", "0100", "1110"), signals),
        loader=DataLoader(
            TensorDataset(torch.randn(12, 5), torch.zeros(12, dtype=torch.int64)),
            4,
            drop_last=drop_last,
        ),
        criterion=nn.CrossEntropyLoss(),
        model=nn.Linear(5, C),
        epochs=2,
        forward_passes="twice",
    )
    with pytest.raises(TypeError, match="depends on the losses"):
        len(run.loader)
    for epoch in range(2):
        seen = []
        for x, y in run.loader:
            seen.append(run.ids.tolist())
            run.criterion(run.model(x), y).backward()
        assert seen == batches
        assert run.history[epoch]["candidates"] == 12
        assert run.history[epoch]["selected"] == 6
        assert run.cost.full_forward == 12 * (epoch + 1)


# One forward pass


def dense(*shape):
    return nn.Sequential(
        nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, math.prod(shape)), nn.Unflatten(1, shape)
    )


def labels(*shape):
    return lambda n, r: torch.from_numpy(r.integers(0, C, (n, *shape)))


def some_ignored(*shape):
    def make(n, r):
        found = r.integers(0, C, (n, *shape))
        found[r.random((n, *shape)) < 0.3] = -100
        return torch.from_numpy(found)

    return make


def numbers(*shape):
    return lambda n, r: torch.from_numpy(r.normal(size=(n, *shape)))


def shares(*shape):
    return lambda n, r: torch.from_numpy(r.random((n, *shape)))


def soft(n, r):
    return torch.from_numpy(r.dirichlet(np.ones(C), n))


def by_label(outputs, targets):
    """A callable of the user's: one loss a sample."""
    return (outputs.logsumexp(1) - outputs.gather(1, targets[:, None]).squeeze(1)) ** 1.5


W = torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.float64)
CRITERIA = {
    "cross-entropy": (nn.CrossEntropyLoss(), (C,), labels()),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), (C,), labels()),
    "class weights": (nn.CrossEntropyLoss(weight=W), (C,), labels()),
    "smoothing": (nn.CrossEntropyLoss(label_smoothing=0.1), (C,), labels()),
    "smoothing and class weights": (
        nn.CrossEntropyLoss(weight=W, label_smoothing=0.2),
        (C,),
        labels(),
    ),
    "soft": (nn.CrossEntropyLoss(), (C,), soft),
    "ignored": (nn.CrossEntropyLoss(), (C,), some_ignored()),
    "nll": (lambda o, t: F.nll_loss(o.log_softmax(1), t, reduction="none"), (C,), labels()),
    "mse": (nn.MSELoss(), (3,), numbers(3)),
    "bce": (nn.BCEWithLogitsLoss(), (3,), shares(3)),
    "own": (by_label, (C,), labels()),
    "dense": (nn.CrossEntropyLoss(), (C, 2, 3), labels(2, 3)),
    "dense, ignored, class weights": (nn.CrossEntropyLoss(weight=W), (C, 2, 3), some_ignored(2, 3)),
    "dense mse": (nn.MSELoss(), (2, 3), numbers(2, 3)),
}
TOKENS = {
    "tokens": (nn.CrossEntropyLoss(), (6, C), labels(6)),
    "tokens, ignored": (nn.CrossEntropyLoss(), (6, C), some_ignored(6)),
    "tokens, class weights": (nn.CrossEntropyLoss(weight=W), (6, C), labels(6)),
}


def unreduced(criterion, outputs, targets):
    """Loss of each sample by the book: the mean over its valid positions, without class weights."""
    if not isinstance(criterion, nn.Module):
        return criterion(outputs, targets).detach().numpy()
    if isinstance(criterion, nn.CrossEntropyLoss):
        smoothing = criterion.label_smoothing
        positions = F.cross_entropy(
            outputs, targets, reduction="none", label_smoothing=smoothing
        ).detach()
        valid = (
            (targets != -100).double()
            if not targets.is_floating_point()
            else torch.ones_like(positions)
        )
    else:
        positions = type(criterion)(reduction="none")(outputs, targets).detach()
        valid = torch.ones_like(positions)
    total, count = positions.flatten(1).sum(1) if positions.dim() > 1 else positions, valid
    count = valid.flatten(1).sum(1) if valid.dim() > 1 else valid
    return np.where(count.numpy() > 0, total.numpy() / np.maximum(count.numpy(), 1), 0.0)


def chosen_by(losses, ids, keep):
    order = sorted(range(len(ids)), key=lambda row: (losses[row], ids[row]))
    return sorted(order[-max(1, math.floor(keep * len(ids) + 1e-9)) :])


def plain(criterion, outputs, targets):
    value = criterion(outputs, targets)
    return value.mean() if value.dim() else value


def gradients(net, loss):
    return [g.clone() for g in torch.autograd.grad(loss, list(net.parameters()))]


def attached(name, *, method=None, n=37, size=8, flat=False, **settings):
    criterion, shape, make = (TOKENS if flat else CRITERIA)[name]
    torch.manual_seed(3)
    net = dense(*shape).double()
    x, y = torch.randn(n, 5, dtype=torch.float64), make(n, np.random.default_rng(1))
    criterion = copy.deepcopy(criterion)
    run = thresher.attach(
        method or SelectiveBackprop(keep=0.4),
        loader=DataLoader(TensorDataset(x, y), size, shuffle=True),
        criterion=criterion,
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), 0.1),
        epochs=3,
        forward_passes=settings.pop("forward_passes", "once"),
        **settings,
    )
    return run, net, criterion


PLAIN_MEANS = [
    "cross-entropy",
    "smoothing",
    "soft",
    "nll",
    "mse",
    "bce",
    "own",
    "dense",
    "dense mse",
    "tokens",
]


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, "criterion") for name in [*CRITERIA, *TOKENS]),
        *((name, "reduce") for name in PLAIN_MEANS),
    ],
)
@pytest.mark.filterwarnings("ignore:`criterion` has reduction='sum':UserWarning")
def test_one_forward_pass_is_the_criterion_on_the_chosen_rows(name, how):
    flat = name in TOKENS
    run, net, criterion = attached(name, flat=flat)
    trained = Counter()
    for _ in range(2):
        for x, y in run.loader:
            plain_outputs = net(x)
            by_sample = plain_outputs.transpose(1, 2) if flat else plain_outputs
            rows = chosen_by(unreduced(criterion, by_sample, y), run.ids.tolist(), 0.4)
            trained.update(run.ids[rows].tolist())
            if flat:
                expected = plain(criterion, plain_outputs[rows].reshape(-1, C), y[rows].reshape(-1))
            else:
                expected = plain(criterion, plain_outputs[rows], y[rows])
            outputs = run.model(x)
            if flat:
                outputs, y = outputs.view(-1, C), y.view(-1)
            if how == "criterion":
                value = run.criterion(outputs, y)
            else:
                unaveraged = copy.copy(criterion)
                if isinstance(criterion, nn.Module):
                    unaveraged.reduction = "none"
                losses = unaveraged(outputs, y)
                value = run.reduce(losses, outputs=outputs, targets=y)
            torch.testing.assert_close(value, expected, rtol=1e-11, atol=1e-12)
            for own, theirs in zip(gradients(net, value), gradients(net, expected), strict=True):
                torch.testing.assert_close(own, theirs, rtol=1e-11, atol=1e-11)
            run._timeline.steps.hooks._optimizer.step()  # without gradients: the weights are moved below
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.add_(
                        0.03
                        * torch.sin(torch.arange(parameter.numel()).double()).view_as(parameter)
                    )
    assert run.cost.backward == sum(trained.values()) == 2 * (4 * 3 + 2)
    assert run.cost.forward == 2 * 37
    assert run.trained.tolist() == [trained[i] for i in range(37)]


@pytest.mark.parametrize(
    "name", ["cross-entropy", "class weights", "sum", "dense, ignored, class weights", "mse"]
)
@pytest.mark.filterwarnings("ignore:`criterion` has reduction='sum':UserWarning")
def test_weights_of_the_epoch_are_the_chosen_rows_own(name):
    """sum(v s m) / sum(s) over the chosen rows, and / sum(v s) where the criterion has class weights."""

    @dataclass(frozen=True)
    class Weighted:
        stage = "epoch"

        def columns(self):
            return {"loss": thresher.Column(torch.float32, fill=float("-inf"))}

        def plan_epoch(self, records, *, epoch, epochs, generator):
            return EpochPlan(torch.arange(1, 37), weights=torch.arange(36) / 10 + 0.5)

    run, net, criterion = attached(name, method=[Weighted(), SelectiveBackprop(keep=0.4)])
    batches = 0
    for x, y in run.loader:
        batches += 1
        outputs = net(x)
        rows = chosen_by(unreduced(criterion, outputs, y), run.ids.tolist(), 0.4)
        v = ((run.ids[rows] - 1).float() / 10 + 0.5).double()
        o, t = outputs[rows], y[rows]
        if isinstance(criterion, nn.MSELoss):
            expected = ((o - t) ** 2 * v[:, None]).sum() / o.numel()
        else:
            positions = F.cross_entropy(o, t, weight=criterion.weight, reduction="none").reshape(
                len(rows), -1
            )
            table = torch.ones(C).double() if criterion.weight is None else criterion.weight
            valid = (t != -100).reshape(len(rows), -1)
            share = (table[t.clamp(min=0)].reshape(len(rows), -1) * valid).sum(1)
            below = (
                1.0
                if criterion.reduction == "sum"
                else (share * v if criterion.weight is not None else share).sum()
            )
            expected = (positions.sum(1) * v).sum() / below
        value = run.criterion(run.model(x), y)
        torch.testing.assert_close(value, expected, rtol=1e-11, atol=1e-12)
        for own, theirs in zip(gradients(net, value), gradients(net, expected), strict=True):
            torch.testing.assert_close(own, theirs, rtol=1e-11, atol=1e-11)
    assert batches == 5


@pytest.mark.parametrize("forward_passes", ["once", "twice"])
@pytest.mark.parametrize("how", ["batch", "ids", "micro-batches"])
def test_weights_of_a_batch_method(forward_passes, how):
    """Its weights go with its rows through the gathering, and are found again by ids of the caller's."""
    run, net, _ = attached(
        "cross-entropy",
        method=Flags(("10110100", "01010101", "11000000"), weights=True),
        n=48,
        forward_passes=forward_passes,
    )
    seen = 0
    for x, y in run.loader:
        seen += 1
        flags = Flags(("10110100", "01010101", "11000000")).flags[(seen - 1) % 3]
        rows = (
            [i for i, flag in enumerate(flags) if flag == "1"]
            if forward_passes == "once"
            else list(range(len(x)))
        )
        if how == "micro-batches":
            if forward_passes == "once":
                continue
            value = sum(
                run.criterion(run.model(a), b) * len(a) / len(x)
                for a, b in zip(x.split(3), y.split(3), strict=True)
            )
        else:
            value = run.criterion(run.model(x), y, ids=run.ids.clone() if how == "ids" else None)
        losses = F.cross_entropy(net(x), y, reduction="none")
        v = run.ids.double() + 0.5
        torch.testing.assert_close(value, (losses * v)[rows].mean(), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", ["cross-entropy", "class weights", "dense", "mse", "own"])
@pytest.mark.parametrize("weighted", [False, True])
def test_nothing_chosen_is_a_gradient_of_zeros(name, weighted):
    method = [thresher.InfoBatch(), Flags(("0" * 8,))] if weighted else Flags(("0" * 8,))
    run, net, _ = attached(name, method=method, n=32)
    for _ in range(2):
        for x, y in run.loader:
            value = run.criterion(run.model(x), y)
            value.backward()
            assert value.item() == 0.0
            assert all(p.grad is not None and not p.grad.any() for p in net.parameters())
            value = run.reduce(run.model(x).flatten(1).square(), ids=run.ids)
            value.backward()
            assert value.item() == 0.0
            assert all(not p.grad.any() for p in net.parameters())
    assert run.cost.backward == 0 == int(run.trained.sum())


@pytest.mark.parametrize("forward_passes", ["once", "twice"])
def test_equal_losses_in_beta_mode(forward_passes):
    """No loss is above another: nothing is chosen, and nothing comes to harm."""
    net = nn.Linear(5, C)
    nn.init.zeros_(net.weight)
    nn.init.zeros_(net.bias)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    run = thresher.attach(
        SelectiveBackprop(beta=1.0),
        loader=DataLoader(TensorDataset(torch.randn(20, 5), torch.arange(20) % C), 8),
        criterion=nn.CrossEntropyLoss(),
        model=net,
        optimizer=optimizer,
        epochs=2,
        forward_passes=forward_passes,
    )
    for x, y in run.loader:
        loss = run.criterion(run.model(x), y)
        loss.backward()
        optimizer.step()
        assert math.isfinite(loss.item())
    assert not any(p.any() for p in net.parameters())
    assert run.cost.backward == 0
    assert run.cost.forward == 20
    assert run.history[0]["actual_fraction"] == 1.0


def test_accumulated_micro_batches():
    """Each chooses among its own rows; the sum of their gradients is that of the chosen rows."""
    run, net, _ = attached("cross-entropy", size=12, n=36)
    for x, y in run.loader:
        ids, expected = run.ids, 0.0
        for part in range(0, 12, 4):
            outputs = net(x[part : part + 4])
            losses = unreduced(nn.CrossEntropyLoss(), outputs, y[part : part + 4])
            rows = chosen_by(losses, ids[part : part + 4].tolist(), 0.4)
            expected = expected + F.cross_entropy(outputs[rows], y[part : part + 4][rows]) / 3
            (run.criterion(run.model(x[part : part + 4]), y[part : part + 4]) / 3).backward()
        for parameter, theirs in zip(net.parameters(), gradients(net, expected), strict=True):
            torch.testing.assert_close(parameter.grad, theirs, rtol=1e-11, atol=1e-11)
        net.zero_grad()
    assert run.cost.backward == 9
    assert run.cost.forward == 36


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.one, self.two = nn.Linear(5, 16), nn.Linear(16, C), nn.Linear(16, C)

    def forward(self, x):
        hidden = self.body(x).tanh()
        return self.one(hidden), self.two(hidden)


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("method", [SelectiveBackprop(keep=0.4), SelectiveBackprop(beta=1.0)])
def test_a_second_loss_of_the_same_rows(method, ids):
    """An auxiliary head: the same rows, one plan, one count, and the sum of both losses in the records."""
    torch.manual_seed(0)
    net = TwoHeads().double()
    x, y = torch.randn(32, 5, dtype=torch.float64), torch.arange(32) % C
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    run = thresher.attach(
        method,
        loader=DataLoader(TensorDataset(x, y), 8),
        criterion=nn.CrossEntropyLoss(),
        model=net,
        optimizer=optimizer,
        epochs=2,
        forward_passes="once",
    )
    for bx, by in run.loader:
        before = run.trained.clone()
        stated = run.ids if ids else None
        one, two = run.model(bx)
        value = run.criterion(one, by, ids=stated) + 0.3 * run.criterion(two, by, ids=stated)
        rows = (run.trained - before)[run.ids].nonzero().flatten()
        a, b = net(bx)
        losses = [F.cross_entropy(o, by, reduction="none") for o in (a, b)]
        expected = (
            losses[0][rows].mean() + 0.3 * losses[1][rows].mean()
            if len(rows)
            else 0.0 * losses[0].sum()
        )
        torch.testing.assert_close(value, expected, rtol=1e-11, atol=1e-12)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        torch.testing.assert_close(run.records["loss"][run.ids], sum(losses).float().detach())
    assert run.cost.forward == 32
    assert run.cost.backward == int(run.trained.sum()) == run.history[0]["selected"]
    assert run.cost.steps == 4


def test_a_new_step_on_the_same_rows_chooses_anew():
    run, net, _ = attached("cross-entropy")
    x, y = next(iter(run.loader))
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    optimizer.step()  # of another optimizer: the step of this run goes on
    for step in range(1, 3):
        run.criterion(run.model(x), y)
        run.criterion(run.model(x), y).backward()
        run._timeline.steps.hooks._optimizer.step()
        assert run._timeline.selection.stage.step == step
    assert run.cost.forward == 4 * len(x) and run.cost.backward == 6


def test_ignored_samples_are_chosen_last():
    """Their loss is no number to choose by: batches of ignored samples alone would be a loss of nothing, NaN."""
    x, y = torch.randn(32, 5), torch.arange(32) % C
    y[::2] = -100
    for forward_passes in ("once", "twice"):
        net = nn.Linear(5, C)
        run = thresher.attach(
            SelectiveBackprop(keep=0.5),
            loader=DataLoader(TensorDataset(x, y), 8, shuffle=True),
            criterion=nn.CrossEntropyLoss(),
            model=net,
            epochs=1,
            forward_passes=forward_passes,
        )
        for bx, by in run.loader:
            assert torch.isfinite(run.criterion(run.model(bx), by))
        ignored = run.trained[::2].sum().item()
        assert ignored <= 4
        assert run.trained.sum() == 16


def test_rows_that_two_calls_of_a_step_share_are_counted_once():
    run, _, _ = attached("cross-entropy", size=12, n=36)
    for x, y in run.loader:
        (
            run.criterion(run.model(x[:6]), y[:6]) + run.criterion(run.model(x[4:10]), y[4:10])
        ).backward()
    assert run.cost.forward == 36  # the model ran on the shared rows twice
    assert run.cost.backward == 3 * (2 + 2) >= int(run.trained.sum())
    assert run.trained.max() == 1
