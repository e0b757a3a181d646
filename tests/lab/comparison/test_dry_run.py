import pytest

from thresher_lab.cli._comparison import dry_run_lines
from thresher_lab.comparison import dry_run as dry
from thresher_lab.comparison.compare import folder_identity
from thresher_lab.comparison.controls import Job
from thresher_lab.comparison.dry_run import dry_run, seconds_left
from thresher_lab.training.specs import MethodSpec, parse_methods
from thresher_lab.training.store import Store

COST = {
    "forward": 100,
    "backward": 100,
    "full_forward": 100,
    "full_backward": 100,
    "backward_to_forward": 2.0,
}
RUN = {
    "settings": {},
    "control_of": None,
    "device": "cpu",
    "metric": {"name": "accuracy", "value": 0.9},
    "history": [],
}


def finish(folder, label, seed, seconds, share=1.0):
    """Writes a finished run."""
    job = Job.of(MethodSpec(label), seed)
    cost = COST | {"forward": round(100 * share), "backward": round(100 * share), "ratio": share}
    run = RUN | {"method": label, "seed": seed, "wall_s": seconds, "cpu_s": seconds, "cost": cost}
    Store(folder, folder_identity("digits@200", 4)).save_run(job.key, run)


def planned(folder, methods="infobatch", seeds=(0, 1), **settings):
    return dry_run("digits@200", parse_methods(methods), list(seeds), 4, folder, **settings)


def test_what_is_finished_and_what_is_not(tmp_path):
    before = planned(tmp_path / "out")
    assert len(before["runs"]) == 14 and not any(run["finished"] for run in before["runs"])
    assert before["seconds_left"] is None and not (tmp_path / "out").exists()
    said = dry_run_lines(before)
    assert said[:2] == [
        "full: 2 runs of 4 epochs, 0 finished",
        "infobatch: 2 runs of 4 epochs, 0 finished",
    ]
    assert "  shorter of infobatch: 2 runs, 0 finished" in said
    assert said[-2:] == [
        "0 of 14 runs are finished.",
        "The time left is unknown until a run of each line has finished.",
    ]


def test_controls_of_finished_runs_have_a_length_and_nothing_is_written(tmp_path):
    for seed in (0, 1):
        finish(tmp_path, "full", seed, 8.0)
        finish(tmp_path, "infobatch", seed, 4.0, share=0.75)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    found = planned(tmp_path, controls=("shorter", "shorter@time"))
    assert {run["arm"]: run["epochs"] for run in found["runs"] if run["control"]} == {
        "shorter@time of infobatch": 2, "shorter of infobatch": 3,
    }  # fmt: skip
    assert sum(run["finished"] for run in found["runs"]) == 4
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_the_time_left_comes_from_finished_runs(tmp_path):
    finish(tmp_path, "full", 0, 8.0)
    finish(tmp_path, "infobatch", 0, 4.0)
    found = planned(tmp_path, seeds=(0, 1, 2), controls=(), jobs=2)
    assert found["seconds_left"] == pytest.approx((2 * 8 + 2 * 4) / 2)
    assert dry_run_lines(found)[-2:] == [
        "2 of 6 runs are finished.",
        "The rest takes about 0:00:12, estimated from the finished runs.",
    ]
    assert seconds_left([], 1) == 0


def test_a_folder_of_another_comparison_is_refused(tmp_path):
    Store(tmp_path, folder_identity("digits@200", 4)).save_run("a", {})
    with pytest.raises(ValueError, match="another comparison: its epochs is 4, here it is 5"):
        dry_run("digits@200", parse_methods("infobatch"), [0], 5, tmp_path)


def test_several_processes_that_train_together_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(dry, "number_of_processes", lambda: 2)
    with pytest.raises(ValueError, match="--dry-run: give the command by itself"):
        planned(tmp_path)
