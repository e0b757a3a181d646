import os
import signal
from multiprocessing.context import SpawnProcess

import pytest

from thresher.experiments.comparison.job import Job
from thresher.experiments.comparison.workers import Advanced, Finished, RunError, RunValueError, Workers
from thresher.experiments.training.specs import MethodSpec


def test_a_process_that_dies_is_reported_with_its_run():
    with Workers(1, task="digits", epochs=10_000, folder=None) as workers:
        assert workers.free and not workers.busy
        workers.start(Job.of(MethodSpec("full"), 3))
        assert workers.busy and not workers.free
        assert isinstance(workers.next_event(), Advanced)
        [process] = workers._processes.values()
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(RunError, match="full, seed 3: its process died with exit code -9"):
            while True:
                workers.next_event()


def test_what_a_run_raises_arrives_with_its_run(tmp_path):
    with Workers(1, task="fashion-mnist", epochs=1, folder=tmp_path) as workers:
        workers.start(Job.control("uniform", 0, 0.5))
        with pytest.raises(RunValueError, match=r"uniform@0.500, seed 0: FileNotFoundError: .*train-images") as caught:
            workers.next_event()
    assert "Traceback" in str(caught.value.__cause__)


def test_an_interrupt_during_a_start_is_heard_afterwards_and_by_this_process_alone(interruptible, monkeypatch):
    start = SpawnProcess.start

    def interrupted(process):
        start(process)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(process.pid, signal.SIGINT)

    monkeypatch.setattr(SpawnProcess, "start", interrupted)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with Workers(1, task="digits", epochs=1, folder=None) as workers:
        with pytest.raises(KeyboardInterrupt):
            workers.start(Job.of(MethodSpec("full"), 0))
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
        [process] = workers._processes.values()
        process.join(1)
        assert process.is_alive()
        monkeypatch.undo()
        workers.start(Job.of(MethodSpec("full"), 0))
        assert any(isinstance(workers.next_event(), Finished) for _ in range(2))
    assert not workers._processes
