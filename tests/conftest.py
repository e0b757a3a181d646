"""One torch thread: two beside a busy process take many times as long, and results must not depend on it."""

import torch

torch.set_num_threads(1)
