"""What tests of several folders share.

One torch thread: two beside a busy process take many times as long, and results must not depend on it.
"""

import signal

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def interruptible():
    """Ctrl-C is heard, here and in processes started from here, also where tests run in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
