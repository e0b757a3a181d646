"""torchvision and timm, which only full-size experiments need: imported when asked for.

The torchvision of the package index brings no operators for a torch without CUDA, and stops at the first that it misses. What
is used here, transforms and classifiers, needs none of them: the two that it asks for are declared, and never called.
"""

import importlib
import warnings
from types import ModuleType
from typing import Any

import torch

MISSING = ("nms", "qnms")
"""Operators that torchvision asks for when it is imported."""

_declared: list[Any] = []
"""Kept: what a library declares is gone with it."""


def optional(name: str) -> ModuleType:
    """A module of torchvision or timm.

    Args:
        name: Such as "timm" or "torchvision.transforms".

    Raises:
        ValueError: Its package is not installed, or does not go with this torch.
    """
    try:
        return _imported(name)
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise ValueError(_advice(name, error)) from error
    except ImportError as error:
        raise ValueError(_advice(name, error)) from error
    _declare()
    try:
        return _imported(name)
    except (ImportError, RuntimeError) as error:
        raise ValueError(_advice(name, error)) from error


def _imported(name: str) -> ModuleType:
    with warnings.catch_warnings(action="ignore"):  # torchvision says that it cannot read files, which is done elsewhere
        return importlib.import_module(name)


def _declare() -> None:
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in MISSING:
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)


def _advice(name: str, error: Exception) -> str:
    package = name.partition(".")[0]
    return f"{package} is needed, of a version for torch {torch.__version__}: pip install timm torchvision ({error})"
