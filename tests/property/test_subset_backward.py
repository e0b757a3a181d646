"""Any batch size, any kept set, widths that are as large as the batch or as a size that tracing uses."""

import functools

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from depth import depth
from subset_cases import Causal, Recurrent, conv_net, numbers, outcome, same_as_plain, tokens, wrap
from thresher.subset import kept_rows


def kept(n: int, kind: str, seed: int) -> torch.Tensor:
    drawing = torch.Generator().manual_seed(seed)
    if kind == "random":
        return (torch.rand(n, generator=drawing) < 0.4).nonzero().squeeze(1)
    count = {"none": 0, "one": 1, "all": n}[kind]
    return torch.randperm(n, generator=drawing)[:count].sort().values


KEPT = st.sampled_from(["none", "one", "all", "random"])
MODELS = {
    "conv": (conv_net, lambda n: (numbers(n, 3, 8, 8, seed=n),)),
    "causal": (lambda: Causal("inside"), lambda n: (tokens(n, 4, seed=n),)),
    "lstm": (lambda: Recurrent(nn.LSTM, batch_first=False), lambda n: (numbers(n, 3, 4, seed=n),)),
}


@functools.cache
def wrapped(name: str):
    torch.manual_seed(0)
    return wrap(MODELS[name][0]())


@pytest.mark.parametrize("name", MODELS)
@given(n=st.integers(1, 70), kind=KEPT, seed=st.integers(0, 9))
@settings(max_examples=depth(15, 40))
def test_gradients_are_those_of_the_plain_model(name, n, kind, seed) -> None:
    sub = wrapped(name)
    same_as_plain(sub, *MODELS[name][1](n), rows=kept(n, kind, seed))
    assert sub._patience.traces <= 2


@functools.cache
def perceptron(width: int):
    torch.manual_seed(width)
    return wrap(
        nn.Sequential(
            nn.Linear(width, width), nn.LayerNorm(width), nn.Tanh(), nn.Linear(width, width)
        )
    )


@given(n=st.integers(2, 16), which=st.sampled_from([0, 1, 2, 3]), kind=KEPT, seed=st.integers(0, 9))
@settings(max_examples=depth(1, 15))
@example(n=5, which=0, kind="one", seed=0)
@example(n=7, which=0, kind="random", seed=0)
def test_a_width_as_large_as_a_size_that_tracing_uses(n, which, kind, seed) -> None:
    width = (n, n + 1, n + 7, 2 * n + 1)[which]
    same_as_plain(perceptron(width), numbers(n, width, seed=seed), rows=kept(n, kind, seed))


@functools.cache
def masked_attention(length: int):
    torch.manual_seed(length)
    return wrap(Causal("argument"))


@given(length=st.integers(2, 6), more=st.sampled_from([0, 1, 3]), kind=KEPT)
@settings(max_examples=depth(1, 6))
@example(length=4, more=0, kind="one")
def test_a_mask_that_all_samples_share_with_as_many_rows_as_the_batch(length, more, kind) -> None:
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    n = length + more
    same_as_plain(masked_attention(length), tokens(n, length, seed=n), mask, rows=kept(n, kind, 1))


@given(n=st.integers(2, 40), kind=KEPT, seed=st.integers(0, 9))
@settings(max_examples=depth(10, 25))
def test_kept_rows_gives_what_indexing_gives(n, kind, seed) -> None:
    sub = wrapped("conv")
    rows, (x,) = kept(n, kind, seed), MODELS["conv"][1](n)
    by_index = outcome(sub, (x,), {}, rows, lambda out, rows: out[rows].square().sum())
    by_name = outcome(sub, (x,), {}, rows, lambda out, rows: kept_rows(out, rows).square().sum())
    for name, gradient in by_index.gradients.items():
        assert torch.equal(gradient, by_name.gradients[name])


@functools.cache
def single_and_exact():
    torch.manual_seed(3)
    exact, single = conv_net().double(), wrap(conv_net(), dtype=torch.float32)
    exact.load_state_dict({name: value.double() for name, value in single.state_dict().items()})
    return single, exact


@given(n=st.integers(2, 40), seed=st.integers(0, 99))
@settings(max_examples=depth(8, 20))
def test_single_precision_is_no_worse_than_another_order_of_the_samples(n, seed) -> None:
    single, exact = single_and_exact()
    rows, x = kept(n, "random", seed), numbers(n, 3, 8, 8, seed=seed).float()
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))

    def gradients(model, x, rows):
        return outcome(model, (x,), {}, rows, lambda out, rows: out[rows].square().sum()).gradients

    truth = gradients(exact, x.double(), rows)
    found, plain = gradients(single, x, rows), gradients(single.wrapped, x, rows)
    reordered = gradients(single.wrapped, x[order], torch.isin(order, rows).nonzero().squeeze(1))
    for name, right in truth.items():
        usual = max(float((other[name] - right).abs().max()) for other in (plain, reordered))
        assert float((found[name] - right).abs().max()) <= 2 * usual + 1e-6 * float(
            right.abs().max()
        )
