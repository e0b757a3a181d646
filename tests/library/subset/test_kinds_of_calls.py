"""Kinds of calls: how often a model is traced, and what its warnings say."""

import warnings

import pytest
import torch
from torch import nn

from subset_cases import Calls, numbers, same_as_plain, traced, wrap
from thresher.subset import module, subset_backward
from thresher.subset import trace_key as kinds

X = numbers(7, 6)
ROWS = [1, 4]
NEW = lambda m, x, scale: m.linear(x) * scale  # noqa: E731


@pytest.fixture
def quick(monkeypatch):
    """Two traces at once, a further one after three calls."""
    monkeypatch.setattr(module, "FREE_TRACES", 2)
    monkeypatch.setattr(kinds, "CALLS_PER_TRACE", 3)


@pytest.mark.usefixtures("quick")
def test_a_number_that_changes_in_every_step_stops_the_tracing() -> None:
    sub = wrap(Calls(NEW), strict=False)
    with pytest.warns(
        UserWarning, match="was traced 2 times.*Pad inputs to few lengths.*given once"
    ) as caught:
        for scale in range(12):
            same_as_plain(sub, X, scale, rows=ROWS)
    assert (
        len(caught) == 1
        and traced(sub) == sub._patience.traces == 2
        and "32 times" not in sub.fallback
    )


@pytest.mark.usefixtures("quick")
def test_lengths_that_come_up_often_are_traced_later() -> None:
    scales = {2: 1.0, 3: 2.0, 4: 3.0, 5: 4.0}  # which a symbolic length cannot choose from
    sub = wrap(Calls(lambda m, x: m.linear(x) * scales[int(x.shape[1])]), strict=False)
    with pytest.warns(UserWarning, match="kind is traced only after"):
        for turn in range(4):
            for length in (2, 3, 4, 5):
                same_as_plain(sub, numbers(7, length, 6), rows=ROWS)
            assert traced(sub) == (1 if turn < 2 else 4) and (sub.fallback is None) == (turn >= 2)
    assert sub._patience.traces == 5  # one trace was of all lengths, and was refused


@pytest.mark.usefixtures("quick")
def test_kinds_that_push_each_other_out_are_traced_less_and_less_often(monkeypatch) -> None:
    monkeypatch.setattr(module, "MAX_TRACES", 2)
    sub = wrap(Calls(NEW), strict=False)
    with warnings.catch_warnings(action="ignore"):
        made = []
        for _ in range(24):
            for scale in (1, 2, 3):
                sub(X, scale)
            made.append(sub._patience.traces)
    assert traced(sub) == 2 and made[-1] - made[11] < made[11] < 8


def test_strict_raises_where_too_many_kinds_come(monkeypatch) -> None:
    monkeypatch.setattr(module, "MAX_TRACES", 2)
    sub = wrap(Calls(NEW))
    sub(X, 1)
    sub(X, 2)
    with pytest.raises(RuntimeError, match="strict=True: it was traced 2 times"):
        sub(X, 3)


def test_calls_of_kinds_that_never_come_again_are_forgotten(monkeypatch) -> None:
    monkeypatch.setattr(kinds, "MAX_REMEMBERED", 4)
    patience = kinds.Patience(0)
    for kind in range(100):
        assert not patience.is_due(kind)
    assert len(patience._calls) <= 4


def test_comparisons_get_rare() -> None:
    assert [calls for calls in range(1, 1025) if kinds.is_due(calls)] == [
        1,
        2,
        4,
        8,
        16,
        32,
        64,
        128,
        256,
        512,
        768,
        1024,
    ]


# Batches that are no reason to give up


def test_a_row_chosen_by_its_number_is_traced() -> None:
    for last in (
        lambda m, x, at: m.linear(x)[torch.arange(x.shape[0]), at],
        lambda m, x, at: m.linear(x)[torch.arange(at.shape[0]).to(torch.int32), at],
        lambda m, x, at: (
            m.linear(x).tanh().index_put((torch.arange(x.shape[0]), at), m.linear(x).sum(1))
        ),
    ):
        sub, at = wrap(Calls(last)), torch.tensor([0, 3, 1, 2, 0, 3, 3])
        for n in (7, 5):
            same_as_plain(sub, numbers(n, 4, 6), at[:n], rows=ROWS)


def test_numbers_of_rows_that_are_values_stay_theirs() -> None:
    for place in (
        lambda m, x: m.linear(x) * torch.arange(x.shape[0])[:, None],
        lambda m, x: (m.linear(x) * torch.arange(x.shape[0])[:, None])[
            torch.arange(x.shape[0]), 1:
        ].tanh(),
    ):
        same_as_plain(wrap(Calls(place)), X, rows=ROWS)


def test_a_number_of_rows_that_is_both_is_not_traced() -> None:
    def both(m, x):
        rows = torch.arange(x.shape[0])
        return (m.linear(x) * rows[:, None]).tanh()[rows, rows % 6]

    sub = wrap(Calls(both), strict=False)
    with warnings.catch_warnings(action="ignore"):
        same_as_plain(sub, X, rows=ROWS)


def test_a_first_batch_that_is_not_finite_is_only_one_batch() -> None:
    sub, bad = wrap(nn.Sequential(nn.Linear(6, 4), nn.Tanh())), X.clone()
    bad[0, 0] = float("nan")
    assert sub(bad).isnan().any()
    same_as_plain(sub, X, rows=ROWS)
    sub, bad = wrap(nn.Linear(6, 4), strict=False), X.sign() * 1.7e308
    with pytest.warns(UserWarning, match="not finite"):
        sub(bad)
    same_as_plain(sub, X, rows=ROWS)
    assert sub.fallback is None


def test_a_first_batch_of_equal_samples_is_only_one_batch() -> None:
    sub = wrap(nn.Sequential(nn.Embedding(11, 4), nn.Flatten()), strict=False)
    with pytest.warns(UserWarning, match="equal, so mixing cannot"):
        sub(torch.zeros(6, 2, dtype=torch.int64))
    same_as_plain(sub, torch.arange(12).reshape(6, 2) % 11, rows=ROWS)
    assert sub.fallback is None and traced(sub) == 1


# Models and inputs of another kind


@pytest.mark.parametrize("part", [nn.Embedding, nn.EmbeddingBag])
def test_gradients_by_frequency_are_refused(part) -> None:
    layer = part(
        5, 3, scale_grad_by_freq=True, **({"mode": "sum"} if part is nn.EmbeddingBag else {})
    )
    sub = wrap(nn.Sequential(layer, nn.Flatten()), strict=False)
    words = torch.arange(48).reshape(16, 3) ** 2 % 5
    with pytest.warns(
        UserWarning, match="scale_grad_by_freq=True: its gradients depend on all rows"
    ):
        same_as_plain(sub, words, rows=ROWS)
    with pytest.raises(RuntimeError, match="scale_grad_by_freq"):
        subset_backward(sub.wrapped, strict=True)(words)


def test_operations_that_take_numbers_of_rows_are_refused() -> None:
    """With fewer rows, `segment_reduce` writes beyond the end of its memory."""
    sums = Calls(lambda m, x: torch.segment_reduce(m.linear(x), "sum", lengths=m.lengths))
    sums.lengths = torch.tensor([1, 2, 4])
    bag = nn.Sequential(nn.EmbeddingBag(5, 3, mode="max", dtype=torch.float64), nn.Tanh())
    words = torch.arange(48).reshape(16, 3) ** 2 % 5
    for model, given, name in ((sums, numbers(7, 6), "lengths"), (bag, words, "offsets")):
        sub = wrap(model, strict=False)
        with pytest.warns(UserWarning, match=f"numbers of rows .`{name}`"):
            same_as_plain(sub, given, rows=[0, 2])


def test_compiled_scripts_are_named() -> None:
    for model, name in (
        (nn.Sequential(nn.Tanh(), nn.Linear(6, 3)), "module '1'"),
        (nn.Linear(6, 3), "the model"),
    ):
        scripted = model.double()
        with warnings.catch_warnings(action="ignore"):
            if isinstance(scripted, nn.Sequential):
                scripted[1] = torch.jit.script(scripted[1])
            else:
                scripted = torch.jit.script(scripted)
        sub = subset_backward(scripted)
        with pytest.warns(
            UserWarning, match=f"{name} comes from torch.jit.script.*the original Python module"
        ):
            out = sub(X)
        out[ROWS].sum().backward()
        assert (
            all(parameter.grad is not None for parameter in sub.parameters())
            and len(list(sub.parameters())) == 2
        )


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_named(layout) -> None:
    sub = wrap(Calls(lambda m, x: torch.nested.to_padded_tensor(m.linear(x), 0.0)), strict=False)
    with warnings.catch_warnings(action="ignore"):
        ragged = torch.nested.nested_tensor([numbers(2, 6), numbers(3, 6)], layout=layout)
    with pytest.warns(UserWarning, match="given a nested tensor; pass a padded tensor and a mask"):
        sub(ragged).sum().backward()
    assert sub.linear.weight.grad.any()
