"""Commands and comparisons that run in the test's process.

A worker process imports torch for seconds before it trains anything.
"""

import io
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace

import pytest

from thresher_lab import cli
from thresher_lab.comparison import workers


class ThreadExecutor(ThreadPoolExecutor):
    """Calls functions in a thread, in the place of a process."""

    _processes = None

    def __init__(self, count, context, initializer, arguments):
        super().__init__(count, initializer=initializer, initargs=arguments)
        self._connection = arguments[0]

    def shutdown(self):
        self._connection.close()  # ends a training at its next message
        super().shutdown()


class OneAfterAnother(workers.Trainer):
    """A trainer that is made while no other is: `ast.parse` of Python 3.11 fails at times in two threads at once."""

    _lock = threading.Lock()

    def __init__(self, *arguments, **settings):
        with self._lock:
            super().__init__(*arguments, **settings)


def train_in_threads(monkeypatch):
    """Has comparisons train in threads until the patches are undone."""

    no_signals = SimpleNamespace(signal=lambda *_: None, SIGINT=None, SIG_IGN=None)
    monkeypatch.setattr(
        workers, "signal", no_signals
    )  # only the main thread may set signal handlers
    monkeypatch.setattr(workers, "_leave_with_parent", lambda: None)
    monkeypatch.setattr(workers, "Trainer", OneAfterAnother)
    monkeypatch.setattr(workers, "ProcessPoolExecutor", ThreadExecutor)


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
