"""Any criterion as losses of single samples, and what else a forward pass tells."""

from thresher.losses.adapt import adapt as adapt
