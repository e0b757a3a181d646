"""Winnow beside full training and beside seven other ways to spend the same cost, on eleven tasks.

What was decided before the first counted run:

- The unit is the point: a hundredth of the metric. Metrics are accuracy, accuracy per position (text), mean intersection over
  union (relief) and R2 (bike). The margin, below which a loss does not matter, is 0.2 points on every task.
- Every arm looks at the same grid of learning rates, with seeds that are never counted and on samples that are never counted
  (`Sets.choice`). The rate with the best mean is trained with the counted seeds, and measured on other samples (`Sets.test`).
- A task counts only where something is lost by spending less: where shorter training or random subsets at a share of 0.5 lose
  more than the margin, which must be shown.
- Differences are paired by seed. "No loss" is shown where the difference to full training is above minus the margin; "better"
  and "worse" where the difference to smaller batches is above or below 0. Tests are one-sided t-tests at 0.025, Holm-corrected
  over the tasks.
- The goal at a share of 0.5: no loss on five tasks, better than smaller batches on three, and worse on none.
"""
