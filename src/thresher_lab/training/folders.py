"""The folder of a comparison has one user at a time."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

LOCK = ".lock"
"""File in the folder that its user holds locked."""

# The system holds the lock, so that none is left behind by a process that was killed.
if sys.platform == "win32":
    import msvcrt

    def _lock(file: BinaryIO) -> None:
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)

    def _unlock(file: BinaryIO) -> None:
        msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _lock(file: BinaryIO) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _unlock(file: BinaryIO) -> None:
        fcntl.flock(file, fcntl.LOCK_UN)


def check_folder(folder: Path) -> None:
    """Refuses the path of a file.

    Args:
        folder: Path of a folder, which need not exist.

    Raises:
        ValueError: The path is that of a file.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {folder} is a file; give a folder")


@contextmanager
def sole_use(folder: Path) -> Iterator[None]:
    """Keeps other comparisons out of a folder until the block ends; also those of other processes.

    On a file system without locks, others are not kept out.

    Args:
        folder: Folder of the comparison; it is created if it does not exist.

    Raises:
        ValueError: Another comparison uses the folder, or it is not a folder but a file.
    """
    check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # The file stays: a second process may have opened it already, and would lock one that a third process no longer sees.
    with (folder / LOCK).open("ab") as file:
        try:
            _lock(file)
            locked = True
        except (BlockingIOError, PermissionError):
            raise ValueError(
                f"the folder {folder} is in use by another comparison: wait until that has ended, or give another folder"
            ) from None
        except OSError:
            locked = False
        try:
            yield
        finally:
            # Closing the file is not enough: a process that was forked meanwhile, to load data, holds it open as well.
            if locked:
                _unlock(file)
