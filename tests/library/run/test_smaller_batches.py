"""A run that spends its budget in smaller batches: its cost, its steps, and what it refuses."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import thresher
from depth import crossed
from helpers import assert_same
from thresher.records import NEVER_SEEN, Column
from thresher.scores import Scores

N = 70


def parts(*, seed=0, batch_size=8, n=N, features=None, **settings):
    torch.manual_seed(seed)
    x = torch.randn(n, 5)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    model = nn.Sequential(nn.Linear(5, 8), *(features or [nn.ReLU()]), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    settings = {"shuffle": True} | settings
    return model, optimizer, DataLoader(data, batch_size, **settings)


def attached(method, *, epochs=3, criterion=None, more=None, **settings):
    model, optimizer, loader = parts(**settings)
    criterion = criterion or nn.CrossEntropyLoss()
    run = thresher.attach(
        method,
        loader=loader,
        criterion=criterion,
        model=model,
        optimizer=optimizer,
        epochs=epochs,
        **(more or {}),
    )
    return run, optimizer


def epoch(run, optimizer, seen=None):
    for x, y in run.loader:
        optimizer.zero_grad()
        run.criterion(run.model(x), y).backward()
        optimizer.step()
        if seen is not None:
            seen.append(run.ids.tolist())


def weights(run):
    return [parameter.detach().clone() for parameter in run.model.parameters()]


@pytest.fixture(autouse=True)
def _trusting():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Loss and uncertainty of the samples")
        yield


@pytest.mark.parametrize(
    ("share", "drop_last", "epochs"), crossed([0.15, 0.35, 0.5, 0.77, 1.0], [False, True], [2, 5])
)
def test_the_cost_is_the_share_and_the_steps_are_those_of_full_training(share, drop_last, epochs):
    run, optimizer = attached(share, epochs=epochs, drop_last=drop_last)
    for _ in range(epochs):
        seen = []
        assert len(run.loader) == (8 if drop_last else 9)
        epoch(run, optimizer, seen)
        sizes = {len(ids) for ids in seen}
        assert len(seen) == (8 if drop_last else 9)
        assert share == 1 or max(sizes) - min(sizes) <= 1
        assert len({i for ids in seen for i in ids}) == sum(map(len, seen))
    most = 64 if drop_last else N
    assert abs(run.cost.backward / (epochs * most) - share) <= 0.01 + 1 / N
    assert run.cost.full_backward == epochs * most and run.cost.steps == epochs * (
        8 if drop_last else 9
    )
    assert share == 1 or run.history[-1]["kept"] == sum(map(len, seen))


def test_a_number_or_a_percentage_is_a_budget():
    for budget in (0.5, "50%", "50 %"):
        run, _ = attached(budget)
        assert run.method == thresher.Winnow(share=0.5)
    for wrong in (0, 1.5, "50", "half%", float("nan")):
        with pytest.raises(ValueError, match="share of the cost of full training must be within"):
            attached(wrong)


def test_later_epochs_have_the_order_of_full_training():
    full, own = attached(thresher.FullData(), generator=torch.Generator().manual_seed(3))
    smaller, order = {"spend": "batches"}, torch.Generator().manual_seed(3)
    run, optimizer = attached(thresher.UniformSubset(0.35), more=smaller, generator=order)
    for _ in range(3):
        whole, seen = [], []
        epoch(full, own, whole)
        epoch(run, optimizer, seen)
        order = [i for ids in whole for i in ids]
        places = [order.index(i) for ids in seen for i in ids]
        assert places == sorted(places)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "method", [thresher.Winnow(0.5, least_agreement=-1), thresher.Kakurenbo(0.4)]
)
def test_resume_in_the_middle_of_an_epoch_is_exact(method, workers, tmp_path):
    more = {"spend": "batches"} if isinstance(method, thresher.Kakurenbo) else {}
    whole, own = attached(method, epochs=4, num_workers=workers, more=more)
    for _ in range(4):
        epoch(whole, own)
    first, optimizer = attached(method, epochs=4, num_workers=workers, more=more)
    epoch(first, optimizer)
    epoch(first, optimizer)
    for number, (x, y) in enumerate(first.loader):
        optimizer.zero_grad()
        first.criterion(first.model(x), y).backward()
        optimizer.step()
        if number == 4:
            break
    torch.save(
        [first.state_dict(), first.model.state_dict(), optimizer.state_dict()],
        tmp_path / "state.pt",
    )
    run, own_optimizer = attached(method, epochs=4, num_workers=workers, more=more)
    torch.manual_seed(9)
    state, of_model, of_optimizer = torch.load(tmp_path / "state.pt", weights_only=True)
    run.model.load_state_dict(of_model)
    own_optimizer.load_state_dict(of_optimizer)
    run.load_state_dict(state)
    epoch(run, own_optimizer)
    epoch(run, own_optimizer)
    assert_same(weights(run), weights(whole))
    assert run.cost == whole.cost or run.cost.backward == whole.cost.backward


@pytest.mark.parametrize(
    "method",
    [
        thresher.UniformSubset(0.6),
        thresher.Kakurenbo(0.4),
        thresher.InfoBatch(),
        thresher.ImportanceSampling(keep=0.5),
    ],
)
def test_other_methods_spend_their_plans_either_way(method):
    kept = {}
    for spend in ("steps", "batches"):
        run, optimizer = attached(method, epochs=4, more={"spend": spend})
        for _ in range(3):
            seen = []
            epoch(run, optimizer, seen)
        kept[spend] = (
            len(seen),
            sum(map(len, seen)),
            run.history[-1]["kept"],
            run.history[-1]["lr_scale"],
        )
    assert kept["batches"][0] == 9 and kept["batches"][1] == kept["batches"][2]
    assert kept["steps"][0] < 9 and kept["batches"][3] == 1


def test_weights_have_a_mean_of_1_in_smaller_batches():
    run, optimizer = attached(thresher.InfoBatch(), epochs=8, more={"spend": "batches"})
    for _ in range(2):
        epoch(run, optimizer)
    assert run.plan.weights is not None and len(run.plan.weights) < N
    assert float(run.plan.weights.mean()) == pytest.approx(1)


def test_samplers_of_some_samples_and_pruning():
    half, smaller = list(range(0, N, 2)), {"spend": "batches"}
    run, optimizer = attached(
        thresher.UniformSubset(0.5), sampler=SubsetRandomSampler(half), shuffle=None, more=smaller
    )
    seen = []
    epoch(run, optimizer, seen)
    assert len(seen) == 5 and len({i for ids in seen for i in ids}) == sum(map(len, seen)) == 17
    assert all(i % 2 == 0 for ids in seen for i in ids)
    scores = Scores(torch.arange(N), torch.arange(N, dtype=torch.float64))
    run, optimizer = attached([thresher.Prune(scores, keep=0.5), thresher.Winnow(0.5)])
    seen = []
    epoch(run, optimizer, seen)
    assert (
        len(seen) == 5
        and 17 <= sum(map(len, seen)) <= 18
        and all(i >= N // 2 for ids in seen for i in ids)
    )


def test_a_sampler_that_repeats_ids():
    with pytest.raises(
        ValueError, match="Smaller batches need the number of samples.*Use spend='steps'"
    ):
        attached(thresher.UniformSubset(0.5), sampler=WeightedRandomSampler(torch.ones(N), N), shuffle=None,
                 more={"spend": "batches"})  # fmt: skip


def test_samples_that_are_left_out_are_not_loaded():
    class Counted(TensorDataset):
        loaded = 0

        def __getitem__(self, i):
            Counted.loaded += 1
            return super().__getitem__(i)

        __getitems__ = None

    model, optimizer, loader = parts()
    data = Counted(*loader.dataset.tensors)
    run = thresher.attach(
        0.5, loader=DataLoader(Subset(data, range(N)), 8, shuffle=True), criterion=nn.CrossEntropyLoss(), model=model,
        optimizer=optimizer, epochs=2,
    )  # fmt: skip
    epoch(run, optimizer)
    assert Counted.loaded == 35


# What is refused, and what is said


def test_too_few_rows_are_refused_at_attach():
    with pytest.raises(ValueError, match=r"less than one a batch: the smallest share is 0\.129"):
        attached(0.1)
    with pytest.raises(
        ValueError,
        match=r"fewer than two per batch, which BatchNorm needs: the smallest share is 0\.258",
    ):
        attached(0.2, features=[nn.BatchNorm1d(8), nn.ReLU()])
    run, optimizer = attached(0.258, features=[nn.BatchNorm1d(8), nn.ReLU()])
    seen = []
    epoch(run, optimizer, seen)
    assert {len(ids) for ids in seen} == {2}


def test_refusing_too_few_rows_changes_nothing():
    model, optimizer, loader = parts()
    settings = {
        "loader": loader,
        "criterion": nn.CrossEntropyLoss(),
        "model": model,
        "optimizer": optimizer,
        "epochs": 2,
    }
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="less than one a batch"):
        thresher.attach(0.1, **settings)
    assert not optimizer._optimizer_step_pre_hooks and torch.equal(before, torch.get_rng_state())
    assert len(thresher.attach(0.5, **settings).loader) == 9


def test_spend_is_checked():
    with pytest.raises(ValueError, match="`spend` must be 'steps', 'batches' or None"):
        attached(thresher.UniformSubset(0.5), more={"spend": "rows"})


def test_a_batch_method_that_fills_batches_is_refused():
    both = [thresher.Winnow(0.5), thresher.SelectiveBackprop(keep=0.5)]
    with pytest.raises(
        ValueError,
        match="smaller batches, and with forward_passes='twice' the method .* collects rows",
    ):
        attached(both, more={"forward_passes": "twice"})
    run, optimizer = attached(both, more={"forward_passes": "once"})
    epoch(run, optimizer)
    assert run.cost.forward == 35 and run.cost.backward < 20


def test_without_an_optimizer_the_rate_is_not_scaled():
    model, _, loader = parts()
    settings = {"loader": loader, "criterion": nn.CrossEntropyLoss(), "model": model, "epochs": 2}
    with pytest.raises(
        ValueError, match=r"Winnow scales the learning rate: .* or use Winnow\(lr_scale=1\)"
    ):
        thresher.attach(thresher.Winnow(0.5, lr_scale=0.8), **settings)
    assert len(thresher.attach(0.5, **settings).loader) == 9


def values(run, optimizer):
    for x, y in run.loader:
        optimizer.zero_grad()
        run.criterion(run.model(x)[:, 0], y.float()).backward()
        optimizer.step()


def test_a_regression_is_drawn_uniformly_and_told():
    model, optimizer, loader = parts()
    with pytest.warns(
        UserWarning,
        match=r"attach\(0.5\) has no `uncertainty` of the outputs of MSELoss.* uniformly",
    ):
        run = thresher.attach(
            0.5, criterion=nn.MSELoss(), loader=loader, model=model, optimizer=optimizer, epochs=2
        )
    assert "uncertainty" not in run.records
    values(run, optimizer)
    assert run.cost.backward == 35


class WithOptionalMargin(thresher.UniformSubset):
    """A method of full batches that can do without a signal."""

    def columns(self):
        margin = Column(torch.float32, fill=NEVER_SEEN, optional="draws uniformly")
        return super().columns() | {"margin": margin}


@pytest.mark.parametrize("spend", [None, "batches"])
def test_a_signal_that_a_regression_lacks_is_told_whatever_the_batches(spend):
    with pytest.warns(
        UserWarning, match="has no `margin` of the outputs of MSELoss.* and draws uniformly"
    ):
        attached(WithOptionalMargin(0.5), criterion=nn.MSELoss(), more={"spend": spend})


def test_full_training_as_a_share_has_nothing_to_draw_and_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run, optimizer = attached(1.0, criterion=lambda outputs, targets: (outputs - targets) ** 2)
        values(run, optimizer)
        attached(1.0, criterion=nn.MSELoss())


@pytest.mark.parametrize("mean", [False, True])
def test_a_loss_without_an_uncertainty_draws_uniformly_and_says_so_once(mean):
    def loss(outputs, targets):
        losses = (outputs - targets).square()
        return losses.mean() if mean else losses

    with pytest.warns(UserWarning, match="This warning is given once") as said:
        run, optimizer = attached(0.5, criterion=loss)
        for _ in range(3):
            values(run, optimizer)
    assert [str(one.message) for one in said if "no `uncertainty`" in str(one.message)] == [
        str(said[0].message)
    ]
    assert "attach(signals=function)" in str(
        said[0].message
    ) and "This warning is given once" in str(said[0].message)


def test_a_training_of_one_epoch_is_told():
    with pytest.warns(
        UserWarning, match="draws uniformly in the first epoch, and this run has only one"
    ):
        attached(0.5, epochs=1)


def test_a_pass_for_evaluation_is_told_to_have_some_samples():
    run, optimizer = attached(0.5)
    epoch(run, optimizer)
    with torch.no_grad(), pytest.warns(UserWarning, match=r"samples that attach\(0.5\) keeps"):
        for x, _ in run.loader:
            run.model(x)


@pytest.mark.parametrize("method", [0.5, thresher.UniformRows(0.5)])
def test_a_loop_that_skips_batches_of_another_size_is_told_their_size(method):
    run, optimizer = attached(method)
    size = run.loader.batch_sampler.batch_size
    with pytest.warns(
        UserWarning,
        match=f"in batches of about {size // 2} rows instead of {size}; skip none because of",
    ):
        for _ in range(2):
            for x, y in run.loader:
                if len(x) == size:
                    run.criterion(run.model(x), y).backward()
                    optimizer.step()
    assert run.cost.steps == 0


def test_records_take_a_few_bytes():
    run, optimizer = attached(thresher.Winnow(0.5))
    assert run.records.bytes_per_sample == 12
    epoch(run, optimizer)
    seen = run.records["uncertainty"] >= 0
    assert int(seen.sum()) == 35 and bool((run.records["uncertainty"][seen] <= 0.5).all())
