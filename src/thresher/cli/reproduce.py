"""`thresher reproduce`: repeats the tables and figures of the papers at a small size."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thresher.cli._console import DataOption, JobsOption, QuietOption

if TYPE_CHECKING:
    from rich.table import Table

PAGE = "reproduce.md"


def reproduce(
    names: Annotated[
        list[str] | None, typer.Argument(help="Names of tables and figures, or `all`. Without a name, all are listed.")
    ] = None,
    work: Annotated[Path, typer.Option(help="Folder for the runs. Finished runs in it are not repeated.")] = Path(
        "runs/reproduce"
    ),
    results: Annotated[
        Path | None,
        typer.Option(help="Folder for one JSON file per table or figure. Default: `results` in the folder of the runs."),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(help=f"Page to write from all of these JSON files. Default: {PAGE} in the folder of the runs."),
    ] = None,
    data: DataOption = None,
    jobs: JobsOption = 2,
    *,
    quiet: QuietOption = False,
) -> None:
    """Train what tables and figures of the papers need, judge their claims, and write a page with all results."""
    from thresher.cli._console import open_console, print_table
    from thresher.experiments.reproduction import ARTEFACTS
    from thresher.experiments.reproduction.page import section
    from thresher.methods.registry import no_such

    if not names:
        print_table(open_console(), _artefact_table())
        return
    unknown = [name for name in names if name not in ARTEFACTS and name != "all"]
    if unknown:
        raise ValueError(no_such("table or figure", unknown[0], ["all", *ARTEFACTS]))
    console = open_console()
    folder, page = results or work / "results", page or work / PAGE
    for name in ARTEFACTS if "all" in names else dict.fromkeys(names):
        console.print(section(_reproduced(name, work, folder, data, jobs, quiet=quiet)), markup=False, highlight=False)
    _write_page(page, folder)
    typer.echo(f"{folder}\n{page}")


def _reproduced(name: str, work: Path, folder: Path, data: Path | None, jobs: int, *, quiet: bool) -> dict[str, Any]:
    from thresher.cli._comparison import explained_interruptions
    from thresher.cli._console import open_console
    from thresher.cli._progress import progress_on
    from thresher.experiments.reproduction import ARTEFACTS
    from thresher.experiments.reproduction.artefact import reproduce
    from thresher.experiments.training.store import write_json

    with explained_interruptions(work), progress_on(open_console(), quiet=quiet) as watcher:
        found = reproduce(ARTEFACTS[name], work, data=data, jobs=jobs, watcher=watcher)
    write_json(folder / f"{name}.json", found)
    return found


def _write_page(path: Path, folder: Path) -> None:
    from thresher.experiments.reproduction import ARTEFACTS
    from thresher.experiments.reproduction.page import PICTURES, pictures_of, reproduction_page
    from thresher.experiments.training.files import Reproduced, read_checked
    from thresher.experiments.training.store import whole

    files = {name: folder / f"{name}.json" for name in ARTEFACTS}
    with whole(path) as page:
        remedy = "Delete the file, and give its name to `thresher reproduce`"
        found = [read_checked(file, Reproduced, remedy) for file in files.values() if file.exists()]
        page.write(reproduction_page(found, [name for name, file in files.items() if not file.exists()]).encode())
    for name, content in (picture for one in found for picture in pictures_of(one).items()):
        with whole(path.parent / PICTURES / name) as picture_file:
            picture_file.write(content)


def _artefact_table() -> "Table":
    from rich.table import Table

    from thresher.experiments.reproduction import ARTEFACTS

    table = Table(box=None, pad_edge=False)
    for heading, least in (("name", 30), ("in the paper", 12), ("what it shows", 30)):
        table.add_column(heading, min_width=least)
    for artefact in ARTEFACTS.values():
        table.add_row(artefact.name, artefact.paper, artefact.shows)
    return table
