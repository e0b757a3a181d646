"""How the tasks are called, and how differences are written."""

from thresher_lab.comparison.statistics import Paired

MARGIN = 0.2
"""Loss in points that does not matter."""

TITLES = {
    "fashion-10k": "Fashion-MNIST, 10,000 images",
    "fashion-10k-noisy": "Fashion-MNIST, 10,000 images, 20 % wrong labels",
    "fashion-imbalanced": "Fashion-MNIST, classes of 2,000 to 100 images",
    "bike": "bike rentals (R2)",
    "text": "text, next byte",
}
"""Titles of the tasks; others go by their names."""


def said(paired: Paired | None) -> str:
    """Returns a mean with its interval as text; "" where there is none."""
    if paired is None or paired.low is None:
        return ""
    return f"{paired.mean:+.2f} ± {paired.mean - paired.low:.2f}"
