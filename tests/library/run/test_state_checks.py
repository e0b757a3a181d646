"""A state that was damaged, or that another run or loader saved, is refused whole: the run is as it was before."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from helpers import assert_same, signed

N, B = 40, 8
DATA = TensorDataset(
    torch.randn(N, 3, generator=torch.Generator().manual_seed(1)), torch.arange(N) % 2
)
pytestmark = pytest.mark.filterwarnings("ignore:.*but before the end of the loop over run.loader")


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
    "selective": (
        [thresher.InfoBatch(), thresher.SelectiveBackprop(beta=1.0)],
        {"forward_passes": "twice"},
    ),
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
    inside = state if path.split(".")[0] in state else state["ranks"][0]
    for name in way:
        inside = inside[int(name) if isinstance(inside, list | tuple) else name]
    last = int(last) if isinstance(inside, list) else last
    if change is None:
        del inside[last]
    else:
        inside[last] = change(inside.get(last) if isinstance(inside, dict) else inside[last])
    return state


def to(value):
    return lambda _: value


DAMAGES = {
    "version": [to(99), to("3")],
    "digest": [to(""), to(3)],
    "kept": [to(torch.arange(4))],
    "ranks": [to(()), to(3), to((3,)), to(({},))],
    "records": [to({})],
    "trained": [
        lambda t: t[:-1],
        torch.Tensor.float,
        lambda t: t + 1,
        lambda t: t.flip(0),
        to(None),
    ],
    "records.loss": [
        lambda t: t[:-1],
        torch.Tensor.double,
        torch.zeros_like,
        lambda t: t.flip(0),
        to([0.0]),
    ],
    "rows": [to(-8), to("8")],
    "history.0.forward": [to("80")],
    "waiting.ids": [to(torch.tensor([N]))],
    "epoch_start.torch": [lambda t: t[:-8], to(torch.zeros(5))],
    "epoch_start.python": [to((3, (1, 2), None))],
    "cost.forward": [to(float("nan"))],
    "rng.generators": [lambda found: found * 2],
    "plan.0.lr_scale": [to(0.5)],
    "plan": [to(()), to([1, 2])],
    "plan.0.ids": [torch.Tensor.float, torch.zeros_like, lambda t: t[:-1], to([1, 2])],
    "plan.0.refresh": [lambda t: t.flip(0)],
}
OF_BATCH_METHODS = {
    "batch_stage": [to(None)],
    "batch_stage.state.history": [torch.Tensor.double, lambda t: t + 1],
    "waiting.weights": [to(torch.ones(77))],
    "plan.0.weights": [lambda t: t * float("nan"), lambda t: t.flip(0), to(torch.ones(3))],
}
INSIDE = ("rows", "history", "waiting", "epoch_start", "cost", "rng", "batch_stage")
"""Entries of what a process has by itself; a test takes each of them away."""


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
    damages = {field: [None] for field in (*states[name], *INSIDE)}
    for path, changes in (DAMAGES if name == "kakurenbo" else OF_BATCH_METHODS).items():
        damages[path] = [*damages.get(path, []), *changes]
    before = frozen(run.state_dict())
    for path, changes in damages.items():
        for change in changes:
            message = refused(run, at(states[name], path, change), before=before)
            assert (
                "version" in message
                if path == "version"
                else "damaged" in message or path.startswith("records")
            ), path
            assert len(message) < 800
    run.load_state_dict(states[name])
    for state in (found := run.state_dict(), expected := copy.deepcopy(states[name])):
        state["ranks"][0]["cost"]["backward_to_forward"] = 0  # a measured time
        del state["digest"]
    assert_same(found, expected)


def test_no_mapping_is_refused():
    run, _ = make(thresher.FullData())
    with pytest.raises(TypeError, match=r"`state` must come from run\.state_dict\(\), got int"):
        run.load_state_dict(3)  # pyright: ignore[reportArgumentType]


def test_what_is_the_matter_is_said(states):
    run, _ = make(METHODS["kakurenbo"][0])
    state, changed = (
        states["kakurenbo"],
        "The state is damaged, or was changed after .* Nothing was loaded. Load another",
    )
    refused(
        run,
        at(state, "records.loss", torch.zeros_like),
        f"`records` is not as it was saved.*{changed}",
    )
    refused(
        run,
        at(state, "records.loss", lambda t: t[:-1]),
        f"`records` is not as it was saved.*{changed}",
    )
    refused(run, at(state, "seed", to(3)), f"`state` does not match its digest. {changed}")
    elsewhere = {name: state[name] for name in ("version", "digest", "ranks")}
    refused(
        run,
        elsewhere,
        "process 0 was given the state of another process, which has no stored losses. Load",
    )
    refused(run, at(state, "trained", None), rf"`state` lacks \['trained'\]. {changed}")
    refused(run, {**state, "more": 1}, r"`state` has \['more'\], which this version does not know")


@pytest.mark.parametrize(
    ("batches", "way_out"), [(2, "save between epochs"), (0, "restore_rng=False")]
)
@pytest.mark.parametrize("generator", [False, True])
def test_other_generators_are_refused(generator, batches, way_out):
    method = thresher.FullData()
    state = trained(*make(method, generator=generator), batches=batches).state_dict()
    run, _ = make(method, generator=not generator)
    message = refused(run, state, r"random states of . generators.*uses .\.")
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
    state = signed(
        at(state, "epoch_start.workers_ran", to(True))
    )  # as a loader with persistent_workers=True saves it
    refused(
        make(method, generator=False)[0],
        state,
        "persistent workers.*persistent_workers=True as before, or save between epochs",
    )


def test_another_number_of_epochs_is_said():
    method = thresher.FullData()
    state = trained(*make(method), batches=0).state_dict()
    run, _ = make(method, epochs=9)
    with pytest.warns(UserWarning, match="saved with epochs=5, but this run has epochs=9"):
        run.load_state_dict(state)
    assert run.epoch == 2


def test_states_of_other_settings_of_a_batch_method_that_do_not_fit():
    """The state of three selectors is no state of two: refused at once, not by a crash in the middle of training."""
    two, three = (
        thresher.AdaSelection(keep=0.5, pool=("small_loss", "uniform", "big_loss")[:size])
        for size in (2, 3)
    )
    state = trained(*make(three, forward_passes="twice"), epochs=1, batches=0).state_dict()
    run, _ = make(two, forward_passes="twice")
    must = r"has `log_weights` as a torch.float32 tensor of shape \(3,\), but this run has .*\(2,\)\..* Nothing was"
    refused(
        run, state, must + r".*saved with AdaSelection\(.*uniform.*but this run has AdaSelection"
    )


def test_a_state_survives_saving(states):
    for name, (method, settings) in METHODS.items():
        file = io.BytesIO()
        torch.save(states[name], file)
        file.seek(0)
        run, _ = make(method, **settings)
        run.load_state_dict(torch.load(file, weights_only=True))
        assert_same(run.state_dict(), states[name])
