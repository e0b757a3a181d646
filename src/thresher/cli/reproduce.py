"""`thresher reproduce`: the tables and figures of the papers, here."""

from pathlib import Path
from typing import Annotated, Any

import typer

from thresher.cli.compare import PLAIN_WIDTH, DataOption, JobsOption, console_of, runs_kept_in

PAGE = "reproduce.md"


def reproduce(
    names: Annotated[
        list[str] | None, typer.Argument(help="Tables and figures, or `all`. Without any, they are listed.")
    ] = None,
    work: Annotated[Path, typer.Option(help="Folder of the runs; finished ones are not repeated.")] = Path("runs/reproduce"),
    results: Annotated[
        Path | None, typer.Option(help="Folder of one JSON file a table or figure. Default: results in that folder.")
    ] = None,
    page: Annotated[
        Path | None, typer.Option(help=f"Made anew of all files in that folder. Default: {PAGE} in the folder of the runs.")
    ] = None,
    data: DataOption = None,
    jobs: JobsOption = 2,
) -> None:
    """Train what a table or figure of the papers needs, judge its claims, and write the page of all of them."""
    from thresher.experiments.reproduction import ARTEFACTS
    from thresher.experiments.reproduction.page import section

    if not names:
        _list()
        return
    unknown = [name for name in names if name not in ARTEFACTS and name != "all"]
    if unknown:
        raise typer.BadParameter(f"no table or figure {unknown[0]!r}; there are all, {', '.join(ARTEFACTS)}")
    console = console_of(PLAIN_WIDTH)
    folder, page = results or work / "results", page or work / PAGE
    for name in ARTEFACTS if "all" in names else dict.fromkeys(names):
        console.print(section(_made(name, work, folder, data, jobs)), markup=False, highlight=False)
    _write(page, folder)
    typer.echo(f"{folder}\n{page}")


def _made(name: str, work: Path, folder: Path, data: Path | None, jobs: int) -> dict[str, Any]:
    from thresher.cli.display import progress_on
    from thresher.experiments.reproduction import ARTEFACTS
    from thresher.experiments.reproduction.reproduction import reproduce
    from thresher.experiments.training.store import write_json

    with runs_kept_in(work), progress_on(console_of(PLAIN_WIDTH)) as watcher:
        found = reproduce(ARTEFACTS[name], work, data=data, jobs=jobs, watcher=watcher)
    write_json(folder / f"{name}.json", found)
    return found


def _write(path: Path, folder: Path) -> None:
    from thresher.experiments.reproduction import ARTEFACTS
    from thresher.experiments.reproduction.page import reproduction_page
    from thresher.experiments.training.store import read_json, whole

    files = [folder / f"{name}.json" for name in ARTEFACTS]
    with whole(path) as file:
        file.write(reproduction_page([read_json(file) for file in files if file.exists()]).encode())


def _list() -> None:
    from rich.table import Table

    from thresher.experiments.reproduction import ARTEFACTS

    table = Table("name", "in the paper", "what it shows", box=None, pad_edge=False)
    for artefact in ARTEFACTS.values():
        table.add_row(artefact.name, artefact.paper, artefact.shows)
    console_of(PLAIN_WIDTH).print(table)
