"""Wrappers for several processes: `subset_backward` around them is refused, inside of them it is exact."""

import re
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from subset_cases import numbers, traced
from thresher.distributed.wrappers import (
    CallInside,
    data_parallel,
    in_several_processes,
    inside,
    is_sharded,
)
from thresher.subset import subset_backward

pytestmark = pytest.mark.usefixtures("group_of_one")
X = numbers(7, 6, dtype=torch.float32)


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def flattened(model, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that one process has nothing to shard
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **settings)


def sharded_block():
    model = perceptron()
    fully_shard(model[0])
    return model


IN_DDP = "DistributedDataParallel(thresher.subset_backward(module))"
IN_SHARDS = "fully_shard(thresher.subset_backward("
WRONG = {
    "DDP": (lambda: DistributedDataParallel(perceptron()), "`model` is a Dist", IN_DDP),
    "DDP in a module": (
        lambda: nn.Sequential(nn.Flatten(), DistributedDataParallel(perceptron())),
        "module '1' of the model is a Dist",
        IN_DDP,
    ),
    "compiled DDP": (
        lambda: torch.compile(DistributedDataParallel(perceptron()), backend="eager"),
        "module '_orig_mod' of the model is a Dist",
        IN_DDP,
    ),
    "fully_shard": (
        lambda: fully_shard(perceptron()),
        "`model` is sharded by fully_shard, which",
        f"{IN_SHARDS}model)).",
    ),
    "fully_shard of a block": (
        sharded_block,
        "module '0' of the model is sharded by fully_shard, which",
        f"{IN_SHARDS}block))",
    ),
    "FSDP1": (
        lambda: flattened(perceptron()),
        "`model` is sharded by FullyShardedDataParallel, which is not",
        IN_SHARDS,
    ),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", WRONG)
def test_the_wrong_order_is_refused_and_the_right_one_named(name):
    make, place, advice = WRONG[name]
    with pytest.raises(
        ValueError, match=f"^subset_backward: {re.escape(place)}.*{re.escape(advice)}"
    ):
        subset_backward(make())


@pytest.mark.parametrize("called", [False, True])
def test_a_block_that_is_sharded_later_is_refused_in_the_next_call(called):
    model = subset_backward(perceptron())
    if called:
        model(X)
    fully_shard(model[0])
    fully_shard(model)
    with pytest.raises(ValueError, match="module '0' of the model is sharded by fully_shard"):
        model(X)


def test_the_model_inside_that_is_sharded_later_is_refused():
    model = subset_backward(perceptron())
    fully_shard(model.wrapped)
    with pytest.raises(ValueError, match="`model` is sharded by fully_shard"):
        model(X)


@pytest.mark.parametrize("original", [False, True])
def test_flattened_parameters_are_refused_in_the_first_call(original):
    model = flattened(subset_backward(perceptron()), use_orig_params=original)
    with pytest.raises(
        ValueError, match="sharded by FullyShardedDataParallel, which is not supported"
    ):
        model(X)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("reshard", [False, True])
def test_inside_of_fully_shard_the_gradients_are_exact_and_each_part_is_traced_once(
    blocks, reshard
):
    plain, model = perceptron(), perceptron()
    for name in ("0", "2") if blocks else ():
        setattr(
            model,
            name,
            fully_shard(
                subset_backward(model[int(name)], strict=True), reshard_after_forward=reshard
            ),
        )
    model = fully_shard(
        model if blocks else subset_backward(model, strict=True), reshard_after_forward=reshard
    )
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (plain, model)]
    for rows in ([1, 4], [0, 2, 6], [], [5]):
        for one, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            one(X)[rows].square().sum().backward()
            optimizer.step()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.full_tensor(), one)
    assert [traced(part) for part in model.modules() if hasattr(part, "fallback")] == (
        [1, 1] if blocks else [1]
    )
    assert list(model.state_dict()) == list(plain.state_dict())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_is_inside_of_ddp():
    model = perceptron()
    parallel = DistributedDataParallel(model)
    for one in (parallel, torch.compile(parallel, backend="eager")):
        assert data_parallel(one) is parallel and inside(one) is model
    compiled = torch.compile(model, backend="eager")
    for one in (model, compiled):
        assert data_parallel(one) is None and inside(one) is one
    assert data_parallel(None) is None


def test_sharded_models_are_known(monkeypatch):
    assert not is_sharded(perceptron())
    assert is_sharded(sharded_block()) and is_sharded(flattened(perceptron()))
    monkeypatch.delitem(sys.modules, "torch.distributed.fsdp")
    assert not is_sharded(
        perceptron()
    )  # nothing can be sharded, and nothing is imported to find out
    assert "torch.distributed.fsdp" not in sys.modules


def test_a_group_of_one_is_not_several_processes():
    assert not in_several_processes()


def test_another_module_is_inside_for_the_time_of_a_call_also_of_one_that_fails():
    model = perceptron()
    parallel, seen = DistributedDataParallel(model), []

    class Noted(nn.Module):
        def forward(self, x):
            seen.append(parallel.module)
            return model(x).reshape(-1, 3)

    other = Noted()
    call = CallInside(parallel, other)
    assert torch.equal(call(X), model(X)) and seen == [other] and parallel.module is model
    with pytest.raises(RuntimeError, match="shape"):
        call(numbers(7, 5, dtype=torch.float32))
    assert parallel.module is model
