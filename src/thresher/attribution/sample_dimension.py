"""Which dimension of a yielded tensor is the samples', where a collate function may put the time before them."""

from torch import Tensor


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
