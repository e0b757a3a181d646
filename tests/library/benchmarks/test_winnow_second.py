"""The comparison of Winnow's second version: what is run in which order, and the verdict on made-up trainings."""

import json

import pytest
from benchmarks.marks import between_marks
from benchmarks.winnow import figure, second
from benchmarks.winnow.jobs import SHORT, Job

GAINS = {
    "full": 0.0,
    "full, stratified": 0.1,
    "first version": -1.0,
    "smaller batches": -2.0,
    "fewer epochs": -3.0,
    second.SAME_TIME: -2.5,
}
"""Points of some arms; the others have -0.2."""


def finished(gains=GAINS, tasks=second.SEVEN) -> dict:
    """Trainings of all arms on some tasks at half of the cost, with a little noise of each seed in every arm."""
    done = {}
    while True:
        ready = [job for job in second.ready(done) if job.task in tasks and job not in done]
        jobs = [job for job in ready if job.share in (0.5, 1.0) or job.arm == second.SAME_TIME]
        if not jobs:
            return done
        for number, job in enumerate(jobs):
            metric = (
                80
                + job.seed % 10
                + gains.get(job.arm, -0.2)
                + 0.001 * (number % 7)
                - abs(job.factor - 1)
            )
            cpu = 0.55 if job.arm in ("in fewer steps", "fewer epochs") else 1.0
            done[job] = {"metric": metric, "cpu_s": cpu, "cost": {"ratio": 0.5, "steps": 790}}


def test_looks_come_first_and_counted_trainings_have_the_rate_of_their_look():
    first = list(second.ready({}))
    assert all(job.looks for job in first) and first[0] == Job(
        second.SEVEN[0], "full", 1.0, SHORT.factors[0], 1000
    )
    counted = [job for job in finished() if not job.looks]
    assert {job.factor for job in counted} == {1.0} and {job.seed for job in counted} == set(
        second.SEEDS
    )
    assert {job.arm for job in counted} == {arm.name for arm in second.ARMS}


@pytest.mark.parametrize(
    ("changes", "met", "default"),
    [
        ({}, True, True),
        ({"second version": -0.9}, False, True),
        ({"first version": -0.2}, False, False),
        ({"second version": -1.5}, False, False),
        ({"in fewer steps": -3.5}, False, True),
    ],
)
def test_the_verdict_follows_from_the_differences(changes, met, default):
    found = second.verdict(finished(GAINS | changes))
    assert (found["met"], found["becomes the default"]) == (met, default) and len(
        found["tasks"]
    ) == 7
    assert second.goal_in_words(found).startswith(
        f"7 of 7 tasks are complete. The goal is {'met' if met else 'not met'}."
    )


def test_a_task_that_is_not_complete_decides_nothing():
    done = finished(tasks=second.SEVEN[:2])
    assert second.verdict(done)["tasks"] == list(second.SEVEN[:2])
    assert "2 of 7 tasks are complete. The goal is not met so far." in second.text(done)


def test_the_results_are_written_to_a_file_and_a_page(tmp_path, monkeypatch, capsys):
    runs, page, file = tmp_path / "runs.jsonl", tmp_path / "page.md", tmp_path / "found.json"
    done = finished(tasks=second.SEVEN[:1])
    runs.write_text(
        "".join(
            json.dumps({"job": vars(job), "result": result}) + "\n" for job, result in done.items()
        )
    )
    page.write_text(
        "Before\n" + "\n".join((second.BEGIN, second.END, *second.GAINS, *second.FIRST_TABLE))
    )
    given = ["second", "--show", "--runs", str(runs), "--results", str(file)]
    given += [word for name in ("--page", "--stratified", "--winnow") for word in (name, str(page))]
    monkeypatch.setattr("sys.argv", given)
    second.main()
    assert "second version - this" in page.read_text() and "+0.10" in capsys.readouterr().out
    table = json.loads(file.read_text())["tables"][f"{second.SEVEN[0]} at 0.5"]
    assert table["second version"]["to_full"]["mean"] == pytest.approx(-0.2, abs=0.01)
    assert table["fewer epochs"]["second_minus"]["mean"] == pytest.approx(2.8, abs=0.01)
    assert (
        "| -0.20 ± 0.00 |" in page.read_text().split(second.FIRST_TABLE[0])[1]
        and "not finished" in page.read_text()
    )


def test_the_pages_the_results_and_the_figure_are_those_of_the_trainings():
    done = second.timed(second.load(second.RUNS))
    found = json.loads(figure.RESULTS.read_text())
    assert found == json.loads(json.dumps(second.results(done)))
    for path, marks, write in (
        ("docs/evidence/winnow-measured.md", (second.BEGIN, second.END), second.text),
        ("docs/stratified.md", second.GAINS, second.gains),
        ("docs/winnow.md", second.FIRST_TABLE, second.first_table),
    ):
        page = (figure.ROOT / path).read_text()
        assert between_marks(page, *marks, write(done)) == page
    drawn = figure.figure(found)
    for svg in (drawn, figure.FIGURE.read_bytes()):
        assert all(name.encode() in svg for name, _ in figure.ARMS.values())
    points = [
        figure.points_of(found["tables"], task, arm)
        for task in second.AT_OTHER_SHARES
        for arm in figure.ARMS
    ]
    # A marker is used once a point, and once in the legend.
    assert drawn.count(b"<use ") >= len(figure.ARMS) + sum(map(len, points))
    assert min(map(len, points)) > 0


def test_times_of_trainings_made_again_are_those_of_the_machine_of_full_training():
    done, before = second.load(second.RUNS), second.earlier()
    timed = second.timed(done)
    places = {(job.task, job.arm, job.share, job.seed): one for job, one in timed.items()}
    for job in before:
        place = job.task, job.arm, job.share, job.seed
        if job.task != "characters" and place in places:
            same = [
                one["cpu_s"]
                for other, one in before.items()
                if (other.task, other.arm, other.share, other.seed) == place
            ]
            assert places[place]["cpu_s"] in same


def test_the_removed_first_version_cannot_be_trained():
    with pytest.raises(ValueError, match="the first version of winnow, since removed"):
        second.run(Job("text-10", "first version", 0.5, 1.0, 0))
