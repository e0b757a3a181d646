"""Runs the tests that concern a device, worst first: those of a GPU, those of the main paths, those of `subset_backward`."""

import collections
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.gpu.json_lines import JsonLines, print_table
from benchmarks.gpu.pytest_lines import BEGUN, LINES, UNTIL

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("tests/cuda", "tests/device", "tests/library/subset")
SMOKE_TESTS = (
    "tests/cuda/test_kernels.py::test_fused_and_foreach_optimizers_count_their_steps",
    "tests/cuda/test_steady_steps.py::test_a_wait_is_counted_at_its_place",
    "tests/device/test_main_paths.py::test_criteria_give_their_own_value_and_gradient",
    "tests/library/subset/test_wrapper.py",
)
FAILURES = ("failed", "error", "crashed", "hung")
GRACE_S = 120
"""Seconds that the last test may take after the minutes are over."""


def run(lines: JsonLines, device: torch.device, *, until: float, smoke: bool) -> int:
    """Runs the tests that have no result yet, and prints what failed; returns 1 if any did, or if pytest did not run.

    A test that breaks the device or the process is noted, and the tests after it run in another process.

    Args:
        lines: Results.
        device: Device of the tests.
        until: Time after which no test begins.
        smoke: Whether a few tests are enough.
    """
    begun, log, code = lines.path.with_suffix(".begun"), lines.path.with_suffix(".log"), 0
    while time.time() < until:
        done, began = len(lines.results()), time.time()
        begun.unlink(missing_ok=True)
        code = _pytest(lines, device, begun=begun, log=log, until=until, smoke=smoke)
        if code in (0, 1, 5):  # all have run: passed, failed, none was left
            break
        if code < 0 and begun.exists() and begun.read_text():
            outcome = "hung" if time.time() > until else "crashed"
            lines.add(
                begun.read_text(),
                outcome=outcome,
                seconds=time.time() - began,
                error=f"pytest ended with {code}",
            )
        if len(lines.results()) == done:
            print(
                f"pytest ended with {code}; {log} has its output:\n{log.read_text(encoding='utf-8')[-2000:]}"
            )
            break
    begun.unlink(missing_ok=True)
    results = lines.results()
    failures = [result for result in results if result["outcome"] in FAILURES]
    print_table(
        ("failed", "error"), [(result["name"], str(result["error"])[:120]) for result in failures]
    )
    skips = collections.Counter(
        result["error"] for result in results if result["outcome"] == "skipped"
    )
    print_table(
        ("skipped", "reason"), [(count, str(reason)[:120]) for reason, count in skips.most_common()]
    )
    seconds, outcomes = (
        sum(result["seconds"] for result in results),
        collections.Counter(line["outcome"] for line in results),
    )
    print(
        f"{', '.join(f'{count} {outcome}' for outcome, count in outcomes.items()) or 'no test'}; {seconds:.0f} s"
    )
    return int(bool(failures) or not results or code not in (0, 1, 2, 5))


def _pytest(
    lines: JsonLines, device: torch.device, *, begun: Path, log: Path, until: float, smoke: bool
) -> int:
    """Runs pytest in a process of its own and returns its exit code, below 0 where it was killed."""
    own = {
        "THRESHER_DEVICE": str(device),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # without it cuBLAS refuses deterministic algorithms
        LINES: str(lines.path.resolve()),
        BEGUN: str(begun.resolve()),
        UNTIL: str(until),
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "benchmarks.gpu.pytest_lines",
    ]
    command += ["--continue-on-collection-errors"]
    with log.open("a", encoding="utf-8") as output:
        process = subprocess.Popen(
            [*command, *(SMOKE_TESTS if smoke else TESTS)],
            cwd=ROOT,
            env=os.environ | own,
            stdout=output,
            stderr=output,
        )
        try:
            return process.wait(timeout=min(until - time.time() + GRACE_S, 10**6))
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()
