import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thresher import Scoring


def test_by_default_as_in_training() -> None:
    scoring = Scoring()
    assert (scoring.dtype, scoring.every_epochs, scoring.model, scoring.input_scale) == (
        None,
        1,
        None,
        1.0,
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        scoring.every_epochs = 2


def test_what_is_allowed() -> None:
    model = nn.Linear(2, 2)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert Scoring(dtype, 3, model, 0.5).dtype == dtype
    assert Scoring(model=model).model is model
    assert Scoring(input_scale=1).input_scale == 1


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (
            TypeError,
            r"`dtype` must be a torch.dtype such as torch.bfloat16, or None, got 'bf16'",
            {"dtype": "bf16"},
        ),
        (
            ValueError,
            r"`dtype` must be torch.float32, torch.float16 or torch.bfloat16, got torch.int8",
            {"dtype": torch.int8},
        ),
        (ValueError, r"`dtype` must be .*, got torch.float64", {"dtype": torch.float64}),
        (TypeError, r"`every_epochs` must be a whole number, got 1.5", {"every_epochs": 1.5}),
        (TypeError, r"`every_epochs` must be a whole number, got True", {"every_epochs": True}),
        (
            ValueError,
            r"`every_epochs` must be 1 \(every epoch\) or more, got 0",
            {"every_epochs": 0},
        ),
        (
            TypeError,
            r"`model` must be a module, got a class; pass Linear\(...\)",
            {"model": nn.Linear},
        ),
        (
            TypeError,
            r"`model` must be a torch.nn.Module or None, got builtin_function_or_method",
            {"model": torch.relu},
        ),
        (TypeError, r"`input_scale` must be a number, got '0.5'", {"input_scale": "0.5"}),
        (TypeError, r"`input_scale` must be a number, got True", {"input_scale": True}),
        *(
            (
                ValueError,
                rf"`input_scale` must be within \(0, 1\], got {value}",
                {"input_scale": value},
            )
            for value in (0, -0.5, 1.01, 2, math.nan)
        ),
    ],
)
def test_refused(error: type[Exception], message: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(error, match=f"^Scoring: {message}"):
        Scoring(**arguments)


@pytest.mark.parametrize(
    ("shape", "scale", "expected"),
    [
        ((2, 3, 8, 8), 0.5, (2, 3, 4, 4)),
        ((2, 3, 224, 224), 0.57, (2, 3, 127, 127)),
        ((2, 1, 100), 0.29, (2, 1, 29)),
        ((2, 1, 4, 6, 9), 0.34, (2, 1, 1, 2, 3)),
        ((2, 1, 3, 3), 0.01, (2, 1, 1, 1)),
        ((0, 3, 8, 8), 0.5, (0, 3, 4, 4)),
    ],
)
def test_sizes(shape: tuple[int, ...], scale: float, expected: tuple[int, ...]) -> None:
    assert Scoring(input_scale=scale).shrink(torch.rand(shape)).shape == expected


@pytest.mark.parametrize(("dims", "mode"), [(1, "linear"), (2, "bilinear"), (3, "trilinear")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_values(dims: int, mode: str, dtype: torch.dtype) -> None:
    x = torch.rand(2, 3, *[6] * dims, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = Scoring(input_scale=0.5).shrink(x)
    assert found.dtype == dtype
    assert torch.equal(
        found, F.interpolate(x, scale_factor=0.5, mode=mode, align_corners=False, antialias=False)
    )
    # Halving is the mean of neighbours.
    mean = x.float()
    for dim in range(2, 2 + dims):
        mean = mean.unflatten(dim, (3, 2)).mean(dim + 1)
    torch.testing.assert_close(found.float(), mean, atol=1e-2, rtol=0)


def test_the_very_same_object_at_full_size() -> None:
    tree = {"x": torch.rand(2, 3, 4, 4), "note": "text"}
    assert Scoring().shrink(tree) is tree
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    assert Scoring(input_scale=1).shrink(tokens) is tokens


def test_in_a_nesting_only_what_has_sizes_is_shrunk() -> None:
    flat, labels, masks = (
        torch.rand(4, 10),
        torch.zeros(4, 8, 8, dtype=torch.uint8),
        torch.ones(4, 8, dtype=torch.bool),
    )
    tree = {
        "image": torch.rand(4, 3, 8, 8),
        "others": [flat, (labels, masks), "text", None],
        "sound": torch.rand(4, 1, 20),
    }
    shrunk = Scoring(input_scale=0.5).shrink(tree)
    assert shrunk["image"].shape == (4, 3, 4, 4) and shrunk["sound"].shape == (4, 1, 10)
    assert (
        shrunk["others"][0] is flat
        and shrunk["others"][1][0] is labels
        and shrunk["others"][1][1] is masks
    )
    assert shrunk["others"][2:] == ["text", None]
    assert tree["image"].shape == (4, 3, 8, 8)


@pytest.mark.parametrize(
    ("tree", "got"),
    [
        (torch.rand(4, 10), r"torch.float32 \(4, 10\)"),
        (
            [torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.rand(1, 1, 1, 1, 1, 1)],
            r"torch.uint8 \(4, 3, 8, 8\), torch.float32",
        ),
        ({"text": "none"}, "no tensor"),
    ],
)
def test_nothing_to_shrink(tree: Tensor, got: str) -> None:
    with pytest.raises(
        ValueError,
        match=rf"^Scoring: `input_scale` shrinks .* 3 to 5 dimensions .*, got {got}.*; leave it at 1",
    ):
        Scoring(input_scale=0.5).shrink(tree)
