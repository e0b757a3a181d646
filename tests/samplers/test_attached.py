"""A run over a `WeightedSampler`: its order, less the samples that the plan leaves out, gone on with at any place."""

import io

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

import thresher
from thresher.samplers import WeightedSampler

N, B = 60, 4
DATA = TensorDataset(
    torch.randn(N, 3, generator=torch.Generator().manual_seed(0)), torch.arange(N) % 3
)
WEIGHTS = np.arange(N) % 4.0


class Training:
    def __init__(self, method=None, *, replacement="paced", k=90, **settings):
        torch.manual_seed(0)
        self.sampler, self.seen = WeightedSampler(WEIGHTS, k, replacement=replacement), []
        model = nn.Linear(3, 3)
        self.optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loader = DataLoader(DATA, B, sampler=self.sampler, **settings)
        parts = {
            "criterion": nn.CrossEntropyLoss(),
            "model": model,
            "optimizer": self.optimizer,
            "epochs": 6,
        }
        self.run = thresher.attach(method or thresher.FullData(), loader=loader, **parts)

    def epoch(self, batches=None):
        for done, (x, y) in enumerate(self.run.loader, 1):
            self.run.criterion(self.run.model(x), y).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.seen += self.run.ids.tolist()
            if done == batches:
                break


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("kind", "k"), [("paced", 90), (True, 90), (False, 30)])
def test_full_data_has_the_order_of_the_sampler(kind, k, workers):
    training, alone = (
        Training(replacement=kind, k=k, num_workers=workers),
        WeightedSampler(WEIGHTS, k, replacement=kind),
    )
    for _ in range(2):
        training.epoch()
    assert training.seen == [*alone, *alone]


def test_a_plan_is_made_of_the_samples_with_a_weight_and_leaves_the_others_out_of_the_order():
    training, alone = Training(thresher.UniformSubset(keep=0.5)), WeightedSampler(WEIGHTS, 90)
    for _ in range(3):
        kept = {*training.run.plan.ids.tolist()}
        assert len(kept) == np.count_nonzero(WEIGHTS) // 2 and not any(
            WEIGHTS[i] == 0 for i in kept
        )
        training.seen.clear()
        training.epoch()
        assert training.seen == [i for i in alone if i in kept]


@pytest.mark.parametrize("method", [None, thresher.UniformSubset(keep=0.5)])
@pytest.mark.parametrize("changes", [False, True])
def test_a_run_goes_on_in_the_middle_of_an_epoch(method, changes):
    """Also with weights that were changed, which the state has."""
    whole = Training(method)
    whole.epoch()
    if changes:
        whole.sampler.set_weights(WEIGHTS**2)
    whole.epoch(batches=5)
    file = io.BytesIO()
    torch.save(whole.run.state_dict(), file)
    file.seek(0)
    again = Training(method)
    again.run.load_state_dict(torch.load(file, weights_only=True))
    done = len(whole.seen)
    for training in (whole, again):
        if training is whole:  # its interrupted pass is over: it goes on by the same state
            file.seek(0)
            training.run.load_state_dict(torch.load(file, weights_only=True))
        training.epoch()
        training.epoch()
    assert again.seen == whole.seen[done:] and len(again.seen) > B


def test_other_weights_are_named():
    training = Training()
    training.epoch(batches=3)
    other = Training(k=80)
    with pytest.raises(
        ValueError, match="WeightedSampler.*num_samples=90.* this one has .*num_samples=80"
    ):
        other.run.load_state_dict(training.run.state_dict())


def test_batches_of_a_sampler_are_not_broken_up():
    class OwnBatches(BatchSampler):
        pass

    batches = OwnBatches(SequentialSampler(DATA), 6, False)
    loader = DataLoader(DATA, batch_sampler=batches)
    with pytest.raises(
        ValueError, match="a batch_sampler, OwnBatches: leaving out samples would break"
    ):
        thresher.attach(
            thresher.FullData(),
            loader=loader,
            criterion=nn.CrossEntropyLoss(),
            model=nn.Linear(3, 3),
            epochs=1,
        )
