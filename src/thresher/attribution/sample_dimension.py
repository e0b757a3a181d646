"""Which dimension of a yielded tensor is the samples', where a collate function may put the time before them."""

from torch import Tensor

from thresher.attribution.rows import AttributionError

ONE_PER_SAMPLE = (
    "Pass one loss per sample: run.reduce(losses.flatten(1).mean(1), ...) where the samples are the first dimension, "
    "run.reduce(losses.mean(0), ids=run.ids) where they are the second."
)
FLATTENED = (
    "Pass flattened losses and masks: run.reduce(losses.flatten(), ids=run.ids, repeat=losses[0].numel(), "
    "valid=valid.flatten()) where the samples are the first dimension; transpose both before where they are the second."
)


class SampleDimension:
    """Learns it from the shapes of batches, for tensors whose first two dimensions are as long as the batch.

    A batch of n samples of shape (T, n) cannot be told from one of shape (n, T) while T equals n. Any other batch with T
    unequal to n tells which it is, for all batches.
    """

    def __init__(self) -> None:
        self._is_first: dict[tuple[int, int, int], bool] = {}
        self.unclear: tuple[int, ...] | None = None
        """Shape of a tensor of the last batch whose samples may be along its first or its second dimension; None where all
        are certain."""

    @property
    def may_be_second(self) -> bool:
        """Whether samples are, or can be, along the second dimension of some tensor of the batches."""
        return self.unclear is not None or not all(self._is_first.values())

    def with_samples_first(self, tensors: list[Tensor], n: int) -> list[Tensor]:
        """Returns the tensors of a batch whose first dimension is certain to be the samples'.

        Args:
            tensors: All tensors of a batch, in the order of the batch.
            n: Number of samples in the batch.
        """
        self.unclear, kept = None, []
        for place, tensor in enumerate(tensors):
            known, shape = (len(tensors), place, tensor.dim()), tensor.shape
            first, second = tensor.dim() > 0 and shape[0] == n, tensor.dim() > 1 and shape[1] == n
            if tensor.dim() > 1 and first != second and n > 1:
                self._is_first[known] = first
            if first and (n == 1 or not second or self._is_first.get(known, False)):
                kept.append(tensor)
            elif first and known not in self._is_first:
                self.unclear = tuple(shape)
        return kept


class LossDimension:
    """Learns whether the first dimension of losses by position is the samples', from losses whose first two differ."""

    def __init__(self) -> None:
        self._is_first: set[int] = set()

    def check(self, losses: Tensor, n: int, *, by_sample: bool = True) -> None:
        """Refuses losses of n samples whose samples may be along the second dimension, until another shape shows the first.

        Args:
            losses: Losses by position, shape (rows, ...).
            n: Number of samples.
            by_sample: Whether one mean loss per sample can take the place of the losses by position. Default: True.

        Raises:
            AttributionError: The first two dimensions are both as long as there are samples.
        """
        if losses.dim() < 2 or n < 2 or losses.shape[0] != n:
            return
        if losses.shape[1] != n:
            self._is_first.add(losses.dim())
        elif losses.dim() not in self._is_first:
            raise AttributionError(
                f"run.reduce: losses of shape {tuple(losses.shape)} for {n} samples: the samples can be along the first "
                "dimension or along the second, as with a model whose outputs have the time first. Nothing was recorded. "
                + (ONE_PER_SAMPLE if by_sample else FLATTENED)
            )
