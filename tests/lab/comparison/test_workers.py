"""Worker processes: what arrives from them, what an interrupt does to them, and what is reported when one dies."""

import json
import os
import signal
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager
from multiprocessing.context import SpawnProcess

import pytest

from thresher import SmallerBatchesError
from thresher_lab.comparison.controls import Job
from thresher_lab.comparison.workers import (
    Advanced,
    Finished,
    RunError,
    RunRefusedError,
    RunValueError,
    Trainer,
    Warned,
    Workers,
    warning_text,
)
from thresher_lab.training.samples import SHOWN_SUSPECTS, read_history, standing_out, suspects
from thresher_lab.training.specs import MethodSpec


@contextmanager
def second_thread():
    """A thread that is alive inside, as that of a progress bar is: the kernel may deliver signals to it."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    yield
    done.set()
    thread.join()


def interrupt():
    """Sends SIGINT to this process, and gives Python time to run the handler."""
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.05)


def state():
    return signal.getsignal(signal.SIGINT), signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_process_survives_interrupts_trains_and_is_reported_when_it_dies(
    interruptible, monkeypatch
):
    start = SpawnProcess.start

    def interrupted(process):
        start(process)
        interrupt()
        os.kill(process.pid, signal.SIGINT)

    monkeypatch.setattr(SpawnProcess, "start", interrupted)
    before, full = state(), Job.of(MethodSpec("full"), 3)
    with Workers(1, task="digits", epochs=10_000, folder=None) as workers:
        assert workers.free and not workers.busy
        with second_thread(), pytest.raises(KeyboardInterrupt):
            workers.start(full)
        assert state() == before
        while not workers._workers[0]._processes:
            time.sleep(0.05)
        [process] = workers._workers[0]._processes.values()
        process.join(1)
        assert process.is_alive() and workers.free
        monkeypatch.undo()
        workers.start(Job(full.spec, 3, "one epoch", 1e-4))
        assert workers.busy and not workers.free
        advanced, finished = workers.next_event(), workers.next_event()
        assert (
            isinstance(advanced, Advanced)
            and isinstance(finished, Finished)
            and finished.run["step_memory"] > 0
        )
        winnow = MethodSpec("winnow", {"share": 0.5})
        for label, kinds in (
            (winnow.label, [Warned, Advanced, Finished]),
            ("control", [Advanced, Finished]),
        ):
            workers.start(Job(winnow, 3, label, 1e-4))
            events = [workers.next_event() for _ in kinds]
            assert [type(event) for event in events] == kinds
            assert label == "control" or events[0].text.startswith(
                "Warning: Winnow draws uniformly in the first epoch"
            )
        assert len(workers._workers) == 1 and process.is_alive()
        workers.start(full)
        assert isinstance(workers.next_event(), Advanced)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(RunError, match="full, seed 3: its process died with exit code -9"):
            while True:
                workers.next_event()
    assert not process.is_alive()


def test_leaving_ends_the_processes_and_one_that_dies_without_a_job_is_reported_by_the_next_job():
    slow, short = Job.of(MethodSpec("full"), 3), Job(MethodSpec("full"), 4, "one epoch", 1e-4)
    with Workers(2, task="digits", epochs=10_000, folder=None) as workers:
        for job in (slow, short):
            workers.start(job)
        processes = [process for one in workers._workers for process in one._processes.values()]
        while not isinstance(workers.next_event(), Finished):
            pass
        os.kill(processes[1].pid, signal.SIGKILL)
        with pytest.raises(RunError, match="one epoch, seed 4: its process died with exit code -9"):
            workers.start(short)
            while True:
                workers.next_event()
        assert processes[0].is_alive()
    assert not any(process.is_alive() for process in processes)


def test_a_warning_has_its_place_unless_it_is_of_thresher():
    ours = Trainer.__init__.__code__.co_filename
    assert warning_text("mind this", UserWarning, ours, 7) == "Warning: mind this"
    assert (
        warning_text("mind this", UserWarning, "mine.py", 7)
        == "UserWarning at mine.py:7: mind this"
    )
    assert (
        warning_text("no more", DeprecationWarning, ours, 7)
        == f"DeprecationWarning at {ours}:7: no more"
    )


@pytest.mark.parametrize(
    ("raised", "error", "message"),
    [
        (None, RunValueError, "FileNotFoundError: .*train-images"),
        (ZeroDivisionError("by 0"), RunError, "ZeroDivisionError: by 0"),
        (SystemExit(7), RunError, "SystemExit: 7"),
        (SmallerBatchesError("too few rows"), RunRefusedError, "too few rows"),
    ],
)
def test_what_a_run_raises_arrives_with_its_run(tmp_path, monkeypatch, raised, error, message):
    def train(*_, **__):
        raise raised

    monkeypatch.setattr("thresher_lab.training.loop.train", train)
    job, task = Job.control("uniform", 0, 0.5), "digits" if raised else "fashion-mnist"
    failed = Trainer(print, task, 1, tmp_path)(job)
    workers, future = Workers(1, task=task, epochs=1, folder=tmp_path), Future()
    future.set_result(failed)
    workers._busy[future] = job
    with pytest.raises(error, match=f"uniform@0.500, seed 0: {message}") as caught:
        workers.next_event()
    assert "Traceback" in str(caught.value.__cause__) and not workers.busy


MADE = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def build(seed):
    torch.manual_seed(seed)
    model, labels = nn.Linear(2, 3), torch.arange(122) % 3
    data = DataLoader(TensorDataset(torch.randn(122, 2) + labels[:, None], labels), batch_size=8, shuffle=True, drop_last=DROP)
    made = {"model": model, "data": data, "criterion": nn.CrossEntropyLoss(), "evaluate": lambda model: 1.0}
    return made | {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), SHOWN "classes": ["a", "b", "c"]}
"""


@pytest.fixture
def trained(tmp_path):
    """Trains jobs of a script, one after the other, and returns the folder of their files."""

    def train(*jobs, shown='"show": str,', drop_last=False):
        path = tmp_path / "mine.py"
        path.write_text(MADE.replace("SHOWN", shown).replace("DROP", str(drop_last)))
        for job in jobs:
            done = Trainer(lambda _: None, f"{path}:build", 3, None, tmp_path / "runs")(job)
            assert isinstance(done, Finished), done.trace
            assert done.run["classes"] == ["a", "b", "c"]
        return tmp_path / "runs"

    return train


FULL, METHOD = (
    Job.of(MethodSpec("full"), 1),
    Job.of(MethodSpec("kakurenbo", {"max_fraction": 0.5, "tau": 0.0}), 1),
)


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_method_shows_the_samples_of_its_sheets_and_a_control_none(trained, drop_last):
    control = Job.control("uniform", 1, 0.5)
    folder = trained(FULL, METHOD, control, drop_last=drop_last)
    histories = {job.key: read_history(folder / f"{job.key}.parquet") for job in (FULL, METHOD)}
    for key, history in histories.items():
        shown = json.loads((folder / f"{key}.shown").read_text())["shown"]
        assert all(one == {"text": number} for number, one in shown.items())
        rows = [
            row for of in standing_out(history.beside(histories[FULL.key])).values() for row in of
        ]
        assert len(rows) > 20 and {str(history.ids[row]) for row in rows} <= shown.keys()
    assert (folder / f"{control.key}.parquet").exists() and not (
        folder / f"{control.key}.shown"
    ).exists()


def test_without_full_training_its_own_history_decides(trained):
    folder = trained(METHOD)
    history = read_history(folder / f"{METHOD.key}.parquet")
    shown = json.loads((folder / f"{METHOD.key}.shown").read_text())["shown"]
    rows = [
        *suspects(history)[:SHOWN_SUSPECTS],
        *(row for of in standing_out(history).values() for row in of),
    ]
    assert shown.keys() == {str(history.ids[row]) for row in rows}


def test_without_a_function_nothing_is_shown(trained, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / f"{METHOD.key}.shown").write_text("of an earlier version of the script")
    assert {path.suffixes[-1] for path in trained(METHOD, shown="").iterdir()} == {".parquet"}
