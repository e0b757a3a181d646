"""One method of each family at about half of the cost of full training, on seven tasks, beside controls of the same cost.

What was decided before the first counted run:

- Tasks: images, images with wrong labels, imbalanced classes, regression, text: those of `benchmarks.winnow`, with their
  samples for the choice of rates, their samples that count, their epochs, and their margin of 0.2 points. Two more, on which
  papers say that selection must win: near-duplicates, and texts of unlike lengths, see `tasks`.
- Each method has the settings that bring its cost nearest to one half, and its publication's for the rest. Its cost as it
  came out is printed, and so are its optimizer steps: methods that take fewer steps and those that make batches smaller differ
  by that alone.
- Every arm looks at the same three learning rates, with two seeds and on samples that are never counted. Five seeds count.
- On the tasks of `benchmarks.winnow`, the arms `BESIDE` are its trainings. A placebo is the method with its signals permuted,
  at the rate of the method.
- Fewer epochs in the same time have the CPU time of `times`, in tenths of that of full training.
- Differences are paired by seed. The findings against full training, and those against each control, are corrected by Holm over
  the whole table: all methods and all tasks. Nothing is called better or worse, and no loss excluded, that is not decided so.
"""
