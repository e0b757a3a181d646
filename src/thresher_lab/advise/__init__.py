"""Estimates of what selection could save on a training, before the time is spent."""
