"""The command `thresher`, with one file per command. Commands import heavy modules only when they run."""

import atexit
import os
import sys
import threading
import traceback
import warnings
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, NoReturn

ALWAYS = ("rich", "typer")
"""Import names of the packages that every command needs."""
OF_LAB = (
    *ALWAYS,
    "accelerate",
    "jinja2",
    "PIL",
    "plotly",
    "pyarrow",
    "pydantic",
    "scipy",
    "sklearn",
    "yaml",
)
"""Import names of the packages that the extra `lab` installs."""


def run_command() -> NoReturn:
    """Entry point of the process: calls `main`, whose exit code the process has, whatever libraries do at its end.

    With torch and pyarrow in one process, the destructors of their C++ libraries abort now and then on a busy machine, after
    all work is done. So the process ends without them, once Python's own handlers have run.
    """
    code: Any = 0
    try:
        main()
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)  # noqa: T201
        code = 1
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a pipe that was closed
            stream.flush()
    os._exit(code or 0)


def main() -> None:
    """Runs the command. It exits with code 2 and one message on a user's mistake, and with code 130 on Ctrl-C.

    As one of several processes of torchrun or accelerate launch it lets the first one speak, see `cli._several`.
    """
    if any(find_spec(name) is None for name in ALWAYS):
        sys.exit(
            _complain(
                "the command line needs packages that are not installed: pip install 'thresher[lab]'"
            )
        )
    if os.environ.get("WORLD_SIZE", "1") == "1":
        _run()
        return
    from thresher_lab.cli._several import as_one_of_several

    as_one_of_several(_run)


def _run() -> None:
    from thresher_lab.cli.app import app

    _SAID.clear()
    warnings.showwarning = _warned
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "ERROR"
    )  # the profiler of a step complains of memory from before it
    try:
        app()
    except OSError as error:
        named = error.filename is not None and error.strerror is not None
        sys.exit(
            _complain(
                f"{error.filename}: {error.strerror}" if named else error.strerror or str(error)
            )
        )
    except ValueError as error:
        sys.exit(_complain(str(error)))
    except ImportError as error:
        cause = error if error.__cause__ is None else error.__cause__
        package = str(getattr(cause, "name", None)).partition(".")[0]
        if package not in OF_LAB:
            raise
        sys.exit(
            _complain(
                f"this command needs {package}, which is not installed: pip install 'thresher[lab]'"
            )
        )


_SAID = set[str]()
"""Warnings that were printed: a training is made several times, and would say the same each time."""


def _warned(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any
) -> None:
    """Prints a warning as the other messages of the command; of code with a line to look at, with that line."""
    if category is UserWarning:
        where = ""
    else:
        where = f"{filename}:{lineno}: {category.__name__}: "
    if (said := f"{where}{message}") not in _SAID:
        _SAID.add(said)
        print(f"thresher: {said}", file=sys.stderr)  # noqa: T201


def _complain(message: str) -> int:
    print(f"thresher: {message}", file=sys.stderr)  # noqa: T201
    return 2
