"""The league: its arms, what is run, and what the tables say."""

import json
from pathlib import Path

import pytest
from benchmarks.league import arms as league_arms
from benchmarks.league.arms import (
    CONTROLS,
    ENTRIES,
    FIRST,
    FRESH,
    PLACEBO,
    RUNS,
    arms,
    best_factor,
    ready,
    same_time,
    share_of_time,
    shared,
    times,
)
from benchmarks.league.figure import figure
from benchmarks.league.pooled import METHODS
from benchmarks.league.table import MARKS, page, results, summary, top, values, write
from benchmarks.league.tasks import TASKS, lengths_of, near_duplicates, package_texts, problem_of
from benchmarks.winnow.jobs import load
from benchmarks.winnow.tasks import PROBLEMS

from thresher import methods
from thresher_lab.comparison.controls import SAME_TIME
from thresher_lab.comparison.statistics import Paired, findings
from thresher_lab.tasks.images import DEBIAN_FOLDER

ROOT = Path(__file__).parents[3]


def made_up(levels, waiting=(), best=1.0):
    """Results of all trainings with fresh seeds: the metric of an arm is its level, and one rate is the best of each."""
    done = {}
    while jobs := [job for job in ready(done) if job.arm not in waiting]:
        for job in jobs:
            name = job.arm.removesuffix(PLACEBO)
            level = levels.get(job.arm, levels.get(name, 80.0)) - (job.factor != best)
            wobble = 0.01 * ((1 + job.seed) ** 2 * (3 + len(job.arm) + len(job.task)) % 13)
            cost = {"ratio": 1.0 if job.arm == "full" else 0.5, "steps": 790}
            done[job] = {"metric": level + wobble, "cost": cost}
    return done


@pytest.fixture
def timed(monkeypatch):
    """CPU times of the methods on every task: six tenths of full training, of importance sampling more, of seta half as long."""
    seconds = {entry.name: [6.1] for entry in ENTRIES} | {"full": [9.0, 11.0]}
    seconds |= {"importance_sampling": [20.0], "seta": [5.2]}
    monkeypatch.setattr(league_arms, "times", lambda: {task: [seconds, seconds] for task in TASKS})


def test_the_methods_of_the_league_are_registered_and_each_has_its_own_family():
    assert len({entry.family for entry in ENTRIES}) == len(ENTRIES) >= 12
    assert {entry.name for entry in ENTRIES} <= set(methods.names())
    assert {*FIRST.methods, *FRESH.methods} == {entry.name for entry in ENTRIES}
    for entry in ENTRIES:
        entry.spec.create()


def test_what_is_run():
    jobs = list(ready({}))
    assert jobs and all(job.looks for job in jobs), "without a chosen rate nothing is counted"
    assert {job.task for job in jobs} == set(TASKS)
    assert {job.factor for job in jobs} == {0.6, 1.0, 1.6}
    assert not any(job.arm.endswith(PLACEBO) for job in jobs)
    done = made_up({})
    for name in FRESH.names("mnist-5k-mlp"):
        counted = FRESH.counted(done, "mnist-5k-mlp", name)
        assert [(job.factor, job.seed) for job in counted] == [(1.0, seed) for seed in range(5, 10)]
    assert set(values(FRESH, done)) == {(task, arm) for task in TASKS for arm in FRESH.names(task)}


def test_an_arm_that_is_best_at_an_edge_looks_at_two_more_rates():
    for edge, beyond in ((1.6, 4.1), (0.6, 0.22)):
        done = made_up({}, best=edge)
        looks = FRESH.looks(done, "bike", "winnow", 0.5)
        assert len(looks) == 10 and beyond in {job.factor for job in looks}
        assert best_factor(done, looks) == edge
        for job in looks:
            done[job]["metric"] += 3 * (job.factor == beyond)
        [factor] = {job.factor for job in FRESH.counted(done, "bike", "winnow")}
        assert factor == beyond
    assert len(FRESH.looks(made_up({}), "bike", "winnow", 0.5)) == 6


def test_the_first_seeds_have_the_rates_that_they_were_trained_at():
    done = {**shared(), **load(RUNS)}
    held = values(FIRST, done)
    assert {name for _, name in held if name in FIRST.methods} == set(FIRST.methods)
    for task, name in held:
        jobs = FIRST.counted(done, task, name)
        assert {job.seed for job in jobs} == set(range(5))
        assert {job.factor for job in jobs} <= {0.6, 1.0, 1.6}


def test_the_label_in_the_table_is_that_of_the_method():
    for entry in ENTRIES:
        assert arms()[entry.name].spec(0.5) == entry.spec


def test_a_committed_training_is_that_of_the_settings_in_the_table():
    trained = load(RUNS)
    assert trained
    for job, result in trained.items():
        if job.arm in arms():
            assert result["spec"] == arms()[job.arm].spec(job.share).label


def test_fewer_epochs_in_the_same_time_are_shared_by_methods_of_a_time(monkeypatch, timed):
    assert share_of_time("bike", "winnow") == pytest.approx(0.61)
    assert [same_time("bike", name) for name in ("winnow", "importance_sampling", "seta")] == [
        0.6,
        1.0,
        0.5,
    ]
    assert FRESH.lengths("bike") == {"shorter": 0.5, "shorter@0.6": 0.6, "full": 1.0}
    done = made_up({"full": 80.0, "shorter": 70.0, SAME_TIME: 72.0, "winnow": 75.0})
    assert {job.share for job in done if job.arm == SAME_TIME} == {0.6}
    rows = {row["method"]: row for row in results(done)["rows"] if row["task"] == "bike"}
    assert rows["winnow"]["against"][SAME_TIME]["mean"] == pytest.approx(3.0, abs=0.1)
    assert rows["seta"]["against"][SAME_TIME]["mean"] == pytest.approx(10.0, abs=0.1)
    slow = rows["importance_sampling"]
    assert slow["against"][SAME_TIME]["mean"] == slow["to_full"]["mean"]
    assert "| *shorter@0.6* |" in page(results(done))
    monkeypatch.setattr(league_arms, "times", dict)
    assert same_time("bike", "winnow") is None


def test_committed_times_have_the_arms_of_their_task():
    for task, rounds in times().items():
        assert task in TASKS
        for entry in FRESH.entries(task):
            assert sum(entry.name in seconds for seconds in rounds) >= 2, (task, entry.name)
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
    batch, _ = next(iter(task.loader(package_texts().data, 0)))
    assert batch.shape == (32, lengths_of(batch).max())


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


def test_what_needs_values_of_another_kind_is_left_out():
    names = {
        task: {entry.name for of in (FIRST, FRESH) for entry in of.entries(task)} for task in TASKS
    }
    methods = {entry.name for entry in ENTRIES}
    assert methods - names["bike"] == {"kakurenbo", "rcap"} and methods - names["text"] == {"rcap"}
    assert names["fashion-10k"] == methods


def test_placebos_have_the_rate_of_their_method():
    done = made_up({}, waiting=[name for name in arms() if name.endswith(PLACEBO)])
    left = list(ready(done))
    assert left and all(
        job.arm.endswith(PLACEBO) and not job.looks and job.factor == 1.0 for job in left
    )


def test_the_labels_by_people_are_a_task(tmp_path, monkeypatch):
    monkeypatch.setenv("THRESHER_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="cifar10: none of its files"):
        problem_of("cifar10-5k-people").sets()
    assert problem_of("cifar10-5k").task.build(0)(near_images(2)).shape == (2, 10)


def near_images(count):
    return package_texts().train.tensors[0][:count].new_zeros(count, 3, 32, 32).float()


def test_findings_on_tasks_against_an_independent_computation(timed):
    done = made_up(
        {"full": 90.0, "repb": 89.9, "smaller": 88.0, "kakurenbo": 85.0, "infobatch": 90.5}
    )
    rows = {(row["task"], row["method"]): row for row in results(done)["rows"]}
    assert len(rows) == len(TASKS) * len(METHODS) - 1
    held = values(FRESH, done)
    compared = {
        place: Paired.of(
            [
                a["metric"] - b["metric"]
                for a, b in zip(held[place], held[place[0], "full"], strict=True)
            ]
        )
        for place in rows
    }
    expected = findings(compared, 0.2)
    for place, row in rows.items():
        assert row["finding"] == expected[place]
        assert row["to_full"]["mean"] == pytest.approx(compared[place].mean)
    assert rows[TASKS[0], "infobatch"]["finding"] == "no loss"
    assert rows[TASKS[0], "kakurenbo"]["finding"] == "loses"
    assert rows[TASKS[0], "repb"]["against"]["smaller"]["finding"] == "better"
    assert set(rows[TASKS[0], "repb"]["against"]) == {SAME_TIME, "shorter", "smaller", "placebo"}


def test_the_answers_over_all_tasks(timed):
    levels = {"full": 80.0, "winnow": 80.3, "smaller": 80.0, SAME_TIME: 80.0, "shorter": 80.0}
    done = made_up(levels | {"winnow" + PLACEBO: 80.0, "ies": 79.7})
    found = results(done)
    rows = {row["method"]: row for row in found["methods"]}
    assert next(iter(rows)) == "winnow" and set(rows) == set(METHODS)
    for kind in (SAME_TIME, "smaller", "full", "placebo"):
        assert rows["winnow"]["against"][kind]["answer"] == "better"
        assert rows["winnow"]["against"][kind]["points"] == pytest.approx(0.3, abs=0.05)
        assert len(rows["winnow"]["against"][kind]["by_task"]) == len(TASKS)
    assert rows["ies"]["against"]["full"]["answer"] == "worse"
    assert rows["seta"]["against"]["full"]["answer"] == "not decided"
    said = top(found)
    assert "Against fewer epochs in the same time, better: winnow (+0." in said
    assert "; worse: ies (-0." in said and "; not decided: " in said
    assert "(better)." in found["sentences"]["winnow"]
    assert "**better**: +" in summary(found)
    assert b"winnow" in figure(found) and figure(found) == figure(results(done))


def test_a_training_that_failed_leaves_its_task_out(timed):
    done = made_up({})
    before = {row["method"]: row for row in results(done)["methods"]}["winnow"]
    job = FRESH.counted(done, "bike", "winnow")[2]
    done[job] = {**done[job], "metric": 10.0}
    after = {row["method"]: row for row in results(done)["methods"]}["winnow"]
    assert (before["failed"], after["failed"]) == (0, 1)
    assert after["against"]["full"]["n"] == before["against"]["full"]["n"] - 1
    assert f"1 of {5 * len(TASKS)}" in summary(results(done))


def test_what_is_not_trained_is_not_compared():
    assert results({})["methods"] == []
    found = results(made_up({}, waiting=["seta"]))
    assert "seta" not in {row["method"] for row in found["methods"]}
    assert summary(found).endswith(f"Not finished yet: {', '.join(TASKS)}.")
    assert "Not finished" not in summary(results(made_up({})))
    assert "nothing is trained yet" in top(results({}))


def test_the_first_seeds_are_marked():
    found = results({**shared(), **load(RUNS)})
    first = {row["method"]: row for row in found["methods"] if row["method"] in FIRST.methods}
    assert set(first) == set(FIRST.methods)
    assert {one["answer"] for row in first.values() for one in row["against"].values()} == {
        "first seeds"
    }
    assert set(first["ucb"]["against"]) == {SAME_TIME, "smaller", "full", "placebo"}
    assert {*CONTROLS} <= {row["arm"] for row in found["controls"] if row["seeds"] == "first"}


def test_a_page_is_written_between_its_marks(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(f"before\n{MARKS[0]}old{MARKS[1]}\nafter\n")
    write(path, "new")
    assert path.read_text() == f"before\n{MARKS[0]}\n\nnew\n\n{MARKS[1]}\nafter\n"


def test_the_pages_are_those_of_the_results(tmp_path):
    found = json.loads((ROOT / "benchmarks" / "results" / "league.json").read_text())
    evidence = ROOT / "docs" / "evidence"
    for name, tables in (
        ("league.md", summary(found)),
        ("league-tasks.md", page(found)),
        ("results.md", top(found)),
    ):
        path = tmp_path / name
        path.write_text((evidence / name).read_text())
        write(path, tables)
        assert path.read_text() == (evidence / name).read_text(), name


def test_the_results_are_those_of_the_trainings():
    found = json.loads((ROOT / "benchmarks" / "results" / "league.json").read_text())
    assert found == json.loads(json.dumps(results({**shared(), **load(RUNS)})))


def test_the_claim_of_the_readme_is_that_of_the_results():
    methods = json.loads((ROOT / "benchmarks" / "results" / "league.json").read_text())["methods"]
    published = [row for row in methods if row["method"] in METHODS and row["method"] != "winnow"]
    words = ["none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]

    def count(answer, kind=SAME_TIME):
        return words[sum(row["against"][kind]["answer"] == answer for row in published)]

    claim = (
        f"Of {words[len(published)]} published methods with fresh seeds in our league, {count('better')} is "
        f"shown to be better than fewer epochs in the same time over all tasks, and {count('worse')} to be worse."
    )
    [winnow] = [row["against"][SAME_TIME] for row in methods if row["method"] == "winnow"]
    of_winnow = (
        f"over {winnow['n']} tasks together, it is ahead by {winnow['points']:.1f} points ({winnow['mean']:+.1f} "
        f"[{winnow['low']:+.1f}, {winnow['high']:+.1f}] standard deviations between seeds)."
    )
    text = (ROOT / "README.md").read_text()
    assert winnow["answer"] == "better" and claim in text and of_winnow in text


def test_the_page_says_where_winnow_was_developed():
    methods = json.loads((ROOT / "benchmarks" / "results" / "league.json").read_text())["methods"]
    [row] = [row for row in methods if row["method"] == "winnow"]
    developed_on = {problem.task.name for problem in PROBLEMS}
    others = {
        task: ahead
        for task, ahead in row["against"][SAME_TIME]["by_task"].items()
        if task not in developed_on
    }
    text = (ROOT / "docs" / "evidence" / "league.md").read_text()
    assert len(others) == 6 and min(others.values()) > 0 and "On each of the six others" in text
    assert f"It takes {row['time'][0]:.2f} to {row['time'][1]:.2f} of the CPU time" in text
