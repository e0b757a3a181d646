import json
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from depth import DEEP, depth
from in_process import InProcessWorkers
from thresher_lab.comparison import compare as comparison
from thresher_lab.comparison.compare import Watcher, compare, is_decided
from thresher_lab.comparison.controls import SAME_TIME, Job, parse_controls
from thresher_lab.comparison.summary import conclude
from thresher_lab.comparison.workers import Finished, RunRefusedError, RunValueError
from thresher_lab.recipes.running import task_of
from thresher_lab.report.first_screen import snippet
from thresher_lab.report.page import write_report
from thresher_lab.training.folders import sole_use
from thresher_lab.training.loop import train, with_costs
from thresher_lab.training.specs import MethodSpec, parse_methods

N, EPOCHS, RATIO = 1000, 4, 1.0
STOPS = range(1, 10) if DEEP else (1, 2, 5, 9)
TWO = ("uniform", "shorter")
COSTS = {"kakurenbo": 0.75, "infobatch": 0.7502, "selective_backprop": 0.9}


def outcome(job):
    """A run that costs as much as its method does, without training."""
    keep = (
        job.spec.given.get("keep", COSTS.get(job.spec.name, 1.0))
        if job.spec.name != "full"
        else 1.0
    )
    done = round(keep * job.share * N * EPOCHS)
    run = {
        "method": job.label,
        "settings": job.spec.settings,
        "seed": job.seed,
        "control_of": None,
        "device": "cpu",
    }
    run |= {
        "metric": {"name": "accuracy", "value": 0.9 + job.seed / 100},
        "wall_s": 1.0,
        "cpu_s": 1.0,
    }
    counts = {"forward": done, "backward": done}
    run["cost"] = counts | {
        "full_forward": N * EPOCHS,
        "full_backward": N * EPOCHS,
        "backward_to_forward": RATIO,
    }
    return with_costs(run | {"history": [{"epoch": 0} | counts]}, RATIO)


class StoppedError(Exception):
    pass


class InProcess:
    """Jobs side by side, the younger one finished first; stops where it is told to, and refuses what it is told to."""

    started: list = []
    stop_after = 100
    at_once = 2
    refuses: Any = staticmethod(lambda job: False)

    def __init__(self, *_, **__):
        self._busy = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    @property
    def busy(self):
        return bool(self._busy)

    @property
    def free(self):
        return len(self._busy) < self.at_once

    def start(self, job):
        if len(self.started) >= self.stop_after:
            raise StoppedError
        self.started.append(job.name)
        self._busy.append(job)

    def next_event(self):
        job = self._busy.pop()
        if self.refuses(job):
            raise RunRefusedError(job, "less than one row a batch.")
        return Finished(job, outcome(job))


class Notes(Watcher):
    def __init__(self):
        self.runs, self.over, self.common, self.without, self.gone = 0, [], [], [], []

    def planned(self, runs, epochs, look=None):
        self.runs = runs

    def finished(self, job, run, *, reused):
        self.over.append((job.name, reused))

    def shared(self, job):
        self.common.append(job.name)

    def left_out(self, method, control, why):
        self.without.append((method, control, why))

    def dropped(self, job):
        self.gone.append(job.name)


@pytest.fixture
def workers(monkeypatch):
    monkeypatch.setattr(comparison, "Workers", InProcess)
    monkeypatch.setattr(InProcess, "started", [])
    return InProcess


def written(folder):
    return json.loads((folder / "results.json").read_text())


def compared(out, methods, **settings):
    return compare("digits", parse_methods(methods), [0, 1], EPOCHS, out, **settings)


def test_every_run_has_all_controls_of_its_cost(tmp_path, workers):
    results = compared(
        tmp_path, "kakurenbo,selective_backprop:forward_passes=twice,uniform:keep=0.3"
    )
    counted = ("uniform", "shorter", "smaller", "placebo")
    assert [(run["method"], run["control_of"], run["seed"]) for run in results["runs"]] == [
        ("full", None, 0),
        ("full", None, 1),
        *(
            (name, of, seed)
            for method, cost in (("kakurenbo", "0.750"), ("selective_backprop twice", "0.900"))
            for seed in (0, 1)
            for name, of in (
                (method, None),
                (SAME_TIME, method),
                *((f"{kind}@{cost}", method) for kind in counted),
            )
        ),
        ("uniform:keep=0.3", None, 0),
        ("uniform:keep=0.3", None, 1),
    ]
    assert [row["method"] for row in results["summary"]] == [
        "full", "kakurenbo", SAME_TIME, *(f"{kind}@0.750" for kind in counted),
        "selective_backprop twice", SAME_TIME, *(f"{kind}@0.900" for kind in counted), "uniform:keep=0.3",
    ]  # fmt: skip
    for run in results["runs"]:
        assert run["history"][-1]["cost"] == run["cost"]["ratio"]
    assert results["left_out"] == [] and written(tmp_path) == json.loads(json.dumps(results))


def test_methods_of_one_cost_share_their_controls_but_for_the_placebo(tmp_path, workers):
    notes = Notes()
    results = compared(tmp_path, "kakurenbo,infobatch", watcher=notes)
    assert notes.runs == 26 and len(workers.started) == 18
    shared = ("shorter", "smaller", "uniform")
    same = [
        f"shorter@time of infobatch, seed {seed}" for seed in (0, 1)
    ]  # whose methods took the same time
    assert sorted(notes.common) == sorted(
        [f"{kind}@0.750, seed {seed}" for kind in shared for seed in (0, 1)] + same
    )
    of = {run["control_of"] for run in results["runs"] if run["method"] == "shorter@0.750"}
    assert of == {"kakurenbo", "infobatch"} and len(results["runs"]) == 26


def test_runs_go_seed_by_seed(tmp_path, workers, monkeypatch):
    """Two seeds set the length of the control in the same time, so that of the first seed comes with the second one."""
    monkeypatch.setattr(workers, "at_once", 1)
    compare("digits", parse_methods("kakurenbo,infobatch"), [3, 1, 2], EPOCHS, tmp_path)
    seeds = [int(name.rpartition(" ")[2]) for name in workers.started if "shorter@time" not in name]
    assert seeds == sorted(seeds, key=[3, 1, 2].index) and len(seeds) == 24
    of_seed = [
        name for name in workers.started if name.endswith("seed 1") and "shorter@time" not in name
    ]
    assert [name.partition(",")[0].partition("@")[0] for name in of_seed] == [
        "full", "kakurenbo", "infobatch", "uniform", "shorter", "smaller", "placebo", "placebo"
    ]  # fmt: skip
    before_the_last_seed = workers.started[: workers.started.index("full, seed 2")]
    assert {f"shorter@time of kakurenbo, seed {seed}" for seed in (3, 1)} <= {*before_the_last_seed}


def test_the_mean_number_of_other_runs(monkeypatch):
    now = 0.0
    monkeypatch.setattr(comparison, "time", SimpleNamespace(monotonic=lambda: now))
    company, begun, ended = (
        comparison.ConcurrentRuns(),
        {0: "a", 2: "b", 6: "c", 20: "d"},
        {4: "b", 10: "a", 12: "c", 20.0: "d"},
    )
    found = {}
    for now in sorted({*begun, *ended}):
        if now in begun:
            company.begin(begun[now])
        if now in ended:
            found[ended[now]] = company.end(ended[now])
    # a: 2 of its 10 seconds beside b, 4 beside c; b: all beside a; c: 4 of its 6 seconds beside a; d: no time
    assert found == {"b": 1.0, "a": 0.6, "c": 0.67, "d": 0.0}


def test_each_run_has_the_number_of_other_runs(tmp_path, workers):
    runs = compared(tmp_path, "kakurenbo")["runs"]
    assert all(0 <= run["other_runs"] <= 1 for run in runs)
    files = [json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*.json")]
    assert files and all("other_runs" in run for run in files)


def test_few_samples_for_many_epochs_are_a_control_on_request(tmp_path, workers):
    assert not [
        run
        for run in compared(tmp_path / "default", "kakurenbo")["runs"]
        if run["method"].startswith("fewer")
    ]
    results = compared(tmp_path / "asked", "kakurenbo", controls=parse_controls("smaller,fewer"))
    fewer = [run for run in results["runs"] if run["method"].startswith("fewer")]
    assert [(run["method"], run["control_of"], run["seed"]) for run in fewer] == [
        ("fewer@0.750", "kakurenbo", 0), ("fewer@0.750", "kakurenbo", 1),
    ]  # fmt: skip
    assert all(
        run["settings"] == {"keep": 0.75, "fixed": True} and run["cost"]["ratio"] == 0.75
        for run in fewer
    )
    row = results["summary"][1]
    assert [*row["against"]] == ["smaller", "fewer"]
    assert "not told apart from smaller batches and few samples, many epochs" in row["verdict"]
    assert snippet(results["summary"][-1], fewer[0]["settings"], EPOCHS).startswith(
        "run = thresher.attach(\n    thresher.UniformSubset(keep=0.75, fixed=True),"
    )


def test_few_samples_take_the_steps_that_their_cost_pays_for():
    """All epochs on half of the samples: as many steps on whole batches as a random half in each epoch."""
    task = task_of("digits@400")
    jobs = {kind: Job.control(kind, 0, 0.5) for kind in ("uniform", "fewer", "smaller")}
    runs = {
        kind: train(task, task.load(None), job.spec, seed=0, epochs=3, label=job.label)
        for kind, job in jobs.items()
    }
    assert (
        runs["fewer"]["cost"]["steps"]
        == runs["uniform"]["cost"]["steps"]
        < runs["smaller"]["cost"]["steps"]
    )
    assert (
        runs["fewer"]["cost"]["ratio"] == pytest.approx(0.5, abs=0.01)
        and runs["fewer"]["method"] == "fewer@0.500"
    )


WITHOUT_SIGNALS = "RandomBackprop chooses without losses or scores: there is nothing to permute"


def test_by_default_a_method_without_signals_has_no_placebo(tmp_path, workers):
    notes = Notes()
    results = compared(tmp_path, "random_backprop,kakurenbo,kakurenbo:placebo=true", watcher=notes)
    assert notes.without == [
        ("random_backprop", "placebo", WITHOUT_SIGNALS),
        ("kakurenbo placebo", "placebo", "its signals are permuted already"),
    ]
    assert results["left_out"][0] == {
        "method": "random_backprop",
        "control": "placebo",
        "why": WITHOUT_SIGNALS,
    }
    placebos = [run for run in results["runs"] if run["method"].startswith("placebo")]
    assert {run["control_of"] for run in placebos} == {"kakurenbo"} and notes.runs == len(
        results["runs"]
    ) == 2 + 10 + 12 + 10


def test_asked_for_by_name_it_is_refused(tmp_path, workers):
    with pytest.raises(ValueError, match=f"random_backprop: {WITHOUT_SIGNALS}"):
        compared(tmp_path / "out", "random_backprop", controls=("placebo",))
    assert not (tmp_path / "out").exists() and not workers.started
    assert len(compared(tmp_path, "full,uniform:keep=0.3", controls=("placebo",))["runs"]) == 4


@pytest.mark.parametrize("seed", [0, 1])
def test_smaller_batches_that_cannot_be_made_are_left_out_for_all_seeds(
    tmp_path, workers, monkeypatch, seed
):
    monkeypatch.setattr(
        workers, "refuses", lambda _, job: job.label == "smaller@0.750" and job.seed == seed
    )
    notes = Notes()
    results = compared(tmp_path, "kakurenbo,infobatch,selective_backprop", watcher=notes)
    assert notes.gone == [f"smaller@0.750, seed {seed}"]
    assert sorted(notes.without) == [
        (name, "smaller", "less than one row a batch.") for name in ("infobatch", "kakurenbo")
    ]
    assert {
        run["control_of"] for run in results["runs"] if run["method"].startswith("smaller")
    } == {"selective_backprop"}
    rows = {row["method"]: row for row in results["summary"] if row["control_of"] is None}
    assert [*rows["kakurenbo"]["against"]] == [SAME_TIME, "uniform", "shorter", "placebo"]
    assert [one["control"] for one in results["left_out"]] == ["smaller", "smaller"]


def test_a_run_that_was_asked_for_is_refused_with_its_reason(tmp_path, workers, monkeypatch):
    monkeypatch.setattr(workers, "refuses", lambda _, job: job.label.startswith("smaller"))
    with pytest.raises(RunValueError, match="smaller@0.750, seed .: less than one row a batch"):
        compared(tmp_path / "by name", "kakurenbo", controls=("smaller",))
    monkeypatch.setattr(workers, "refuses", lambda _, job: job.label == "winnow:share=0.01")
    with pytest.raises(RunValueError, match="winnow:share=0.01, seed .: less than one row a batch"):
        compared(tmp_path / "the method", "winnow:share=0.01")


@pytest.mark.parametrize("stop", STOPS)
def test_a_comparison_that_was_stopped_anywhere_goes_on_to_the_same_results(
    tmp_path, workers, monkeypatch, stop
):
    compared(tmp_path / "whole", "kakurenbo,infobatch", controls=TWO)
    everything = set(workers.started)
    monkeypatch.setattr(workers, "started", [])
    monkeypatch.setattr(workers, "stop_after", stop)
    with pytest.raises(StoppedError):
        compared(tmp_path / "stopped", "kakurenbo,infobatch", controls=TWO)
    kept = {
        path.name: path.stat().st_mtime_ns for path in (tmp_path / "stopped" / "runs").glob("*")
    }
    assert stop - 2 <= len(kept) <= stop
    monkeypatch.setattr(workers, "started", [])
    monkeypatch.setattr(workers, "stop_after", 100)
    notes = Notes()
    compared(tmp_path / "stopped", "kakurenbo,infobatch", controls=TWO, watcher=notes)
    stopped, whole = (written(tmp_path / name) for name in ("stopped", "whole"))
    for run in stopped["runs"] + whole["runs"]:
        assert run.pop("other_runs") >= 0  # which is measured
    assert stopped == whole
    assert len(workers.started) == len(everything) - len(kept)
    assert sum(reused for _, reused in notes.over) == len(kept)
    after = {
        path.name: path.stat().st_mtime_ns for path in (tmp_path / "stopped" / "runs").glob("*")
    }
    assert after.items() >= kept.items()


@pytest.mark.parametrize("at_once", [1, 2])
def test_killed_after_every_run_it_has_a_report_each_time_and_the_same_end(
    tmp_path, workers, monkeypatch, at_once
):
    def older_first(self):
        job = self._busy.pop(0)
        return Finished(
            job, outcome(job) | {"cpu_s": took[job.spec.name], "wall_s": took[job.spec.name]}
        )

    def compared(out):
        methods = parse_methods("kakurenbo,infobatch")
        kinds = (SAME_TIME, "uniform")
        compare(
            "digits",
            methods,
            [3, 1, 2],
            EPOCHS,
            out,
            controls=kinds,
            on_results=lambda _: write_report(out),
        )

    took = {"full": 8.0, "kakurenbo": 6.0, "infobatch": 5.0, "uniform": 7.0}
    monkeypatch.setattr(workers, "at_once", at_once)
    monkeypatch.setattr(workers, "next_event", older_first)
    compared(tmp_path / "whole")
    finished, over = 0, False
    while not over:
        monkeypatch.setattr(workers, "started", [])
        monkeypatch.setattr(workers, "stop_after", at_once)
        with suppress(StoppedError):
            compared(tmp_path / "killed")
        killed = written(tmp_path / "killed")
        runs = [*(tmp_path / "killed" / "runs").glob("*.json")]
        assert len(runs) > finished and killed["summary"][0]["verdict"] == "the baseline"
        finished, over = len(runs), "running" not in killed
        assert (
            over
            or f"Not finished: {finished} of at most "
            in (tmp_path / "killed" / "report.html").read_text()
        )
        assert len(
            {(run["method"], run["control_of"], run["seed"]) for run in killed["runs"]}
        ) == len(killed["runs"])
    ends = [written(tmp_path / name) for name in ("killed", "whole")]
    for run in [run for end in ends for run in end["runs"]]:
        run.pop("other_runs")  # which is measured
    assert ends[0] == ends[1]


GAINS = {2: 0.0, 4: 0.004, 5: 0.0, 7: 0.004, 8: 0.0, 9: 0.004, 0: 0.002}
"""Gain of the method by seed, in the order of training."""


@pytest.mark.parametrize("at_once", [1, 2])
def test_it_stops_when_every_verdict_is_decided(tmp_path, workers, monkeypatch, at_once):
    """Killed after every run it ends with the same seeds, and with what the same seeds show."""

    def next_event(self):
        job = self._busy.pop(0)
        run = outcome(job)
        gain = {"kakurenbo": GAINS[job.seed], SAME_TIME: GAINS[job.seed] - 0.01}.get(job.label, 0)
        run["metric"]["value"] += gain + job.seed**2 / 1e6 * (job.label == SAME_TIME)
        seconds = {"full": 8.0, "kakurenbo": 4.0}.get(job.label, 8.0 * job.share)
        return Finished(job, run | {"cpu_s": seconds, "wall_s": seconds})

    def compared(out, seeds=tuple(GAINS), **settings):
        kinds = (SAME_TIME, "uniform")
        methods = parse_methods("kakurenbo")
        return compare("digits", methods, seeds, EPOCHS, out, controls=kinds, **settings)

    monkeypatch.setattr(workers, "at_once", at_once)
    monkeypatch.setattr(workers, "next_event", next_event)
    compared(tmp_path / "whole", until_decided=True)
    whole = written(tmp_path / "whole")
    seeds = list(dict.fromkeys(run["seed"] for run in whole["runs"]))
    assert seeds == list(GAINS)[:5] and whole["until"] == "decided" and whole["looks"] == 1
    assert is_decided(whole["summary"])
    killed = {"running": True}
    while "running" in killed:
        monkeypatch.setattr(workers, "started", [])
        monkeypatch.setattr(workers, "stop_after", at_once)
        with suppress(StoppedError):
            compared(tmp_path / "killed", until_decided=True)
        killed = written(tmp_path / "killed")
        assert killed["until"] == "decided"
    for run in killed["runs"] + whole["runs"]:
        run.pop("other_runs")  # which is measured
    assert killed == whole
    page = write_report(tmp_path / "killed").read_text()
    assert "verdicts are valid at every look" in page and "bars are valid at every look" in page
    # Fewer seeds do not decide; without the flag, the verdicts are corrected for the looks before.
    monkeypatch.setattr(workers, "stop_after", 100)
    fewer = compared(tmp_path / "killed", tuple(GAINS)[:4], until_decided=True)
    assert not is_decided(fewer["summary"]) and len(fewer["runs"]) == 16
    plain = compared(tmp_path / "killed", tuple(GAINS)[:5])
    assert "until" not in plain and plain["looks"] == 5
    assert "valid at every look" not in write_report(tmp_path / "killed").read_text()


def test_equal_seeds_end_it(tmp_path, workers, monkeypatch):
    monkeypatch.setattr(workers, "at_once", 1)
    monkeypatch.setattr(comparison, "equal_seeds", lambda runs: [[0, 1, 2]] if runs else [])
    results = compare(
        "digits",
        parse_methods("kakurenbo"),
        range(9),
        EPOCHS,
        tmp_path,
        controls=(),
        until_decided=True,
    )
    assert results["equal_seeds"] and len(workers.started) == 6


def test_it_needs_seeds_to_choose_from(tmp_path, workers):
    with pytest.raises(
        ValueError, match=r"--until decided: needs more than 3 seeds .* got \[0, 1\]"
    ):
        compared(tmp_path, "kakurenbo", until_decided=True)
    assert not workers.started


def test_the_report_is_drawn_after_every_run_of_a_real_comparison(tmp_path, monkeypatch):
    pages = []

    def draw(goes_on):
        pages.append(write_report(tmp_path, refreshes=goes_on).read_text())

    monkeypatch.setattr(comparison, "Workers", InProcessWorkers)
    results = compare(
        "digits@128", parse_methods("infobatch"), [0, 1], 2, tmp_path, jobs=1, on_results=draw
    )
    assert len(pages) == len(results["runs"]) and all(
        'http-equiv="refresh"' in page for page in pages
    )
    assert 'http-equiv="refresh"' not in write_report(tmp_path).read_text()


def test_runs_that_are_kept_are_told_before_others_are_trained(tmp_path, workers):
    whole = compared(tmp_path, "kakurenbo", controls=())
    [lost] = (tmp_path / "runs").glob("full-seed0*.json")
    lost.unlink()
    notes = Notes()
    assert (
        compared(tmp_path, "kakurenbo", controls=(), watcher=notes)["summary"] == whole["summary"]
    )
    assert [reused for _, reused in notes.over] == [True] * 3 + [False]


def test_fewer_kinds_of_controls(tmp_path, workers):
    assert len(compared(tmp_path / "none", "kakurenbo", controls=())["runs"]) == 4
    one = compared(tmp_path / "one", "kakurenbo", controls=("shorter",))
    assert [row["method"] for row in one["summary"]] == ["full", "kakurenbo", "shorter@0.750"]
    assert len(workers.started) == 4 + 6


def test_costs_are_held_to_what_full_training_measured_with_the_first_seed(
    tmp_path, workers, monkeypatch
):
    def measured(job):
        run = outcome(job)
        return run | {"cost": run["cost"] | {"backward_to_forward": 3.0 + job.seed}}

    monkeypatch.setattr(
        workers, "next_event", lambda self: Finished(job := self._busy.pop(), measured(job))
    )
    results = compared(tmp_path, "kakurenbo", controls=TWO)
    assert {run["cost"]["backward_to_forward"] for run in results["runs"]} == {3.0}


@pytest.mark.parametrize(("seeds", "epochs", "jobs"), [([], 1, 1), ([0], 0, 1), ([0], 1, 0)])
def test_nothing_to_do(tmp_path, seeds, epochs, jobs):
    with pytest.raises(ValueError, match="compare: needs a seed, and 1 or more epochs and jobs"):
        compare("digits", parse_methods("full"), seeds, epochs, tmp_path, jobs=jobs)


@pytest.mark.parametrize("margin", [0, -0.5, float("nan")])
def test_a_margin_is_above_zero(tmp_path, margin):
    with pytest.raises(ValueError, match="compare: `margin` must be above 0, got"):
        compare("digits", parse_methods("full"), [0], 1, tmp_path, margin=margin)


@pytest.mark.parametrize(
    ("track", "why"),
    [("nobody", "accelerate has no such tracker"), ("clearml", "its package is not installed")],
)
def test_a_tracker_is_installed(tmp_path, track, why):
    with pytest.raises(ValueError, match=f"--track {track}: {why}; installed: "):
        compare("digits", parse_methods("full"), [0], 1, tmp_path, track=track)
    assert not list(tmp_path.iterdir())


def test_a_placebo_of_a_method_before_training_is_refused_before_anything_is_trained(tmp_path):
    pruned = [MethodSpec("prune", {"scores": "el2n.parquet"})]
    with pytest.raises(
        ValueError, match="Prune decides before training; a placebo is for methods of"
    ):
        compare("digits", pruned, [0], 1, tmp_path / "out", controls=("placebo",))
    assert not (tmp_path / "out").exists()


def test_names_of_classes_and_a_busy_machine_are_in_the_results(tmp_path, workers, monkeypatch):
    def finished(self):
        job = self._busy.pop()
        return Finished(
            job, outcome(job) | {"classes": ["cat", "dog"], "busy": job.spec.name != "full"}
        )

    plain = compared(tmp_path / "plain", "kakurenbo", controls=())
    assert plain["classes"] is None and "busy" not in plain["runs"][0]
    monkeypatch.setattr(InProcess, "next_event", finished)
    results = compared(tmp_path / "named", "kakurenbo", controls=())
    assert results["classes"] == ["cat", "dog"]
    assert [run["busy"] for run in results["runs"]] == [False, False, True, True]
    assert not any("classes" in run for run in results["runs"])


def test_files_beside_a_run_are_named(tmp_path, workers):
    before = compared(tmp_path, "kakurenbo", controls=())
    assert not any({"samples", "shown"} & {*run} for run in before["runs"])
    for path in (tmp_path / "runs").glob("kakurenbo*.json"):
        path.with_suffix(".shown").write_text("{}")
    shown = [run.get("shown") for run in compared(tmp_path, "kakurenbo", controls=())["runs"]]
    assert shown[:2] == [None, None] and all((tmp_path / path).is_file() for path in shown[2:])


def test_a_folder_in_use_is_refused_before_anything_is_trained_or_written(tmp_path, workers):
    with sole_use(tmp_path), pytest.raises(ValueError, match="is in use by another comparison"):
        compared(tmp_path, "kakurenbo")
    assert not workers.started and not (tmp_path / "comparison.json").exists()
    assert compared(tmp_path, "kakurenbo")["runs"]


def test_the_folder_is_in_use_until_the_results_are_written(tmp_path, workers):
    class Second(Watcher):
        def finished(self, job, run, *, reused):
            with pytest.raises(ValueError, match="is in use"):
                compared(tmp_path, "kakurenbo")

    assert compared(tmp_path, "kakurenbo", watcher=Second())["runs"]


class InTurn:
    """Trains jobs in this process, one after the other."""

    def __init__(self, _, **settings):
        from thresher_lab.comparison.workers import Trainer

        self._train = Trainer(lambda _: None, **settings)
        self._job = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    @property
    def busy(self):
        return self._job is not None

    @property
    def free(self):
        return self._job is None

    def start(self, job):
        self._job = job

    def next_event(self):
        outcome, self._job = self._train(self._job), None
        assert isinstance(outcome, Finished), outcome
        return outcome


SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def build(seed):
    torch.manual_seed({seed})
    x = torch.randn(80, 4)
    y = (x[:, 0] + torch.randn(80) > 0).long()
    model = nn.Linear(4, 2)
    evaluate = lambda m: (m(x).argmax(1) == y).float().mean().item()
    return dict(model=model, data=DataLoader(TensorDataset(x, y), 8, shuffle=True), criterion=nn.CrossEntropyLoss(),
                optimizer=torch.optim.SGD(model.parameters(), .05), evaluate=evaluate)
"""


@pytest.mark.parametrize(
    ("seed", "distinct", "said"),
    [
        (
            "seed % 2",
            [1, 2],
            ["Seeds 1, 3 are the same training", "Seeds 2, 4 are the same training"],
        ),
        ("seed", [1, 2, 3, 4], []),
        *depth(
            [],
            [
                ("42", [1], ["Seeds 1, 2, 3, 4 are the same training"]),
                ("max(seed, 2)", [1, 3, 4], ["Seeds 1, 2 are the same training"]),
            ],
        ),
    ],
)
def test_seeds_that_are_one_training_count_once(tmp_path, monkeypatch, seed, distinct, said):
    path = tmp_path / "own.py"
    path.write_text(SCRIPT.format(seed=seed))
    monkeypatch.setattr("thresher_lab.comparison.compare.Workers", InTurn)
    results = compare(
        f"{path}:build", parse_methods("uniform"), [1, 2, 3, 4], 2, tmp_path / "out", controls=[]
    )
    assert sorted({run["seed"] for run in results["runs"]}) == distinct
    sentences = conclude(results).sentences
    if not said:
        assert not results["equal_seeds"] and "same training" not in " ".join(sentences)
        return
    assert len(sentences) == len(said) and all(map(str.startswith, sentences, said))
    assert all("Use `seed` in your function" in sentence for sentence in sentences)
    if len(distinct) < 3:
        assert (
            f"not enough seeds to tell: {len(distinct)} of at least 3"
            in results["summary"][1]["verdict"]
        )


BY_LENGTH = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Sentences(TensorDataset):
    lengths = [1 + i % 7 for i in range(40)]

def build(seed):
    torch.manual_seed(seed)
    model = nn.Linear(2, 2)
    data = Sentences(torch.randn(40, 2), torch.arange(40) % 2)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    return model, loader, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), lambda model: 1.0
"""


def test_batches_by_length_are_compared_with_full_training_and_a_method(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(BY_LENGTH)
    methods = parse_methods("full:batches=by_length,winnow:share=0.5:batches=by_length")
    results = compare(f"{file}:build", methods, [0], 2, tmp_path / "out", jobs=1, controls=())
    runs = {run["method"]: run for run in results["runs"]}
    assert [*runs] == ["full", "full by_length", "winnow:share=0.5 by_length"]
    assert runs["full by_length"]["cost"]["ratio"] == 1
    assert runs["full by_length"]["cost"]["steps"] == runs["full"]["cost"]["steps"] == 20
    assert runs["winnow:share=0.5 by_length"]["cost"]["ratio"] == pytest.approx(0.5)
    # Lengths from 1 to 7 in batches of 4 have little padding if they are sorted by length.
    entry = runs["full by_length"]["history"][0]
    assert entry["tokens"] == sum(1 + i % 7 for i in range(40))
    assert entry["tokens"] > 0.8 * entry["padded_tokens"]
