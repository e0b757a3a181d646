"""The networks of the tasks."""

import math
from collections import OrderedDict
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RandomView(nn.Module):
    """Mirrors, shifts and erases parts of the images of a batch at random in training mode; passes them on in eval mode.

    Args:
        shift: Largest shift in pixels, in each direction, 0 or more. Default: 2.
        erase: Chance that a square of an image is set to 0, the mean of normalized images, [0, 1]. Default: 0.1.
        side: Side of that square in pixels. Default: 8.
        margin: Pixels beyond the image, a mode of `torch.nn.functional.pad`. Default "replicate": those of its edge.
    """

    def __init__(
        self, shift: int = 2, erase: float = 0.1, side: int = 8, margin: str = "replicate"
    ) -> None:
        super().__init__()
        self.shift = shift
        self.erase = erase
        self.side = side
        self.margin = margin

    def forward(self, images: Tensor) -> Tensor:
        """Returns views of images of shape (N, channels, H, W)."""
        if not self.training:
            return images
        n, _, height, width = images.shape
        draws = torch.rand(6, n, 1, device=images.device)
        down, right = ((2 * self.shift + 1) * draws[:2] - self.shift).floor().long() + self.shift
        padded = F.pad(images, [self.shift] * 4, self.margin)
        rows = torch.arange(height, device=images.device) + down
        columns = torch.arange(width, device=images.device) + right
        columns = torch.where(draws[2] < 0.5, padded.shape[3] - 1 - columns, columns)
        bands = padded.gather(
            2, rows[:, None, :, None].expand(-1, images.shape[1], -1, padded.shape[3])
        )
        views = bands.gather(3, columns[:, None, None].expand_as(images))
        tops = (draws[3] * (height - self.side + 1)).floor()
        lefts = (draws[4] * (width - self.side + 1)).floor()
        within = self._within(height, tops)[:, :, None] & self._within(width, lefts)[:, None, :]
        return views.masked_fill((within & (draws[5] < self.erase)[:, :, None])[:, None], 0.0)

    def _within(self, size: int, start: Tensor) -> Tensor:
        at = torch.arange(size, device=start.device)
        return (at >= start) & (at < start + self.side)


class RandomTurn(nn.Module):
    """Turns and shifts the images of a batch at random in training mode; passes them on in eval mode.

    Pixels outside the image are those of its edge.

    Args:
        degrees: Largest angle in degrees, in each direction, 0 or more.
        shift: Largest shift in pixels, in each direction, 0 or more.
    """

    def __init__(self, degrees: float, shift: float) -> None:
        super().__init__()
        self.degrees = degrees
        self.shift = shift

    def forward(self, images: Tensor) -> Tensor:
        """Returns views of images of shape (N, channels, H, W)."""
        if not self.training:
            return images
        height, width = images.shape[2:]
        turn, across, down = 2 * torch.rand(3, len(images), device=images.device) - 1
        angle = math.radians(self.degrees) * turn
        rows = (
            torch.stack((angle.cos(), -angle.sin(), across * self.shift * 2 / width), 1),
            torch.stack((angle.sin(), angle.cos(), down * self.shift * 2 / height), 1),
        )
        grid = F.affine_grid(torch.stack(rows, 1), list(images.shape), align_corners=False)
        return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


def small_cnn(side: int, *, width: int = 16, classes: int = 10) -> nn.Sequential:
    """Returns two convolutions with batch normalization and pooling, and a linear layer.

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


def perceptron(
    inputs: int, *, width: int = 128, depth: int = 2, classes: int = 10
) -> nn.Sequential:
    """Returns a network with `depth` hidden layers, to check results on a network without convolutions."""
    sizes = [inputs, *[width] * depth]
    hidden = [
        layer
        for before, after in pairwise(sizes)
        for layer in (nn.Linear(before, after), nn.ReLU(inplace=True))
    ]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, classes))


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
        *(
            ResidualBlock(inputs, outputs, outputs // inputs)
            for inputs, outputs in pairwise([width, *widths])
        ),
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
        if same:
            self.shortcut = nn.Identity()
        else:
            self.shortcut = nn.Sequential(*_conv(inputs, outputs, stride, size=1))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Maps shape (B, inputs, H, W) to (B, outputs, H / stride, W / stride)."""
        return self.relu(self.residual(x) + self.shortcut(x))


def _conv(
    inputs: int, outputs: int, stride: int = 1, size: int = 3
) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False), nn.BatchNorm2d(
        outputs
    )


class CausalTransformer(nn.Module):
    """Predicts the next token at each position of a sequence, from this token and the ones before it.

    Blocks normalise their inputs (pre-norm); position embeddings are learned.

    Args:
        vocabulary: Number of different tokens.
        context: Length of the longest sequence.
        width: Size of the vector of a token, a multiple of `heads`.
        layers: Number of blocks, each with attention and a hidden layer of four times the width.
        heads: Number of attention heads.
    """

    def __init__(
        self,
        vocabulary: int,
        *,
        context: int = 64,
        width: int = 64,
        layers: int = 2,
        heads: int = 4,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=True) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps tokens of shape (N, T), int64, to logits of shape (N, vocabulary, T), as `nn.CrossEntropyLoss` takes them."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x))).transpose(1, 2)


class Block(nn.Module):
    """Attention and a hidden layer of four times the width, each with a shortcut and with normalized inputs.

    Args:
        width: Size of the vector of a position, a multiple of `heads`.
        heads: Number of attention heads.
        causal: Whether no position depends on a later one.
    """

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.hidden = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps shape (N, T, width) to the same shape."""
        x = x + self.attend(self.norm1(x))
        return x + self.hidden(self.norm2(x))

    def attend(self, x: Tensor) -> Tensor:
        """Maps shape (N, T, width) to the same shape."""
        n, length, width = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.mix(seen.transpose(1, 2).reshape(n, length, width))


class UNet(nn.Module):
    """A UNet of two levels below the resolution of the image, normalized within each sample.

    Args:
        channels: Number of channels of the inputs.
        width: Number of channels of the first level, a multiple of 4; the others have twice and four times as many.
        classes: Number of outputs per pixel.
    """

    def __init__(self, channels: int, *, width: int = 16, classes: int) -> None:
        super().__init__()
        one = width
        two = 2 * width
        three = 4 * width
        self.down1 = _double(channels, one)
        self.down2 = _double(one, two)
        self.bottom = _double(two, three)
        self.up2 = nn.ConvTranspose2d(three, two, 2, 2)
        self.up1 = nn.ConvTranspose2d(two, one, 2, 2)
        self.join2 = _double(2 * two, two)
        self.join1 = _double(2 * one, one)
        self.head = nn.Conv2d(one, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Maps shape (B, channels, H, W) to (B, classes, H, W); H and W are multiples of 4."""
        one = self.down1(x)
        two = self.down2(F.avg_pool2d(one, 2))
        three = self.bottom(F.avg_pool2d(two, 2))
        two = self.join2(torch.cat([two, self.up2(three)], 1))
        return self.head(self.join1(torch.cat([one, self.up1(two)], 1)))


def _double(inputs: int, outputs: int) -> nn.Sequential:
    """Returns two convolutions with group normalization."""
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers.append(nn.Conv2d(channels, outputs, 3, padding=1, bias=False))
        layers += [nn.GroupNorm(4, outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class VisionTransformer(nn.Module):
    """Patches, learned positions, layers of attention, and a linear head on the mean over the patches.

    DeiT has a class token instead of the mean. DeiT-Tiny has side 224, patch 16, width 192, depth 12 and 3 heads.

    Args:
        side: Height and width of the images, which have one channel; a multiple of `patch`.
        patch: Side of the squares that images are cut into.
        width: Size of the vector of a patch, a multiple of `heads`.
        depth: Number of layers.
        heads: Number of attention heads per layer.
        classes: Number of outputs.
    """

    def __init__(
        self,
        side: int,
        *,
        patch: int = 4,
        width: int = 64,
        depth: int = 4,
        heads: int = 4,
        classes: int = 10,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, patch, patch)
        self.positions = nn.Parameter(0.02 * torch.randn((side // patch) ** 2, width))
        self.layers = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Maps shape (B, 1, side, side) to (B, classes)."""
        patches = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.layers(patches)).mean(1))
