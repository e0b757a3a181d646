"""Charts of the classes: differences to full training by seed, and what classes are taken for."""

import numpy as np
import pytest

from lab.report.cases import comparison
from thresher_lab.report import class_charts
from thresher_lab.report.loading import runs_by_method
from thresher_lab.training.files import ComparedRun

CLASSES = 4


def with_counts(classes=CLASSES, seeds=(0, 1, 2)):
    """Results whose runs have 100 samples of each class; each method but full training loses more of the higher classes."""
    results, _ = comparison(seeds=seeds)
    for number, (method, runs) in enumerate(runs_by_method(results).items()):
        for run in runs:
            wrong = np.arange(classes) * (number + 1) + run["seed"] * (method != "full")
            counts = np.diag(100 - wrong)
            counts[np.arange(classes), (np.arange(classes) + 1) % classes] += wrong
            run["confusion"] = counts.tolist()
    return results


def test_the_accuracy_of_each_class_is_less_full_training_paired_by_seed():
    results = with_counts()
    drawn = {trace.legendgroup: trace for trace in class_charts.change_by_class(results, {}).data}
    methods = [method for method in runs_by_method(results) if method != "full"]
    assert list(drawn) == methods
    for number, method in enumerate(methods, 1):
        # The classes stand from below to above, the last one first.
        assert drawn[method].x == pytest.approx(
            [-(one * number + 1) for one in reversed(range(CLASSES))]
        )
        assert drawn[method].error_x.array == pytest.approx([4.303 / 3**0.5] * CLASSES, rel=1e-3)
        assert list(drawn[method].text) == ["3 (100)", "2 (100)", "1 (100)", "0 (100)"]


def test_of_many_classes_those_are_drawn_that_change_most():
    figure = class_charts.change_by_class(with_counts(40), {})
    assert list(figure.layout.yaxis.ticktext) == [
        f"{number} (100)" for number in reversed(range(10, 40))
    ]


def test_what_classes_are_taken_for_is_the_difference_to_full_training():
    results = with_counts()
    of_full, of_method = (
        class_charts.taken_for(results, {}, method).data[0]
        for method in list(runs_by_method(results))[:2]
    )
    assert of_full.z[3] == pytest.approx([3, 0, 0, 97]) and of_method.z[3] == pytest.approx(
        [4, 0, 0, -4]
    )
    assert of_method.zmid == 0 and of_full.zmid is None


def test_classes_that_some_runs_lack_and_one_seed():
    results = with_counts(seeds=(0,))
    for run in runs_by_method(results)["full"]:
        run["confusion"] = [
            [5, 0],
            [0, 5],
        ]  # its test samples and predictions have the first two classes only
    figure = class_charts.change_by_class(results, {})
    assert figure.data[0].x[0] is None and figure.data[0].error_x.array[-1] is None


def test_without_counts_there_is_no_chart():
    results, _ = comparison()
    assert (
        class_charts.change_by_class(results, {}) is None
        and class_charts.taken_for(results, {}, "full") is None
    )


def test_counts_of_a_file_are_square():
    run = with_counts()["runs"][0]
    ComparedRun.model_validate(run)
    with pytest.raises(ValueError, match="`confusion` must have as many columns as rows"):
        ComparedRun.model_validate(run | {"confusion": [[1, 0]]})
