"""The contract of a budget: the cost that is asked for, in as many steps as full training has, whatever does not divide."""

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset

import thresher
from depth import depth
from helpers import assert_same

ONE_EPOCH = (
    " draws uniformly in the first epoch, and this run has only one. Train for two or more epochs."
)


class Counted(Dataset):
    """Samples of three classes; it notes which of them are loaded."""

    def __init__(self, n: int) -> None:
        self.x, self.loaded = torch.randn(n, 4, generator=torch.Generator().manual_seed(n)), []

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        self.loaded.append(i)
        return self.x[i], i % 3


class Training:
    """A small network, its optimizer and its data, with a method or without one."""

    def __init__(
        self,
        n: int,
        batch_size: int,
        *,
        drop_last: bool = False,
        features: Any = nn.ReLU,
        **loading: Any,
    ) -> None:
        torch.manual_seed(n)
        self.data = Counted(n)
        self.model = nn.Sequential(nn.Linear(4, 6), features(), nn.Linear(6, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.loader = DataLoader(
            self.data, batch_size, drop_last=drop_last, **({"shuffle": True} | loading)
        )
        self.steps, self.samples = (
            (n // batch_size, n // batch_size * batch_size)
            if drop_last
            else (-(-n // batch_size), n)
        )

    def attach(self, method: Any, epochs: int, **more: Any) -> thresher.Run:
        arguments = {
            "loader": self.loader,
            "criterion": nn.CrossEntropyLoss(),
            "model": self.model,
        } | more
        return thresher.attach(method, optimizer=self.optimizer, epochs=epochs, **arguments)

    def epoch(self, run: thresher.Run) -> list[list[int]]:
        """Trains for an epoch; returns the ids of its batches."""
        found, self.data.loaded = [], []
        for x, y in run.loader:
            self.optimizer.zero_grad()
            run.criterion(run.model(x), y).backward()
            self.optimizer.step()
            found.append(run.ids.tolist())
        return found

    def by_hand(self) -> None:
        """Trains for an epoch without a method."""
        for x, y in self.loader:
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()

    def state(self) -> list[Any]:
        generators = [one.get_state() for one in (self.loader.generator,) if one is not None]
        return [
            self.model.state_dict(),
            self.optimizer.state_dict(),
            torch.get_rng_state(),
            generators,
        ]


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int, bool]:
    """Numbers of samples and of samples a batch that do not divide, and whether the rest is dropped."""
    batch_size = draw(st.integers(2, 20))
    return (
        draw(st.integers(1, 6)) * batch_size + draw(st.integers(1, batch_size - 1)),
        batch_size,
        draw(st.booleans()),
    )


def check_batches(training: Training, batches: list[list[int]]) -> int:
    """Checks the batches of an epoch with fewer samples than full training; returns their number of samples."""
    lengths, ids = [len(batch) for batch in batches], [i for batch in batches for i in batch]
    assert len(batches) == training.steps and max(lengths) - min(lengths) <= 1
    assert len(set(ids)) == len(ids) == sum(lengths)
    return len(ids)


@settings(max_examples=depth(12, 150))
@given(sizes(), st.sampled_from([1, 2, 5, 12, 40]), st.data())
def test_the_cost_is_the_share_and_the_steps_are_those_of_full_training(size, epochs, data):
    n, batch_size, drop_last = size
    training = Training(n, batch_size, drop_last=drop_last)
    share = data.draw(st.integers(max(10, -(-100 * training.steps // training.samples)), 100)) / 100
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run = training.attach(share, epochs)
        less = share < 1 and round(share * training.samples) < training.samples
        draws = epochs == 1 and round(share * n) < n
        assert [str(one.message) for one in said] == (
            [f"attach({share})" + ONE_EPOCH] if draws else []
        )
        for number in range(1, epochs + 1):
            assert len(run.loader) == training.steps
            batches = training.epoch(run)
            assert training.data.loaded == [
                i for batch in batches for i in batch
            ]  # the others are never loaded
            if less:
                kept = check_batches(training, batches)
                assert (
                    abs(kept / training.samples - share) <= 0.01 + 1 / n
                    and run.history[-1]["kept"] == kept
                )
            assert run.cost.full_forward == run.cost.full_backward == number * training.samples
            assert run.cost.steps == number * training.steps
    assert run.cost.forward == run.cost.backward and abs(run.cost.ratio() - share) <= 0.01 + 1 / n


@settings(max_examples=depth(40, 400))
@given(sizes(), st.integers(1, 99), st.booleans())
def test_too_few_rows_a_batch_are_refused_with_the_smallest_share(size, hundredths, normalized):
    n, batch_size, drop_last = size
    training = Training(
        n,
        batch_size,
        drop_last=drop_last,
        features=lambda: nn.BatchNorm1d(6) if normalized else nn.ReLU(),
    )
    kept, least = max(1, round(hundredths / 100 * n)), 2 if normalized else 1
    rows = (2 * kept * training.samples + n) // (
        2 * n
    )  # with drop_last, the same share of the samples that are not dropped
    if rows == training.samples or rows >= least * training.steps:
        training.attach(hundredths / 100, 2)
        return
    reason = (
        "fewer than two per batch, which BatchNorm needs" if normalized else "less than one a batch"
    )
    with pytest.raises(ValueError, match=f"{reason}: the smallest share is") as said:
        training.attach(hundredths / 100, 2)
    named = float(str(said.value).split("the smallest share is ")[1].split(". Give")[0])
    assert named <= min(1, 1.01 * least * training.steps / training.samples)
    run = training.attach(named, 2)
    if named < 1:
        batches = training.epoch(run)
        assert len(batches) == training.steps and min(map(len, batches)) >= least


@pytest.mark.parametrize("method", [thresher.Winnow(0.4), thresher.Winnow(0.4, score="loss")])
def test_one_epoch_is_uniform(method):
    """Each sample is drawn equally often, within four standard deviations, and the losses of the epoch change nothing."""

    def batches(seed, rate=0.1):
        training = Training(n, 5)
        training.optimizer.param_groups[0]["lr"] = rate
        torch.manual_seed(seed)  # of the shuffle
        with pytest.warns(UserWarning, match=ONE_EPOCH):
            return training.epoch(training.attach(method, 1, seed=seed))

    n, seeds = 22, depth(80, 400)
    drawn = torch.zeros(n)
    for seed in range(seeds):
        drawn[[i for batch in batches(seed) for i in batch]] += 1
    assert (
        drawn.sum() == seeds * 9
        and ((drawn / seeds - 9 / n).abs() < 4 * (9 / n * 13 / n / seeds) ** 0.5).all()
    )
    assert batches(0, rate=5.0) == batches(0)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("features", [nn.ReLU, nn.Dropout, lambda: nn.BatchNorm1d(6)])
def test_share_1_is_full_training_bit_for_bit(features, own, drop_last):
    """Parameters, buffers, the optimizer, and the random states."""
    found = []
    for attached in (True, False):
        generator = torch.Generator().manual_seed(3) if own else None
        training = Training(38, 6, drop_last=drop_last, features=features, generator=generator)
        run = training.attach(1.0, 3) if attached else None
        torch.manual_seed(1)
        for _ in range(3):
            training.by_hand() if run is None else training.epoch(run)
        found.append(training.state())
    assert_same(*found)


@settings(max_examples=depth(10, 100))
@given(
    sizes(),
    st.sampled_from(
        [
            thresher.UniformSubset(0.7),
            thresher.UniformSubset(0.4),
            thresher.InfoBatch(),
            thresher.Kakurenbo(0.5),
        ]
    ),
)
def test_other_methods_spend_their_plans_in_the_steps_of_full_training(size, method):
    n, batch_size, drop_last = size
    training = Training(n, batch_size, drop_last=drop_last)
    if (
        isinstance(method, thresher.UniformSubset)
        and int(method.keep * n) * training.samples / n < training.steps
    ):
        return
    run = training.attach(method, 5, spend="batches")
    for number in range(1, 6):
        planned, refreshed = set(run.plan.ids.tolist()), run.plan.refresh
        assert len(run.loader) == training.steps and run.plan.lr_scale == 1
        batches = training.epoch(run)
        trained = [i for batch in batches for i in batch]
        part = (
            len(planned) * training.samples / n
        )  # as large a part of a plan is dropped as of all samples
        assert set(trained) <= planned and abs(len(trained) - part) <= 0.5
        if len(trained) < training.samples:
            assert check_batches(training, batches) == run.history[-1]["kept"]
        passed = [] if refreshed is None else refreshed.tolist()
        assert sorted(training.data.loaded) == sorted(trained + passed)
        assert run.cost.steps == number * training.steps == len(batches) * number
