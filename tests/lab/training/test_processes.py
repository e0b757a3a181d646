"""What processes that train together share; that they do it is in integration/test_launched_commands.py."""

from itertools import chain

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, RandomSampler

import thresher
from thresher_lab.training import processes
from thresher_lab.training.processes import (
    check_joined,
    combine_counts,
    group_by_length,
    of_each_process,
    of_first,
    once_per_machine,
    own_rank,
    shard_loader,
)

N = 21


@pytest.fixture
def rank(monkeypatch):
    """Makes this process one of three."""

    def become(rank):
        monkeypatch.setattr(processes, "number_of_processes", lambda: 3)
        monkeypatch.setattr(processes, "own_rank", lambda: rank)

    return become


def test_one_process_is_the_first_and_tells_itself():
    written = []
    once_per_machine(lambda: written.append(1))
    assert (own_rank(), of_first("a"), of_each_process("a"), written) == (0, "a", ["a"], [1])
    loader = DataLoader(range(N), 6)
    assert shard_loader(loader, 0) is loader


def test_processes_without_a_group_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ValueError,
        match="has started 2 processes .* call torch.distributed.init_process_group first",
    ):
        check_joined()
    monkeypatch.setenv("WORLD_SIZE", "1")
    check_joined()


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("shuffled", ["by the loader", "by a Shuffle"])
def test_batches_of_all_processes_are_those_of_one(rank, drop_last, shuffled):
    def loader():
        generator = torch.Generator().manual_seed(5)
        sampler = (
            RandomSampler(range(N), generator=generator)
            if shuffled == "by the loader"
            else thresher.Shuffle(range(N), 5)
        )
        return DataLoader(
            range(N), 6, sampler=sampler, drop_last=drop_last, num_workers=0, generator=generator
        )

    whole, parts = [batch.tolist() for batch in loader()], []
    for one in range(3):
        rank(one)
        parts.append([batch.tolist() for batch in shard_loader(loader(), 0)])
    together = [sorted(chain(*step)) for step in zip(*parts, strict=True)]
    assert together == [sorted(batch) for batch in whole] and {len(part[0]) for part in parts} == {
        2
    }


def test_a_shuffle_by_the_global_state_gets_a_generator(rank):
    rank(0)
    first = [batch.tolist() for batch in shard_loader(DataLoader(range(N), 6, shuffle=True), 7)]
    torch.rand(1)
    assert [
        batch.tolist() for batch in shard_loader(DataLoader(range(N), 6, shuffle=True), 7)
    ] == first


def test_a_loader_that_deals_out_its_samples_stays(rank):
    rank(1)
    for sampler in (
        DistributedSampler(range(N), 3, 1),
        thresher.Shuffle(range(N), num_replicas=3, rank=1),
    ):
        loader = DataLoader(range(N), 2, sampler=sampler)
        assert shard_loader(loader, 0) is loader


def test_batches_without_equal_parts_are_refused(rank):
    rank(0)
    with pytest.raises(
        ValueError,
        match="batches of 8 samples, of which 3 processes cannot have equal parts. Start a number",
    ):
        shard_loader(DataLoader(range(N), 8), 0)
    with pytest.raises(ValueError, match="a batch sampler of its own, of which 3 processes"):
        shard_loader(
            DataLoader(range(N), batch_sampler=BatchSampler(range(N), 6, drop_last=False)), 0
        )


def test_counts_of_processes_are_combined():
    first = {
        "forward": 4,
        "steps": 2,
        "facts": 0.5,
        "same": 0.1,
        "backward_to_forward": 2.0,
        "name": "a",
        "nothing": None,
    }
    found = combine_counts(
        [first, first | {"forward": 3, "facts": 1.0, "backward_to_forward": 1.0}]
    )
    assert found == first | {"forward": 7, "facts": 0.75}
    for prefix in ("", "batch_"):
        parts = [
            {"candidates": 8, "selected": 2, "actual_fraction": 0.75},
            {"candidates": 8, "selected": 3, "actual_fraction": 0.6},
        ]
        found = combine_counts(
            [{f"{prefix}{name}": value for name, value in part.items()} for part in parts]
        )
        assert found == {
            f"{prefix}candidates": 16,
            f"{prefix}selected": 5,
            f"{prefix}actual_fraction": 1 - 5 / 16,
        }


class Sentences(Dataset):
    """Samples of known lengths."""

    lengths = [3, 9, 1, 8, 2, 7]

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, i):
        return self.lengths[i]


def test_batches_by_length_have_the_rows_and_settings_of_the_loader():
    loader = DataLoader(Sentences(), 2, shuffle=True, collate_fn=sorted)
    batches = [*group_by_length(loader, 0)]
    # The window of two batches mixes lengths that are near each other.
    assert sorted(map(len, batches)) == [2, 2, 2]
    assert sorted(chain(*batches)) == sorted(Sentences.lengths)
    assert [1, 2] in batches


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (DataLoader(range(4), 2), "range has no attribute `lengths`"),
        (DataLoader(Sentences(), 2, drop_last=True), "leave out batch_sampler and drop_last"),
        (
            DataLoader(Sentences(), batch_sampler=[[0, 1]]),
            "leave out batch_sampler and drop_last",
        ),
    ],
)
def test_batches_by_length_that_cannot_be(loader, message):
    with pytest.raises(ValueError, match=message):
        group_by_length(loader, 0)
