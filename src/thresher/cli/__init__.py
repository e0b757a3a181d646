"""The command `thresher`, with one file per command. Commands import heavy modules only when they run."""

import os
import sys
from importlib.util import find_spec

EXTRA = ("accelerate", "jinja2", "PIL", "plotly", "pyarrow", "pydantic", "rich", "scipy", "sklearn", "typer", "yaml")
"""Import names of the packages in the extra `experiments`."""

SEVERAL = (
    "the commands run in one process, and torchrun or accelerate launch has started {} (WORLD_SIZE). Start the command by "
    "itself. In a training script of your own, thresher.attach works in several processes."
)


def main() -> None:
    """Entry point. It exits with code 2 and one message on a user's mistake, and with code 130 on Ctrl-C."""
    if any(find_spec(name) is None for name in EXTRA):
        sys.exit(_complain("the command line needs packages that are not installed: pip install 'thresher[experiments]'"))
    if os.environ.get("WORLD_SIZE", "1") != "1":
        sys.exit(_complain(SEVERAL.format(os.environ["WORLD_SIZE"])))
    from thresher.cli.app import app

    try:
        app()
    except (ValueError, OSError) as error:
        sys.exit(_complain(str(error)))


def _complain(message: str) -> int:
    print(f"thresher: {message}", file=sys.stderr)  # noqa: T201
    return 2
