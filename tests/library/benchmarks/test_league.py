"""The league: its arms, what is run, and what the table says."""

import json
from pathlib import Path

import pytest
from benchmarks.league.arms import (
    CONTROLS,
    DESIGN,
    ENTRIES,
    GROUPED,
    PLACEBO,
    RUNS,
    arms,
    arms_of,
    counted_jobs,
    factor_of,
    ready,
    same_time,
    share_of_time,
    times,
)
from benchmarks.league.table import (
    against_fewer_epochs,
    earlier,
    page,
    results,
    summary,
    top,
    values,
    with_tables,
    with_top,
)
from benchmarks.league.tasks import TASKS, lengths_of, near_duplicates, package_texts, problem_of
from benchmarks.winnow.jobs import load

from thresher import methods
from thresher_lab.comparison.controls import SAME_TIME
from thresher_lab.comparison.statistics import Paired, findings
from thresher_lab.tasks.images import DEBIAN_FOLDER

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
    for arm in arms_of(TASKS[-1]):
        assert factor_of(done, TASKS[-1], arm) == 1.6
        assert [job.seed for job in counted_jobs(done, TASKS[-1], arm)] == [0, 1, 2, 3, 4]
    same_lengths = {name for _, name in values(done) if name.startswith("shorter@")}
    assert set(values(done)) - {(task, name) for task in TASKS for name in same_lengths} == {
        (task, arm.name) for task in TASKS for arm in arms_of(task)
    }


def test_the_label_in_the_table_is_that_of_the_method():
    for entry in ENTRIES:
        assert arms()[entry.name].spec(0.5) == entry.spec


def test_a_committed_training_is_that_of_the_settings_in_the_table():
    trained = load(RUNS)
    assert trained
    for job, result in trained.items():
        assert result["spec"] == arms()[job.arm].spec(job.share).label


@pytest.fixture
def timed(monkeypatch):
    """CPU times of all methods on a task: six tenths of full training, of div_bs twice as long, of seta half as long."""
    seconds = {entry.name: [6.1] for entry in ENTRIES} | {"full": [9.0, 11.0]}
    seconds |= {"div_bs": [20.0], "seta": [5.2]}
    monkeypatch.setattr("benchmarks.league.arms.times", lambda: {"bike": [seconds, seconds]})


def test_fewer_epochs_in_the_same_time_are_shared_by_methods_of_a_time(timed):
    assert share_of_time("bike", "ucb") == pytest.approx(0.61)
    assert same_time("text", "ucb") is None
    lengths = {name: same_time("bike", name) for name in ("ucb", "div_bs", "seta")}
    found = {name: (arm.name, share) for name, (arm, share) in lengths.items()}
    assert found == {"ucb": (SAME_TIME, 0.6), "div_bs": ("full", 1.0), "seta": ("shorter", 0.5)}
    done = made_up({"full": 80.0, "shorter@time": 70.0, "ucb": 75.0})
    assert {job.share for job in done if job.arm == SAME_TIME} == {0.6}
    rows = {row["method"]: row for row in results(done)["rows"] if row["task"] == "bike"}
    assert rows["ucb"]["against"][SAME_TIME]["mean"] == pytest.approx(5.0, abs=0.1)
    assert rows["ucb"]["time"] == pytest.approx(0.61)
    assert rows["div_bs"]["against"][SAME_TIME]["mean"] == rows["div_bs"]["to_full"]["mean"]
    text = page(results(done))
    assert "| *shorter@0.6* |" in text
    [lacking] = [line for line in text.splitlines() if line.startswith("Controls not trained yet")]
    assert "fewer epochs in the same time on text" in lacking and "on bike" not in lacking


def test_trainings_of_an_earlier_version_are_named():
    held = {
        ("bike", "ucb"): [{"metric": 92.0}, {"metric": 93.0}],
        ("bike", "seta"): [{"metric": 91.0}],
    }
    lines = [
        {"task": "bike", "seed": 0, "others": {"ucb": [92.0, 92.4], "seta": [90.0, 91.0]}},
        {"task": "bike", "seed": 1, "others": {"ucb": [93.0, 92.8], "rcap": [1.0, 2.0]}},
    ]
    [said] = earlier(lines, held)
    assert said.startswith("On bike, the counted trainings of ucb are of an earlier version")
    assert "differ by 0.30 points in the median, and by 0.40 at most" in said


def test_committed_times_have_every_arm_of_their_task():
    for task, rounds in times().items():
        assert task in TASKS
        names = [arm.name for arm in arms_of(task) if not arm.rate_of]
        assert set().union(*rounds) == set(names)
        for name in names:
            assert sum(name in seconds for seconds in rounds) >= 2, (task, name)
        assert all("full" in seconds for seconds in rounds)


def test_texts_of_unlike_lengths():
    data = package_texts().train
    inputs, targets = data.tensors
    lengths = lengths_of(inputs)
    assert lengths.min() >= 32 and lengths.max() < 384 and set(targets.tolist()) == set(range(8))
    task = problem_of("package-texts").task
    network = task.build(0)
    alone = network(inputs[:1, : lengths[0]])
    assert network(inputs[:5])[:1].allclose(alone, atol=1e-6), "padding changes nothing"

    def padding(task):
        batches = task.loader(package_texts().data, 0)
        return sum(int((lengths_of(x).max() - lengths_of(x)).sum()) for x, _ in batches)

    assert padding(problem_of("package-texts", grouped=True).task) < 0.2 * padding(task)
    assert GROUPED in {arm.name for arm in arms_of("package-texts")}
    assert GROUPED not in {arm.name for arm in arms_of("text")}


@pytest.mark.skipif(
    not DEBIAN_FOLDER.is_dir(), reason="Debian's dataset-fashion-mnist is not installed"
)
def test_near_duplicates_are_moved_copies():
    images, labels = near_duplicates(20).train.tensors
    pixels = images.flatten(1).sort(1).values
    different, times = pixels.unique(dim=0, return_counts=True)
    assert len(images) == len(labels) > 100
    assert len(different) == 20 and times.max() <= 20, "a copy has the pixels of its image"
    assert len(images.flatten(1).unique(dim=0)) > 100


def test_what_needs_classes_is_left_out_where_there_are_none():
    left_out = [("bike", "kakurenbo"), ("bike", "rcap"), ("text", "rcap")]
    assert results(made_up({}))["left_out"] == left_out
    assert "that the method needs: kakurenbo on bike, rcap on bike, rcap on text." in page(
        results(made_up({}))
    )
    assert {
        name
        for task in TASKS
        for name in set(arms()) - {SAME_TIME, GROUPED} - {arm.name for arm in arms_of(task)}
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
    assert set(rows[TASKS[0], "repb"]["against"]) >= {*CONTROLS, "placebo"}


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
        "Shown to lose against full training somewhere: kakurenbo. " in said
        and " Worse than smaller batches somewhere: kakurenbo." in said
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
        {"method": "seta", "against": {"shorter": worse}},
        {"method": "ies", "against": {"shorter": better, "shorter@time": worse}},
    ]
    said = "Better than fewer epochs at half the cost on 1 of 2 tasks, worse on 1."
    assert against_fewer_epochs("seta", rows) == said
    said = "Better than fewer epochs in the same time on 0 of 1 tasks, worse on 1."
    assert against_fewer_epochs("ies", rows) == said
    assert against_fewer_epochs("ucb", rows) == "Not compared with fewer epochs yet."


def test_the_claim_of_the_readme_is_that_of_the_results():
    rows = json.loads((ROOT / "benchmarks" / "results" / "league.json").read_text())["rows"]
    published = [row for row in rows if row["method"] != "winnow"]

    def methods_that_are(finding, control):
        return {
            row["method"]
            for row in published
            if row["against"].get(control, {}).get("finding") == finding
        }

    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    worse = {kind: len(methods_that_are("worse", kind)) for kind in (SAME_TIME, "smaller")}
    claim = (
        f"of {len({row['method'] for row in published})} published methods on {words[len(TASKS)]} tasks, "
        f"{worse[SAME_TIME]} are worse on a task than fewer epochs in the same time, and {worse['smaller']} worse than "
        f"smaller batches at half the cost. None is better than either on any."
    )
    assert claim in (ROOT / "README.md").read_text()
    assert not methods_that_are("better", "smaller") | methods_that_are("better", SAME_TIME)
