"""Six attempts to go further than Winnow at half of the cost. An attempt is kept only if it wins; all are reported.

What was decided before the first counted run:

- The cost of every way is 0.5: (forward + 2 backward) samples over 3 times those of full training. A second network counts
  with its operations of a step, as a share of those of the trained network. Costs must be equal within 0.01.
- Every way has the same look at three rates (x 0.6, 1, 1.6) with two seeds and on samples that are never counted. The rate with
  the best mean is trained with six other seeds, and measured on other samples.
- Differences to Winnow are paired by seed. A way is kept if it is better on a task (one-sided t-test at 0.025,
  Holm-corrected over the ways on that task), and if on no task its 95 % interval, without a correction, lies below 0.
- Averaged weights are those of the last quarter of the steps. They are measured in the same trainings, with a choice of rate of
  their own; full training and smaller batches have them, too.
"""
