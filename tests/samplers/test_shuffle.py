"""`Shuffle`: every id once an epoch, shared by any number of processes, and gone on with at any place."""

import tracemalloc

import pytest
import torch
from torch import distributed
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from depth import crossed
from thresher import Shuffle, rng
from thresher.permutation import PIECE, Permutation

N, B = 50, 4


def order(epoch, n=N, seed=0):
    return Permutation(n, seed, epoch).piece(0, n).tolist()


def test_every_pass_has_the_next_epoch_and_set_epoch_names_it():
    shuffle = Shuffle(range(N))
    assert [list(shuffle) for _ in range(3)] == [order(0), order(1), order(2)]
    assert shuffle.epoch == 3 and len(shuffle) == N
    shuffle.set_epoch(1)
    assert [list(shuffle), list(shuffle)] == [order(1), order(2)]
    assert list(Shuffle(range(N), seed=7)) == order(0, seed=7)
    assert sorted(Shuffle(range(N))) == list(range(N))
    assert list(Shuffle(N)) == order(0)
    assert list(Shuffle([])) == [] and list(Shuffle([5])) == [0]


def test_a_pass_begins_with_its_first_id():
    """DataLoader asks for iterators that it does not use."""
    shuffle = Shuffle(range(N))
    unused, one, other = iter(shuffle), iter(shuffle), iter(shuffle)
    first = next(other)
    assert [first, *other] == order(0) and list(one) == order(1) and shuffle.epoch == 2
    shuffle.set_epoch(8)
    assert list(unused) == order(8)
    with pytest.raises(StopIteration):
        next(unused)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_plain_loader(workers):
    loader = DataLoader(range(N), B, sampler=Shuffle(range(N)), num_workers=workers)
    assert [torch.cat(list(loader)).tolist() for _ in range(2)] == [order(0), order(1)]
    single = DataLoader(range(N), batch_size=None, sampler=Shuffle(range(N)), num_workers=workers)
    assert [list(single) for _ in range(2)] == [order(0), order(1)]


def test_no_random_state_is_used():
    before = rng.capture(torch.device("cpu"))
    list(Shuffle(range(N)))
    assert rng.equal(before, rng.capture(torch.device("cpu")))


def test_nothing_is_held_in_memory():
    """A trillion samples, with a first id at once."""
    Shuffle(range(9))
    tracemalloc.start()
    shuffle = Shuffle(range(10**12))
    shuffle.set_epoch(3, consumed=5 * 10**11)
    ids = iter(shuffle)
    found = [next(ids) for _ in range(2 * PIECE)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == Permutation(10**12, 0, 3).piece(5 * 10**11, 5 * 10**11 + 2 * PIECE).tolist()
    assert peak < 16 * 2**20


@pytest.mark.parametrize(
    ("n", "replicas", "drop_last"), crossed([1, 2, 7, 48, 50, 51], [1, 2, 3, 4, 8], [False, True])
)
def test_ids_are_dealt_out_as_by_a_distributed_sampler(n, replicas, drop_last):
    parts = []
    for rank in range(replicas):
        shuffle = Shuffle(range(n), num_replicas=replicas, rank=rank, drop_last=drop_last)
        reference = DistributedSampler(range(n), replicas, rank, shuffle=False, drop_last=drop_last)
        positions = list(reference)
        assert list(shuffle) == [order(0, n)[p] for p in positions]
        assert len(shuffle) == len(positions)
        parts.append(positions)
    assert len({len(part) for part in parts}) == 1


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("n", [240, 250])
def test_global_batches_are_the_same_for_every_number_of_processes(n, drop_last):
    def batches(replicas, batch):
        loaders = [
            DataLoader(
                range(n), batch // replicas, sampler=Shuffle(range(n), seed=3, num_replicas=replicas, rank=rank),
                drop_last=drop_last,
            )
            for rank in range(replicas)
        ]  # fmt: skip
        return [
            [sorted(torch.cat(parts).tolist()) for parts in zip(*loaders, strict=True)]
            for _ in range(2)
        ]

    one = batches(1, 24)
    for replicas in (2, 4, 8, 12):
        several = batches(replicas, 24)
        whole = n // 24
        assert [epoch[:whole] for epoch in several] == [epoch[:whole] for epoch in one]
        assert all(set(map(len, epoch[:whole])) == {24} for epoch in several)


@pytest.mark.parametrize("place", [0, 1, 12, 13])
def test_a_loader_goes_on_at_any_place(place):
    shuffle = Shuffle(range(N))
    whole = [batch.tolist() for batch in DataLoader(range(N), B, sampler=shuffle)]
    later = list(shuffle)
    again = Shuffle(range(N))
    again.set_epoch(0, consumed=min(place * B, again.total))
    again.set_epoch(0)  # as a loop does that names every epoch
    loader = DataLoader(range(N), B, sampler=again, num_workers=2)
    assert [batch.tolist() for batch in loader] == whole[place:]
    assert len(again) == N and list(again) == later


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_end_of_an_epoch_in_several_processes(drop_last):
    """The last batch is smaller than the others, so that steps times rows is more than an epoch has."""
    shuffle = Shuffle(range(N), num_replicas=4, rank=3, drop_last=drop_last)
    steps = len(DataLoader(range(N), 5, sampler=shuffle))
    consumed = min(steps * 4 * 5, shuffle.total)
    shuffle.load_state_dict({**shuffle.state_dict(), "epoch": 1, "consumed": consumed})
    assert list(shuffle) == [] and shuffle.epoch == 2


def test_a_position_is_that_of_all_processes():
    """Four processes saved it, and two go on."""
    four = [iter(Shuffle(range(N), num_replicas=4, rank=rank)) for rank in range(4)]
    seen = [next(ids) for _ in range(3) for ids in four]
    states = [ids.state_dict() for ids in four]
    assert all(state == {"seed": 0, "samples": N, "epoch": 0, "consumed": 12} for state in states)
    two = [Shuffle(range(N), num_replicas=2, rank=rank) for rank in range(2)]
    rest = [iter(shuffle) for shuffle in two]
    for ids in rest:
        ids.load_state_dict(states[3])
    seen += [i for ids in zip(*rest, strict=True) for i in ids]
    assert seen == order(0) and [shuffle.epoch for shuffle in two] == [1, 1]


def test_states_of_a_pass():
    shuffle = Shuffle(range(N), seed=2)
    shuffle.set_epoch(4)
    ids = iter(shuffle)
    assert ids.state_dict() == {"seed": 2, "samples": N, "epoch": 4, "consumed": 0}
    first = [next(ids) for _ in range(9)]
    state = ids.state_dict()
    assert state["consumed"] == 9
    other = iter(Shuffle(range(N), seed=2))
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert [*first, *other] == order(4, seed=2) and other.state_dict()["consumed"] == N
    other.load_state_dict({**state, "consumed": N})
    assert list(other) == []
    for changed, message in (
        ({"seed": 3}, "has seed=3, but this sampler has 2"),
        ({"samples": 51}, "samples=51, but"),
    ):
        with pytest.raises(ValueError, match=message):
            other.load_state_dict({**state, **changed})


def set_to_the_rest_of_epoch_3():
    shuffle = Shuffle(range(N))
    shuffle.set_epoch(3, consumed=8)
    shuffle.set_epoch(0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: Shuffle(iter([1])),
            TypeError,
            "`dataset` must have a length, or be a number of samples, got list_iterator",
        ),
        (lambda: Shuffle([1], seed=0.5), TypeError, "`seed` must be a whole number, got 0.5"),
        (lambda: Shuffle([1], seed=True), TypeError, "`seed` must be a whole number, got True"),
        (
            lambda: Shuffle([1], num_replicas=2),
            ValueError,
            "`num_replicas` and `rank` together, got 2 and None",
        ),
        (lambda: Shuffle([1], rank=0), ValueError, "together, got None and 0"),
        (
            lambda: Shuffle([1], num_replicas=2, rank=2),
            ValueError,
            r"within \[0, num_replicas\), got 2 and 2",
        ),
        (lambda: Shuffle([1], num_replicas=0, rank=0), ValueError, "got 0 and 0"),
        (lambda: Shuffle([1]).set_epoch(0.5), TypeError, "float"),
        (lambda: Shuffle([1]).set_epoch(-1), ValueError, "`epoch` must be 0 or more, got -1"),
        (lambda: Shuffle(range(N)).set_epoch(0, consumed=51), ValueError, "0 to 50, got 51"),
        (lambda: Shuffle(range(N)).set_epoch(0, consumed=-1), ValueError, "0 to 50, got -1"),
        (
            lambda: Shuffle(range(N), num_replicas=4, rank=0).set_epoch(0, consumed=53),
            ValueError,
            "0 to 52, got 53. At the end of an epoch, pass `total`",
        ),
        (
            set_to_the_rest_of_epoch_3,
            ValueError,
            "set epoch 3 to continue after 8 items, but this call sets epoch .* pass consumed=0",
        ),
    ],
)
def test_wrong_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def in_four_processes(monkeypatch):
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(
        distributed,
        "all_gather_object",
        lambda found, value: found.__setitem__(slice(None), [value] * 4),
    )


def test_processes_are_those_of_torch_distributed(monkeypatch):
    in_four_processes(monkeypatch)
    assert list(Shuffle(range(N))) == [order(0)[p % N] for p in range(1, 52, 4)]
    assert list(Shuffle(range(N), num_replicas=1, rank=0)) == order(0)


def test_an_order_is_not_dealt_out_twice(monkeypatch):
    """By the sampler, and by a loader that accelerate or Lightning prepared."""
    accelerate = pytest.importorskip("accelerate.data_loader")
    in_four_processes(monkeypatch)

    def batches(**settings):
        whole = BatchSampler(Shuffle(range(N), **settings), B, drop_last=False)
        return accelerate.BatchSamplerShard(whole, num_processes=4, process_index=0)

    with pytest.raises(
        RuntimeError,
        match="Shuffle divides its order among 4 processes, and so does .* num_replicas=1, rank=0",
    ):
        list(batches())
    assert next(iter(batches(num_replicas=1, rank=0))) == order(0)[:B]
    wrapped = pytest.importorskip(
        "lightning_cases"
    ).lightning.fabric.utilities.distributed.DistributedSamplerWrapper
    with pytest.raises(RuntimeError, match="use_distributed_sampler=False"):
        list(wrapped(Shuffle(range(N)), num_replicas=4, rank=0))
