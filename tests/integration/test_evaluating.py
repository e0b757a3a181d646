"""What a loop computes besides training once on every batch: it saves nothing by itself, and evaluations are no epochs."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher

N, B, EPOCHS = 48, 8, 3


def make(method, *, steps=True, **settings):
    torch.manual_seed(0)
    x = torch.randn(N, 4)
    y = (x @ torch.randn(4, 3)).argmax(1)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    run = thresher.attach(
        method,
        loader=DataLoader(TensorDataset(x, y), B),
        criterion=nn.CrossEntropyLoss(),
        model=model,
        optimizer=optimizer if steps else None,
        epochs=EPOCHS,
        **settings,
    )
    return run, optimizer


def step(run, optimizer, x, y, **given):
    optimizer.zero_grad()
    run.criterion(run.model(x), y, **given).backward()
    optimizer.step()


def train(run, optimizer):
    for x, y in run.loader:
        step(run, optimizer, x, y)


@torch.no_grad()
def evaluate(run):
    return sum(len(run.model(x)) for x, _ in run.loader)


def skip_batches(run, optimizer):
    for i, (x, y) in enumerate(run.loader):
        if i % 4 != 3:
            step(run, optimizer, x, y)


def filter_rows(run, optimizer):
    for x, y in run.loader:
        kept = y != 2
        step(run, optimizer, x[kept], y[kept], ids=run.ids[kept])


def evaluate_after_each_epoch(run, optimizer):
    train(run, optimizer)
    evaluate(run)


def update_normalization(run, optimizer):
    train(run, optimizer)
    if run.epoch == EPOCHS:
        torch.optim.swa_utils.update_bn(run.loader, nn.Sequential(nn.BatchNorm1d(4)))


def train_twice(run, optimizer):
    for x, y in run.loader:
        step(run, optimizer, x, y)
        step(run, optimizer, x, y)


def overfit(run, optimizer):
    x, y = next(iter(run.loader))
    for _ in range(20):
        step(run, optimizer, x, y)


def store(run, optimizer):
    for x, y in list(run.loader):
        step(run, optimizer, x, y)


LOOPS = [
    skip_batches,
    filter_rows,
    evaluate_after_each_epoch,
    update_normalization,
    train_twice,
    overfit,
    store,
]


@pytest.mark.parametrize("steps", [True, False])
@pytest.mark.parametrize("epoch", LOOPS)
def test_full_data_costs_what_the_loop_computes_without_a_run(epoch, steps):
    run, optimizer = make(thresher.FullData(), steps=steps)
    for _ in range(EPOCHS):
        epoch(run, optimizer)
    assert run.cost.backward > 0
    assert run.cost.full_forward == run.cost.forward
    assert run.cost.full_backward == run.cost.backward


@pytest.mark.parametrize("epoch", [skip_batches, train_twice])
def test_half_of_the_data_costs_half_of_what_the_loop_computes_without_a_run(epoch):
    run, optimizer = make(thresher.UniformSubset(keep=0.5))
    for _ in range(EPOCHS):
        epoch(run, optimizer)
    assert run.cost.ratio() == pytest.approx(0.5, abs=0.01)


def test_an_evaluation_costs_what_it_does_in_each_epoch_by_its_own_plan():
    run, optimizer = make(thresher.Kakurenbo(max_fraction=0.4))
    for _ in range(EPOCHS):
        train(run, optimizer)
    with pytest.warns(UserWarning, match="without training"):
        evaluate(run)
    assert run.cost.full_backward == EPOCHS * N


def test_an_evaluation_is_no_epoch_and_is_warned_of_once():
    run, optimizer = make(thresher.UniformSubset(keep=0.5))
    with pytest.warns(UserWarning, match="only the samples that UniformSubset keeps") as caught:
        for epoch in range(EPOCHS):
            train(run, optimizer)
            run.history  # noqa: B018
            evaluate(run)
            assert (run.epoch, run.progress) == (epoch + 1, pytest.approx((epoch + 1) / EPOCHS))
    assert len(caught) == 1
    assert [entry["complete"] for entry in run.history] == [True] * EPOCHS


def statistics(run, net):
    """As a loop that measures the mean of its inputs."""
    return torch.stack([x.mean(0) for x, _ in run.loader]).mean(0)


@torch.no_grad()
def predict(run, net):
    return [net(x) for x, _ in run.loader]


@pytest.mark.filterwarnings("ignore:Epoch 4 begins")
@pytest.mark.parametrize(
    "method",
    [thresher.UniformSubset(keep=0.5), "kakurenbo", thresher.SelectiveBackprop(keep=0.5)],
    ids=str,
)
@pytest.mark.parametrize(
    "look", [lambda run, net: torch.optim.swa_utils.update_bn(run.loader, net), statistics, predict],
    ids=["update_bn", "statistics", "predict"],
)  # fmt: skip
def test_a_pass_after_the_last_epoch_is_warned_of_at_once(look, method):
    """No other pass follows that could show it; the model is not called through the run."""
    run, optimizer = make(
        method,
        **({"forward_passes": "twice"} if isinstance(method, thresher.SelectiveBackprop) else {}),
    )
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    for _ in range(EPOCHS):
        train(run, optimizer)
    with pytest.warns(UserWarning, match="had only the samples that"):
        look(run, net)
    assert (run.epoch, run.cost.full_backward) == (EPOCHS, EPOCHS * N)


def test_an_evaluation_of_all_samples_is_not_warned_of():
    run, optimizer = make(thresher.FullData())
    train(run, optimizer)
    assert evaluate(run) == N
    assert run.epoch == 1


def test_a_pass_of_a_batch_method_without_training_is_warned_of():
    run, optimizer = make(thresher.SelectiveBackprop(keep=0.5), forward_passes="twice")
    train(run, optimizer)
    with pytest.warns(UserWarning, match="only the samples that SelectiveBackprop keeps"):
        evaluate(run)
    assert run.epoch == 1


def test_a_run_that_was_evaluated_is_saved_at_the_start_of_its_epoch():
    run, optimizer = make(thresher.FullData())
    train(run, optimizer)
    evaluate(run)
    again, optimizer = make(thresher.FullData())
    again.load_state_dict(run.state_dict())
    assert again.epoch == 1
    assert sum(len(y) for _, y in again.loader) == N


def test_an_evaluation_in_a_resumed_epoch_leaves_its_rest_to_be_trained():
    run, optimizer = make(thresher.FullData())
    for i, (x, y) in enumerate(run.loader):
        step(run, optimizer, x, y)
        if i == 1:
            break
    again, optimizer = make(thresher.FullData())
    again.load_state_dict(run.state_dict())
    assert evaluate(again) == N - 2 * B
    assert sum(len(y) for _, y in again.loader) == N - 2 * B
