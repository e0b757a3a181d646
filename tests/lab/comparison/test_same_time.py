"""The control with as many epochs as fit into the time of its method."""

import json

import pytest

from in_process import InProcessWorkers
from lab.report.cases import comparison as made_up
from lab.report.cases import run as made_run
from thresher_lab.comparison import compare as comparison
from thresher_lab.comparison.compare import compare
from thresher_lab.comparison.controls import SAME_TIME, Job, parse_controls, same_time_share
from thresher_lab.comparison.summary import conclude, length_sentences, summarize
from thresher_lab.comparison.workers import Finished
from thresher_lab.report.first_screen import bottom_line, snippet
from thresher_lab.report.page import render_page
from thresher_lab.training.specs import parse_methods

EPOCHS = 8


@pytest.mark.parametrize(
    ("method", "full", "share"),
    [
        ([6.0, 7.0, 8.0], [10.0, 10.0, 10.0], 0.7),
        ([6.0, 7.0, 70.0], [10.0, 10.0, 10.0], 0.7),  # one run that was disturbed does not decide
        ([6.0, 8.0], [10.0, 20.0], 0.5),  # seed by seed, as in the table
        ([15.0], [10.0], 1.0),
        ([0.001], [10.0], 0.0001),
        ([0.0, 5.0], [0.0, 10.0], 0.5),
        ([0.0], [10.0], None),
        ([], [], None),
    ],
)
def test_the_share_of_the_epochs_that_fits(method, full, share):
    assert same_time_share(method, full) == (None if share is None else pytest.approx(share))


def test_it_trains_on_everything_at_most_and_on_a_part_of_an_epoch_at_least():
    [winnow] = parse_methods("winnow")
    jobs = [Job.control(SAME_TIME, 0, share, winnow) for share in (1.3, 0.62, 0.00001)]
    assert [job.share for job in jobs] == [1.0, 0.62, 0.001] and [
        job.epochs(EPOCHS) for job in jobs
    ] == [8, 5, 1]
    assert (
        jobs[1].name == "shorter@time of winnow, seed 0"
        and jobs[1].spec.name == "full"
        and jobs[1].is_control
    )
    assert jobs[1].key != Job.control("shorter", 0, 0.62).key
    assert parse_controls("smaller,shorter@time") == ("smaller", SAME_TIME)


class Timed(InProcessWorkers):
    """Two jobs at a time; trains nothing."""

    started: list = []
    stop_after = 100
    seconds = {"winnow": 6.0, "infobatch": 8.0}
    device = "cpu"

    def __init__(self, *count, **settings):
        super().__init__(*count, **settings)
        self._train = lambda job: Finished(job, self.outcome(job))

    @property
    def free(self):
        return len(self._jobs) < 2

    def start(self, job):
        if len(self.started) >= self.stop_after:
            raise KeyboardInterrupt
        self.started.append(job)
        super().start(job)

    def outcome(self, job):
        took = self.seconds.get(job.spec.name, 10.0 * job.share) + 0.001 * job.seed
        times = (
            {"cpu_s": took, "wall_s": took}
            if self.device == "cpu"
            else {"cpu_s": 1.0, "wall_s": took}
        )
        kept = round(job.share * (50 if job.spec.name != "full" else 100))
        cost = {
            "forward": kept,
            "backward": kept,
            "full_forward": 100,
            "full_backward": 100,
            "backward_to_forward": 2.0,
        }
        value = 0.9 + 0.001 * job.seed - (0.1 * (1 - job.share))
        history = [{"epoch": 0, "forward": kept, "backward": kept, "accuracy": value}]
        run = {
            "method": job.label,
            "settings": {},
            "seed": job.seed,
            "control_of": None,
            "device": self.device,
            **times,
        }
        return run | {
            "metric": {"name": "accuracy", "value": value},
            "cost": cost | {"ratio": kept / 100},
            "history": history,
        }


@pytest.fixture
def workers(monkeypatch):
    monkeypatch.setattr(comparison, "Workers", Timed)
    monkeypatch.setattr(Timed, "started", [])
    return Timed


def compared(out, methods="winnow,infobatch", seeds=(0, 1, 2), controls=("smaller", SAME_TIME)):
    return compare("digits", parse_methods(methods), list(seeds), EPOCHS, out, controls=controls)


def held(folder):
    return json.loads((folder / "comparison.json").read_text())["lengths"]


def test_the_first_two_seeds_set_its_length_once_for_each_method(tmp_path, workers):
    results = compared(tmp_path)
    assert held(tmp_path) == {
        "winnow": {"share": 0.6, "clock": "cpu_s", "seeds": 2},
        "infobatch": {"share": 0.8, "clock": "cpu_s", "seeds": 2},
    }
    trained = [job.name for job in workers.started]
    for method in ("winnow", "infobatch"):
        first = min(trained.index(f"shorter@time of {method}, seed {seed}") for seed in range(3))
        assert all(
            trained.index(f"{name}, seed {seed}") < first
            for name in ("full", method)
            for seed in range(2)
        )
        assert first < trained.index("full, seed 2")
    runs = [run for run in results["runs"] if run["method"] == SAME_TIME]
    assert [(run["control_of"], run["seed"], run["cpu_s"]) for run in runs[:3]] == [
        ("winnow", seed, 6.0 + 0.001 * seed) for seed in range(3)
    ]
    assert {json.dumps(run["length"]) for run in runs[3:]} == {
        '{"share": 0.8, "clock": "cpu_s", "seeds": 2}'
    }
    assert length_sentences(results) == [
        "The times of the first 2 seeds set the length of shorter@time."
    ]
    assert [row["method"] for row in results["summary"]][:4] == [
        "full",
        "winnow",
        SAME_TIME,
        "smaller@0.500",
    ]
    assert json.loads((tmp_path / "results.json").read_text())["runs"] == results["runs"]


def test_it_is_among_the_controls_that_are_not_named(tmp_path, workers):
    assert SAME_TIME in {
        row["method"] for row in compared(tmp_path, "winnow", controls=None)["summary"]
    }


@pytest.mark.parametrize("stop", [1, 4, 8, 11])
def test_a_length_that_was_decided_stays_after_an_interruption_and_for_further_seeds(
    tmp_path, workers, monkeypatch, stop
):
    monkeypatch.setattr(workers, "stop_after", stop)
    with pytest.raises(KeyboardInterrupt):
        compared(tmp_path, "winnow")
    before = json.loads((tmp_path / "comparison.json").read_text()).get("lengths", {})
    monkeypatch.setattr(workers, "stop_after", 100)
    compared(tmp_path, "winnow")
    assert held(tmp_path)["winnow"]["share"] == 0.6 and before in ({}, held(tmp_path))
    assert {job.share for job in workers.started if job.label == SAME_TIME} == {0.6}
    monkeypatch.setattr(workers, "seconds", {"winnow": 9.0})
    workers.started.clear()
    compared(tmp_path, "winnow", range(5))
    assert [job.share for job in workers.started if job.label == SAME_TIME] == [0.6, 0.6]


def test_on_another_device_it_is_the_time_on_the_clock(tmp_path, workers, monkeypatch):
    monkeypatch.setattr(workers, "device", "NVIDIA H100")
    results = compared(tmp_path, "winnow")
    assert held(tmp_path)["winnow"] == {"share": 0.6, "clock": "wall_s", "seeds": 2}
    assert "It took 0.60 of the wall time of full training. " in conclude(results).sentences[1]


def test_a_method_whose_time_is_not_known_has_no_such_control(tmp_path, workers, monkeypatch):
    monkeypatch.setattr(workers, "seconds", {"winnow": -1.0})
    results = compared(tmp_path, "winnow")
    assert [(one["method"], one["control"]) for one in results["left_out"]] == [
        ("winnow", SAME_TIME)
    ]
    assert SAME_TIME not in {row["method"] for row in results["summary"]}


def results_of(losses, *, took=0.6, method=0.6, wobble=0.0001, clock="cpu_s"):
    """A method that loses nothing, beside fewer epochs with these losses."""
    seeds, runs = len(losses), []
    times = {"full": 1.0, "m": method, SAME_TIME: took, "smaller@0.500": 0.55}
    lost = {
        "full": [0.0] * seeds,
        "m": [0.0] * seeds,
        SAME_TIME: losses,
        "smaller@0.500": [0.03 + 0.0001 * seed**2 for seed in range(seeds)],
    }
    for name, of in lost.items():
        for seed, loss in enumerate(of):
            value = 0.9 - loss + wobble * (-1) ** seed * (name != "full")
            run = {
                "method": name,
                "control_of": "m" if "@" in name else None,
                "seed": seed,
                "history": [{"accuracy": value}] * 8,
            }
            run |= {
                "metric": {"name": "accuracy", "value": value},
                "wall_s": times[name],
                "cpu_s": times[name],
            }
            length = (
                {"length": {"share": min(1.0, method), "clock": clock, "seeds": seeds}}
                if name == SAME_TIME
                else {}
            )
            runs.append(
                run
                | {"cost": {"ratio": {"full": 1.0, SAME_TIME: min(1.0, method)}.get(name, 0.5)}}
                | length
            )
    return {"runs": runs, "margin": 0.5, "epochs": 8, "device": "cpu", "summary": summarize(runs)}


LOSSES = (0.03, 0.031, 0.032, 0.0305)


def test_it_is_what_is_said_first():
    results = results_of(LOSSES)
    row = results["summary"][1]
    assert [*row["against"]] == [SAME_TIME, "smaller"]
    assert conclude(results).sentences == [
        "Use m: no loss within the margin of 0.5 points; better than fewer epochs in the same time; better than smaller "
        "batches.",
        "It took 0.60 of the CPU time of full training. Difference from full training: +0.00 points [-0.02, +0.02]. "
        "Difference from fewer epochs in the same time: +3.09 points [+2.95, +3.22].",
    ]
    assert conclude(results).pick is row and length_sentences(results) == []


def test_fewer_epochs_that_do_as_well_may_be_picked():
    results = results_of((0.0, 0.0001, 0.0002, 0.0001), method=0.62, took=0.58)
    assert conclude(results).sentences == [
        "Use shorter@time (fewer epochs in the same time): it loses at most 0.5 points.",
        "The closest method is m: no loss within the margin of 0.5 points; no better than fewer epochs in the same time; "
        "better than smaller batches. It took 0.62 of the CPU time of full training. Difference from full training: +0.00 "
        "points [-0.02, +0.02]. Difference from fewer epochs in the same time: +0.01 points [-0.00, +0.02].",
    ]
    assert conclude(results).pick is results["summary"][2]
    assert (
        snippet(results["summary"][2], {}, 8)
        == "epochs = 5  # instead of 8, with the schedule fitted to it"
    )


EQUAL = (0.0, 0.0001, 0.0002, 0.0001)
BETTER = (-0.03, -0.031, -0.032, -0.0305)
"""Losses of fewer epochs that are equal to the method, and better."""


@pytest.mark.parametrize(
    ("losses", "took", "finding"),
    [
        (LOSSES, 0.585, "better"),
        (LOSSES, 0.63, "better"),
        (LOSSES, 0.7, "better"),  # although they had more time
        (LOSSES, 0.57, None),
        (LOSSES, 0.5, None),
        (EQUAL, 0.615, "no better"),
        (EQUAL, 0.5, "no better"),  # although they had less time
        (EQUAL, 0.63, None),
        (BETTER, 0.5, "worse"),
        (BETTER, 0.63, None),
        ((0.0, 0.02, -0.01, 0.005), 0.5, "unclear"),
        ((0.0, 0.02, -0.01, 0.005), 0.7, "unclear"),
    ],
)
def test_no_verdict_comes_from_unequal_times(losses, took, finding):
    results = results_of(losses, took=took)
    row = results["summary"][1]
    assert row["against"][SAME_TIME]["finding"] == finding
    assert (
        "no verdict against fewer epochs in the same time: the times are not equal"
        in row["verdict"]
    ) is (finding is None)


def test_a_verdict_that_unequal_times_forbid_is_said_with_its_numbers():
    results = results_of(LOSSES, took=0.5)
    row = results["summary"][1]
    assert row["against"][SAME_TIME]["difference"] == pytest.approx(0.0309, abs=1e-4)
    assert (
        conclude(results)
        .sentences[1]
        .startswith(
            "The closest method is m: no loss within the margin of 0.5 points; no verdict against fewer epochs in the same time: the times "
            "are not equal; better than smaller batches. It took 0.60 of"
        )
    )
    assert conclude(results).pick is None


def test_without_its_time_there_is_no_verdict():
    results = results_of(LOSSES)
    for run in results["runs"]:
        run["cpu_s"] = run["cpu_s"] if run["method"] != SAME_TIME else None
    row = summarize(results["runs"])[1]
    assert row["against"][SAME_TIME]["finding"] is None


def test_an_open_verdict_is_said_with_its_numbers():
    _, closest, decide = conclude(results_of((0.0, 0.02, -0.01, 0.005))).sentences
    assert "; not told apart from fewer epochs in the same time; " in closest
    assert "Difference from fewer epochs in the same time: +0.38 points [-1.61, +2.36]." in closest
    assert decide.endswith("would decide, a rough estimate from 4.")


def test_a_method_slower_than_full_training_is_compared_with_all_epochs():
    results = results_of((0.0, 0.0001, 0.0002, 0.0001), method=1.3, took=1.0)
    assert results["summary"][1]["against"][SAME_TIME]["finding"] == "no better"
    assert " It took 1.30 of the CPU time of full training. " in conclude(results).sentences[1]


def test_the_report_says_it_first():
    results, _ = made_up({"full": 0.0, "kakurenbo": 0.3})
    length = {"share": 0.7, "clock": "cpu_s", "seeds": 3}
    results["runs"] += [
        made_run(SAME_TIME, seed, 0.3, control_of="kakurenbo", lost=0.02) | {"length": length}
        for seed in range(3)
    ]
    results["summary"] = summarize(results["runs"], 0.5)
    found = bottom_line(results)
    assert found["sentences"][1].startswith("The closest method is kakurenbo: ")
    assert "fewer epochs in the same time" in found["sentences"][1]
    page = render_page(results, {})
    assert found["sentences"][1] in page
    assert "fewer epochs in the same time (shorter@time)" in page
