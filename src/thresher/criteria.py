"""The former name of `thresher.losses`."""

from thresher.losses.adapt import ADAPTERS as ADAPTERS
from thresher.losses.adapt import FUNCTIONS as FUNCTIONS
from thresher.losses.adapt import adapt as adapt
from thresher.losses.base import Criterion as Criterion
