"""Outputs of frozen modules that are computed once for each row, and read from then on."""

from thresher.frozen.cached import Cached as Cached
from thresher.frozen.cached import cached as cached
