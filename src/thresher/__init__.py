"""Thresher: train on the samples that still teach, skip the rest, and show what it cost."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thresher.attribution.rows import AttributionError as AttributionError
    from thresher.cost import break_even as break_even
    from thresher.methods.ada_boost import AdaBoost as AdaBoost
    from thresher.methods.ada_selection import AdaSelection as AdaSelection
    from thresher.methods.batch_importance import BatchImportance as BatchImportance
    from thresher.methods.big_loss import BigLoss as BigLoss
    from thresher.methods.contract import Requirements as Requirements
    from thresher.methods.coreset_center import CoresetCenter as CoresetCenter
    from thresher.methods.coreset_extremes import CoresetExtremes as CoresetExtremes
    from thresher.methods.epoch_selective_backprop import EpochSelectiveBackprop as EpochSelectiveBackprop
    from thresher.methods.forgetting import Forgetting as Forgetting
    from thresher.methods.full import FullData as FullData
    from thresher.methods.grad_match import GradMatch as GradMatch
    from thresher.methods.gradient_norm import GradientNorm as GradientNorm
    from thresher.methods.importance_sampling import ImportanceSampling as ImportanceSampling
    from thresher.methods.infobatch import InfoBatch as InfoBatch
    from thresher.methods.kakurenbo import Kakurenbo as Kakurenbo
    from thresher.methods.mercury import Mercury as Mercury
    from thresher.methods.minibatch_dropping import MinibatchDropping as MinibatchDropping
    from thresher.methods.obftf import Obftf as Obftf
    from thresher.methods.prune import Prune as Prune
    from thresher.methods.prune import keep_in_batch as keep_in_batch
    from thresher.methods.rais import Rais as Rais
    from thresher.methods.random_backprop import RandomBackprop as RandomBackprop
    from thresher.methods.rho_loss import RhoLoss as RhoLoss
    from thresher.methods.selective_backprop import SelectiveBackprop as SelectiveBackprop
    from thresher.methods.small_loss import SmallLoss as SmallLoss
    from thresher.methods.uniform import UniformSubset as UniformSubset
    from thresher.passes.scoring import Scoring as Scoring
    from thresher.plans import BatchPlan as BatchPlan
    from thresher.plans import EpochPlan as EpochPlan
    from thresher.progress_lr import ProgressLR as ProgressLR
    from thresher.records import Column as Column
    from thresher.run.attach import attach as attach
    from thresher.run.run import Run as Run
    from thresher.subset import mixes_samples as mixes_samples
    from thresher.subset import subset_backward as subset_backward

__version__ = "0.1.0"

# Loaded when first used: `thresher methods` and `thresher --help` must answer without importing torch.
_HOME = {
    "AdaBoost": "methods.ada_boost",
    "AdaSelection": "methods.ada_selection",
    "AttributionError": "attribution",
    "BatchImportance": "methods.batch_importance",
    "BatchPlan": "plans",
    "BigLoss": "methods.big_loss",
    "Column": "records",
    "CoresetCenter": "methods.coreset_center",
    "CoresetExtremes": "methods.coreset_extremes",
    "EpochPlan": "plans",
    "EpochSelectiveBackprop": "methods.epoch_selective_backprop",
    "Forgetting": "methods.forgetting",
    "FullData": "methods.full",
    "GradMatch": "methods.grad_match",
    "GradientNorm": "methods.gradient_norm",
    "ImportanceSampling": "methods.importance_sampling",
    "InfoBatch": "methods.infobatch",
    "Kakurenbo": "methods.kakurenbo",
    "Mercury": "methods.mercury",
    "MinibatchDropping": "methods.minibatch_dropping",
    "Obftf": "methods.obftf",
    "ProgressLR": "progress_lr",
    "Prune": "methods.prune",
    "Rais": "methods.rais",
    "RandomBackprop": "methods.random_backprop",
    "Requirements": "methods.contract",
    "RhoLoss": "methods.rho_loss",
    "Run": "run.run",
    "Scoring": "passes.scoring",
    "SelectiveBackprop": "methods.selective_backprop",
    "SmallLoss": "methods.small_loss",
    "UniformSubset": "methods.uniform",
    "attach": "run.attach",
    "break_even": "cost",
    "keep_in_batch": "methods.prune",
    "mixes_samples": "subset",
    "subset_backward": "subset",
}

__all__ = [
    "AdaBoost",
    "AdaSelection",
    "AttributionError",
    "BatchImportance",
    "BatchPlan",
    "BigLoss",
    "Column",
    "CoresetCenter",
    "CoresetExtremes",
    "EpochPlan",
    "EpochSelectiveBackprop",
    "Forgetting",
    "FullData",
    "GradMatch",
    "GradientNorm",
    "ImportanceSampling",
    "InfoBatch",
    "Kakurenbo",
    "Mercury",
    "MinibatchDropping",
    "Obftf",
    "ProgressLR",
    "Prune",
    "Rais",
    "RandomBackprop",
    "Requirements",
    "RhoLoss",
    "Run",
    "Scoring",
    "SelectiveBackprop",
    "SmallLoss",
    "UniformSubset",
    "__version__",
    "attach",
    "break_even",
    "keep_in_batch",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"thresher.{_HOME[name]}"), name)
    if name in {"methods", "signals", "criteria", "selection", "schedules", "scores", "testing", "cost"}:
        return import_module(f"thresher.{name}")
    raise AttributeError(f"module 'thresher' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
