"""The command `thresher`, with one file per command. Commands import heavy modules only when they run."""

import os
import sys
from importlib.util import find_spec

ALWAYS = ("rich", "typer")
"""Import names of the packages that every command needs."""
OF_LAB = (*ALWAYS, "accelerate", "jinja2", "PIL", "plotly", "pyarrow", "pydantic", "scipy", "sklearn", "yaml")
"""Import names of the packages that the extra `lab` installs."""


def main() -> None:
    """Entry point. It exits with code 2 and one message on a user's mistake, and with code 130 on Ctrl-C.

    As one of several processes of torchrun or accelerate launch it lets the first one speak, see `cli._several`.
    """
    if any(find_spec(name) is None for name in ALWAYS):
        sys.exit(_complain("the command line needs packages that are not installed: pip install 'thresher[lab]'"))
    if os.environ.get("WORLD_SIZE", "1") == "1":
        _run()
        return
    from thresher_lab.cli._several import as_one_of_several

    as_one_of_several(_run)


def _run() -> None:
    from thresher_lab.cli.app import app

    try:
        app()
    except (ValueError, OSError) as error:
        sys.exit(_complain(str(error)))
    except ImportError as error:
        cause = error if error.__cause__ is None else error.__cause__
        package = str(getattr(cause, "name", None)).partition(".")[0]
        if package not in OF_LAB:
            raise
        sys.exit(_complain(f"this command needs {package}, which is not installed: pip install 'thresher[lab]'"))


def _complain(message: str) -> int:
    print(f"thresher: {message}", file=sys.stderr)  # noqa: T201
    return 2
