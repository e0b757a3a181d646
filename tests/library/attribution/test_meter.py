"""The meter finds the forward pass that made an autograd node, also where passes did not end one after the other."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from thresher.attribution.cost_meter import Meter
from thresher.attribution.forward_passes import ForwardPass
from thresher.cost import Cost

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=12)


@given(SPANS, st.booleans())
def test_the_latest_pass_with_a_number_is_found(
    spans: list[tuple[int, int]], in_order: bool
) -> None:
    meter = Meter(Cost())
    ends = [(first, first + length) for first, length in spans]
    passes = []
    for first, last in sorted(ends, key=lambda span: span[1]) if in_order else ends:
        one = ForwardPass(meter, first, 1)
        one.last = last
        meter.passes.add(one)
        passes.append(one)
    for number in range(75):
        holding = [one for one in passes if one.first <= number < one.last]
        assert meter.passes.pass_with(number) is (holding[-1] if holding else None)


def test_a_pass_around_others_is_found_by_nodes_of_its_beginning() -> None:
    meter = Meter(Cost())
    first = torch._C._autograd._get_sequence_nr()
    outer = meter.subset_pass(4)
    x = torch.zeros(4, 2, requires_grad=True)
    begun = (x * 2).grad_fn
    inner = ForwardPass(meter, torch._C._autograd._get_sequence_nr(), 4)
    nn.Linear(2, 2)(x)
    inner.last = torch._C._autograd._get_sequence_nr()
    meter.passes.add(inner)
    outputs = x * 3
    meter.passed(outputs, None, first)
    assert begun is not None and meter.passes.pass_with(begun._sequence_nr()) is outer
    assert meter.passes.pass_with(inner.first) is inner
