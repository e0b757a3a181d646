import pytest

from thresher_lab.tasks.base import one_cycle


def test_one_cycle_rises_and_falls_to_zero():
    factors = [one_cycle(step / 100) for step in range(101)]
    assert max(factors) == pytest.approx(1) and factors.index(max(factors)) == 20
    assert 0 < factors[0] < 0.1 and factors[-1] == pytest.approx(0)
    assert all(0 <= factor <= 1 for factor in factors)
