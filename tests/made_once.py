"""Files that take long to make, made by one worker of pytest-xdist for all of them."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Returns a folder with what a function has made in it; the first one who asks calls it, and the others wait.

    Args:
        factory: pytest's factory of temporary folders.
        name: Name of the folder.
        make: Function that fills the folder.
    """
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with FileLock(f"{folder}.lock"):
        if not (folder / "made").exists():
            folder.mkdir(exist_ok=True)
            make(folder)
            (folder / "made").touch()
    return folder
