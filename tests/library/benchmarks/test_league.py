"""The league: its arms, what is run, and what the table says."""

import json
from pathlib import Path

import pytest
from benchmarks.league.arms import (
    CONTROLS,
    DESIGN,
    ENTRIES,
    PLACEBO,
    TASKS,
    arms,
    arms_of,
    counted_jobs,
    factor_of,
    ready,
)
from benchmarks.league.table import (
    against_fewer_epochs,
    page,
    results,
    summary,
    top,
    values,
    with_tables,
    with_top,
)

from thresher import methods
from thresher_lab.comparison.statistics import Paired, findings

ROOT = Path(__file__).parents[3]


def made_up(levels, waiting=()):
    """Results of all trainings: the metric of an arm is its level, and the rate times 1.6 is the best of each."""
    done = {}
    while jobs := [job for job in ready(done) if job not in done and job.arm not in waiting]:
        for job in jobs:
            name = job.arm.removesuffix(PLACEBO)
            level = levels.get(job.arm, levels.get(name, 80.0)) - (job.factor != 1.6)
            wobble = 0.01 * ((1 + job.seed) ** 2 * (3 + len(job.arm)) % 13)
            cost = {"ratio": 1.0 if job.arm == "full" else 0.5, "steps": 790}
            done[job] = {"metric": level + wobble, "cost": cost}
    return done


def test_the_methods_of_the_league_are_registered_and_each_has_its_own_family():
    assert len({entry.family for entry in ENTRIES}) == len(ENTRIES) >= 12
    assert {entry.name for entry in ENTRIES} <= set(methods.names())
    for entry in ENTRIES:
        entry.spec.create()


def test_what_is_run():
    jobs = list(ready({}))
    assert jobs and all(job.looks for job in jobs), "without a chosen rate nothing is counted"
    assert {job.task for job in jobs} == set(TASKS) and {job.factor for job in jobs} == set(
        DESIGN.factors
    )
    assert not any(job.arm.endswith(PLACEBO) for job in jobs)
    done = made_up({})
    for arm in arms().values():
        assert factor_of(done, TASKS[0], arm) == 1.6
        assert [job.seed for job in counted_jobs(done, TASKS[0], arm)] == [0, 1, 2, 3, 4]
    assert set(values(done)) == {(task, arm.name) for task in TASKS for arm in arms_of(task)}


def test_what_needs_classes_is_left_out_where_there_are_none():
    left_out = [("bike", "kakurenbo"), ("bike", "rcap"), ("text", "rcap")]
    assert results(made_up({}))["left_out"] == left_out
    assert "that the method needs: kakurenbo on bike, rcap on bike, rcap on text." in page(
        results(made_up({}))
    )
    assert {
        name for task in TASKS for name in set(arms()) - {arm.name for arm in arms_of(task)}
    } == {name + end for _, name in left_out for end in ("", PLACEBO)}


def test_placebos_come_last_and_have_the_rate_of_their_method():
    done = made_up({}, waiting=[name for name in arms() if name.endswith(PLACEBO)])
    left = [job for job in ready(done) if job not in done]
    assert left and all(
        job.arm.endswith(PLACEBO) and not job.looks and job.factor == 1.6 for job in left
    )


def test_findings_against_an_independent_computation():
    found = results(
        made_up({"full": 90.0, "repb": 89.9, "smaller": 88.0, "kakurenbo": 85.0, "infobatch": 90.5})
    )
    rows = {(row["task"], row["method"]): row for row in found["rows"]}
    assert len(rows) == len(TASKS) * len(ENTRIES) - 3 and found["waiting"] == []
    done = values(
        made_up({"full": 90.0, "repb": 89.9, "smaller": 88.0, "kakurenbo": 85.0, "infobatch": 90.5})
    )
    compared = {
        place: Paired.of(
            [
                a["metric"] - b["metric"]
                for a, b in zip(done[place], done[place[0], "full"], strict=True)
            ]
        )
        for place in rows
    }
    expected = findings(compared, 0.2)
    for place, row in rows.items():
        assert row["finding"] == expected[place] and row["to_full"]["mean"] == pytest.approx(
            compared[place].mean
        )
    assert (
        rows[TASKS[0], "infobatch"]["finding"] == "no loss"
        and rows[TASKS[0], "kakurenbo"]["finding"] == "loses"
    )
    assert rows[TASKS[0], "repb"]["against"]["smaller"]["finding"] == "better"
    assert set(rows[TASKS[0], "repb"]["against"]) == {*CONTROLS, "placebo"}


def test_the_page_names_what_is_not_finished_and_puts_the_worst_first():
    levels = {"full": 90.0, "repb": 89.9, "smaller": 88.0, "kakurenbo": 70.0}
    found = results(made_up(levels, waiting=["seta"]))
    assert ["bike", "seta"] in [list(one) for one in found["waiting"]]
    text = summary(found)
    assert (
        text.index("| kakurenbo |") < text.index("| repb |")
        and "Not finished yet: seta on fashion-10k" in text
    )
    whole = page(found)
    assert whole.count("*full*") == len(TASKS) and "cannot tell" in whole
    assert with_tables(
        "<!-- tables of benchmarks.league -->x<!-- end of the tables -->", found
    ).count("| method |") == 1 + len(TASKS)


def test_the_outcome_in_sentences():
    levels = {
        "full": 90.0,
        "repb": 90.4,
        "repb" + PLACEBO: 80.0,
        "smaller": 88.0,
        "kakurenbo": 70.0,
    }
    levels |= {entry.name: 90.0 for entry in ENTRIES if entry.name not in levels}
    said = top(results(made_up(levels)))
    assert (
        "Shown to lose against full training somewhere: kakurenbo. Worse than smaller batches somewhere: kakurenbo."
        in said
    )
    assert (
        "kakurenbo" not in said.split("Nowhere shown to lose")[1]
        and "so that the signal matters: repb" in said
    )
    page_of_it = with_top(
        "<!-- top of benchmarks.league -->x<!-- end of the top -->", results(made_up(levels))
    )
    assert said in page_of_it


def test_a_training_that_failed_is_named():
    done = made_up({"full": 90.0})
    job = next(
        job
        for job in done
        if job.arm == "uniform" and not job.looks and job.seed == 2 and job.factor == 1.6
    )
    assert results(done)["far_off"] == []
    done[job]["metric"] = 10.0
    [said] = results(done)["far_off"]
    assert said.startswith(f"1 of 5 trainings of uniform on {job.task} failed (10.0; median 80.")
    assert said in page(results(done))


def test_the_page_is_that_of_the_results():
    file = ROOT / "benchmarks" / "results" / "league.json"
    text = (ROOT / "docs" / "evidence" / "league.md").read_text()
    if file.is_file():
        assert with_tables(text, json.loads(file.read_text())) == text


def test_the_sentence_about_fewer_epochs_names_the_control():
    better, worse = {"finding": "better"}, {"finding": "worse"}
    rows = [
        {"method": "seta", "against": {"shorter": better}},
        {"method": "seta", "against": {"shorter": worse, "shorter@time": worse}},
        {"method": "ies", "against": {"shorter": better, "shorter@time": worse}},
    ]
    said = "Better than fewer epochs at half the cost on 1 of 2 tasks, worse on 1."
    assert against_fewer_epochs("seta", rows) == said
    said = "Better than fewer epochs in the same time on 0 of 1 tasks, worse on 1."
    assert against_fewer_epochs("ies", rows) == said
    assert against_fewer_epochs("ucb", rows) == "Not compared with fewer epochs yet."


def test_the_claim_of_the_readme_is_that_of_the_results():
    rows = json.loads((ROOT / "benchmarks" / "results" / "league.json").read_text())["rows"]

    def methods_that_are(finding, control):
        return {row["method"] for row in rows if row["against"][control]["finding"] == finding}

    claim = (
        f"of {len({row['method'] for row in rows})} published methods on five tasks, "
        f"{len(methods_that_are('worse', 'smaller'))} are worse than smaller batches at half the cost on a task, and "
        f"{len(methods_that_are('worse', 'shorter'))} worse than fewer epochs. None is better than either on any."
    )
    assert claim in (ROOT / "README.md").read_text()
    assert not methods_that_are("better", "smaller") | methods_that_are("better", "shorter")
