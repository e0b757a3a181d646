"""How deep the tests go: `make test` looks at some of the cases, `make verify` at all of them."""

import os

DEEP = os.environ.get("THRESHER_VERIFY") == "1"


def depth(quick: int, full: int) -> int:
    """How many instances, examples or seeds a test looks at: `quick` in `make test`, `full` in `make verify`."""
    return full if DEEP else quick
