"""A loss is credited to the right samples, or refused: with a model whose loss is the sample's id."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

import thresher
from thresher import AttributionError
from thresher.attribution import resolve
from thresher.attribution.tracker import RowTracker

N = 40
B = 8


class Identity(nn.Module):
    """Returns its input times one: a loss that reads an entry of the output is that entry of the input."""

    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.one


def id_loss(outputs, targets):
    """The id, which is the first entry of each row."""
    return outputs[:, 0]


def id_data(labels=None):
    x = torch.stack(
        [
            torch.arange(N, dtype=torch.float32),
            torch.randn(N, generator=torch.Generator().manual_seed(0)),
        ],
        1,
    )
    return TensorDataset(x, torch.arange(N) % 10 if labels is None else labels)


def make_run(dataset=None, *, criterion=id_loss, loader=None, method=None, **settings):
    loader = loader or DataLoader(
        dataset or id_data(), B, shuffle=True, generator=torch.Generator().manual_seed(1)
    )
    return thresher.attach(
        method or thresher.FullData(),
        loader=loader,
        criterion=criterion,
        model=Identity(),
        epochs=5,
        **settings,
    )


def snapshot(run):
    return (
        {name: tensor.clone() for name, tensor in run.records.items()},
        run.trained.clone(),
        run.cost.backward,
    )


def assert_unchanged(run, before):
    records, trained, backward = before
    for name, tensor in run.records.items():
        assert torch.equal(tensor, records[name]), name
    assert torch.equal(run.trained, trained) and run.cost.backward == backward


def assert_right(run, *, seen=None):
    """Every recorded loss is its id, and exactly the expected samples are recorded."""
    loss = run.records["loss"]
    recorded = torch.isfinite(loss)
    assert torch.equal(loss[recorded], torch.arange(N, dtype=torch.float32)[recorded])
    if seen is not None:
        assert set(recorded.nonzero().flatten().tolist()) == set(seen)
        assert int(run.trained.sum()) == len(seen)


def refused(run, call, match=None):
    before = snapshot(run)
    with pytest.raises(AttributionError, match=match):
        call()
    assert_unchanged(run, before)


# Right


def test_plain_loop():
    run = make_run()
    for x, y in run.loader:
        run.criterion(run.model(x), y).backward()
    assert_right(run, seen=range(N))
    assert run.cost.forward == run.cost.backward == N


def test_targets_alone_name_rows():
    run = make_run()
    model = Identity()
    for x, y in run.loader:
        run.criterion(model(x.clone()), y).backward()
    assert_right(run, seen=range(N))
    assert run.cost.forward == run.cost.backward == N


def test_outputs_alone_name_rows():
    run = make_run(criterion=lambda outputs, targets: outputs[:, 0])
    for x, _ in run.loader:
        run.criterion(run.model(x), None).backward()
    assert_right(run, seen=range(N))


@pytest.mark.parametrize(
    "cast",
    [
        lambda y: y.float(),
        lambda y: y.unsqueeze(1).double(),
        lambda y: y.clone(),
        lambda y: y.int(),
    ],
)
def test_cast_targets_are_accepted_where_outputs_name_the_rows(cast):
    run = make_run()
    for x, y in run.loader:
        y = cast(y)
        run.criterion(run.model(x), y).backward()
    assert_right(run, seen=range(N))


def test_one_ahead_prefetcher():
    def prefetch(loader):
        ahead = None
        for batch in loader:
            if ahead is not None:
                yield ahead
            ahead = batch
        yield ahead

    run = make_run()
    for _ in range(2):
        for x, y in prefetch(run.loader):
            run.criterion(run.model(x), y.long().clone()).backward()
    assert_right(run)
    assert run.cost.forward == 2 * N


def test_prefetcher_that_mixes_up_batches_is_refused():
    run = make_run()
    batches = iter(run.loader)
    (x1, y1), (x2, y2) = next(batches), next(batches)
    refused(run, lambda: run.criterion(run.model(x1), y2), "different rows")
    refused(run, lambda: run.criterion(run.model(x1), y2.clone()), "new tensors")
    run.criterion(run.model(x2), y2)
    run.criterion(run.model(x1), y1)
    assert_right(run)
    assert int(run.trained.sum()) == 2 * B


def test_accumulation_over_batches():
    run = make_run()
    held = []
    for i, (x, y) in enumerate(run.loader):
        held.append(run.criterion(run.model(x), y))
        if i % 3 == 2:
            torch.stack(held).sum().backward()
            held = []
    assert_right(run, seen=range(N))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
@pytest.mark.parametrize("strided", [False, True])
def test_micro_batches(order, strided):
    run = make_run()
    for x, y in run.loader:
        for i in order:
            rows = slice(i, None, 4) if strided else slice(2 * i, 2 * i + 2)
            run.criterion(run.model(x[rows]), y[rows]).backward()
    assert_right(run, seen=range(N))


def test_micro_batches_of_whole_outputs():
    run = make_run()
    for x, y in run.loader:
        outputs = run.model(x)
        for rows in (slice(0, 3), slice(3, 8)):
            run.criterion(outputs[rows], y[rows])
    assert_right(run, seen=range(N))


def test_micro_batches_that_do_not_match_are_refused():
    run = make_run()
    x, y = next(iter(run.loader))
    outputs = run.model(x)
    refused(run, lambda: run.criterion(outputs[:4], y[4:]), "different rows")
    refused(run, lambda: run.criterion(outputs[::2], y[1::2]), "different rows")
    refused(run, lambda: run.criterion(outputs[:4], y[:2]), "different rows")


def test_overlapping_micro_batches_add_once_counted():
    run = make_run()
    x, y = next(iter(run.loader))
    outputs = run.model(x)
    ids = run.ids
    run.criterion(outputs[:5], y[:5])
    run.criterion(outputs[3:], y[3:])
    expected = ids.float().clone()
    expected[3:5] *= 2
    assert torch.equal(run.records["loss"][ids], expected)
    assert run.cost.forward == B


def token_run(flatten_model=False):
    """Sequences whose token losses are the id, 4 tokens each."""
    x = torch.arange(N, dtype=torch.float32).repeat_interleave(4).view(N, 4)
    y = torch.zeros(N, 4)
    loader = DataLoader(TensorDataset(x, y), B, shuffle=True)
    return make_run(loader=loader, criterion=lambda outputs, targets: outputs - targets)


@pytest.mark.parametrize("shape", [(-1,), (-1, 4)])
def test_flattened_tokens(shape):
    run = token_run()
    for x, y in run.loader:
        run.criterion(run.model(x).view(*shape), y.view(*shape)).backward()
    assert_right(run, seen=range(N))


def test_flattened_micro_batches():
    run = token_run()
    for x, y in run.loader:
        outputs = run.model(x).view(-1)
        for tokens in (slice(0, 12), slice(12, 32)):
            run.criterion(outputs[tokens], y.view(-1)[tokens])
    assert_right(run, seen=range(N))


def test_flattened_rows_that_are_not_whole_are_refused():
    run = token_run()
    x, y = next(iter(run.loader))
    outputs = run.model(x).view(-1)
    refused(run, lambda: run.criterion(outputs[:10], y.view(-1)[:10]), "only parts of rows")


def test_time_first_views_are_refused():
    run = token_run()
    x, y = next(iter(run.loader))
    refused(run, lambda: run.criterion(run.model(x).t(), y.t()), "only parts of rows")


def test_skipped_batches():
    run = make_run()
    seen = []
    for i, (x, y) in enumerate(run.loader):
        if i % 2:
            continue
        seen += run.ids.tolist()
        run.criterion(run.model(x), y).backward()
    assert_right(run, seen=seen)


def test_last_partial_batch_and_drop_last():
    for drop_last, count in ((False, N), (True, N - N % 7)):
        run = make_run(loader=DataLoader(id_data(), 7, shuffle=True, drop_last=drop_last))
        for x, y in run.loader:
            run.criterion(run.model(x), y).backward()
        assert_right(run)
        assert run.cost.forward == count == run.cost.full_forward


def test_batches_that_are_views_of_one_big_tensor():
    big_x, big_y = id_data().tensors

    class Views(Dataset):
        def __len__(self):
            return N

        def __getitem__(self, i):
            return i

    def collate(ids):
        low, high = min(ids), max(ids) + 1
        if ids == list(range(low, high)):
            return big_x[low:high], big_y[low:high]
        return big_x[ids], big_y[ids]

    run = make_run(loader=DataLoader(Views(), B, collate_fn=collate))
    for _ in range(3):
        batches = list(run.loader)
        for x, y in reversed(batches):
            run.criterion(run.model(x), y).backward()
    assert_right(run)
    assert run.cost.forward == 3 * N


def test_two_runs_interleaved():
    one, two = make_run(), make_run(id_data())
    for (x1, y1), (x2, y2) in zip(one.loader, two.loader, strict=True):
        refused(one, lambda y2=y2, x2=x2: one.criterion(one.model(x2), y2), "did not yield")
        refused(two, lambda y1=y1, x1=x1: two.criterion(two.model(x1), y1), "did not yield")
        one.criterion(one.model(x1), y1)
        two.criterion(two.model(x2), y2)
    assert_right(one, seen=range(N))
    assert_right(two, seen=range(N))


class Plain(Dataset):
    """Module-level, so that spawned workers can import it."""

    def __len__(self):
        return N

    def __getitem__(self, i):
        return torch.tensor([float(i), 1.0]), i % 10


def plain_collate(samples):
    return default_collate(samples)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers(context):
    loader = DataLoader(
        Plain(),
        B,
        shuffle=True,
        num_workers=2 if context == "fork" else 1,  # a spawned worker imports torch
        multiprocessing_context=context,
        persistent_workers=context == "spawn",
    )
    run = make_run(loader=loader)
    for _ in range(2):
        for x, y in run.loader:
            run.criterion(run.model(x), y).backward()
    assert_right(run)
    assert run.cost.forward == 2 * N
    run.detach()


# Auxiliary heads


def test_auxiliary_heads_add_and_count_once():
    run = make_run()
    for x, y in run.loader:
        main = run.model(x)
        aux = main.clone()
        (run.criterion(main, y) + 0.3 * run.criterion(aux, y)).backward()
    loss = run.records["loss"]
    assert torch.equal(loss, 2 * torch.arange(N, dtype=torch.float32))
    assert run.cost.forward == run.cost.backward == N


def test_auxiliary_heads_replace_after_a_step():
    model = Identity()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    loader = DataLoader(id_data(), B)
    run = thresher.attach(
        thresher.FullData(),
        loader=loader,
        criterion=id_loss,
        model=model,
        optimizer=optimizer,
        epochs=1,
    )
    x, y = next(iter(run.loader))
    for _ in range(2):
        outputs = run.model(x)
        (run.criterion(outputs, y) + run.criterion(1 * outputs, y)).backward()
        optimizer.step()
    assert torch.equal(run.records["loss"][:B], 2 * torch.arange(B, dtype=torch.float32))
    assert run.cost.forward == 2 * B


def test_reading_records_between_two_heads_does_not_disturb():
    run = make_run()
    x, y = next(iter(run.loader))
    outputs = run.model(x)
    run.criterion(outputs, y)
    assert torch.equal(run.records["loss"][run.ids], run.ids.float())
    run.criterion(1 * outputs, y)
    assert torch.equal(run.records["loss"][run.ids], 2 * run.ids.float())
    assert run.cost.forward == B


def test_a_later_forward_pass_replaces_the_loss():
    """As in adversarial training, in the closure of LBFGS, and in sharpness-aware steps."""
    run = make_run()
    for x, y in run.loader:
        for scale in (1.0, 2.0, 3.0):
            run.criterion(run.model(x) * scale, y).backward()
    assert torch.equal(run.records["loss"], 3 * torch.arange(N, dtype=torch.float32))
    assert (
        run.cost.forward
        == run.cost.backward
        == 3 * N
        == run.cost.full_forward
        == run.cost.full_backward
    )
    assert int(run.trained.sum()) == N


@pytest.mark.parametrize("by_ids", [False, True])
def test_a_later_forward_pass_of_another_model_replaces_the_loss(by_ids):
    run, model = make_run(), Identity()
    for x, y in run.loader:
        for scale in (1.0, 2.0):
            outputs = model(x.clone() + 0.0) * scale
            y, ids = (y.clone(), run.ids.clone()) if by_ids else (y, None)
            (
                run.criterion(outputs, y, ids=ids) + run.criterion(outputs.clone(), y, ids=ids)
            ).backward()
    assert torch.equal(run.records["loss"], 4 * torch.arange(N, dtype=torch.float32))
    assert run.cost.forward == run.cost.backward == 2 * N


# Refused


@pytest.mark.parametrize("labels", [None, torch.zeros(N, dtype=torch.int64)])
@pytest.mark.filterwarnings("ignore:.*got no loss")
def test_rows_permuted_in_the_loop(labels):
    run = make_run(id_data(labels))
    for x, y in run.loader:
        order = torch.randperm(len(y))
        refused(run, lambda x=x, y=y, o=order: run.criterion(run.model(x[o]), y[o]), "Cannot tell")
        refused(
            run,
            lambda x=x, y=y, o=order: run.criterion(run.model(x)[o], y),
            "may change the order of rows",
        )
        refused(
            run,
            lambda x=x, y=y, o=order: run.criterion(run.model(x)[o], y[o]),
            "Cannot tell|may change the order",
        )
    assert not torch.isfinite(run.records["loss"]).any()


@pytest.mark.parametrize(
    "move",
    [
        lambda t: t.flip(0),
        lambda t: t.roll(1, 0),
        lambda t: t.index_select(0, torch.arange(B - 1, -1, -1)),
        lambda t: t.sort(0, descending=True)[0],
        lambda t: t.gather(0, torch.arange(B - 1, -1, -1).unsqueeze(1).expand(-1, 2)),
        lambda t: t[torch.arange(B - 1, -1, -1)].sigmoid() * 2,
        lambda t: t[:, 0].flip(-1).unsqueeze(1),
    ],
)
def test_outputs_whose_rows_were_moved_are_refused(move):
    run = make_run()
    x, y = next(iter(run.loader))
    refused(run, lambda: run.criterion(move(run.model(x)), y), "may change the order of rows")


@pytest.mark.parametrize(
    "keep_order",
    [
        lambda t: t * 1.0,
        lambda t: t.flip(1).flip(1),
        lambda t: t.gather(1, torch.zeros(len(t), 1, dtype=torch.int64)),
        lambda t: t[torch.arange(len(t)), torch.zeros(len(t), dtype=torch.int64)].unsqueeze(1),
        lambda t: t[:, [0, 1]],
        lambda t: t.float().squeeze(),
    ],
)
def test_outputs_processed_in_order_are_credited(keep_order):
    run = make_run()
    for x, y in run.loader:
        run.criterion(keep_order(run.model(x)), y)
    assert_right(run, seen=range(N))


def test_permuted_rows_with_their_ids():
    run = make_run()
    for x, y in run.loader:
        order = torch.randperm(len(y))
        run.criterion(run.model(x[order]), y[order], ids=run.ids[order]).backward()
    assert_right(run, seen=range(N))


def test_ids_that_contradict_the_tensors_are_refused():
    run = make_run()
    x, y = next(iter(run.loader))
    refused(run, lambda: run.criterion(run.model(x), y, ids=run.ids.flip(0)), "contradicts")
    refused(run, lambda: run.criterion(run.model(x), y, ids=run.ids[:3]), "has 3 rows")
    run.criterion(run.model(x), y, ids=run.ids.clone())
    assert torch.equal(run.records["loss"][run.ids], run.ids.float())


def test_ids_must_be_positions():
    run = make_run()
    x, y = next(iter(run.loader))
    for ids, error, message in (
        (run.ids.float(), TypeError, "int64"),
        ([1, 2], TypeError, "list"),
        (run.ids.view(2, 4), ValueError, "shape"),
        (run.ids + N, ValueError, rf"within \[0, {N}\)"),
        (run.ids - N, ValueError, rf"within \[0, {N}\)"),
    ):
        before = snapshot(run)
        with pytest.raises(error, match=message):
            run.criterion(run.model(x.clone()), y.clone(), ids=ids)
        assert_unchanged(run, before)


def test_indices_of_a_subset_are_not_positions():
    """A dataset that returns its own index does not speak of positions in the loader's dataset."""

    class Indexed(Dataset):
        def __len__(self):
            return N

        def __getitem__(self, i):
            return torch.tensor([float(i), 0.0]), 0, i + 1

    run = make_run(loader=DataLoader(Indexed(), B))
    x, y, index = next(iter(run.loader))
    refused(run, lambda: run.criterion(run.model(x), y, ids=index), "contradicts")


@pytest.mark.filterwarnings("ignore:.*got no loss")
def test_targets_changed_in_place():
    run = make_run()
    for x, y in run.loader:
        y.add_(1)
        refused(
            run, lambda x=x, y=y: run.criterion(run.model(x), y), "changed in place|new tensors"
        )
        refused(run, lambda x=x, y=y: run.criterion(run.model(x.clone()), y), "changed in place")


def test_inputs_changed_in_place():
    """CutMix in place: the inputs' storage is the batch's, its rows are not."""
    run = make_run()
    for x, y in run.loader:
        x[:, :1] = x.flip(0)[:, :1]
        refused(run, lambda x=x, y=y: run.criterion(run.model(x), y), "changed in place")
        run.criterion(run.model(x), y.flip(0), ids=run.ids.flip(0))
    assert_right(run, seen=range(N))


def test_validation_between_batches():
    run = make_run()
    foreign = DataLoader(id_data(torch.arange(N) % 10), B)
    plain = nn.CrossEntropyLoss()
    for x, y in run.loader:
        outputs = run.model(x)
        for vx, vy in foreign:
            refused(run, lambda vx=vx, vy=vy: run.criterion(run.model(vx), vy), "did not yield")
            with torch.no_grad():
                run.criterion(run.model(vx), vy)
                run.criterion(run.model(x), y)
            plain(run.model(vx).repeat(1, 5), vy).backward()
        run.criterion(outputs, y)
    assert_right(run, seen=range(N))


def test_foreign_loss_with_equal_labels():
    run = make_run(id_data(torch.zeros(N, dtype=torch.int64)))
    x, y = next(iter(run.loader))
    refused(
        run,
        lambda: run.criterion(run.model(torch.full_like(x, 7.0)), torch.zeros_like(y)),
        "Cannot tell",
    )
    refused(run, lambda: run.criterion(Identity()(x), torch.zeros_like(y)), "Cannot tell")
    run.criterion(run.model(x), y)
    assert_right(run, seen=run.ids.tolist())


def test_one_hot_targets_are_refused_or_stated():
    run = make_run()
    for x, y in run.loader:
        hot = F.one_hot(y, 10).float()
        refused(run, lambda x=x, hot=hot: run.criterion(run.model(x), hot), "new tensors")
        run.criterion(run.model(x), hot, ids=run.ids)
    assert_right(run, seen=range(N))


@pytest.mark.filterwarnings("ignore:.*got no loss")
def test_mixup_in_the_loop():
    run = make_run()
    for x, y in run.loader:
        order = torch.randperm(len(y))
        mixed = 0.7 * x + 0.3 * x[order]
        soft = 0.7 * F.one_hot(y, 10) + 0.3 * F.one_hot(y[order], 10)
        refused(run, lambda m=mixed, s=soft: run.criterion(run.model(m), s), "Cannot tell")

        def two_terms(m=mixed, y=y, o=order):
            outputs = run.model(m)
            return 0.7 * run.criterion(outputs, y) + 0.3 * run.criterion(outputs, y[o])

        refused(run, two_terms, "Cannot tell")
        refused(
            run,
            lambda m=mixed, y=y, o=order: run.reduce(run.model(m)[:, 0], targets=(y, y[o])),
            "others do not",
        )
    assert not torch.isfinite(run.records["loss"]).any()


def test_cutmix_in_the_loop():
    x = torch.arange(N, dtype=torch.float32).view(N, 1, 1, 1).expand(N, 1, 4, 4).contiguous()
    run = make_run(
        TensorDataset(x, torch.arange(N) % 10), criterion=lambda o, t: o.flatten(1)[:, 0]
    )
    for x, y in run.loader:
        order = torch.roll(torch.arange(len(y)), 1)
        x[:, :, :2, :2] = x[order, :, :2, :2]

        def two_terms(x=x, y=y, order=order):
            outputs = run.model(x)
            return 0.7 * run.criterion(outputs, y) + 0.3 * run.criterion(outputs, y[order])

        refused(run, two_terms, "changed in place")


def flip_mix(samples):
    x, y = default_collate(samples)
    return 0.6 * x + 0.4 * x.flip(0), 0.6 * F.one_hot(y, 10) + 0.4 * F.one_hot(y.flip(0), 10)


class IndexedIds(Dataset):
    """The samples of `id_data`, with their index."""

    def __init__(self):
        self.data = id_data()

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        return (*self.data[i], i)


def sort_rows(samples):
    x, y, *index = default_collate(samples)
    order = x[:, 1].argsort()
    return x[order], y[order], *(one[order] for one in index)


def test_a_collate_function_that_mixes_is_refused_without_ids():
    run = make_run(loader=DataLoader(id_data(), B, shuffle=True, collate_fn=flip_mix))
    for x, y in run.loader:
        refused(run, lambda x=x, y=y: run.criterion(run.model(x), y), "collate_fn flip_mix")
        run.criterion(run.model(x), y, ids=run.ids)
    assert int(run.trained.sum()) == N


def test_of_a_collate_function_that_sorts_the_index_of_the_dataset_is_right_and_run_ids_is_refused():
    """`run.ids` has the samples as they were drawn: it would give each loss to another sample."""
    loader = DataLoader(IndexedIds(), B, shuffle=True, collate_fn=sort_rows)
    run = make_run(loader=loader)
    for x, y, index in run.loader:
        outputs = run.model(x)
        refused(
            run,
            lambda outputs=outputs, y=y: run.criterion(outputs, y),
            "collate_fn sort_rows.*index of each sample",
        )
        for ids in (run.ids, run.ids[:], run.ids_of(x)):
            refused(
                run,
                lambda ids=ids, x=outputs: run.reduce(x[:, 0], ids=ids),
                "in the order of the sampler.*index of each sample",
            )
        run.criterion(outputs, y, ids=index)
    assert_right(run, seen=range(N))


def test_collate_functions_that_keep_the_order_are_fine():
    run = make_run(
        loader=DataLoader(
            id_data(),
            B,
            shuffle=True,
            collate_fn=lambda s: dict(zip("xy", default_collate(s), strict=True)),
        )
    )
    for batch in run.loader:
        run.criterion(run.model(batch["x"]), batch["y"])
    assert_right(run, seen=range(N))


def test_collate_function_that_drops_samples_is_refused():
    def drop(samples):
        return default_collate([s for s in samples if s[1] != 3])

    run = make_run(loader=DataLoader(id_data(), B, collate_fn=drop))
    short = []
    for x, y in run.loader:
        if len(y) == len(run.ids):
            run.criterion(run.model(x), y)
            continue
        short.append(len(y))
        refused(run, lambda x=x, y=y: run.criterion(run.model(x), y))
    assert short
    assert_right(run)


def test_probing_a_collate_function_draws_nothing():
    torch.manual_seed(5)
    loader = DataLoader(id_data(), B, shuffle=True, collate_fn=flip_mix)
    before = torch.get_rng_state()
    make_run(loader=loader)
    assert torch.equal(torch.get_rng_state(), before)


def test_inputs_of_two_batches_are_refused():
    class Sum(Identity):
        def forward(self, a, b):
            return (a + b) * self.one

    loader = DataLoader(id_data(), B)
    run = thresher.attach(
        thresher.FullData(), loader=loader, criterion=id_loss, model=Sum(), epochs=1
    )
    batches = iter(run.loader)
    (x1, y1), (x2, _) = next(batches), next(batches)
    refused(run, lambda: run.criterion(run.model(x1, x2), y1), "different rows")


def test_reduce():
    run = make_run()
    for x, _ in run.loader:
        outputs = run.model(x)
        losses = outputs[:, 0]
        refused(
            run,
            lambda o=outputs: run.reduce(o[:, 0].flip(0), targets=None, outputs=o),
            "may change the order of rows",
        )
        value = run.reduce(losses * 1.0, outputs=outputs)
        assert torch.equal(value, losses.mean())
        value.backward()
    assert_right(run, seen=range(N))


def test_reduce_finds_rows_in_losses_targets_or_ids():
    run = make_run()
    for i, (x, y) in enumerate(run.loader):
        if i % 3 == 0:
            run.reduce(run.model(x)[:, 0])
        elif i % 3 == 1:
            run.reduce(run.model.module(x)[:, 0] * 1, targets=y)
        else:
            run.reduce(run.model.module(x)[:, 0] * 1, ids=run.ids)
    assert_right(run, seen=range(N))
    refused(run, lambda: run.reduce(torch.ones(3, requires_grad=True) * 2), "Cannot tell")


def refusal_of(run, outputs, targets):
    with pytest.raises(AttributionError) as caught:
        run.criterion(outputs, targets)
    assert all(
        part in str(caught.value) for part in ("Saw outputs", "Saw targets", "Nothing was recorded")
    )
    assert str(caught.value).endswith("More: docs/attribution.md")
    return str(caught.value)


def test_message_says_what_was_seen_and_the_one_way_out_that_fits():
    run = make_run()
    x, y = next(iter(run.loader))
    copied = refusal_of(run, run.model(x.clone()), y.clone())
    assert "ids=run.ids" in copied and "no_grad" not in copied
    other = refusal_of(
        run, run.model(torch.cat([x, x])[:-1]), torch.cat([y, y])[:-1]
    )  # of another number of rows
    assert "torch.no_grad()" in other and "ids=" not in other
    run.criterion(run.model(x), y).backward()
    assert run.records is not None  # up to the last call of the criterion
    validation = refusal_of(run, run.model(x.clone()), y.clone())
    assert "torch.no_grad()" in validation and "ids=" not in validation


def test_storages_that_died_do_not_name_new_tensors():
    """Memory is reused at once on CPU: an address would name the wrong rows."""
    run = make_run(criterion=id_loss)
    seen = 0
    for x, y in run.loader:
        run.criterion(run.model(x), y)
        del x, y
        for _ in range(50):
            fake_x, fake_y = torch.zeros(B, 2), torch.zeros(B, dtype=torch.int64)
            refused(run, lambda a=fake_x, b=fake_y: run.criterion(run.model(a), b), "did not yield")
            seen += 1
    assert seen
    assert_right(run, seen=range(N))


def test_values_compared_on_a_device_speak_at_the_end_of_the_epoch(monkeypatch):
    """What cannot be compared without waiting is compared by the device; a failed comparison records nothing."""
    monkeypatch.setattr(resolve, "certain_now", lambda flag: False)
    run = make_run()
    wrong = torch.empty(0, dtype=torch.int64)
    for i, (x, y) in enumerate(run.loader):
        if i == 0:
            wrong = run.ids
        run.criterion(run.model(x), y.clone() + (i == 0))
        if i == 3:
            break
    assert not torch.isfinite(run.records["loss"][wrong]).any()
    assert torch.isfinite(run.records["loss"]).sum() == 3 * B
    with pytest.raises(AttributionError, match="epoch that just ended"):
        iter(run.loader)


@pytest.mark.parametrize("skip", [False, True])
def test_nothing_is_held_of_batches_that_are_gone(skip, monkeypatch):
    """Neither the tensors of a batch nor what is known of them outlives its turn, credited or skipped."""
    trackers, make = [], RowTracker.__init__
    monkeypatch.setattr(
        RowTracker,
        "__init__",
        lambda tracker, *more: (make(tracker, *more), trackers.append(tracker))[0],
    )
    data = TensorDataset(torch.zeros(1000, 2), torch.zeros(1000, dtype=torch.int64))
    run = thresher.attach(
        thresher.FullData(),
        loader=DataLoader(data, 1),
        criterion=id_loss,
        model=Identity(),
        epochs=1,
    )
    alive = []
    for x, y in run.loader:
        alive.append(weakref.ref(x))
        if not skip:
            run.criterion(run.model(x), y)
        del x, y
    assert sum(ref() is not None for ref in alive) <= 2
    assert all(len(tracker._by_storage) < 200 for tracker in trackers) and trackers
