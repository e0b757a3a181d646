"""Experiments on real data: tasks, a plain training loop that attaches like any user's, and fair comparisons."""
