"""A budget on a stream: a uniform share of each batch, with the steps of full training."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import thresher
from depth import crossed, depth
from helpers import assert_same

N, B = 61, 8


class Stream(IterableDataset):
    """Samples that are counted as they are read; each worker reads its part."""

    def __init__(self, n=N):
        self.x = torch.randn(n, 6, generator=torch.Generator().manual_seed(1))
        self.read = 0

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        begin, step = (0, 1) if info is None else (info.id, info.num_workers)
        for i in range(begin, len(self.x), step):
            self.read += 1
            yield self.x[i], torch.tensor(i % 3)


class Known(Stream):
    def __len__(self):
        return len(self.x)


def parts(features=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), *copy.deepcopy(features or [nn.ReLU()]), nn.Linear(8, 3))
    return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def attached(
    method,
    stream=None,
    *,
    features=None,
    epochs=3,
    batch_size=B,
    drop_last=False,
    workers=0,
    **more,
):
    model, optimizer = parts(features)
    loader = DataLoader(
        Stream() if stream is None else stream, batch_size, drop_last=drop_last, num_workers=workers
    )
    arguments = {
        "criterion": nn.CrossEntropyLoss(),
        "model": model,
        "optimizer": optimizer,
        "epochs": epochs,
    } | more
    return thresher.attach(method, loader=loader, **arguments), optimizer


def epoch(run, optimizer):
    """Trains for an epoch; returns the ids of its batches."""
    found = []
    for x, y in run.loader:
        optimizer.zero_grad()
        run.criterion(run.model(x), y).backward()
        optimizer.step()
        found.append(run.ids.tolist())
    return found


@pytest.mark.parametrize("method", [0.5, "50%", thresher.UniformRows(0.5)])
def test_a_share_is_drawn_uniformly_from_each_batch(method):
    run, optimizer = attached(method, epochs=1)
    batches = epoch(run, optimizer)
    assert [len(ids) for ids in batches] == [4] * 7 + [2]
    assert (
        run.method == thresher.UniformRows(0.5)
        and run.history[0]["selected"] == 30
        and run.history[0]["lr_scale"] == 1
    )


@settings(max_examples=depth(12, 150))
@given(st.integers(1, 5), st.integers(2, 16), st.data())
def test_the_cost_is_the_share_and_the_steps_are_those_of_full_training(full, size, data):
    """What is left over from a full batch does not divide; the last batch is dropped or smaller."""
    n = full * size + data.draw(st.integers(0, size - 1))
    share = data.draw(st.integers(max(10, -(-100 // size)), 99)) / 100
    drop_last, known, epochs = (
        data.draw(st.booleans()),
        data.draw(st.booleans()),
        data.draw(st.sampled_from([1, 2, 5])),
    )
    stream = (Known if known else Stream)(n)
    run, optimizer = attached(share, stream, epochs=epochs, batch_size=size, drop_last=drop_last)
    steps, whole = (full, full * size) if drop_last else (-(-n // size), n)
    for number in range(1, epochs + 1):
        stream.read = 0
        batches = epoch(run, optimizer)
        assert len(batches) == steps and (not known or len(run.loader) == steps)
        assert stream.read == n
        assert all(0 < len(ids) - share * size + 1 < 2 for ids in batches[:full])
        assert all(
            step * size <= i < (step + 1) * size for step, ids in enumerate(batches) for i in ids
        )
        kept = sum(map(len, batches))
        assert abs(kept / whole - share) <= 0.01 + 1 / whole and run.history[-1]["selected"] == kept
        assert (
            run.cost.full_forward == run.cost.full_backward == whole * number
            and run.cost.steps == steps * number
        )
    assert (
        run.cost.forward == run.cost.backward and abs(run.cost.ratio() - share) <= 0.01 + 1 / whole
    )


class Hinted(Stream):
    """A stream that states another length than it has."""

    def __init__(self, stated):
        super().__init__(96)
        self.stated = stated

    def __len__(self):
        return self.stated


class Unsized(Stream):
    """A stream whose length is an error, as of a data pipe."""

    def __len__(self):
        raise TypeError("the pipe has no valid length")


SHARES = [
    (0.5, {}, 48),
    (thresher.SelectiveBackprop(keep=0.5), {}, 96),
    (thresher.SelectiveBackprop(keep=0.5), {"forward_passes": "twice"}, 48),
]


@pytest.mark.parametrize(
    ("stated", "drop_last", "case"), crossed([16, 40, 41, 90, 200], [False, True], SHARES)
)
def test_the_length_of_a_stream_is_a_hint(stated, drop_last, case):
    method, more, kept = case
    run, optimizer = attached(method, Hinted(stated), drop_last=drop_last, **more)
    for number in (1, 2):
        rows = sum(map(len, epoch(run, optimizer)))
        # By a length that is too large, a share rounds its draws as for a longer training.
        assert abs(rows - kept) <= (8 if stated == 200 else 0)
        assert run.cost.full_forward == run.cost.full_backward == 96 * number
        assert run.history[-1]["complete"] and run.progress == pytest.approx(number / 3)


def test_a_stream_that_goes_on_after_its_length_is_left_and_resumed_there():
    def train(run, optimizer, batches):
        for (x, y), _ in zip(run.loader, range(batches), strict=False):
            optimizer.zero_grad()
            run.criterion(run.model(x), y).backward()
            optimizer.step()
            if batches < 12 and run.ids[-1] >= (batches - 1) * B:
                return copy.deepcopy(
                    [run.state_dict(), run.model.state_dict(), optimizer.state_dict()]
                )
        return run.model.state_dict()

    whole = train(*attached(0.5, Hinted(40)), 13)
    for left_at in (5, 8):  # at the length, and behind it
        states = train(*attached(0.5, Hinted(40)), left_at)
        run, optimizer = attached(0.5, Hinted(40))
        for part, state in zip((run, run.model, optimizer), states, strict=True):
            part.load_state_dict(state)
        assert_same(whole, train(run, optimizer, 13))
        assert run.cost.full_forward == 96


def test_a_stream_whose_length_is_an_error_has_none():
    run, optimizer = attached(0.5, Unsized(96))
    assert sum(map(len, epoch(run, optimizer))) == 48 and run.cost.ratio() == 0.5


@pytest.mark.parametrize(("drop_last", "rows"), [(False, 90), (True, 80)])
def test_workers_that_drop_their_last_batches_are_counted_as_they_come(drop_last, rows):
    run, optimizer = attached(0.5, Known(90), workers=2, drop_last=drop_last, epochs=2)
    for number in (1, 2):
        epoch(run, optimizer)
        assert run.cost.full_forward == number * rows and run.cost.ratio() == 0.5


def test_the_smaller_parts_of_workers():
    run, optimizer = attached(0.5, workers=2)
    sizes = [
        len(ids) for ids in epoch(run, optimizer)
    ]  # 31 and 30 samples: full batches in turn, then one of 7 and one of 6
    assert len(sizes) == 8 and sum(sizes) == 30 and run.cost.full_forward == N


def test_the_draw_is_the_runs_own():
    """It follows the seed of `attach`, changes from epoch to epoch, and draws nothing from the global random state."""
    found = []
    for seed in (0, 0, 1):
        run, optimizer = attached(0.5, seed=seed)
        torch.manual_seed(5)
        found.append([epoch(run, optimizer) for _ in range(2)])
        own = torch.get_rng_state()
    assert found[0] == found[1] != found[2] and found[0][0] != found[0][1]
    torch.manual_seed(5)
    for _ in range(2):
        for _ in DataLoader(Stream(), B):
            pass
    assert torch.equal(own, torch.get_rng_state())


@pytest.mark.parametrize("features", [None, [nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3)]])
@pytest.mark.parametrize("kind", [Stream, Known])
def test_share_1_is_the_unattached_loop_bit_for_bit(kind, features):
    run, optimizer = attached(1.0, kind(), features=features)
    torch.manual_seed(2)
    for _ in range(3):
        epoch(run, optimizer)
    own = [run.model.state_dict(), optimizer.state_dict(), torch.get_rng_state()]
    model, optimizer = parts(features)
    torch.manual_seed(2)
    for _ in range(3):
        for x, y in DataLoader(kind(), B):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert_same(own, [model.state_dict(), optimizer.state_dict(), torch.get_rng_state()])
    assert run.cost.ratio() == 1 and run.cost.steps == 24


def test_a_last_batch_under_batch_norm_has_two_rows():
    run, optimizer = attached(0.25, Stream(19), features=[nn.BatchNorm1d(8)])
    assert [[len(ids) for ids in epoch(run, optimizer)] for _ in range(3)] == [[2, 2, 2]] * 3


def test_a_pass_for_evaluation_is_told_to_have_some_samples():
    run, _ = attached(0.5)
    with (
        torch.no_grad(),
        pytest.warns(UserWarning, match=r"samples that attach\(0.5\) keeps"),
    ):
        for x, _ in run.loader:
            run.model(x)


def test_a_regression_and_losses_of_the_loop_need_no_signals():
    run, optimizer = attached(0.5, criterion=nn.MSELoss())
    for x, _ in run.loader:
        run.criterion(run.model(x)[:, 0], x[:, 0]).backward()
        optimizer.step()
    assert run.cost.backward == 30 and not len(run.records)
    run, optimizer = attached(0.5, criterion=None)
    for x, _ in run.loader:
        run.reduce((run.model(x)[:, 0] - x[:, 0]).square()).backward()
        optimizer.step()
    assert run.cost.backward == 30


# What is refused


@pytest.mark.parametrize(
    ("share", "features", "message"),
    [
        (
            0.1,
            None,
            r"has 8 samples, of which a share of 0\.1 is less than one a batch: the smallest share is 0\.125\.",
        ),
        (
            0.2,
            [nn.BatchNorm1d(8)],
            r"fewer than two per batch, which BatchNorm needs: the smallest share is 0\.25\.",
        ),
    ],
)
def test_too_few_rows_are_refused_with_the_smallest_share(share, features, message):
    model, optimizer = parts(features)
    settings = {
        "criterion": nn.CrossEntropyLoss(),
        "model": model,
        "optimizer": optimizer,
        "epochs": 2,
    }
    loader = DataLoader(Stream(), B)
    with pytest.raises(ValueError, match=message):
        thresher.attach(share, loader=loader, **settings)
    assert not optimizer._optimizer_step_pre_hooks
    thresher.attach(0.125 if features is None else 0.25, loader=loader, **settings)


def test_other_methods_and_lists_are_refused_with_the_way_out():
    message = r"Stream, an IterableDataset, whose samples have no index.* A share, as in attach\(0\.5, .* UniformRows\(0\.5\)"
    for method in (
        thresher.Winnow(0.5),
        [thresher.UniformSubset(0.5), thresher.SelectiveBackprop(keep=0.5)],
    ):
        with pytest.raises(TypeError, match=message):
            attached(method)


@pytest.mark.parametrize("spend", ["steps", "batches"])
@pytest.mark.parametrize("method", [0.5, thresher.RandomBackprop(keep=0.5)])
def test_there_is_no_plan_to_spend(method, spend):
    with pytest.raises(
        ValueError,
        match="`spend`: `loader` iterates over an IterableDataset, for which it has no effect",
    ):
        attached(method, spend=spend)


def test_no_optimizer_is_needed():
    attached(0.5, optimizer=None)
