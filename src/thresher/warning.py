"""A warning that names the line of the user's code, however deep it arises."""

import os
import sys
import warnings
from pathlib import Path

import torch

INSIDE = tuple(str(Path(module).parent) + os.sep for module in (__file__, str(torch.__file__)))
"""Folders whose code is not the user's: that of this library, and torch's, which calls modules and hooks of it."""


def warn(message: str) -> None:
    """Warns, at the innermost line outside of this library and of torch.

    Args:
        message: The warning, whole sentences.

    Example:
        >>> with warnings.catch_warnings(record=True) as said:
        ...     warnings.simplefilter("always")
        ...     warn("Keep less than 0.57.")
        >>> str(said[0].message)
        'Keep less than 0.57.'
    """
    # Python has `skip_file_prefixes` for this from 3.12 on.
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
