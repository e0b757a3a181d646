"""A state that was damaged, or that another run or loader saved, is refused whole: the run is as it was before."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from helpers import assert_same

N, B = 40, 8
DATA = TensorDataset(torch.randn(N, 3, generator=torch.Generator().manual_seed(1)), torch.arange(N) % 2)
pytestmark = pytest.mark.filterwarnings("ignore:.*the loop had not asked run.loader for a further batch")


def make(method, *, generator=True, epochs=5, loader=None, **settings):
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    own = torch.Generator().manual_seed(3) if generator else None
    run = thresher.attach(
        method,
        loader=loader or DataLoader(DATA, B, shuffle=True, generator=own),
        criterion=nn.CrossEntropyLoss(),
        model=net,
        optimizer=optimizer,
        epochs=epochs,
        **settings,
    )
    return run, optimizer


def trained(run, optimizer, epochs=2, batches=2):
    """Stops in the middle of an epoch; after `epochs` whole ones where `batches` is 0."""
    for epoch in range(epochs + 1):
        if epoch == epochs and not batches:
            break
        for done, (x, y) in enumerate(run.loader, 1):
            run.criterion(run.model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if epoch == epochs and done == batches:
                break
    return run


METHODS = {
    "kakurenbo": (thresher.Kakurenbo(max_fraction=0.4, tau=0.0), {}),
    "selective": ([thresher.InfoBatch(), thresher.SelectiveBackprop(beta=1.0)], {"forward_passes": "twice"}),
}


def saved(name, **where):
    method, settings = METHODS[name]
    return trained(*make(method, **settings), **where).state_dict()


@pytest.fixture(scope="module")
def states():
    return {name: saved(name) for name in METHODS}


def at(state, path, change):
    """A copy of a state with one entry changed; None as the change takes the entry away."""
    state = copy.deepcopy(state)
    *way, last = path.split(".")
    in_tensors = path.split(".")[0] in state and not (way == ["plan"] and last not in state["plan"])
    inside = state if in_tensors else state["ranks"][0]
    for name in way:
        inside = inside[int(name) if isinstance(inside, list) else name]
    last = int(last) if isinstance(inside, list) else last
    if change is None:
        del inside[last]
    else:
        inside[last] = change(inside.get(last) if isinstance(inside, dict) else inside[last])
    return state


def to(value):
    return lambda _: value


EVERY_FIELD = (
    *("version", "method", "settings", "n", "kept", "epochs", "seed", "epoch", "active", "consumed", "checksum", "plan"),
    *("batch_stage", "passes", "history", "waiting", "seen", "epoch_start", "trained", "records", "cost", "rng", "ranks"),
)

DAMAGES = {
    "version": [to(99), to("3")],
    "epoch": [to("2"), to(-1), to(1), to(True), to(2.0)],
    "active": [to(1)],
    "ran_out": [to(1)],
    "seed": [to(1.5)],
    "consumed": [to(-8), to(4000), to("8")],
    "checksum": [to(-1), to(2**40)],
    "epochs": [to(0)],
    "passes": [to(3), to("thrice")],
    "kept": [to(torch.arange(4))],
    "plan": [to(3), to(torch.arange(3)), lambda plan: {**plan, "more": 1}],
    "plan.ids": [None, torch.Tensor.float, torch.Tensor.int, torch.Tensor.long, torch.zeros_like, lambda t: t[:-1], to([1, 2])],
    "plan.lr_scale": [to(-1.0), to("1"), to(float("nan"))],
    "plan.refresh": [lambda _: torch.tensor([N]), lambda t: t[:-1]],
    "plan.facts": [to(3)],
    "history": [to({}), lambda history: history[:-1], to([1])],
    "history.0.forward": [to("80"), to(-1)],
    "history.0.epoch": [None],
    "waiting": [to([])],
    "waiting.ids": [None, to(torch.tensor([-1])), to(torch.tensor([N])), to(torch.tensor([1.0]))],
    "waiting.weights": [to(torch.ones(77)), to(torch.ones(1, dtype=torch.float64))],
    "epoch_start": [to(3), to({})],
    "epoch_start.torch": [None, lambda t: t[:-8], to(torch.zeros(5))],
    "epoch_start.python": [to((3, (1, 2), None))],
    "epoch_start.generators": [to([]), to([torch.zeros(3, dtype=torch.uint8)])],
    "epoch_start.workers_ran": [to("no"), to(True)],
    "trained": [lambda t: t[:-1], torch.Tensor.float, lambda t: t - 1000, to(None)],
    "records": [to([])],
    "records.loss": [lambda t: t[:-1], torch.Tensor.double, to([0.0])],
    "cost": [lambda cost: {**cost, "tea": 1}],
    "cost.forward": [None, to(-1), to(1.5), to(float("nan"))],
    "cost.backward_to_forward": [to("2")],
    "rng.torch": [to(7)],
    "rng.numpy": [to(("MT19937", torch.zeros(3), 0, 0, 0.0))],
    "rng.generators": [lambda found: found * 2],
    "plan.by_id": [None, to(3), to(()), to(("ids", "tea"))],
    "ranks": [to(()), to(3), to((3,)), to(({},))],
}
OF_BATCH_METHODS = {
    "batch_stage": [to(None), to(1)],
    "batch_stage.step": [None, to(-1), to("1")],
    "batch_stage.state": [to({})],
    "batch_stage.state.history": [torch.Tensor.double, lambda t: t[:, None], to([0.0])],
    "batch_stage.facts": [to({"fraction": "all"})],
    "waiting.weights": [to(torch.ones(77))],
    "plan.weights": [to(None), lambda t: t * float("nan"), to(torch.ones(3)), lambda _: torch.ones(N)[:, None]],
}


NAMED = {"epoch_start.workers_ran": ("workers_ran", "persistent"), "ranks": ("ranks", "`state` lacks")}
"""What a message may say in place of the name of the field."""


def frozen(value):
    """A copy that compares quickly and exactly."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.numpy().tobytes()
    if isinstance(value, dict):
        return {name: frozen(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return value if all(type(one) is int for one in value) else [frozen(one) for one in value]
    return repr(value)


def refused(run, state, match="load_state_dict: .*", before=None):
    before = before or frozen(run.state_dict())
    with pytest.raises(ValueError, match=match) as error:
        run.load_state_dict(state)
    assert frozen(run.state_dict()) == before
    return str(error.value)


@pytest.mark.parametrize("name", METHODS)
def test_damaged_states_change_nothing(states, name):
    method, settings = METHODS[name]
    run = trained(*make(method, **settings), epochs=1, batches=1)
    damages = {field: [None] for field in EVERY_FIELD}
    for path, changes in (DAMAGES if name == "kakurenbo" else OF_BATCH_METHODS).items():
        damages[path] = [*damages.get(path, []), *changes]
    before, count = frozen(run.state_dict()), 0
    for path, changes in damages.items():
        for change in changes:
            message = refused(run, at(states[name], path, change), before=before)
            assert any(word in message for word in NAMED.get(path, (path.split(".")[-1], path.split(".")[0])))
            assert len(message) < 800
            count += 1
    assert count > 25
    run.load_state_dict(states[name])
    for state in (found := run.state_dict(), expected := copy.deepcopy(states[name])):
        state["ranks"][0]["cost"]["backward_to_forward"] = 0  # a measured time
    assert_same(found, expected)


def test_no_mapping_is_refused():
    run, _ = make(thresher.FullData())
    with pytest.raises(TypeError, match=r"`state` must be a result of run\.state_dict\(\), got int"):
        run.load_state_dict(3)  # pyright: ignore[reportArgumentType]


def test_what_is_the_matter_is_said(states):
    run, _ = make(METHODS["kakurenbo"][0])
    state = states["kakurenbo"]
    assert "must be a torch.float32 tensor of shape (40,), got a torch.float32 tensor of shape (39,)" in refused(
        run, at(state, "records.loss", lambda t: t[:-1])
    )
    assert "`state.cost` lacks ['forward']" in refused(run, at(state, "cost.forward", None))
    assert "`state` has ['more'], which this version does not know" in refused(run, {**state, "more": 1})
    damaged = "`plan` is damaged; nothing was loaded. "
    refused(run, at(state, "plan.ids", torch.zeros_like), f"{damaged}EpochPlan: `ids` is empty")
    refused(run, at(state, "plan.ids", lambda t: t[:-1]), f"{damaged}`ids` must be one bit for each of 40 samples")


@pytest.mark.parametrize(("batches", "way_out"), [(2, "save between epochs"), (0, "restore_rng=False")])
@pytest.mark.parametrize("generator", [False, True])
def test_other_generators_are_refused(generator, batches, way_out):
    method = thresher.FullData()
    state = trained(*make(method, generator=generator), batches=batches).state_dict()
    run, _ = make(method, generator=not generator)
    message = refused(run, state, "random states of . generators.*draws from .;")
    assert way_out in message
    if not batches:
        run.load_state_dict(state, restore_rng=False)
        assert run.epoch == 2
    else:
        with pytest.raises(ValueError, match="generators"):
            run.load_state_dict(state, restore_rng=False)


def test_persistent_workers_that_are_gone_are_named():
    method = thresher.FullData()
    state = trained(*make(method, generator=False)).state_dict()
    state = at(state, "epoch_start.workers_ran", to(True))  # as a loader with persistent_workers=True saves it
    refused(
        make(method, generator=False)[0], state, "persistent workers.*persistent_workers=True as before, or save between epochs"
    )


def test_another_number_of_epochs_is_said():
    method = thresher.FullData()
    state = trained(*make(method), batches=0).state_dict()
    run, _ = make(method, epochs=9)
    with pytest.warns(UserWarning, match="saved with epochs=5, this run has epochs=9"):
        run.load_state_dict(state)
    assert run.epoch == 2


def test_states_of_other_settings_of_a_batch_method_that_do_not_fit():
    """The state of three selectors is no state of two: refused at once, not by a crash in the middle of training."""
    two, three = (thresher.AdaSelection(keep=0.5, pool=("small_loss", "uniform", "big_loss")[:size]) for size in (2, 3))
    state = trained(*make(three, forward_passes="twice"), epochs=1, batches=0).state_dict()
    run, _ = make(two, forward_passes="twice")
    must = r"`state.batch_stage.state.log_weights` must be a torch.float32 tensor of shape \(2,\), got .*\(3,\)"
    refused(run, state, must + r".*saved with AdaSelection\(.*uniform.*this run has AdaSelection")


def test_a_state_survives_saving(states):
    for name, (method, settings) in METHODS.items():
        file = io.BytesIO()
        torch.save(states[name], file)
        file.seek(0)
        run, _ = make(method, **settings)
        run.load_state_dict(torch.load(file, weights_only=True))
        assert_same(run.state_dict(), states[name])
