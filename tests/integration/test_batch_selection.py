"""A training loop with selection in the batch: what it may do, what it is promised, and what is counted."""

import collections
import copy
import random
import warnings
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    default_collate,
)

import thresher
from depth import crossed
from helpers import as_if_trained
from thresher import (
    BatchPlan,
    EpochPlan,
    RandomBackprop,
    Scoring,
    SelectiveBackprop,
    subset_backward,
)
from thresher.records import NEVER_SEEN

N, B, C = 50, 8, 4
SB = SelectiveBackprop
pytestmark = pytest.mark.usefixtures("shared_traces")


class Net(nn.Module):
    """A root module that looks at its own mode."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 16), nn.BatchNorm1d(8), nn.Linear(16, C)

    def forward(self, x):
        hidden = self.norm(self.first(x).unflatten(1, (8, 2))).flatten(
            1
        )  # a batch may have one sample
        return self.last(F.dropout(hidden.relu(), 0.3, self.training))


class Untraceable(Net):
    """Its forward asks for values, which no graph can."""

    def forward(self, x):
        return super().forward(x) if float(x.detach().sum()) < 1e9 else super().forward(-x)


def samples():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(N, 6, generator=generator), torch.arange(N) % C)


def make(
    method,
    forward_passes="auto",
    *,
    net=None,
    loader=None,
    optimizer=True,
    epochs=4,
    criterion=None,
    **settings,
):
    torch.manual_seed(0)
    net = net or Net()
    sgd = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9) if optimizer else None
    run = thresher.attach(
        method,
        loader=DataLoader(samples(), B, shuffle=True) if loader is None else loader,
        criterion=criterion or nn.CrossEntropyLoss(),
        model=settings.pop("model", net),
        optimizer=sgd,
        epochs=epochs,
        forward_passes=forward_passes,
        **settings,
    )
    return run, net, sgd


def train(run, optimizer, epochs=1):
    sizes = []
    for _ in range(epochs):
        for x, y in run.loader:
            run.criterion(run.model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            sizes.append(len(x))
    return sizes


# What is counted


@pytest.mark.parametrize("settings", [{"keep": 0.33}, {"beta": 2.0}])
def test_the_warm_up_trains_on_every_row_and_scores_none(settings):
    run, _, optimizer = make(SB(**settings, warmup_steps=14), "twice", epochs=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(run, optimizer, 2) == 2 * [8, 8, 8, 8, 8, 8, 2]
    assert (run.cost.scoring, run.cost.of_loop, run.cost.backward) == (0, 2 * N, 2 * N)
    train(run, optimizer)
    assert run.cost.scoring == N and run.cost.backward < 3 * N


@pytest.mark.parametrize("method", [SB(keep=0.33), RandomBackprop(keep=0.33)])
def test_two_passes_without_filling_up(method):
    run, _, optimizer = make(method, "twice", spend="batches")
    assert len(run.loader) == 7 and train(run, optimizer, 2) == 2 * [2, 2, 2, 2, 2, 2, 1]
    assert run.cost.steps == 14 and run.cost.backward == 2 * (2 * 6 + 1)
    assert run.cost.scoring == (2 * N if isinstance(method, SB) else 0)


def test_without_filling_up_the_number_of_steps_is_not_known_if_a_batch_may_keep_no_row():
    run, _, optimizer = make(SB(beta=8.0), "twice", spend="batches")
    with pytest.raises(TypeError, match="the length of this epoch is not known before its end"):
        len(run.loader)
    assert 0 < sum(train(run, optimizer)) < N


@pytest.mark.parametrize(
    ("method", "passes", "keeps", "sizes"),
    [
        (SB(keep=0.33), "once", 2 * 6 + 1, [8] * 6 + [2]),
        (SB(keep=0.33), "auto", 2 * 6 + 1, [8] * 6 + [2]),
        (SB(keep=0.33), "twice", 2 * 6 + 1, [8, 5]),
        (SB(keep=0.75), "twice", 6 * 6 + 1, [8, 8, 8, 8, 5]),
        (RandomBackprop(keep=0.33), "auto", 2 * 6 + 1, [2] * 6 + [1]),
        (RandomBackprop(keep=0.33), "twice", 2 * 6 + 1, [8, 5]),
        ([thresher.UniformSubset(keep=0.5), SB(keep=0.5)], "once", 4 * 3 + 1, [8] * 3 + [1]),
        ([thresher.UniformSubset(keep=0.5), SB(keep=0.5)], "twice", 4 * 3 + 1, [8, 5]),
    ],
)
def test_counters(method, passes, keeps, sizes):
    run, _, optimizer = make(method, passes)
    lone = not isinstance(method, list)
    candidates = N if lone else N // 2
    for epoch in range(1, 4):
        assert len(run.loader) == len(sizes)
        assert train(run, optimizer) == sizes
        cost, entry = run.cost, run.history[-1]
        scoring = (
            candidates * epoch
            if passes == "twice" and not isinstance(method, RandomBackprop)
            else 0
        )
        forward = (
            candidates * epoch
            if passes != "twice" and not isinstance(method, RandomBackprop)
            else keeps * epoch
        )
        assert (cost.scoring, cost.of_loop) == (scoring, forward)
        assert cost.backward == keeps * epoch == int(run.trained.sum())
        assert cost.steps == len(sizes) * epoch
        assert cost.full_forward == cost.full_backward == N * epoch
        prefix = "" if lone else "batch_"
        assert entry[f"{prefix}candidates"] == candidates
        assert entry[f"{prefix}selected"] == entry["backward"] == keeps
        assert entry[f"{prefix}actual_fraction"] == pytest.approx(1 - keeps / candidates)
        assert (entry["steps"], entry["full_backward"], entry["kept"]) == (
            len(sizes),
            N,
            candidates,
        )
        assert run.progress == pytest.approx(epoch / 4)
    assert run.trained.dtype == torch.int32


def test_trained_counts_every_sample():
    for method in (
        thresher.FullData(),
        thresher.InfoBatch(),
        SB(beta=1.0),
        RandomBackprop(keep=0.5),
    ):
        run, _, optimizer = make(method)
        expected = torch.zeros(N, dtype=torch.int16)
        for _ in range(3):
            for x, y in run.loader:
                before = run.trained.clone()
                run.criterion(run.model(x), y).backward()
                now = run.trained - before
                assert set(now.nonzero().flatten().tolist()) <= set(run.ids.tolist())
                assert now.max() <= 1
                if not isinstance(method, SB):
                    assert now.sum() == len(x)
                expected += now
                optimizer.step()
                optimizer.zero_grad()
        assert torch.equal(run.trained, expected)
        assert int(expected.sum()) == run.cost.backward


def test_progress_and_ids_inside_an_epoch():
    run, *_ = make(SB(keep=0.5), "twice", loader=DataLoader(samples(), B))
    seen, progress = [], []
    for x, y in run.loader:
        assert torch.equal(samples().tensors[0][run.ids], x)
        assert torch.equal(samples().tensors[1][run.ids], y)
        seen.append(len(run.loader))
        progress.append(run.progress)
    assert seen == [4] * 4  # 4 of each of six batches, and one of two
    assert progress == pytest.approx([16 / 200, 32 / 200, 48 / 200, 50 / 200])


def test_stale_losses_are_scored_every_other_epoch():
    run, _, optimizer = make(SB(keep=0.5), Scoring(every_epochs=2))
    train(run, optimizer, 4)
    assert [entry["scoring"] for entry in run.history] == [N, 0, N, 0]
    assert run.history[1]["forward"] == run.history[1]["backward"]


def test_recorded_losses_are_never_scored():
    run, _, optimizer = make(
        SB(keep=0.5), Scoring(losses=torch.arange(float(N))), loader=DataLoader(samples(), B)
    )
    train(run, optimizer, 1)
    assert run.cost.scoring == 0
    expected = [i for i in range(N) if (i % 8 >= 4 and i < 48)] + [49]
    assert run.trained.nonzero().flatten().tolist() == expected


def test_scoring_by_another_model_and_on_smaller_inputs():
    class Sizes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.seen = nn.Linear(1, C), []

        def forward(self, x):
            self.seen.append(
                (
                    tuple(x.shape[1:]),
                    self.training,
                    torch.is_grad_enabled(),
                    torch.is_autocast_enabled("cpu"),
                )
            )
            return self.layer(x.mean((1, 2, 3))[:, None])

    net, proxy = Sizes(), Sizes()
    data = TensorDataset(torch.randn(N, 3, 8, 8), torch.arange(N) % C)
    scoring = Scoring(model=proxy, input_scale=0.5, dtype=torch.bfloat16)
    run, _, optimizer = make(
        SB(keep=0.5), net=net, loader=DataLoader(data, B), forward_passes=scoring
    )
    train(run, optimizer, 1)
    assert set(proxy.seen) == {((3, 4, 4), False, False, True)}
    assert set(net.seen) == {((3, 8, 8), True, True, False)}
    assert len(proxy.seen) == 7
    assert proxy.training


@pytest.mark.parametrize(
    ("every", "keep", "said"), [(1, 0.6, False), (1, 0.75, True), (3, 0.8, False), (3, 0.95, True)]
)
def test_break_even(monkeypatch, every, keep, said):
    """A backward pass of two forward passes: worth it below 2/3, and with losses of every third epoch below 8/9."""
    run, _, optimizer = make(
        SB(keep=keep), loader=DataLoader(samples(), 25), forward_passes=Scoring(every_epochs=every)
    )
    monkeypatch.setattr(run._parts.stopwatch, "ratio", lambda: 2.0)
    share = int(25 * keep) / 25
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train(run, optimizer, 2)
    assert len(found) == said
    if said:
        most = 2 / 3 if every == 1 else 8 / 9
        assert f"SelectiveBackprop kept {share:.2f}" in str(found[0].message)
        assert f"only below {most:.2f} (a backward pass takes 2.00" in str(found[0].message)


def test_break_even_counts_candidates_alone(monkeypatch):
    """What the epoch's plan leaves out is saved without any scoring: 90 % of half the samples is too much to keep."""
    run, _, optimizer = make(
        [thresher.UniformSubset(keep=0.5), SB(keep=0.9)], "twice", loader=DataLoader(samples(), 25)
    )
    monkeypatch.setattr(run._parts.stopwatch, "ratio", lambda: 2.0)
    with pytest.warns(UserWarning, match="kept 0.88 of the samples"):
        train(run, optimizer, 1)


def test_break_even_is_not_said_of_cheaper_ways(monkeypatch):
    for passes in ("once", Scoring(dtype=torch.bfloat16), Scoring(model=Net())):
        run, _, optimizer = make(SB(keep=0.9), passes)
        monkeypatch.setattr(run._parts.stopwatch, "ratio", lambda: 2.0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(run, optimizer, 2)


@pytest.mark.parametrize(("passes", "share"), [("once", 0.25), ("twice", 1.0)])
def test_the_stopwatch_knows_the_share_of_a_backward_pass(monkeypatch, passes, share):
    run, _, _ = make(SB(keep=0.25), passes)
    shares = []
    monkeypatch.setattr(run._parts.stopwatch, "watch", lambda loss, share=1.0: shares.append(share))
    for x, y in run.loader:
        run.criterion(run.model(x), y)
        break
    assert shares == [share]


# What the loop is promised


class Noisy(TensorDataset):
    """Augmentation from the global generators."""

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x + 0.01 * torch.randn(6) + 0.01 * random.random() + 0.01 * float(
            np.random.rand()
        ), y


@pytest.mark.filterwarnings("ignore:.*got no loss")
@pytest.mark.parametrize("passes", ["once", "twice"])
def test_global_random_states_are_the_loops_own(passes):
    """A dataset that draws, a model that draws in the scoring pass as well, and nothing that another loop would miss."""

    class Draws(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, C)

        def forward(self, x):
            if not torch.is_grad_enabled():
                torch.rand(7), random.random(), np.random.rand()
            return self.layer(x)

    def states(attached):
        torch.manual_seed(5), random.seed(5), np.random.seed(5)
        data, found = Noisy(*samples().tensors), []
        loader = DataLoader(data, B, shuffle=True, generator=torch.Generator().manual_seed(3))
        if attached:
            net = Draws()
            run = thresher.attach(
                SB(beta=1.0),
                loader=loader,
                criterion=nn.CrossEntropyLoss(),
                model=net,
                epochs=3,
                forward_passes=passes,
            )
            loader = run.loader
        torch.manual_seed(5)
        for _ in range(2):
            for _ in loader:
                pass
            if attached:
                as_if_trained(run)
            found.append(
                (
                    torch.get_rng_state(),
                    random.getstate(),
                    np.random.get_state()[1].tolist(),
                    loader.generator,
                )
            )
        return found

    for own, theirs in zip(states(True), states(False), strict=True):
        assert torch.equal(own[0], theirs[0])
        assert own[1:3] == theirs[1:3]
        assert torch.equal(own[3].get_state(), theirs[3].get_state())


@pytest.mark.parametrize(
    "method", [SB(keep=0.5), [thresher.Kakurenbo(max_fraction=0.5, tau=0.0), SB(keep=0.5)]]
)
@pytest.mark.parametrize("passes", ["once", "twice"])
def test_modes_are_restored(method, passes):
    """Of every module, the root that `subset_backward` wraps included."""
    run, net, optimizer = make(method, passes)
    for _ in range(3):
        for x, y in run.loader:
            assert all(part.training for part in net.modules())
            run.criterion(run.model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(part.training for part in (*net.modules(), *run.model.modules()))


@pytest.mark.parametrize("passes", ["once", "twice"])
def test_a_frozen_norm_stays_frozen(passes):
    run, net, optimizer = make(
        [thresher.Kakurenbo(max_fraction=0.5, tau=0.0), SB(keep=0.5)], passes
    )
    net.norm.eval()
    train(run, optimizer, 3)
    assert [part.training for part in net.modules()] == [True, True, False, True]
    assert net.norm.num_batches_tracked == 0


def test_buffers_are_updated_by_training_alone():
    run, net, _ = make(SB(keep=0.5), "twice")
    for _ in run.loader:
        pass
    assert net.norm.num_batches_tracked == 0
    assert not net.norm.running_mean.any()


def test_an_exception_while_scoring():
    """Modes and random states come back, and the next pass over the loader is whole."""

    class Fails(Net):
        failing = True

        def forward(self, x):
            if self.failing and not self.training and len(self.seen) == 2:
                torch.rand(3)
                raise OSError("scoring failed")
            self.seen.append(len(x))
            return super().forward(x)

    net = Fails()
    net.seen = []
    run, _, optimizer = make(SB(keep=0.5), "twice", net=net)
    batches = iter(run.loader)
    x, y = next(batches)  # two candidate batches make it
    run.reduce(x.sum(1).requires_grad_(), targets=y)
    state = torch.get_rng_state()
    with pytest.raises(OSError, match="scoring failed"):
        next(batches)
    assert net.training
    assert torch.equal(torch.get_rng_state(), state)
    Fails.failing = False
    assert train(run, optimizer) == [8, 8, 8, 1]
    assert run.history[-1]["selected"] == run.history[-1]["backward"] == 25
    assert run.epoch == 2


class Damaged(TensorDataset):
    def __getitem__(self, i):
        if i == 9:
            raise OSError("sample 9 cannot be read")
        return super().__getitem__(i)

    __getitems__ = None


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_cannot_be_read(workers):
    """The rows that wait stay, the ids do not shift."""
    data = Damaged(*samples().tensors)
    run, *_ = make(SB(keep=0.5), "twice", loader=DataLoader(data, B, num_workers=workers))
    batches, failed, seen = iter(run.loader), 0, []
    while True:
        try:
            x, _ = next(batches)
        except OSError:
            failed += 1
            continue
        except StopIteration:
            break
        assert torch.equal(x, data.tensors[0][run.ids])
        seen += run.ids.tolist()
    assert failed == 1
    assert len(seen) == len(set(seen)) == 21
    assert not set(seen) & set(range(8, 16))


@pytest.mark.parametrize("passes", ["once", "twice"])
def test_breaking_out_and_iterating_anew(passes):
    run, _, optimizer = make(SB(keep=0.75), passes)
    for x, y in run.loader:
        run.criterion(run.model(x), y)
        break
    old = iter(run.loader)
    assert run.epoch == 1
    x, y = next(old)
    run.criterion(run.model(x), y)
    sizes = train(run, optimizer)
    with pytest.raises(RuntimeError, match="ended by a newer one"):
        next(old)
    assert sizes == (
        [8] * 6 + [2] if passes == "once" else [8, 8, 8, 8, 5]
    )  # no row of a broken epoch is left in it
    assert [entry["complete"] for entry in run.history] == [False, False, True]
    assert run.history[-1]["backward"] == 37
    assert sum(entry["full_backward"] for entry in run.history) == run.cost.full_backward


def test_iterating_twice_before_a_batch_is_the_same_epoch():
    run, _, optimizer = make(SB(keep=0.5), "twice")
    first = iter(run.loader)
    assert train(run, optimizer) == [8, 8, 8, 1]
    assert run.epoch == 1
    with pytest.raises(RuntimeError, match="ended by a newer one"):
        next(first)


@pytest.mark.parametrize("passes", ["once", "twice"])
def test_workers_change_nothing(passes):
    found = []
    for workers in (0, 2):
        loader = DataLoader(
            samples(),
            B,
            shuffle=True,
            num_workers=workers,
            generator=torch.Generator().manual_seed(2),
        )
        run, net, optimizer = make(SB(beta=1.0), passes, loader=loader)
        train(run, optimizer, 2)
        found.append((run.trained.tolist(), net.last.weight.detach().clone()))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("passes", ["once", "twice"])
def test_a_prefetcher(passes):
    """The next batch is asked for before the loss of the one in use."""
    run, _, optimizer = make(SB(keep=0.5), passes)
    for _ in range(2):
        for x, y in _ahead(run.loader):
            run.criterion(run.model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert run.cost.backward == 50 == int(run.trained.sum())
    assert run.history[0]["backward"] == 25


def _ahead(loader):
    """Batches, each once the one after it was asked for."""
    before = None
    for batch in loader:
        if before is not None:
            yield before
        before = batch
    yield before


def test_a_batch_sampler_of_torch_is_filled_up_too():
    data = samples()
    run, _, optimizer = make(
        SB(keep=0.5),
        "twice",
        loader=DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), B, True)),
    )
    assert train(run, optimizer) == [8, 8, 8]
    assert len(run.loader) == 3


def test_a_sampler_that_repeats():
    loader = DataLoader(
        samples(), B, sampler=RandomSampler(samples(), replacement=True, num_samples=64)
    )
    for passes in ("once", "twice"):
        run, _, optimizer = make(SB(keep=0.5), passes, loader=loader)
        train(run, optimizer, 2)
        assert run.cost.backward == 64 == int(run.trained.sum())
        assert run.cost.full_backward == 128
        run.detach()


# Batches of any shape

Pair = collections.namedtuple("Pair", "x y")


class Texts(Dataset):
    """Numbers, labels and texts; the text of a sample names it."""

    def __init__(self):
        self.x, self.y = samples().tensors

    def __len__(self):
        return N

    def __getitem__(self, i):
        return self.x[i], self.y[i], f"text {i}"


COLLATES = {
    "torch's own": (None, lambda b: (b[0], b[1], b[2])),
    "dict": (
        lambda s: dict(zip("xyt", default_collate(s), strict=True)),
        lambda b: (b["x"], b["y"], b["t"]),
    ),
    "named tuple": (
        lambda s: (Pair(*default_collate([row[:2] for row in s])), [row[2] for row in s]),
        lambda b: (b[0].x, b[0].y, b[1]),
    ),
    "arrays": (
        lambda s: (*default_collate([row[:2] for row in s]), np.array([row[2] for row in s])),
        lambda b: (b[0], b[1], b[2].tolist()),
    ),
}


@pytest.mark.parametrize("name", COLLATES)
@pytest.mark.parametrize(
    ("method", "passes"),
    [(SB(keep=0.5), "once"), (SB(keep=0.5), "twice"), (RandomBackprop(), "auto")],
)
def test_collates(name, method, passes):
    collate, read = COLLATES[name]
    run, _, optimizer = make(
        method,
        passes,
        loader=DataLoader(Texts(), B, shuffle=True, collate_fn=collate),
        forward=lambda model, batch: (model(read(batch)[0]), read(batch)[1]),
    )
    for batch in run.loader:
        x, y, texts = read(batch)
        assert torch.equal(x, samples().tensors[0][run.ids])
        assert torch.equal(y, samples().tensors[1][run.ids])
        assert list(texts) == [f"text {i}" for i in run.ids.tolist()]
        run.criterion(run.model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert run.cost.backward == 25


def test_forward_is_asked_for_before_scoring():
    for collate, kind in (
        (lambda s: {"x": torch.stack([r[0] for r in s])}, "dict"),
        (None, "list"),
    ):
        run, *_ = make(SB(keep=0.5), "twice", loader=DataLoader(Texts(), B, collate_fn=collate))
        with pytest.raises(
            ValueError,
            match=rf"`forward` is needed: SelectiveBackprop makes extra.*{kind} is not a pair",
        ):
            next(iter(run.loader))


def padded(rows):
    width = max(int(y) for _, y in rows) + 6
    x = torch.stack([F.pad(x, (0, width - 6)) for x, _ in rows])
    return x, torch.stack([y for _, y in rows])


def test_padded_batches_of_different_widths():
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, C)

        def forward(self, x):
            return self.layer(x.sum(1, keepdim=True))

    data = TensorDataset(samples().tensors[0], (torch.arange(N) // 8) % C)
    loader = DataLoader(data, B, collate_fn=padded)
    run, *_ = make(SB(keep=0.5), "twice", net=Bag(), loader=loader)
    with pytest.raises(
        ValueError, match=r"cannot be joined: shapes \[\(4, 6\), \(4, 7\)\].*forward_passes='once'"
    ):
        for _ in run.loader:
            pass
    run.detach()
    for method, passes in ((SB(keep=0.5), "once"), (RandomBackprop(), "auto")):
        run, _, optimizer = make(method, passes, net=Bag(), loader=loader)
        train(run, optimizer)
        assert run.cost.backward == 25
        run.detach()


def test_targets_that_are_a_list_of_samples():
    """As for detection: the criterion's own targets are chosen as its outputs are."""
    data = samples()
    wanted = [
        {"label": data.tensors[1][i], "boxes": torch.full((i % 9 + 1, 4), float(i))}
        for i in range(N)
    ]

    def criterion(outputs, targets):
        assert len(outputs) == len(targets)
        return torch.stack(
            [
                F.cross_entropy(o[None], t["label"][None]) * t["boxes"].mean()
                for o, t in zip(outputs, targets, strict=True)
            ]
        )

    run, net, _ = make(SB(keep=0.5), "once", net=nn.Linear(6, C), criterion=criterion)
    for x, _ in run.loader:
        targets = [wanted[i] for i in run.ids.tolist()]
        losses = criterion(net(x), targets)
        rows = losses.argsort()[-max(1, len(x) // 2) :].sort().values
        value = run.criterion(run.model(x), targets, ids=run.ids)
        torch.testing.assert_close(value, losses[rows].mean())


# One forward pass


def test_autocast_and_grad_scaler():
    for passes in ("once", "twice"):
        run, net, optimizer = make(SB(keep=0.5), passes)
        scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
        for _ in range(2):
            for x, y in run.loader:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = run.criterion(run.model(x), y)
                scaler.scale(loss).backward()
                assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        assert run.model.autocast == torch.bfloat16
        assert run.cost.backward == 50
        assert torch.isfinite(run.records["loss"]).all()


def test_a_loop_inside_autocast():
    """Weights that the scoring pass casted without gradient must not be what training uses."""
    run, net, _ = make(SB(keep=0.5), "twice")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for x, y in run.loader:
            net.zero_grad()
            run.criterion(run.model(x), y).backward()
            assert net.first.weight.grad is not None
            assert net.last.weight.grad.any()


def gradients(net, loss):
    net.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in net.parameters()]


@pytest.mark.filterwarnings("ignore:subset_backward")
def test_a_model_that_cannot_be_traced():
    """One warning, and the right gradients at the price of the whole batch."""
    run, net, optimizer = make(SB(keep=0.5), "once", net=Untraceable().eval())
    net.eval()
    with pytest.warns(UserWarning, match="using the plain Untraceable") as found:
        for _ in range(2):
            for x, y in run.loader:
                value = run.criterion(run.model(x), y)
                outputs = net(x)
                losses = F.cross_entropy(outputs, y, reduction="none")
                rows = losses.argsort(stable=True)[-max(1, len(x) // 2) :]
                expected = gradients(net, F.cross_entropy(outputs[rows], y[rows]))
                for own, theirs in zip(gradients(net, value), expected, strict=True):
                    torch.testing.assert_close(own, theirs)
                optimizer.step()
    assert len([w for w in found if "subset_backward" in str(w.message)]) == 1
    assert run._timeline.selection.forward_passes == "once"
    assert run.cost.scoring == 0


@pytest.mark.filterwarnings("ignore:subset_backward")
def test_auto_switches_to_two_passes_where_it_cannot_be_traced():
    run, net, optimizer = make(SB(keep=0.5), "auto", net=Untraceable())
    assert len(run.loader) == 7
    assert train(run, optimizer) == [8] * 6 + [2]
    assert train(run, optimizer) == [8, 8, 8, 1]
    assert len(run.loader) == 4
    assert [entry["scoring"] for entry in run.history] == [0, N]
    state = run.state_dict()
    other, net2, optimizer2 = make(SB(keep=0.5), "auto", net=Untraceable())
    net2.load_state_dict(net.state_dict())
    other.load_state_dict(state)
    assert len(other.loader) == 4  # without finding it out again
    assert train(other, optimizer2) == [8, 8, 8, 1]


def test_auto_stays_where_it_can_be_traced():
    run, _, optimizer = make(SB(keep=0.5), "auto")
    train(run, optimizer, 3)
    assert run.cost.scoring == 0
    assert [entry["forward"] for entry in run.history] == [N] * 3


@pytest.mark.usefixtures("group_of_one")
def test_a_wrapped_model_is_not_wrapped_again():
    net = Net()
    ddp = nn.parallel.DistributedDataParallel(subset_backward(net))
    run, _, optimizer = make(SB(keep=0.5), "once", net=net, model=ddp)
    assert run.model.module is ddp
    train(run, optimizer)
    assert run.cost.backward == 25 and run.cost.unknown is None


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("passes", ["once", "auto", "twice"])
def test_ddp_trains_like_the_model_inside_and_stays_as_the_user_made_it(passes):
    weights = []
    for parallel in (False, True):
        torch.manual_seed(1)
        net = Net()
        model = nn.parallel.DistributedDataParallel(net) if parallel else net
        names, calls = list(model.state_dict()), []
        run, _, optimizer = make(SB(keep=0.5), passes, net=net, model=model)
        model.register_forward_pre_hook(
            lambda *_, calls=calls: calls.append(1)
        ) if parallel else None
        steps = len(train(run, optimizer, 2))
        weights.append(list(net.parameters()))
        assert run.cost.backward == 50 and run.cost.scoring == (2 * N if passes == "twice" else 0)
        assert list(run.model.state_dict()) == list(model.state_dict()) == names
        if parallel:
            assert run.model.module is model and model.module is net
            assert len(calls) == steps  # own passes run inside
            assert not any(
                isinstance(part, thresher.subset.SubsetBackward)
                for part in copy.deepcopy(run.model).modules()
            )
        run.detach()
    assert all(map(torch.equal, *weights))


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_of_a_compiled_ddp_the_module_inside_is_traced():
    net = Net()
    ddp = nn.parallel.DistributedDataParallel(net)
    run, _, optimizer = make(
        SB(keep=0.5), "once", net=net, model=torch.compile(ddp, backend="eager")
    )
    assert run.model.module is ddp
    train(run, optimizer)
    assert run.cost.backward == 25
    run, *_ = make(SB(keep=0.5), "once", net=net, model=torch.compile(ddp))
    assert run.model._called._module._options == {} and run.model._called._module.wrapped is net


def test_where_no_row_is_kept_nothing_is_learned_from_an_output_without_rows():
    class WithPenalty(Net):
        def forward(self, x):
            return super().forward(x), self.last.weight.square().sum()

    class Nothing(SB):
        def plan_batch(self, signals, state, *, step, generator):
            return BatchPlan(torch.empty(0, dtype=torch.int64)), state

    def losses(outputs, y):
        return F.cross_entropy(outputs[0], y, reduction="none")

    run, net, optimizer = make(Nothing(keep=0.5), "once", net=WithPenalty(), criterion=losses)
    for x, y in run.loader:
        loss = run.criterion(run.model(x), y)
        loss.backward()
        assert loss == 0 and all(not parameter.grad.any() for parameter in net.parameters())
        optimizer.step()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_models_are_unwrapped():
    net = Net()
    run, *_ = make(SB(keep=0.5), "once", net=net, model=torch.compile(net, backend="eager"))
    assert isinstance(run.model.module, thresher.subset.SubsetBackward)
    assert run.model.module.wrapped is net and run.model.module._options is None
    run, *_ = make(
        SB(keep=0.5), "once", net=net, model=torch.compile(net, options={"max_fusion_size": 3})
    )
    assert run.model.module.wrapped is net and run.model.module._options == {
        "max_fusion_size": 3
    }  # keeps its compiler
    inside = subset_backward(net)
    run, *_ = make(SB(keep=0.5), "once", net=net, model=torch.compile(inside, backend="eager"))
    assert run.model.module is inside
    compiled = torch.compile(net, backend="eager")
    for passes in ("twice", "auto"):
        method = SB(keep=0.5) if passes == "twice" else RandomBackprop()
        run, *_ = make(method, passes, net=net, model=compiled)
        assert run.model.module is compiled


def test_the_model_is_left_as_it_was():
    net = Net()
    names = list(net.state_dict())
    run, *_ = make(SB(keep=0.5), "once", net=net)
    assert list(run.model.state_dict()) == names
    assert [id(p) for p in run.model.parameters()] == [id(p) for p in net.parameters()]
    assert type(net) is Net


def test_without_gradient_it_is_the_plain_criterion():
    run, net, _ = make(SB(keep=0.25), "once")
    x, y = next(iter(run.loader))
    net.eval()
    with torch.no_grad():
        assert torch.equal(run.criterion(run.model(x), y), F.cross_entropy(net(x), y))
    assert run.cost.forward == 0 == run._timeline.selection.stage.step


def test_reduce_without_a_criterion():
    data = samples()
    net = nn.Linear(6, C)
    run = thresher.attach(
        SB(keep=0.5),
        loader=DataLoader(data, B),
        criterion=None,
        model=net,
        epochs=2,
        forward_passes="once",
    )
    for x, y in run.loader:
        outputs = run.model(x)
        losses = F.cross_entropy(outputs, y, reduction="none")
        rows = losses.argsort()[-max(1, len(x) // 2) :]
        value = run.reduce(losses, outputs=outputs)
        torch.testing.assert_close(value, losses[rows].mean())
        value.backward()
    assert run.cost.backward == 25


@dataclass(frozen=True)
class Unsure:
    """Keeps what the model is least sure of."""

    stage = "batch"
    requires = thresher.Requirements(signals=("loss", "confidence"))
    seen: list = field(default_factory=list, repr=False)

    def init_state(self):
        return {}

    def count(self, n):
        return 1

    def plan_batch(self, signals, state, *, step, generator):
        assert set(signals) >= {"id", "loss", "confidence"}
        return BatchPlan(signals["confidence"].argmin()[None]), state


@pytest.mark.parametrize("how", ["criterion", "reduce", "users"])
@pytest.mark.parametrize("passes", ["once", "twice", "stale"])
def test_methods_that_need_more_than_losses(passes, how):
    settings = {}
    if how == "users":
        settings = {
            "signals": lambda o, t: {
                "confidence": -o[:, 0].detach(),
                "correct": o[:, 0] > 0,
                "other": o[:, 1],
            }
        }
    run, net, optimizer = make(
        Unsure(),
        Scoring(every_epochs=2) if passes == "stale" else passes,
        net=nn.Linear(6, C),
        **settings,
    )
    for _ in range(2):
        for x, y in run.loader:
            before = run.trained.clone()
            outputs = run.model(x)
            if how == "reduce":
                value = run.reduce(
                    F.cross_entropy(outputs, y, reduction="none"), outputs=outputs, targets=y
                )
            else:
                value = run.criterion(outputs, y)
            value.backward()
            if passes == "once":
                sure = -outputs[:, 0] if how == "users" else outputs.softmax(1).amax(1)
                assert (run.trained - before).nonzero().item() == run.ids[sure.argmin()]
            optimizer.step()
    assert run.cost.backward == 14


# Streams


class Stream(IterableDataset):
    def __init__(self, n=N):
        self.n = n

    def __iter__(self):
        return iter([tuple(tensor[i] for tensor in samples().tensors) for i in range(self.n)])


class Known(Stream):
    def __len__(self):
        return self.n


STREAMED = [
    (SB(keep=0.5), "once", [8] * 6 + [2]),
    (SB(keep=0.5), "auto", [8] * 6 + [2]),
    (SB(keep=0.5), "twice", [8, 8, 8, 1]),
    (RandomBackprop(keep=0.5), "auto", [4] * 6 + [1]),
    (RandomBackprop(keep=0.5), "twice", [8, 8, 8, 1]),
]


@pytest.mark.parametrize(
    ("kind", "drop_last", "case"), crossed([Stream, Known], [False, True], STREAMED)
)
def test_streams(kind, drop_last, case):
    method, passes, sizes = case
    run, _, optimizer = make(
        method, passes, loader=DataLoader(kind(), B, drop_last=drop_last), epochs=3
    )
    sizes = sizes[:-1] if drop_last else sizes
    candidates = 48 if drop_last else N
    kept = 24 if drop_last else 25
    if kind is Known:
        assert len(run.loader) == len(sizes)
    else:
        with pytest.raises(TypeError, match="has no len"):
            len(run.loader)
    assert run.progress == 0.0
    for epoch in range(1, 3):
        assert train(run, optimizer) == sizes
        assert run.cost.backward == kept * epoch
        assert run.cost.full_backward == run.cost.full_forward == candidates * epoch
        assert run.progress == pytest.approx(epoch / 3)
        assert run.history[-1]["candidates"] == candidates
    assert run.trained.shape == (0,)
    with pytest.raises(ValueError, match="not available with an IterableDataset"):
        _ = run.plan
    assert len(run.records) == 0 or all(len(column) == 0 for column in run.records.values())


@pytest.mark.filterwarnings("ignore:.*got no loss")
def test_rows_of_a_stream():
    """Ids are places in the epoch's stream."""
    for passes in ("once", "twice"):
        run, *_ = make(SB(keep=0.5), passes, loader=DataLoader(Stream(), B))
        for _ in range(2):
            for x, y in run.loader:
                assert torch.equal(samples().tensors[0][run.ids], x)
                assert torch.equal(samples().tensors[1][run.ids], y)
            as_if_trained(run)


@pytest.mark.filterwarnings("ignore:.*got no loss")
@pytest.mark.parametrize("kind", [Stream, Known])
def test_progress_of_a_stream(kind):
    """Without a length it is known from the second epoch on."""
    run, _, optimizer = make(SB(keep=0.5), "once", loader=DataLoader(kind(40), 20), epochs=2)
    found = []
    for _ in range(2):
        for x, y in run.loader:
            run.criterion(run.model(x), y).backward()
            optimizer.step()
            found.append(run.progress)
    assert found == pytest.approx(
        [0.25, 0.5, 0.75, 1.0] if kind is Known else [0.0, 0.0, 0.75, 1.0]
    )


def test_an_empty_stream():
    run, _, optimizer = make(SB(keep=0.5), "twice", loader=DataLoader(Stream(0), B), epochs=2)
    assert train(run, optimizer, 2) == []
    assert run.epoch == 2
    assert run.progress == 1.0
    assert run.cost.full_forward == 0


# With a method of the epoch


def test_refreshed_samples_are_scored_by_nobody():
    run, _, optimizer = make([thresher.Kakurenbo(max_fraction=0.5, tau=0.0), SB(keep=0.5)], "twice")
    train(run, optimizer, 3)
    cost = run.cost
    hidden = sum(entry["refreshed"] for entry in run.history)
    assert hidden == cost.refresh > 0
    assert cost.scoring == 3 * N - hidden
    assert cost.forward == cost.scoring + cost.refresh + cost.comparing + cost.backward
    assert torch.isfinite(run.records["loss"]).all()


def test_a_plan_that_draws():
    @dataclass(frozen=True)
    class Drawing:
        stage = "epoch"

        def columns(self):
            return {}

        def plan_epoch(self, records, *, epoch, epochs, generator):
            return EpochPlan(torch.tensor([7, 7, 3, 20, 1, 7, 9, 9]), drawn=True)

    for passes in ("once", "twice"):
        loader = DataLoader(samples(), 4, shuffle=True)
        run, _, optimizer = make([Drawing(), SB(keep=0.5)], passes, loader=loader)
        assert train(run, optimizer) == ([4, 4] if passes == "once" else [4])
        assert run.cost.backward == 4 == int(run.trained.sum())
        assert set(run.trained.nonzero().flatten().tolist()) <= {1, 3, 7, 9, 20}


def test_a_run_can_be_copied_state_by_state():
    """Two runs that train alike say alike, whoever looks in between."""
    found = []
    for nosy in (False, True):
        run, net, optimizer = make(SB(beta=1.0), "once")
        for _ in range(2):
            for x, y in run.loader:
                run.criterion(run.model(x), y).backward()
                if nosy:
                    copy.deepcopy(
                        [run.records["loss"], run.trained, str(run.cost), run.state_dict()]
                    )
                optimizer.step()
                optimizer.zero_grad()
        found.append(
            (
                run.trained.tolist(),
                run.cost.backward,
                net.last.weight.detach().clone(),
                run.records["loss"].clone(),
            )
        )
    assert found[0][:2] == found[1][:2]
    assert torch.equal(found[0][2], found[1][2])
    assert torch.equal(found[0][3], found[1][3])


def test_an_ignored_class_that_is_not_negative_is_recorded_as_never_seen():
    x, y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 4
    model = nn.Linear(4, 4)
    run = thresher.attach(
        thresher.SelectiveBackprop(keep=0.5),
        loader=DataLoader(TensorDataset(x, y), batch_size=8),
        criterion=nn.CrossEntropyLoss(ignore_index=0),
        model=model,
        epochs=1,
        forward_passes="once",
    )
    for inputs, targets in run.loader:
        run.criterion(run.model(inputs), targets).backward()
    assert (run.records["loss"] == NEVER_SEEN).tolist() == (y == 0).tolist()


class Masked(TensorDataset):
    """Masks the labels of odd samples after the first epoch, as a collate function that draws masks of tokens may."""

    later = False

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x, torch.where(torch.tensor(self.later and index % 2 == 1), -100, y)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (thresher.Kakurenbo(max_fraction=0.4, tau=0.0, move_back=False), {}),
        (thresher.SelectiveBackprop(keep=0.5), {"forward_passes": "twice"}),
    ],
    ids=["refresh", "scoring"],
)
def test_an_extra_pass_over_a_sample_without_a_label_keeps_its_record(method, settings):
    y = torch.arange(20) % 2
    x = torch.nn.functional.one_hot(y, 2).float() * torch.where(y == 1, 3.0, -1.0)[:, None]
    data = Masked(x, y)
    model = nn.Linear(2, 2, bias=False)
    nn.init.eye_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    run = thresher.attach(
        method,
        loader=DataLoader(data, 4),
        criterion=nn.CrossEntropyLoss(),
        model=model,
        optimizer=optimizer,
        epochs=3,
        observe=True,
        **settings,
    )
    for epoch in range(3):
        data.later = epoch > 0
        for inputs, targets in run.loader:
            run.criterion(run.model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    expected = nn.functional.cross_entropy(x, y, reduction="none").numpy()
    assert run.data_map()["loss"] == pytest.approx(expected, rel=1e-2)
