"""Commands and comparisons that run in the test's process.

A worker process imports torch for seconds before it trains anything.
"""

import io
import sys
import threading
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest

from thresher_lab import cli
from thresher_lab.comparison import workers


class ThreadWorker:
    """A worker that does its work in a thread, in the place of a process."""

    exitcode = 0

    def __init__(self, connection, theirs, arguments):
        self._connection = connection
        self._thread = threading.Thread(target=self._work, args=(theirs, *arguments), daemon=True)
        self._thread.start()

    @staticmethod
    def _work(theirs, *arguments):
        with theirs:  # closed as by a process that dies: the comparison would wait for ever
            workers._work(theirs, *arguments)

    def kill(self):
        self._connection.close()

    def join(self):
        self._thread.join()


class OneAfterAnother(workers.Trainer):
    """A trainer that is made while no other is: `ast.parse` of Python 3.11 fails at times in two threads at once."""

    _lock = threading.Lock()

    def __init__(self, *arguments, **settings):
        with self._lock:
            super().__init__(*arguments, **settings)


def train_in_threads(monkeypatch):
    """Has comparisons train in threads until the patches are undone."""

    def spawn(self):
        ours, theirs = Pipe()
        self._processes[ours] = ThreadWorker(ours, theirs, (self._settings,))
        return ours

    no_signals = SimpleNamespace(signal=lambda *_: None, SIGINT=None, SIG_IGN=None)
    monkeypatch.setattr(
        workers, "signal", no_signals
    )  # only the main thread may set signal handlers
    monkeypatch.setattr(workers, "_leave_with_parent", lambda: None)
    monkeypatch.setattr(workers, "Trainer", OneAfterAnother)
    monkeypatch.setattr(workers.Workers, "_spawn", spawn)


def call_in_process(*arguments):
    """Calls `thresher` with command-line arguments; the answer has the fields of one from `subprocess.run`."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["thresher", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            cli.main()
    return SimpleNamespace(
        returncode=left.value.code or 0, stdout=out.getvalue(), stderr=err.getvalue()
    )
