"""The entry point of the process: its exit code is that of the command."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from thresher_lab import cli

CALL = "import sys; sys.argv = ['thresher', *{words!r}]; from thresher_lab.cli import run_command; run_command()"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--version"], 0, "thresher "),
        (["prune", "none.parquet", "--keep", "0.5"], 2, "none.parquet"),
        (["nothing"], 2, "No such command"),
    ],
)
def test_the_exit_code_is_that_of_the_command(words, code, said):
    done = subprocess.run(
        [sys.executable, "-c", CALL.format(words=words)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code and said in done.stdout + done.stderr, done


def test_a_file_to_start_from_is_written_without_torch(tmp_path):
    """Torch takes seconds to load."""
    code = (
        CALL.format(words=["init", str(tmp_path / "mine.py")])
        .replace("run_command()", "main()")
        .replace("run_command", "main")
    )
    code = f"try:\n    {code}\nfinally:\n    print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "False" and (tmp_path / "mine.py").is_file(), done


def test_an_unexpected_error_has_its_traceback():
    broken = "import thresher_lab.cli as cli; cli.main = lambda: 1 / 0; cli.run_command()"
    done = subprocess.run(
        [sys.executable, "-c", broken], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr


def test_warnings_and_errors_of_files_are_sentences(capsys, monkeypatch):
    """Without the line of code that has warned, where it is no line of the user's; with it for what is about code."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)

    def commands():
        warnings.warn("the loader does not shuffle", stacklevel=1)
        warnings.warn("use dtype", FutureWarning, stacklevel=1)
        Path("/proc/none/results.json").write_text("")

    monkeypatch.setattr("thresher_lab.cli.app.app", commands)
    with warnings.catch_warnings(), pytest.raises(SystemExit) as stop:
        warnings.simplefilter("always")
        cli._run()
    said = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and said[0] == "thresher: the loader does not shuffle"
    assert (
        said[1].endswith("FutureWarning: use dtype")
        and said[2] == "thresher: /proc/none/results.json: No such file or directory"
    )


def test_a_warning_is_printed_once(capsys):
    from thresher_lab import cli

    cli._SAID.clear()
    for text in ("first", "first", "second"):
        cli._warned(text, UserWarning, "file.py", 3)
    assert capsys.readouterr().err == "thresher: first\nthresher: second\n"
