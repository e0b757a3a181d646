"""Whether a loop asks the loader for a further batch after the last one, as a `for` statement does."""

import dis
from types import FrameType

ASKING_ON = {dis.opmap[name] for name in ("FOR_ITER", "SEND", "UNPACK_SEQUENCE", "UNPACK_EX") if name in dis.opmap}
"""Operations of Python that ask an iterator for values until there is none: `for`, `yield from` and `a, b = iterator`."""


def asks_on(frame: FrameType) -> bool:
    """Whether the operation that asks an iterator for a value in a frame will ask it again, unless the code is left before.

    A call of `next` will not: a loop that counts batches never asks for more than there are, and may keep the iterator.

    Args:
        frame: Frame that called `__next__` of the iterator.
    """
    return frame.f_code.co_code[frame.f_lasti] in ASKING_ON
