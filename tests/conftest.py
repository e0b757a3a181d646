"""What tests of several folders share: hypothesis profiles, the order of the files, and fixtures.

Tests use one torch thread, also in the processes that they start: two threads beside a busy process take many times as long,
and results must not depend on it.
"""

import gc
import os
import re
import signal
import warnings
from pathlib import Path

import hypothesis
import pytest
import torch

from depth import DEEP, VERIFY_RUNS_IT, verify_note
from devices import DEVICE
from thresher.subset.compilers import lacks_torch

pytest.register_assert_rewrite(
    "loss_cases"
)  # before the first test module of any folder imports it

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.pop(
    "COLUMNS", None
)  # of the terminal that the tests are started in, which output that is piped would follow
torch.set_num_threads(1)

# `make test` repeats the same examples; `make verify` draws new ones.
hypothesis.settings.register_profile(
    "quick", deadline=None, database=None, derandomize=True, max_examples=40
)
hypothesis.settings.register_profile("verify", deadline=None, database=None, print_blob=True)
hypothesis.settings.load_profile("verify" if DEEP else "quick")

SLOWEST = (
    "integration/test_training_in_processes.py",
    "integration/test_launched_commands.py",
    "library/subset/test_simplify.py",
    "integration/test_reproduction.py",
    "integration/cli/test_compare_command.py",
    "lab/reproduction/test_reproduction.py",
    "integration/test_several_processes.py",
    "integration/cli/test_advise_command.py",
    "integration/cli/test_dry_run_command.py",
    "lab/comparison/test_dry_run.py",
    "examples/test_by_feature.py",
    "integration/test_recipes.py",
    "integration/test_resume.py",
    "lab/comparison/test_workers.py",
    "integration/test_subset_models.py",
    "integration/report/test_in_browser.py",
    "integration/test_subset_training.py",
    "conformance/test_roster.py",
    "lab/training/test_loop.py",
    "integration/cli/test_time_to_target_command.py",
    "reference/test_planted.py",
    "integration/cli/test_own_training.py",
    "library/subset/test_module.py",
    "property/test_subset_backward.py",
    "lab/report/test_page.py",
)
"""Files that take longest, below tests/, the slowest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the slowest files first, so that two workers end at the same time."""
    place = {name: number for number, name in enumerate(SLOWEST)}
    tests = Path(__file__).parent
    items.sort(key=lambda item: place.get(item.path.relative_to(tests).as_posix(), len(place)))


def skip_if_torch_is_too_old(report: pytest.TestReport | pytest.CollectReport, path: Path) -> None:
    """Skips what failed because `subset_backward` needs a newer torch: the library says so, or the tracer does not load."""
    reason = lacks_torch()
    if reason is None or not report.failed:
        return
    if re.search(
        rf"{re.escape(reason)}|(cannot import name .* from|No module named) 'torch\._",
        f"{report.longrepr}{report.capstdout}",
    ):
        report.outcome, report.longrepr = "skipped", (str(path), 0, reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    skip_if_torch_is_too_old(report, item.path)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    skip_if_torch_is_too_old(report, collector.path)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter):
    """Says what `make verify` adds, below pytest's list of failed and skipped tests."""
    yield
    if not DEEP:
        skipped = terminalreporter.getreports("skipped")
        left_out = sum(VERIFY_RUNS_IT in str(report.longrepr) for report in skipped)
        terminalreporter.write_line(verify_note(left_out))


def pytest_collection_finish() -> None:
    """Leaves what was imported out of garbage collections: each of hundreds of trainings collects, which took half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def interruptible():
    """Ctrl-C interrupts this process and processes started from it, also where a shell runs the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def device():
    """The device that THRESHER_DEVICE names, else the CPU."""
    return DEVICE


@pytest.fixture
def torch_may_warn():
    """Ignores what torch says of a device, such as advice to use TF32; warnings of the library stay errors."""
    warnings.filterwarnings("ignore", module=r"torch\.")
    warnings.filterwarnings("ignore", message=r"[\s\S]*(Triggered internally|TensorFloat32|TF32)")


@pytest.fixture
def newer_torch():
    """Skips a test that asks neither the tracer nor the run, and yet needs the torch of `subset_backward`."""
    if (reason := lacks_torch()) is not None:
        pytest.skip(reason)


@pytest.fixture
def shared_traces(monkeypatch):
    """Models of one architecture share one trace: tracing takes longer than the rest of a test that is not about it."""
    from subset_cases import trace_once_per_architecture
    from thresher.subset import SubsetBackward

    monkeypatch.setattr(
        SubsetBackward, "_trace", trace_once_per_architecture(SubsetBackward._trace)
    )


@pytest.fixture
def group_of_one(tmp_path):
    """A process group with this process alone, in which DistributedDataParallel and fully_shard can be made."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()
    gc.collect()  # a model of several processes, collected in a forked worker later, would wait there for threads of the group
