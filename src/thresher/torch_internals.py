"""Functions of torch that have no public name. `tests/library/test_torch_internals.py` fails if a version of torch changes one.

Attributes of autograd nodes stay in `attribution/resolve.py`, and those of torch.compile in `thresher/subset`, which read nothing
else.
"""

from typing import Any

import torch
from torch import nn

_C: Any = torch._C
_engine: Any = torch.autograd.Variable._execution_engine

next_node: Any = _C._autograd._get_sequence_nr
"""Returns the sequence number of the autograd node that this thread creates next."""
backward_pass: Any = _C._current_graph_task_id
"""Returns the number of the backward pass that this thread runs; -1 outside of one."""
retains_graph: Any = _C._autograd._get_current_graph_task_keep_graph
"""Returns whether the backward pass that this thread runs keeps its graph."""
after_backward: Any = _engine.queue_callback
"""Calls a function at the end of the backward pass that this thread runs."""
innermost_transform: Any = _C._functorch.peek_interpreter_stack
"""Returns the innermost running `torch.func` transform; None if none runs."""
any_autocast: Any = _C._is_any_autocast_enabled
"""Returns whether autocast is enabled for any type of device; `torch.is_autocast_enabled` checks a single type."""
nll_loss: Any = _C._nn.nll_loss_nd
"""What `F.nll_loss` calls, without the conversions of its arguments: (log_probs, targets, weight, reduction, ignore_index)."""
cross_entropy: Any = _C._nn.cross_entropy_loss
"""What `F.cross_entropy` calls: (outputs, targets, weight, reduction, ignore_index, label_smoothing)."""


def without_compiler(module: Any) -> Any:
    """Returns what a result of torch.compile wraps; anything else is returned unchanged."""
    return getattr(module, "_orig_mod", module)


def has_call_hooks(module: nn.Module) -> bool:
    """Returns whether a call of a module runs more than its forward."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
