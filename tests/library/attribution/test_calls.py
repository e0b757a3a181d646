import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher


def attached(batch_size=8, targets=None, method=None, **settings):
    torch.manual_seed(0)
    x, y = torch.randn(8, 5), torch.arange(8) % 3
    model = nn.Linear(5, 3)
    settings = {
        "criterion": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
        **settings,
    }
    loader = DataLoader(TensorDataset(x, y if targets is None else targets), batch_size)
    return thresher.attach(
        method or thresher.FullData(), loader=loader, model=model, epochs=2, **settings
    )


def losses(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none").detach()


def ids_of_none(run):
    return {}


def ids_of_the_view(run):
    return {"ids": run.ids}


def ids_of_a_tensor(run):
    return {"ids": run.ids.clone()}


def as_it_is(outputs):
    return outputs


def reshaped(outputs):
    return outputs.view(1, -1).view(-1, 3)


@pytest.mark.parametrize("ids", [ids_of_none, ids_of_the_view, ids_of_a_tensor])
@pytest.mark.parametrize("seen", [as_it_is, reshaped, torch.tanh])
def test_the_same_loss_computed_again_for_a_log_is_not_added(seen, ids):
    run = attached()
    ((x, y),) = run.loader
    outputs = seen(run.model(x))
    first = run.criterion(outputs, y, **ids(run))
    again = run.criterion(seen(outputs) if seen is reshaped else outputs, y, **ids(run))
    assert torch.equal(first, again)
    assert torch.allclose(run.records["loss"], losses(outputs, y))


def test_a_loss_of_the_same_outputs_and_other_targets_is_added():
    run = attached(targets=torch.arange(16).view(8, 2) % 3)
    ((x, y),) = run.loader
    outputs = run.model(x)
    run.criterion(outputs, y[:, 0], ids=run.ids)
    run.criterion(outputs, y[:, 1], ids=run.ids)
    assert torch.allclose(run.records["loss"], losses(outputs, y[:, 0]) + losses(outputs, y[:, 1]))


def test_outputs_changed_in_place_are_other_outputs():
    run = attached()
    ((x, y),) = run.loader
    outputs = run.model(x)
    run.criterion(outputs, y)
    before = losses(outputs, y)
    outputs.mul_(2)
    run.criterion(outputs, y)
    assert torch.allclose(run.records["loss"], before + losses(outputs, y))


def test_the_same_losses_of_other_samples_are_recorded():
    run = attached(criterion=None)
    ((x, y),) = run.loader
    per_sample = F.cross_entropy(run.model(x), y, reduction="none")
    run.reduce(per_sample[:4], ids=run.ids[:4])
    run.reduce(per_sample[:4], ids=run.ids[4:])
    assert torch.allclose(run.records["loss"], per_sample[:4].detach().repeat(2))


def other_model():
    torch.manual_seed(1)
    return nn.Linear(5, 3)


@pytest.mark.parametrize("teacher_first", [False, True])
@pytest.mark.parametrize("scale", [1, 2])
def test_a_loss_of_another_model_is_the_plain_criterion(teacher_first, scale):
    run, other = attached(), other_model()
    ((x, y),) = run.loader
    x = x if scale == 1 else x * scale
    if teacher_first:
        run.criterion(other(x), y)
    outputs = run.model(x)
    loss = run.criterion(outputs, y)
    foreign = run.criterion(other(x), y)
    assert torch.equal(foreign, F.cross_entropy(other(x), y))
    assert torch.allclose(run.records["loss"], losses(outputs, y))
    loss.backward()
    assert run.cost.ratio() == 1
    assert run.cost.backward == 8
    foreign.backward()
    assert other.weight.grad is not None
    assert run.cost.backward == 8


def test_losses_of_another_model_that_were_given_by_their_ids_are_averaged():
    run, other = attached(), other_model()
    ((x, y),) = run.loader
    outputs = run.model(x)
    run.criterion(outputs, y)
    foreign = F.cross_entropy(other(x), y, reduction="none")
    assert torch.equal(run.reduce(foreign, ids=run.ids), foreign.mean())
    assert torch.allclose(run.records["loss"], losses(outputs, y))


def test_the_plain_criterion_of_another_model_is_not_restricted_to_the_chosen_rows():
    run, other = (
        attached(method=thresher.SelectiveBackprop(keep=0.5), forward_passes="once"),
        other_model(),
    )
    ((x, y),) = run.loader
    run.criterion(run.model(x), y)
    assert torch.equal(run.criterion(other(x), y), F.cross_entropy(other(x), y))


def test_detached_outputs_of_the_run_are_not_recorded_again():
    run = attached()
    ((x, y),) = run.loader
    outputs = run.model(x)
    run.criterion(outputs, y)
    run.criterion(torch.tanh(outputs), y)
    run.criterion(outputs.detach(), y)
    assert torch.allclose(run.records["loss"], losses(outputs, y) + losses(torch.tanh(outputs), y))


def test_a_head_outside_of_the_model_is_the_runs():
    run, head = attached(), nn.Linear(3, 3)
    ((x, y),) = run.loader
    outputs = head(run.model(x))
    run.criterion(outputs, y)
    assert torch.allclose(run.records["loss"], losses(outputs, y))


def test_the_users_model_called_directly_is_the_runs():
    run = attached()
    ((x, y),) = run.loader
    first, second = run.model(x), run.model.module(x * 2)
    run.criterion(first, y)
    run.criterion(second, y)
    assert torch.allclose(run.records["loss"], losses(first, y) + losses(second, y))


def test_outputs_of_any_model_count_where_the_loop_does_not_call_the_runs_model():
    run, other = attached(), other_model()
    ((x, y),) = run.loader
    run.criterion(other(x), y)
    assert torch.allclose(run.records["loss"], losses(other(x), y))


def two_views(run, x, y):
    return run.model(torch.cat([x, x * 0.5])), torch.cat([y, y]), torch.cat([run.ids, run.ids])


def consecutive(run, x, y):
    return (
        run.model(x.repeat_interleave(2, 0)),
        y.repeat_interleave(2),
        run.ids.repeat_interleave(2),
    )


@pytest.mark.parametrize("rows", [two_views, consecutive])
def test_ids_that_name_a_sample_twice_are_refused(rows):
    run = attached()
    ((x, y),) = run.loader
    outputs, targets, ids = rows(run, x, y)
    with pytest.raises(
        thresher.AttributionError, match=r"more than once.* `repeat=`.* run\.reduce\(losses, ids="
    ):
        run.criterion(outputs, targets, ids=ids)
    assert not run.records["loss"].isfinite().any()


def test_the_ways_out_for_a_sample_with_several_rows():
    run = attached()
    ((x, y),) = run.loader
    outputs, targets, _ = consecutive(run, x, y)
    run.criterion(outputs, targets, ids=run.ids, repeat=2).backward()
    expected = losses(outputs, targets).view(-1, 2)
    assert torch.allclose(run.records["loss"], expected.mean(1))
    outputs, targets, _ = two_views(run, x, y)
    per_row = F.cross_entropy(outputs, targets, reduction="none").view(2, -1)
    run.reduce(per_row.sum(0), ids=run.ids).backward()
    assert torch.allclose(run.records["loss"], per_row.sum(0).detach())


def test_a_sample_that_the_loader_yields_twice_may_be_named_twice():
    x, y = torch.randn(4, 5), torch.arange(4) % 3
    model = nn.Linear(5, 3)
    loader = DataLoader(TensorDataset(x, y), 4, sampler=[0, 0, 1, 2])
    run = thresher.attach(
        thresher.FullData(), loader=loader, criterion=nn.CrossEntropyLoss(), model=model, epochs=1
    )
    ((x, y),) = run.loader
    order = torch.tensor([3, 1, 0, 2])
    outputs = run.model(x[order])
    run.criterion(outputs, y[order], ids=run.ids[order])
    assert torch.allclose(run.records["loss"][2], losses(outputs, y[order])[0])


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, tokens):
        return self.head(self.embed(tokens))


@pytest.mark.parametrize("given", [False, True])
def test_tokens_that_are_shifted_and_flattened(given):
    torch.manual_seed(0)
    tokens = torch.randint(7, (8, 6))
    loader = DataLoader(TensorDataset(tokens), 4)
    run = thresher.attach(
        thresher.FullData(),
        loader=loader,
        criterion=nn.CrossEntropyLoss(),
        model=Tokens(),
        epochs=1,
    )
    for (batch,) in run.loader:
        logits, labels = (
            run.model(batch)[:, :-1].contiguous().view(-1, 7),
            batch[:, 1:].contiguous().view(-1),
        )
        run.criterion(logits, labels, **({"ids": run.ids, "repeat": 5} if given else {}))
        assert torch.allclose(
            run.records["loss"][run.ids], losses(logits, labels).view(4, -1).mean(1)
        )


def without_holes(rows):
    return torch.utils.data.default_collate([row for row in rows if row[1] != 1])


def test_a_collate_that_leaves_samples_out_needs_the_index_of_the_dataset():
    x, y = torch.randn(8, 5), torch.arange(8) % 3
    loader = DataLoader(TensorDataset(x, y, torch.arange(8)), 4, collate_fn=without_holes)
    model = nn.Linear(5, 3)
    run = thresher.attach(
        thresher.FullData(), loader=loader, criterion=nn.CrossEntropyLoss(), model=model, epochs=1
    )
    for x, y, index in run.loader:
        outputs = run.model(x)
        with pytest.raises(
            thresher.AttributionError, match="Let the dataset return the index of each sample"
        ):
            run.criterion(outputs, y)
        run.criterion(outputs, y, ids=index)
        assert torch.allclose(run.records["loss"][index], losses(outputs, y))


def mean_square(outputs, targets):
    return ((outputs - targets) ** 2).mean()


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("criterion", [nn.MSELoss(), nn.L1Loss(), mean_square])
@pytest.mark.parametrize("of_targets", [torch.clone, torch.squeeze])
def test_outputs_of_a_last_batch_of_one_row_that_the_loop_squeezes(criterion, of_targets):
    trained = []
    for observes in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loader = DataLoader(TensorDataset(torch.randn(5, 3), torch.rand(5)), 2)
        run = thresher.observe(
            loader=loader, criterion=criterion, model=model, optimizer=optimizer, epochs=2
        ) if observes else None  # fmt: skip
        for _ in range(2):
            for x, y in run.loader if run else loader:
                outputs = (run.model if run else model)(x).squeeze()
                loss = (run.criterion if run else criterion)(outputs, of_targets(y))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        trained.append(model.weight)
        assert run is None or run.data_map()["times_seen"].tolist() == [2] * 5
    assert torch.equal(*trained)


def test_a_plan_that_leaves_one_row_trains_with_squeezed_outputs():
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(TensorDataset(torch.randn(8, 3), torch.rand(8)), 4)
    run = thresher.attach(
        thresher.UniformSubset(5 / 8), loader=loader, criterion=nn.BCEWithLogitsLoss(), model=model,
        optimizer=optimizer, epochs=1,
    )  # fmt: skip
    rows = []
    for x, y in run.loader:
        rows.append(len(x))
        run.criterion(run.model(x).squeeze(), y).backward()
        optimizer.step()
    assert rows == [4, 1] and run.trained.sum() == 5
