"""A loader for tensors that lie entirely on one device. A batch takes one `index_select` per tensor, not a read per sample."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

BatchTransform = Callable[[list[Tensor]], Any]
"""Function that turns the list of tensors of a batch into the batch to yield, such as a random crop of its images."""


class TensorRows(TensorDataset):
    """A TensorDataset whose rows are read as whole batches, on the device of its tensors.

    Args:
        tensors: Tensors of shape (N, ...), on one device.
        transform: Function that turns the list of tensors of a batch into the batch to yield. Default: none.
    """

    def __init__(self, tensors: Sequence[Tensor], transform: BatchTransform | None = None) -> None:
        super().__init__(*tensors)
        self.transform = transform
        self._device = tensors[0].device

    # torch calls this instead of __getitem__ if it exists, once per batch.
    def __getitems__(self, ids: Tensor | list[int]) -> Any:
        """Returns the batch of the given rows: the list of its tensors, or the result of `transform`.

        Args:
            ids: Row numbers on the host, shape (n,), int64.
        """
        rows = torch.as_tensor(ids).to(self._device, non_blocking=True)
        batch = [tensor.index_select(0, rows) for tensor in self.tensors]
        return batch if self.transform is None else self.transform(batch)


# A function at module level: spawned workers can import it, and `collate_check.checked` can recognize it.
def as_it_is(batch: Any) -> Any:
    """Returns its argument: a collate function for datasets that return whole batches."""
    return batch


class TensorLoader(DataLoader[Any]):
    """A DataLoader over tensors that lie on one device, such as a whole dataset on the GPU.

    It yields what `DataLoader(TensorDataset(*tensors), ...)` yields, in the same order, bit for bit. A batch is read by one
    `index_select` per tensor, on the device of the tensors, and the CPU does not wait for the device.

    Args:
        tensors: Tensors of shape (N, ...), on one device; for training, first inputs, then targets.
        batch_size: Number of rows of a batch, 1 or more.
        shuffle: Whether each epoch has a new random order. Default: True.
        transform: Function that turns the list of tensors of a batch into the batch to yield, for example by a random crop of
            the inputs on the device. Row i of the result must come from row i of the tensors. Default: none.
        drop_last: Whether a last batch with fewer rows is left out. Default: False.
        generator: Random generator of the order. Default: the global one.

    Raises:
        TypeError: `tensors` has something other than tensors.
        ValueError: There is no tensor, or the tensors have different lengths or devices.

    Example:
        >>> loader = TensorLoader(torch.arange(5), batch_size=2, shuffle=False, transform=lambda batch: batch[0] * 10)
        >>> [batch.tolist() for batch in loader]
        [[0, 10], [20, 30], [40]]
    """

    def __init__(
        self,
        *tensors: Tensor,
        batch_size: int,
        shuffle: bool = True,
        transform: BatchTransform | None = None,
        drop_last: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        if wrong := [type(one).__name__ for one in tensors if not isinstance(one, Tensor)]:
            raise TypeError(f"TensorLoader: `tensors` must be tensors, got {', '.join(wrong)}")
        sizes = {(len(one) if one.dim() else None, str(one.device)) for one in tensors}
        if len(sizes) != 1 or (None, str(tensors[0].device)) in sizes:
            shapes = ", ".join(f"{tuple(one.shape)} on {one.device}" for one in tensors)
            raise ValueError(
                f"TensorLoader: `tensors` must have one length and one device, got {shapes or 'none'}"
            )
        rows = TensorRows(tensors, transform)
        super().__init__(
            rows,
            batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            generator=generator,
            collate_fn=as_it_is,
        )
