"""Buffers of a model during passes that the loop does not notice: the passes see copies, and the buffers stay untouched."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

BufferPlace = tuple[nn.Module, str]
Copies = list[tuple[nn.Module, str, Tensor]]


def places_of(module: nn.Module) -> list[BufferPlace]:
    """Returns where the buffers of a model are: the part that holds each, and its name there."""
    return [(part, name) for part in module.modules() for name, _ in part._buffers.items()]


def _buffer(part: nn.Module, name: str) -> Tensor | None:
    # Modules of torch.jit have a table without `get`.
    buffers = part._buffers
    return buffers[name] if name in buffers else None  # noqa: SIM401


def copies_of(places: list[BufferPlace]) -> Copies:
    """Returns copies of buffers; parts that share a buffer share its copy."""
    made: dict[int, Tensor] = {}
    copies = []
    for part, name in places:
        buffer = _buffer(part, name)
        if buffer is not None and not is_lazy(buffer):
            if id(buffer) not in made:
                made[id(buffer)] = buffer.detach().clone()
            copies.append((part, name, made[id(buffer)]))
    return copies


@contextmanager
def replaced(copies: Copies) -> Iterator[None]:
    """Puts copies in the place of buffers while the block runs; the buffers themselves are neither written nor exchanged.

    Args:
        copies: Result of `copies_of`.

    Example:
        >>> import torch
        >>> norm = nn.BatchNorm1d(2)
        >>> with replaced(copies_of(places_of(norm))):
        ...     outputs = norm(torch.randn(4, 2))
        >>> norm.num_batches_tracked
        tensor(0)
    """
    held = [(part, name, part._buffers[name]) for part, name, _ in copies if name in part._buffers]
    for part, name, copy in copies:
        part._buffers[name] = copy
    try:
        yield
    finally:
        for part, name, buffer in held:
            part._buffers[name] = buffer


def share_buffers(parallel: DistributedDataParallel | None) -> None:
    """Gives all processes the buffers of the first one, as a forward pass of the training does; all processes must call it.

    The statistics of a batch normalisation differ from process to process after each step. Where a pass over all samples is
    divided among the processes, each sample then gets the loss that one process would compute.

    Args:
        parallel: The model around the buffers; None, or one that was told not to share its buffers, leaves them as they are.
    """
    if parallel is not None and parallel.broadcast_buffers and parallel.modules_buffers:
        parallel._sync_buffers()


class WrittenBuffers:
    """The buffers that forward passes of a model write in evaluation mode too, such as queues and counters.

    The first pass sees copies of all buffers and shows which of them it writes; later passes see copies of these alone.
    """

    def __init__(self) -> None:
        self._written: weakref.WeakKeyDictionary[nn.Module, list[BufferPlace]] = weakref.WeakKeyDictionary()

    @contextmanager
    def untouched(self, module: nn.Module) -> Iterator[None]:
        """Leaves the buffers of a model as they are, whatever its forward passes in the block write.

        Args:
            module: The model, in evaluation mode.
        """
        known = self._written.get(module)
        copies = copies_of(places_of(module) if known is None else known)
        versions = [copy._version for _, _, copy in copies]
        with replaced(copies):
            yield
            if known is None:
                self._written[module] = [
                    (part, name)
                    for (part, name, copy), version in zip(copies, versions, strict=True)
                    if _buffer(part, name) is not copy or copy._version != version
                ]
