"""A small language model."""

from torch import Tensor, nn
from torch.nn import functional as F


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
        """Maps tokens of shape (N, T), int64, to logits of shape (N, vocabulary, T), as `nn.CrossEntropyLoss` takes them."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x))).transpose(1, 2)


class Block(nn.Module):
    """Attention and a hidden layer, each with a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.hidden = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Maps shape (N, T, width) to the same shape."""
        x = x + self.attend(self.norm1(x))
        return x + self.hidden(self.norm2(x))

    def attend(self, x: Tensor) -> Tensor:
        """Maps shape (N, T, width) to the same shape; no position depends on a later one."""
        n, length, width = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.mix(seen.transpose(1, 2).reshape(n, length, width))
