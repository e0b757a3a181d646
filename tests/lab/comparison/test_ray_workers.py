"""Workers on a cluster: arguments, actors that die and files that come back, with a stand-in for Ray and on a local one."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from depth import in_verify
from thresher_lab import cli
from thresher_lab.cli.compare import compare as compare_command
from thresher_lab.cli.reproduce import reproduce
from thresher_lab.cli.time_to_target import time_to_target
from thresher_lab.comparison import ray_workers
from thresher_lab.comparison.compare import compare
from thresher_lab.comparison.controls import Job
from thresher_lab.comparison.ray_workers import Cluster, RayWorkers
from thresher_lab.comparison.workers import (
    Advanced,
    Failed,
    Finished,
    RunError,
    RunValueError,
    Warned,
)
from thresher_lab.training.specs import MethodSpec

FULL, WINNOW = Job.of(MethodSpec("full"), 0), Job.of(MethodSpec("winnow", {"share": 0.5}), 0)
MACHINES = [
    {"Alive": True, "Resources": {"CPU": 2.0}},
    {"Alive": False, "Resources": {"CPU": 64.0}},
]


class RayError(Exception):
    """The base of all errors of Ray."""


class StandIn:
    """Actors whose messages are given beforehand, one list per call; an error in a list is raised."""

    exceptions = SimpleNamespace(RayError=RayError)

    def __init__(self, *streams):
        self._streams = list(streams)
        self.given, self.ended, self.actors = [], [], 0

    def nodes(self):
        return MACHINES

    def remote(self, **takes):
        self.takes = takes
        return lambda _: SimpleNamespace(remote=self._actor)

    def _actor(self, *_):
        self.actors += 1
        train = SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=self._stream))
        return SimpleNamespace(train=train)

    def _stream(self, job, given):
        self.given.append(given)
        return iter(self._streams.pop(0))

    def wait(self, streams, num_returns):
        return streams[:1], streams[1:]

    def get(self, message):
        if isinstance(message, Exception):
            raise message
        return message

    def kill(self, actor):
        self.ended.append(actor)


def on(monkeypatch, tmp_path, *streams, jobs=None, **cluster):
    ray = StandIn(*streams)
    monkeypatch.setattr(ray_workers, "connected", lambda address: ray)
    return ray, RayWorkers(jobs, Cluster(**cluster), tmp_path, task="digits", epochs=2, folder=None)


def test_a_run_whose_actor_dies_is_tried_once_more_and_its_files_come_back(monkeypatch, tmp_path):
    first, second, done = (
        Advanced(FULL, 1, 0.5),
        Advanced(FULL, 2, 0.6),
        Finished(FULL, {"seed": 0}),
    )
    files = {f"runs/{FULL.key}.parquet": b"history", "trackers/full/events": b"log"}
    begun, more = [(first, {}), RayError("killed")], [(first, {}), (second, {}), (done, files)]
    warned = [(Warned("mind"), {}), (Finished(WINNOW, {}), {})]
    ray, workers = on(monkeypatch, tmp_path, begun, more, warned, jobs=1)
    with workers:
        workers.start(FULL)
        assert workers.busy and not workers.free
        assert workers.next_event() == first
        assert workers.next_event() == Warned(
            "Warning: full, seed 0: its process died, and the run is tried once more"
        )
        assert [workers.next_event(), workers.next_event()] == [second, done]
        assert all((tmp_path / name).read_bytes() == content for name, content in files.items())
        workers.start(WINNOW)
        assert [type(workers.next_event()) for _ in range(2)] == [
            Warned,
            Finished,
        ] and not workers.busy
    assert ray.actors == 2 == len(ray.ended)
    assert ray.given == [{}, {}, {f"runs/{FULL.key}.parquet": b"history"}]


def test_a_second_death_and_an_error_of_the_run_are_raised(monkeypatch, tmp_path):
    failed = Failed(WINNOW, "ValueError: no", RunValueError, "trace")
    ray, workers = on(monkeypatch, tmp_path, [RayError("one")], [RayError("two")], [(failed, {})])
    workers.start(FULL)
    assert isinstance(workers.next_event(), Warned)
    with pytest.raises(RunError, match="full, seed 0: its process died twice") as caught:
        workers.next_event()
    assert str(caught.value.__cause__) == "two"
    workers.start(WINNOW)
    with pytest.raises(RunValueError, match="no"):
        workers.next_event()
    assert not workers.busy


def test_a_cluster_has_room_for_some_runs(monkeypatch, tmp_path):
    assert on(monkeypatch, tmp_path, jobs=5)[1]._count == 2
    assert Cluster(gpus=0.25).room({"CPU": 16.0, "GPU": 2.0}) == 8
    assert Cluster(gpus=0.1).room({"CPU": 16.0, "GPU": 1.0}) == 10
    assert Cluster(gpus=2, cpus=3).room({"CPU": 16.0, "GPU": 7.0}) == 3
    with pytest.raises(ValueError, match="no machine of the cluster has 1 CPUs and 0.5 GPUs"):
        on(monkeypatch, tmp_path, gpus=0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"address": "ray://head:10001"}, "--ray ray://head:10001: give auto, local or HOST:PORT"),
        ({"address": "digits"}, "--ray digits: give auto"),
        ({"gpus": 1.5}, "--gpus-per-run 1.5"),
        ({"gpus": -1}, "--gpus-per-run -1"),
        ({"cpus": 0}, "--cpus-per-run 0"),
    ],
)
def test_a_cluster_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        Cluster(**arguments)


def test_without_ray_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        ValueError, match=r"--ray needs the package ray: pip install 'thresher\[ray\]'"
    ):
        compare("digits", [WINNOW.spec], [0], 1, tmp_path / "out", cluster=Cluster())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus_per_run": 0.5}, "--gpus-per-run and --cpus-per-run are for --ray"),
        ({"cpus_per_run": 2}, "--gpus-per-run and --cpus-per-run are for --ray"),
        ({"ray": "", "device": "cpu"}, "leave out --device and --dry-run"),
        ({"ray": "auto", "dry_run": True}, "leave out --device and --dry-run"),
    ],
)
def test_the_command_refuses(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        compare_command(task="digits", methods="winnow", epochs=1, out=tmp_path, **options)


@pytest.mark.parametrize("command", [time_to_target, reproduce])
def test_other_commands_train_on_the_cluster(monkeypatch, tmp_path, command):
    class StartedError(Exception):
        pass

    def start(jobs, cluster, *_, **__):
        raise StartedError(cluster)

    monkeypatch.setattr("thresher_lab.comparison.compare.RayWorkers", start)
    given = {"task": "digits", "epochs": 1, "out": tmp_path}
    given = (
        given
        if command is time_to_target
        else {"names": ["adaselection-weights"], "work": tmp_path}
    )
    with pytest.raises(StartedError) as started:
        command(ray="local", gpus_per_run=0.5, **given)
    assert started.value.args == (Cluster("local", gpus=0.5),)
    with pytest.raises(ValueError, match="--gpus-per-run and --cpus-per-run are for --ray"):
        command(gpus_per_run=0.5, **given)


def test_a_dry_run_of_a_table_needs_no_cluster():
    with pytest.raises(ValueError, match="leave out --device and --dry-run"):
        reproduce(["adaselection-weights"], recipe="adaselection-line", dry_run=True, ray="auto")


@pytest.mark.parametrize(
    ("given", "address"),
    [
        (["--ray"], ""),
        (["--ray", "--quiet"], ""),
        (["--ray", "local"], "local"),
        (["--ray", "head:6379"], "head:6379"),
    ],
)
def test_the_option_needs_no_address(monkeypatch, tmp_path, given, address):
    clusters = []
    monkeypatch.setattr(
        "thresher_lab.cli.compare.run_and_print", lambda *_, cluster, **__: clusters.append(cluster)
    )
    words = [
        "thresher",
        "compare",
        "digits",
        "--methods",
        "winnow",
        "--epochs",
        "1",
        "--out",
        str(tmp_path),
    ]
    monkeypatch.setattr(sys, "argv", [*words, "--gpus-per-run", "0.25", *given])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code in (None, 0) and clusters == [Cluster(address, 0.25)]


@pytest.fixture(scope="module")
def ray():
    package = pytest.importorskip("ray")
    package.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield package
    package.shutdown()


MEASURED = {"cpu_s", "wall_s", "step_s", "step_memory", "cost"}


def of_run(run):
    history = [
        {name: value for name, value in epoch.items() if name not in MEASURED}
        for epoch in run["history"]
    ]
    counts = {name: value for name, value in run["cost"].items() if name != "backward_to_forward"}
    return [*(run[name] for name in ("method", "seed", "control_of", "metric")), counts, history]


@in_verify
def test_runs_are_equal_to_those_of_the_pool(ray, tmp_path):
    pool, cluster = tmp_path / "pool", tmp_path / "cluster"
    first = compare("digits", [WINNOW.spec], [0, 1], 3, pool, controls=("uniform", "placebo"))
    second = compare(
        "digits",
        [WINNOW.spec],
        [0, 1],
        3,
        cluster,
        controls=("uniform", "placebo"),
        cluster=Cluster(),
    )
    assert len(first["runs"]) == 8 and all(run["step_memory"] for run in second["runs"])
    assert [of_run(run) for run in first["runs"]] == [of_run(run) for run in second["runs"]]
    assert {path.name for path in (pool / "runs").iterdir()} == {
        path.name for path in (cluster / "runs").iterdir()
    }
    for run in first["runs"]:
        assert pq.read_table(pool / run["samples"]).equals(pq.read_table(cluster / run["samples"]))


@in_verify
@pytest.mark.parametrize("which", ["os.getpid()", "[*self._workers._workers[0]._processes][0]"])
def test_a_killed_process_costs_one_try(ray, tmp_path, which):
    with RayWorkers(1, Cluster(), tmp_path, task="digits", epochs=300, folder=None) as workers:
        short = Job(FULL.spec, 0, "short", 1 / 300)
        workers.start(short)
        while not isinstance(finished := workers.next_event(), Finished):
            pass
        process = ray.get(
            workers._workers[0].__ray_call__.remote(eval(f"lambda self: {which}", {"os": os}))
        )
        workers.start(FULL)
        assert isinstance(workers.next_event(), Advanced)
        os.kill(process, signal.SIGKILL)
        while isinstance(event := workers.next_event(), Advanced):
            pass
        assert isinstance(event, Warned) and "full, seed 0: its process died" in event.text
        assert isinstance(workers.next_event(), Advanced)
        assert finished.run["metric"]["value"] > 0


@in_verify
def test_ctrl_c_leaves_what_is_finished(tmp_path):
    pytest.importorskip("ray")
    out = tmp_path / "out"
    words = [
        "compare",
        "digits",
        "--methods",
        "winnow:share=0.5",
        "--seeds",
        "0,1,2,3",
        "--controls",
        "",
        "--epochs",
        "40",
    ]
    command = [
        sys.executable,
        "-m",
        "thresher_lab.cli",
        *words,
        "--out",
        str(out),
        "--ray",
        "local",
        "--jobs",
        "1",
    ]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 240
    while (
        not any((out / "runs").glob("*.json")) and process.poll() is None and time.monotonic() < end
    ):
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 130 and f"Stopped. Finished runs are kept in {out}" in said
    kept = list((out / "runs").glob("*.json"))
    assert kept and all(json.loads(path.read_text())["history"] for path in kept)
    assert all(path.with_suffix(".parquet").exists() for path in kept)
