"""Selection with Hugging Face transformers: `Selection` is a mixin for Trainer and its subclasses.

It needs the extra `transformers`: `pip install 'thresher[transformers]'`.
"""

try:
    import accelerate  # noqa: F401
    import transformers  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "thresher.transformers needs the packages transformers and accelerate: pip install 'thresher[transformers]'"
    ) from error

from thresher._version import warn_if_newer
from thresher.transformers.selection import Selection

warn_if_newer("transformers", (5, 23), __name__)

__all__ = ["Selection"]
