"""Selection with Lightning: `Selection` is a callback, and the module does not change.

It needs the extra `lightning`: `pip install 'thresher[lightning]'`.
"""

try:
    import lightning.pytorch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "thresher.lightning needs the package lightning: pip install 'thresher[lightning]'"
    ) from error

from thresher._version import warn_if_newer
from thresher.lightning.selection import Selection

warn_if_newer("lightning", (2, 6), __name__)

__all__ = ["Selection"]
