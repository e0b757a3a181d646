"""Thresher: train on the samples that still teach, skip the rest, and show what it cost."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thresher.attribution import AttributionError as AttributionError
    from thresher.learning_rate import ProgressLR as ProgressLR
    from thresher.methods.full import FullData as FullData
    from thresher.methods.infobatch import InfoBatch as InfoBatch
    from thresher.methods.kakurenbo import Kakurenbo as Kakurenbo
    from thresher.methods.uniform import UniformSubset as UniformSubset
    from thresher.plans import EpochPlan as EpochPlan
    from thresher.records import Column as Column
    from thresher.run import Run as Run
    from thresher.run import attach as attach

__version__ = "0.1.0"

# Loaded when first used: `thresher methods` and `thresher --help` must answer without importing torch.
_HOME = {
    "AttributionError": "attribution",
    "Column": "records",
    "EpochPlan": "plans",
    "FullData": "methods.full",
    "InfoBatch": "methods.infobatch",
    "Kakurenbo": "methods.kakurenbo",
    "ProgressLR": "learning_rate",
    "Run": "run",
    "UniformSubset": "methods.uniform",
    "attach": "run",
}

__all__ = [
    "AttributionError",
    "Column",
    "EpochPlan",
    "FullData",
    "InfoBatch",
    "Kakurenbo",
    "ProgressLR",
    "Run",
    "UniformSubset",
    "__version__",
    "attach",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"thresher.{_HOME[name]}"), name)
    if name in {"methods", "signals", "criteria", "selection", "schedules", "cost"}:
        return import_module(f"thresher.{name}")
    raise AttributeError(f"module 'thresher' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
