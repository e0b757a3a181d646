"""The charts as PNG files, drawn by a browser that is already there."""

import base64
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from plotly.offline import get_plotlyjs

from thresher.report.loading import Results, Samples
from thresher.report.page import SECTIONS
from thresher.report.style import INK

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-extensions",
    "--no-first-run",
    "--disable-background-networking",
)
WIDTH, SCALE, BLACK = 900, 2, "#000000"
PATIENCE_MS = 120_000
"""Of virtual time: the browser's clock, which runs ahead where nothing is left to do."""
TIMEOUT_S = 300

DRAWING = """
(async () => {
  for (const { data, layout } of JSON.parse(document.getElementById("figures").textContent)) {
    layout.legend = { orientation: "h", y: -0.22, yanchor: "top" };
    const size = { format: "png", width: WIDTH, height: layout.height + 120, scale: SCALE };
    const image = document.createElement("img");
    image.src = await Plotly.toImage({ data, layout }, size);
    document.body.append(image);
  }
})();
"""


def write_pictures(results: Results, samples: Samples, folder: Path) -> list[Path]:
    """Write every view of every chart, named after the chart and the view.

    Raises:
        FileNotFoundError: No Chromium or Chrome is on PATH.
        ValueError: The browser did not draw all of them.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise FileNotFoundError(f"pictures are drawn by Chromium or Chrome, and none of {', '.join(BROWSERS)} is on PATH")
    charts = [chart for section in SECTIONS.values() for chart in section]
    figures = {
        f"{chart.key}{_suffix(number, label)}.png": str(
            figure.update_layout(title=chart.title, margin={"t": 56}).to_json()
        ).replace(INK, BLACK)
        for chart in charts
        for number, (label, figure) in enumerate(chart.figures(results, samples).items(), 1)
    }
    drawn = _draw(browser, list(figures.values()))
    if len(drawn) != len(figures):
        raise ValueError(f"{browser} drew {len(drawn)} of {len(figures)} pictures; nothing was written")
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in zip(figures, drawn, strict=True):
        (folder / name).write_bytes(picture)
    return [folder / name for name in figures]


def _suffix(number: int, label: str) -> str:
    """Of a chart with several views: the number tells apart what the label, cut down to a file's name, may not."""
    return f"-{number}-{re.sub(r'[^A-Za-z0-9_.=]+', '-', label)[:60].strip('-')}" if label else ""


def _draw(browser: str, figures: list[str]) -> list[bytes]:
    """PNG files of figures given as JSON, by one run of the browser over a page of its own."""
    script = DRAWING.replace("WIDTH", json.dumps(WIDTH)).replace("SCALE", json.dumps(SCALE))
    held = f'<script type="application/json" id="figures">[{",".join(figures)}]</script>'
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "figures.html"
        text = f"<!DOCTYPE html><meta charset=utf-8><body>{held}<script>{get_plotlyjs()}</script><script>{script}</script>"
        page.write_text(text, encoding="utf-8")
        options = (f"--user-data-dir={folder}/profile", f"--virtual-time-budget={PATIENCE_MS}", "--dump-dom")
        done = subprocess.run(
            [browser, *FLAGS, *options, page.as_uri()], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    return [base64.b64decode(found) for found in re.findall(r'<img src="data:image/png;base64,([^"]+)"', done.stdout)]
