"""The benchmark of the computed shuffle: that it measures what it says, judges and writes."""

import pytest
from benchmarks import shuffle

import thresher

TINY = ["--quick", "--ids", "3000", "--n", "4000"]


@pytest.mark.parametrize("computed", [False, True])
def test_the_state_is_one_of_the_middle(computed):
    state = shuffle.middle_of(thresher.UniformSubset(keep=0.5), 4000, computed=computed)
    (own,) = state["ranks"]
    assert own["active"] and 850 <= own["rows"] <= 1300
    run = shuffle.attached(thresher.UniformSubset(keep=0.5), 4000, shuffle.BATCH, computed=computed)
    run.load_state_dict(state)
    assert len(next(iter(run.loader))) == shuffle.BATCH
