"""What a loop did, by its own count: the oracle, which does not ask the library."""

import torch

UNKNOWN = float("nan")


class Loss:
    """Losses of some rows that the loop computed to train on.

    Args:
        rows: Each row as the number of its batch, its place there, and its sample id.
        values: Loss of each row; NaN for a row without a label.
        of_pass: Number of the forward pass.
        backwards: Number of backward passes before it.
    """

    def __init__(self, rows, values, of_pass, backwards):
        self.rows, self.values, self.of_pass, self.backwards = rows, values, of_pass, backwards
        self.reached = self.cleared = False


class Book:
    """Counts, and the last loss of each sample, as docs/loops.md says them.

    Args:
        n: Number of samples.
    """

    def __init__(self, n):
        self.last = torch.full((n,), UNKNOWN)
        self.trained = torch.zeros(n, dtype=torch.int64)
        self.seen = torch.zeros(n, dtype=torch.int64)
        self.this_epoch = torch.zeros(n, dtype=torch.bool)
        self.rows_of_pass: list[int] = []
        self.forward = self.backward_rows = self.steps = self.backwards = 0
        self.epochs: list[int] = []
        self.open: list[Loss] = []

    def begin_epoch(self):
        self.epochs.append(0)
        self.this_epoch.zero_()

    def passed(self, rows):
        """Notes a forward pass of `rows` rows, and returns its number."""
        self.rows_of_pass.append(rows)
        self.forward += rows
        return len(self.rows_of_pass) - 1

    def loss(self, batch, ids, first, values, of_pass):
        """Notes a loss of the rows of a batch from row `first` on."""
        rows = [(batch, first + place, sample) for place, sample in enumerate(ids.tolist())]
        loss = Loss(rows, values.detach().float().tolist(), of_pass, self.backwards)
        self.open.append(loss)
        return loss

    def backward(self, losses):
        self.backwards += 1
        self.backward_rows += sum(self.rows_of_pass[one] for one in {one.of_pass for one in losses})
        for one in losses:
            one.reached = True

    def cleared(self):
        for one in self.open:
            one.cleared = one.cleared or one.reached

    def stepped(self):
        self.steps += 1
        self._write(trained=True)

    def close(self):
        """Ends the training: the last group of batches may have had no step."""
        self._write(trained=False)

    def _write(self, *, trained):
        parts = [one for one in self.open if one.reached and not one.cleared]
        sums: dict[tuple[int, int, int], tuple[float, Loss]] = {}
        for part in parts:
            for row, value in zip(part.rows, part.values, strict=True):
                before = sums.get(row)
                if before is None:
                    sums[row] = value, part
                    continue
                total, leader = before
                later = part.of_pass != leader.of_pass
                again = later and part.backwards > leader.backwards
                sums[row] = value if again else total + value, part if later else leader
        for (_, _, sample), (value, _) in sums.items():
            self.trained[sample] += trained
            if value == value:  # no label, no news
                self.last[sample] = value
                self.seen[sample] += 1
                self.this_epoch[sample] = True
        self.open = [] if trained else [one for one in self.open if one not in parts]
