"""A loss counts if a backward pass reaches it: logs, steps made again, and samples without a label change nothing else."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher

N, B = 12, 4


def data():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N, 4, generator=generator), torch.arange(N) % 3


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return self.first(x), self.second(x)


def attached(model, *, method=None, rate=0.0, optimizer=True, x=None, y=None, **settings):
    torch.manual_seed(0)
    x, y = data() if x is None else (x, y)
    sgd = torch.optim.SGD(model.parameters(), rate)
    run = thresher.attach(
        thresher.FullData() if method is None else method,
        loader=DataLoader(TensorDataset(x, y), B, shuffle=True),
        model=model,
        optimizer=sgd if optimizer else None,
        **{"criterion": nn.CrossEntropyLoss(), "epochs": 3, **settings},
    )
    return run, sgd


LOSSES = {
    "criterion": lambda run, out, y: run.criterion(out, y),
    "transposed": lambda run, out, y: run.criterion(out.T.T, y),
    "log_softmax": lambda run, out, y: run.criterion(F.log_softmax(out, 1), y),
    "reduce": lambda run, out, y: run.reduce(F.cross_entropy(out, y, reduction="none")),
    "outputs=": lambda run, out, y: run.reduce(
        F.cross_entropy(out, y, reduction="none"), outputs=out
    ),
    "ids=": lambda run, out, y: run.reduce(F.cross_entropy(out, y, reduction="none"), run.ids),
}


@pytest.mark.parametrize(
    "when", ["before the loss", "before backward", "after backward", "after step"]
)
@pytest.mark.parametrize("form", LOSSES)
def test_a_loss_for_a_log_changes_nothing(form, when):
    model = nn.Linear(4, 3)
    run, sgd = attached(model)
    loss_of = LOSSES[form]
    for x, y in run.loader:
        sgd.zero_grad()
        out = run.model(x)
        if when == "before the loss":
            loss_of(run, out, y)
        loss = loss_of(run, out, y)
        if when == "before backward":
            loss_of(run, out, y)
        loss.backward()
        if when == "after backward":
            loss_of(run, out, y)
        sgd.step()
        if when == "after step":
            loss_of(run, out, y)
    x, y = data()
    with torch.no_grad():
        expected = F.cross_entropy(model(x), y, reduction="none")
    torch.testing.assert_close(run.records["loss"], expected)
    assert run.trained.tolist() == [1] * N


@pytest.mark.parametrize("parts", [1, 2])
def test_both_heads_of_a_pass_that_was_made_again(parts):
    """As after an error in the first backward pass, before it has reached a loss."""
    model = Heads()
    run, sgd = attached(model)
    for x, y in run.loader:
        sgd.zero_grad()
        first, second = run.model(x)
        run.criterion(first, y) + run.criterion(second, y)
        for some, labels in zip(x.chunk(parts), y.chunk(parts), strict=True):
            first, second = run.model(some)
            ((run.criterion(first, labels) + run.criterion(second, labels)) / parts).backward()
        sgd.step()
    x, y = data()
    with torch.no_grad():
        expected = sum(F.cross_entropy(out, y, reduction="none") for out in model(x))
    torch.testing.assert_close(run.records["loss"], expected)
    assert run.trained.tolist() == [1] * N


@pytest.mark.parametrize("training", [True, False])
def test_a_last_group_without_a_step_is_not_trained_on(training):
    model = nn.Linear(4, 3).train(training)
    run, sgd = attached(model)
    truth = torch.zeros(N, dtype=torch.int32)
    for _ in range(3):
        for number, (x, y) in enumerate(run.loader):
            sgd.zero_grad()
            run.criterion(run.model(x * 2 - 1), y).backward()
            if number < 2:
                sgd.step()
                truth[run.ids] += 1
    assert torch.equal(run.trained, truth)
    assert run.cost.forward == run.cost.backward == 3 * N


def test_a_resumed_run_counts_no_batch_without_a_backward_pass():
    model = nn.Linear(4, 3)
    run, sgd = attached(model)
    for x, y in run.loader:
        run.criterion(run.model(x), y).backward()
        sgd.step()
    resumed, _ = attached(model)
    resumed.load_state_dict(run.state_dict())
    for x, y in resumed.loader:
        resumed.criterion(resumed.model(x), y)  # as in `if not loss.isfinite(): continue`
    assert resumed.trained.tolist() == [1] * N


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("form", ["classes second", "flattened", "first token"])
def test_rows_beside_the_batch_are_counted_in_every_form(form, training):
    x, y = torch.randn(N, 5, 3), torch.randint(0, 3, (N, 5))
    model = nn.Linear(3, 3).train(training)
    run, sgd = attached(model, x=x, y=y, epochs=1)
    for inputs, targets in run.loader:
        out = run.model(torch.cat([inputs, torch.randn(2, 5, 3)]))[:B]
        forms = {
            "classes second": (out.mT, targets),
            "flattened": (out.flatten(0, 1), targets.flatten()),
            "first token": (out[:, 0], targets[:, 0]),
        }
        run.criterion(*forms[form]).backward()
        sgd.step()
    assert run.cost.forward == run.cost.backward == N + 3 * 2


def test_rows_that_may_be_tokens_or_samples_make_the_cost_unknown():
    """20 inputs of four features, of which 8 losses of two samples with four tokens are: 20 samples, or 5."""
    x, y = torch.randn(N, 4, 4), torch.randint(0, 3, (N, 4))
    model = nn.Linear(4, 3)
    run, sgd = attached(model, x=x, y=y, epochs=1)
    for inputs, targets in run.loader:
        rows = torch.cat([inputs.flatten(0, 1), torch.randn(4, 4)])
        run.criterion(run.model(rows)[:16], targets.flatten()).backward()
        sgd.step()
    assert run.cost.unknown is not None and "first or the second dimension" in run.cost.unknown


@pytest.mark.parametrize("optimizer", [True, False])
def test_the_length_after_an_epoch_is_that_of_the_next(optimizer):
    """A loop that takes `len(run.loader)` batches asks for the length before the loop ends by itself."""
    model = nn.Linear(4, 3)
    x, y = torch.randn(40, 4), torch.arange(40) % 3
    run, sgd = attached(
        model,
        method=thresher.InfoBatch(delta=0.7),
        x=x,
        y=y,
        rate=0.1,
        epochs=5,
        optimizer=optimizer,
    )
    lengths = []
    for _ in range(5):
        batches = len(run.loader)
        iterator = iter(run.loader)
        rows = 0
        for _ in range(batches):
            inputs, targets = next(iterator)
            sgd.zero_grad()
            run.criterion(run.model(inputs), targets).backward()
            sgd.step()
            rows += len(inputs)
        del iterator
        lengths.append(rows)
    run.detach()
    assert lengths == [entry["kept"] for entry in run.history]
    assert all(entry["complete"] for entry in run.history) and min(lengths) < 40


@pytest.mark.parametrize("form", ["criterion", "reduce"])
@pytest.mark.parametrize("method", [thresher.FullData(), thresher.InfoBatch()], ids=str)
def test_a_sample_without_a_label_keeps_what_is_known_of_it(form, method):
    x, y = torch.randn(N, 2, 4), torch.randint(0, 3, (N, 2))
    model = nn.Linear(4, 3)
    run, sgd = attached(
        model,
        method=method,
        x=x,
        y=y,
        rate=0.1,
        observe=isinstance(method, thresher.FullData),
        forward=lambda model, batch: (model(batch[0]).mT, batch[1]),
    )
    last = torch.zeros(N)
    for epoch in range(2):
        for inputs, targets in run.loader:
            ids, labels = run.ids, targets.clone()
            if epoch:
                labels[ids % 2 == 0] = -100
            out = run.model(inputs).mT
            losses = F.cross_entropy(out, labels, reduction="none")
            known = (labels != -100).any(1)
            last[ids[known]] = losses.detach()[known].mean(1)
            sgd.zero_grad()
            if form == "criterion":
                run.criterion(out, labels, ids=ids).backward()
            else:
                run.reduce(losses, ids, out, labels, valid=labels != -100).backward()
            sgd.step()
    torch.testing.assert_close(run.records["loss"].float(), last)
    if isinstance(method, thresher.FullData):
        table = run.data_map()
        assert table["times_seen"].tolist() == [1, 2] * (N // 2)
        assert (table["confidence"] > 0).all() and (table["confidence"] < 1).all()


@pytest.mark.parametrize("given", [{}, {"outputs"}, {"targets"}])
def test_a_data_map_of_classes_needs_outputs_and_targets(given):
    run, _ = attached(nn.Linear(4, 3), observe=True)
    x, y = next(iter(run.loader))
    out = run.model(x)
    known = {"outputs": out, "targets": y}
    losses = F.cross_entropy(out, y, reduction="none")
    with pytest.raises(ValueError, match=r"pass outputs= and targets=.*criterion=None"):
        run.reduce(losses, **{name: known[name] for name in given})
    run.reduce(losses, **known)


@pytest.mark.parametrize("read", [False, True])
def test_records_read_before_a_step_that_is_made_again_in_parts(read):
    """Columns that count visits get each sample once, although the first attempt was in the records already."""
    model = nn.Linear(4, 3)
    run, sgd = attached(model, observe=True)
    for x, y in run.loader:
        run.criterion(run.model(x), y).backward()
        if read:
            run.data_map()
        sgd.zero_grad()
        for some, labels in zip(x.chunk(2), y.chunk(2), strict=True):
            (run.criterion(run.model(some), labels) / 2).backward()
        sgd.step()
        sgd.zero_grad()
    assert run.data_map()["times_seen"].tolist() == run.trained.tolist() == [1] * N


def test_records_read_between_two_losses_of_a_step_of_which_one_has_no_label():
    """A decoder that computes a loss for each time step has none for a short text in the last ones, or the first."""
    columns = []
    for reads in (False, True):
        model = nn.Linear(4, 3)
        nn.init.eye_(model.weight)
        x, y = data()
        gaps = y.masked_fill(torch.arange(N) % 5 == 0, -100)
        run, sgd = attached(model, observe=True, x=x, y=torch.stack([gaps, y], 1))
        for x, y in run.loader:
            out = run.model(x)
            loss = run.criterion(out, y[:, 0])
            if reads:
                str(run.records["loss"])
            (loss + run.criterion(out, y[:, 1])).backward()
            sgd.step()
            sgd.zero_grad()
        columns.append(dict(run.records))
    assert columns[1]["seen"].tolist() == [1] * N
    for name, column in columns[0].items():
        torch.testing.assert_close(columns[1][name], column, msg=name)


def test_a_batch_that_is_made_again_in_parts_has_a_loss():
    """The first attempt is taken back once, so that the batch still counts as trained on."""
    run, sgd = attached(nn.Linear(4, 3))
    for x, y in run.loader:
        sgd.zero_grad()
        run.criterion(run.model(x), y)
        str(run.cost)
        for some, labels in zip(x.chunk(2), y.chunk(2), strict=True):
            (run.criterion(run.model(some), labels) / 2).backward()
        str(run.cost)
        sgd.step()
        run.state_dict()  # would warn of a batch without a loss
