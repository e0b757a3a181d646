"""The private functions of torch that the library calls still do what it needs."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from thresher import torch_internals


def test_next_node_is_the_number_of_the_node_created_next() -> None:
    weight = torch.ones(2, requires_grad=True)
    number = torch_internals.next_node()
    first = weight * 2
    second = first + 1
    assert first.grad_fn is not None and second.grad_fn is not None
    assert first.grad_fn._sequence_nr() == number
    assert second.grad_fn._sequence_nr() == number + 1


def test_backward_passes_have_numbers_and_callbacks() -> None:
    seen: list[tuple[int, bool]] = []
    ended: list[bool] = []
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * 2).sum()

    def hook(_: torch.Tensor) -> None:
        seen.append((torch_internals.backward_pass(), torch_internals.retains_graph()))
        torch_internals.after_backward(lambda: ended.append(weight.grad is not None))

    loss.register_hook(hook)
    assert torch_internals.backward_pass() == -1
    loss.backward(retain_graph=True)
    loss.backward()
    (first, retained), (second, freed) = seen
    assert 0 <= first < second
    assert (retained, freed) == (True, False)
    assert ended == [True, True]


def test_innermost_transform_is_set_within_torch_func() -> None:
    inside: list[bool] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        inside.append(torch_internals.innermost_transform() is not None)
        return x.sum()

    torch.func.grad(function)(torch.ones(2))
    assert inside == [True]
    assert torch_internals.innermost_transform() is None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_any_autocast_sees_each_device(device: str) -> None:
    assert not torch_internals.any_autocast()
    if device == "cuda":
        torch.set_autocast_enabled("cuda", True)
        try:
            assert torch_internals.any_autocast()
        finally:
            torch.set_autocast_enabled("cuda", False)
    else:
        with torch.autocast("cpu"):
            assert torch_internals.any_autocast()


def test_losses_equal_the_public_functions() -> None:
    torch.manual_seed(0)
    outputs = torch.randn(5, 3)
    targets = torch.tensor([0, 2, 1, -100, 2])
    weight = torch.rand(3)
    mean = 1
    log_probs = outputs.log_softmax(1)
    assert torch_internals.nll_loss(log_probs, targets, weight, mean, -100) == F.nll_loss(
        log_probs, targets, weight
    )
    assert torch_internals.cross_entropy(
        outputs, targets, weight, mean, -100, 0.1
    ) == F.cross_entropy(outputs, targets, weight, label_smoothing=0.1)


def test_without_compiler_returns_the_module_inside() -> None:
    module = nn.Linear(2, 2)
    assert torch_internals.without_compiler(torch.compile(module)) is module
    assert torch_internals.without_compiler(module) is module
    assert torch_internals.without_compiler(None) is None


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_has_call_hooks_sees_each_kind(register: str) -> None:
    module = nn.Linear(2, 2)
    assert not torch_internals.has_call_hooks(module)
    handle = getattr(module, register)(lambda *_: None)
    assert torch_internals.has_call_hooks(module)
    handle.remove()
    assert not torch_internals.has_call_hooks(module)
