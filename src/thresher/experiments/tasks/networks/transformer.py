"""A small language model."""

from torch import Tensor, nn
from torch.nn import functional as F


class CausalTransformer(nn.Module):
    """Scores what follows each token of a sequence, from it and those before it.

    Blocks normalise what they read (pre-norm); positions are learnt.

    Args:
        vocabulary: How many tokens there are.
        context: Longest sequence.
        width: Of the vector of a token, a multiple of `heads`.
        layers: Blocks of attention and a hidden layer of four times the width.
        heads: Of attention.
    """

    def __init__(self, vocabulary: int, *, context: int = 64, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Shape (N, T), int64, to scores (N, vocabulary, T), as `nn.CrossEntropyLoss` takes them."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x))).transpose(1, 2)


class Block(nn.Module):
    """Attention and a hidden layer, each beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.hidden = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Shape (N, T, width) to the same."""
        x = x + self.attend(self.norm1(x))
        return x + self.hidden(self.norm2(x))

    def attend(self, x: Tensor) -> Tensor:
        """Shape (N, T, width) to the same; no position sees a later one."""
        n, length, width = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.mix(seen.transpose(1, 2).reshape(n, length, width))
