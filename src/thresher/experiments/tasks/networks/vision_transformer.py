"""A small vision transformer with the structure of DeiT-Tiny."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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
        self, side: int, *, patch: int = 4, width: int = 64, depth: int = 4, heads: int = 4, classes: int = 10
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, patch, patch)
        self.positions = nn.Parameter(0.02 * torch.randn((side // patch) ** 2, width))
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Maps shape (B, 1, side, side) to (B, classes)."""
        patches = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.layers(patches)).mean(1))


class Layer(nn.Module):
    """Attention and a perceptron, each with a shortcut and with normalised inputs."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Maps shape (B, patches, width) to the same shape."""
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        attended = F.scaled_dot_product_attention(query, key, value)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))
