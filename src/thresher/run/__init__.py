"""A method attached to one training loop."""

from thresher.run.run import Run as Run
from thresher.run.run import attach as attach
