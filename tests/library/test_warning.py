"""A warning names the user's line, through modules of torch as well."""

import pytest
import torch
from torch import nn

from thresher.warning import warn


class Warns(nn.Module):
    """A part of the user's model."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        warn("deep")
        return x


def test_the_line_is_that_of_the_caller() -> None:
    with pytest.warns(UserWarning, match="deep") as said:
        nn.Sequential(Warns())(torch.ones(1))
    # The innermost line that is neither the library's nor torch's.
    assert (
        said[0].filename == __file__ and said[0].lineno == Warns.forward.__code__.co_firstlineno + 1
    )


def test_a_hook_of_the_library_is_passed_over() -> None:
    linear = nn.Linear(1, 1)
    space = {"warn": warn, "__name__": "thresher.somewhere"}
    exec(compile("def hook(*_):\n    warn('inside')", warn.__code__.co_filename, "exec"), space)
    linear.register_forward_hook(space["hook"])
    with pytest.warns(UserWarning, match="inside") as said:
        linear(torch.ones(1))
    assert said[0].filename == __file__ and said[0].lineno == linear_call_line()


def linear_call_line() -> int:
    """The line of the call of the test above."""
    return test_a_hook_of_the_library_is_passed_over.__code__.co_firstlineno + 6
