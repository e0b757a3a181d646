"""What is drawn of a table: the numbers of its cells, by kind of chart."""

import math

import pytest
from matplotlib.figure import Figure

from thresher_lab.report.table_charts import DRAWERS, table_chart
from thresher_lab.reproduction import ARTEFACTS
from thresher_lab.reproduction.artefact import TableChart

CURVES = {
    "title": "Error over time (mean of the seeds)",
    "header": ["epoch", "full, CPU s", "own, CPU s", "full, error, %", "own, error, %"],
    "rows": [["0", "1.5", "1.0", "30.00", "31.00"], ["1", "3.0", "2.0", "+20.00", "never"]],
}
ARMS = {
    "title": "relief, 10 epochs",
    "header": ["", "accuracy here", "cost"],
    "rows": [
        ["full", "90.0 ± 1.5", "1.000"],
        ["SB 50%", "89.0 ± 0.5", "0.900"],
        ["SB 75%", "-8.0", "0.700"],
    ],
}


def drawn(table: dict, chart: TableChart):
    axes = Figure().add_subplot()
    DRAWERS[chart.kind](axes, table, chart)
    return axes


def lines(axes) -> dict:
    return {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}


def test_lines_are_the_columns_over_the_first_or_over_columns_of_their_own():
    over_epochs = lines(
        drawn(CURVES, TableChart("lines", y="s", columns=("full, CPU s", "own, CPU s")))
    )
    assert over_epochs == {"full": [[0, 1.5], [1, 3]], "own": [[0, 1], [1, 2]]}
    columns, over = [[f"{row}, {of}" for row in ("full", "own")] for of in ("error, %", "CPU s")]
    found = lines(drawn(CURVES, TableChart("lines", y="%", columns=columns, over=over)))
    assert found["full"] == [[1.5, 30], [3, 20]]
    assert found["own"][0] == [1, 31] and math.isnan(found["own"][1][1])


def test_rows_are_lines_over_the_numbers_of_the_header():
    table = {
        "title": "",
        "header": ["rate", "0.1", "0.5"],
        "rows": [["Uniform", "93.67, 0.15, 60", "-1.5, 0.5, 320"]],
    }
    assert lines(drawn(table, TableChart("rows", y="%"))) == {
        "Uniform": [[0.1, 93.67], [0.5, -1.5]]
    }


def test_bars_stand_in_groups_by_row():
    table = {
        "title": "",
        "header": ["class", "epoch 5", "epoch 9"],
        "rows": [["0", "22 (8)", "6 (7)"], ["1", "72 (1)", "0 (8)"]],
    }
    axes = drawn(table, TableChart("bars", y="hidden"))
    assert [[bar.get_height() for bar in bars] for bars in axes.containers] == [[22, 72], [6, 0]]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0", "1"]


def test_points_stand_at_their_cost_with_their_spread_one_color_per_method():
    axes = drawn(ARMS, TableChart("points", y="%"))
    assert {of.get_label(): of[0].get_xydata().tolist() for of in axes.containers} == {
        "full": [[1, 90]],
        "SB": [[0.7, -8], [0.9, 89]],
    }
    _, _, (bars,) = axes.containers[1]
    assert [segment[:, 1].tolist() for segment in bars.get_segments()] == [[-8, -8], [88.5, 89.5]]


def test_a_picture_has_a_panel_per_table_and_is_the_same_again():
    chart = TableChart("lines", y="seconds", x="epoch of training")
    once, again = (
        table_chart([CURVES, CURVES, ARMS], TableChart("lines", "%", tables=(0, 1)))
        for _ in range(2)
    )
    assert once == again and once.count(b"Error over time<") == 2 and b"relief" not in once
    assert b"epoch of training" in table_chart([CURVES], chart)


def test_a_column_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="not in list"):
        table_chart([CURVES], TableChart("lines", y="%", columns=("loss",)))


def test_figures_have_a_chart_of_their_own():
    figures = {name for name in ARTEFACTS if name.startswith("kakurenbo-figure-")}
    more = {"selective-backprop-time-to-target", "adaselection-rates", "adaselection-weights"}
    assert {name for name, artefact in ARTEFACTS.items() if artefact.chart} == figures | more | {
        f"diet-sb-{panel}" for panel in "abcd"
    }
