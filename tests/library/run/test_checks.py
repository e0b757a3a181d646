"""What attach() refuses, before anything is changed."""

import functools
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import thresher
from thresher import Kakurenbo, RandomBackprop, Scoring, SelectiveBackprop

N, C = 24, 4


class Stream(IterableDataset):
    def __iter__(self):
        return iter(TensorDataset(torch.randn(N, 6), torch.arange(N) % C))


@dataclass(frozen=True)
class NeedsConfidence:
    stage = "batch"
    requires = thresher.Requirements(signals=("loss", "confidence"))

    def init_state(self):
        return {}

    def count(self, n):
        return n

    def plan_batch(self, signals, state, *, step, generator):
        return thresher.BatchPlan(torch.arange(len(signals["id"]))), state


class Later:
    stage = "batch"


SB = SelectiveBackprop(keep=0.5)
STREAM = DataLoader(Stream(), 4)
REFUSED = [
    (
        {"method": Kakurenbo},
        TypeError,
        r"must be an instance, got the class Kakurenbo; write Kakurenbo\(\)",
    ),
    (
        {"method": [Kakurenbo(), SelectiveBackprop]},
        TypeError,
        r"got the class SelectiveBackprop; write",
    ),
    (
        {"method": object()},
        TypeError,
        "stage = 'epoch'.*or stage = 'batch'.*got object; see thresher.methods",
    ),
    (
        {"method": 3},
        ValueError,
        r"the share of the cost of full training must be within \(0, 1\], such as 0.5 or '50%', got 3",
    ),
    (
        {"method": Later()},
        TypeError,
        r"init_state\(\), count\(\) and plan_batch\(\), or stage = 'before' and kept\(\), got Later",
    ),
    (
        {"method": [thresher.FullData(), thresher.InfoBatch()]},
        ValueError,
        "`method` may have one method per `stage`, got FullData and InfoB",
    ),
    (
        {"method": [SB, RandomBackprop()]},
        ValueError,
        "`method` may have one method per `stage`, got SelectiveBackprop and RandomBackprop",
    ),
    ({"method": []}, ValueError, "got an empty list"),
    ({"epochs": 0}, ValueError, "`epochs` must be a whole number of 1 or more, got 0"),
    ({"epochs": 2.5}, ValueError, "`epochs`.*2.5"),
    ({"epochs": True}, ValueError, "`epochs`.*True"),
    (
        {"forward_passes": "thrice"},
        ValueError,
        "`forward_passes` must be 'auto', 'once' or 'twice', got 'thrice'",
    ),
    (
        {"forward_passes": None},
        ValueError,
        "`forward_passes` must be 'auto', 'once' or 'twice', got None",
    ),
    (
        {"forward_passes": 3},
        TypeError,
        "`forward_passes` must be 'auto', 'once', 'twice' or a thresher.Scoring, got int",
    ),
    (
        {"observes": True},
        TypeError,
        "attach and observe have no argument 'observes'; their options are on_nonfinite, observe, coll",
    ),
    (
        {"forward_passes": Scoring()},
        ValueError,
        "a Scoring is for methods that choose in each batch; leave it out",
    ),
    (
        {"method": RandomBackprop(), "forward_passes": Scoring()},
        ValueError,
        "needs no losses to choose by; leave the Scoring",
    ),
    ({"observe": "no"}, TypeError, "`observe` must be True or False, got 'no'"),
    ({"on_nonfinite": "drop"}, ValueError, "`on_nonfinite` must be 'keep' or 'raise', got 'drop'"),
    (
        {"process_group": object()},
        ValueError,
        "`process_group`: there is no process group: call torch.distributed.init_process_group first",
    ),
    ({"seed": "x"}, TypeError, "`seed` must be an int, got str"),
    ({"model": lambda x: x}, TypeError, "`model` must be a torch.nn.Module, got function"),
    ({"optimizer": "adam"}, TypeError, "`optimizer` must be a torch.optim.Optimizer, got str"),
    ({"forward": 1}, TypeError, "`forward` must be callable, got int"),
    ({"signals": 1}, TypeError, "`signals` must be callable, got int"),
    ({"criterion": 1}, TypeError, "`criterion` must be a loss module or a callable"),
    (
        {"method": Kakurenbo(), "optimizer": None},
        ValueError,
        r"attach\(optimizer=optimizer\).*adjust_lr=False",
    ),
    (
        {"method": [Kakurenbo(), SB], "optimizer": None},
        ValueError,
        "Kakurenbo scales the learning rate",
    ),
    (
        {"method": Kakurenbo(), "model": None},
        ValueError,
        r"Kakurenbo makes forward.*pass attach\(model=model\)",
    ),
    (
        {"method": Kakurenbo(), "criterion": None},
        ValueError,
        r"Kakurenbo makes forward.*pass attach\(criterion=criterion\)",
    ),
    (
        {"method": Kakurenbo(), "criterion": nn.MSELoss()},
        ValueError,
        r"not defined for criterion MSELoss.*move_back=False",
    ),
    (
        {"method": NeedsConfidence(), "criterion": nn.MSELoss()},
        ValueError,
        "needs signals that this criterion does not give",
    ),
    (
        {"method": SB, "model": None},
        ValueError,
        r"SelectiveBackprop chooses by loss: pass attach\(model=model\)",
    ),
    (
        {"method": SB, "criterion": None, "forward_passes": "twice"},
        ValueError,
        r"chooses by loss: pass attach\(criterion=criterion\), or leave out forward_passes=",
    ),
    (
        {"method": SB, "model": None, "forward_passes": "once"},
        ValueError,
        r"pass attach\(model=model\)",
    ),
    (
        {"method": SB, "forward_passes": Scoring(losses=torch.rand(7))},
        ValueError,
        f"are of 7 samples, but the dataset has {N}",
    ),
    (
        {"method": SB, "loader": STREAM, "forward_passes": Scoring(every_epochs=2)},
        ValueError,
        "need a map-style",
    ),
    (
        {"method": SB, "loader": STREAM, "forward_passes": Scoring(losses=torch.rand(N))},
        ValueError,
        "need a map-style dataset",
    ),
    (
        {"method": [Kakurenbo(merge="sum"), SB]},
        ValueError,
        "Kakurenbo adds up.*would add them twice: pass forward_passes='on",
    ),
    (
        {"method": [Kakurenbo(merge="sum"), SB], "forward_passes": "twice"},
        ValueError,
        'or use Kakurenbo\\(merge="scatter"\\)',
    ),
    (
        {"loader": STREAM},
        TypeError,
        "Stream, an IterableDataset, whose samples have no index.*also reads samples by number",
    ),
    (
        {"loader": STREAM, "method": [thresher.FullData(), SB]},
        TypeError,
        "Stream, an IterableDataset",
    ),
    (
        {"loader": DataLoader(Stream(), batch_size=None), "method": SB},
        ValueError,
        "batch_size=None",
    ),
]


def attach(**settings):
    net = nn.Linear(6, C)
    arguments = {
        "method": thresher.FullData(),
        "loader": DataLoader(TensorDataset(torch.randn(N, 6), torch.arange(N) % C), 4),
        "criterion": nn.CrossEntropyLoss(),
        "model": net,
        "optimizer": torch.optim.SGD(net.parameters(), 0.1),
        "epochs": 3,
    } | settings
    return functools.partial(thresher.attach, arguments.pop("method"), **arguments), arguments[
        "optimizer"
    ]


@pytest.mark.parametrize(("settings", "error", "message"), REFUSED)
def test_refused_before_anything_changes(settings, error, message):
    call, optimizer = attach(**settings)
    before = torch.get_rng_state()
    with pytest.raises(error, match=message):
        call()
    if isinstance(optimizer, torch.optim.Optimizer):
        assert "step" not in vars(optimizer)
        assert not optimizer._optimizer_step_pre_hooks
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "settings",
    [
        {"method": SB, "criterion": None, "forward_passes": "once"},
        {"method": RandomBackprop(), "criterion": None, "model": None, "optimizer": None},
        {"method": [Kakurenbo(merge="sum"), SB], "forward_passes": "once"},
        {"method": [Kakurenbo(merge="sum"), RandomBackprop()], "forward_passes": "twice"},
        {"method": (Kakurenbo(), SB)},
        {"method": [SB], "loader": STREAM},
        {"method": SB, "forward_passes": Scoring(losses=torch.rand(N))},
        {"method": NeedsConfidence(), "criterion": nn.MSELoss(), "signals": lambda o, t: {}},
    ],
)
def test_accepted(settings):
    attach(**settings)[0]()


def test_several_processes(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(
        ValueError, match="`process_group`: Default process group has not been initialized"
    ):
        attach()[0]()


def sharded(model):
    from torch.distributed.fsdp import fully_shard  # which takes two seconds to import

    return fully_shard(model)


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("passes", ["once", "auto"])
@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (sharded, r"`model` is sharded.*fully_shard\(thresher.subset_backward\(model\)\)"),
        (
            lambda model: nn.Sequential(nn.parallel.DistributedDataParallel(model)),
            "module '0' of the model is a Distributed",
        ),
    ],
    ids=["fully_shard", "a part in DDP"],
)
def test_a_model_in_wrappers_that_leave_no_place_for_the_smaller_backward_pass(
    wrap, message, passes
):
    call, optimizer = attach(method=SB, model=wrap(nn.Linear(6, C)), forward_passes=passes)
    with pytest.raises(ValueError, match=message):
        call()
    assert not optimizer._optimizer_step_post_hooks
    attach(
        method=SB, model=nn.parallel.DistributedDataParallel(nn.Linear(6, C)), forward_passes=passes
    )[0]()


@pytest.mark.usefixtures("group_of_one")
def test_a_sharded_model_makes_no_passes_beside_those_of_the_loop():
    model = sharded(thresher.subset_backward(nn.Linear(6, C)))
    settings = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
    for name, method, more in (
        ("Kakurenbo", Kakurenbo(), {}),
        ("SelectiveBackprop", SB, {"forward_passes": "twice"}),
        ("SelectiveBackprop", SB, {"forward_passes": Scoring(dtype=torch.bfloat16)}),
    ):
        with pytest.raises(
            ValueError,
            match=f"`model`: {name} needs forward passes besides.*Use DistributedDataParallel, or",
        ):
            attach(method=method, **settings, **more)[0]()
    attach(method=SB, **settings, forward_passes=Scoring(model=nn.Linear(6, C)))[0]().detach()
    attach(method=SB, **settings, forward_passes=Scoring(losses=torch.rand(N)))[0]().detach()
    run = attach(method=SB, **settings)[0]()
    assert (
        run.model.module is model and not run._timeline.may_switch
    )  # to forward passes before those of the loop


@pytest.mark.parametrize(
    "compiled", [torch.jit.script, lambda net: torch.jit.trace(net, torch.zeros(2, 3))]
)
@pytest.mark.filterwarnings(
    "ignore:.*deprecated:DeprecationWarning", "ignore:.*torch.jit.* is deprecated:FutureWarning"
)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_scripted_model_is_refused_and_the_way_out_works(compiled):
    loader = DataLoader(
        TensorDataset(torch.randn(16, 3), torch.arange(16) % 2), 4, shuffle=True, drop_last=True
    )
    torch.manual_seed(0)
    model = compiled(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)))
    before = int(model.state_dict()["0.num_batches_tracked"])
    settings = {"loader": loader, "criterion": nn.CrossEntropyLoss(), "epochs": 3}
    with pytest.raises(TypeError, match=r"`model`.*torch.jit.script.*torch.nn.Sequential\(model\)"):
        thresher.attach(thresher.FullData(), model=model, **settings)
    whole = nn.Sequential(model)
    optimizer = torch.optim.SGD(whole.parameters(), 0.1)
    run = thresher.attach(
        thresher.Kakurenbo(max_fraction=0.4, move_back=False),
        model=whole,
        optimizer=optimizer,
        **settings,
    )
    for _ in range(3):
        for x, y in run.loader:
            optimizer.zero_grad()
            run.criterion(run.model(x), y).backward()
            optimizer.step()
    assert len(run.history) == 3 and run.cost.refresh
    assert int(model.state_dict()["0.num_batches_tracked"]) - before == run.cost.steps
