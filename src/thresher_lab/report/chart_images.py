"""Writes the charts as PNG files, which Chromium or Chrome draws."""

import base64
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from thresher_lab.report.charts import INK
from thresher_lab.report.loading import ResultsDict, Samples
from thresher_lab.report.page import SECTIONS, plotly_js

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-extensions",
    "--no-first-run",
    "--disable-background-networking",
)
IMAGE_WIDTH = 900
SCALE = 2
BLACK = "#000000"
VIRTUAL_TIME_MS = 120_000
"""Budget of the browser's virtual time in milliseconds; that clock jumps ahead whenever there is nothing to do."""
TIMEOUT_S = 300

DRAWING = """
(async () => {
  for (const { data, layout } of JSON.parse(document.getElementById("figures").textContent)) {
    layout.legend = { orientation: "h", y: -0.22, yanchor: "top" };
    const size = { format: "png", width: IMAGE_WIDTH, height: layout.height + 120, scale: SCALE };
    const image = document.createElement("img");
    image.src = await Plotly.toImage({ data, layout }, size);
    document.body.append(image);
  }
})();
"""


def write_chart_images(results: ResultsDict, samples: Samples, folder: Path) -> list[Path]:
    """Writes every view of every chart as a PNG file named after the chart and the view.

    Args:
        results: Content of results.json.
        samples: Histories of the samples by file name.
        folder: Folder for the files; it is created if needed.

    Returns:
        Paths of the files.

    Raises:
        FileNotFoundError: No Chromium or Chrome is on PATH.
        ValueError: The browser did not draw all of them.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise FileNotFoundError(
            f"images of the charts are drawn by Chromium or Chrome, and none of {', '.join(BROWSERS)} is on PATH"
        )
    charts = [chart for section in SECTIONS.values() for chart in section]
    figures = {
        f"{chart.key}{_suffix(number, label)}.png": str(
            figure.update_layout(title=chart.title, margin={"t": 56}).to_json()
        ).replace(INK, BLACK)
        for chart in charts
        for number, (label, figure) in enumerate(chart.figures(results, samples).items(), 1)
    }
    drawn = _render(browser, list(figures.values()))
    if len(drawn) != len(figures):
        raise ValueError(
            f"{browser} drew {len(drawn)} of {len(figures)} charts; nothing was written"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, image in zip(figures, drawn, strict=True):
        (folder / name).write_bytes(image)
    return [folder / name for name in figures]


def _suffix(number: int, label: str) -> str:
    """Returns the suffix of a view's file name; its number distinguishes labels that become the same file name."""
    if label:
        return f"-{number}-{re.sub(r'[^A-Za-z0-9_.=]+', '-', label)[:60].strip('-')}"
    return ""


def _render(browser: str, figures: list[str]) -> list[bytes]:
    """Returns figures, given as JSON, as PNG files, all drawn by one run of the browser on a temporary page."""
    script = DRAWING.replace("IMAGE_WIDTH", json.dumps(IMAGE_WIDTH)).replace(
        "SCALE", json.dumps(SCALE)
    )
    held = f'<script type="application/json" id="figures">[{",".join(figures)}]</script>'
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "figures.html"
        text = f"<!DOCTYPE html><meta charset=utf-8><body>{held}<script>{plotly_js()}</script><script>{script}</script>"
        page.write_text(text, encoding="utf-8")
        options = (
            f"--user-data-dir={folder}/profile",
            f"--virtual-time-budget={VIRTUAL_TIME_MS}",
            "--dump-dom",
        )
        done = subprocess.run(
            [browser, *BROWSER_FLAGS, *options, page.as_uri()],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    return [
        base64.b64decode(found)
        for found in re.findall(r'<img src="data:image/png;base64,([^"]+)"', done.stdout)
    ]
