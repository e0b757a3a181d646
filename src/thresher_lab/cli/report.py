"""`thresher report`: writes the results of a comparison as one HTML page."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="Folder of a comparison: the --out of `thresher compare`."
        ),
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with the files of Fashion-MNIST, CIFAR or SVHN, to show images of the samples."
        ),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write every chart to as a PNG file. Needs Chromium or Chrome."
        ),
    ] = None,
    markdown: Annotated[
        bool,
        typer.Option(
            "--markdown",
            help="Print the verdicts as Markdown, for a pull request, in place of writing the page.",
        ),
    ] = False,
) -> None:
    """Write DIR/report.html: verdicts, charts and the samples that stand out, in one file that works offline."""
    from thresher_lab.comparison.summary import unfinished
    from thresher_lab.report.chart_images import write_chart_images
    from thresher_lab.report.loading import load_comparison
    from thresher_lab.report.page import as_markdown, write_report

    if markdown:
        typer.echo(as_markdown(load_comparison(folder)[0]), nl=False)
        return
    path = write_report(folder, data)
    for sentence in unfinished(load_comparison(folder)[0]):
        typer.echo(sentence)
    typer.echo(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
    if png is not None:
        typer.echo(f"{len(write_chart_images(*load_comparison(folder), png))} images in {png}")
