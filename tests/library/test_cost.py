import dataclasses
import math

import pytest

from thresher import break_even
from thresher.cost import Cost


def test_ratio() -> None:
    cost = Cost(forward=90, backward=70, refresh=20, full_forward=100, full_backward=100)
    assert cost.ratio() == pytest.approx((90 + 2 * 70) / 300)
    assert cost.ratio(0) == pytest.approx(0.9)
    assert cost.ratio(backward_to_forward=1.0) == pytest.approx(0.8)
    assert Cost(forward=5, backward=5, full_forward=5, full_backward=5).ratio(3.7) == 1
    assert math.isnan(Cost().ratio())


@pytest.mark.parametrize("value", [-0.1, math.nan])
def test_ratio_refuses(value: float) -> None:
    with pytest.raises(
        ValueError, match=rf"ratio: `backward_to_forward` must be 0 or more, got {value}"
    ):
        Cost().ratio(value)


def test_what_it_prints() -> None:
    cost = Cost(
        forward=1900, backward=1200, refresh=700, steps=12, full_forward=2000, full_backward=2000
    )
    assert str(cost) == (
        "forward 1,900 of 2,000 samples (refresh 700, scoring 0), backward 1,200 of 2,000, 12 steps: "
        "0.717 of full training at 2 forwards a backward"
    )
    measured = dataclasses.replace(cost, backward_to_forward=1.5)
    assert str(measured).endswith("a backward, 0.740 with the measured ratio 1.50")


@pytest.mark.parametrize(
    ("forward_s", "backward_s", "share"),
    [
        (1, 2, 2 / 3),
        (1.0, 1.0, 0.5),
        (0.004, 0.001, 0.2),
        (3, 1e-300, 0.0),
        (1e-300, 1e300, 1.0),
        (1e308, 1e308, 0.5),
    ],
)
def test_break_even(forward_s: float, backward_s: float, share: float) -> None:
    found = break_even(forward_s, backward_s)
    assert found == pytest.approx(share, abs=1e-12)
    assert forward_s + found * (forward_s + backward_s) == pytest.approx(forward_s + backward_s)


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf])
def test_break_even_refuses(value: float) -> None:
    for name, arguments in (("forward_s", (value, 1.0)), ("backward_s", (1.0, value))):
        with pytest.raises(
            ValueError,
            match=f"^break_even: `{name}` must be a positive finite number of seconds, got {value}",
        ):
            break_even(*arguments)


def test_as_plain_values() -> None:
    cost = Cost(forward=100, backward=50, scoring=10, steps=10, full_forward=100, full_backward=100)
    assert cost.to_dict() == dataclasses.asdict(cost) | {"ratio": 200 / 300, "measured_ratio": None}
    measured = dataclasses.replace(cost, backward_to_forward=3.0).to_dict()
    assert measured["measured_ratio"] == 250 / 400
    unknown = dataclasses.replace(cost, backward_to_forward=3.0, unknown="a reason").to_dict()
    assert (unknown["ratio"], unknown["measured_ratio"]) == (None, None)
