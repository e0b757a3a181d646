"""Networks that timm does not have in the form that the papers train on small images."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from thresher.methods import no_such
from thresher_lab.tasks.networks import UNet, resnet18, resnet20
from thresher_lab.tasks.vision import optional


def wide_resnet(
    *, depth: int = 28, width: int = 10, dropout: float = 0.0, classes: int = 10
) -> nn.Sequential:
    """Returns a Wide ResNet: three stages of blocks with normalization before each convolution (arXiv:1605.07146).

    Args:
        depth: Number of convolutions on the longest path, 6n + 4.
        width: Factor on the numbers of channels of the stages, which are 16, 32 and 64.
        dropout: Probability of dropout between the two convolutions of a block.
        classes: Number of outputs.

    Raises:
        ValueError: The depth is not 6n + 4.
    """
    if depth < 10 or (depth - 4) % 6:
        raise ValueError(f"wide_resnet: `depth` is 6n + 4, such as 28, got {depth}")
    channels = 16
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False)]
    for stage in range(3):
        for block in range((depth - 4) // 6):
            outputs = 16 * 2**stage * width
            layers.append(
                WideBlock(
                    channels, outputs, stride=2 if stage and not block else 1, dropout=dropout
                )
            )
            channels = outputs
    end = (
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, classes),
    )
    return nn.Sequential(*layers, *end)


class WideBlock(nn.Module):
    """Two convolutions, each after normalization, and a shortcut, which is a 1x1 convolution if the shape changes."""

    def __init__(self, inputs: int, outputs: int, *, stride: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.relu = nn.ReLU(inplace=True)
        if inputs == outputs and stride == 1:
            self.shortcut = None
        else:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps shape (B, inputs, H, W) to (B, outputs, H / stride, W / stride)."""
        active = self.relu(self.norm1(x))
        residual = self.conv2(self.dropout(self.relu(self.norm2(self.conv1(active)))))
        return residual + (x if self.shortcut is None else self.shortcut(active))


def googlenet(*, classes: int = 10) -> nn.Module:
    """Returns the GoogLeNet of torchvision for images of 32 x 32: a 3x3 convolution first, and no pooling after it."""
    network = optional("torchvision.models").googlenet(
        num_classes=classes, aux_logits=False, init_weights=True
    )
    network.conv1 = optional("torchvision.models.googlenet").BasicConv2d(
        3, 64, kernel_size=3, padding=1
    )
    network.maxpool1 = nn.Identity()
    return network


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "resnet18": resnet18,
    "resnet20": resnet20,
    "wide_resnet": wide_resnet,
    "googlenet": googlenet,
    "unet": UNet,
}
"""Networks by their names in recipes; each takes `classes`."""


def network(source: str, name: str, classes: int | None, arguments: dict[str, Any]) -> nn.Module:
    """Returns a new network of timm or of `NETWORKS`.

    Args:
        source: "timm" or "thresher".
        name: Name of the network in the source.
        classes: Number of outputs.
        arguments: Other arguments of the function that creates the network.

    Raises:
        ValueError: There is no such network.
    """
    if source == "timm":
        timm = optional("timm")
        if not timm.is_model(name):
            raise ValueError(f"model.name: timm {timm.__version__} has no network {name!r}")
        return timm.create_model(name, num_classes=classes, **arguments)
    if name not in NETWORKS:
        raise ValueError(f"model.name: {no_such('network', name, NETWORKS)}")
    return NETWORKS[name](classes=classes, **arguments)
