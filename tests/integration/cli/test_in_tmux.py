"""What a real terminal shows: the captures of the result, and the bars of the progress, at several widths."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from depth import depth, in_verify

CAPTURES = Path(__file__).parents[2] / "lab" / "cli" / "captures"
WIDTHS = depth((60, 120), (60, 80, 100, 120))
SHOWS = """
import sys, time
sys.path[:] = {path!r}
from rich.console import Console
from test_summary import results_of
from thresher_lab.cli._progress import progress_on
from thresher_lab.cli._comparison import print_summary
from thresher_lab.comparison.controls import Job

from thresher_lab.training.specs import MethodSpec

console, job = Console(), Job.of(MethodSpec("selective_backprop", {{"keep": 0.33}}), 0)
print_summary(console, results_of())
print("that was the result")
with progress_on(console) as watcher:
    watcher.planned(400, 1000)
    watcher.started(job)
    for epochs in range(200):
        time.sleep(0.01)
        watcher.advanced(job, epochs, 0.9)
    time.sleep(60)
"""


@pytest.fixture
def tmux(tmp_path):
    """Calls tmux with a server of its own."""
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")

    def call(*arguments):
        return subprocess.run(
            ["tmux", "-f", "/dev/null", "-S", str(tmp_path / "socket"), *arguments],
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    yield call
    call("kill-server")


@in_verify
def test_a_real_terminal_shows_the_captures_and_the_time_left_at_each_width(tmux, tmp_path):
    script = tmp_path / "shows.py"
    script.write_text(SHOWS.format(path=[str(CAPTURES.parent), *sys.path]), encoding="utf-8")
    for width in WIDTHS:
        command = f"env -u COLUMNS -u LINES {sys.executable} {script}; sleep 60"
        tmux("new-session", "-d", "-s", f"w{width}", "-x", str(width), "-y", "120", command)
    for width in WIDTHS:
        lines = when_drawn(lambda width=width: tmux("capture-pane", "-p", "-t", f"w{width}"))
        end = lines.index("that was the result")
        assert (
            lines[:end]
            == (CAPTURES / f"summary-{width}.txt").read_text(encoding="utf-8").splitlines()
        )
        whole, one = lines[-2:]
        assert " left " in whole and " left " in one and "/400000" in whole and "/1000" in one
        assert all(line.rsplit("left ")[1].count(":") == 2 for line in (whole, one)), lines[-2:]
        assert max(map(len, lines)) <= width


def when_drawn(capture):
    """Returns the lines of a terminal as soon as its bars know the time left."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        lines = [line.rstrip() for line in capture().rstrip().splitlines()]
        if len(lines) > 2 and " left " in lines[-1] and "-:--" not in "".join(lines[-2:]):
            return lines
        time.sleep(0.1)
    raise AssertionError("\n".join(lines))
