"""The main paths of the library on the device that THRESHER_DEVICE names: what a training needs, each in one short test."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import thresher
from devices import (
    BATCH,
    CLASSES,
    N,
    SmallAttention,
    SmallTraining,
    X,
    Y,
    assert_subset_gradients,
    network,
    small_conv_net,
)
from helpers import assert_same
from subset_cases import Causal, ConvNeXtBlock, Recurrent, SqueezeExcite, UNet, ViT, conv_net
from thresher import AdaSelection, BigLoss, FullData, Kakurenbo, SelectiveBackprop

pytestmark = pytest.mark.usefixtures("torch_may_warn")
KINDS = ("tensors", "host")
HALF = Kakurenbo(max_fraction=0.5, tau=0.2, schedule=((0, 1),))


def losses_of(net, device):
    """Losses of all samples by a network whose weights do not change."""
    return F.cross_entropy(net.eval()(X.to(device)), Y.to(device), reduction="none").detach()


def still(device):
    """A network that computes the same in every mode and batch."""
    return network(device, dropout=0.0, norm=False)


# Selecting nothing


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{}, {"observe": True}])
def test_selecting_nothing_changes_no_bit(device, kind, settings):
    plain = SmallTraining(None, device, kind=kind).train().result()
    assert_same(SmallTraining(FullData(), device, kind=kind, **settings).train().result(), plain)


# Criterion and records


@pytest.mark.parametrize("kind", KINDS)
def test_records_have_the_losses_of_the_samples(device, kind):
    training = SmallTraining(HALF, device, kind=kind, epochs=1, lr=0.0, model=still(device)).train()
    records, logits = training.run.records, training.net(X.to(device)).detach()
    assert all(column.device == device for column in records.values())
    torch.testing.assert_close(records["loss"], losses_of(training.net, device))
    assert torch.equal(records["correct"].bool().cpu(), (logits.argmax(1) == Y.to(device)).cpu())
    torch.testing.assert_close(
        records["confidence"].float(), logits.softmax(1).amax(1), rtol=1e-2, atol=1e-2
    )


CRITERIA = {
    "classes": (nn.CrossEntropyLoss(label_smoothing=0.1), Y),
    "class weights": (nn.CrossEntropyLoss(weight=torch.linspace(0.5, 2, CLASSES)), Y),
    "labels": (
        nn.BCEWithLogitsLoss(pos_weight=torch.linspace(1, 2, CLASSES)),
        F.one_hot(Y, CLASSES).float(),
    ),
    "values": (nn.MSELoss(), X[:, :CLASSES].contiguous()),
}


@pytest.mark.parametrize("name", CRITERIA)
def test_criteria_give_their_own_value_and_gradient(device, name):
    criterion, targets = CRITERIA[name]
    criterion, net = criterion.to(device), still(device)
    loader = thresher.TensorLoader(X.to(device), targets.to(device), batch_size=BATCH)
    run = thresher.attach(
        "rs2:keep=0.5", loader=loader, criterion=criterion, model=net, epochs=1, observe=True
    )
    for x, y in run.loader:
        found = []
        for loss in (run.criterion(run.model(x), y), criterion(net(x), y)):
            net.zero_grad()
            loss.backward()
            found.append(
                [loss.detach(), *(parameter.grad.clone() for parameter in net.parameters())]
            )
        torch.testing.assert_close(*found)
    seen = run.records["last_loss"][run.trained.to(device) > 0]
    assert len(seen) == N // 2 and bool(torch.isfinite(seen).all())


@pytest.mark.parametrize("kind", KINDS)
def test_losses_of_the_loop_are_recorded(device, kind):
    net, rows = still(device), SmallTraining(None, device, kind=kind).loader
    run = thresher.attach(
        FullData(), loader=rows, criterion=None, model=net, epochs=1, observe=True
    )
    for x, y in run.loader:
        losses = F.cross_entropy(run.model(x), y, reduction="none")
        reduced = run.reduce(losses)
        assert torch.equal(reduced, losses.mean())
        reduced.backward()
    torch.testing.assert_close(
        run.records["last_loss"].float(), losses_of(net, device), rtol=1e-2, atol=1e-2
    )


@pytest.mark.parametrize("method", [HALF, "infobatch", 0.5])
def test_the_plans_are_those_of_a_cpu(device, method):
    """Chance and records choose the same samples; rounding must not, as the losses of no two samples are close."""
    trainings = []
    for place in (torch.device("cpu"), device):
        model = still(torch.device("cpu")).to(place)
        trainings.append(SmallTraining(method, place, lr=1e-3, model=model).train())
    on_cpu, here = trainings
    assert here.ids == on_cpu.ids
    torch.testing.assert_close(
        torch.stack(here.losses).cpu(), torch.stack(on_cpu.losses), rtol=1e-3, atol=1e-3
    )


# Selection in the batch


def test_once_trains_on_the_gradient_of_the_chosen_rows(device):
    net = still(device)
    loader = thresher.TensorLoader(X.to(device), Y.to(device), batch_size=BATCH)
    given = {"loader": loader, "criterion": nn.CrossEntropyLoss(), "model": net}
    run = thresher.attach(BigLoss(keep=0.25), epochs=1, forward_passes="once", **given)
    for x, y in run.loader:
        net.zero_grad()
        run.criterion(run.model(x), y).backward()
        found = [parameter.grad.clone() for parameter in net.parameters()]
        net.zero_grad()
        F.cross_entropy(net(x), y, reduction="none").topk(BATCH // 4).values.mean().backward()
        torch.testing.assert_close(found, [parameter.grad for parameter in net.parameters()])
    assert (run.cost.forward, run.cost.backward) == (N, N // 4)


@pytest.mark.parametrize("kind", KINDS)
def test_twice_yields_the_rows_with_the_largest_losses(device, kind):
    settings = {"forward_passes": "twice", "epochs": 1, "lr": 0.0, "model": still(device)}
    training = SmallTraining(BigLoss(keep=0.25), device, kind=kind, **settings).train()
    losses, trained = losses_of(training.net, device), training.run.trained.to(device) > 0
    assert [len(ids) for ids in training.ids] == [BATCH, N // 4 - BATCH]
    assert int(trained.sum()) == N // 4 and losses[trained].mean() > losses[~trained].mean()


@pytest.mark.parametrize("forward_passes", ["once", "twice"])
@pytest.mark.parametrize(
    "method", [SelectiveBackprop(beta=1.0), AdaSelection(keep=0.5), "threshold_keep"]
)
def test_batch_methods_train(device, method, forward_passes):
    training = SmallTraining(method, device, forward_passes=forward_passes).train()
    cost = training.run.cost
    assert 0 < cost.backward < 3 * N and bool(torch.isfinite(torch.stack(training.losses)).all())
    assert training.run.records["loss"].device == device


# Own passes


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_samples_are_refreshed(device, kind):
    training = SmallTraining(HALF, device, kind=kind, epochs=2, lr=0.0, model=still(device)).train(
        stop=N // BATCH
    )
    training.run.records["loss"].sub_(1)
    training.train()
    assert training.run.history[1]["refreshed"] > 0
    torch.testing.assert_close(training.run.records["loss"], losses_of(training.net, device))


@pytest.mark.parametrize("scoring", [{"every_epochs": 2}, {"dtype": torch.bfloat16}])
def test_scoring_passes(device, scoring):
    given = {"forward_passes": thresher.Scoring(**scoring)}
    training = SmallTraining(SelectiveBackprop(keep=0.5), device, kind="host", **given).train()
    assert training.run.cost.backward == 3 * N // 2
    cost = training.run.cost
    assert cost.forward - cost.comparing < 3 * N * 1.5 + 1


# Resume


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (FullData(), {"observe": True}),
        (HALF, {}),
        ("infobatch", {}),
        (0.5, {}),
        (SelectiveBackprop(keep=0.5), {"forward_passes": "once"}),
        (SelectiveBackprop(keep=0.4), {"forward_passes": "twice"}),
    ],
)
def test_a_resumed_epoch_goes_on_exactly(device, method, settings):
    whole = SmallTraining(method, device, **settings).train()
    first = SmallTraining(method, device, **settings).train(stop=len(whole.losses) // 2)
    saved = first.save()
    torch.manual_seed(99)
    second = SmallTraining(method, device, **settings)
    second.load(saved)
    second.train()
    assert first.ids + second.ids == whole.ids
    second.losses = [*first.losses, *second.losses]
    assert_same(second.result(), whole.result())
    assert_same(dict(second.run.records), dict(whole.run.records))


# Backward passes of some rows


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", ["layers", "convolutions", "attention"])
def test_the_gradient_of_some_rows_is_that_of_the_plain_model(device, name, dtype):
    torch.manual_seed(0)
    shapes = {"layers": X.shape[1:], "convolutions": (3, 8, 8), "attention": (10, 32)}
    model = {
        "layers": lambda: still(device),
        "convolutions": small_conv_net,
        "attention": SmallAttention,
    }[name]().to(device)
    # Convolutions of float32 compute in TF32 on CUDA, unless told otherwise.
    share = 5e-2 if dtype is not None else 5e-3 if name == "convolutions" else 1e-4
    assert_subset_gradients(
        model, torch.randn(12, *shapes[name], device=device), dtype=dtype, share=share
    )


MODELS = {
    "dropout": (
        lambda: nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 3)),
        (6,),
    ),
    "pooling, groups": (conv_net, (3, 8, 8)),
    "depthwise, layer norm": (ConvNeXtBlock, (6, 8, 8)),
    "transformer layer of torch": (ViT, (3, 8, 8)),
    "embedding, causal mask": (lambda: Causal("inside"), (7,)),
    "embedding, causal attention": (lambda: Causal("sdpa"), (7,)),
    "transposed convolution, resizing": (UNet, (3, 8, 8)),
    "squeeze and excite": (SqueezeExcite, (3, 8, 8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_usual_layers_get_the_subset_backward(device, name):
    torch.manual_seed(0)
    make, shape = MODELS[name]
    x = (
        torch.randint(11, (12, *shape), device=device)
        if "embedding" in name
        else torch.randn(12, *shape, device=device)
    )
    assert_subset_gradients(
        make().to(device), x, share=1e-2 if device.type == "cuda" else 1e-5, strict=True
    )


@pytest.mark.filterwarnings("ignore:subset_backward:UserWarning")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_networks_get_the_gradient_of_the_plain_model(device, kind):
    """They are one operation of cuDNN, or of oneDNN on a CPU, for which the plain model may stand in."""
    torch.manual_seed(0)
    model, x = Recurrent(kind, batch_first=True).to(device), torch.randn(12, 5, 4, device=device)
    assert_subset_gradients(
        model, x, share=1e-2 if device.type == "cuda" else 1e-5, may_fall_back=True
    )


def test_batch_norm_updates_its_statistics_and_dropout_draws_as_in_the_plain_model(device):
    from thresher.subset import subset_backward

    found = []
    for wrap in (lambda net: net, subset_backward):
        net = network(device)
        call = wrap(net)
        torch.manual_seed(5)
        outputs = [call(X.to(device)).detach() for _ in range(3)]
        found.append([outputs, [buffer.clone() for buffer in net.buffers()]])
    torch.testing.assert_close(*found)
