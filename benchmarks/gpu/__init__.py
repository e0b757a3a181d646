"""Checks and measurements for a machine with a GPU, which may be at hand for minutes; needs torch, NumPy and the library."""
