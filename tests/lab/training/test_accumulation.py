import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from depth import depth
from thresher_lab.training.accumulation import Groups, share_of
from thresher_lab.training.loop import train
from thresher_lab.training.specs import parse_methods
from thresher_lab.training.trainable import Training

SAMPLES, EPOCHS = 44, 3


class Rows:
    """A task in double precision, whose last batch of 8 is not full.

    Args:
        batch: Number of samples per batch.
        accumulate: Number of batches per step.
        samples: Number of samples.
        criterion: Loss function.
    """

    name, recipe = "rows", {}

    def __init__(self, batch, accumulate=1, *, samples=SAMPLES, criterion=None):
        self.batch, self.accumulate, self.criterion = (
            batch,
            accumulate,
            criterion or nn.CrossEntropyLoss(),
        )
        x = torch.randn(samples, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.data, self.rates, self.trained = (
            TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 1).long()),
            [],
            [],
        )

    def training(self, data, seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        optimizer.register_step_pre_hook(
            lambda *_: self.rates.append(optimizer.param_groups[0]["lr"])
        )
        loader = DataLoader(
            self.data, self.batch, shuffle=True, generator=torch.Generator().manual_seed(seed)
        )
        return Training(
            model, loader, self.criterion, optimizer, lambda model: -model[0].weight.norm().item(),
            schedule=lambda done: 1 - done, accumulate=self.accumulate,
        )  # fmt: skip


def trained(task, method="full", epochs=EPOCHS):
    ended, [spec] = list[Training](), parse_methods(method)
    run = train(task, None, spec, seed=0, epochs=epochs, on_end=ended.append)
    return run, [value.detach() for value in ended[0].model.parameters()]


CRITERIA = [
    nn.CrossEntropyLoss(),
    nn.CrossEntropyLoss(torch.tensor([1.0, 5.0, 2.0], dtype=torch.float64), ignore_index=1),
]


@pytest.mark.parametrize("criterion", CRITERIA, ids=["equal weights", "class weights"])
@pytest.mark.parametrize(
    ("batch", "accumulate"), depth([(8, 2), (5, 3)], [(4, 4), (8, 2), (5, 3), (16, 1)])
)
def test_batches_add_up_to_a_larger_one(batch, accumulate, criterion):
    """Also where the last step of an epoch has fewer batches, and the last batch fewer samples."""
    several, whole = (
        Rows(batch, accumulate, criterion=criterion),
        Rows(batch * accumulate, criterion=criterion),
    )
    (own, weights), (one, expected) = trained(several), trained(whole)
    for value, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-10, atol=1e-10)
    assert (
        several.rates == pytest.approx(whole.rates)
        and len(whole.rates) == own["cost"]["steps"] == EPOCHS * 3
    )
    for entry, other in zip(own["history"], one["history"], strict=True):
        assert [entry[name] for name in ("forward", "backward", "steps", "complete")] == [
            other[name] for name in ("forward", "backward", "steps", "complete")
        ]


def test_an_epoch_with_less_than_a_step_has_a_step():
    run, _ = trained(Rows(4, 100))
    assert [entry["steps"] for entry in run["history"]] == [1] * EPOCHS and run["cost"][
        "forward"
    ] == EPOCHS * SAMPLES


@pytest.mark.parametrize(
    "method",
    [
        "kakurenbo:max_fraction=0.4", "selective_backprop:keep=0.5:forward_passes=once",
        "selective_backprop:beta=1:forward_passes=twice",
        *depth([], [
            "infobatch", "selective_backprop:keep=0.5:forward_passes=twice",
            "uniform:keep=0.5+selective_backprop:keep=0.5",
        ]),
    ],
)  # fmt: skip
def test_methods_see_every_batch(method):
    """The number of batches of one of them is not known before the epoch is over."""
    task = Rows(4, 3)
    run, weights = trained(task, method)
    alone, _ = trained(Rows(4), method)
    assert all(value.isfinite().all() for value in weights) and all(
        entry["complete"] for entry in run["history"]
    )
    assert len(run["history"]) == EPOCHS and len(task.rates) == run["cost"]["steps"]
    assert (
        sum(entry["steps"] for entry in run["history"])
        == run["cost"]["steps"]
        < alone["cost"]["steps"]
    )
    assert task.rates == sorted(task.rates, reverse=True) or method.startswith("kakurenbo"), (
        "which scales the rate"
    )
    if "beta" not in method:  # by which it depends on the weights how much is forwarded
        assert run["history"][0]["forward"] == alone["history"][0]["forward"]


def test_groups():
    for total in (5, None):
        groups = Groups(iter("abcde"), 2, total)
        found = [list(groups.next_group()) for _ in range(4)]
        assert [[batch for batch, _ in group] for group in found] == [
            ["a", "b"],
            ["c", "d"],
            ["e"],
            [],
        ]
        assert all(last for group in found for _, last in group[-1:])
        assert [last for _, last in found[0]] == [total is None, True]


def test_the_end_is_not_asked_for_before_the_last_step():
    asked = []
    groups = Groups(iter(lambda: asked.append(0) or len(asked), 6), 3, 5)
    list(groups.next_group()), list(groups.next_group())
    assert len(asked) == 5 and not list(groups.next_group()) and len(asked) == 6


def test_shares():
    assert (
        share_of(nn.MSELoss(), torch.zeros(3, 2))
        == share_of(nn.CrossEntropyLoss(), {"x": torch.zeros(3, 2)})
        == 3
    )
    assert share_of(nn.CrossEntropyLoss(), torch.zeros(3, 4, dtype=torch.long)) == 3
    weighted = nn.CrossEntropyLoss(torch.tensor([1.0, 3.0]), ignore_index=-1)
    assert share_of(weighted, torch.tensor([[0, 1], [-1, 1]])) == pytest.approx(2 * (1 + 3 + 3) / 4)
