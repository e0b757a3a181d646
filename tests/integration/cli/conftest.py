"""Commands called in this process. Each command has one test with a real process."""

import pytest

from integration.inline import call_in_process, train_in_threads


@pytest.fixture
def inline_runs(monkeypatch):
    """Comparisons train in a thread of this process."""
    train_in_threads(monkeypatch)


@pytest.fixture
def called(inline_runs):
    """Calls `thresher` in this process; the answer has the fields of one from `subprocess.run`."""
    return call_in_process
