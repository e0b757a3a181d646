"""Figures as SVG, the same content for the same results with one version of matplotlib."""

import io
from collections.abc import Callable
from typing import Any

from thresher_lab.report.panels import MATPLOTLIB


def svg(draw: Callable[[Any], None], width: float, height: float) -> bytes:
    """Returns a figure as SVG.

    Args:
        draw: Function that draws on a figure of matplotlib.
        width: Width in inches.
        height: Height in inches.
    """
    from matplotlib import style
    from matplotlib.figure import Figure

    file = io.BytesIO()
    with style.context(["default", MATPLOTLIB]):
        figure = Figure((width, height), layout="constrained")
        draw(figure)
        figure.savefig(file, format="svg", metadata={"Creator": None, "Date": None})
    return file.getvalue()
