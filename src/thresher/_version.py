"""The version of the package, and those of other packages that it follows."""

import re
from importlib.metadata import version

from thresher.warning import warn

__version__ = "0.2.0"


def warn_if_newer(package: str, tested: tuple[int, int], module: str) -> None:
    """Warns where a package is newer than the versions that a module of ours is tested with.

    Args:
        package: Name of the package.
        tested: Major and minor number of the newest version that the module is tested with.
        module: Name of the module.
    """
    here = version(package)
    if tuple(map(int, re.findall(r"\d+", here)[:2])) > tested:
        warn(
            f"{module} is tested with {package} up to {tested[0]}.{tested[1]}, but {here} is installed. Check first that "
            "training with FullData() gives the same weights as training without Thresher."
        )
