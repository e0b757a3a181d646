"""The former name of `thresher.losses.signals`."""

from thresher.losses.signals import *  # noqa: F403
