"""`thresher reproduce`: repeats the tables and figures of the papers at a small size."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thresher_lab.cli._console import DataOption, QuietOption, TogetherJobsOption

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.table import Table

    from thresher_lab.reproduction.artefact import Artefact

PAGE = "reproduce.md"
RECIPE_HELP = (
    "Recipe that trains one table or figure at full size, on the data of its paper: the network, epochs and schedules of the "
    "recipe, the methods of the table. `thresher reproduce` lists the recipes of each."
)
SMOKE_HELP = "With --recipe: try it out in seconds, with a small network on made-up data."
DRY_RUN_HELP = "With --recipe: print what would be trained, its cost and about how long it takes here, and train nothing."


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
    jobs: TogetherJobsOption = None,
    *,
    recipe: Annotated[str | None, typer.Option(help=RECIPE_HELP)] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help=SMOKE_HELP)] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help=DRY_RUN_HELP)] = False,
    quiet: QuietOption = False,
) -> None:
    """Train what tables and figures of the papers need, judge their claims, and write a page with all results.

    Finished runs are kept, and the same command goes on where it was stopped. Processes that torchrun or accelerate launch
    has started train each run together.
    """
    from thresher.methods import no_such
    from thresher_lab.cli._console import open_console, print_table
    from thresher_lab.reproduction import ARTEFACTS
    from thresher_lab.reproduction.page import section
    from thresher_lab.training.processes import own_rank

    if not names:
        print_table(open_console(), _artefact_table())
        return
    unknown = [name for name in names if name not in ARTEFACTS and name != "all"]
    if unknown:
        raise ValueError(no_such("table or figure", unknown[0], ["all", *ARTEFACTS]))
    if recipe is not None:
        _at_full_size(names, recipe, work, results, page, data, jobs, smoke=smoke, dry_run=dry_run, quiet=quiet)
        return
    if smoke or dry_run:
        raise ValueError("reproduce: --smoke and --dry-run go with --recipe")
    console = open_console()
    folder, page = results or work / "results", page or work / PAGE
    for name in ARTEFACTS if "all" in names else dict.fromkeys(names):
        found = _reproduced(ARTEFACTS[name], name, work, folder, data, jobs, quiet=quiet)
        if found:
            console.print(section(found), markup=False, highlight=False)
    if own_rank() == 0:
        _write_page(page, folder)
        typer.echo(f"{folder}\n{page}")


def _at_full_size(
    names: list[str],
    recipe: str,
    work: Path,
    results: Path | None,
    page: Path | None,
    data: Path | None,
    jobs: int | None,
    *,
    smoke: bool,
    dry_run: bool,
    quiet: bool,
) -> None:
    """Trains one table or figure with a recipe, prints it, and writes its results and a page of its own."""
    from thresher_lab.cli._comparison import print_dry_run
    from thresher_lab.cli._console import open_console
    from thresher_lab.reproduction import ARTEFACTS
    from thresher_lab.reproduction.full_size import at_full_size
    from thresher_lab.reproduction.page import reproduction_page, section
    from thresher_lab.training.store import whole

    if len(names) != 1 or names == ["all"]:
        raise ValueError(f"--recipe: give one table or figure, got {', '.join(names)}")
    if smoke and data is not None:
        typer.echo(f"--smoke: the data is made up, {data} is not read", err=True)
        data = None
    artefact, name = at_full_size(ARTEFACTS[names[0]], recipe, smoke=smoke), f"{names[0]}@{recipe}{'-smoke' * smoke}"
    if dry_run:
        [part], seeds = artefact.parts, ",".join(map(str, artefact.seeds))
        if part.scores is not None:
            typer.echo("The scores that some rows need are made before, and are not in this estimate.", err=True)
        rows = ",".join(text for text in part.rows.values() if "{scores}" not in text)
        print_dry_run(
            part.task, rows, seeds, part.epochs, work / name, data=data, jobs=jobs, controls=part.controls, quiet=quiet
        )
        return
    found = _reproduced(artefact, name, work, results or work / "results", data, jobs, quiet=quiet)
    if found:
        open_console().print(section(found), markup=False, highlight=False)
        with whole(page or work / f"{name}.md") as file:
            file.write(reproduction_page([found]).encode())


def _reproduced(
    artefact: "Artefact", name: str, work: Path, folder: Path, data: Path | None, jobs: int | None, *, quiet: bool
) -> dict[str, Any]:
    from thresher_lab.cli._comparison import explained_interruptions
    from thresher_lab.cli._console import open_console
    from thresher_lab.cli._progress import progress_on
    from thresher_lab.reproduction.artefact import reproduce
    from thresher_lab.training.store import write_json

    with explained_interruptions(work), progress_on(open_console(), quiet=quiet) as watcher:
        found = reproduce(artefact, work, data=data, jobs=jobs, watcher=watcher)
    if found:
        write_json(folder / f"{name}.json", found)
    return found


def _write_page(path: Path, folder: Path) -> None:
    """Writes the page of all results of a folder, and the pictures beside it; without matplotlib there are no charts."""
    from thresher_lab.reproduction import ARTEFACTS
    from thresher_lab.reproduction.page import PICTURES, chart_file, pictures_of, reproduction_page
    from thresher_lab.training.files import Reproduced, read_checked
    from thresher_lab.training.store import whole

    files = {name: folder / f"{name}.json" for name in ARTEFACTS}
    remedy = "Delete the file, and give its name to `thresher reproduce`"
    found = {name: read_checked(file, Reproduced, remedy) for name, file in files.items() if file.exists()}
    charts, missing = _charts(found), [name for name, file in files.items() if not file.exists()]
    pictures = {chart_file(name): content for name, content in charts.items()}
    for one in found.values():
        pictures |= pictures_of(one)
    contents = {path: reproduction_page(list(found.values()), missing, charts).encode()}
    contents |= {path.parent / PICTURES / name: content for name, content in pictures.items()}
    for target, content in contents.items():
        with whole(target) as file:
            file.write(content)


def _charts(results: "Mapping[str, Any]") -> dict[str, bytes]:
    """Returns the charts of the tables, by the names of the artefacts that have one and whose tables hold what it draws."""
    from thresher_lab.report.table_charts import table_chart
    from thresher_lab.reproduction import ARTEFACTS

    if find_spec("matplotlib") is None:
        typer.echo("The page has no charts: they are drawn by matplotlib (pip install 'thresher[figures]')", err=True)
        return {}
    declared = {name: chart for name in results if (chart := ARTEFACTS[name].chart)}
    return {name: table_chart(results[name]["tables"], chart) for name, chart in declared.items()}


def _artefact_table() -> "Table":
    from rich.table import Table

    from thresher_lab.reproduction import ARTEFACTS

    table = Table(box=None, pad_edge=False)
    for heading, least in (("name", 30), ("in the paper", 12), ("what it shows", 30), ("recipes for --recipe", 20)):
        table.add_column(heading, min_width=least)
    for artefact in ARTEFACTS.values():
        table.add_row(artefact.name, artefact.paper, artefact.shows, ", ".join(artefact.recipes))
    return table
