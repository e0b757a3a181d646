import pytest

from depth import depth
from thresher_lab.advise.pace import Pace
from thresher_lab.cli._comparison import dry_run_lines
from thresher_lab.comparison import dry_run as dry
from thresher_lab.comparison.compare import folder_identity
from thresher_lab.comparison.controls import Job
from thresher_lab.comparison.dry_run import DryWorkers, Passes, Prices, dry_run, outcome, schedule
from thresher_lab.training.specs import MethodSpec, parse_methods
from thresher_lab.training.store import ReadOnlyStore, Store

ONCE = "selective_backprop:keep=0.33:forward_passes=once"
PACE = Pace(loader=0.0, forward=1.0, backward=2.0, optimizer=0.0, scoring=1.0, half=2.0)
MADE_UP = {"infobatch": Passes(0.5, 0.75, 0.75), "selective_backprop:keep=0.33 once": Passes(0.8, 1.0, 0.4)}
PRICES = Prices(imports=2.0, start=3.0, run=1.0, epoch=10.0, evaluation=0.5, trace=4.0, pace=PACE, methods=MADE_UP)


def seconds(job, epochs=4):
    return PRICES.seconds(job, epochs)


def test_a_run_takes_its_epochs_its_evaluations_and_what_is_done_once():
    [infobatch, once, kakurenbo] = parse_methods(f"infobatch,{ONCE},kakurenbo")
    assert seconds(Job.of(MethodSpec("full"), 0)) == 1 + 4 * 10 + 4 * 0.5
    assert seconds(Job.of(infobatch, 0)) == 1 + 4 * 5 + 4 * 0.5
    assert seconds(Job.of(once, 0)) == 1 + 4 + 4 * 8 + 4 * 0.5
    assert seconds(Job.of(kakurenbo, 0)) == seconds(Job.of(MethodSpec("full"), 0))


def test_controls_take_what_their_kind_does():
    [once] = parse_methods(ONCE)
    assert seconds(Job.control("uniform", 0, 0.7)) == pytest.approx(1 + 0.7 * 40 + 2)
    assert seconds(Job.control("shorter", 0, 0.7)) == pytest.approx(1 + 0.7 * 40 + 3 * 0.5)
    assert seconds(Job.control("smaller", 0, 0.5)) == pytest.approx(1 + 2 / 3 * 40 + 2)
    assert seconds(Job.control("placebo", 0, 0.7, once)) == seconds(Job.of(once, 0))


def test_costs_are_counted_as_those_of_runs():
    [infobatch, once] = parse_methods(f"infobatch,{ONCE}")
    assert outcome(Job.of(infobatch, 0), PRICES)["cost"]["ratio"] == pytest.approx(0.75)
    assert outcome(Job.of(once, 0), PRICES)["cost"]["ratio"] == pytest.approx((1 + 2 * 0.4) / 3)
    assert outcome(Job.control("shorter", 0, 0.3), PRICES)["cost"]["ratio"] == pytest.approx(0.3)


def test_the_clock_of_the_workers_goes_on_with_the_jobs():
    jobs = [Job.of(MethodSpec("full"), seed) for seed in range(3)]
    workers = DryWorkers(2, lambda job: 10.0 + job.seed, lambda job: {"seed": job.seed}, 5.0)
    workers.start(jobs[0])
    workers.start(jobs[1])
    assert workers.busy and not workers.free
    assert workers.next_event().job == jobs[0] and workers.wall_s == 15.0
    workers.start(jobs[2])  # in the process that is idle, which need not be started again
    assert [workers.next_event().run["seed"] for _ in range(2)] == [1, 2]
    assert (workers.wall_s, workers.cpu_s, workers.busy) == (27.0, 43.0, False)


@pytest.fixture
def store(tmp_path):
    return ReadOnlyStore(tmp_path / "out", folder_identity("digits@200", 4))


def test_what_runs_is_what_a_comparison_runs(store, monkeypatch):
    monkeypatch.setattr(dry, "available_cores", lambda: 2)
    found = schedule(store, parse_methods("infobatch"), [0, 1], 4, PRICES, jobs=2)
    assert [run["name"] for run in found["runs"][:4]] == [
        "full, seed 0",
        "full, seed 1",
        "infobatch, seed 0",
        "infobatch, seed 1",
    ]
    counted = {"uniform@0.750", "shorter@0.750", "smaller@0.750", "placebo@0.750 of infobatch"}
    in_time = [run for run in found["runs"] if run["label"] == "shorter@time of infobatch"]
    assert [(run["epochs"], run["seconds"]) for run in in_time] == [(2, 1 + 2 * 10 + 2 * 0.5)] * 2
    assert {run["label"] for run in found["runs"][4:]} == {*counted, in_time[0]["label"]} and len(found["runs"]) == 14
    assert all(run["control"] for run in found["runs"][4:]) and not any(run["finished"] for run in found["runs"])
    trained = sum(run["seconds"] for run in found["runs"])
    assert found["cpu_s"] == pytest.approx(2 + 2 * 5 + trained)
    assert 2 + 5 + trained / 2 <= found["wall_s"] <= 2 + 5 + trained / 2 + 43
    assert not store.folder.exists()


def test_more_processes_than_cores_take_turns(store, monkeypatch):
    times = []
    for cores in (1, 4):
        monkeypatch.setattr(dry, "available_cores", lambda cores=cores: cores)
        fresh = ReadOnlyStore(store.folder, folder_identity("digits@200", 4))
        times.append(schedule(fresh, parse_methods("infobatch"), [0], 4, PRICES, jobs=4, controls=()))
    assert times[0]["wall_s"] - 2 == pytest.approx(4 * (times[1]["wall_s"] - 2))
    assert times[0]["cpu_s"] == pytest.approx(times[1]["cpu_s"])


def test_finished_runs_are_not_counted_and_nothing_is_written(tmp_path):
    identity = folder_identity("digits@200", 4)
    kept, full = Store(tmp_path, identity), Job.of(MethodSpec("full"), 0)
    run = outcome(full, PRICES) | {"method": "full", "settings": {}, "seed": 0, "control_of": None, "device": "cpu"}
    run |= {"metric": {"name": "accuracy", "value": 0.9}, "wall_s": 1.0, "cpu_s": 1.0}
    kept.save_run(full.key, run)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    found = schedule(ReadOnlyStore(tmp_path, identity), parse_methods("infobatch"), [0], 4, PRICES, jobs=1, controls=())
    assert [(run["name"], run["finished"]) for run in found["runs"]] == [("full, seed 0", True), ("infobatch, seed 0", False)]
    assert found["cpu_s"] == found["wall_s"] == pytest.approx(2 + 5 + 23)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    said = dry_run_lines(found | {"not_estimated": ["forgetting"]})
    assert said[0] == "full: 1 run of 4 epochs, 1 finished; about 43 s each"
    assert said[1] == "infobatch: 1 run of 4 epochs; about 23 s each"
    assert said[2] == "Taken to last as long as full training: forgetting."
    assert said[3].startswith("1 run to train, 1 finished: about 30 s with 1 process side by side on a machine of")


def test_a_folder_of_another_comparison_is_refused_before_anything_is_measured(tmp_path, monkeypatch):
    kept = Store(tmp_path, folder_identity("digits@200", 4))
    kept.save_run("a", {})
    monkeypatch.setattr(dry, "measured_prices", None)
    with pytest.raises(ValueError, match="another comparison: its epochs is 4, here it is 5"):
        dry_run("digits@200", parse_methods("infobatch"), [0], 5, tmp_path)


def test_several_processes_that_train_together_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(dry, "number_of_processes", lambda: 2)
    with pytest.raises(ValueError, match="--dry-run: give the command by itself"):
        dry_run("digits@200", parse_methods("infobatch"), [0], 5, tmp_path)


def test_prices_of_a_real_training(monkeypatch):
    monkeypatch.setattr("thresher_lab.advise.probe.TIMED_ROUNDS", 1)
    monkeypatch.setattr("thresher_lab.advise.probe.TIMED_SECONDS", 0.01)
    monkeypatch.setattr(dry, "process_seconds", lambda: 1.5)
    specs = parse_methods(
        f"full,infobatch,random_backprop:keep=0.25,{ONCE},selective_backprop:beta=1:forward_passes=twice,rais"
    )
    found = dry.measured_prices("digits@200", specs, 4)
    assert (found.imports, found.epoch > 0, found.evaluation > 0, found.trace > 0) == (1.5, True, True, True)
    passes = {name: (one.forward, one.backward) for name, one in found.methods.items()}
    assert passes.pop("infobatch")[0] < 1 and "rais" not in passes
    assert passes == {
        "full": (1.0, 1.0),
        "random_backprop:keep=0.25": (0.25, 0.25),
        "selective_backprop:keep=0.33 once": (1.0, 21 / 64),
        "selective_backprop:beta=1 twice": (1.5, 0.5),
    }
    assert found.methods["full"].time == 1.0


@pytest.mark.parametrize(
    ("evaluate", "message"),
    [
        ("lambda model: model.nothing", r"with_a_mistake\.py, line 9: AttributeError: .*'nothing'"),
        ("lambda model: None", "evaluate returned None; it must return a number, larger for a better model"),
    ][: depth(1, 2)],
)
def test_an_error_in_the_users_file_is_named_before_the_probe(tmp_path, monkeypatch, evaluate, message):
    monkeypatch.setattr(dry.Probe, "forecasts", None)
    text = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def build(seed):
    model = nn.Linear(2, 2)
    data = DataLoader(TensorDataset(torch.rand(8, 2), torch.arange(8) % 2), 4, shuffle=True)
    return model, data, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), EVALUATE
"""
    (tmp_path / "with_a_mistake.py").write_text(text.replace("EVALUATE", evaluate))
    with pytest.raises(ValueError, match=message):
        dry_run(f"{tmp_path / 'with_a_mistake.py'}:build", [], [0], 2, tmp_path / "out")
