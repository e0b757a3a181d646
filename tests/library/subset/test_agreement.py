"""Compiled graphs that would give something else than the examined ones are refused; here they are made wrong by hand."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from subset_cases import numbers, wrap
from thresher.subset.graphs import Unclear, Unsupported
from thresher.subset.verify import check_agreement

N = 7


@pytest.fixture(scope="module", params=[0.0, 0.5], ids=["", "with dropout"])
def examined(request):
    torch.manual_seed(0)
    sub = wrap(
        nn.Sequential(nn.Linear(6, 5), nn.Dropout(request.param), nn.Tanh(), nn.Linear(5, 3))
    )
    sub(numbers(N, 6))
    ((graphs,),) = sub._traces.values()
    arguments = [*(parameter.detach() for parameter in sub.parameters()), numbers(N, 6)]
    return replace(graphs, tried=N), arguments, request.param > 0


def test_equal_graphs_agree(examined) -> None:
    graphs, arguments, _ = examined
    check_agreement(graphs, graphs, arguments)


def test_other_outputs_are_refused(examined) -> None:
    graphs, arguments, draws = examined
    if draws:
        return  # other random numbers give other outputs
    wrong = replace(graphs, forward=lambda given: [value * 1.1 for value in graphs.forward(given)])
    with pytest.raises(Unsupported, match="return other outputs, with a relative difference of"):
        check_agreement(wrong, graphs, arguments)


@pytest.mark.parametrize("wrong_for", [N, N - 1, 3, 1])
def test_other_gradients_are_refused(examined, wrong_for) -> None:
    graphs, arguments, draws = examined

    def backward(given):
        k = len(given[-1])
        return [
            value if value is None else value * (1.1 if k == wrong_for else 1)
            for value in graphs.backward(given)
        ]

    if draws and wrong_for == N:
        return  # then they are compared with themselves
    expected = (
        "gradients of some rows differ"
        if draws
        else f"return other gradients of {wrong_for} of {N} rows"
    )
    with pytest.raises(Unsupported, match=expected):
        check_agreement(replace(graphs, backward=backward), graphs, arguments)


def test_values_that_are_not_finite_tell_nothing(examined) -> None:
    graphs, arguments, _ = examined
    bad = [*arguments[:-1], arguments[-1] * float("nan")]
    with pytest.raises(Unclear, match="not finite"):
        check_agreement(graphs, graphs, bad)


def test_graphs_that_draw_and_mix_are_not_compared(examined) -> None:
    graphs, arguments, draws = examined
    values = graphs.backward
    wrong = replace(
        graphs,
        mixing=("batch_norm",),
        backward=lambda given: [x if x is None else x * 2 for x in values(given)],
    )
    if draws:
        check_agreement(wrong, graphs, arguments)
    else:
        with pytest.raises(Unsupported):
            check_agreement(wrong, graphs, arguments)
