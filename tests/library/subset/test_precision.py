"""Half precision: models under autocast, and those with parameters of bfloat16 or float16."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import thresher
from depth import depth
from thresher.subset import kept_rows, subset_backward
from thresher.subset import mixing as examining

N, T, D = 12, 10, 32
ROWS = torch.tensor([1, 4, 7, 11])


class Pooled(nn.Module):
    """Scores of ten classes from the mean over the positions of a body's outputs."""

    def __init__(self, body):
        super().__init__()
        self.body, self.head = body, nn.Linear(D, 10)

    def forward(self, x):
        return self.head(self.body(x).mean(1))


def encoder(dropout, *, first, activation="relu"):
    layer = nn.TransformerEncoderLayer(
        D, 4, 4 * D, dropout, activation, batch_first=True, norm_first=first
    )
    return Pooled(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))

    def forward(self, x):
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


def rotated(x):
    half = x.shape[-1] // 2
    angles = torch.outer(
        torch.arange(x.shape[-2]).float(), 1e4 ** (-torch.arange(half).float() / half)
    )
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class LlamaBlock(nn.Module):
    """RMSNorm, rotary embedding, causal attention and SwiGLU."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([RMSNorm(), RMSNorm()])
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.gate, self.up, self.down = (
            nn.Linear(*s, bias=False) for s in ((D, 2 * D), (D, 2 * D), (2 * D, D))
        )

    def forward(self, x):
        heads = [
            part.unflatten(-1, (4, -1)).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        ]
        mixed = F.scaled_dot_product_attention(
            rotated(heads[0]), rotated(heads[1]), heads[2], is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def images():
    return torch.randn(N, 3, 8, 8)


def sequences():
    return torch.randn(N, T, D)


def conv():
    return nn.Sequential(
        *(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.BatchNorm2d(8),
        ),
        *(nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)),
    )


MODELS = {
    "linear": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 10)),
        images,
    ),
    "conv, batch norm": (conv, images),
    "layer norm, dropout": (
        lambda: nn.Sequential(
            nn.Flatten(),
            nn.Linear(192, 64),
            nn.LayerNorm(64),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(64, 10),
        ),
        images,
    ),
    "encoder": (lambda: encoder(0.0, first=False), sequences),
    "encoder, dropout": (lambda: encoder(0.1, first=False), sequences),
    "encoder, norm first": (lambda: encoder(0.1, first=True, activation="gelu"), sequences),
    "llama": (lambda: Pooled(nn.Sequential(LlamaBlock(), LlamaBlock())), sequences),
}
DROPS = {"layer norm, dropout", "encoder, dropout", "encoder, norm first"}


def made(name, seed, dtype=torch.float32):
    build, data = MODELS[name]
    torch.manual_seed(seed)
    return build().train().to(dtype), data().to(dtype), torch.randint(10, (N,))


def gradients(model, x, y, *, autocast=None, subset=False):
    """Gradients of the loss of four of twelve samples, in float64."""
    torch.manual_seed(7)
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        outputs = model(x)
        outputs = kept_rows(outputs, ROWS) if subset else outputs[ROWS]
        F.cross_entropy(outputs.float(), y[ROWS]).backward()
    return [parameter.grad.double() for parameter in model.parameters()]


def error(found, wanted):
    """Largest difference, as a share of the largest gradient of the parameter, or of a hundredth of the largest of all."""
    largest = max(float(one.abs().max()) for one in wanted)
    return max(
        float((a - b).abs().max()) / max(float(b.abs().max()), 0.01 * largest)
        for a, b in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize(
    ("name", "mode"),
    depth(
        [
            ("linear", "parameters"),
            ("encoder, dropout", "autocast"),
            ("llama", "autocast"),
            ("conv, batch norm", "autocast"),
        ],
        [*itertools.product(MODELS, ["autocast", "parameters"])],
    ),
)
def test_no_model_is_refused_and_the_gradients_are_those_of_the_model(name, mode):
    for seed in range(depth(1, 20)):
        dtype, autocast = (
            (torch.float32, torch.bfloat16) if mode == "autocast" else (torch.bfloat16, None)
        )
        model, x, y = made(name, seed, dtype)
        own = gradients(
            subset_backward(copy.deepcopy(model), strict=True), x, y, autocast=autocast, subset=True
        )
        if name == "conv, batch norm":
            continue  # the kept rows are taken for the whole batch
        plain = gradients(copy.deepcopy(model), x, y, autocast=autocast)
        assert error(own, plain) < 0.03, (seed, error(own, plain))
        if name not in DROPS:
            exact = gradients(copy.deepcopy(model).double(), x.double(), y)
            assert error(own, exact) <= 1.25 * error(plain, exact) + 1e-6


SEEN_IN = ["linear", "encoder", "encoder, dropout", "llama", "layer norm, dropout"]


@pytest.mark.parametrize(
    ("name", "mode"),
    depth(
        [("linear", "float32"), ("linear", "autocast"), ("encoder, dropout", "parameters")],
        [*itertools.product(SEEN_IN, ["autocast", "parameters", "float32"])],
    ),
)
def test_a_mistake_of_one_percent_is_seen(name, mode, monkeypatch):
    """It is planted in the gradient of one parameter, another one for each seed, for each number of rows."""
    plain = examining.run_backward

    def mistaken(graphs, saved, tangents, rows, n, *rest):
        found = list(plain(graphs, saved, tangents, rows, n, *rest))
        of_parameters = [
            i
            for i, source in enumerate(graphs.grads)
            if source is not None and source[0] == "param"
        ]
        place = max(
            of_parameters, key=lambda i: float(found[i].abs().max()) * (1 if seed % 2 else 1 + i)
        )
        wrong = found[place].clone()
        wrong.view(-1)[seed] += 0.01 * max(float(found[i].abs().max()) for i in of_parameters)
        found[place] = wrong
        return found

    monkeypatch.setattr(examining, "run_backward", mistaken)
    for seed in range(depth(1, 10)):
        model, x, y = made(name, seed, torch.bfloat16 if mode == "parameters" else torch.float32)
        with pytest.raises(
            RuntimeError,
            match=r"gradients of some rows differ from those of the batch by a relative",
        ):
            gradients(
                subset_backward(model, strict=True),
                x,
                y,
                autocast=torch.bfloat16 if mode == "autocast" else None,
                subset=True,
            )


def test_parameters_of_float16():
    model, x, y = made("linear", 0, torch.float16)
    own = gradients(subset_backward(copy.deepcopy(model), strict=True), x, y, subset=True)
    assert error(own, gradients(model, x, y)) < 0.01


class Islands(nn.Module):
    """Autocast inside of the forward, and a part in which it is off."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(192, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.seen = []

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = self.a(x.flatten(1)).relu()
            with torch.autocast("cpu", enabled=False):
                z = self.b(y.float()).tanh()
            return self.c(z)


def test_autocast_inside_of_the_forward_and_islands_without_it():
    torch.manual_seed(0)
    model, x, y = Islands(), images(), torch.randint(10, (N,))
    wrapped = subset_backward(copy.deepcopy(model), strict=True)
    assert wrapped(x).dtype == model(x).dtype == torch.bfloat16
    assert error(gradients(wrapped, x, y, subset=True), gradients(model, x, y)) < 0.01


def test_autocast_around_the_loss_only():
    model, x, y = made("encoder", 0)
    wrapped = subset_backward(copy.deepcopy(model), strict=True)

    def loss(of, *, subset):
        outputs = of(x)
        with torch.autocast("cpu", torch.bfloat16):
            value = F.cross_entropy(kept_rows(outputs, ROWS) if subset else outputs[ROWS], y[ROWS])
        value.backward()
        return [parameter.grad for parameter in of.parameters()]

    assert error(loss(wrapped, subset=True), loss(model, subset=False)) < 1e-5


def test_a_trace_with_and_one_without_autocast_are_told_apart():
    model, x, y = made("linear", 0)
    wrapped = subset_backward(copy.deepcopy(model), strict=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert wrapped(x).dtype == torch.bfloat16
    assert wrapped(x).dtype == torch.float32
    for autocast in (torch.bfloat16, None):
        own, plain = copy.deepcopy(model), copy.deepcopy(model)
        wrapped.load_state_dict(own.state_dict())
        wrapped.zero_grad()
        assert (
            error(
                gradients(wrapped, x, y, autocast=autocast, subset=True),
                gradients(plain, x, y, autocast=autocast),
            )
            < 0.01
        )


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("method", [thresher.FullData(), thresher.SelectiveBackprop(keep=0.5)])
def test_losses_and_records_under_autocast_are_those_of_the_same_outputs_in_float32(method, inside):
    torch.manual_seed(0)
    x, y = torch.randn(24, 6), torch.arange(24) % 3
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    run = thresher.attach(
        [thresher.Kakurenbo(), method]
        if isinstance(method, thresher.SelectiveBackprop)
        else thresher.Kakurenbo(),
        loader=DataLoader(TensorDataset(x, y), 8),
        criterion=nn.CrossEntropyLoss(),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.0),
        epochs=2,
    )
    for inputs, targets in run.loader:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = run.model(inputs)
            value = run.criterion(outputs, targets) if inside else None
        assert outputs.dtype == torch.bfloat16
        value = run.criterion(outputs.float(), targets) if value is None else value
        losses = F.cross_entropy(outputs.detach().float(), targets, reduction="none")
        assert value.dtype == torch.float32
        kept = (
            losses.topk(len(losses) // 2).values
            if isinstance(method, thresher.SelectiveBackprop)
            else losses
        )
        assert torch.allclose(value, kept.mean(), rtol=1e-5)
        value.backward()
        probs = outputs.detach().float().softmax(1)
        assert torch.allclose(run.records["loss"][run.ids], losses, rtol=1e-5)
        assert torch.allclose(run.records["confidence"][run.ids], probs.amax(1), rtol=2e-2)
    assert run.cost.backward == (12 if isinstance(method, thresher.SelectiveBackprop) else 24)


def test_a_gradient_scaler():
    """A loss of float16 is scaled; a step whose gradients are not finite is left out, and counts none."""
    torch.manual_seed(0)
    x, y = torch.randn(24, 6), torch.arange(24) % 3
    model = nn.Linear(6, 3)
    optimizer, scaler = (
        torch.optim.SGD(model.parameters(), 0.1),
        torch.amp.GradScaler("cpu", init_scale=2.0**8),
    )
    run = thresher.attach(
        thresher.SelectiveBackprop(keep=0.5),
        loader=DataLoader(TensorDataset(x, y), 8),
        criterion=nn.CrossEntropyLoss(),
        model=model,
        optimizer=optimizer,
        epochs=1,
    )
    for inputs, targets in run.loader:
        with torch.autocast("cpu", torch.float16):
            loss = run.criterion(run.model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert (run.cost.backward, run.cost.steps, run.model.module.fallback) == (12, 3, None)


def test_a_constant_of_half_precision_that_is_read_twice():
    """The check in float32 puts the constant back as it was."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.head = nn.Linear(8, 3)
            self.scales = [torch.rand(8, dtype=torch.bfloat16)]

        def forward(self, x):
            [scale] = self.scales
            return self.head(torch.tanh(self.layer(x) * scale) * scale)

    model = subset_backward(Scaled().bfloat16())
    assert model(torch.randn(12, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert model.fallback is None
