"""A plugin of pytest that writes a line of JSON per test, leaves out what has one, and stops when the time is over."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

LINES, BEGUN, UNTIL = "THRESHER_GPU_LINES", "THRESHER_GPU_BEGUN", "THRESHER_GPU_UNTIL"
"""Environment variables: file of the lines, file with the name of the test that runs, and time after which none begins."""
BROKEN = ("CUDA error", "CUBLAS_STATUS_EXECUTION_FAILED", "AcceleratorError", "device-side assert")
"""Texts of errors after which a process cannot use the device any more."""
WORST_FIRST = ("failed", "skipped", "passed")

_tests: dict[str, list[pytest.TestReport]] = {}
_session: list[pytest.Session] = []


def pytest_sessionstart(session: pytest.Session) -> None:
    """Keeps the session, which can be stopped."""
    _session[:] = [session]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts tests in the order of the arguments, and leaves out those that have a line."""
    folders = [Path(config.rootpath, given.partition("::")[0]) for given in config.args]
    items.sort(
        key=lambda item: next(
            (i for i, folder in enumerate(folders) if item.path.is_relative_to(folder)),
            len(folders),
        )
    )
    done = _done()
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
    items[:] = [item for item in items if item.nodeid not in done]


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Writes a line for a file that does not load."""
    if report.failed and report.nodeid not in _done():
        _write(report.nodeid, "error", 0.0, _first_line(report))


def pytest_runtest_logstart(nodeid: str) -> None:
    """Notes the name of a test, in case that the process does not survive it."""
    Path(os.environ[BEGUN]).write_text(nodeid, encoding="utf-8")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keeps the reports of a test: of what comes before it, of itself, and of what comes after it."""
    _tests.setdefault(report.nodeid, []).append(report)


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Writes the line of a test."""
    reports: Sequence[pytest.TestReport] = _tests.pop(nodeid, [])
    outcome = next(
        (one for one in WORST_FIRST if any(report.outcome == one for report in reports)), "error"
    )
    error = next(
        (_first_line(report) for report in reports if report.outcome == outcome != "passed"), None
    )
    _write(nodeid, outcome, sum(report.duration for report in reports), error)
    Path(os.environ[BEGUN]).write_text("", encoding="utf-8")
    if error is not None and outcome == "failed" and any(text in error for text in BROKEN):
        _session[0].shouldstop = "the device is broken for this process"
    elif time.time() > float(os.environ[UNTIL]):
        _session[0].shouldstop = "the minutes are over"


def _first_line(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Returns the first line of an error, or the reason of a skip."""
    shown: Any = report.longrepr
    if isinstance(shown, tuple):
        return str(shown[2]).removeprefix("Skipped: ")
    crash = getattr(shown, "reprcrash", None)
    lines = [
        line for line in str(shown if crash is None else crash.message).splitlines() if line.strip()
    ]
    return (
        "" if not lines else lines[0] if crash is not None else lines[-1].removeprefix("E").strip()
    )


def _write(name: str, outcome: str, seconds: float, error: str | None) -> None:
    line = {"name": name, "outcome": outcome, "seconds": round(seconds, 3), "error": error}
    with _path().open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _done() -> set[str | None]:
    return {
        json.loads(line).get("name") for line in _path().read_text(encoding="utf-8").splitlines()
    }


def _path() -> Path:
    return Path(os.environ[LINES])
