"""An audit finds what a loader loses or repeats, and says nothing of loaders that are right."""

import contextlib
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

import thresher
from depth import depth
from thresher.samplers import (
    BalancedBatchSampler,
    Grouped,
    Mixture,
    Shuffle,
    StratifiedBatchSampler,
    WeightedSampler,
)
from thresher.testing import Audit, audit

with contextlib.suppress(ImportError):
    import accelerate

N = 103
LABELS = np.arange(N) % 4
LENGTHS = np.random.default_rng(0).integers(3, 60, N)
DATA = TensorDataset(torch.arange(float(N)), torch.arange(N) % 4)
EVERY = {
    "shuffle": lambda: DataLoader(DATA, 8, shuffle=True),
    "drop_last": lambda: DataLoader(DATA, 8, shuffle=True, drop_last=True),
    "generator": lambda: DataLoader(DATA, 8, shuffle=True, generator=torch.Generator()),
    "workers": lambda: DataLoader(DATA, 8, shuffle=True, num_workers=1),
    "in order": lambda: DataLoader(DATA, 8),
    "subset": lambda: DataLoader(Subset(DATA, range(50)), 8, shuffle=True),
    "tensors": lambda: thresher.TensorLoader(torch.arange(30.0), torch.arange(30), batch_size=8),
    "replacement": lambda: DataLoader(DATA, 8, sampler=RandomSampler(DATA, replacement=True)),
    "weights": lambda: DataLoader(DATA, 8, sampler=WeightedRandomSampler(torch.rand(N), N)),
    "paced weights": lambda: DataLoader(DATA, 8, sampler=WeightedSampler(torch.rand(N))),
    "Shuffle": lambda: DataLoader(DATA, 8, sampler=Shuffle(DATA)),
    "by length": lambda: DataLoader(DATA, batch_sampler=Grouped(LENGTHS, 8)),
    "by tokens": lambda: DataLoader(DATA, batch_sampler=Grouped(LENGTHS, max_tokens=300)),
    "stratified": lambda: DataLoader(DATA, batch_sampler=StratifiedBatchSampler(LABELS, 8)),
    "balanced": lambda: DataLoader(DATA, batch_sampler=BalancedBatchSampler(LABELS, 8)),
    "mixture": lambda: DataLoader(DATA, batch_sampler=Mixture(LABELS, 8, {0: 4, 1: 2, 2: 1, 3: 1})),
}


@pytest.mark.parametrize("name", EVERY)
def test_a_loader_that_is_right_has_no_problem(name):
    found = audit(EVERY[name], world=(1,))
    assert not found.problems and str(found).startswith(found.facts[0])


@pytest.mark.filterwarnings("ignore:.*set_vital")
def test_torchdata():
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    assert not audit(lambda: stateful(DATA, 8, shuffle=True), world=(1,)).problems
    assert not audit(lambda: stateful(DATA, 8, sampler=Shuffle(DATA)), world=(1,)).problems


def test_accelerate():
    accelerate = pytest.importorskip("accelerate")
    prepare = accelerate.Accelerator(cpu=True).prepare
    assert not audit(lambda: prepare(DataLoader(DATA, 8, shuffle=True)), world=(1,)).problems


class Faulty(Sampler[int]):
    """A shuffle that forgets samples, repeats one, or has the same order again."""

    def __init__(self, n, forgets=(), repeats=(), seeds=()):
        self._ids = [i for i in range(n) if i not in forgets] + [*repeats]
        self._seeds = seeds
        self._epoch = 0

    def __len__(self):
        return len(self._ids)

    def __iter__(self):
        seed = self._seeds[self._epoch % len(self._seeds)] if self._seeds else self._epoch
        self._epoch += 1
        return iter(np.random.default_rng(seed).permutation(self._ids).tolist())


@settings(max_examples=depth(15, 100), deadline=None)
@given(st.integers(14, 200), st.integers(1, 9), st.data())
def test_planted_faults_are_found(n, size, data):
    dataset = TensorDataset(torch.arange(n))
    one = data.draw(st.integers(0, n - 1))

    def problems(**fault):
        def make():
            return DataLoader(dataset, size, sampler=Faulty(n, **fault))

        return " ".join(audit(make, world=(1,), resume=False).problems)

    assert f"1 of {n} samples never come in 3 epochs: {one}." in problems(forgets=[one])
    assert f"1 samples come twice in an epoch: {one}." in problems(repeats=[one])
    assert "epochs 0 and 2 have the same order" in problems(seeds=[4, 5])
    assert "all epochs have the same order" in problems(seeds=[4])
    assert not problems()


class Later(Sampler[int]):
    """Each sample once in the first epoch, and in later ones what is given."""

    def __init__(self, later):
        self._orders = iter([range(40)])
        self._later = later

    def __len__(self):
        return 40

    def __iter__(self):
        return iter(next(self._orders, self._later))


class Batches:
    """A batch sampler of one's own, whose order depends on an epoch that nobody sets."""

    def __iter__(self):
        order = np.random.default_rng(0).permutation(40).tolist()
        return iter([order[i : i + 8] for i in range(0, 40, 8)])

    def __len__(self):
        return 5

    def set_epoch(self, epoch):
        raise AssertionError


def test_later_epochs_and_orders_of_batch_samplers_are_checked():
    def problems(**settings):
        data = TensorDataset(torch.arange(40))
        found = audit(lambda: DataLoader(data, **settings), world=(1,), resume=False)
        return [problem.partition(":")[0].partition(".")[0] for problem in found.problems]

    assert problems(batch_size=8, sampler=Later([*range(39), 0])) == [
        "1 samples come twice in an epoch",
        "1 of 40 samples do not come in epoch 1",
        "epochs 1 and 2 have the same order",
    ]
    assert problems(batch_size=8, sampler=Later([])) == ["40 of 40 samples do not come in epoch 1"]
    assert problems(batch_sampler=Batches()) == [
        "all epochs have the same order"
    ]  # of a batch sampler, whose loader has a SequentialSampler


def test_an_epoch_that_is_never_set():
    def make():
        return DataLoader(DATA, 8, sampler=DistributedSampler(DATA, 1, 0))

    found = audit(make, world=(1,))
    assert "set_epoch(epoch) before each epoch" in found.problems[0]
    right = audit(
        make, world=(1,), begin_epoch=lambda loader, epoch: loader.sampler.set_epoch(epoch)
    )
    assert not right.problems


class Resumed(DataLoader):
    """A loader whose state is off by some batches."""

    def __init__(self, *args, off=0, **kwargs):
        super().__init__(*args, **kwargs)
        vars(self).update(off=off, begun=0, first=0)

    def __iter__(self):
        begin = vars(self)["first"]
        vars(self).update(begun=begin, first=0)
        for number, batch in enumerate(super().__iter__()):
            if number >= begin:
                vars(self)["begun"] += 1
                yield batch

    def state_dict(self):
        return vars(self)["begun"] % len(self)

    def load_state_dict(self, state):
        vars(self)["first"] = max(0, state + vars(self)["off"])


@pytest.mark.parametrize(
    ("off", "message"), [(1, "leaves out 8 samples"), (-2, "repeats"), (0, None)]
)
def test_a_resume_that_is_off(off, message):
    found = audit(lambda: Resumed(DATA, 8, off=off), world=(1,))
    assert (message is None and not found.problems) or message in found.problems[0]


def test_a_resume_in_another_order():
    class Other(Resumed):
        def load_state_dict(self, state):
            vars(self)["batch_sampler"].sampler = Faulty(N, seeds=[9])

    found = audit(lambda: Other(DATA, 8), world=(1,))
    assert any("has another order. Give the sampler a seed" in one for one in found.problems)


def distributed():
    return DataLoader(DATA, 8, sampler=DistributedSampler(DATA, seed=1))


def set_epoch(loader, epoch):
    loader.sampler.set_epoch(epoch)


def shuffled_in_each_process():
    return DataLoader(DATA, 8, shuffle=True)


def grouped():
    return DataLoader(DATA, batch_sampler=Grouped(LENGTHS, max_tokens=300))


def unlike():
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    return DataLoader(DATA, 8, sampler=range(rank * 50, 40 + rank * 60))


def with_gaps():
    if not torch.distributed.is_initialized():
        return DataLoader(DATA, 8, shuffle=True)
    rank = torch.distributed.get_rank()
    return DataLoader(DATA, 8, sampler=range(60 * rank, 60 * rank + 30))


@pytest.mark.parametrize(
    ("make", "begin_epoch", "message"),
    [
        (distributed, set_epoch, None),
        (grouped, None, None),
        (distributed, None, "two epochs have the same order"),
        (shuffled_in_each_process, None, "come in more than one process: pass sampler=Distributed"),
        (unlike, None, "unlike numbers of batches"),
        (with_gaps, None, "samples come in no process"),
    ],
)
def test_two_processes(make, begin_epoch, message):
    found = audit(make, world=(2,), epochs=2, resume=False, begin_epoch=begin_epoch)
    told = [one for one in found.problems if one.startswith("2 processes")]
    assert bool(told) == (message is not None) and (message or "") in " ".join(told)


def dispatched():
    config = accelerate.DataLoaderConfiguration(dispatch_batches=True)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=config)
    return accelerator.prepare(shuffled_in_each_process())


def test_a_loader_of_accelerate_in_two_processes():
    pytest.importorskip("accelerate")
    found = audit(dispatched, world=2, epochs=2, resume=False)
    assert not found.problems and found.facts[-1] == "2 processes: 7 batches each"


SCRIPT = """
import accelerate, torch
from torch.utils.data import DataLoader, TensorDataset
from thresher.testing import audit

accelerator = accelerate.Accelerator()
def make_loader():
    return accelerator.prepare(DataLoader(TensorDataset(torch.arange(40)), 8, shuffle=True))

if __name__ == "__main__":
    print(audit(make_loader, world=2, epochs=2))
"""


def test_a_script_that_creates_an_accelerator(tmp_path):
    pytest.importorskip("accelerate")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    output = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True)
    assert output.stdout == "2 processes: 3 batches each\n"


def fails_in_a_process():
    if torch.distributed.get_rank():
        raise RuntimeError("no data here")
    torch.distributed.barrier()


def test_an_error_in_one_process_ends_the_audit():
    before = dict(os.environ)
    with pytest.raises(Exception, match="no data here"):
        audit(fails_in_a_process, world=2)
    assert dict(os.environ) == before


def test_a_loader_for_one_process_is_no_problem_by_default():
    found = audit(shuffled_in_each_process, epochs=2, resume=False)
    assert not found.problems
    assert any(one.startswith("2 processes would each train on all") for one in found.notes)


class Forgetful(Sampler):
    """A sampler that leaves out other samples in each epoch."""

    def __iter__(self):
        return iter(torch.randperm(len(DATA))[:-7].tolist())

    def __len__(self):
        return len(DATA) - 7


def test_samples_that_a_sampler_forgets_are_not_called_dropped():
    found = audit(lambda: DataLoader(DATA, 8, sampler=Forgetful()), world=(1,))
    assert f"7 of {len(DATA)} samples do not come in epoch 0" in found.problems[0]


def test_several_processes_need_a_function_of_a_module():
    found = audit(lambda: DataLoader(DATA, 8, shuffle=True), world=(1, 2))
    assert any("a function at the top level of a module" in one for one in found.notes)


def test_a_loader_itself_is_read_in_one_process():
    loader = DataLoader(DATA, 8, shuffle=True)
    before = torch.get_rng_state()
    assert not audit(loader).problems and torch.equal(torch.get_rng_state(), before)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


@pytest.mark.parametrize("loader", [[1, 2], DataLoader(Stream())])
def test_other_loaders_are_refused(loader):
    with pytest.raises(TypeError, match="must be a DataLoader over a map-style dataset"):
        audit(loader)


def test_one_epoch_is_too_few():
    with pytest.raises(ValueError, match="`epochs` must be 2 or more, got 1"):
        audit(DataLoader(DATA, 8), epochs=1)


# What a run has trained on


def trained(method, *, skip=(), stop=None, **how):
    model = nn.Linear(1, 4)
    data = TensorDataset(torch.randn(40, 1), torch.arange(40) % 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(data, **{"batch_size": 8, **(how or {"shuffle": True})})
    run = thresher.attach(
        method,
        loader=loader,
        criterion=nn.CrossEntropyLoss(),
        model=model,
        optimizer=optimizer,
        epochs=2,
    )
    for _ in range(2):
        for number, (x, y) in enumerate(run.loader):
            if number == stop:
                break
            if number not in skip:
                optimizer.zero_grad()
                run.criterion(run.model(x), y).backward()
                optimizer.step()
    return run


def test_a_run_says_how_often_samples_were_trained_on():
    found = trained(thresher.FullData()).audit()
    assert found.facts == ["40 samples, trained on 2 to 2 times in 2 complete epochs"]
    assert not found.problems and not found.notes
    found = trained(thresher.FullData(), skip=[1]).audit()
    assert "trained on less often than once a complete epoch" in found.problems[0]
    found = trained(thresher.UniformSubset(keep=0.5)).audit()
    assert "samples were never trained on" in found.notes[0] and not found.problems


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([*range(33)], "7 of 40 samples were trained on less often than once a complete epoch: 33"),
        ([*range(39), 0], "1 of 40 samples were trained on more often than once an epoch: 0"),
    ],
)
def test_a_run_finds_what_its_sampler_leaves_out_or_repeats(ids, message):
    problems = trained(thresher.FullData(), sampler=ids).audit().problems
    assert any(message in one for one in problems)


def test_a_loop_that_is_left_early_trains_on_no_sample_too_often():
    found = trained(thresher.FullData(), stop=3).audit()
    assert not found.problems
    assert found.facts[0].endswith("in 0 complete epochs and 2 that are not")


def test_what_drop_last_leaves_out_of_a_run_is_no_problem():
    found = trained(thresher.FullData(), shuffle=True, drop_last=True, batch_size=7).audit()
    assert not found.problems
    assert "an epoch leaves out 5 samples, as drop_last asks" in found.notes


def test_what_a_sampler_leaves_out_is_not_called_dropped():
    found = trained(thresher.FullData(), sampler=[*range(32)], drop_last=True).audit()
    assert "8 of 40 samples were trained on less often" in found.problems[0]
    assert not any("drop_last" in note for note in found.notes)


def test_samples_that_are_drawn_with_replacement_are_no_problem():
    sampler = WeightedRandomSampler(torch.ones(40), 40)
    assert not trained(thresher.FullData(), sampler=sampler).audit().problems


def test_a_sample_that_comes_too_often():
    found = thresher.audit.audit_counts(torch.tensor([1, 3]), 1, every=True)
    assert "1 of 2 samples were trained on more often than once an epoch: 1." in found.problems[0]


def test_an_audit_is_printed_line_by_line():
    found = Audit(["one"], ["two"], ["three"])
    assert str(found) == "three\nPROBLEM: one\nnote: two"
