"""Convolutional networks and a perceptron that one core trains in minutes, and larger networks of the papers."""

from collections import OrderedDict
from itertools import pairwise

from torch import Tensor, nn


def small_cnn(side: int, *, width: int = 16, classes: int = 10) -> nn.Sequential:
    """Returns two convolutions with batch normalisation and pooling, and a linear layer.

    Pooling takes the mean, as the maximum takes longer than both convolutions on a CPU.

    Args:
        side: Height and width of the images, which have one channel.
        width: Number of channels of the first convolution; the second has twice as many.
        classes: Number of outputs.
    """
    return nn.Sequential(
        *_conv(1, width),
        nn.ReLU(inplace=True),
        nn.AvgPool2d(2),
        *_conv(width, 2 * width),
        nn.ReLU(inplace=True),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * (side // 4) ** 2, classes),
    )


def perceptron(inputs: int, *, width: int = 128, classes: int = 10) -> nn.Sequential:
    """Returns a network with two hidden layers, to check results on a network without convolutions."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(inputs, width),
        nn.ReLU(inplace=True),
        nn.Linear(width, width),
        nn.ReLU(inplace=True),
        nn.Linear(width, classes),
    )


def resnet8(*, channels: int = 1, width: int = 16, classes: int = 10) -> nn.Sequential:
    """Returns ResNet-8 in the CIFAR form: a convolution and three residual blocks, with 1, 2 and 4 times `width` channels."""
    return _resnet(channels, width, classes, stages=3, blocks=1)


def resnet18(*, channels: int = 3, width: int = 64, classes: int = 10) -> nn.Sequential:
    """Returns ResNet-18 in the CIFAR form: a 3x3 convolution without pooling and four stages of two residual blocks."""
    return _resnet(channels, width, classes, stages=4, blocks=2)


def resnet20(*, channels: int = 3, width: int = 16, classes: int = 10) -> nn.Sequential:
    """Returns ResNet-20 for CIFAR: three stages of three blocks; a shortcut is a 1x1 convolution if the shape changes."""
    return _resnet(channels, width, classes, stages=3, blocks=3)


def _resnet(channels: int, width: int, classes: int, *, stages: int, blocks: int) -> nn.Sequential:
    """Returns a residual network; every stage but the first halves height and width and doubles the channels."""
    widths = [width * 2**stage for stage in range(stages) for _ in range(blocks)]
    return nn.Sequential(
        *_conv(channels, width),
        nn.ReLU(inplace=True),
        *(ResidualBlock(inputs, outputs, outputs // inputs) for inputs, outputs in pairwise([width, *widths])),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(widths[-1], classes),
    )


class ResidualBlock(nn.Module):
    """Two convolutions and a shortcut, which is a 1x1 convolution if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        same = inputs == outputs and stride == 1
        names = ("conv1", "norm1", "relu", "conv2", "norm2")
        parts = (*_conv(inputs, outputs, stride), nn.ReLU(inplace=True), *_conv(outputs, outputs))
        self.residual = nn.Sequential(OrderedDict(zip(names, parts, strict=True)))
        self.shortcut = nn.Identity() if same else nn.Sequential(*_conv(inputs, outputs, stride, size=1))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Maps shape (B, inputs, H, W) to (B, outputs, H / stride, W / stride)."""
        return self.relu(self.residual(x) + self.shortcut(x))


def _conv(inputs: int, outputs: int, stride: int = 1, size: int = 3) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False), nn.BatchNorm2d(outputs)
