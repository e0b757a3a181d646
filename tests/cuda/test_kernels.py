"""Kernels and settings of a GPU under `subset_backward`, and trainings with what loops on a GPU use."""

import contextlib
import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import thresher
from devices import (
    DEVICE,
    SmallAttention,
    SmallTraining,
    X,
    Y,
    assert_subset_gradients,
    needs_cuda,
    network,
    small_conv_net,
)
from helpers import assert_same
from thresher import FullData, SelectiveBackprop

pytestmark = pytest.mark.usefixtures("torch_may_warn", "newer_torch")

KERNELS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
WIDTH = 128
"""Two heads of 64, which every kernel takes."""


@contextlib.contextmanager
def attention_by(name, dtype, dropout, device):
    """Allows one kernel; skips the test if it does not take these inputs on this device."""
    with sdpa_kernel(KERNELS[name]):
        q = torch.randn(2, 2, 16, WIDTH // 2, device=device, dtype=dtype, requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                F.scaled_dot_product_attention(q, q, q, dropout_p=dropout).sum().backward()
            except RuntimeError as error:
                pytest.skip(
                    f"{name} attention does not take {dtype} with dropout {dropout} here: {str(error)[:60]}"
                )
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KERNELS)
def test_attention_gets_the_subset_backward(device, name, dtype):
    torch.manual_seed(0)
    model, x = SmallAttention(WIDTH).to(device), torch.randn(12, 16, WIDTH, device=device)
    half = dtype is torch.bfloat16
    with attention_by(name, dtype, 0.0, device):
        assert_subset_gradients(
            model, x, dtype=dtype if half else None, share=5e-2 if half else 1e-4, strict=True
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KERNELS)
def test_attention_with_dropout_in_its_kernel_is_refused(device, name, dtype):
    """Its mask depends on the place of a sample in the batch. The mask of math attention is a tensor, whose rows are taken."""
    torch.manual_seed(0)
    fast = thresher.subset_backward(SmallAttention(WIDTH, dropout=0.1).to(device))
    cast = torch.autocast(device.type, dtype=dtype, enabled=dtype is torch.bfloat16)
    with attention_by(name, dtype, 0.1, device), cast, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = fast(torch.randn(12, 16, WIDTH, device=device))
    if name == "math":
        assert fast.fallback is None
    else:
        assert fast.fallback is not None and "random" in fast.fallback
    out[:4].float().sum().backward()
    assert all(bool(torch.isfinite(parameter.grad).all()) for parameter in fast.parameters())


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_convolutions_of_both_memory_formats(device, memory, dtype):
    torch.manual_seed(0)
    model = small_conv_net().to(device, memory_format=memory)
    x = torch.randn(12, 3, 8, 8, device=device).to(memory_format=memory)
    assert_subset_gradients(
        model, x, dtype=dtype, share=5e-3 if dtype is None else 5e-2, strict=True
    )


@pytest.fixture
def tf32():
    """Lets matrix products and convolutions of float32 compute in TF32."""
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    yield
    torch.set_float32_matmul_precision(products)
    torch.backends.cudnn.allow_tf32 = convolutions


@pytest.mark.parametrize(
    "make", [small_conv_net, lambda: SmallAttention(WIDTH)], ids=["convolutions", "attention"]
)
def test_tf32(device, tf32, make):
    torch.manual_seed(0)
    model, shape = make().to(device), (3, 8, 8) if make is small_conv_net else (16, WIDTH)
    assert_subset_gradients(model, torch.randn(64, *shape, device=device), share=1e-2, strict=True)
    training = SmallTraining(SelectiveBackprop(keep=0.5), device, forward_passes="once").train()
    assert training.run.cost.backward < training.run.cost.forward


@needs_cuda
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (FullData(), {}),
        ("infobatch", {}),
        (SelectiveBackprop(keep=0.5), {"forward_passes": "once"}),
    ],
)
def test_a_scaled_loss_of_half_precision(device, method, settings):
    net, losses = network(device), []
    optimizer, scaler = (
        torch.optim.AdamW(net.parameters(), 1e-2, fused=True),
        torch.amp.GradScaler("cuda"),
    )
    loader = thresher.TensorLoader(X.to(device), Y.to(device), batch_size=16)
    given = {
        "loader": loader,
        "criterion": nn.CrossEntropyLoss(),
        "model": net,
        "optimizer": optimizer,
    }
    run = thresher.attach(method, epochs=8, **given, **settings)
    for _ in range(8):
        for x, y in run.loader:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = run.criterion(run.model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.detach())
    assert run.cost.steps > 0 and torch.stack(losses[-6:]).mean() < torch.stack(losses[:6]).mean()
    assert bool(torch.isfinite(run.records["loss"]).all()) if "loss" in run.records else True


@needs_cuda
def test_compiled_models(device):
    """Compiled graphs of both passes, and a compiled model that is attached."""
    torch.manual_seed(0)
    x = torch.randn(12, 16, WIDTH, device=device)
    assert_subset_gradients(
        SmallAttention(WIDTH).to(device),
        x,
        dtype=torch.bfloat16,
        share=5e-2,
        strict=True,
        compile=True,
    )
    for method, settings in (
        (FullData(), {}),
        (SelectiveBackprop(keep=0.5), {"forward_passes": "once"}),
    ):
        net = network(device, dropout=0.0)
        training = SmallTraining(
            method, device, model=torch.compile(net), epochs=2, **settings
        ).train()
        assert bool(torch.isfinite(torch.stack(training.losses)).all())


@pytest.fixture
def deterministic(monkeypatch):
    """Refuses operations that add up in another order each time; cuBLAS reads the variable when it is first used."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (FullData(), {"observe": True}),
        (0.5, {}),
        ("infobatch", {}),
        ("kakurenbo", {}),
        (SelectiveBackprop(keep=0.5), {"forward_passes": "once"}),
        (SelectiveBackprop(beta=1.0), {"forward_passes": "once"}),
        ("ada_selection", {"forward_passes": "once"}),
        ("threshold_keep", {"forward_passes": "once"}),
        ("batch_importance:keep=0.5", {"forward_passes": "once"}),
        (SelectiveBackprop(keep=0.5), {"forward_passes": "twice"}),
    ],
)
def test_deterministic_algorithms(device, deterministic, method, settings):
    both = [SmallTraining(method, device, epochs=2, **settings).train() for _ in range(2)]
    assert both[0].ids == both[1].ids
    assert_same(both[0].result(), both[1].result())


OPTIMIZERS = {
    "sgd, foreach": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, foreach=True),
    "sgd, fused": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, fused=True),
    "adamw, foreach": functools.partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "adamw, fused": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_and_foreach_optimizers_count_their_steps(device, name):
    weights = []
    for attached in (False, True):
        net = network(device, dropout=0.0)
        optimizer = OPTIMIZERS[name](net.parameters())
        loader, call, criterion = (
            thresher.TensorLoader(X.to(device), Y.to(device), batch_size=16),
            net,
            nn.CrossEntropyLoss(),
        )
        if attached:
            given = {"loader": loader, "criterion": criterion, "model": net, "optimizer": optimizer}
            run = thresher.attach(FullData(), epochs=2, **given)
            loader, call, criterion = run.loader, run.model, run.criterion
        torch.manual_seed(2)
        for _ in range(2):
            for x, y in loader:
                criterion(call(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        weights.append(net.state_dict())
    assert_same(*weights)
    assert run.cost.steps == 12 and run.cost.backward == 2 * len(X)


@needs_cuda
@pytest.mark.parametrize("kind", ["host", "tensors"])
def test_a_model_that_moves_after_attach_works_or_the_error_names_the_devices(device, kind):
    net = network(torch.device("cpu"))
    loader = SmallTraining(None, device, kind=kind).loader
    run = thresher.attach(
        "infobatch", loader=loader, criterion=nn.CrossEntropyLoss(), model=net, epochs=1
    )
    net.to(device)
    x, y = next(iter(run.loader))
    said = ""
    try:
        run.criterion(run.model(x.to(device)), y.to(device)).backward()
        losses = run.records["loss"]
        assert bool(torch.isfinite(losses[run.ids.to(losses.device)]).all())
    except thresher.AttributionError as error:
        said = str(error)
    assert not said or ("cpu" in said and str(DEVICE) in said)
