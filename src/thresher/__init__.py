"""Thresher: train on the samples that still teach, skip the rest, and show what it cost."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thresher.attribution import AttributionError as AttributionError
    from thresher.cost import break_even as break_even
    from thresher.learning_rate import ProgressLR as ProgressLR
    from thresher.methods.full import FullData as FullData
    from thresher.methods.infobatch import InfoBatch as InfoBatch
    from thresher.methods.kakurenbo import Kakurenbo as Kakurenbo
    from thresher.methods.random_backprop import RandomBackprop as RandomBackprop
    from thresher.methods.selective_backprop import SelectiveBackprop as SelectiveBackprop
    from thresher.methods.uniform import UniformSubset as UniformSubset
    from thresher.plans import BatchPlan as BatchPlan
    from thresher.plans import EpochPlan as EpochPlan
    from thresher.records import Column as Column
    from thresher.run import Run as Run
    from thresher.run import attach as attach
    from thresher.scoring import Scoring as Scoring
    from thresher.subset import mixes_samples as mixes_samples
    from thresher.subset import subset_backward as subset_backward

__version__ = "0.1.0"

# Loaded when first used: `thresher methods` and `thresher --help` must answer without importing torch.
_HOME = {
    "AttributionError": "attribution",
    "BatchPlan": "plans",
    "Column": "records",
    "EpochPlan": "plans",
    "FullData": "methods.full",
    "InfoBatch": "methods.infobatch",
    "Kakurenbo": "methods.kakurenbo",
    "ProgressLR": "learning_rate",
    "RandomBackprop": "methods.random_backprop",
    "Run": "run",
    "Scoring": "scoring",
    "SelectiveBackprop": "methods.selective_backprop",
    "UniformSubset": "methods.uniform",
    "attach": "run",
    "mixes_samples": "subset",
    "subset_backward": "subset",
    "break_even": "cost",
}

__all__ = [
    "AttributionError",
    "BatchPlan",
    "Column",
    "EpochPlan",
    "FullData",
    "InfoBatch",
    "Kakurenbo",
    "ProgressLR",
    "RandomBackprop",
    "Run",
    "Scoring",
    "SelectiveBackprop",
    "UniformSubset",
    "__version__",
    "attach",
    "break_even",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"thresher.{_HOME[name]}"), name)
    if name in {"methods", "signals", "criteria", "selection", "schedules", "cost"}:
        return import_module(f"thresher.{name}")
    raise AttributeError(f"module 'thresher' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
