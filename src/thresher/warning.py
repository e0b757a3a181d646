"""A warning that names the line of the user's code, however deep it arises."""

import os
import sys
import warnings
from pathlib import Path


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
    # Torch calls modules and hooks of this library. It is not imported here: a list of the methods does without.
    packages = [sys.modules[name] for name in ("thresher", "torch") if name in sys.modules]
    inside = tuple(str(Path(str(package.__file__)).parent) + os.sep for package in packages)
    # Python has `skip_file_prefixes` for this from 3.12 on.
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
