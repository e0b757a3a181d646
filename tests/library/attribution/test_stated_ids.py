"""Ids that the loop states: checked against the batch, one per row unless `repeat` says more, of the batch that is meant."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from thresher import AttributionError

N, B, T = 24, 8, 8


class Identity(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.one


def run_of(x, y, criterion, method=None, **settings):
    loader = DataLoader(
        TensorDataset(x, y), B, shuffle=True, generator=torch.Generator().manual_seed(1)
    )
    return thresher.attach(
        method or thresher.FullData(),
        loader=loader,
        criterion=criterion,
        model=Identity(),
        epochs=5,
        **settings,
    )


def token_run(**settings):
    """Tokens whose loss is the id of their sample; the last of their targets tells the samples apart."""
    x = torch.arange(N, dtype=torch.float32).unsqueeze(1).expand(N, T).clone()
    return run_of(
        x,
        torch.arange(N * T).view(N, T),
        lambda outputs, targets: outputs + 0 * targets,
        **settings,
    )


def label_run(y=None, **settings):
    x = torch.stack([torch.arange(N, dtype=torch.float32), torch.randn(N)], 1)
    y = torch.arange(N) % 10 if y is None else y
    return run_of(x, y, lambda outputs, targets: outputs[:, 0], **settings)


def value_run(**settings):
    """Targets that are all different, and no classes."""
    return label_run(torch.arange(N) / 4, **settings)


def assert_right(run):
    loss = run.records["loss"]
    known = torch.isfinite(loss)
    assert torch.equal(loss[known], torch.arange(N, dtype=torch.float32)[known])
    return int(known.sum())


def refused(run, call, match):
    before = run.records["loss"].clone(), run.trained.clone()
    with pytest.raises(AttributionError, match=match):
        call()
    assert torch.equal(run.records["loss"], before[0]) and torch.equal(run.trained, before[1])


def test_several_rows_per_id_need_repeat():
    run = token_run()
    for x, y in run.loader:
        outputs, targets = run.model(x.clone()).flatten(), y.clone().flatten()
        refused(run, lambda o=outputs, t=targets: run.criterion(o, t, ids=run.ids), "repeat=8")
        refused(run, lambda o=outputs: run.reduce(o, ids=run.ids), "repeat=8")
        run.criterion(outputs, targets, ids=run.ids, repeat=T).backward()
    assert assert_right(run) == N
    for x, _ in run.loader:
        run.reduce(run.model(x.clone()).flatten(), run.ids, repeat=T).backward()
    assert assert_right(run) == N


def test_tokens_of_which_time_is_the_outer_dimension():
    run = token_run()
    x, y = next(iter(run.loader))
    outputs, targets = run.model(x.t().clone()).flatten(), y.t().flatten()
    refused(
        run, lambda: run.criterion(outputs, targets, ids=run.ids), "repeat=8|rows of other samples"
    )
    refused(
        run, lambda: run.criterion(outputs, targets, ids=run.ids, repeat=T), "rows of other samples"
    )
    refused(
        run,
        lambda: run.criterion(run.model(x.t().clone()), y.t().clone(), ids=run.ids),
        "rows of other samples",
    )  # T == B


def test_a_batch_that_is_repeated_as_a_whole():
    run = value_run()
    for x, y in run.loader:
        twice, labels = run.model(x.repeat(2, 1)), y.repeat(2)
        refused(run, lambda o=twice, t=labels: run.criterion(o, t, ids=run.ids), "repeat=2")
        refused(
            run,
            lambda o=twice, t=labels: run.criterion(o, t, ids=run.ids, repeat=2),
            "rows of other samples",
        )
        outputs, labels = run.model(x.repeat_interleave(2, 0)), y.repeat_interleave(2)
        run.criterion(outputs, labels, ids=run.ids, repeat=2)
    assert assert_right(run) == N


@pytest.mark.parametrize(
    "ids", [lambda run: run.ids, lambda run: run.ids.clone()], ids=["view", "copy"]
)
@pytest.mark.parametrize("cast", [lambda y: y, lambda y: y.double(), lambda y: y.unsqueeze(1)])
def test_targets_at_the_rows_of_other_samples(ids, cast):
    run = value_run()
    x, y = next(iter(run.loader))
    order = torch.roll(torch.arange(B), 1)
    refused(
        run,
        lambda: run.criterion(run.model(x[order]), cast(y[order]), ids=ids(run)),
        "rows of other samples",
    )
    run.criterion(run.model(x[order]), cast(y[order]), ids=ids(run)[order])
    assert assert_right(run) == B


@pytest.mark.parametrize(
    "change",
    [
        lambda y: F.one_hot(y, 10).float(),
        lambda y: y.masked_fill(y == y[0], -100),
        lambda y: (y + 3) % 20,
        lambda y: 0.7 * y + 0.3 * y.roll(1),
    ],
)
def test_targets_that_the_loop_computed_are_no_contradiction(change):
    run = label_run()
    for x, y in run.loader:
        run.criterion(run.model(x.clone()), change(y), ids=run.ids)
    assert assert_right(run) == N


def test_the_second_term_of_mixup_has_a_way_out():
    run = value_run()
    for x, y in run.loader:
        order = torch.roll(torch.arange(B), 1)
        outputs = run.model(x.clone())
        refused(
            run,
            lambda o=outputs, t=y[order]: run.criterion(o, t, ids=run.ids),
            r"mixup.*run.reduce\(losses, ids=...\)",
        )
        run.reduce(0.7 * outputs[:, 0] + 0.3 * outputs[:, 0], ids=run.ids)
    assert assert_right(run) == N


@pytest.mark.parametrize("ahead", [1, 2, 3])
@pytest.mark.parametrize("permuted", [False, True])
def test_a_prefetcher_asks_for_the_ids_of_its_batch(ahead, permuted):
    run = label_run()
    waiting, order = [], torch.randperm(B) if permuted else slice(None)

    def train(x, y):
        for _ in range(2):
            run.criterion(
                run.model(x.clone()[order]), F.one_hot(y, 10)[order], ids=run.ids_of(x)[order]
            ).backward()

    for i, batch in enumerate(run.loader):
        waiting.append(batch)
        if len(waiting) <= ahead:
            continue
        x, y = waiting.pop(0)
        if i == ahead:
            for ids in (run.ids, run.ids.flip(0)):
                refused(
                    run,
                    lambda x=x, y=y, ids=ids: run.criterion(
                        run.model(x.clone()), F.one_hot(y, 10), ids=ids
                    ),
                    r"batch \d+ has no loss yet.*run.ids_of\(tensor\)",
                )
        train(x, y)
    for batch in waiting:
        train(*batch)
    loss = run.records["loss"]
    assert torch.equal(loss, torch.arange(N, dtype=torch.float32))


def test_a_prefetcher_that_is_at_its_end_may_use_the_last_ids():
    run = label_run()
    *before, (last, labels) = run.loader
    for x, y in before:
        refused(
            run,
            lambda: run.criterion(run.model(last.clone()), labels.float(), ids=run.ids),
            "has no loss yet",
        )
        run.criterion(run.model(x.clone()), y.float(), ids=run.ids_of(x))
    run.criterion(run.model(last.clone()), labels.float(), ids=run.ids)
    assert assert_right(run) == N


def test_skipped_batches_with_ids():
    """After a skipped batch the ids are certain where the tensors name the rows, too, or the loop asks for them."""
    run = label_run()
    for i, (x, y) in enumerate(run.loader):
        if i == 0:
            continue
        ids = run.ids if i == 1 else run.ids_of(x)
        run.criterion(run.model(x) if i == 1 else run.model(x.clone()), y.long(), ids=ids)
    assert assert_right(run) == 2 * B
    for i, (x, y) in enumerate(run.loader):  # a batch of an earlier epoch waits no more
        if i == 0:
            run.criterion(run.model(x.clone()), y.float(), ids=run.ids)
        break


def test_ids_of_parts_and_of_others():
    run = label_run()
    x, y = next(iter(run.loader))
    assert torch.equal(run.ids_of(y[2:6:2]), run.ids[2:6:2])
    assert torch.equal(run.ids_of(run.model(x)[:3]), run.ids[:3])
    x.sub_(1.0)
    assert torch.equal(run.ids_of(x), run.ids)
    with pytest.raises(
        AttributionError, match=r"run.ids_of: `tensor` is a tensor that this run did not yield"
    ):
        run.ids_of(x.clone())


@pytest.mark.parametrize("repeat", [0, -1, 2.0, True, "2"])
def test_repeat_must_be_a_number(repeat):
    run = label_run()
    x, y = next(iter(run.loader))
    with pytest.raises(ValueError, match="integer of at least 1"):
        run.criterion(run.model(x), y, ids=run.ids, repeat=repeat)


def test_repeat_needs_ids_and_agrees_with_the_tensors():
    run = token_run()
    x, y = next(iter(run.loader))
    with pytest.raises(ValueError, match="pass `ids` with it"):
        run.criterion(run.model(x), y, repeat=2)
    refused(
        run,
        lambda: run.criterion(run.model(x).view(-1), y.view(-1), ids=run.ids, repeat=4),
        "8 rows per sample",
    )


def test_what_the_device_compares_is_said_at_the_end_of_the_epoch(monkeypatch):
    monkeypatch.setattr("thresher.attribution.resolve.certain_now", lambda flag: False)
    run = value_run()
    for x, y in run.loader:
        run.criterion(run.model(x.clone()), y.roll(1), ids=run.ids)
        break
    assert assert_right(run) == 0
    with pytest.raises(AttributionError, match="epoch that just ended"):
        iter(run.loader)


@pytest.mark.parametrize("method", [thresher.SelectiveBackprop(keep=0.5), thresher.InfoBatch()])
def test_repeat_with_a_method_that_chooses(method):
    settings = {"forward_passes": "once"} if isinstance(method, thresher.SelectiveBackprop) else {}
    run = token_run(method=method, **settings)
    for _ in range(2):
        for x, y in run.loader:
            run.criterion(
                run.model(x.clone()).flatten(), y.clone().flatten(), ids=run.ids, repeat=T
            ).backward()
            refused(
                run, lambda x=x: run.reduce(run.model(x.clone()).flatten(), ids=run.ids), "repeat=8"
            )
    assert assert_right(run) > 0


FORWARDS = {
    "a view": (lambda m, b: (m(b[0]).flatten(), b[1].flatten()), None),
    "a cast": (lambda m, b: (m(b[0]).flatten(), b[1].float().flatten()), None),
    "samples first": (lambda m, b: (m(b[0]), b[1] * 2), None),
    "time first": (lambda m, b: (m(b[0]).t().flatten(), b[1].t().flatten()), "another order"),
    "time first, T = B": (lambda m, b: (m(b[0]).t(), b[1].t().clone()), "another order"),
    "repeated": (lambda m, b: (m(b[0].repeat(2, 1)), b[1].repeat(2, 1)), "another order"),
    "unknown": (lambda m, b: (m(b[0]).t().flatten(), b[1].t().flatten() * 2), "cannot tell which"),
    "some rows": (
        lambda m, b: (m(b[0])[: len(b[0]) // 2], b[1][: len(b[0]) // 2]),
        "only some rows|first dimension",
    ),
    "losses only": (
        lambda m, b: (m(b[0]).repeat(2, 1), b[1][:, :1].repeat(1, 1)),
        "cannot tell which|first dimension",
    ),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_rows_of_an_own_forward_pass(name):
    """Flattened rows are assigned in the refresh only where their order is certain."""
    forward, match = FORWARDS[name]

    def train(run):
        for _ in range(2):
            for x, y in run.loader:
                run.criterion(run.model(x), y).backward()

    x = torch.arange(N, dtype=torch.float32).unsqueeze(1).expand(N, T).clone()
    method = thresher.Kakurenbo(
        max_fraction=0.5, move_back=False, reduce_fraction=False, adjust_lr=False
    )
    run = run_of(
        x, torch.arange(N * T).view(N, T), lambda o, t: o + 0 * t.sum(), method, forward=forward
    )
    if match is None:
        train(run)
        assert run.cost.refresh and assert_right(run) == N
    else:
        with pytest.raises((AttributionError, ValueError), match=match):
            train(run)


@pytest.mark.parametrize("ahead", [2, 3, 7, 20])
def test_cast_targets_of_a_deep_prefetcher(ahead):
    """Labels are held long enough; where they are not, the error says what is missing and what to do."""
    x = torch.stack([torch.arange(N, dtype=torch.float32), torch.randn(N)], 1)
    loader = DataLoader(TensorDataset(x, torch.arange(N) % 10), 1)
    run = thresher.attach(
        thresher.FullData(),
        loader=loader,
        criterion=lambda o, t: o[:, 0],
        model=Identity(),
        epochs=1,
    )
    waiting = []
    for a, y in run.loader:
        waiting.append((a, y, y.float()))
        if len(waiting) > ahead:
            a, y, cast = waiting.pop(0)
            if ahead == 20 and not run.trained.any():
                refused(
                    run,
                    lambda a=a, t=cast: run.criterion(run.model(a), t),
                    r"batch 0 are no longer held.*run.ids_of",
                )
            run.criterion(run.model(a), cast if ahead < 20 else y)
    assert assert_right(run) == N - ahead


def test_inputs_that_are_normalized_in_place_have_ways_out():
    run = label_run()
    for i, (x, y) in enumerate(run.loader):
        if i == 2:
            run.criterion(run.model(x - x.mean() + x.mean()), y)
            break
        outputs = run.model(x.add_(0.0))
        refused(
            run,
            lambda o=outputs, t=y: run.criterion(o, t),
            r"changed in place.*x = x - mean.*ids=run.ids",
        )
        refused(
            run,
            lambda o=outputs, t=y: run.criterion(o * 1.0, t),
            r"changed in place.*x = x - mean.*ids=run.ids",
        )
        run.criterion(outputs, y, ids=run.ids if i else run.ids_of(x))
    loss = run.records["loss"]
    assert torch.isfinite(loss).all() and torch.allclose(
        loss, torch.arange(N, dtype=torch.float32), atol=1e-4
    )


@pytest.mark.parametrize("inputs", [lambda y: y.flip(0), lambda y: y.flip(0) + 0.3])
def test_inputs_that_have_the_values_of_the_labels_are_no_evidence(inputs):
    """One input per sample: the same whole numbers as the labels, or numbers that are cut off to these."""
    y = torch.arange(4 * B)
    loader = DataLoader(TensorDataset(inputs(y).float(), y), 4 * B)
    run = thresher.attach(
        thresher.FullData(),
        loader=loader,
        criterion=lambda o, t: o + 0.0 * t,
        model=Identity(),
        epochs=2,
    )
    x, y = next(iter(run.loader))
    refused(
        run,
        lambda: run.criterion(run.model(x.clone()), y.roll(1), ids=run.ids),
        "rows of other samples",
    )
    run.criterion(run.model(x), y.clone(), ids=run.ids).backward()
    assert torch.equal(run.records["loss"], x)
    remapped = y + 100
    run.criterion(run.model(x), remapped, ids=run.ids)


def test_computed_labels_that_inputs_have_as_whole_numbers_are_no_evidence():
    labels = torch.arange(B)
    loader = DataLoader(TensorDataset(labels.flip(0) + 0.3, labels + 100), B)
    run = thresher.attach(
        thresher.FullData(),
        loader=loader,
        criterion=lambda o, t: o + 0.0 * t,
        model=Identity(),
        epochs=1,
    )
    x, y = next(iter(run.loader))
    run.criterion(run.model(x), y - 100, ids=run.ids)
    assert run.trained.all()


FEW = {
    "flipped": (2, lambda y, _: 1 - y, False),
    "flipped, as many of both": (2, lambda y, _: 1 - y, False),
    "in a cycle, as many of each": (8, lambda y, _: (y + 3) % 8, False),
    "some flipped": (
        4,
        lambda y, g: torch.where(torch.rand(len(y), generator=g) < 0.3, (y + 1) % 4, y),
        False,
    ),
    "random": (4, lambda y, g: torch.randint(4, y.shape, generator=g), False),
    "rolled": (4, lambda y, _: y.roll(1), True),
    "rolled classes, as many of each": (8, lambda y, _: y.roll(1), True),
    "two classes rolled": (2, lambda y, _: y.roll(1), True),
}


@pytest.mark.parametrize("known", [True, False], ids=["run.model(x)", "run.model(x.clone())"])
@pytest.mark.parametrize("name", FEW)
def test_labels_of_a_few_classes(name, known):
    """Labels that the loop changes are refused in no batch, rows that it moves in one of the first batches."""
    classes, change, moves = FEW[name]
    size, g = 800, torch.Generator().manual_seed(0)
    y = torch.randint(classes, (size,), generator=g)
    if "as many" in name:
        y = torch.cat([torch.randperm(B, generator=g) % classes for _ in range(size // B)])
    x = torch.arange(size, dtype=torch.float32)
    loader = DataLoader(TensorDataset(x, y), B)
    run = thresher.attach(
        thresher.FullData(), loader=loader, criterion=lambda o, t: o, model=Identity(), epochs=1
    )
    credited = 0
    with (
        pytest.raises(AttributionError, match="rows of other samples")
        if moves and not known
        else nullcontext()
    ):
        for inputs, labels in run.loader:
            for _ in range(2):  # a second loss of a batch says nothing new
                run.criterion(
                    run.model(inputs if known else inputs.clone()), change(labels, g), ids=run.ids
                )
            credited += 1
    assert (credited < 40) if moves and not known else (credited == size // B)


def test_permuted_labels_of_many_classes_are_refused_at_once():
    y = torch.arange(32)
    loader = DataLoader(TensorDataset(y.float(), y), 32)
    run = thresher.attach(
        thresher.FullData(), loader=loader, criterion=lambda o, t: o, model=Identity(), epochs=1
    )
    x, y = next(iter(run.loader))
    refused(
        run,
        lambda: run.criterion(run.model(x.clone()), y.roll(1), ids=run.ids),
        "rows of other samples",
    )
