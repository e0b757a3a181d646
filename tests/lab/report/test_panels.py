"""Panels of curves as one figure: what is drawn, where, and into which kinds of files."""

import math
import sys
import xml.etree.ElementTree as ET

import pytest
from matplotlib.figure import Figure
from PIL import Image

from thresher_lab.report.charts import DASHES, SYMBOLS
from thresher_lab.report.panels import (
    LINES,
    MARKERS,
    Curve,
    Panel,
    _fill,
    check_figure_path,
    error_panels,
    plotly_figure,
    write_panels,
)

CURVES = [
    Curve("a < b", [(0.5, 20.0, 18.0, 22.0), (1.0, 10.0, 9.0, 11.0)]),
    Curve("c", [(0.25, 20.0, 20.0, 20.0), (0.5, 0.0, 0.0, 0.0)]),
]
PANEL = Panel("title", "cost", "error, %", CURVES, [("1.1x", 11.0)])


def lines(figure):
    return [trace for trace in figure.data if trace.mode == "lines+markers"]


def test_every_curve_is_drawn_in_every_panel_and_named_once():
    figure = plotly_figure([PANEL, PANEL])
    assert [line.name for line in lines(figure)] == ["a &lt; b", "c"] * 2
    assert [line.showlegend for line in lines(figure)] == [True, True, False, False]
    assert [line.line.color for line in lines(figure)] == ["#000000", "#d55e00"] * 2
    assert [text.text for text in figure.layout.annotations] == ["title", "title", "1.1x", "1.1x"]
    assert (figure.layout.xaxis2.title.text, figure.layout.yaxis2.title.text) == (
        "cost",
        "error, %",
    )


def test_values_are_inside_logarithmic_axes():
    figure = plotly_figure([PANEL])
    axis, (first, second) = figure.layout.yaxis, lines(figure)
    assert axis.type == "log"
    low, high = (10**end for end in axis.range)
    assert (low, high) == (pytest.approx(0.97 * 9), pytest.approx(1.03 * 22))
    assert (first.x, first.y) == ((0.5, 1.0), (20.0, 10.0))
    assert second.y == (20.0, pytest.approx(low))  # no error at all has no logarithm
    band = figure.data[0]
    assert (band.x, band.y) == ((0.5, 1.0, 1.0, 0.5), (22.0, 11.0, 9.0, 18.0))
    assert figure.layout.xaxis.range == (0, 1.02)
    [mark] = figure.layout.shapes
    assert mark.y0 == mark.y1 == 11.0 and figure.layout.annotations[1].y == pytest.approx(
        math.log10(11.0)
    )


def test_panels_stand_in_rows():
    figure = plotly_figure([PANEL] * 5)
    assert [line.xaxis for line in lines(figure)[::2]] == ["x", "x2", "x3", "x4", "x5"]
    assert figure.layout.xaxis4.domain[0] == figure.layout.xaxis.domain[0]
    assert figure.layout.yaxis4.domain[1] < figure.layout.yaxis.domain[0]


def test_errors_against_cost_and_time():
    point = {
        "epoch": 0,
        "cost": 0.125,
        "cpu_s": 6.0,
        "error": 0.17,
        "lowest": 0.10,
        "highest": 0.30,
    }
    arms = [{"method": name, "curve": [point]} for name in ("full", "fast")]
    targets = [{"factor": 1.4, "error": 0.14}, {"factor": 0.5, "error": 0.05}]
    by_cost, by_time = error_panels({"task": "t", "epochs": 4, "targets": targets, "arms": arms})
    assert [curve.name for curve in by_cost.curves] == ["full", "fast"]
    assert by_cost.curves[1].points == [
        (0.125, pytest.approx(17), pytest.approx(10), pytest.approx(30))
    ]
    assert by_time.curves[1].points[0][0] == 6
    assert by_cost.marks == [("1.4x", pytest.approx(14)), ("0.5x", pytest.approx(5))]
    assert (by_cost.title, by_cost.x_label, by_time.x_label) == (
        "t, 4 epochs",
        "cost in full trainings",
        "CPU seconds",
    )


def test_a_page_of_its_own(tmp_path):
    path = tmp_path / "figures" / "figure.html"
    check_figure_path(path)
    write_panels([PANEL], path)
    text = path.read_text()
    assert "error, %" in text and "plotly.js v" in text


def test_svg_has_the_texts(tmp_path):
    path = tmp_path / "figures" / "figure.svg"
    write_panels([PANEL, PANEL], path)
    words = [
        text.text for text in ET.parse(path).getroot().iter("{http://www.w3.org/2000/svg}text")
    ]
    assert words.count("title") == words.count("cost") == words.count("1.1x") == 2
    assert words.count("a < b") == words.count("c") == 1


def test_a_picture_has_the_same_values_and_looks():
    axes = Figure().add_subplot()
    _fill(axes, PANEL)
    first, second, mark = axes.get_lines()
    low, high = axes.get_ylim()
    assert (low, high) == (
        pytest.approx(0.97 * 9),
        pytest.approx(1.03 * 22),
    ) and axes.get_xlim() == (0, 1.02)
    assert axes.get_yscale() == "log" and axes.get_title() == "title"
    assert first.get_xydata().tolist() == [[0.5, 20.0], [1.0, 10.0]]
    assert second.get_xydata().tolist() == [[0.25, 20.0], [0.5, pytest.approx(low)]]
    assert [
        (line.get_color(), line.get_marker(), line.get_linestyle()) for line in (first, second)
    ] == [
        ("#000000", "o", "-"),
        ("#d55e00", "s", "-"),
    ]
    assert set(mark.get_ydata()) == {11.0}
    band = axes.collections[0].get_paths()[0].get_extents()
    assert (band.x0, band.y0, band.x1, band.y1) == (0.5, 9.0, 1.0, 22.0)


def test_every_look_has_a_marker_and_a_line_of_matplotlib():
    assert set(MARKERS) == set(SYMBOLS) and set(LINES) == set(DASHES) - {"solid"}


def test_the_same_panels_give_the_same_svg(tmp_path):
    paths = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for path in paths:
        write_panels([PANEL], path)
    text = paths[0].read_text()
    assert text == paths[1].read_text() and "date>" not in text


def test_a_picture_has_a_size_by_its_panels(tmp_path):
    path = tmp_path / "figure.png"
    write_panels([PANEL] * 5, path)
    with Image.open(path) as image:
        assert image.size == (2 * 3 * 440, 2 * (2 * 380 + 60))


def test_other_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"figure: .*figure.pdf must end in .html, .svg or .png"):
        check_figure_path(tmp_path / "figure.pdf")


@pytest.mark.parametrize("name", ["figure.svg", "figure.png"])
def test_what_pictures_need_is_named_before_anything_is_trained(monkeypatch, tmp_path, name):
    check_figure_path(tmp_path / name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        ValueError,
        match=r"needs the package matplotlib. Install it .* or give a file that ends in .html",
    ):
        check_figure_path(tmp_path / name)
