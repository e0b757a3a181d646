"""The former name of `thresher.losses`; its names stay importable from here."""

from thresher.losses.adapt import ADAPTERS as ADAPTERS
from thresher.losses.adapt import MODULE_OF as FUNCTIONS
from thresher.losses.adapt import adapt as adapt
from thresher.losses.base import Criterion as Criterion

__all__ = ["ADAPTERS", "FUNCTIONS", "Criterion", "adapt"]
