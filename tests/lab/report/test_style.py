import numpy as np
import pytest

from lab.report.cases import HOSTILE, comparison
from thresher_lab.report.charts import (
    INK,
    METHOD_COLORS,
    Look,
    escaped,
    line_trace,
    look,
    looks,
    median_traces,
    short,
    wrapped,
)


def test_a_method_looks_the_same_everywhere_and_unlike_others():
    names = [f"m{number}" for number in range(12)]
    results, _ = comparison(
        {"full": 0.0} | dict.fromkeys(names, 0.2), seeds=(0,), controls=False, epochs=2, samples=10
    )
    of = looks(results)
    assert of["full"].color == INK
    assert len(set(of.values())) == 13
    assert [of[name].color for name in names[:6]] == list(METHOD_COLORS)
    assert of["m3"] == look(3)


def test_texts_are_shown_as_they_are():
    assert escaped("<b>&") == "&lt;b&gt;&amp;"
    assert "<" not in escaped(HOSTILE)
    assert (
        wrapped("one two three", 7) == "one two<br>three"
        and wrapped("a=1:bc=2", 6) == "a=1<br>:bc=2"
        and wrapped("<i>", 9) == "&lt;i&gt;"
    )


def test_numbers_are_short_and_strict_json():
    assert short([1 / 3, np.nan, np.inf, 12]) == [0.33333, None, None, 12]
    assert short(np.array([[1.0, 2.0], [3.0, np.nan]])) == [[1, 2], [3, None]]


def test_a_band_is_drawn_where_there_are_several_seeds():
    values = np.array([[1.0, 2.0], [3.0, 6.0], [2.0, 9.0]])
    band, median = median_traces("a", Look("#102030"), [1, 2], values)
    assert (
        band.y == (3, 9, 2, 1)
        and band.x == (1, 2, 2, 1)
        and band.fillcolor == "rgba(16,32,48,0.16)"
    )
    assert (
        median.y == (2, 6) and band.legendgroup == median.legendgroup == "a" and not band.showlegend
    )
    [only] = median_traces("a", Look("#102030"), [1, 2], values[:1])
    assert only.y == (1, 2)


@pytest.mark.parametrize("name", ["plain", HOSTILE])
def test_series_keep_their_name_for_the_legend(name):
    drawn = line_trace(name, Look("#102030"), [1], [2])
    assert drawn.legendgroup == name and drawn.name == escaped(name)
