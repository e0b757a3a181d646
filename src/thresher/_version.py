"""The version of Thresher, and a warning if another package is newer than the versions that Thresher is tested with."""

import re
from importlib.metadata import version

from thresher.warning import warn

__version__ = "0.2.0"


def warn_if_newer(package: str, tested: tuple[int, int], module: str) -> None:
    """Warns if the installed version of a package is newer than the versions that a module of Thresher is tested with.

    Args:
        package: Name of the package, such as "transformers".
        tested: Major and minor number of the newest version that the module is tested with.
        module: Name of the module of Thresher.
    """
    here = version(package)
    if tuple(map(int, re.findall(r"\d+", here)[:2])) > tested:
        warn(
            f"{module} is tested with {package} up to {tested[0]}.{tested[1]}, but {here} is installed. Check first that "
            "training with FullData() gives the same weights as training without Thresher."
        )
