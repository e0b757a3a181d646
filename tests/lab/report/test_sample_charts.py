from dataclasses import replace

import numpy as np
import pytest

from lab.report.cases import EPOCHS, comparison
from thresher_lab.report import charts as sample_charts
from thresher_lab.report.loading import histories


@pytest.fixture(scope="module")
def made():
    return comparison()


def test_parts_of_the_samples_by_their_loss():
    losses = np.arange(100, dtype=np.float32).reshape(-1, 1)
    assert [sample_charts.mean_of_part(losses, part)[0] for part in ("all", "bottom", "top")] == [
        49.5,
        48.5,
        98.5,
    ]
    few = np.array([[3.0], [np.nan], [1.0]], dtype=np.float32)
    assert [sample_charts.mean_of_part(few, part)[0] for part in ("all", "bottom", "top")] == [
        2,
        1,
        3,
    ]
    nothing = np.full((3, 1), np.nan, dtype=np.float32)
    assert np.isnan(sample_charts.mean_of_part(nothing, "top")[0])


def test_the_last_ten_epochs_of_every_method(made):
    figure = sample_charts.loss_of_part(*made)
    drawn = {trace.legendgroup: trace for trace in figure.data if trace.showlegend is not False}
    for method, of_seeds in histories(*made).items():
        means = np.median([of.losses[:, -10:].mean(axis=0) for of in of_seeds.values()], axis=0)
        assert drawn[method].x == tuple(range(EPOCHS - 9, EPOCHS + 1))
        assert drawn[method].y == pytest.approx(means, rel=1e-4)


def test_overlap_is_what_both_leave_out_of_what_either_does(made):
    results, samples = made
    [trace] = sample_charts.overlap_by_epoch(results, samples).data
    assert trace.legendgroup == "kakurenbo and infobatch" and trace.x == tuple(range(2, EPOCHS + 1))
    held = histories(results, samples)
    by_seed = []
    for seed in (0, 1, 2):
        first, second = (
            set(np.flatnonzero(held[name][seed].dropped[:, 5]))
            for name in ("kakurenbo", "infobatch")
        )
        by_seed.append(len(first & second) / len(first | second))
    assert trace.y[4] == pytest.approx(100 * np.median(by_seed), rel=1e-4)


def test_the_matrix_is_over_all_epochs_and_symmetric(made):
    results, samples = made
    [trace] = sample_charts.overlap_matrix(results, samples).data
    z, held = np.array(trace.z), histories(results, samples)
    assert z.shape == (2, 2) and (z == z.T).all() and (np.diag(z) == 100).all()
    shares = []
    for seed in (0, 1, 2):
        first, second = (held[name][seed].dropped for name in ("kakurenbo", "infobatch"))
        shares.append((first & second).sum() / (first | second).sum())
    assert z[0, 1] == pytest.approx(100 * np.mean(shares), rel=1e-4)


def test_the_matrix_of_a_class_is_of_its_samples(made):
    results, samples = made
    assert sample_charts.class_numbers(results, samples) == [0, 1, 2, 3, 4]
    [trace] = sample_charts.overlap_matrix(results, samples, of_class="3").data
    held, shares = histories(results, samples), []
    for seed in (0, 1, 2):
        first, second = (
            held[name][seed].dropped[held[name][seed].targets == 3]
            for name in ("kakurenbo", "infobatch")
        )
        shares.append((first & second).sum() / (first | second).sum())
    assert trace.z[0][1] == pytest.approx(100 * np.mean(shares), rel=1e-4)


def test_nothing_is_drawn_of_what_is_not_there(made):
    results, samples = made
    for draw in (
        sample_charts.loss_of_part,
        sample_charts.overlap_by_epoch,
        sample_charts.overlap_matrix,
    ):
        assert draw(results, {}) is None
    of_one, histories_of_one = comparison({"full": 0.0, "kakurenbo": 0.3})
    assert sample_charts.overlap_matrix(of_one, histories_of_one) is None
    assert sample_charts.overlap_by_epoch(of_one, histories_of_one) is None
    unlabeled = {name: replace(of, targets=None) for name, of in samples.items()}
    assert sample_charts.class_numbers(results, unlabeled) == []


def test_histories_of_other_samples_are_not_compared(made):
    results, samples = made
    moved = {
        name: replace(of, ids=of.ids + position)
        for position, (name, of) in enumerate(samples.items())
    }
    assert sample_charts.paired(results, moved) == {}


def test_nothing_in_common_of_nothing():
    none, some = np.zeros((3, 1), dtype=bool), np.array([[True], [False], [False]])
    assert (
        np.isnan(sample_charts.overlap_shares(none, none)[0])
        and sample_charts.overlap_shares(none, some)[0] == 0
    )
