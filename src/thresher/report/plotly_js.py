"""The library that draws the charts of a page: a part of plotly.js, which `tools/plotly` builds."""

from functools import cache
from importlib.resources import files


@cache
def plotly_js() -> str:
    """Returns the source of plotly.js with the traces that our charts have: scatter, bar and heatmap."""
    return files("thresher.report").joinpath("plotly.js").read_text(encoding="utf-8")
