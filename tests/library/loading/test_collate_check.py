"""The check of a collate function: what came out of its one call is compared with the samples that went in."""

import os
import random
import threading
import time
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate, get_worker_info

import thresher
from depth import depth
from helpers import assert_same
from thresher import AttributionError
from thresher.loading.collate_check import CheckedBatch, CheckedCollate, UnknownRows, checked

N, B = 24, 4
MODEL = nn.Linear(3, 3)  # made here, because its weights are random numbers


class Counting(Dataset):
    """A dataset with random numbers of its own, which notes what is read and in which process."""

    def __init__(self, *, only_in_workers=False):
        self.only_in_workers = only_in_workers
        self.generator = np.random.default_rng(3)
        self.reads, self.opened_by = [], None

    def __len__(self):
        return N

    def __getitem__(self, i):
        if self.only_in_workers and get_worker_info() is None:
            raise RuntimeError("read outside a worker")
        self.opened_by = self.opened_by or os.getpid()
        self.reads.append(i)
        return torch.tensor([float(i), self.generator.random(), self.opened_by]), i % 3


def plain(samples):
    x, y = default_collate(samples)
    return {"x": x, "y": y}


def attach(loader, **settings):
    return thresher.attach(
        thresher.FullData(),
        loader=loader,
        criterion=nn.CrossEntropyLoss(),
        model=MODEL,
        epochs=3,
        **settings,
    )


def test_attach_and_the_check_read_no_sample():
    data = Counting()
    run = attach(DataLoader(data, B, shuffle=True, collate_fn=plain))
    assert data.reads == []
    batches = list(run.loader)
    assert len(batches) == N // B and sorted(data.reads) == list(range(N))


def test_a_dataset_with_random_numbers_of_its_own_yields_the_same():
    def batches(attached):
        torch.manual_seed(4)
        loader = DataLoader(Counting(), B, shuffle=True, collate_fn=plain)
        loader = attach(loader).loader if attached else loader
        return [batch for _ in range(2) for batch in loader], torch.get_rng_state()

    assert_same(batches(True), batches(False))


def test_datasets_are_read_in_workers_only():
    """A file that a dataset opens when it is first read must not be opened in the main process and shared by the workers."""
    run = attach(DataLoader(Counting(only_in_workers=True), B, collate_fn=plain, num_workers=2))
    readers = {float(one) for batch in run.loader for one in batch["x"][:, 2]}
    assert len(readers) == 2 and os.getpid() not in readers


class Turning:
    """Module-level, so that spawned workers can import it."""

    def __call__(self, samples):
        x, y = default_collate(samples)
        return x.flip(0), y


@pytest.mark.parametrize("context", depth(["fork"], ["fork", "spawn"]))
def test_moved_rows_in_a_worker_are_known_before_the_first_loss(context):
    data = TensorDataset(torch.randn(N, 3), torch.arange(N) % 3)
    run = attach(
        DataLoader(data, B, collate_fn=Turning(), num_workers=1, multiprocessing_context=context)
    )
    x, y = next(iter(run.loader))
    with pytest.raises(AttributionError, match="collate_fn Turning sorts or mixes"):
        run.criterion(run.model(x), y)


class Drawing:
    """Random numbers from everywhere, a counter, and samples that are changed in place: what it returns depends on it all."""

    def __init__(self):
        self.torch, self.numpy = torch.Generator().manual_seed(1), np.random.default_rng(1)
        self.state, self.python = np.random.RandomState(1), random.Random(1)
        self.calls = 0

    def __call__(self, samples):
        self.calls += 1
        draws = (
            torch.rand((), generator=self.torch)
            + torch.rand(())
            + self.numpy.random()
            + np.random.rand()
        )
        draws = draws + self.state.rand() + self.python.random() + random.random() + self.calls
        rows = [sample.pop("x").mul_(2) for sample in samples]
        return torch.stack(rows) * draws.float(), torch.tensor(
            [sample.pop("y") for sample in samples]
        )


def method_of(drawing, samples, scale):
    x, y = drawing(samples)
    return x * scale, y


OWN = np.random.default_rng(5)


def with_global(samples):
    return torch.stack([sample["x"] for sample in samples]) * float(OWN.random()), torch.tensor(
        [s["y"] for s in samples]
    )


def closure():
    generator = torch.Generator().manual_seed(2)
    return lambda samples: (
        torch.stack([sample["x"] for sample in samples]) * torch.rand((), generator=generator),
        torch.tensor([sample["y"] for sample in samples]),
    )


def fresh_global():
    global OWN
    OWN = np.random.default_rng(5)
    return with_global


COLLATES = {
    "object": Drawing,
    "method": lambda: Drawing().__call__,
    "partial": lambda: partial(method_of, Drawing(), scale=3.0),
    "closure": closure,
    "global": fresh_global,
}


class Changing(Dataset):
    """Yields its own tensors, which a collate function in place changes for the next epoch."""

    def __init__(self):
        self.x = torch.arange(1.0, N * 3 + 1).view(N, 3)

    def __len__(self):
        return N

    def __getitem__(self, i):
        return {"x": self.x[i], "y": i % 3}


@pytest.mark.parametrize("name", COLLATES)
def test_a_collate_function_leaves_what_it_leaves_unattached(name):
    def epochs(attached):
        torch.manual_seed(4), np.random.seed(4), random.seed(4)
        data = Changing()
        loader = DataLoader(data, B, shuffle=True, collate_fn=COLLATES[name]())
        if attached:
            run = attach(loader)
            loader = run.loader
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*changes the values of samples")
            found = [[part.clone() for part in batch] for _ in range(2) for batch in loader]
        if attached:
            assert run.loader.unknown_rows.reason is None
        return found, data.x, torch.get_rng_state(), np.random.get_state()[1], random.getstate()

    assert_same(epochs(True), epochs(False))


def checked_batch(collate, samples, **settings):
    return CheckedCollate(collate, len(samples), **{"batched": False, **settings})(samples)


def pairs(n=B, t=5):
    return [(torch.randn(t, 2), torch.tensor(i)) for i in range(n)]


def time_first(samples):
    return torch.stack([x for x, _ in samples], 1), torch.stack([y for _, y in samples])


@pytest.mark.parametrize(
    ("collate", "samples", "reason"),
    [
        (time_first, pairs(t=5), None),
        (
            time_first,
            pairs(t=B),
            r"puts the samples in the second dimension of a tensor of shape \(4, 4, 2\).*another batch_size",
        ),
        (lambda s: (*default_collate(s), torch.eye(B)), pairs(), None),
        (
            lambda s: default_collate(sorted(s, key=lambda one: -int(one[1]))),
            pairs(),
            "sorts or mixes",
        ),
        (lambda s: ([int(y) for _, y in s], ["a", "b", "c", "d"]), pairs(), None),
        (lambda s: ([int(y) for _, y in s][::-1], ["a", "b", "c", "d"]), pairs(), "sorts or mixes"),
        (
            lambda s: (default_collate(s)[0], torch.tensor([int(y) for _, y in s]).roll(1)),
            pairs(),
            "sorts or mixes",
        ),
        (
            lambda s: (torch.stack([x for x, _ in s]) * float("nan"), len(s)),
            pairs(),
            "changes every value.*collate_keeps_rows=True",
        ),
    ],
)
def test_what_the_check_finds(collate, samples, reason):
    batch = checked_batch(collate, samples)
    assert type(batch) is CheckedBatch
    if reason is None:
        assert batch.reason is None
    else:
        with pytest.raises(ValueError, match=f"collate_fn .*({reason})"):
            raise ValueError(batch.reason)


def test_batches_are_checked_ever_more_rarely():
    check = CheckedCollate(lambda s: default_collate(s), B, batched=False)
    assert [i for i in range(70) if type(check(pairs())) is CheckedBatch] == [
        0,
        1,
        2,
        4,
        8,
        16,
        32,
        64,
    ]


def test_new_workers_go_on_with_the_count():
    run = attach(DataLoader(Counting(), B, collate_fn=plain, num_workers=2))
    for _ in range(3):
        for _ in run.loader:
            pass
    assert run.loader.reader.loader.collate_fn.calls == 2 * (N // B) // 2


def test_single_samples_are_not_checked():
    assert type(checked_batch(lambda s: default_collate(s), pairs(1))) is list


def as_columns(batch):
    return {"x": batch[0].float() / 255, "y": batch[1]}


def last_first(batch):
    return batch[0].flip(0), batch[1]


class Together(Dataset):
    """Reads the samples of a batch together, as two columns."""

    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return N

    def __getitems__(self, ids):
        ids = torch.tensor(ids)
        return (
            self.kind((ids * torch.ones(3, 1, dtype=torch.int64)).T, ids)
            if self.kind is not list
            else [ids, ids]
        )


@pytest.mark.filterwarnings("ignore:.*changes the values of samples")
@pytest.mark.parametrize(
    ("collate", "reason"), [(as_columns, None), (last_first, "sorts or mixes")]
)
def test_columns_that_a_dataset_reads_together(collate, reason):
    run = attach(DataLoader(Together(lambda x, y: (x, y)), B, collate_fn=collate))
    next(iter(run.loader))
    found = run.loader.unknown_rows.reason
    assert found is None if reason is None else reason in found
    listed = attach(
        DataLoader(Together(list), B, collate_fn=lambda batch: (batch[0].float() / 255, batch[1]))
    )
    next(iter(listed.loader))
    assert listed.loader.unknown_rows.reason is None


def test_no_batch_is_chosen_from_by_losses_of_other_samples():
    data = TensorDataset(torch.randn(N, 3), torch.arange(N) % 3)
    run = thresher.attach(
        thresher.SelectiveBackprop(keep=0.5),
        loader=DataLoader(data, B, collate_fn=Turning()),
        criterion=nn.CrossEntropyLoss(),
        model=nn.Linear(3, 3),
        epochs=1,
        forward_passes="twice",
    )
    with pytest.raises(
        AttributionError, match="Cannot choose samples by their losses.*collate_fn Turning"
    ):
        next(iter(run.loader))
    assert run.cost.scoring == 0 and run.records["loss"].isneginf().all()


def masking(samples):
    """As a collate function that masks random words; the lengths of the sentences are drawn for by nobody."""
    x, y = default_collate(samples)
    return {"words": torch.where(torch.rand(x.shape) < 0.3, -1.0, x), "length": y}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("passes", ["once", "twice"])
def test_losses_of_a_declared_collate_function_are_those_of_their_samples(workers, passes):
    """The batches have as many columns as rows, so that the declaration says as well which dimension the samples have."""
    data = TensorDataset(torch.arange(float(N)).view(N, 1) * torch.ones(1, B), torch.arange(N))
    run = thresher.attach(
        thresher.SelectiveBackprop(keep=0.5),
        loader=DataLoader(data, B, shuffle=True, collate_fn=masking, num_workers=workers),
        criterion=lambda outputs, lengths: lengths + 0 * outputs.sum(1),
        model=nn.Linear(B, 1),
        epochs=2,
        forward=lambda model, batch: (model(batch["words"]), batch["length"]),
        forward_passes=passes,
        collate_keeps_rows=True,
    )
    for _ in range(2):
        for batch in run.loader:
            run.criterion(run.model(batch["words"]), batch["length"]).backward()
    assert run.records["loss"].tolist() == [*map(float, range(N))]
    assert run.loader.unknown_rows.reason is None


def test_a_declaration_is_true_or_false():
    with pytest.raises(TypeError, match="`collate_keeps_rows` must be True or False, got 1"):
        attach(DataLoader(Counting(), B), collate_keeps_rows=1)


def test_a_collate_function_is_called_once_per_batch_and_nothing_of_its_own_is_written():
    """Another thread, such as one that fetches the next shard, updates what the function keeps while it collates."""
    calls, updates, done = 0, 0, False

    def collate(samples):
        nonlocal calls
        calls += 1
        time.sleep(0.002)  # so that the other thread has its turn within the call
        return plain(samples)

    def update():
        nonlocal updates
        while not done:
            updates += 1
            made.append(updates)

    made: list[int] = []
    run = attach(DataLoader(Counting(), B, collate_fn=collate))
    thread = threading.Thread(target=update)
    thread.start()
    try:
        batches = [batch for _ in range(2) for batch in run.loader]
    finally:
        done = True
        thread.join()
    assert calls == len(batches) == 2 * N // B
    assert updates == len(made) and made == [*range(1, updates + 1)]


def padded(samples):
    """A collate function of token lists, which are padded to the longest one."""
    words = [torch.tensor(words) for words, _ in samples]
    return torch.nn.utils.rnn.pad_sequence(words, batch_first=True), torch.tensor(
        [label for _, label in samples]
    )


SENTENCES = [([1, 2], 0), ([3], 0), ([1, 2, 4], 0), ([5, 6], 0)]


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 0, 3, 1]])
def test_padded_rows_show_their_samples(order):
    batch = checked_batch(lambda samples: padded([samples[i] for i in order]), SENTENCES)
    assert batch.unseen is None or order != [0, 1, 2, 3]
    assert (batch.reason is None) == (order == [0, 1, 2, 3])


def mixed(samples):
    x, y = default_collate(samples)
    return (x + x.roll(1, 0)) / 2, y


@pytest.mark.parametrize(
    "collate", [mixed, lambda s: (default_collate(s)[0] / 255, default_collate(s)[1])]
)
def test_values_that_are_found_in_no_row_are_said_once(collate):
    data = TensorDataset(torch.randn(N, 3), torch.arange(N) % 3)
    run = attach(DataLoader(data, B, collate_fn=collate))
    with pytest.warns(
        UserWarning, match="changes the values of samples.*collate_keeps_rows=True"
    ) as said:
        for _ in range(2):
            list(run.loader)
    assert len([one for one in said if "changes the values" in str(one.message)]) == 1
    declared = attach(DataLoader(data, B, collate_fn=collate), collate_keeps_rows=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(declared.loader)


def test_a_declared_collate_function_is_not_compared():
    assert checked(DataLoader(Counting(), B, collate_fn=plain), collate_keeps_rows=True) is plain
    assert (
        type(checked(DataLoader(Counting(), B, collate_fn=plain), collate_keeps_rows=False))
        is CheckedCollate
    )


def test_a_flag_of_its_own_is_said_for_each_run():
    rows = UnknownRows()
    with pytest.warns(UserWarning, match="collate_fn f changes"):
        rows.open(CheckedBatch(1, None, "f"))
    assert rows.open(CheckedBatch(2, "moved", "f")) == 2 and rows.reason == "moved"


@pytest.mark.parametrize("size", [2, 4, 8, 32])
@pytest.mark.parametrize(
    "collate",
    [
        lambda s: (
            *default_collate(s),
            (default_collate(s)[0][:, 0] > 0).long(),
        ),  # a column that is computed row by row
        lambda s: (*default_collate(s), default_collate(s)[1].flip(0)),  # labels of partners
        lambda s: (*default_collate(s), torch.arange(len(s))),
    ],
)
@pytest.mark.parametrize("classes", [2, 40])
def test_columns_beside_rows_in_order_are_no_sign_of_another_order(size, collate, classes):
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        samples = list(
            zip(
                torch.randn(size, 3, generator=generator),
                torch.randperm(40, generator=generator)[:size] % classes,
                strict=True,
            )
        )
        batch = checked_batch(collate, samples)
        assert batch.reason is None and batch.unseen is None
