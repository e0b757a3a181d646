"""The row of one method: what is trained, the numbers, and what the text says about where they come from."""

from concurrent.futures import Future
from statistics import fmean, stdev
from types import SimpleNamespace

import pytest
from benchmarks.league import own, ray_pool, row
from benchmarks.league.arms import PLACEBO
from benchmarks.league.row import QUICK, SEEDS, Row, held_of, lines, numbers, tasks_of, train_job
from benchmarks.league.tasks import TASKS
from benchmarks.winnow.jobs import Job, run_missing

from thresher_lab.comparison.controls import SAME_TIME
from thresher_lab.comparison.ray_workers import Cluster

METHOD = """
from typing import ClassVar
from dataclasses import dataclass
import thresher

@dataclass(frozen=True)
class First:
    stage: ClassVar = "batch"
    requires: ClassVar = thresher.Requirements(signals=("loss",))
    keep: float = 0.5

    def init_state(self):
        return {}

    def count(self, n):
        return max(1, int(self.keep * n))

    def plan_batch(self, signals, state, *, step, generator):
        return thresher.BatchPlan(signals["loss"].argsort()[: self.count(len(signals["loss"]))]), state

class NoMethod:
    pass
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "first_rows.py"
    path.write_text(METHOD)
    own.class_in.cache_clear()
    return path


FULL = 80.0
"""Metric of full training, whose seeds differ by hundredths."""


def metric(level, seed):
    return level + 0.01 * ((1 + seed) ** 2 % 7)


@pytest.fixture(autouse=True)
def committed(monkeypatch):
    """Committed trainings: smaller batches one point behind full training, Winnow one point ahead."""
    levels = {"full": FULL, "smaller": FULL - 1, "winnow": FULL + 1}
    held = {
        (task, name): [{"metric": metric(level, seed), "cost": {"ratio": 0.5}} for seed in SEEDS]
        for task in TASKS
        for name, level in levels.items()
    }
    monkeypatch.setattr(row, "committed", lambda: held)


def made_up(of, level=70.0, cost=0.5, share=0.6):
    """Results of all trainings of a row: the best rate is 1, and the method takes a share of the time of full training."""
    done = {}
    while jobs := [job for job in of.ready(done) if job not in done]:
        for job in jobs:
            value = metric(level, job.seed + len(job.task)) - (job.factor != 1.0)
            value -= (20 + 0.1 * (job.seed % 3)) * job.arm.endswith(PLACEBO)
            done[job] = {"metric": value, "cost": {"ratio": cost}, "cpu_s": share}
            if job.arm == of.name and not job.looks:
                done[job]["full"] = {"metric": metric(FULL, job.seed), "cpu_s": 1.0}
    return done


def test_what_is_trained_by_task():
    of = Row("first")
    done = made_up(of)
    for task in QUICK:
        jobs = [job for job in done if job.task == task]
        by_arm = {name: [job for job in jobs if job.arm == name] for name in of.arms}
        assert {name: len(found) for name, found in by_arm.items()} == {
            of.name: 6 + 5,
            SAME_TIME: 6 + 5,
            of.name + PLACEBO: 5,
        }
        assert {job.share for job in by_arm[SAME_TIME]} == {0.6}
        assert {job.factor for job in by_arm[of.name + PLACEBO]} == {1.0}
    without = Row("first", "no signals")
    assert not any(job.arm.endswith(PLACEBO) for job in made_up(without))


def test_nothing_counts_before_its_rate_and_its_time_are_known():
    of = Row("first")
    jobs = list(of.ready({}))
    assert jobs and all(job.looks and job.arm == of.name for job in jobs)


def test_numbers_against_an_independent_computation():
    of = Row("first", tasks=QUICK[:2])
    done = made_up(of)
    found = numbers(of, held_of(of, done))
    spread = stdev(metric(FULL, seed) for seed in SEEDS)
    units = []
    for task in of.tasks:
        own_runs = [done[job]["metric"] for job in of.counted(done, task, of.name)]
        differences = [a - metric(FULL, seed) for a, seed in zip(own_runs, SEEDS, strict=True)]
        units.append(fmean(differences) / spread)
        one = found["tasks"][task]
        assert one["against"]["full"].mean == pytest.approx(fmean(differences))
        assert one["time"] == pytest.approx(0.6) and one["full"] == pytest.approx(
            fmean(metric(FULL, seed) for seed in SEEDS)
        )
        assert one["against"]["placebo"].mean == pytest.approx(20.1)
        assert one["against"]["smaller"].mean == pytest.approx(fmean(differences) + 1)
        assert one["against"][SAME_TIME].mean == 0
    assert found["over_tasks"]["full"].mean == pytest.approx(fmean(units))
    assert found["over_tasks"]["full"].n == 2


def test_the_text_says_where_the_numbers_come_from():
    of = Row("first", tasks=QUICK[:2])
    text = "\n".join(lines(of, made_up(of)))
    table = {line.split()[0]: line for line in text.splitlines() if line}
    assert "to fewer epochs in the same time  to smaller batches" in table["method"]
    assert table["first"].split()[1:4] == ["+0.0", "[+0.0,", "+0.0]"]
    assert "winnow" in table and "seta" not in table
    assert "fashion-10k: 70.0" in text and " at 0.50 of the cost and 0.60 of the CPU time; " in text
    assert "has the committed metric, digit for digit, on 10 of 10 seeds." in text
    assert "other versions" not in text and "not at equal cost" not in text
    done = made_up(of, cost=0.8)
    for job in of.counted(done, QUICK[0], of.name):
        done[job]["full"]["metric"] += 0.5
    text = "\n".join(lines(of, done))
    assert "on 5 of 10 seeds" in text and "are of other versions or another kind" in text
    assert "the method 0.80 on fashion-10k, 0.80 on fashion-10k-noisy: differences to them" in text


def test_a_method_without_a_placebo_and_tasks_that_wait():
    of = Row("first", "it chooses at random", QUICK[:2])
    done = made_up(of)
    text = "\n".join(lines(of, done))
    assert "No placebo: it chooses at random." in text
    done.pop(of.counted(done, QUICK[1], of.name)[3])
    assert f"Not finished yet: {QUICK[1]}." in "\n".join(lines(of, done))
    assert lines(of, {}) == [f"Not finished yet: {', '.join(QUICK[:2])}."]


def test_a_training_that_failed_is_named_and_leaves_its_task_out():
    of = Row("first", tasks=QUICK[:2])
    done = made_up(of)
    done[of.counted(done, QUICK[1], of.name)[0]]["metric"] = 10.0
    assert "of the CPU time, 1 of 5 trainings failed; " in "\n".join(lines(of, done))
    assert numbers(of, held_of(of, done))["over_tasks"]["full"].n == 1


def test_full_training_and_the_method_train_in_turns(file, monkeypatch):
    order = []

    def train_arm(job, arm, problem):
        assert problem.task.name == job.task
        order.append((job.seed, arm.spec(job.share).label))
        return {"metric": 1.0, "cpu_s": 1.0}

    monkeypatch.setattr(row, "train_arm", train_arm)
    monkeypatch.setattr(row, "full_job", lambda task, seed: Job(task, "full", 1.0, 1.6, seed))
    spec = own.parse(f"{file}:First")
    name = Row(spec.label).name
    for seed in (0, 1):
        found = train_job(spec, Job("bike", name, 0.5, 1.0, seed))
        assert found["full"] == {"metric": 1.0, "cpu_s": 1.0}
    assert order == [(0, "First"), (0, "full"), (1, "full"), (1, "First")]
    order.clear()
    assert "full" not in train_job(spec, Job("bike", name, 0.5, 1.0, 1000))
    train_job(spec, Job("bike", name + PLACEBO, 0.5, 1.0, 0))
    train_job(spec, Job("bike", SAME_TIME, 0.7, 1.0, 0))
    assert [label for _, label in order] == ["First", "First placebo", "full"]


def test_a_method_that_refuses_a_task_names_the_way_out(file, monkeypatch):
    def refuse(*_):
        raise ValueError("needs classes")

    monkeypatch.setattr(row, "train_arm", refuse)
    spec = own.parse(f"{file}:First")
    with pytest.raises(
        ValueError, match=r"First on bike: needs classes\. .* --without bike leaves"
    ):
        train_job(spec, Job("bike", "method First", 0.5, 1.0, 1000))


def test_a_class_in_a_file_is_a_method_with_settings_and_a_placebo(file):
    spec = own.parse(f"{file}:First:keep=0.25:forward_passes=once")
    assert spec.create().keep == 0.25 and spec.label == "First:keep=0.25 once"
    placebo = row.arm_of(spec, "x" + PLACEBO).spec(0.5)
    assert type(placebo.create()).__name__ == "FirstPlacebo"


def test_a_changed_file_has_a_folder_of_its_own(file, tmp_path):
    first = own.folder_of(own.parse(f"{file}:First"), tmp_path)
    assert first == own.folder_of(own.parse(f"{file}:First"), tmp_path)
    assert first != own.folder_of(own.parse(f"{file}:First:keep=0.4"), tmp_path)
    file.write_text(METHOD.replace("max(1", "max(2"))
    own.class_in.cache_clear()
    assert first != own.folder_of(own.parse(f"{file}:First"), tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}:First:kep=1", "First has no setting 'kep'; did you mean 'keep'"),
        ("{}", "name the class of the file, as in .*first_rows.py:MyMethod"),
        ("{}:Second", "has no 'Second'; it defines First, NoMethod"),
        ("{}:NoMethod", "NoMethod is not the class of a method, which has a `stage`"),
        ("{}:First,order_dp", "give one class after"),
        ("order_dp,seta", "league: give one method, and not full training; got 'order_dp,seta'"),
        ("full", "league: give one method, and not full training"),
        ("seta:0.5", "^league: .*0.5"),
        ("uniform+selective_backprop", "league: give one method"),
        ("no_such_method", "no method 'no_such_method'"),
    ],
)
def test_what_is_no_method_is_refused(file, text, message):
    with pytest.raises(ValueError, match=message):
        own.parse(text.format(file))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        own.parse(f"{tmp_path / 'none.py'}:First")


def test_tasks():
    assert tasks_of(every_task=False, without="") == list(QUICK)
    assert tasks_of(every_task=True, without=",".join(TASKS[3:])) == [*TASKS[:3]]
    with pytest.raises(ValueError, match="no task of the league 'biek'; did you mean 'bike'"):
        tasks_of(every_task=True, without="biek")
    with pytest.raises(ValueError, match="no task is left"):
        tasks_of(every_task=False, without=",".join(QUICK))


class Here:
    """A pool that trains at once."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, function, job):
        future = Future()
        future.set_result(function(job))
        return future


def test_the_command_goes_on_where_it_was_stopped(file, tmp_path, monkeypatch, capsys):
    spec = own.parse(f"{file}:First")
    of = Row(spec.label, "", QUICK[:1])
    known = made_up(of)
    trained = []

    def made(_, job):
        trained.append(job)
        if len(trained) == 5:
            raise KeyboardInterrupt
        return known[job]

    monkeypatch.setattr(row, "train_job", made)
    monkeypatch.setattr(
        row, "run_missing", lambda *given, pool, say: run_missing(*given, pool=Here(), say=say)
    )
    options = {"without": ",".join(QUICK[1:]), "say": lambda _: None}
    with pytest.raises(KeyboardInterrupt):
        row.run(f"{file}:First", tmp_path / "runs", **options)
    assert capsys.readouterr().out == ""
    before = len(trained)
    row.run(f"{file}:First", tmp_path / "runs", **options)
    assert len(trained) <= len(known) + 2 and not set(trained[: before - 2]) & set(trained[before:])
    assert "Over 1 tasks, in standard deviations" in capsys.readouterr().out


def test_a_cluster_trains_with_the_clone_on_its_path(monkeypatch):
    options = {}

    def remote(**given):
        options.update(given)

        def wrap(function):
            future = Future()
            return SimpleNamespace(
                remote=lambda *call: SimpleNamespace(
                    future=lambda: future.set_result(function(*call)) or future
                )
            )

        return wrap

    monkeypatch.setattr(ray_pool, "connected", lambda _: SimpleNamespace(remote=remote))
    with ray_pool.RayPool(Cluster("local")) as pool:
        assert pool.submit(str, 3).result() == "3"
    assert options["runtime_env"]["env_vars"]["PYTHONPATH"].endswith("/src")
