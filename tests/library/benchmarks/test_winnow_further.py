import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from benchmarks.winnow.further.table import BEGIN, END, kept, lines_of, results, text, with_text
from benchmarks.winnow.further.trainings import (
    BASE,
    SEEDS,
    TASKS,
    WAYS,
    Job,
    looks_of,
    ready,
)
from benchmarks.winnow.jobs import load

ROOT = Path(__file__).parents[3]
RUNS, RESULTS = (
    ROOT / "benchmarks" / "results" / name
    for name in ("winnow-further-runs.jsonl.gz", "winnow-further.json")
)
PAGE = ROOT / "docs" / "evidence" / "winnow-measured.md"

ATTEMPTS = [way.name for way in WAYS if way.attempt]


def planted(
    different: Mapping[tuple[str, str], float], without: tuple[str, str] | None = None
) -> dict[Job, dict[str, Any]]:
    """Returns results of 88 points, with noise, and with the given differences of ways on tasks; some may be left out."""
    done: dict[Job, dict[str, Any]] = {}
    while waiting := [
        job for job in ready(done) if job not in done and (job.arm, job.task) != without
    ]:
        for job in waiting:
            noise = 0.02 * ((7 * job.seed + 3 * len(job.arm)) % 5 - 2)
            value = (
                88.0
                + noise
                + different.get((job.arm, job.task), 0.0)
                - (0.0 if job.factor == 1.0 else 1.0) * job.looks
            )
            done[job] = {"metric": value, "averaged": value, "cost": {"ratio": job.share}}
    return done


def test_every_way_looks_at_the_same_grid_with_seeds_that_are_not_counted() -> None:
    for way in WAYS:
        looks = looks_of(way, "fashion-10k")
        assert [job.factor for job in looks] == [0.6, 0.6, 1.0, 1.0, 1.6, 1.6] and all(
            job.looks for job in looks
        )
    counted = [job for job in ready(planted({})) if not job.looks]
    assert {job.seed for job in counted} == set(range(SEEDS)) and not set(range(SEEDS)) & {
        1000,
        1001,
    }


def lines(done: Mapping[Job, Any]) -> dict[str, Any]:
    return {task: lines_of(done, task) for task in TASKS}


def test_a_way_that_is_better_on_one_task_is_kept() -> None:
    name = ATTEMPTS[0]
    won = lines(planted({(name, TASKS[1]): 0.5}))
    assert kept(won) == [name]
    assert (
        won[TASKS[1]][name].to_winnow.mean == pytest.approx(0.5, abs=0.05)
        and won[TASKS[1]][name].chance < 0.001
    )
    assert won[TASKS[0]][name].chance > 0.025
    assert won[TASKS[0]][BASE].chance is None and won[TASKS[0]]["full"].chance is None


def test_a_way_that_is_worse_on_another_task_or_not_complete_is_not_kept() -> None:
    name = ATTEMPTS[0]
    worse = planted({(name, TASKS[1]): 0.5, (name, TASKS[2]): -0.5})
    assert kept(lines(worse)) == []
    assert (
        f"**Kept: nothing.** Better than Winnow after the correction: {name} (on {TASKS[1]})."
        in text(worse)
    )
    assert f"Worse, without a correction: {name} (on {TASKS[2]})." in text(worse)
    missing = planted({(name, TASKS[1]): 0.5}, without=(name, TASKS[2]))
    assert kept(lines(missing)) == [] and f"Not complete on all tasks: {name}." in text(missing)


def test_the_correction_is_over_the_ways_of_a_task() -> None:
    done = planted({})
    found = {
        name: line for name, line in lines_of(done, TASKS[0]).items() if line.chance is not None
    }
    assert list(found) == ATTEMPTS
    least = min(found, key=lambda name: found[name].to_winnow.chance(0.0))
    assert found[least].chance == pytest.approx(
        min(1.0, len(ATTEMPTS) * found[least].to_winnow.chance(0.0))
    )


def test_the_page_and_the_results_are_those_of_the_trainings() -> None:
    done = load(RUNS)
    page = PAGE.read_text()
    assert with_text(page, done) == page and BEGIN in page and END in page
    assert json.loads(RESULTS.read_text()) == json.loads(json.dumps(results(done)))


def test_every_committed_training_has_the_cost_that_it_should_have() -> None:
    for job, result in load(RUNS).items():
        assert result["cost"]["ratio"] == pytest.approx(job.share, abs=0.01), job
