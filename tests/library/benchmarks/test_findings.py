"""What advice ranks methods by is what the committed results say."""

import json

import pytest
from benchmarks import findings

from thresher_lab.advise.findings import MEASURED


def test_the_package_holds_what_the_results_say():
    assert MEASURED.read_text() == findings.as_text(findings.collected()), "run python -m benchmarks.findings"


def test_the_last_source_counts_and_each_is_read_as_it_is(tmp_path):
    winnow = {
        "margin": 0.2,
        "shares": {
            "0.5": {
                "tasks": {
                    "text": {
                        "winnow": {"cost": 0.5, "to_full": {"mean": 0.75, "low": 0.25, "high": 1.0}},
                        "winnow at its own rate": {"to_full": {"mean": -0.1, "low": -0.5, "high": 0.25}},
                    }
                },
                "shown": {"text": {"to_full": "unclear", "to_smaller": "worse"}},
            }
        },
    }
    row = {
        "task": "text",
        "method": "Winnow",
        "cost": 0.5004,
        "to_full": {"mean": -0.25},
        "finding": "no loss",
        "against": {"smaller": {"finding": "better"}, "placebo": {"finding": "no better"}},
    }
    league = {"rows": [row], "settings": {"Winnow": "winnow:share=0.5"}}
    (tmp_path / "winnow.json").write_text(json.dumps(winnow))
    [before] = findings.collected(tmp_path)
    assert (before["low"], before["high"], before["margin"]) == (-0.5, 0.25, 0.2), "the rate that a comparison takes counts"
    assert (before["method"], before["difference"], before["against"]) == ("winnow:share=0.5", 0.75, {"smaller": "worse"})
    (tmp_path / "league.json").write_text(json.dumps(league))
    [after] = findings.collected(tmp_path)
    assert (after["source"], after["cost"], after["difference"], after["to_full"]) == ("league", 0.5, -0.25, "no loss")
    assert after["against"] == {"smaller": "better", "placebo": "no better"}


def test_how_often_other_trainings_foretell_a_result():
    def row(task, method, finding, source="league"):
        return {"source": source, "task": task, "method": method, "cost": 0.5, "difference": 0.0, "to_full": "unclear"} | {
            "against": {"smaller": finding}
        }

    rows = [row(task, "winnow:share=0.5", "better") for task in "abc"]  # each told by the two others
    rows += [row("a", "infobatch", "better"), row("b", "infobatch:target=0.5", "worse")]  # each contradicted by the other
    rows += [row("a", "seta", "worse"), row("a", "ies", "unclear"), row("b", "ies", "worse", source="winnow")]
    found = findings.agreement(rows)
    assert (found.right, found.wrong, found.silent) == (3, 2, 1)
    assert str(found) == "60% of 5 decided results were foretold right; nothing is said of 1 more"
    assert str(findings.agreement([])).startswith("none of 0")
    same = [row("a", "winnow:share=0.5", "better"), row("b", "winnow:share=0.5", "better", source="winnow")]
    others = [row(task, "winnow:share=0.25", "worse", source="winnow") for task in "bc"]
    assert findings.agreement(same + others).right == 1, "the same settings count first"
    seen = findings.agreement(rows, unseen=False)
    assert (seen.right, seen.wrong, seen.silent) == (6, 0, 0), "the training itself counts, too"


@pytest.mark.parametrize(("value", "difference"), [(0.9, -1.25), (40.0, -0.013)])
def test_differences_are_in_points_where_the_metric_is_a_share(value, difference):
    row = {"method": "infobatch", "control_of": None, "finding": "loses", "difference": -0.0125, "cost_ratio": 0.7}
    row["against"] = {"uniform": {"finding": "unclear"}}
    full = {"method": "full", "control_of": None, "finding": None}
    found = {
        "task": "digits",
        "runs": [{"metric": {"value": value}}],
        "summary": [full, row, row | {"control_of": "infobatch"}],
    }
    [one] = findings.of_comparison("digits", found)
    assert one.difference == pytest.approx(difference, abs=6e-4) and one.against == {"uniform": "unclear"}
