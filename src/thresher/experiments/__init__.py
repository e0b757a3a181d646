"""Experiments on real data: tasks, a plain training loop that attaches methods as users do, and comparisons at equal cost."""
