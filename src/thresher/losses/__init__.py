"""Any criterion as losses of single samples, and the other signals of one forward pass."""

from thresher.losses.adapt import adapt as adapt
