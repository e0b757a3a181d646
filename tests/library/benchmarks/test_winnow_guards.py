import json
from pathlib import Path
from typing import Any

from benchmarks.winnow import guards
from benchmarks.winnow.guards import BEGIN, END, SUBJECTS, Job

ROOT = Path(__file__).parents[3]
RESULTS, PAGE = (
    ROOT / "benchmarks" / "results" / "winnow-guards.json",
    ROOT / "docs" / "evidence" / "winnow-measured.md",
)


def planted() -> dict[Job, dict[str, Any]]:
    """Returns results in which the agreement falls with the share of wrong labels."""
    done: dict[Job, dict[str, Any]] = {}
    for job in guards.jobs():
        epochs = SUBJECTS[job.subject].problem.epochs
        agreement = 0.9 - 1.2 * job.wrong
        seen = {"agreement": agreement, "spread": 0.3, "uniform": float(agreement < 0.5)}
        done[job] = {"metric": 80.0 + job.seed, "cost": 0.5, "cpu_s": 1.0}
        done[job] |= {name: [None, *[value] * (epochs - 1)] for name, value in seen.items()}
    return done


# What is shown


def test_rows_by_hand():
    done = planted()
    rows = {(row["task"], row["wrong"]): row for row in guards.agreement_rows(done)}
    assert rows["digits", 0.0]["fell_back"] == 0 and rows["digits", 0.0]["agreement"] == [0.9, 0.9]
    assert (rows["digits", 0.4]["fell_back"], rows["digits", 0.4]["trainings"]) == (2, 2)
    assert rows["digits", 0.4]["spread_where_low"] == [0.3, 0.3]


def test_the_table_stands_between_its_marks():
    page = guards.with_table(f"a\n{BEGIN}\nold\n{END}\nb\n", planted())
    assert page.startswith(f"a\n{BEGIN}\n") and page.endswith(f"{END}\nb\n") and "old" not in page
    assert "| digits | 40 % | 0.42 to 0.42 | 0.30 to 0.30 | 2 of 2 | 2 of 2 |" in page
    assert guards.with_table(page, planted()) == page


def test_the_page_and_the_results_are_those_of_the_trainings():
    done, page = guards.load(RESULTS), PAGE.read_text()
    assert not [job for job in guards.jobs() if job not in done]
    assert guards.with_table(page, done) == page
    assert json.loads(RESULTS.read_text()) == json.loads(json.dumps(guards.results(done)))


def test_the_guard_of_the_labels_has_no_false_alarm_and_sees_40_percent():
    rows = guards.agreement_rows(guards.load(RESULTS))
    assert len(rows) == 18
    assert not any(row["fell_back"] for row in rows if not row["wrong"])
    assert all(row["fell_back"] == row["trainings"] for row in rows if row["wrong"] == 0.4)
