"""Submissions to the league: what is accepted, and the reason of each refusal."""

import json
import shutil
from dataclasses import asdict, replace

import pytest
from benchmarks.kept import RESULTS
from benchmarks.league import own
from benchmarks.league.arms import PLACEBO
from benchmarks.league.row import IDENTITY, QUICK, RUNS, Row
from benchmarks.league.submission import faults, main

from thresher_lab.comparison.controls import SAME_TIME

LABEL = "First:keep=0.5"
METHOD = "method " + LABEL


def trained(row):
    done = {}
    while jobs := [job for job in row.ready(done) if job not in done]:
        for job in jobs:
            done[job] = {"metric": 70.0 - (job.factor != 1.0), "cost": {"ratio": 0.5}, "cpu_s": 0.6}
            if job.arm == row.name and not job.looks:
                done[job]["full"] = {"metric": 88.0, "cpu_s": 1.0}
    return done


def write(folder, done, **identity):
    folder.mkdir(exist_ok=True)
    (folder / "first_rows.py").write_text("class First:\n    stage = 'batch'\n")
    spec = own.FileSpec("First", {"keep": 0.5}, {}, str(folder / "first_rows.py"))
    known = {
        "method": LABEL,
        "name": "First",
        "settings": {"keep": 0.5},
        "file": own.Script(folder / "first_rows.py", spec.name).recipe,
        "versions": {},
        "no_placebo": "",
    }
    (folder / IDENTITY).write_text(json.dumps(known | identity))
    lines = [json.dumps({"job": asdict(job), "result": result}) for job, result in done.items()]
    (folder / RUNS).write_text("".join(f"{line}\n" for line in lines))
    return folder


@pytest.fixture
def submitted(tmp_path):
    def submit(change=lambda done: done, **identity):
        return write(tmp_path / "mine", change(trained(Row(LABEL))), **identity)

    return submit


def without(done, *, arm=None, **of):
    """The trainings without those with an arm and other values of their jobs."""
    return {
        job: result
        for job, result in done.items()
        if not (
            (arm is None or job.arm == arm)
            and all(getattr(job, name) == value for name, value in of.items())
        )
    }


def test_a_whole_submission_is_accepted(submitted, capsys):
    folder = submitted()
    assert faults(folder) == []
    main([str(folder)])
    assert capsys.readouterr().out == f"{folder}: accepted\n"


def test_a_method_without_signals_needs_no_placebo(tmp_path):
    row = Row(LABEL, "it chooses at random")
    assert faults(write(tmp_path / "mine", trained(row), no_placebo=row.no_placebo)) == []


PLACEBOS = METHOD + PLACEBO


@pytest.mark.parametrize(
    ("left_out", "reason"),
    [
        ({}, "no run."),
        ({"arm": PLACEBOS}, f"the arm {PLACEBOS!r} is missing."),
        ({"arm": SAME_TIME}, "the arm 'shorter@time' is missing."),
        (
            {"arm": METHOD, "factor": 1.6, "seed": 1001},
            f"{METHOD}: the rate x 1.6 was not tried with seed 1001.",
        ),
        (
            {"arm": SAME_TIME, "factor": 0.6, "seed": 1000},
            "shorter@time: the rate x 0.6 was not tried with seed 1000.",
        ),
        ({"arm": METHOD, "seed": 8}, f"{METHOD}: seed 8 is missing at the rate x 1."),
        ({"arm": PLACEBOS, "seed": 5}, f"{PLACEBOS}: seed 5 is missing at the rate x 1."),
    ],
)
def test_what_lacks_an_arm_a_rate_or_a_seed_is_refused(submitted, left_out, reason):
    [first, *others] = faults(submitted(lambda done: without(done, **left_out, task=QUICK[1])))
    assert first in (f"{QUICK[1]}: {reason}", f"{QUICK[1]}, {reason}")
    assert all("cannot be judged before" in fault for fault in others)


def test_an_arm_whose_rate_or_length_is_unknown_is_refused(submitted):
    found = faults(submitted(lambda done: without(done, arm=METHOD, seed=5, task=QUICK[0])))
    assert f"{QUICK[0]}, {METHOD}: seed 5 is missing at the rate x 1." in found
    assert any("shorter@time: its seeds 5 to 9 cannot be judged" in fault for fault in found)


def test_full_training_must_stand_beside_every_seed(submitted):
    def change(done):
        for job, result in done.items():
            if job.seed == 9:
                result.pop("full", None)
        return done

    expected = [f"{task}, {METHOD}: full training is missing with seed 9." for task in QUICK]
    assert faults(submitted(change)) == expected


def test_a_number_that_is_not_finite_is_refused(submitted):
    def change(done):
        for job, result in done.items():
            if job.seed == 7 and job.task == QUICK[0] and job.arm == METHOD:
                result["metric"] = float("nan")
        return done

    said = f"{QUICK[0]}, {METHOD}: seed 7 has a number that is not finite."
    assert faults(submitted(change)) == [said]


def test_runs_that_are_not_of_the_plan_are_refused(submitted):
    def change(done):
        job = next(job for job in done if job.arm == METHOD and job.seed == 9)
        return done | {replace(job, seed=10): done[job]}

    [fault] = faults(submitted(change))
    assert fault.startswith("1 runs are not of the plan, such as fashion-10k, ")


def test_another_file_is_refused_and_so_is_none(submitted):
    folder = submitted()
    file = folder / "first_rows.py"
    file.write_text("class First:\n    stage = 'epoch'\n")
    said = "the file of the method, or a module that it imports, is not that of the runs."
    assert faults(folder) == [said]
    file.unlink()
    assert faults(folder) == ["the file of the method is missing."]


@pytest.mark.parametrize("name", [IDENTITY, RUNS])
def test_a_missing_file_is_named(submitted, name, capsys):
    folder = submitted()
    (folder / name).unlink()
    assert faults(folder) == [f"{name} is missing."]
    with pytest.raises(SystemExit) as left:
        main([str(folder)])
    assert left.value.code == 1
    assert capsys.readouterr().err == f"{folder}: {name} is missing.\n"


def test_an_entry_that_is_missing_is_named(submitted):
    folder = submitted()
    (folder / IDENTITY).write_text("{}")
    assert "method.json has no 'method'." in faults(folder)


def test_a_file_that_was_copied_is_that_of_the_runs(tmp_path):
    spec = own.parse("kakurenbo")
    copied = tmp_path / "kakurenbo.py"
    shutil.copy(own.source_of(spec), copied)
    assert own.Script(copied, spec.name).recipe == own.identity_of(spec)["file"]


@pytest.mark.parametrize(
    "folder", [path for path in (RESULTS / "league").iterdir() if path.is_dir()]
)
def test_the_submissions_are_whole(folder):
    assert faults(folder) == []
