"""The arithmetic of steps: loading and computing, smaller batches, medians of rounds."""

import pytest
import torch

from thresher_lab.advise.pace import Pace, Spent, pace_of_rounds, torch_threads


def test_loading_and_computing_take_their_sum_or_the_longer_of_the_two():
    pace = Pace(loader=3.0, forward=1.0, backward=2.0, optimizer=1.0, scoring=0.5)
    assert (pace.compute, pace.full, pace.waiting) == pytest.approx((4.0, 7.0, 3 / 7))
    assert pace.step(1.0) == 4.0
    hidden = Pace(3.0, 1.0, 2.0, 1.0, 0.5, overlap=1.0)
    assert (hidden.full, hidden.waiting, hidden.step(1.0)) == (4.0, 0.0, 3.0)
    assert Pace(3.0, 1.0, 2.0, 1.0, 0.5, overlap=0.5).full == 5.5
    assert Pace(8.0, 1.0, 2.0, 1.0, 0.5, overlap=1.0).waiting == 0.5


def test_a_smaller_batch_is_on_the_line_through_half_and_whole_ones():
    pace = Pace(loader=0.0, forward=2.0, backward=6.0, optimizer=0.0, scoring=1.0, half=6.0)
    assert (pace.half_share, pace.of_smaller(1.0), pace.of_smaller(0.5)) == (0.75, 1.0, 0.75)
    assert pace.of_smaller(0.25) == pytest.approx(0.625)
    assert Pace(0.0, 2.0, 6.0, 0.0, 1.0).of_smaller(0.3) == pytest.approx(0.3)
    assert Pace(0.0, 2.0, 6.0, 0.0, 1.0, half=9.0).half_share == 1.0
    assert Pace(0.0, 2.0, 6.0, 0.0, 1.0, half=2.0).of_smaller(0.25) == 0.25


def a_round(slow=1.0, busy=1.0, **more):
    seconds = {
        "forward": 2.0,
        "backward": 4.0,
        "optimizer": 2.0,
        "scoring": 1.0,
        "half": 5.0,
        "loader": 3.0,
        **more,
    }
    return {name: Spent(slow * busy * value, slow * value) for name, value in seconds.items()}


def test_what_disturbs_a_whole_round_changes_no_ratio():
    pace = pace_of_rounds([a_round(), a_round(5.0), a_round(0.5)], by_cpu=False)
    assert (pace.forward, pace.backward, pace.optimizer) == (2.0, 4.0, 2.0)
    assert (pace.scoring, pace.half, pace.loader, pace.overlap) == (1.0, 5.0, 3.0, 0.0)


def test_other_programs_change_no_cpu_time_and_the_loader_is_taken_by_its_ratio():
    pace = pace_of_rounds([a_round(busy=3.0)], by_cpu=True)
    assert (pace.forward, pace.loader) == (2.0, 3.0)
    assert pace_of_rounds([a_round(busy=3.0)], by_cpu=False).loader == 9.0


@pytest.mark.parametrize(
    ("loop", "overlap"), [(13.0, 0.0), (11.0, 0.0), (9.5, 0.5), (8.0, 1.0), (7.0, 1.0)]
)
def test_an_overlap_is_a_share_whatever_was_measured(loop, overlap):
    assert pace_of_rounds([a_round(loop=loop)], by_cpu=False).overlap == pytest.approx(overlap)


def test_gradients_that_are_added_up_share_a_step_of_the_optimizer():
    assert pace_of_rounds([a_round()], by_cpu=False, accumulate=4).optimizer == 0.5


def test_threads_are_given_back():
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError), torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
        raise RuntimeError
    assert torch.get_num_threads() == before
