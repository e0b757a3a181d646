"""One of several processes: which commands it runs, and which of the processes says what has failed."""

import os
import sys
import threading
from types import SimpleNamespace

import accelerate
import pytest
import typer
from torch import distributed

from thresher_lab import cli
from thresher_lab.cli import _several
from thresher_lab.cli._several import ENDED, as_one_of_several, check_command


@pytest.fixture
def store(monkeypatch):
    """The store of a process of two, which waits for nobody."""
    found = distributed.HashStore()
    monkeypatch.setattr(_several, "_joined", lambda: found)
    monkeypatch.setattr(_several, "FIRST_SPEAKS_S", 0)
    monkeypatch.setattr(_several, "LOOKS_S", 0.01)
    monkeypatch.setattr(os, "_exit", lambda code: None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    return found


def test_commands_that_several_processes_run_together_alone_or_not_at_all(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    check_command("advise")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "1")
    for name in ("compare", "reproduce", "train"):
        check_command(name)
    for name in ("advise", "demo", "score", "time-to-target"):
        with pytest.raises(
            ValueError,
            match=f"`{name}` trains in one process, .* has started 4 .* are compare, reproduce, train",
        ):
            check_command(name)
    with pytest.raises(SystemExit, match="0"):
        check_command("report")
    monkeypatch.setenv("RANK", "0")
    check_command("report")


@pytest.mark.parametrize(("rank", "prefix"), [(0, ""), (1, "process 1 of 2: ")])
def test_a_process_that_fails_says_so_once_and_ends_the_others(
    monkeypatch, capsys, store, rank, prefix
):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(sys, "argv", ["thresher", "advise", "digits"])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    said = capsys.readouterr()
    assert (
        said.err.startswith(f"{prefix}thresher: `advise` trains in one process") and said.out == ""
    )
    assert store.get(ENDED) == str(rank).encode()


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_ours_is_shown_with_its_traceback(monkeypatch, capsys, store, rank):
    def fail():
        typer.echo("about to fail")
        raise ZeroDivisionError("why")

    monkeypatch.setenv("RANK", str(rank))
    with pytest.raises(SystemExit, match="1"):
        as_one_of_several(fail)
    said = capsys.readouterr()
    assert said.err.rstrip().endswith("ZeroDivisionError: why") and bool(said.out) == (rank == 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_process_prints(monkeypatch, capsys, store, rank):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(sys, "argv", ["thresher", "methods"])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    assert ("kakurenbo" in capsys.readouterr().out) == (rank == 0)
    assert not store.check([ENDED])


def test_a_process_ends_in_silence_where_another_one_has_failed(monkeypatch, store):
    ended, over = [], threading.Event()

    def leave(code):
        ended.append(code)
        over.set()

    monkeypatch.setattr(os, "_exit", leave)
    store.set(ENDED, "0")
    _several._end_with_others(store, over)
    assert ended == [1]
    _several._end_with_others(store, over)
    assert ended == [1]


def test_a_process_goes_on_where_the_store_has_gone_with_another_one_that_is_done():
    def gone(_):
        raise RuntimeError("connection closed")

    _several._end_with_others(SimpleNamespace(check=gone), threading.Event())


@pytest.mark.parametrize(
    ("rank", "message"),
    [(0, "accelerate does not train in several processes on devices"), (1, "1")],
)
def test_processes_on_devices_that_accelerate_does_not_join(monkeypatch, rank, message):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(
        sys.modules["torch.distributed.rendezvous"],
        "rendezvous",
        lambda _: iter([(distributed.HashStore(), rank, 2)]),
    )
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(accelerate, "PartialState", lambda cpu: SimpleNamespace(num_processes=1))
    with pytest.raises(SystemExit, match=message):
        _several._joined()
