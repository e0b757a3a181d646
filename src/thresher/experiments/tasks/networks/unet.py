"""A small UNet, which predicts a class for every pixel."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class UNet(nn.Module):
    """A UNet of two levels below the resolution of the image, normalised within each sample.

    Args:
        channels: Number of channels of the inputs.
        width: Number of channels of the first level, a multiple of 4; the others have twice and four times as many.
        classes: Number of outputs per pixel.
    """

    def __init__(self, channels: int, *, width: int = 16, classes: int) -> None:
        super().__init__()
        one, two, three = width, 2 * width, 4 * width
        self.down1, self.down2, self.bottom = _double(channels, one), _double(one, two), _double(two, three)
        self.up2, self.up1 = nn.ConvTranspose2d(three, two, 2, 2), nn.ConvTranspose2d(two, one, 2, 2)
        self.join2, self.join1 = _double(2 * two, two), _double(2 * one, one)
        self.head = nn.Conv2d(one, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Maps shape (B, channels, H, W) to (B, classes, H, W); H and W are multiples of 4."""
        one = self.down1(x)
        two = self.down2(F.avg_pool2d(one, 2))
        three = self.bottom(F.avg_pool2d(two, 2))
        two = self.join2(torch.cat([two, self.up2(three)], 1))
        return self.head(self.join1(torch.cat([one, self.up1(two)], 1)))


def _double(inputs: int, outputs: int) -> nn.Sequential:
    """Returns two convolutions with group normalisation."""
    return nn.Sequential(
        *(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.GroupNorm(4, outputs), nn.ReLU(inplace=True)),
        *(nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.GroupNorm(4, outputs), nn.ReLU(inplace=True)),
    )
