"""The loader of a run: what it refuses, what it yields, and what breaking out of it leaves behind."""

import gc
import multiprocessing
import subprocess
import sys
import weakref
from collections import namedtuple
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import thresher
from helpers import as_if_trained
from thresher import EpochPlan

N, B = 30, 4


@dataclass(frozen=True)
class Fixed:
    """A method that answers with given plans, epoch by epoch; the last one goes on."""

    plans: tuple = field(repr=False)
    stage = "epoch"
    requires = thresher.Requirements(records=False)

    def columns(self):
        return {"loss": thresher.Column(torch.float32, fill=float("-inf"))}

    def plan_epoch(self, records, *, epoch, epochs, generator):
        return self.plans[min(epoch, len(self.plans) - 1)]


def plan(ids, **settings):
    return EpochPlan(torch.tensor(sorted(ids)), **settings)


def data(n=N):
    return TensorDataset(torch.arange(float(n)).unsqueeze(1), torch.arange(n))


def attach(loader, *plans, **settings):
    method = Fixed(plans) if plans else thresher.FullData()
    return thresher.attach(method, loader=loader, criterion=nn.MSELoss(), epochs=4, **settings)


def ids_of(run):
    return [y.tolist() for _, y in run.loader]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


class OwnBatches(BatchSampler):
    pass


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: [1, 2], TypeError, "must be a torch.utils.data.DataLoader, got list"),
        (lambda: DataLoader(Stream()), TypeError, "Stream, an IterableDataset.*If it also reads"),
        (lambda: DataLoader(data(), batch_size=None), ValueError, "batch_size=None"),
        (
            lambda: DataLoader(
                data(), batch_sampler=OwnBatches(SequentialSampler(data()), B, False)
            ),
            ValueError,
            "batch_sampler, OwnBatches.*sampler= and batch_size=",
        ),
        (
            lambda: DataLoader(data(), batch_sampler=[[0, 1], [2]]),
            ValueError,
            "batch_sampler, list",
        ),
        (
            lambda: DataLoader(data(), B, num_workers=1, in_order=False),
            ValueError,
            "in_order=False.*in_order=True",
        ),
        (
            lambda: DataLoader(
                data(), B, sampler=DistributedSampler(data(), num_replicas=2, rank=0)
            ),
            ValueError,
            "DistributedSampler for 2 processes.*init_process_group before attach.*num_replicas=1",
        ),
    ],
)
def test_refused_loaders(make, error, message):
    with pytest.raises(error, match=message):
        attach(make())


def test_torch_batch_sampler_is_the_same_as_batch_size():
    batches = BatchSampler(
        RandomSampler(range(N), generator=torch.Generator().manual_seed(0)), B, drop_last=True
    )
    expected = list(
        batches.__class__(
            RandomSampler(range(N), generator=torch.Generator().manual_seed(0)), B, drop_last=True
        )
    )
    assert ids_of(attach(DataLoader(data(), batch_sampler=batches))) == expected


def test_settings_are_kept():
    def worker_init(_):
        pass

    user = DataLoader(
        data(), B, num_workers=2, timeout=7, worker_init_fn=worker_init, prefetch_factor=3, persistent_workers=True,
        multiprocessing_context="spawn", generator=torch.Generator(), collate_fn=lambda s: torch.stack([x for x, _ in s]),
    )  # fmt: skip
    rebuilt = attach(user).loader.reader.loader
    assert rebuilt.collate_fn.collate is user.collate_fn
    for name in (
        "num_workers",
        "timeout",
        "worker_init_fn",
        "prefetch_factor",
        "persistent_workers",
        "generator",
    ):
        assert getattr(rebuilt, name) is getattr(user, name) or getattr(rebuilt, name) == getattr(
            user, name
        ), name
    assert rebuilt.multiprocessing_context.get_start_method() == "spawn"
    assert attach(user).loader.dataset is user.dataset
    assert attach(user).loader.batch_size == B
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = attach(user).loader.no_such_thing


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_order_is_the_users_less_what_the_plan_leaves_out(drop_last):
    kept = set(range(0, N, 3)) | {1, 2}
    torch.manual_seed(5)
    everything = [i for batch in ids_of(attach(DataLoader(data(), B, shuffle=True))) for i in batch]
    torch.manual_seed(5)
    run = attach(DataLoader(data(), B, shuffle=True, drop_last=drop_last), plan(kept))
    batches = ids_of(run)
    expected = [i for i in everything if i in kept]
    if drop_last:
        expected = expected[: len(expected) // B * B]
    assert [i for batch in batches for i in batch] == expected
    assert [len(batch) for batch in batches[:-1]] == [B] * (len(batches) - 1)
    assert len(batches) == len(run.loader)


def test_other_samplers_are_filtered_as_they_come():
    kept = set(range(10, 20))
    sampler = WeightedRandomSampler(torch.ones(N), 50, generator=torch.Generator().manual_seed(2))
    reference = list(
        WeightedRandomSampler(torch.ones(N), 50, generator=torch.Generator().manual_seed(2))
    )
    run = attach(DataLoader(data(), B, sampler=sampler), plan(kept))
    assert [i for batch in ids_of(run) for i in batch] == [i for i in reference if i in kept]


def test_length():
    run = attach(
        DataLoader(data(), B, shuffle=True), plan(range(N)), plan(range(9)), plan(range(16))
    )
    assert len(run.loader) == 8
    lengths = []
    for _ in range(3):
        batches = iter(run.loader)
        inside = []
        for _ in batches:
            inside.append(len(run.loader))
            assert len(batches) == inside[0]
        lengths.append(inside)
        as_if_trained(run)
    assert lengths == [[8] * 8, [3] * 3, [4] * 4]


def test_length_of_an_unknown_order():
    assert len(attach(DataLoader(data(), B, sampler=SubsetRandomSampler(range(10)))).loader) == 3
    loader = DataLoader(data(), B, sampler=WeightedRandomSampler(torch.ones(N), 10))
    assert len(attach(loader).loader) == 3
    with pytest.raises(TypeError, match="not known before its end.*WeightedRandomSampler"):
        len(attach(loader, plan(range(12))).loader)


def test_a_sampler_outside_the_dataset_is_told():
    with pytest.raises(IndexError, match=r"outside the dataset's \[0, 30\)"):
        ids_of(attach(DataLoader(data(), B, sampler=[3, 30])))


def test_drawn_plans_replace_the_order():
    drawn = EpochPlan(torch.tensor([7, 7, 3, 20, 1, 7]), drawn=True)
    run = attach(DataLoader(data(), B, shuffle=True), drawn)
    assert ids_of(run) == [[7, 7, 3, 20], [1, 7]]
    assert len(run.loader) == 2
    weighted = DataLoader(data(), B, sampler=WeightedRandomSampler(torch.ones(N), N))
    with pytest.raises(ValueError, match="draws the order of training"):
        iter(attach(weighted, drawn).loader)
    with pytest.raises(ValueError, match="draws the order of training"):
        iter(attach(DataLoader(data(), B), drawn).loader)


def test_iterating_twice_before_a_batch_is_the_same_epoch():
    run = attach(DataLoader(data(), B, shuffle=True))
    first = iter(run.loader)
    second = iter(run.loader)
    assert run.epoch == 0
    assert sum(len(y) for _, y in second) == N
    assert run.epoch == 0
    as_if_trained(run)
    assert run.epoch == 1
    with pytest.raises(RuntimeError, match="ended by a newer one"):
        next(first)


def test_a_broken_epoch_counts():
    run = attach(DataLoader(data(), B, shuffle=True), plan(range(N)), plan(range(10)))
    for _, y in run.loader:
        run.reduce(y * torch.ones((), requires_grad=True), targets=y)
        break
    assert run.epoch == 0
    assert run.progress == pytest.approx(B / (4 * N))
    seen = 0
    for _, y in run.loader:
        run.reduce(y * torch.ones((), requires_grad=True), targets=y)
        seen += len(y)
    assert seen == 10
    assert [entry["complete"] for entry in run.history] == [False, True]
    assert run.epoch == 2
    assert run.cost.full_forward == B + N


def test_an_old_pass_is_refused_and_the_new_one_goes_on():
    run = attach(DataLoader(data(), B, shuffle=True))
    old = iter(run.loader)
    next(old)
    new = iter(run.loader)
    next(new)
    with pytest.raises(RuntimeError, match="ended by a newer one"):
        next(old)
    assert sum(len(y) for _, y in new) == N - B
    with pytest.raises(StopIteration):
        next(new)


def test_an_exception_in_the_loop_leaves_the_run_usable():
    run = attach(DataLoader(data(), B, shuffle=True))
    with pytest.raises(KeyError):
        for i, (_, y) in enumerate(run.loader):
            run.reduce(y * torch.ones((), requires_grad=True), targets=y)
            if i == 2:
                raise KeyError
    assert sum(len(y) for _, y in run.loader) == N
    assert run.epoch == 1
    assert [entry["complete"] for entry in run.history] == [False]


class Damaged(TensorDataset):
    def __getitem__(self, i):
        if i == 9:
            raise OSError("sample 9 cannot be read")
        return super().__getitem__(i)

    __getitems__ = None


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_cannot_be_read_does_not_shift_the_ids(workers):
    dataset = Damaged(*data().tensors)
    run = attach(DataLoader(dataset, B, num_workers=workers))
    batches, failed = iter(run.loader), 0
    while True:
        try:
            _, y = next(batches)
        except OSError:
            failed += 1
            continue
        except StopIteration:
            break
        assert torch.equal(run.ids, y)
    assert failed == 1


Pair = namedtuple("Pair", "x y")


@dataclass
class Sample:
    x: torch.Tensor
    y: torch.Tensor


@pytest.mark.parametrize(
    ("collate", "target"),
    [
        (lambda b: b, lambda b: b[1]),
        (tuple, lambda b: b[1]),
        (
            lambda b: {"x": b[0], "deep": [{"y": b[1]}], "name": "batch"},
            lambda b: b["deep"][0]["y"],
        ),
        (lambda b: Pair(*b), lambda b: b.y),
        (lambda b: Sample(*b), lambda b: b.y),
        (lambda b: b[1], lambda b: b),
    ],
)
def test_batches_of_any_shape(collate, target):
    def gather(samples):
        return collate(torch.utils.data.default_collate(samples))

    run = attach(DataLoader(data(), B, collate_fn=gather))
    weight = torch.ones((), requires_grad=True)
    for batch in run.loader:
        y = target(batch)
        run.reduce(y * weight, targets=y)
    assert torch.equal(run.records["loss"], torch.arange(float(N)))


def test_a_subset_counts_its_own_positions():
    run = attach(DataLoader(Subset(data(), range(20, 30)), B))
    next(iter(run.loader))
    assert run.ids.tolist() == [0, 1, 2, 3]
    assert len(run.records["loss"]) == 10


def test_a_dataset_smaller_than_a_batch():
    """With drop_last there is no batch, as in the user's own loop."""
    run = attach(DataLoader(data(3), B, drop_last=True))
    assert run.progress == 0.0
    assert ids_of(run) == []
    assert len(run.loader) == 0
    assert run.progress == 0.25


def test_ids_before_the_first_batch():
    with pytest.raises(ValueError, match="no batch was yielded yet"):
        _ = attach(DataLoader(data(), B)).ids


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_stop_at_once(persistent):
    """After a break, and when the run is collected, although it is part of a reference cycle."""
    run = attach(DataLoader(data(), B, num_workers=2, persistent_workers=persistent))
    for _ in run.loader:
        workers = multiprocessing.active_children()
        break
    gone = weakref.ref(run)
    del run
    gc.collect()
    assert gone() is None
    assert [worker.exitcode for worker in workers] == [
        0,
        0,
    ]  # a worker that does not stop by itself is killed


def test_batches_move_to_the_device_of_the_run():
    run = attach(DataLoader(data(), B), device="meta")
    x, y = next(iter(run.loader))
    assert x.device.type == y.device.type == "meta"
    assert x.to("meta") is x


class OwnIter(DataLoader):
    def __iter__(self):
        return (batch for batch in super().__iter__())


class OwnLength(DataLoader):
    def __len__(self):
        return 5


class OwnIterator(DataLoader):
    def _get_iterator(self):
        return super()._get_iterator()


class Below(OwnIter):
    pass


class OwnSettings(DataLoader):
    """A subclass as those of graph libraries: it gives the collate function."""

    def __init__(self, dataset, **settings):
        super().__init__(
            dataset,
            collate_fn=lambda samples: torch.utils.data.default_collate(samples),
            **settings,
        )


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (OwnIter, "__iter__"),
        (OwnLength, "__len__"),
        (OwnIterator, "_get_iterator"),
        (Below, r"__iter__` \(defined in OwnIter\)"),
    ],
)
def test_a_loader_that_makes_its_batches_itself_is_refused(kind, name):
    with pytest.raises(
        ValueError,
        match=f"of the class {kind.__name__}, whose own `{name}.*Pass a plain DataLoader",
    ):
        attach(kind(data(), B))


class Once(IterableDataset):
    def __iter__(self):
        return iter([(torch.ones(1), torch.ones(1))] * N)


@pytest.mark.parametrize(("kind", "name"), [(OwnIter, "__iter__"), (OwnIterator, "_get_iterator")])
def test_a_stream_that_may_begin_in_its_middle_is_refused(kind, name):
    """A resumed run skips what the interrupted epoch had read, which such a loader may have skipped already."""
    method = thresher.SelectiveBackprop(keep=0.5)
    expected = f"own `{name}` .*may begin in the middle of a stream.*Pass a plain DataLoader.*run.state_dict"
    with pytest.raises(ValueError, match=expected):
        thresher.attach(
            method, loader=kind(Once(), B), criterion=nn.MSELoss(), model=nn.Linear(1, 1), epochs=1
        )
    thresher.attach(
        method, loader=OwnLength(Once(), B), criterion=nn.MSELoss(), model=nn.Linear(1, 1), epochs=1
    )


class Wrapper:
    """As the PrefetchLoader of timm: it iterates a loader, and changes its batches."""

    def __init__(self, loader):
        self.loader = loader


def test_an_object_that_wraps_a_loader_is_refused_with_the_lines_for_it():
    with pytest.raises(
        TypeError,
        match=r"got Wrapper, which wraps one. .*loader=wrapper.loader\); wrapper.loader = run.loader",
    ):
        attach(Wrapper(DataLoader(data(), B)))
    with pytest.raises(TypeError, match="got Wrapper. For tensors"):
        attach(Wrapper([1, 2]))


def test_other_loaders_of_a_class_of_their_own_are_taken():
    accelerate = pytest.importorskip("accelerate")
    assert ids_of(attach(OwnSettings(data(), batch_size=10)))[0] == list(range(10))
    prepared = accelerate.Accelerator(cpu=True).prepare(DataLoader(data(), B))
    assert type(prepared).__iter__ is not DataLoader.__iter__
    assert ids_of(attach(prepared))[0] == [0, 1, 2, 3]


def test_a_script_may_end_within_an_epoch():
    code = """
import torch, thresher
data = torch.utils.data.TensorDataset(torch.randn(8, 3), torch.arange(8) % 2)
loader = torch.utils.data.DataLoader(data, 2)
model, criterion = torch.nn.Linear(3, 2), torch.nn.CrossEntropyLoss()
run = thresher.attach(thresher.FullData(), loader=loader, criterion=criterion, model=model, epochs=1)
batches = iter(run.loader)
next(batches)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_batches_of_an_endless_sampler_are_not_listed(drop_last):
    data = TensorDataset(torch.arange(8.0)[:, None])
    sampler = RandomSampler(data, replacement=True, num_samples=10**15)
    loader = DataLoader(data, 3, sampler=sampler, drop_last=drop_last)
    run = thresher.attach(thresher.FullData(), loader=loader, criterion=nn.MSELoss(), epochs=1)
    [x] = next(iter(run.loader))
    assert x.shape == (3, 1) and run.ids.tolist() == x[:, 0].tolist()
