"""Shorter graphs: what is rewritten, that nothing changes, and that a wrong rewrite is not used."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from depth import depth
from thresher.subset import kept_rows, making, subset_backward
from thresher.subset.graphs import aten

N, T, D = 10, 8, 32


class Pooled(nn.Module):
    def __init__(self, body, *, time_first=False):
        super().__init__()
        self.body, self.head, self.time_first = body, nn.Linear(D, 5), time_first

    def forward(self, x, **masks):
        x = self.body(x.transpose(0, 1) if self.time_first else x, **masks)
        return self.head(x.mean(0 if self.time_first else 1))


def encoder(dropout=0.1, *, activation="relu", first=False, batch_first=True):
    layer = nn.TransformerEncoderLayer(
        D, 4, 2 * D, dropout, activation, batch_first=batch_first, norm_first=first
    )
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Cross(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(D, 4, 2 * D, 0.1, batch_first=True)

    def forward(self, x):
        return self.layer(x[:, : T // 2], x[:, T // 2 :])


class Causal(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            D, 4, 2 * D, 0.1, "gelu", batch_first=True, norm_first=True
        )
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(T))

    def forward(self, x):
        padding = torch.zeros_like(x[:, :, 0]).masked_fill(
            (x[:, :, 0] > 1) & (torch.arange(T) > 2), -9
        )
        return self.layer(x, src_mask=self.mask.to(x.dtype), src_key_padding_mask=padding)


MODELS = {
    "dropout": lambda: Pooled(encoder()),
    "no dropout": lambda: Pooled(encoder(0.0)),
    "gelu, norm first": lambda: Pooled(encoder(activation="gelu", first=True)),
    "time first": lambda: Pooled(encoder(batch_first=False), time_first=True),
    "cross attention": lambda: Pooled(Cross()),
    "masks": lambda: Pooled(Causal()),
    "convolutions": lambda: nn.Sequential(
        *(
            nn.Unflatten(1, (2, T // 2)),
            nn.Conv2d(2, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
        ),
        *(nn.Dropout(0.2), nn.Flatten(), nn.Linear(4 * (T // 2) * D, 5)),
    ),
}


def trained(model, x, y, rows):
    """One step: outputs, gradients and the random state after it."""
    torch.manual_seed(3)
    outputs = model(x)
    F.cross_entropy(kept_rows(outputs, rows), y[rows]).backward()
    return [
        outputs.detach(),
        *(parameter.grad for parameter in model.parameters()),
        torch.get_rng_state(),
    ]


@pytest.mark.parametrize("dtype", depth([torch.float32], [torch.float32, torch.float64]))
@pytest.mark.parametrize("name", depth(["cross attention", "masks"], [*MODELS]))
def test_shorter_graphs_give_the_same_bits(name, dtype, monkeypatch):
    torch.manual_seed(0)
    model, x, y = (
        MODELS[name]().to(dtype),
        torch.randn(N, T, D, dtype=dtype),
        torch.randint(5, (N,)),
    )
    shortened, found = making._shortened, []

    def noted(graphs, arguments):
        found.append((graphs, shortened(graphs, arguments)))
        return found[-1][1]

    monkeypatch.setattr(making, "_shortened", noted)
    rows = torch.tensor([0, 4, 9])
    own = trained(subset_backward(copy.deepcopy(model), strict=True), x, y, rows)
    before, after = found[0]
    assert after is not before, "the shorter graphs were not used"
    nodes = [
        len(one.forward_module.graph.nodes) + len(one.backward_module.graph.nodes)
        for one in (before, after)
    ]
    assert nodes[1] < nodes[0]
    monkeypatch.setattr(
        making, "simplify", lambda graphs: 1 / 0
    )  # an error in a rewrite leaves the graphs as they were
    longer = trained(subset_backward(copy.deepcopy(model), strict=True), x, y, rows)
    assert found[1][1] is found[1][0]
    assert all((a == b).all() for a, b in zip(own, longer, strict=True))


@pytest.mark.parametrize("wrong", depth(["gradient"], ["output", "gradient", "draw"]))
def test_a_wrong_rewrite_is_not_used(wrong, monkeypatch):
    torch.manual_seed(0)
    model, x, y = MODELS["dropout"](), torch.randn(N, T, D), torch.randint(5, (N,))
    simplify = making.simplify

    def mistaken(graphs):
        simplify(graphs)
        module = graphs.backward_module if wrong == "gradient" else graphs.forward_module
        for node in module.graph.nodes:
            if wrong == "draw" and node.op == "output":
                with module.graph.inserting_before(node):
                    module.graph.call_function(torch.rand, (1,))
            elif wrong != "draw" and node.target in (aten.mm.default, aten.addmm.default):
                with module.graph.inserting_after(node):
                    scaled = module.graph.call_function(aten.mul.Tensor, (node, 1.0001))
                scaled.meta["val"] = node.meta["val"]
                node.replace_all_uses_with(scaled, lambda user, own=scaled: user is not own)
                break
        module.recompile()

    found = []
    shortened = making._shortened
    monkeypatch.setattr(
        making,
        "_shortened",
        lambda *given: found.append((given[0], shortened(*given))) or found[-1][1],
    )
    monkeypatch.setattr(making, "simplify", mistaken)
    own = trained(subset_backward(copy.deepcopy(model), strict=True), x, y, torch.tensor([0, 4, 9]))
    assert found[0][0] is found[0][1]
    monkeypatch.setattr(making, "simplify", simplify)
    right = trained(subset_backward(model, strict=True), x, y, torch.tensor([0, 4, 9]))
    assert all((a == b).all() for a, b in zip(own, right, strict=True))


def test_no_copy_is_made_for_dropout_that_drops_nothing_and_the_packed_projection_is_stacked(
    monkeypatch,
):
    torch.manual_seed(0)
    shortened, found = making._shortened, []
    monkeypatch.setattr(
        making,
        "simplify",
        lambda graphs, plain=making.simplify: (plain(graphs), found.append(graphs)),
    )
    monkeypatch.setattr(making, "bind", lambda module: module.recompile() or module.forward)
    trained(
        subset_backward(MODELS["no dropout"](), strict=True),
        torch.randn(N, T, D),
        torch.randint(5, (N,)),
        torch.tensor([1]),
    )
    forward, backward = (
        [node.target for node in module.graph.nodes]
        for module in (found[0].forward_module, found[0].backward_module)
    )
    assert aten.clone.default not in forward and aten.select_backward.default not in backward
    assert backward.count(aten.stack.default) == 2
    assert shortened is making._shortened
