"""Winnow against full training and other ways to spend the same cost; tasks and trainings that other comparisons use, too.

The unit is the point: a hundredth of the metric. Metrics are accuracy, accuracy per position (text), mean intersection over
union (relief) and R2 (bike). Every arm looks at the same grid of learning rates, with seeds that are never counted and on samples
that are never counted (`Sets.choice`). The rate with the best mean is trained with the counted seeds, and measured on other
samples (`Sets.test`). Differences are paired by seed.
"""
