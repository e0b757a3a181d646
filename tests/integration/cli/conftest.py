"""Commands called in this process. Each command has one test with a real process."""

import sys
from types import SimpleNamespace

import pytest

from integration.inline import train_in_threads
from thresher import cli


@pytest.fixture
def inline_runs(monkeypatch):
    """Comparisons train in a thread of this process."""
    train_in_threads(monkeypatch)


@pytest.fixture
def called(inline_runs, monkeypatch, capsys):
    """Calls `thresher` in this process; the answer has the fields of one from `subprocess.run`."""

    def call(*arguments):
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["thresher", *map(str, arguments)])
            with pytest.raises(SystemExit) as left:
                cli.main()
        captured = capsys.readouterr()
        return SimpleNamespace(returncode=left.value.code or 0, stdout=captured.out, stderr=captured.err)

    return call
