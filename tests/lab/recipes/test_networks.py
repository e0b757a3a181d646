import pytest
import torch
from torch import nn

from subset_cases import optional
from thresher_lab.recipes.networks import network, wide_resnet


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.fixture(autouse=True)
def vision():
    optional("timm")


def test_wide_resnet_has_the_published_size():
    """36.5 million parameters for CIFAR-10, arXiv:1605.07146, table 5."""
    with torch.device("meta"):
        assert round(count(wide_resnet(depth=28, width=10)) / 1e6, 1) == 36.5
        convolutions = [
            part
            for part in wide_resnet(depth=28, width=10).modules()
            if isinstance(part, nn.Conv2d)
        ]
    assert sum(part.kernel_size == (3, 3) for part in convolutions) == 25


def test_small_ones_train():
    for name, arguments in (
        ("wide_resnet", {"depth": 10, "width": 1, "dropout": 0.1}),
        ("googlenet", {}),
    ):
        model = network("thresher", name, 7, arguments)
        outputs = model(torch.randn(2, 3, 32, 32))
        outputs.sum().backward()
        assert outputs.shape == (2, 7) and all(
            parameter.grad is not None for parameter in model.parameters()
        )


def test_googlenet_keeps_the_resolution_at_first():
    model = network("thresher", "googlenet", 10, {})
    sides = []
    model.conv3.register_forward_hook(lambda _, __, outputs: sides.append(outputs.shape[-1]))
    model(torch.randn(2, 3, 32, 32))
    assert sides == [32]


def test_of_timm():
    model = network("timm", "resnet50", 10, {"layers": [1, 1, 1, 1], "channels": [8, 16, 32, 64]})
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 10) and count(model) < 300_000


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("timm", "resnet51", 2, {}), "model.name: timm .* has no network 'resnet51'"),
        (
            ("thresher", "resnet51", 2, {}),
            "model.name: no network 'resnet51'; did you mean 'resnet18'\\? There are resnet18, resnet20, wide_resnet",
        ),
        (
            ("thresher", "wide_resnet", 2, {"depth": 27}),
            "wide_resnet: `depth` is 6n \\+ 4, such as 28, got 27",
        ),
    ],
)
def test_what_there_is_not(given, message):
    with pytest.raises(ValueError, match=message):
        network(*given)
