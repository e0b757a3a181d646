"""Sizes besides the batch that differ from call to call: one trace for all of them, where the model allows it."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from depth import depth
from subset_cases import Calls, Causal, Recurrent, ViT, numbers, same_as_plain, tokens, traced, wrap
from thresher.subset import kept_rows, making, mixing, subset_backward
from thresher.subset import trace_key as kinds
from thresher.subset.graphs import Graphs, Unsupported

ROWS = [1, 4]
LENGTHS = (5, 8, 3, 11, 7, 2, 20)


class Classifier(nn.Module):
    """Tokens with a mask of padding, merged with the batch in one layer, and a table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(11, 8), nn.Parameter(numbers(32, 8))
        self.block = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor, valid: Tensor) -> Tensor:
        n, length = ids.shape
        h = self.embed(ids.flatten()).tanh().view(n, length, 8) + self.place[:length]
        h = self.block(h, src_key_padding_mask=valid)
        return self.head((h * ~valid[:, :, None]).sum(1) / length)


def test_one_trace_holds_for_all_lengths_and_batches() -> None:
    torch.manual_seed(0)
    sub = wrap(Classifier())
    for n, length in zip((7, 7, 7, 9, 7, 6, 12), LENGTHS, strict=True):
        valid = torch.arange(length) >= 1 + torch.arange(n)[:, None] % length
        same_as_plain(sub, tokens(n, length), valid, rows=ROWS)
        same_as_plain(sub, tokens(n, length), valid, rows=range(n))
    assert traced(sub) == 2 and sub._patience.traces == 2 and sub.fallback is None
    ids = tokens(7, 13)
    outputs = kept_rows(sub(ids, torch.zeros(7, 13, dtype=torch.bool)), torch.tensor(ROWS))
    assert outputs.grad_fn is not None and outputs.shape == (2, 3)


@pytest.mark.parametrize("kind", depth(("argument",), ("argument", "inside", "sdpa")))
def test_outputs_and_shared_tensors_of_varying_length(kind) -> None:
    """Every token has an output, and a mask without a batch has the length twice."""
    torch.manual_seed(0)
    sub = wrap(Causal(kind))
    mask: list[Tensor] = []
    for length in LENGTHS:
        mask = [torch.ones(length, length, dtype=torch.bool).tril()] if kind == "argument" else []
        same_as_plain(sub, tokens(7, length), *mask, rows=ROWS)
    assert (
        traced(sub) == (3 if mask else 2) and sub.fallback is None
    )  # a mask as long as the batch could be of the batch


def test_tokens_merged_with_the_batch_in_the_output() -> None:
    sub = wrap(Calls(lambda m, x: m.linear(x).flatten(0, 1)))
    for n, length in ((7, 5), (7, 8), (8, 8), (6, 3)):
        x, rows = numbers(n, length, 6), torch.tensor(ROWS)
        found, expected = [], []
        for model, gradients in ((sub, found), (sub.wrapped, expected)):
            kept_rows(model(x), rows, n).square().sum().backward()
            gradients.extend(p.grad for p in sub.parameters())
            sub.zero_grad()
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert traced(sub) == 2


def test_a_batch_as_large_as_the_length() -> None:
    sub = wrap(Calls(lambda m, x: m.linear(x)))
    for n, length in ((7, 5), (8, 8), (4, 4), (9, 5)):
        same_as_plain(sub, numbers(n, length, 6), rows=[1, 3])
    assert traced(sub) == 2


def test_two_sizes_that_vary_and_were_equal_once() -> None:
    sub = wrap(Calls(lambda m, x, y: m.linear(x).sum(1) * m.linear(y).mean(1)))
    for a, b in ((3, 3), (5, 5), (6, 4), (7, 9), (8, 8)):
        same_as_plain(sub, numbers(7, a, 6), numbers(7, b, 6, seed=1), rows=ROWS)
    assert sub._patience.traces == 3


def test_a_length_of_one_has_its_own_trace() -> None:
    sub = wrap(nn.Linear(6, 3))
    for length in (4, 5, 1, 6, 1):
        same_as_plain(sub, numbers(7, length, 6), rows=ROWS)
    assert traced(sub) == 3


def test_a_dimension_that_never_varied_before() -> None:
    sub = wrap(nn.Conv2d(3, 2, 3, padding=1))
    for height, width in ((4, 6), (5, 6), (7, 6), (5, 8), (9, 11)):
        same_as_plain(sub, numbers(7, 3, height, width), rows=ROWS)
    assert sub._patience.traces == 3 and sub.fallback is None


REFUSED = {
    "a length in Python": lambda: Calls(lambda m, x: m.linear(x) * (2 if x.shape[1] == 5 else 3)),
    "a loop over the length": lambda: Calls(
        lambda m, x: sum(m.linear(x[:, i]) for i in range(x.shape[1]))
    ),
}


@pytest.mark.parametrize("name", depth(("a length in Python",), tuple(REFUSED)))
def test_models_that_need_to_know_the_length_use_the_plain_model(name) -> None:
    """After one attempt for all lengths; a length that comes up often gets its own trace."""
    sub = wrap(REFUSED[name](), strict=False)
    with pytest.warns(UserWarning, match="Pad inputs to few lengths") as caught:
        for length in (4, 5, 6, 7, 8, 9):
            same_as_plain(sub, numbers(7, length, 6), rows=ROWS)
    assert len(caught) == 1 and sub._patience.traces == 2 and traced(sub) == 1
    with warnings.catch_warnings(action="ignore"):
        for _ in range(kinds.CALLS_PER_TRACE):
            sub(numbers(7, 9, 6))
    assert traced(sub) == 2 and sub.fallback is None
    strict = wrap(REFUSED[name]())
    for length in (4, 5, 6):
        same_as_plain(strict, numbers(7, length, 6), rows=ROWS)
    assert traced(strict) == 3


def test_graphs_that_are_wrong_at_another_length_are_refused(monkeypatch) -> None:
    """The graphs are tried out with the length of the call and with a shorter one."""
    lengths = []

    def examined(graphs: Graphs, state: Any, tensors: list[Tensor], batched: list[bool]) -> None:
        lengths.append(tensors[0].shape[1])
        if graphs.lengths == (6,):
            raise Unsupported("it mixes the samples of a batch")
        mixing.examine(graphs, state, tensors, batched)

    monkeypatch.setattr(making, "examine", examined)
    sub = wrap(nn.Linear(6, 3), strict=False)
    same_as_plain(sub, numbers(7, 4, 6), rows=ROWS)
    with pytest.warns(UserWarning, match="Pad inputs to few lengths"):
        same_as_plain(sub, numbers(7, 10, 6), rows=ROWS)
    assert lengths == [4, 10, 6] and traced(sub) == 1


def test_first_shapes_of_old_kinds_are_forgotten(monkeypatch) -> None:
    monkeypatch.setattr(kinds, "MAX_REMEMBERED", 4)
    shapes = kinds.Shapes()
    for kind in range(50):
        assert not shapes.varying(kind, [torch.empty(3, 5)], 3)
    assert len(shapes._first) == 4
    assert shapes.varying(49, [torch.empty(4, 6)], 4) == [(0, 1)]
    assert (
        shapes.varying(49, [torch.empty(4, 1)], 4)
        == []
        == shapes.varying(49, [torch.empty(4, 5)], 4)
    )


def test_sizes_that_were_asked_for_are_forgotten_in_time(monkeypatch) -> None:
    monkeypatch.setattr("thresher.subset.graphs.MOST_SIZES", 3)
    sub = wrap(nn.Linear(6, 3))
    for n in range(2, 12):
        sub(numbers(n, 6))
    ((graphs,),) = sub._traces.values()
    assert len(graphs._valid) <= 3


@pytest.mark.skipif(not depth(False, True), reason="make verify")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("make", [Classifier, ViT], ids=["classifier", "vit"])
def test_compiled_graphs_hold_for_all_lengths(make) -> None:
    torch.manual_seed(0)
    model = make().double()
    sub = subset_backward(model, strict=True, compile=True)
    plain = subset_backward(model, strict=True, compile=False)
    for n, length in zip((7, 7, 7, 9, 7, 6, 12), LENGTHS, strict=True):
        given = (
            (tokens(n, length), torch.zeros(n, length, dtype=torch.bool))
            if make is Classifier
            else (numbers(n, 3, 8, 8),)
        )
        for rows in (ROWS, range(n), [2]):
            same_as_plain(sub, *given, rows=rows)
            same_as_plain(plain, *given, rows=rows)
    assert sub.compilations == (4 if make is Classifier else 2) and sub.fallback is None


@pytest.mark.skipif(not depth(False, True), reason="make verify")
def test_a_recurrent_layer_has_a_trace_for_each_length() -> None:
    sub = wrap(Recurrent(nn.LSTM, batch_first=True))
    for length in (3, 4, 3):
        same_as_plain(sub, numbers(7, length, 4), rows=ROWS)
    assert traced(sub) == 2
