"""Warnings that point to a line of the user's code."""

import os
import sys
import warnings
from pathlib import Path


def warn(message: str) -> None:
    """Issues a warning at the innermost line of code outside this library and torch, usually a line of the user.

    Args:
        message: Text of the warning, in whole sentences.

    Example:
        >>> with warnings.catch_warnings(record=True) as said:
        ...     warnings.simplefilter("always")
        ...     warn("Keep less than 0.57.")
        >>> str(said[0].message)
        'Keep less than 0.57.'
    """
    # torch is skipped, too, because it calls modules and hooks of this library. It is not imported here, because listing the
    # methods must not import it.
    packages = [sys.modules[name] for name in ("thresher", "torch") if name in sys.modules]
    inside = tuple(str(Path(str(package.__file__)).parent) + os.sep for package in packages)
    # Python has `skip_file_prefixes` for this from 3.12 on.
    frame = sys._getframe(1)
    level = 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame = frame.f_back
        level = level + 1
    warnings.warn(message, stacklevel=level)
