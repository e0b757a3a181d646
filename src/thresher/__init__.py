"""Thresher: train on the samples that still teach, skip the rest, and show what it cost."""

from importlib import import_module
from pathlib import Path
from typing import Any

from thresher._version import __version__ as __version__
from thresher.methods import registry

_HOME = {
    **registry.reexports(Path(__file__).with_suffix(".pyi")),
    **registry.reexports(registry.FOLDER / "built_in.py"),
}
"""Public names and their modules. A name is imported when it is first used: `thresher --help` must not import torch."""

_NEED_EXTRAS = {"lightning", "transformers"}
"""Names that need packages other than torch and NumPy, and are not part of `from thresher import *`."""

__all__ = sorted({*_HOME, "__version__"} - _NEED_EXTRAS)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'thresher' has no attribute {name!r}")
    if _HOME[name] == "thresher":
        return import_module(f"thresher.{name}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
