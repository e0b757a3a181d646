"""Imports of torchvision and timm, which only full-size experiments need.

The torchvision of the package index has no compiled operators for a torch without CUDA, and its import fails at the first one
that is missing. The transforms and classifiers that are used here need no such operator. So the two operators that the import
looks up are declared without an implementation, and they are never called.
"""

import contextlib
import importlib
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

MISSING = ("nms", "qnms")
"""Names of the operators that the import of torchvision looks up."""

_declared: list[Any] = []
"""Libraries of declared operators; a declaration ends when its library is deleted."""


def optional(name: str) -> ModuleType:
    """Returns a module of torchvision or timm.

    Args:
        name: Name of the module, such as "timm" or "torchvision.transforms".

    Raises:
        ValueError: The package is not installed, or does not work with this version of torch.
    """
    # `make` installs them beside the environment's packages: there they would break the import of Transformers.
    if (folder := Path(sys.prefix, "vision")).is_dir() and str(folder) not in sys.path:
        sys.path.append(str(folder))
    try:
        return _import_quietly(name)
    except (ImportError, RuntimeError) as error:
        if "torchvision::" in str(error) and not _declared:
            _declare_operators()
            return optional(name)
        raise ValueError(_advice(name, error)) from error


def prepare() -> None:
    """Prepares the import of torchvision, if it is installed: Transformers and torchmetrics look for it."""
    with contextlib.suppress(ValueError):
        optional("torchvision")


def _import_quietly(name: str) -> ModuleType:
    with warnings.catch_warnings(
        action="ignore"
    ):  # torchvision warns that it cannot read image files.
        return importlib.import_module(name)


def _declare_operators() -> None:
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in MISSING:
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)


def _advice(name: str, error: Exception) -> str:
    package = name.partition(".")[0]
    return f"{package} is needed, of a version for torch {torch.__version__}: pip install timm torchvision ({error})"
