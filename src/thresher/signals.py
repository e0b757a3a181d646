"""The former name of `thresher.losses.signals`; its names stay importable from here."""

from thresher.losses.signals import *  # noqa: F403
