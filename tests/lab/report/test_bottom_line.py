"""The first screen of the report."""

import csv
import html
import io
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from urllib.parse import unquote

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from lab.report.cases import HOSTILE, comparison
from thresher_lab.comparison.controls import SAME_TIME
from thresher_lab.comparison.summary import conclude, summarize
from thresher_lab.report.first_screen import _ticks, bottom_line, chart, snippet
from thresher_lab.report.page import render_page

NAMES = {"full": 0.0, "kakurenbo": 0.3}


def judged(names=NAMES, margin=2.0, **sizes):
    results, samples = comparison(names, **sizes)
    return results | {"margin": margin, "summary": summarize(results["runs"], margin)}, samples


def test_the_pick_with_its_numbers_and_controls():
    results, _ = judged()
    found, pick = bottom_line(results), conclude(results).pick
    assert (
        found["sentences"] == conclude(results).sentences
        and " of the CPU time of full training. " in found["sentences"][1]
    )
    facts = found["facts"]
    assert facts["accuracy"].startswith(f"{100 * pick['mean']:.2f} %, full training ")
    low, high = pick["ci95"]
    assert (
        facts["difference"]
        == f"{100 * pick['difference']:+.2f} [{100 * low:+.2f}, {100 * high:+.2f}]"
    )
    assert facts["CPU time saved"] == f"{100 * (1 - pick['cpu_ratio']):.0f} %"
    assert facts["cost as counted"] == f"{pick['cost_ratio']:.3f} of full training"
    assert {name for name in facts if name.startswith("against")} == {
        f"against {word}"
        for word in (("random", "fewer epochs") if pick["control_of"] is None else ())
    }


def test_the_code_of_a_control_has_the_settings_of_its_runs(monkeypatch):
    """Its label has the cost that was counted, and those of its runs the cost that was wanted."""
    results, _ = judged()
    row = next(row for row in results["summary"] if row["method"].startswith("uniform"))
    for run in results["runs"]:
        if run["method"].startswith("uniform"):
            run["settings"] = {"keep": 0.725}
    assert not any(run["method"] == row["method"] for run in results["runs"])
    conclusion = replace(conclude(results), pick=row)
    monkeypatch.setattr("thresher_lab.report.first_screen.conclude", lambda _: conclusion)
    assert "thresher.UniformSubset(keep=0.725)" in bottom_line(results)["code"]


def test_without_a_pick_there_is_what_would_decide():
    results, _ = judged(margin=0.01)
    found = bottom_line(results)
    assert (
        found["facts"] == {}
        and found["code"] is None
        and found["sentences"]
        and "</svg>" in found["chart"]
    )


def test_older_results_without_findings_have_a_chart():
    results, _ = comparison(seeds=(0,))
    kept = ("method", "control_of", "mean", "std", "difference", "ci95", "cost_ratio", "verdict")
    results["summary"] = [{name: row[name] for name in kept} for row in results["summary"]]
    found = bottom_line(results)
    assert (
        found["sentences"] == ["There is nothing to pick from: no method has a verdict."]
        and "<circle" in found["chart"]
    )


def drawn(results):
    """The elements of the chart, by their tag."""
    tree, found = ElementTree.fromstring(chart(results)), {}
    for one in tree:
        found.setdefault(one.tag, []).append(one)
    return tree, found


def test_the_chart_has_every_row_and_names_are_text():
    results, _ = judged({"full": 0.0, HOSTILE: 0.3})
    tree, found = drawn(results)
    assert len(found["circle"]) == len(results["summary"]) - 1  # all but full training
    assert HOSTILE in {one.text for one in tree.iter("title")}  # a long name is cut in the row
    texts = {one.text for one in found["text"]}
    assert texts >= {f"{HOSTILE[:33]}…", "random", "full training"}
    width, height = map(float, tree.attrib["viewBox"].split()[2:])
    for one in found["circle"]:
        assert 0 <= float(one.attrib["cx"]) <= width and 0 <= float(one.attrib["cy"]) <= height
    [margin], high = found["rect"], max(float(one.attrib["cy"]) for one in found["circle"])
    assert float(margin.attrib["y"]) + float(margin.attrib["height"]) > high


@pytest.mark.parametrize("finding", ["better", "no better", "unclear", None])
def test_a_pick_is_named_only_if_it_is_better_than_fewer_epochs_in_the_same_time(finding):
    results, _ = judged()
    pick = conclude(results).pick
    assert pick is not None
    assert "our pick" not in chart(results)  # it was not compared with them
    pick["against"][SAME_TIME] = {"finding": finding, "difference": 0.01, "ci95": [0.005, 0.015]}
    pick["against"][SAME_TIME] |= {"seeds_needed": None}
    _, found = drawn(results)
    named = [one.text for one in found["text"] if (one.text or "").endswith("our pick")]
    rings = [one for one in found["path"] if one.attrib.get("class") == "pick"]
    assert len(named) == len(rings) == (finding == "better")


def test_points_stand_where_their_differences_are():
    """Also where an interval reaches far beyond: it ends at the end of the axis."""
    results, _ = judged()
    rows = [row for row in results["summary"] if row["method"] != "full"]
    rows[0]["ci95"] = [-50.0, 50.0]
    _, found = drawn(results)
    across = [float(one.attrib["cx"]) for one in found["circle"]]
    by_place = sorted(range(len(rows)), key=lambda at: across[at])
    values = [rows[at]["difference"] for at in by_place]
    assert values == pytest.approx(sorted(values), abs=2e-3) and across[0] != across[-1]
    left, right = min(across), max(across)
    for row, at in zip(rows, across, strict=True):  # one axis for all
        share = (row["difference"] - min(values)) / (max(values) - min(values))
        assert at == pytest.approx(left + share * (right - left), abs=0.2)


def test_without_a_difference_there_is_no_chart():
    results, samples = judged()
    for row in results["summary"]:
        row["difference"] = row["ci95"] = None
    assert chart(results) == ""


def test_the_table_is_a_link_with_all_digits():
    results, samples = judged({"full": 0.0, HOSTILE: 0.3})
    address = html.unescape(
        re.search(r'href="(data:text/csv[^"]*)" download', render_page(results, samples))[1]
    )
    rows = [*csv.DictReader(io.StringIO(unquote(address.partition(",")[2])))]
    assert [row["method"] for row in rows] == [row["method"] for row in results["summary"]]
    shown = [
        "" if row["difference"] is None else str(row["difference"]) for row in results["summary"]
    ]
    assert [row["difference"] for row in rows] == shown
    assert [row["low"] for row in rows] == [
        str(row["ci95"][0]) if row["ci95"] else "" for row in results["summary"]
    ]


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1.04), (87.2, 90.1), (-3.1, 0.002), (0.98765, 0.98766), (-1e6, 1e6)]
)
def test_ticks_are_round_and_inside(low, high):
    ticks = _ticks(low, high)
    assert 3 <= len(ticks) <= 9 and all(low <= one <= high for one in ticks)


def test_the_page_begins_with_it():
    results, samples = judged()
    html = render_page(results, samples)
    assert html.index('id="bottom-line"') < html.index('id="verdict"') < html.index('id="cost"')


def row_of(method, control_of=None):
    return {
        "method": method,
        "control_of": control_of,
        "cost_ratio": float(method.partition("@")[2] or 1),
    }


def run_code(code):
    """Runs code of a report on a small training, and returns the run."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(TensorDataset(torch.randn(40, 3), torch.arange(40) % 2), 10, shuffle=True)
    names = {
        "thresher": thresher,
        "loader": loader,
        "criterion": nn.CrossEntropyLoss(),
        "model": model,
        "optimizer": optimizer,
    }
    exec(code + "\n    optimizer.step(); optimizer.zero_grad()", names)
    return names["run"]


@pytest.mark.parametrize(
    ("row", "settings", "expected"),
    [
        (row_of("winnow:share=0.5"), {"share": 0.5, "kind": "epoch"}, thresher.Winnow(share=0.5)),
        (
            row_of("kakurenbo"),
            {
                "max_fraction": 0.3,
                "schedule": [[0.0, 1.0], [0.3, 0.8], [0.6, 0.6], [0.8, 0.4]],
                "tau": 0.7,
            },
            thresher.Kakurenbo(),
        ),
        (
            row_of("selective_backprop:keep=0.33 once"),
            {"keep": 0.33, "beta": None, "forward_passes": "once"},
            thresher.SelectiveBackprop(keep=0.33),
        ),
        (row_of("uniform@0.500", "winnow"), {"keep": 0.5}, thresher.UniformSubset(keep=0.5)),
        (row_of("smaller@0.500", "winnow"), {"keep": 0.5}, thresher.UniformSubset(keep=0.5)),
        (
            row_of("fewer@0.500", "winnow"),
            {"keep": 0.5},
            thresher.UniformSubset(keep=0.5, fixed=True),
        ),
    ],
)
def test_the_code_runs_and_attaches_the_method(row, settings, expected):
    code = snippet(row, settings, 3)
    run = run_code(code)
    assert run.method == expected and run.epochs == 3
    assert ('forward_passes="once"' in code) == (settings.get("forward_passes") == "once")
    assert ('spend="batches"' in code) == row["method"].startswith("smaller")


def test_the_code_has_the_settings_of_the_run():
    row = row_of("winnow:share=0.5:stratify=none")
    for stratify, said in ((None, "stratify=None"), ("class", 'stratify="class"')):
        code = snippet(row, {"share": 0.5, "stratify": stratify}, 3)
        assert said in code and run_code(code).epochs == 3
    assert "stratify" not in snippet(row, {"share": 0.5, "stratify": "auto"}, 3)
    for name in ("score_every", "batches"):
        assert snippet(row, {"share": 0.5, name: 2}, 3) is None
    # With `drop_last`, the cost is not the share that was kept.
    code = snippet(row_of("uniform@0.500", "m") | {"cost_ratio": 0.444}, {"keep": 0.5}, 3)
    assert "keep=0.5)" in code


def test_code_for_fewer_epochs_and_for_scores():
    assert snippet(row_of("shorter@0.500", "m"), {}, 20).startswith(
        "epochs = 10  # instead of 20, with"
    )
    assert "epochs = 8  # instead of 15, rounded from 7.5, with" in str(
        snippet(row_of("shorter@0.500", "m"), {}, 15)
    )
    code = snippet(
        row_of("prune:scores=el2n:keep=0.75"), {"scores": "a/el2n.parquet", "keep": 0.75}, 3
    )
    assert 'thresher.Prune(scores=thresher.scores.Scores.load("a/el2n.parquet")' in code


@pytest.mark.parametrize(
    "row",
    [
        row_of("placebo@0.500", "m"),
        row_of("uniform:keep=0.5+selective_backprop"),
        row_of("of another package"),
        row_of(HOSTILE),
    ],
)
def test_no_code_where_none_can_be_written(row):
    assert snippet(row, {}, 3) is None


def test_no_code_for_a_setting_that_is_an_object():
    assert snippet(row_of("kakurenbo"), {"tau": {"a": 1}}, 3) is None
