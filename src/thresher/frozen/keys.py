"""Checksums of rows: 128 bits of the content of each row of a batch, computed on the device of the batch."""

from functools import lru_cache

import torch
from torch import Tensor

WORDS = 4
"""Number of sums of 32 bits that make a key."""
AT_ONCE = 2**20
"""Number of words that are multiplied at once, so that the products fit in the cache."""


@lru_cache(maxsize=64)
def _factors(length: int, number: int, device: torch.device) -> Tensor:
    """Returns random factors for the words of a row, shape (WORDS, length), int64."""
    generator = torch.Generator().manual_seed(0x7E5 + number)
    limits = torch.iinfo(torch.int64)
    factors = torch.randint(limits.min, limits.max, (WORDS, length), generator=generator)
    return factors.to(device)


def row_keys(tensors: list[Tensor]) -> list[bytes]:
    """Returns a key of 16 bytes for the content of each row; waits for the device.

    A key consists of the upper halves of four sums of the row's 32-bit words times random 64-bit factors. For two different
    rows, the probability of equal keys is 2^-128, whatever the rows are (Carter & Wegman, 1979; Dietzfelbinger, 1996).

    Args:
        tensors: Tensors with the rows in their first dimension, on one device. Rows of one call have one shape and dtype: what
            differs between calls must be part of another key.

    Example:
        >>> first, second, third = row_keys([torch.tensor([[1.0, 2.0], [2.0, 1.0], [1.0, 2.0]])])
        >>> len(first), first == second, first == third
        (16, False, True)
    """
    n = len(tensors[0])
    sums = torch.zeros(n, WORDS, dtype=torch.int64, device=tensors[0].device)
    for number, tensor in enumerate(tensors):
        words = _as_words(tensor)
        factors = _factors(words.shape[1], number, words.device)
        step = max(1, AT_ONCE // max(1, n))
        for begin in range(0, words.shape[1], step):
            part = words[:, begin : begin + step].to(torch.int64)
            for place in range(WORDS):
                sums[:, place] += (part * factors[place, begin : begin + step]).sum(1)
    # The upper halves: the lower bits of a sum depend on the lower bits of the words only.
    content = (sums >> 32).to(torch.int32).cpu().numpy().tobytes()
    size = 4 * WORDS
    return [content[begin : begin + size] for begin in range(0, len(content), size)]


def _as_words(tensor: Tensor) -> Tensor:
    """Returns the bytes of each row as 32-bit words, padded with zeros, shape (n, words), int32."""
    content = tensor.detach().contiguous().reshape(len(tensor), -1)
    # bool has no view as bytes on some versions; its values are 0 and 1 anyway.
    if content.dtype == torch.bool:
        content = content.to(torch.uint8)
    else:
        content = content.view(torch.uint8)
    missing = -content.shape[1] % 4
    if missing:
        content = torch.nn.functional.pad(content, (0, missing))
    return content.view(torch.int32)
