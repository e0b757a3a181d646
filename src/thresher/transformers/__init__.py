"""Selection in trainings of the package `transformers`: `Selection` is a mixin for Trainer and its subclasses.

It needs the extra `transformers`: `pip install 'thresher[transformers]'`.
"""

try:
    import accelerate  # noqa: F401
    import transformers  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "thresher.transformers needs the packages transformers and accelerate: pip install 'thresher[transformers]'"
    ) from error

from thresher.transformers.selection import Selection

__all__ = ["Selection"]
