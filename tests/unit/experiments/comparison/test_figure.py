import xml.etree.ElementTree as ET

import pytest

from thresher.experiments.comparison.figure import HEIGHT, WIDTH, Line, Panel, draw, log_ticks, ticks

SVG = "{http://www.w3.org/2000/svg}"
LINES = [
    Line("a < b", [(0.5, 20.0, 18.0, 22.0), (1.0, 10.0, 9.0, 11.0)]),
    Line("c", [(0.25, 20.0, 20.0, 20.0), (0.5, 0.0, 0.0, 0.0)]),
]


def parsed(*panels):
    return ET.fromstring(draw(panels))


@pytest.fixture
def panel():
    return Panel("T & t", "cost", "error, %", LINES, [("1.1x", 11.0)])


def test_every_line_is_drawn_and_named(panel):
    root = parsed(panel, panel)
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert words.count("T & t") == words.count("cost") == words.count("1.1x") == 2
    assert words.count("a < b") == words.count("c") == 1
    assert len(list(root.iter(f"{SVG}polyline"))) == len(list(root.iter(f"{SVG}polygon"))) == 4
    assert len(list(root.iter(f"{SVG}circle"))) == 8


def test_larger_errors_are_higher_and_everything_is_inside(panel):
    lines = [
        [tuple(map(float, point.split(","))) for point in line.get("points").split()]
        for line in parsed(panel).iter(f"{SVG}polyline")
    ]
    (x0, y0), (x1, y1) = lines[0]
    assert x1 == pytest.approx(2 * x0, abs=0.02) and y0 < y1
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for line in lines for x, y in line)
    assert lines[1][0][1] == y0  # the same error
    assert lines[1][1][1] == HEIGHT  # no error at all has no logarithm


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1.02, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (130.0, [0, 50, 100]),
        (6.0, [0, 1, 2, 3, 4, 5, 6]),
        (0.05, [0, 0.01, 0.02, 0.03, 0.04, 0.05]),
    ],
)
def test_ticks_are_round(most, expected):
    assert ticks(most) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("least", "most", "expected"),
    [(6.5, 22.0, [7, 8, 9, 10, 15, 20]), (1.0, 90.0, [1, 2, 5, 10, 20, 50]), (0.5, 5e4, [1, 10, 100, 1000, 10000])],
)
def test_logarithmic_ticks_are_round(least, most, expected):
    assert log_ticks(least, most) == pytest.approx(expected)


def test_many_decades_have_many_ticks():
    assert len(log_ticks(1e-9, 1e3)) == 13
