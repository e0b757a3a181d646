import numpy as np
import pytest

from lab.report.cases import CLASSES, EPOCHS, LEAVES_OUT, comparison
from thresher_lab.report import charts
from thresher_lab.report.loading import controls, runs_by_method


@pytest.fixture(scope="module")
def results():
    return comparison()[0]


def lines(figure):
    """What is drawn of each series, bands left out."""
    return {trace.legendgroup: trace for trace in figure.data if trace.showlegend is not False}


@pytest.mark.parametrize("by", ["cost", "cpu", "wall"])
def test_every_method_and_control_is_a_point(results, by):
    drawn = lines(charts.metric_against_cost(results, {}, by))
    rows = {row["method"]: row for row in results["summary"] if row["control_of"] is None}
    assert drawn.keys() == {*rows, "random, same cost", "fewer epochs, same cost"}
    for name, row in rows.items():
        assert drawn[name].x == pytest.approx([row[f"{by}_ratio"]], rel=1e-4)
        assert drawn[name].y == pytest.approx([100 * row["mean"]], rel=1e-4)
    uniform = [row for row in results["summary"] if row["method"].startswith("uniform@")]
    assert drawn["random, same cost"].x == pytest.approx(
        sorted(row[f"{by}_ratio"] for row in uniform), rel=1e-4
    )
    low, high = rows["infobatch"]["ci95"]
    bars, middle = drawn["infobatch"].error_y, rows["infobatch"]["difference"]
    assert (bars.array[0], bars.arrayminus[0]) == pytest.approx(
        (100 * (high - middle), 100 * (middle - low)), rel=1e-3
    )


def test_the_margin_is_drawn_in_the_units_of_the_metric(results):
    of_share = charts.metric_against_cost(results, {})
    line, shade = of_share.layout.shapes
    assert shade.y1 == line.y0 == pytest.approx(
        100 * results["summary"][0]["mean"]
    ) and shade.y1 - shade.y0 == pytest.approx(0.5)
    without = charts.metric_against_cost(results | {"margin": None}, {})
    assert len(without.layout.shapes) == 1


def test_older_summaries_without_a_time_have_no_such_chart(results):
    older = results | {
        "summary": [
            {k: v for k, v in row.items() if k != "cpu_ratio"} for row in results["summary"]
        ]
    }
    assert charts.metric_against_cost(older, {}, "cpu") is None
    assert charts.metric_against_cost(older, {}, "cost") is not None


@pytest.mark.parametrize("by", charts.AXES)
def test_curves_are_medians_of_the_seeds(results, by):
    drawn = lines(charts.metric_curve(results, {}, by))
    assert drawn.keys() == {*LEAVES_OUT, "random, same cost", "fewer epochs, same cost"}
    for method, runs in runs_by_method(results).items():
        values = np.array([[entry["accuracy"] for entry in run["history"]] for run in runs])
        assert drawn[method].y == pytest.approx(100 * np.median(values, axis=0), rel=1e-4)
        across = (
            [range(1, EPOCHS + 1)]
            if by == "epoch"
            else [[entry[by] for entry in run["history"]] for run in runs]
        )
        assert drawn[method].x == pytest.approx(np.median(across, axis=0), rel=1e-4)


def test_controls_are_curves_that_wait_to_be_switched_on(results):
    figure = charts.metric_curve(results, {})
    hidden = [trace for trace in figure.data if trace.visible == "legendonly"]
    assert len(hidden) == sum(map(len, controls(results).values())) == 4
    assert sum(trace.showlegend is not False for trace in hidden) == 2


def test_a_metric_in_units_of_its_own_is_not_in_percent():
    results, _ = comparison(seeds=(0,), metric="R2 < 1")
    results["runs"][0]["metric"]["value"] = 3.0
    figure = charts.metric_curve(results, {})
    assert figure.layout.yaxis.title.text == "R2 &lt; 1"
    assert lines(figure)["full"].y[-1] == pytest.approx(
        results["runs"][0]["history"][-1]["R2 < 1"], rel=1e-4
    )


@pytest.mark.parametrize(("by", "field"), [("cost", "cost_to_full"), ("cpu_s", "cpu_to_full")])
def test_times_to_targets_are_as_measured(results, by, field):
    drawn = lines(charts.times_to_targets(results, {}, by))
    measured = charts.measure(results)
    for arm in measured["arms"]:
        assert drawn[arm["method"]].y == pytest.approx(
            [reached[field] for reached in arm["reached"]], rel=1e-4
        )
    assert drawn["full"].y == (1, 1, 1)


def test_there_are_no_targets_without_an_error_or_a_full_run_of_every_seed(results):
    other = results | {
        "runs": [run for run in results["runs"] if (run["method"], run["seed"]) != ("full", 1)]
    }
    assert charts.times_to_targets(other, {}) is None
    units = results | {
        "runs": [run | {"metric": {"name": "accuracy", "value": 2.0}} for run in results["runs"]]
    }
    assert charts.times_to_targets(units, {}) is None


def test_the_cap_and_what_was_left_out(results):
    figure = charts.left_out(results, {})
    drawn = lines(figure)
    assert drawn.keys() == {"kakurenbo", "infobatch"}
    assert drawn["kakurenbo"].y == (0, *[30] * (EPOCHS - 1))
    [cap] = [trace for trace in figure.data if trace.name == "kakurenbo: cap"]
    assert cap.y == (30,) * EPOCHS and cap.line.dash == "dash"


@pytest.mark.parametrize("by", ["cpu_s", "wall_s", "step_s"])
def test_speed_is_against_the_median_epoch_of_full_training(results, by):
    drawn = lines(charts.speed_up(results, {}, by))
    assert drawn["full"].y == pytest.approx([1] * EPOCHS, rel=1e-4)
    assert drawn["kakurenbo"].y == pytest.approx([1, *[1 / 0.7] * (EPOCHS - 1)], rel=1e-4)


def test_no_speed_without_full_training_or_without_times(results):
    others = results | {"runs": [run for run in results["runs"] if run["method"] != "full"]}
    assert charts.speed_up(others, {}) is None
    untimed = [
        run | {"history": [entry | {"cpu_s": 0.0} for entry in run["history"]]}
        for run in results["runs"]
    ]
    assert charts.speed_up(results | {"runs": untimed}, {}) is None


def test_the_histogram_is_the_share_of_samples_in_each_bin(results):
    [trace] = charts.loss_histogram(results, {}, "kakurenbo").data
    z = np.array(trace.customdata)
    assert z.shape == (len(results["loss_bins"]) - 1, EPOCHS) and len(trace.y) == len(
        results["loss_bins"]
    )
    assert z.sum(axis=0) == pytest.approx([100] * EPOCHS, rel=1e-3)
    counts = [run["history"][3]["loss_histogram"] for run in runs_by_method(results)["kakurenbo"]]
    assert z[:, 3] == pytest.approx(100 * np.mean(counts, axis=0) / np.sum(counts[0]), rel=1e-3)
    colors = np.array(trace.z, dtype=float)
    assert (
        10 ** colors[z > 0] == pytest.approx(z[z > 0], rel=1e-3) and np.isnan(colors[z == 0]).all()
    )


def test_classes_are_ranked_by_what_was_left_out_of_them(results):
    figure = charts.hidden_by_class(results, {}, "kakurenbo")
    counts, ranks = figure.data
    assert figure.layout.annotations[0].text == "number of samples" and counts.y == tuple("01234")
    of_runs = [
        [entry["hidden_by_class"] for entry in run["history"]]
        for run in runs_by_method(results)["kakurenbo"]
    ]
    z, order = np.array(counts.z), np.array(ranks.z, dtype=float)
    assert z == pytest.approx(np.mean(of_runs, axis=0).T, rel=1e-3) and z.shape == (CLASSES, EPOCHS)
    most = z.argmax(axis=0)[1:]
    assert (order[most, range(1, EPOCHS)] == 1).all() and np.isnan(order[:, 0]).all()
    assert (
        (order.max(axis=0)[1:] > 1).all()
        and ranks.text[0][0] == ""
        and ranks.text[most[0]][1] == "1"
    )
    assert charts.hidden_by_class(results, {}, "full") is None


def test_where_the_sizes_of_classes_are_known_their_shares_are_drawn():
    results, samples = comparison({"full": 0.0, "kakurenbo": 0.3}, seeds=(0, 1), samples=52)
    results["classes"] = [*"abcd", "<e>"]
    figure = charts.hidden_by_class(results, samples, "kakurenbo")
    shares, ranks = figure.data
    of_runs = [
        [entry["hidden_by_class"] for entry in run["history"]]
        for run in runs_by_method(results)["kakurenbo"]
    ]
    expected = 100 * np.mean(of_runs, axis=0).T / np.array([[11], [11], [10], [10], [10]])
    assert np.array(shares.z) == pytest.approx(expected, rel=1e-3)
    assert (
        np.array(ranks.z, dtype=float)[expected.argmax(axis=0)[1:], range(1, EPOCHS)] == 1
    ).all()
    assert figure.layout.annotations[0].text == "share of the class, %" and shares.y == (
        *"abcd",
        "&lt;e&gt;",
    )


def test_a_class_without_samples_has_no_share_and_no_rank():
    results, samples = comparison({"full": 0.0, "kakurenbo": 0.3}, seeds=(0,))
    for history in samples.values():
        history.targets[history.targets == 1] = 0
    shares, ranks = charts.hidden_by_class(results, samples, "kakurenbo").data
    assert (
        np.isnan(np.array(shares.z, dtype=float)[1]).all()
        and np.isnan(np.array(ranks.z, dtype=float)[1]).all()
    )
    assert np.isfinite(np.array(shares.z, dtype=float)[[0, 2, 3, 4]]).all()


def test_histories_of_other_classes_tell_no_sizes():
    _, samples = comparison(seeds=(0,), classes=4)
    assert charts.class_sizes(samples, 5) is None and charts.class_sizes({}, 5) is None
    assert charts.class_sizes(samples, 4).tolist() == [13, 13, 12, 12]


def test_weights_are_drawn_by_their_names(results):
    assert charts.weights(results, {}, "kakurenbo") is None
    for run in results["runs"]:
        for entry in run["history"] if run["method"] == "kakurenbo" else ():
            entry |= {"weight_loss": 0.25, "weight_margin": 0.75}
    drawn = lines(charts.weights(results, {}, "kakurenbo"))
    assert {name: trace.y for name, trace in drawn.items()} == {
        "loss": (0.25,) * EPOCHS,
        "margin": (0.75,) * EPOCHS,
    }


def test_easy_samples_are_in_percent(results):
    drawn = lines(charts.easy_share(results, {}))
    shares = [
        [entry["easy_share"] for entry in run["history"]] for run in runs_by_method(results)["full"]
    ]
    assert drawn["full"].y == pytest.approx(100 * np.median(shares, axis=0), rel=1e-4)


def test_what_older_results_lack_is_not_drawn(results):
    kept = ("epoch", "accuracy")
    bare = [
        run | {"history": [{k: entry[k] for k in kept} for entry in run["history"]]}
        for run in results["runs"]
    ]
    older = {k: v for k, v in results.items() if k not in ("margin", "loss_bins")} | {"runs": bare}
    assert charts.metric_curve(older, {}) is not None
    assert (
        charts.metric_curve(older, {}, "cost") is None
        and charts.times_to_targets(older, {}) is None
    )
    for draw in (charts.left_out, charts.speed_up, charts.easy_share):
        assert draw(older, {}) is None
    for draw in (charts.loss_histogram, charts.hidden_by_class, charts.weights):
        assert draw(older, {}, "kakurenbo") is None
