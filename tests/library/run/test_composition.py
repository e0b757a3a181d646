"""Methods of several stages in one run, and what methods may ask of a run beside plans."""

import copy
import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import thresher
from thresher import BatchPlan, Column, EpochPlan
from thresher.methods._adapted import OnSubset

N, B, C, D = 40, 8, 4, 6


@dataclass(frozen=True)
class Keeps:
    """Before training: the ids it was given."""

    ids: tuple[int, ...]
    took: tuple[int, int] = (0, 0)
    stage = "before"

    @property
    def cost(self):
        return self.took

    def kept(self, n):
        return torch.tensor(self.ids)


@dataclass(frozen=True)
class Notes:
    """An epoch method that hides the smallest loss and writes down what it was shown."""

    shown: tuple = ()
    asks: tuple[str, ...] = ()
    stage = "epoch"

    def columns(self):
        return {
            "loss": Column(torch.float32, fill=-math.inf),
            "weight": Column(torch.float32, fill=-1, merge="plan"),
        }

    @property
    def requires(self):
        return thresher.Requirements(refresh="eval")

    def full_pass(self, epoch, epochs):
        return self.asks if epoch == 1 else ()

    def plan_epoch(self, records, *, epoch, epochs, generator):
        self.shown[0].append({name: values.clone() for name, values in records.items()})
        loss = records["loss"]
        n = len(loss)
        if epoch == 0:
            return EpochPlan(torch.arange(n), facts={"actual_fraction": 0.0})
        hidden = loss.argsort(stable=True)[:2].sort().values
        kept = torch.tensor([i for i in range(n) if i not in hidden.tolist()])
        return EpochPlan(
            kept,
            weights=torch.linspace(1, 2, len(kept)),
            refresh=hidden,
            facts={"actual_fraction": 2 / n},
            remember={"weight": torch.arange(float(n))},
        )


@dataclass(frozen=True)
class Twice:
    """A batch method that draws every row of the lower half two times, with weights; inactive in the first half of training."""

    requires = thresher.Requirements(signals=("loss",))
    stage = "batch"
    inactive: bool = False

    def init_state(self):
        return {"asked": 0}

    def count(self, n):
        return 2 * (n // 2)

    def active(self, progress, step):
        return not self.inactive or progress >= 0.5

    def report(self, state):
        return {"asked": float(state["asked"])}

    def plan_batch(self, signals, state, *, step, generator):
        rows = torch.arange(len(signals["id"]) // 2).repeat_interleave(2)
        return BatchPlan(rows, weights=torch.linspace(0.5, 1.5, len(rows)), drawn=True), {
            "asked": state["asked"] + 1
        }


def data():
    r = torch.Generator().manual_seed(0)
    return torch.randn(N, D, generator=r), torch.arange(N) % C


def make(method, *, epochs=4, **settings):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(D, 16), nn.ReLU(), nn.Linear(16, C))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    loader = (
        settings.pop("loader")
        if "loader" in settings
        else DataLoader(TensorDataset(*data()), B, shuffle=True)
    )
    model = settings.pop("model", net)
    criterion = settings.pop("criterion", nn.CrossEntropyLoss())
    run = thresher.attach(
        method,
        loader=loader,
        criterion=criterion,
        model=model,
        optimizer=optimizer,
        epochs=epochs,
        **settings,
    )
    return run, net, optimizer


def train(run, optimizer, epochs=1):
    seen = []
    for _ in range(epochs):
        for x, y in run.loader:
            seen.append(run.ids.tolist())
            run.criterion(run.model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return seen


# Before training


def test_pruned_samples_are_never_seen_and_count_as_saved():
    kept = tuple(range(0, N, 2))
    run, _, optimizer = make(Keeps(kept))
    seen = train(run, optimizer, epochs=2)
    assert sorted(i for batch in seen for i in batch) == sorted(kept * 2)
    assert run.cost.forward == run.cost.backward == 2 * len(kept)
    assert run.cost.full_forward == 2 * N
    assert run.plan.facts["pruned_fraction"] == run.plan.facts["actual_fraction"] == 0.5


def test_what_scores_took_is_counted():
    run, _, optimizer = make(Keeps(tuple(range(20)), took=(300, 120)))
    train(run, optimizer)
    assert (run.cost.forward, run.cost.backward, run.cost.scoring) == (320, 140, 300)
    assert sum(entry["forward"] for entry in run.history) == 320


def test_an_epoch_method_plans_as_if_there_were_no_others():
    kept, shown = tuple(range(5, 35)), ([],)
    run, _, optimizer = make([Keeps(kept), Notes(shown)])
    train(run, optimizer)
    plan = run.plan
    own = shown[0][1]
    assert torch.equal(own["loss"], run.records["loss"][torch.tensor(kept)])
    hidden = [5 + i for i in own["loss"].argsort(stable=True)[:2].sort().values.tolist()]
    assert plan.refresh.tolist() == hidden
    assert plan.ids.tolist() == [i for i in kept if i not in hidden]
    assert plan.facts["actual_fraction"] == pytest.approx(1 - 28 / N)
    assert run.records["weight"].tolist() == [-1.0] * 5 + [float(i) for i in range(30)] + [-1.0] * 5
    train(run, optimizer)
    assert run.cost.refresh == 2
    assert run.records["loss"][:5].tolist() == [-math.inf] * 5


def test_three_stages_and_resume():
    def start():
        return make(
            [Keeps(tuple(range(32))), thresher.UniformSubset(keep=0.5), Twice()],
            forward_passes="once",
        )

    run, net, optimizer = start()
    train(run, optimizer)
    assert run.state_dict()["ranks"][0]["method"] == "Keeps+uniform+Twice"
    state = run.state_dict()
    params = {name: value.clone() for name, value in net.state_dict().items()}
    rest = train(run, optimizer, epochs=2)
    other, net2, optimizer2 = start()
    net2.load_state_dict(params)
    other.load_state_dict(state)
    assert train(other, optimizer2, epochs=2) == rest
    assert torch.equal(run.records["loss"], other.records["loss"])
    assert vars(run.cost) | {"backward_to_forward": 0} == vars(other.cost) | {
        "backward_to_forward": 0
    }
    entry = run.history[-1]
    assert entry["batch_candidates"] == 16 and entry["batch_selected"] == 16


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ((3, 1), ValueError, "must be ascending"),
        ((0, N), ValueError, rf"within \[0, {N}\)"),
        ((), TypeError, "must be int64"),
        ((0.5,), TypeError, "must be int64"),
    ],
)
def test_what_a_method_keeps_is_checked(ids, error, message):
    with pytest.raises(error, match=message):
        make(Keeps(ids))


def test_two_methods_of_a_stage_and_none():
    with pytest.raises(
        ValueError, match="`method` may have one method per `stage`, got Keeps and Keeps"
    ):
        make([Keeps((0,)), Keeps((1,))])

    class Neither:
        stage = "before"

    with pytest.raises(TypeError, match=r"stage = 'before' and kept\(\), got Neither"):
        make(Neither())


def test_a_stream_cannot_be_pruned():
    class Stream(IterableDataset):
        def __iter__(self):
            yield from zip(*data(), strict=True)

    with pytest.raises(TypeError, match="an IterableDataset, whose samples have no index"):
        make([Keeps((0,)), Twice()], loader=DataLoader(Stream(), B))


def test_within_says_what_it_is():
    within = OnSubset(thresher.UniformSubset(keep=0.5), torch.arange(3), 9)
    assert repr(within) == "UniformSubset(keep=0.5, fixed=False) within 3 of 9 samples"


# Surveys


def test_a_survey_tells_of_every_sample_and_is_counted():
    shown = ([],)
    run, net, optimizer = make(Notes(shown, asks=("error", "feature")))
    train(run, optimizer)
    before = torch.get_rng_state()
    _ = run.plan
    assert torch.equal(torch.get_rng_state(), before)
    assert net.training
    x, y = data()
    with torch.no_grad():
        hidden = net[1](net[0](x))
        error = net[2](hidden).softmax(1) - F.one_hot(y, C)
    told = shown[0][1]
    assert torch.allclose(told["error"], error, atol=1e-6)
    assert torch.allclose(told["feature"], hidden, atol=1e-6)
    assert (run.cost.scoring, run.cost.forward - run.cost.comparing) == (N, 2 * N)
    assert set(shown[0][0]) == {"loss", "weight"}
    assert not net[2]._forward_pre_hooks


def test_a_survey_of_what_was_not_pruned():
    shown, kept = ([],), tuple(range(0, N, 4))
    run, _, optimizer = make([Keeps(kept), Notes(shown, asks=("error",))])
    train(run, optimizer)
    _ = run.plan
    assert shown[0][1]["error"].shape == (10, C)
    assert run.cost.scoring == 10


def test_a_survey_looks_inside_a_model_whose_backward_pass_is_cut():
    shown = ([],)
    run, _, optimizer = make([Notes(shown, asks=("feature",)), Twice()], forward_passes="once")
    train(run, optimizer)
    _ = run.plan
    assert shown[0][1]["feature"].shape == (N, 16)


def test_surveys_need_a_model_with_features():
    with pytest.raises(
        ValueError,
        match=r"needs the gradients of all samples before an epoch: pass attach\(model=model\)",
    ):
        make(Surveys(), model=None)

    class NoLinear(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(D, C))

        def forward(self, x):
            return x @ self.weight

    class IdleLinear(NoLinear):
        def __init__(self):
            super().__init__()
            self.idle = nn.Linear(1, 1)

    with pytest.raises(
        ValueError, match="Notes needs the input of the last nn.Linear, but NoLinear has none$"
    ):
        make(Notes(([],), asks=("feature",)), model=NoLinear())
    run, _, optimizer = make(Notes(([],), asks=("feature",)), model=IdleLinear())
    train(run, optimizer)
    with pytest.raises(
        ValueError, match="features are .* the last nn.Linear, but IdleLinear calls no nn.Linear"
    ):
        _ = run.plan
    with pytest.raises(
        ValueError,
        match=r"GradMatch needs .* last nn.Linear, but NoLinear has none, or use GradMatch\(gradient=.bias.\)",
    ):
        make(thresher.GradMatch(), model=NoLinear())


@dataclass(frozen=True)
class Surveys:
    stage = "epoch"

    def columns(self):
        return {}

    def full_pass(self, epoch, epochs):
        return ("error",)

    def plan_epoch(self, records, *, epoch, epochs, generator):
        return EpochPlan(torch.arange(len(records["error"])))


# In the batch


def test_rows_drawn_twice_have_twice_the_gradient():
    run, net, _ = make(Twice(), forward_passes="once", loader=DataLoader(TensorDataset(*data()), B))
    x, y = next(iter(run.loader))
    run.criterion(run.model(x), y).backward()
    found = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    rows, weights = torch.arange(4).repeat_interleave(2), torch.linspace(0.5, 1.5, 8)
    (F.cross_entropy(net(x)[rows], y[rows], reduction="none") * weights).mean().backward()
    for p, gradient in zip(net.parameters(), found, strict=True):
        assert torch.allclose(gradient, p.grad, atol=1e-6)


IN_VAIN = "ignore:Twice kept 1.00 of the samples"


@pytest.mark.filterwarnings(IN_VAIN)
@pytest.mark.parametrize("passes", ["once", "twice"])
def test_a_method_that_rests_is_not_asked(passes):
    run, _, optimizer = make(Twice(inactive=True), forward_passes=passes, epochs=4)
    train(run, optimizer, epochs=4)
    asked = [entry["asked"] for entry in run.history]
    fractions = [entry["actual_fraction"] for entry in run.history]
    assert asked[:2] == [0, 0] and asked[-1] == 2 * N / B
    assert fractions == [0.0] * 4  # half of the rows, each drawn twice
    if passes == "twice":
        assert run.cost.scoring == 2 * N


@pytest.mark.filterwarnings(IN_VAIN)
def test_rows_that_repeat_are_trained_on_as_often():
    run, _, optimizer = make(Twice(), forward_passes="twice")
    train(run, optimizer)
    assert sorted(set(run.trained.tolist())) == [0, 2]
    assert int(run.trained.sum()) == run.cost.backward == N


# Scores that do not cover the dataset


def test_a_method_checks_the_samples_it_will_choose_among():
    known = torch.arange(30)
    scores = thresher.scores.Scores(
        ids=known, values=torch.rand(30), name="irreducible", forward=60, backward=90
    )
    method = thresher.RhoLoss(scores, keep=0.5)
    with pytest.raises(
        ValueError,
        match="RhoLoss: `irreducible` has no finite loss for 10 of 40 samples; the first is",
    ):
        make(method)
    run, _, optimizer = make([Keeps(tuple(range(30))), method], forward_passes="once")
    train(run, optimizer)
    assert run.cost.scoring == 60
    assert (run.cost.forward, run.cost.backward) == (60 + 30, 90 + 15)


def test_samples_of_a_stream_have_no_scores():
    class Stream(IterableDataset):
        def __iter__(self):
            yield from zip(*data(), strict=True)

    scores = thresher.scores.Scores(ids=torch.arange(N), values=torch.rand(N))
    with pytest.raises(
        ValueError,
        match="RhoLoss must know the index of each sample, and an IterableDataset has none",
    ):
        make(thresher.RhoLoss(scores), loader=DataLoader(Stream(), B))


def test_scores_that_changed_since_the_run_was_saved():
    run, _, optimizer = make([Keeps(tuple(range(20))), thresher.UniformSubset(keep=0.5)])
    train(run, optimizer)
    state = run.state_dict()
    other, *_ = make([Keeps(tuple(range(10, 30))), thresher.UniformSubset(keep=0.5)])
    with pytest.raises(
        ValueError,
        match="pruning kept 20 samples in the saved run, but 20 other samples in this run: the scores have changed",
    ):
        other.load_state_dict(state)
    assert other.epoch == 0


# Plans behind pruning


@dataclass(frozen=True)
class Answers:
    plan: object
    stage = "epoch"

    def columns(self):
        return {}

    def plan_epoch(self, records, *, epoch, epochs, generator):
        return self.plan


@pytest.mark.parametrize(
    ("plan", "error", "message"),
    [
        ([1, 2], TypeError, "Answers.plan_epoch must return a thresher.EpochPlan, got list"),
        (EpochPlan(torch.tensor([-1]), drawn=True), ValueError, r"within \[0, 20\)"),
        (EpochPlan(torch.tensor([3, 20])), ValueError, r"within \[0, 20\)"),
    ],
)
def test_plans_within_are_checked(plan, error, message):
    run, *_ = make([Keeps(tuple(range(20))), Answers(plan)])
    with pytest.raises(error, match=message):
        _ = run.plan


@pytest.mark.parametrize("observe", [False, True], ids=["", "observed"])
def test_fractions_count_what_was_pruned(observe):
    """Columns that only the run observes are cut to the subset like those of the method."""
    run, *_ = make([Keeps(tuple(range(20))), thresher.UniformSubset(keep=0.5)], observe=observe)
    assert run.plan.facts == {
        "scheduled_fraction": 0.75,
        "actual_fraction": 0.75,
        "pruned_fraction": 0.5,
    }


def test_within_can_be_copied():
    within = OnSubset(thresher.UniformSubset(keep=0.5), torch.arange(3), 9)
    assert copy.deepcopy(within).method == within.method
    with pytest.raises(AttributeError):
        _ = within.nothing_of_the_kind


# Methods that draw


def test_methods_that_draw_need_a_loader_that_shuffles():
    with pytest.raises(
        ValueError,
        match="ImportanceSampling draws the order of training, but the loader's sampler sets another order",
    ):
        make(thresher.ImportanceSampling(), loader=DataLoader(TensorDataset(*data()), B))


def test_batches_that_must_be_read_are_looked_at_before_training():
    class Pairs(TensorDataset):
        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return {"x": x, "y": y}

    run, *_ = make(thresher.GradMatch(), loader=DataLoader(Pairs(*data()), B, shuffle=True))
    with pytest.raises(
        ValueError, match="`forward` is needed: GradMatch makes extra forward passes"
    ):
        next(iter(run.loader))


def test_a_survey_before_the_first_epoch_with_workers_that_stay():
    def start():
        loader = DataLoader(
            TensorDataset(*data()), B, shuffle=True, num_workers=1, persistent_workers=True
        )
        return make(thresher.GradMatch(first=0, keep=0.5, batch_size=4), loader=loader)

    torch.manual_seed(5)
    run, net, optimizer = start()
    batches = iter(run.loader)
    for _ in range(2):
        x, y = next(batches)
        run.criterion(run.model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    state, params = (
        run.state_dict(),
        {name: value.clone() for name, value in net.state_dict().items()},
    )
    rest = [run.ids.tolist() for _ in batches]
    other, net2, _ = start()
    net2.load_state_dict(params)
    other.load_state_dict(state)
    assert [other.ids.tolist() for _ in other.loader] == rest
    run.detach()
    other.detach()
