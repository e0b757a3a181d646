import io
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

import thresher
from depth import depth
from thresher_lab import cli
from thresher_lab.cli import demo, time_to_target
from thresher_lab.cli._console import targets_table
from thresher_lab.cli._progress import progress_on
from thresher_lab.comparison.controls import Job
from thresher_lab.recipes.running import task_of
from thresher_lab.training.specs import MethodSpec, parse_methods

OWN = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def build(seed):
    model = nn.Linear(4, 2)
    data = DataLoader(TensorDataset(torch.rand(64, 4), torch.arange(64) % 2), 16, shuffle=True)
    return model, data, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), lambda model: 1.0
"""


def python(code):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )


def test_methods_are_listed_without_torch():
    code = """
import sys
sys.argv = ["thresher", "methods"]
from thresher_lab.cli import main
try:
    main()
finally:
    heavy = {"torch", "numpy", "scipy", "accelerate", "sklearn"} & set(sys.modules)
    assert not heavy, heavy
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    for word in (
        "full",
        "uniform",
        "kakurenbo",
        "infobatch",
        "epoch",
        "arXiv:2310.10102",
        "hide easy samples",
    ):
        assert word in done.stdout


def test_help_and_version_without_torch():
    for option in ("--help", "--version"):
        done = python(f"import sys; sys.argv = ['thresher', {option!r}]\nfrom thresher_lab.cli import main\ntry: main()\n"
                      "finally: assert 'torch' not in sys.modules")  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert done.stdout == f"thresher {thresher.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        ("methods", None),
        ("recipes", None),
        ("init mine.py", None),
        ("compare mine.py:build --methods infobatch --epochs 1 --out out", "pyarrow"),
        *depth([], [("advise mine.py:build --epochs 1 --seconds 1", None)]),
    ],
)
def test_commands_that_need_no_parquet_files_run_without_what_reads_them(
    tmp_path, arguments, needed
):
    (tmp_path / "mine.py").write_text(OWN) if "build" in arguments else None
    names = ("pyarrow", "pyarrow.parquet", "sklearn", "sklearn.datasets")
    code = f"import os, sys; os.chdir({str(tmp_path)!r}); sys.modules |= dict.fromkeys({names})\n"
    code += f"sys.argv = ['thresher', *{arguments.split()!r}]\nfrom thresher_lab.cli import main\nmain()"
    done = python(code)
    if needed is None:
        assert done.returncode == 0, done.stderr
    else:
        said = f"thresher: this command needs {needed}, which is not installed: pip install 'thresher[lab]'"
        assert done.returncode == 2 and done.stderr.splitlines()[-1] == said
        assert not (tmp_path / "out").exists()


def test_without_the_extra_one_sentence_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == "typer" else object())
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        cli.main()
    assert "pip install 'thresher[lab]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"--methods": "kakurembo"},
            "no method 'kakurembo'; did you mean 'kakurenbo'? There are ada_boost, ada_selection",
        ),
        ({"--methods": "kakurenbo:hide=1"}, "kakurenbo has no setting 'hide'; it has max_fraction"),
        ({"--task": "cifar"}, "no task 'cifar'; did you mean 'cifar10'? There are digits"),
        ({"--seeds": "a"}, "--seeds: whole numbers"),
        ({"--data": "."}, "leave --data out"),
        ({"--task": "fashion-mnist", "--data": "."}, "torchvision"),
        ({"--epochs": "0"}, "--epochs"),
        ({"--budget": "1.5"}, "--budget: shares of the cost of full training, within (0, 1)"),
        ({"--budget": "half"}, "--budget: shares"),
        ({"--budget": "0.5,50%"}, "--budget: a share is given twice"),
        (
            {"--controls": "larger"},
            "--controls: shorter@time, uniform, shorter, smaller, placebo, fewer",
        ),
    ],
)
def test_mistakes_are_one_message_before_anything_runs(
    tmp_path, monkeypatch, capsys, change, message
):
    given = {
        "--task": "digits",
        "--methods": "full",
        "--epochs": "1",
        "--out": str(tmp_path / "out"),
    } | change
    monkeypatch.setattr(
        sys, "argv", ["thresher", "compare", *(word for pair in given.items() for word in pair)]
    )
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.err and not captured.out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("given", "asked", "controls"),
    [
        ({"--budget": ".5,35%"}, "winnow:share=0.5,winnow:share=0.35", None),
        ({"--budget": "0.5", "--methods": "infobatch"}, "infobatch,winnow:share=0.5", None),
        ({"--budget": "0.5", "--controls": "placebo"}, "winnow:share=0.5", ("placebo",)),
        ({"--methods": "infobatch"}, "infobatch", None),
        ({"--methods": "infobatch", "--controls": ""}, "infobatch", ()),
    ],
)
def test_a_budget_is_winnow_beside_the_other_ways_to_spend_it(
    tmp_path, monkeypatch, given, asked, controls
):
    calls = []
    monkeypatch.setattr(
        "thresher_lab.cli.compare.run_and_print",
        lambda *args, **options: calls.append((args[1], options["controls"])),
    )
    given = {"--task": "digits", "--epochs": "1", "--out": str(tmp_path / "out")} | given
    monkeypatch.setattr(
        sys, "argv", ["thresher", "compare", *(word for pair in given.items() for word in pair)]
    )
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 0 and calls == [(asked, controls)]


def test_neither_methods_nor_a_budget(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        sys,
        "argv",
        ["thresher", "compare", "--task", "digits", "--epochs", "1", "--out", str(tmp_path)],
    )
    with pytest.raises(SystemExit):
        cli.main()
    assert "give --methods, such as infobatch, or --budget" in capsys.readouterr().err


def test_what_the_commands_train_by_default_is_known():
    specs = parse_methods(f"{demo.DEMO_METHODS},{time_to_target.TIMED_METHODS}")
    assert [spec.label for spec in specs] == [
        "winnow",
        "selective_backprop:beta=1 once",
        "selective_backprop:beta=2 once",
        "selective_backprop:beta=1 twice",
        "selective_backprop:beta=1 twice every=3",
    ]


def test_what_the_makefile_trains_is_known():
    lines = (Path(__file__).parents[3] / "Makefile").read_text().splitlines()
    variables = dict(line.split(" := ", 1) for line in lines if " := " in line)
    methods = variables["FASHION"].replace("$(PUBLISHED)", variables["PUBLISHED"])
    specs = parse_methods(methods.replace("$(SELECTIVE)", variables["SELECTIVE"]))
    assert [spec.label for spec in specs] == [
        "kakurenbo", "infobatch",
        "selective_backprop:keep=0.33 once", "selective_backprop:keep=0.33 twice", "random_backprop:keep=0.33",
    ]  # fmt: skip
    tasks = [word for line in lines for flag, word in pairwise(line.split()) if flag == "--task"]
    assert len(tasks) == 4 and all(
        task_of(task).batch_size == 128 for task in tasks if task.startswith("fashion")
    )


RUN = {"metric": {"name": "accuracy", "value": 0.9}, "wall_s": 1.0}


@pytest.mark.parametrize("brief", [False, True], ids=["whole", "brief"])
@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "plain"])
def test_progress(terminal, brief):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    first, second = Job.of(MethodSpec("full"), 0), Job.of(MethodSpec("infobatch"), 0)
    with progress_on(console, brief=brief) as watcher:
        watcher.planned(2, 5)
        watcher.finished(first, RUN, reused=True)
        watcher.started(second)
        for epoch in range(5):
            watcher.advanced(second, epoch + 1, 0.5)
        whole = watcher._progress.tasks[0]
        assert (whole.completed, whole.total) == (5, 5)
        watcher.finished(second, RUN, reused=False)
    text = console.file.getvalue()
    assert "up to 2 runs of 5 epochs" in text
    for line in (
        "[1/2] full, seed 0: accuracy 90.00 %, kept from before",
        "[2/2] infobatch, seed 0: accuracy 90.00 %, 1.0 s",
    ):
        assert (line in text) != brief
    assert ("5/5" in text) == terminal


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "plain"])
def test_progress_with_controls_that_are_shorter_or_shared(terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    uniform, shorter = Job.control("uniform", 0, 0.5), Job.control("shorter", 0, 0.52)
    with progress_on(console) as watcher:
        watcher.planned(3, 10)
        watcher.shared(uniform)
        watcher.started(shorter)
        whole, bar = watcher._progress.tasks
        assert (whole.total, bar.total) == (16, 6)
        for epoch in range(5):  # of its 6 epochs the last had no whole step
            watcher.advanced(shorter, epoch + 1, 0.5)
        watcher.finished(shorter, RUN, reused=False)
        if terminal:
            assert (whole.completed, whole.total) == (5, 15)
    text = console.file.getvalue()
    assert "uniform@0.500, seed 0: a control of several methods, trained once" in text
    assert "[1/2] shorter@0.520, seed 0: accuracy 90.00 %, 1.0 s" in text


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "plain"])
def test_progress_without_a_control(terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    smaller = Job.control("smaller", 0, 0.5)
    with progress_on(console) as watcher:
        watcher.left_out("random_backprop", "placebo", "RandomBackprop chooses without losses")
        watcher.planned(3, 10)
        watcher.started(smaller)
        watcher.dropped(smaller)
        watcher.left_out("m", "smaller", "Less than one row a batch.")
        [whole] = watcher._progress.tasks
        assert whole.total == 20
        watcher.finished(Job.of(MethodSpec("full"), 0), RUN, reused=True)
    text = console.file.getvalue()
    assert (
        "Skipped the placebo control of random_backprop: RandomBackprop chooses without losses.\n"
        in text
    )
    assert "Skipped the smaller control of m: Less than one row a batch.\n" in text
    assert "[1/2] full, seed 0" in text


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "plain"])
def test_progress_of_several_comparisons_is_that_of_each(terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    first, second = Job.of(MethodSpec("full"), 0), Job.of(MethodSpec("full"), 1)
    with progress_on(console) as watcher:
        for runs, jobs in ((1, [first]), (2, [first, second])):
            watcher.planned(runs, 1)
            for job in jobs:
                watcher.started(job)
                watcher.advanced(job, 1, 0.5)
                watcher.finished(job, RUN, reused=False)
        whole = watcher._progress.tasks[0]
        assert (whole.completed, whole.total) == (2, 2)
    lines = [line for line in console.file.getvalue().splitlines() if "accuracy" in line]
    assert ["[1/1]" in line for line in lines] == [True, False, False]
    assert ["/2]" in line for line in lines] == [False, True, True]


def test_table_of_targets():
    reached = {"seeds": 3, "of": 3, "cost_to_full": 0.5, "cpu_to_full": 0.625}
    missed = {"seeds": 1, "of": 3, "cost_to_full": None, "cpu_to_full": None}
    measured = {
        "targets": [{"factor": 1.4, "error": 0.14}, {"factor": 1.1, "error": 0.11}],
        "arms": [{"method": "m", "error": 0.12, "reached": [reached, missed]}],
    }
    console = Console(file=io.StringIO(), width=100)
    console.print(targets_table(measured))
    text = console.file.getvalue()
    assert "14.00 % (1.4x)" in text and "11.00 % (1.1x)" in text
    assert "12.00 %" in text and "0.50, 0.62, 3/3" in text and "not reached, 1/3" in text
