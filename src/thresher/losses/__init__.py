"""Any criterion as losses of single samples, and the other signals of one forward pass."""

from thresher.losses.adapters import adapt as adapt
