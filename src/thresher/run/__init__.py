"""A method attached to one training loop."""

from thresher.run.attach import attach as attach
from thresher.run.attach import observe as observe
from thresher.run.run import Run as Run
