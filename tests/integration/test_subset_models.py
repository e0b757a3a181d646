"""Gradients of whole models, with a loss of some samples, against those of the plain model."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from depth import depth
from subset_cases import (
    Calls,
    Causal,
    ConvNeXtBlock,
    Recurrent,
    SqueezeExcite,
    UNet,
    ViT,
    conv_net,
    numbers,
    optional,
    same_as_plain,
    tokens,
    traced,
    wrap,
)

IMAGES = numbers(6, 3, 8, 8)
SEQUENCES = numbers(6, 3, 4)
IDS = tokens(6, 4)
CAUSAL = torch.ones(4, 4, dtype=torch.bool).tril()


class Checkpointed(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 6))
        self.outer = nn.Linear(6, 3)

    def forward(self, x):
        return self.outer(checkpoint(self.inner, x, use_reentrant=False))


MODELS = {
    "conv": (conv_net, (IMAGES,), {}),
    "conv channels_last": (conv_net, (IMAGES.to(memory_format=torch.channels_last),), {}),
    "convnext block": (ConvNeXtBlock, (numbers(6, 6, 5, 5),), {}),
    "vit": (ViT, (IMAGES,), {}),
    "vit with dropout": (lambda: ViT(dropout=0.3), (IMAGES,), {}),
    "causal sdpa": (lambda: Causal("sdpa"), (IDS,), {}),
    "causal sdpa with dropout": (lambda: Causal("sdpa", dropout=0.3), (IDS,), {}),
    "causal with a mask of its own": (lambda: Causal("inside"), (IDS,), {}),
    "causal with a mask given": (lambda: Causal("argument"), (IDS,), {"mask": CAUSAL}),
    "causal with a mask given of the size of the batch": (
        lambda: Causal("argument"),
        (tokens(4, 4), CAUSAL),
        {},
    ),
    "lstm": (lambda: Recurrent(nn.LSTM, batch_first=True), (SEQUENCES,), {}),
    "lstm time-major": (lambda: Recurrent(nn.LSTM, batch_first=False), (SEQUENCES,), {}),
    "gru": (lambda: Recurrent(nn.GRU, batch_first=True), (SEQUENCES,), {}),
    "gru time-major": (lambda: Recurrent(nn.GRU, batch_first=False), (SEQUENCES,), {}),
    "unet": (UNet, (IMAGES,), {}),
    "squeeze-excite": (SqueezeExcite, (IMAGES,), {}),
    "embeddings": (
        lambda: nn.Sequential(nn.Embedding(11, 4, padding_idx=0), nn.Flatten(), nn.Linear(16, 3)),
        (IDS,),
        {},
    ),
    "checkpoint": (lambda: Checkpointed(0.0), (numbers(6, 6),), {}),
    "instance norm": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.Flatten()),
        (IMAGES,),
        {},
    ),
    "batch norm in evaluation": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4).eval(), nn.Flatten()),
        (IMAGES,),
        {},
    ),
    "fft": (lambda: Calls(lambda m, x: torch.fft.rfft(m.linear(x)).abs()), (numbers(6, 6),), {}),
}


ELSEWHERE = (
    "conv",
    "causal with a mask of its own",
    "lstm time-major",
)  # in tests/property/test_subset_backward.py
SIMILAR = (
    "vit",
    "vit with dropout",
    "causal sdpa",
    "causal with a mask given",
    "lstm",
    "gru",
    "gru time-major",
)


@pytest.mark.parametrize(
    "name", depth([name for name in MODELS if name not in (*ELSEWHERE, *SIMILAR)], MODELS)
)
def test_gradients_are_those_of_the_plain_model(name) -> None:
    make, args, kwargs = MODELS[name]
    torch.manual_seed(1)
    sub = wrap(make())
    n = len(args[0])
    for rows in ([0, 2], [], [n - 1], list(range(n))):
        same_as_plain(sub, *args, rows=rows, **kwargs)
    same_as_plain(
        sub,
        *args,
        rows=[0, n - 1],
        loss=lambda out, rows: out[rows].flatten(1).logsumexp(1).mean(),
        **kwargs,
    )
    assert traced(sub) == 1


class FewKeys(nn.Module):
    """Attention of 4 heads that share fewer keys and values, as in language models, or a mask that is shown to every head."""

    def __init__(self, keys: int, *, reshape: bool = True, mask: str = "") -> None:
        super().__init__()
        self.keys, self.reshape, self.mask = keys, reshape, mask
        self.query, self.both, self.head = (
            nn.Linear(4, 16),
            nn.Linear(4, 8 * keys),
            nn.Linear(16, 3),
        )
        self.bias = nn.Parameter(torch.randn(1, 4, 1, 3))

    def forward(self, x):
        n, t, _ = x.shape
        query = self.query(x).view(n, t, 4, 4).transpose(1, 2)
        pair = (
            self.both(x)
            .view(n, t, self.keys, 8)
            .transpose(1, 2)[:, :, None]
            .expand(n, self.keys, 4 // self.keys, t, 8)
        )
        key, value = (pair.reshape(n, 4, t, 8) if self.reshape else pair[:, 0]).split(4, 3)
        mask = None
        if self.mask == "rows":
            mask = (
                (x[..., 0] > -1)[:, None, None, :]
                .logical_or(torch.eye(t, dtype=torch.bool))
                .expand(n, 4, t, t)
            )
        elif self.mask == "positions":
            mask = self.bias.expand(n, 4, t, t)
        found = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.head(found.transpose(1, 2).flatten(2))


class ExpandedEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.linear = nn.Embedding(11, 6), nn.Linear(6, 6)

    def forward(self, ids):
        h = self.embed(ids[:, 0])[:, None].expand(-1, 4, -1)
        return h.tanh() * self.linear(h).sigmoid() + h.softmax(2) * h


EXPANDED = {
    "one key": lambda: FewKeys(1),
    "one key, not reshaped": lambda: FewKeys(1, reshape=False),
    "two keys": lambda: FewKeys(2),
    "one key and a mask of the rows": lambda: FewKeys(1, mask="rows"),
    "a bias of the positions": lambda: FewKeys(1, mask="positions"),
    "an embedding": ExpandedEmbedding,
}


@pytest.mark.parametrize("name", EXPANDED)
def test_values_that_are_expanded(name) -> None:
    torch.manual_seed(1)
    sub = wrap(EXPANDED[name]())
    for rows in ([0, 2], [5], []):
        same_as_plain(sub, IDS if name == "an embedding" else SEQUENCES, rows=rows)
    assert sub.fallback is None and traced(sub) == 1


def test_a_loss_for_every_pixel() -> None:
    sub, target = wrap(UNet()), torch.randint(0, 2, (6, 8, 8))

    def loss(out, rows):
        each = nn.functional.cross_entropy(out, target, reduction="none").mean((1, 2))
        return (each * torch.isin(torch.arange(6), rows)).sum() / 6

    same_as_plain(sub, IMAGES, rows=[1, 4], loss=loss)


def test_outputs_with_positions_merged_into_the_batch() -> None:
    causal = Causal("sdpa").double()
    for moved in (False, True):
        order = (1, 0, 2) if moved else (0, 1, 2)
        sub = wrap(Calls(lambda m, x, order=order: causal_like(m, x).permute(order).reshape(-1, 6)))
        sub.wrapped.block = causal.attention

        def loss(out, rows, moved=moved):
            parts = out.view(5, 7, 6).transpose(0, 1) if moved else out.view(7, 5, 6)
            return (parts * numbers(7, 5, 6, seed=3))[rows].square().sum()

        same_as_plain(sub, numbers(7, 5, 6), rows=[1, 2, 6], loss=loss)


def causal_like(model, x: Tensor) -> Tensor:
    h = model.linear(x)
    return (h @ h.transpose(1, 2)).softmax(2) @ h


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_a_mask_in_positions_first_order_that_was_all_ones_when_it_was_traced(dtype) -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.linear = nn.Embedding(11, 6), nn.Linear(6, 6)

        def forward(self, ids, mask):
            h = self.embed(ids).transpose(0, 1).reshape(-1, 6)
            h = self.linear(h).tanh() * mask.t().reshape(-1, 1)
            h = h * mask[:, 0].repeat(ids.shape[1])[:, None]
            return h.view(ids.shape[1], ids.shape[0], 6).transpose(0, 1)

    sub, ids = wrap(Inside()), tokens(8, 5)
    mask = torch.ones(8, 5, dtype=dtype)
    same_as_plain(sub, ids, mask, rows=[0, 2, 5])
    padded = mask.clone()
    padded[0, 3:], padded[1, 1:], padded[3], padded[5, 2:] = 0, 0, 0, 0
    same_as_plain(sub, ids, padded, rows=[0, 2, 5])
    assert traced(sub) == 1


@dataclasses.dataclass
class Batch:
    x: Tensor
    more: dict[str, Any]
    scale: float = 1.0


def test_nested_inputs_and_outputs() -> None:
    def run(model, batch, pair, *, extra=None):
        h = model.linear(batch.x) * batch.scale + batch.more["bias"]
        g = h * pair[0][:, None] + (0 if extra is None else extra["z"][0])
        return {
            "h": h,
            "pair": (g.tanh(), [g.sum(1)]),
            "batch": Batch(g.exp(), {"note": "text"}),
            "none": None,
            "ids": pair[1],
        }

    sub = wrap(Calls(run))
    batch = Batch(numbers(7, 6), {"bias": numbers(6)}, 2.0)
    same_as_plain(
        sub, batch, (numbers(7), tokens(7)), rows=[1, 3], extra={"z": (numbers(7, 6, seed=4),)}
    )
    found = sub(batch, (numbers(7), tokens(7)))
    assert (
        isinstance(found["batch"], Batch)
        and found["batch"].more == {"note": "text"}
        and found["none"] is None
    )
    assert torch.equal(found["ids"], tokens(7)) and not found["ids"].requires_grad
    assert traced(sub) == 2


def test_several_outputs_of_which_some_carry() -> None:
    sub = wrap(Calls(lambda m, x: (m.linear(x).tanh(), m.linear(x.sin()), m.linear(x).detach(), x)))
    for which in ([0], [1], [0, 1]):
        loss = lambda out, rows, which=which: sum(out[i][rows].square().sum() for i in which)  # noqa: E731
        same_as_plain(sub, numbers(7, 6), rows=[0, 5], loss=loss)
    same_as_plain(
        sub,
        numbers(7, 6),
        rows=[0, 5],
        loss=lambda out, rows: out[0][rows].sum() + out[1][6].square().sum(),
    )
    assert [out.requires_grad for out in sub(numbers(7, 6))] == [True, True, False, False]


def test_a_parameter_that_no_loss_reached_has_no_gradient() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x):
            return self.a(x), self.b(x)

    sub = wrap(Heads())
    for rows in ([1, 2], []):
        sub.zero_grad()
        sub(numbers(7, 6))[0][torch.tensor(rows, dtype=torch.int64)].sum().backward()
        assert sub.a.weight.grad is not None and sub.b.weight.grad is None


def test_an_output_without_samples_costs_the_whole_batch_and_is_exact() -> None:
    sub = wrap(
        Calls(
            lambda m, x: (m.linear(x).tanh(), m.linear(x).square().mean(), m.linear.weight.norm())
        )
    )
    for loss in (
        lambda out, rows: out[1],
        lambda out, rows: out[2] + out[0][rows].square().sum(),
        lambda out, rows: out[0][rows].square().sum() + 0.3 * out[1],
    ):
        same_as_plain(sub, numbers(7, 6), rows=[2, 3], loss=loss)


def test_samples_in_another_dimension_of_an_output() -> None:
    sub = wrap(Calls(lambda m, x: m.linear(x).transpose(0, 1)))
    same_as_plain(
        sub, numbers(7, 5, 6), rows=[2, 3], loss=lambda out, rows: out[:, rows].square().sum()
    )


def test_inputs_that_require_gradients() -> None:
    sub = wrap(Calls(lambda m, x, shared: (m.linear(x) * shared).tanh()))
    x, shared = numbers(7, 6).requires_grad_(), numbers(6, seed=2).requires_grad_()
    same_as_plain(sub, x, shared, rows=[0, 4])
    assert not x.grad[1].any() and x.grad[4].any() and shared.grad.any()
    same_as_plain(sub, x, shared, rows=[])
    earlier = nn.Linear(6, 6).double()
    sub(earlier(numbers(7, 6)), shared)[[0, 4]].sum().backward()
    assert earlier.weight.grad.any()


def test_inputs_whose_memory_is_in_another_order() -> None:
    def run(model, x):
        return model.linear(x) * x.contiguous().as_strided((x.shape[0], 6), (6, 1))

    same_as_plain(wrap(Calls(run)), numbers(6, 7).t(), rows=[0, 4])
    same_as_plain(wrap(Calls(run)), numbers(7, 12)[:, ::2], rows=[0, 4])
    same_as_plain(wrap(Calls(run)), numbers(7, 1).expand(7, 6), rows=[0, 4])


def test_tied_frozen_and_shared_parts() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.frozen = (
                nn.Linear(6, 6),
                nn.Linear(6, 6),
                nn.Linear(6, 6).requires_grad_(False),
            )
            self.b.weight = self.a.weight
            self.again = self.a

        def forward(self, x):
            return self.again(self.frozen(self.b(self.a(x)).tanh()))

    same_as_plain(wrap(Shared()), numbers(7, 6), rows=[0, 4])


def test_a_recurrent_layer_under_two_names() -> None:
    model = Recurrent(nn.GRU, batch_first=True)
    model.again = model.layers
    same_as_plain(wrap(model), SEQUENCES, rows=[0, 4])


@pytest.mark.parametrize("kind", ["spectral_norm", "weight_norm", "orthogonal"])
def test_parametrizations(kind) -> None:
    part = getattr(nn.utils.parametrizations, kind)(nn.Linear(6, 6))
    sub = wrap(nn.Sequential(part, nn.Tanh()), strict=kind != "orthogonal")
    for _ in range(2):
        same_as_plain(sub, numbers(7, 6), rows=[0, 4])


@pytest.mark.parametrize(
    ("kind", "attention", "dropout"),
    depth(
        [("gpt2", "eager", 0.2)],
        [
            ("bert", "eager", 0.2),
            ("bert", "sdpa", 0.0),
            ("gpt2", "eager", 0.2),
            ("gpt2", "sdpa", 0.0),
        ],
    ),
)
def test_hugging_face(kind, attention, dropout) -> None:
    optional("torchvision")
    transformers = optional("transformers")
    common = {"vocab_size": 50, "attn_implementation": attention}
    torch.manual_seed(0)
    if kind == "bert":
        config = transformers.BertConfig(
            **common,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=16,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            problem_type="single_label_classification",  # else the first call with labels sets it, which a trace does not
        )
        model = transformers.BertForSequenceClassification(config)
    else:
        size = {
            "n_embd": 8,
            "n_layer": 1,
            "n_head": 2,
            "n_positions": 16,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
        drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**common, **size, **drop))
    sub = wrap(model.train())
    ids, mask = tokens(6, 9, vocabulary=50), torch.ones(6, 9, dtype=torch.int64)
    keep = {} if kind == "bert" else {"use_cache": False}

    def loss(out, rows):
        return out.logits[rows].flatten(1).logsumexp(1).sum()

    same_as_plain(sub, ids, rows=[0, 5], loss=loss, attention_mask=mask, **keep)
    padded = mask.clone()
    padded[2, 5:], padded[5, 3:] = 0, 0
    same_as_plain(sub, ids, rows=[0, 5], loss=loss, attention_mask=padded, **keep)
    found = sub(ids, attention_mask=padded, labels=ids if kind == "gpt2" else ids[:, 0] % 2)
    plain = sub.wrapped(ids, attention_mask=padded, labels=ids if kind == "gpt2" else ids[:, 0] % 2)
    assert type(found) is type(plain) and (dropout or torch.equal(found.loss, plain.loss))
    if kind == "gpt2":
        assert plain.past_key_values is not None and found.past_key_values is None
    assert sub.fallback is None


@pytest.mark.parametrize(
    "name",
    depth(
        ["vit_tiny_patch16_224", "convnext_atto"],
        ["vit_tiny_patch16_224", "convnext_atto", "resnet18"],
    ),
)
def test_timm_and_torchvision(name) -> None:
    torchvision = optional("torchvision")
    torch.manual_seed(0)
    if name == "resnet18":
        sub = wrap(torchvision.models.resnet18(num_classes=5).eval())
    elif name == "convnext_atto":
        model = optional("timm").create_model(
            name, num_classes=5, depths=(1, 1, 1, 1), dims=(8, 16, 16, 16), drop_path_rate=0.2
        )
        sub = wrap(model)
    else:
        sub = wrap(
            optional("timm").create_model(name, img_size=32, patch_size=8, depth=2, num_classes=5)
        )
    same_as_plain(sub, numbers(5, 3, 32, 32), rows=[0, 2])
    same_as_plain(sub, numbers(7, 3, 32, 32), rows=[6])
    assert traced(sub) == 1
