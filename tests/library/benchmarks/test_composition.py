"""The page on composing batches quotes the committed trainings, and trainings go on where they stopped."""

import json

import torch
from benchmarks import composition


def test_the_page_has_what_was_measured():
    found = composition.results(composition.load(composition.RUNS))
    assert found["tasks"].keys() == composition.TASKS.keys()
    assert json.loads(json.dumps(found)) == json.loads(composition.RESULTS.read_text())
    assert composition.page(found) == composition.PAGE.read_text()


def test_each_arm_takes_its_best_rate_and_counted_seeds_follow_the_looks():
    done = {}
    jobs = []
    for job in composition.planned("docstrings", done):
        jobs.append(job)
        # The lower rate is better for batches by length, the higher one for all others.
        sign = -1 if job.arm == "by length" else 1
        done[job] = {"score": sign * job.rate, "cpu_s": 1.0, "steps": 1}
    looks = [job for job in jobs if job.seed == composition.LOOK]
    counted = jobs[len(looks) :]
    task = composition.TASKS["docstrings"]
    assert jobs[: len(looks)] == looks and len(looks) == len(task.arms) * len(task.rates)
    assert len(counted) == task.seeds * (len(task.arms) + len(task.timed))
    rates = {job.arm: job.rate for job in counted}
    assert rates["at random"] == max(task.rates)
    assert rates["by length"] == rates[task.timed[0]] == min(task.rates)


def test_blocks_are_rows_with_the_byte_after_them():
    size = composition.Gpt.BLOCK
    rows = composition.blocks_of(torch.arange(2 * size + 5))
    assert rows.shape == (2, size + 1)
    assert rows[:, 0].tolist() == [0, size] and rows[:, -1].tolist() == [size, 2 * size]
