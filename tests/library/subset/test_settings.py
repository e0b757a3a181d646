from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from thresher.subset.trace_key import Settings


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 2), nn.BatchNorm1d(2)
        self.rate, self.widths, self.mask, self.table = 0.5, [1, 2], torch.ones(2), np.ones(2)
        self.options = {"scale": 1.0}


def whole() -> Any:
    return nn.Sequential(Part(), nn.Dropout(0.1))


def double(model: Any) -> None:
    model[0].linear.weight.data = model[0].linear.weight.data.double()


def other_weight(model: Any) -> None:
    model[0].linear.weight = nn.Parameter(torch.zeros(2, 3))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a tensor that equals the number in whose place it is": lambda model: setattr(
        model[0], "rate", torch.tensor(0.5)
    ),
    "a number": lambda model: setattr(model[0], "rate", 0.25),
    "an entry of a list": lambda model: model[0].widths.append(3),
    "an entry of a dict": lambda model: model[0].options.update(scale=2.0),
    "another tensor of one value": lambda model: setattr(model[0], "mask", torch.ones(2)),
    "an array in place of another": lambda model: setattr(model[0], "table", np.zeros(2)),
    "a new attribute": lambda model: setattr(model[0], "more", 1),
    "an attribute that is gone": lambda model: delattr(model[0], "rate"),
    "training": lambda model: model[1].eval(),
    "a dropout rate": lambda model: setattr(model[1], "p", 0.2),
    "a frozen parameter": lambda model: model[0].linear.bias.requires_grad_(False),
    "another dtype in place": double,
    "another parameter": other_weight,
    "another buffer": lambda model: model[0].norm.register_buffer("running_mean", torch.zeros(2)),
    "a parameter that is gone": lambda model: setattr(model[0].linear, "bias", None),
    "another module": lambda model: setattr(model[0], "norm", nn.Identity()),
    "a module more": lambda model: model.append(nn.ReLU()),
    "a module under another name": lambda model: model[0].add_module(
        "second", model[0]._modules.pop("norm")
    ),
    "another class": lambda model: setattr(model[1], "__class__", nn.AlphaDropout),
    "a hook": lambda model: model[0].linear.register_forward_hook(lambda *_: None),
}


def test_they_hold_while_nothing_changes() -> None:
    model = whole()
    settings = Settings(model)
    with torch.no_grad():
        model[0].linear.weight.add_(1)
    assert settings.hold() and settings.key == Settings(model).key and settings.trains


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_they_hold_no_more_after(change: Callable[[Any], Any]) -> None:
    model = whole()
    settings = Settings(model)
    change(model)
    assert not settings.hold()


def test_nothing_trains_where_all_is_frozen() -> None:
    assert not Settings(whole().requires_grad_(False)).trains


def test_a_lazy_parameter_and_a_module_that_is_none() -> None:
    model: Any = nn.Sequential(nn.LazyLinear(2))
    model.add_module("nothing", None)
    settings = Settings(model)
    assert settings.hold()
    model[0].initialize_parameters(torch.zeros(1, 3))
    assert not settings.hold()


def test_what_is_shared_is_part_of_the_key() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    apart = Settings(model)
    model[1].weight = model[0].weight
    tied = Settings(model)
    model[1] = model[0]
    assert (
        len({settings.key for settings in (apart, tied, Settings(model))}) == 3
        and not apart.hold()
        and not tied.hold()
    )
