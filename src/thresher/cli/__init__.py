"""The command `thresher`; one file a command. Commands import what is heavy when they run."""

import sys
from importlib.util import find_spec

EXTRA = ("accelerate", "jinja2", "PIL", "plotly", "pyarrow", "pydantic", "rich", "scipy", "sklearn", "typer", "yaml")
"""What the extra `experiments` brings, by import name."""


def main() -> None:
    """Entry point: exits with 2 and one message on a user's mistake, with 130 on Ctrl-C."""
    if any(find_spec(name) is None for name in EXTRA):
        sys.exit(_complain("the command line needs packages that are not installed: pip install 'thresher[experiments]'"))
    from thresher.cli.app import app

    try:
        app()
    except (ValueError, OSError) as error:
        sys.exit(_complain(str(error)))


def _complain(message: str) -> int:
    print(f"thresher: {message}", file=sys.stderr)  # noqa: T201
    return 2
