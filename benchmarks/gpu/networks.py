"""Networks of usual shapes in plain torch: residual networks, a vision transformer, and the blocks and the whole of GPT-2."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 1000


class ResidualBlock(nn.Module):
    """Two convolutions around a short cut, or three where the width is four times that of the middle (He et al. 2015).

    Args:
        before: Channels of the input.
        width: Channels in the middle.
        stride: Stride of the first convolution of 3 x 3.
        bottleneck: Whether there are three convolutions.
    """

    def __init__(self, before: int, width: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        after = 4 * width if bottleneck else width
        sizes = (
            [(before, width, 1), (width, width, 3), (width, after, 1)]
            if bottleneck
            else [(before, width, 3), (width, after, 3)]
        )
        strided = 1 if bottleneck else 0
        layers: list[nn.Module] = []
        for i, (inside, outside, kernel) in enumerate(sizes):
            step = stride if i == strided else 1
            layers += [
                nn.Conv2d(inside, outside, kernel, step, kernel // 2, bias=False),
                nn.BatchNorm2d(outside),
                nn.ReLU(),
            ]
        self.body, self.short = nn.Sequential(*layers[:-1]), nn.Sequential()
        if stride > 1 or before != after:
            self.short = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Maps shape (B, before, h, w) to (B, after, h / stride, w / stride)."""
        return torch.relu(self.body(x) + self.short(x))


def resnet(
    depths: tuple[int, ...], *, width: int = 64, bottleneck: bool = False, classes: int = CLASSES
) -> nn.Module:
    """Returns a residual network for images: ResNet-18 with (2, 2, 2, 2), ResNet-50 with (3, 4, 6, 3) and `bottleneck`.

    Args:
        depths: Number of blocks of each stage.
        width: Channels of the first stage. Default: 64.
        bottleneck: Whether blocks have three convolutions. Default: False.
        classes: Number of classes. Default: 1,000.
    """
    stem = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    blocks, before = [], width
    for stage, depth in enumerate(depths):
        for i in range(depth):
            blocks.append(
                ResidualBlock(
                    before, width * 2**stage, 2 if stage and not i else 1, bottleneck=bottleneck
                )
            )
            before = width * 2**stage * (4 if bottleneck else 1)
    return nn.Sequential(
        *stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes)
    )


class TransformerBlock(nn.Module):
    """Attention and two layers, each after a normalization (Radford et al. 2019).

    Args:
        width: Number of features.
        heads: Number of heads.
        causal: Whether a position sees only those before it.
    """

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Keeps the shape (B, length, width)."""
        n, length, width = x.shape
        q, k, v = (
            self.qkv(self.norm1(x))
            .view(n, length, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, length, width))
        return x + self.mlp(self.norm2(x))


class BlockStack(nn.Module):
    """Blocks of GPT-2 on features, and a classifier of their mean.

    Args:
        width: Number of features. Default: that of GPT-2 small.
        heads: Number of heads. Default: that of GPT-2 small.
        layers: Number of blocks. Default: that of GPT-2 small.
        classes: Number of classes. Default: 1,000.
    """

    def __init__(
        self, width: int = 768, heads: int = 12, layers: int = 12, classes: int = CLASSES
    ) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(TransformerBlock(width, heads, causal=True) for _ in range(layers))
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Maps shape (B, length, width) to (B, classes)."""
        return self.head(self.norm(self.blocks(x)).mean(1))


class Gpt2(nn.Module):
    """A language model of the shape of GPT-2 small, without dropout.

    Args:
        width: Number of features. Default: 768.
        heads: Number of heads. Default: 12.
        layers: Number of blocks. Default: 12.
        vocabulary: Number of tokens. Default: 50,257.
        length: Most tokens of a sequence. Default: 1,024.
    """

    def __init__(
        self,
        width: int = 768,
        heads: int = 12,
        layers: int = 12,
        vocabulary: int = 50257,
        length: int = 1024,
    ) -> None:
        super().__init__()
        self.tokens, self.places = (
            nn.Embedding(vocabulary, width),
            nn.Parameter(0.02 * torch.randn(length, width)),
        )
        self.blocks = nn.Sequential(
            *(TransformerBlock(width, heads, causal=True) for _ in range(layers))
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Maps shape (B, length) to (B, length, vocabulary)."""
        return self.head(self.norm(self.blocks(self.tokens(ids) + self.places[: ids.shape[1]])))


class VisionTransformer(nn.Module):
    """A vision transformer of the shape of ViT-B/16 (Dosovitskiy et al. 2020).

    Args:
        size: Height and width of an image. Default: 224.
        patch: Height and width of a patch. Default: 16.
        width: Number of features. Default: 768.
        heads: Number of heads. Default: 12.
        layers: Number of blocks. Default: 12.
        classes: Number of classes. Default: 1,000.
    """

    def __init__(
        self,
        size: int = 224,
        patch: int = 16,
        width: int = 768,
        heads: int = 12,
        layers: int = 12,
        classes: int = CLASSES,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1 + (size // patch) ** 2, width))
        self.blocks = nn.Sequential(
            *(TransformerBlock(width, heads, causal=False) for _ in range(layers))
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Maps shape (B, 3, size, size) to (B, classes)."""
        x = self.patches(images).flatten(2).mT
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1) + self.places
        return self.head(self.norm(self.blocks(x)[:, 0]))
