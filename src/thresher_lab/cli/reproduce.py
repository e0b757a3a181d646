"""`thresher reproduce`: repeats the tables and figures of the papers at a small size."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thresher_lab.cli._console import (
    AccumulateOption,
    BatchSizeOption,
    CpusOption,
    DataOption,
    GpusOption,
    QuietOption,
    RayOption,
    TogetherJobsOption,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rich.table import Table

    from thresher_lab.reproduction.artefact import Artefact

PAGE = "reproduce.md"
PAGE_HELP = f"Index to write, with the pages of the papers beside it; with --recipe or --task, the only page. Default: {PAGE} in --work."
RECIPE_HELP = (
    "Recipe that trains one table or figure at full size, on the data of its paper: the network, epochs and schedules of the "
    "recipe, the methods of the table. `thresher reproduce` lists the recipes of each; `all`, with --dry-run or --smoke, is "
    "every one."
)
SMOKE_HELP = "With --recipe: try it out in seconds, with a small network on made-up data."
DRY_RUN_HELP = (
    "With --recipe or --task: print what would be trained and what is finished, and train nothing. With --recipe "
    "all: print the commands, with data, runs, epochs, and the hours of the recipes."
)
TASK_HELP = "Built-in task to train one table or figure on, such as cifar10-resnet8@10000. Its results have the name of the task."
EPOCHS_HELP = (
    "With --task: number of epochs of every run. Default: those of the table or figure, 20 or 40."
)
PLAN_NOTE = (
    "Hours are as if each run took as long as full training, on the hardware of the recipe. Commands with one recipe and one "
    "--work share the runs that they have in common."
)


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Names of tables and figures, or `all`. Without a name, all are listed."
        ),
    ] = None,
    work: Annotated[
        Path, typer.Option(help="Folder for the runs. Finished runs are not repeated.")
    ] = Path("runs/reproduce"),
    results: Annotated[
        Path | None,
        typer.Option(help="Folder for a JSON file of each. Default: `results` in --work."),
    ] = None,
    page: Annotated[Path | None, typer.Option(help=PAGE_HELP)] = None,
    data: DataOption = None,
    jobs: TogetherJobsOption = None,
    batch_size: BatchSizeOption = None,
    accumulate: AccumulateOption = None,
    ray: RayOption = None,
    gpus_per_run: GpusOption = 0.0,
    cpus_per_run: CpusOption = 1,
    *,
    recipe: Annotated[str | None, typer.Option(help=RECIPE_HELP)] = None,
    task: Annotated[str | None, typer.Option(help=TASK_HELP)] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help=EPOCHS_HELP)] = None,
    seeds: Annotated[
        str | None, typer.Option(help="With --task: random seeds. Default: 0-4.")
    ] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help=SMOKE_HELP)] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help=DRY_RUN_HELP)] = False,
    quiet: QuietOption = False,
) -> None:
    """Train what tables and figures of the papers need, judge their claims, and write pages with all results.

    Finished runs are kept, and the same command goes on where it was stopped. Processes that torchrun or accelerate launch
    has started train each run together.
    """
    from thresher_lab.cli._comparison import cluster_of, print_rate
    from thresher_lab.cli._console import open_console, print_table
    from thresher_lab.reproduction import ARTEFACTS
    from thresher_lab.reproduction.full_size import at_full_size, on_task, plan
    from thresher_lab.reproduction.page import single_page
    from thresher_lab.training.specs import parse_seeds

    elsewhere = recipe or task
    given = elsewhere or epochs or seeds or smoke or dry_run or batch_size or accumulate
    if not names and not given:
        print_table(open_console(), _artefact_table())
        return
    asked = _asked(names or ([recipe] if recipe == "all" else []))
    folder = results or work / "results"
    batch = {"batch_size": batch_size, "accumulate": accumulate}
    options = {"data": data, "jobs": jobs, "quiet": quiet}
    cluster = cluster_of(ray, gpus_per_run, cpus_per_run, here=dry_run)
    numbers = parse_seeds(seeds) if seeds else None
    pairs = _pairs(asked, elsewhere, alone=dry_run != smoke and not any(batch.values()))
    if recipe is None and (smoke or (dry_run and task is None) or any(batch.values())):
        raise ValueError(
            "reproduce: --smoke, --dry-run, --batch-size and --accumulate go with --recipe"
        )
    if (recipe and task) or (task is None and (epochs or seeds)):
        raise ValueError(
            "reproduce: --task is given without --recipe, and --epochs and --seeds go with --task"
        )
    if smoke and data is not None:
        typer.echo(f"--smoke: the data is made up, {data} is not read", err=True)
        options["data"] = None
    for artefact, name in pairs:
        if recipe == "all" and dry_run:
            typer.echo(plan(artefact, name))
            continue
        if task is None:
            at_size = at_full_size(artefact, name, smoke=smoke, **batch)
        else:
            at_size = on_task(artefact, task, epochs=epochs, seeds=numbers, data=data)
        for part in at_size.parts:
            print_rate(part.task)
        if dry_run:
            _dry_run(at_size, work, data=options["data"], jobs=jobs)
        elif found := _reproduced(at_size, work, folder, cluster=cluster, **options):
            own = page if page and recipe != "all" else work / f"{at_size.name}.md"
            charts = _charts({at_size.name: found})
            _write(own, single_page(found, with_chart=bool(charts)), [found], charts)
    if elsewhere is None:
        every = [
            _reproduced(ARTEFACTS[name], work, folder, cluster=cluster, **options) for name in asked
        ]
        if all(every):
            _write_pages(page or work / PAGE, folder)
            typer.echo(f"{folder}\n{page or work / PAGE}")
    elif recipe == "all" and dry_run:
        typer.echo(PLAN_NOTE)


def _asked(names: list[str]) -> list[str]:
    """Returns the tables and figures with these names, each once; `all` stands for every one."""
    from thresher.methods import no_such
    from thresher_lab.reproduction import ARTEFACTS

    if not names:
        raise ValueError("reproduce: name a table or figure, or `all`, for its options")
    unknown = [name for name in names if name not in ARTEFACTS and name != "all"]
    if unknown:
        raise ValueError(no_such("table or figure", unknown[0], ["all", *ARTEFACTS]))
    return list(ARTEFACTS if "all" in names else dict.fromkeys(names))


def _pairs(asked: list[str], recipe: str | None, *, alone: bool) -> "list[tuple[Artefact, str]]":
    """Returns the tables and figures to make with recipes; `alone` is whether `all` stands with one of the options for it."""
    from thresher_lab.reproduction import ARTEFACTS

    if recipe == "all":
        if not alone:
            raise ValueError(
                "--recipe all: goes with --dry-run, which prints all commands, or --smoke, and not with a batch"
            )
        return [(ARTEFACTS[name], one) for name in asked for one in ARTEFACTS[name].recipes]
    if recipe is not None and len(asked) > 1:
        raise ValueError(
            f"--recipe and --task: give one table or figure, got {', '.join(asked)}; or --recipe all"
        )
    return [] if recipe is None else [(ARTEFACTS[asked[0]], recipe)]


def _dry_run(artefact: "Artefact", work: Path, **given: Any) -> None:
    """Prints what a table or figure would train, part by part."""
    from thresher_lab.cli._comparison import print_dry_run
    from thresher_lab.reproduction.artefact import runs_folder, specs_of

    for part in artefact.parts:
        if part.scores is not None:
            typer.echo(
                "The scores that some rows need are made before, and are not listed.", err=True
            )
        unscored = {row: text for row, text in part.rows.items() if "{scores}" not in text}
        specs = specs_of(replace(part, rows=unscored), None)
        rows = [spec.text for spec in specs.values()] or ["full"]
        seeds = map(str, artefact.seeds)
        own = part.task, ",".join(rows), ",".join(seeds), part.epochs, runs_folder(work, part)
        print_dry_run(*own, controls=part.controls, **given)


def _reproduced(
    artefact: "Artefact", work: Path, folder: Path, *, quiet: bool, **given: Any
) -> dict[str, Any]:
    """Trains one table or figure, prints it, and writes its results; in all but the first process it returns nothing."""
    from thresher_lab.cli._comparison import explained_interruptions
    from thresher_lab.cli._console import open_console
    from thresher_lab.cli._progress import progress_on
    from thresher_lab.reproduction.artefact import reproduce
    from thresher_lab.reproduction.page import section
    from thresher_lab.training.store import write_json

    with explained_interruptions(work), progress_on(open_console(), quiet=quiet) as watcher:
        result = reproduce(artefact, work, watcher=watcher, **given)
    if result:
        write_json(folder / f"{artefact.name}.json", result)
        open_console().print(section(result), markup=False, highlight=False)
    return result


def _write_pages(path: Path, folder: Path) -> None:
    """Writes the index of all results of a folder, and beside it the pages of the papers; without matplotlib, no charts."""
    from thresher_lab.reproduction import ARTEFACTS
    from thresher_lab.reproduction.artefact import untested
    from thresher_lab.reproduction.page import index_page, paper_pages, reason_to_train
    from thresher_lab.training.files import Reproduced, read_checked

    remedy = "Delete the file, and give its name to `thresher reproduce`"
    files = [
        file
        for name in ARTEFACTS
        for file in (folder / f"{name}.json", *sorted(folder.glob(f"{name}@*.json")))
    ]
    shown = [file for file in files if file.exists() and not file.stem.endswith("-smoke")]
    found = {file.stem: read_checked(file, Reproduced, remedy) for file in shown}
    reasons = {
        name: reason_to_train(one, ARTEFACTS[name.partition("@")[0]]) for name, one in found.items()
    }
    anew = {name: "Not trained yet." for name in ARTEFACTS if name not in found} | {
        name: r for name, r in reasons.items() if r
    }
    for one in found.values():
        if one.get("outdated"):
            one |= {"claims": untested(one["claims"], one["outdated"]), "verdict": "not tested"}
    charts = _charts(found)
    results = list(found.values())
    for name, text in paper_pages(results, anew, charts, path.name).items():
        _write(path.parent / name, text, (), {})
    _write(path, index_page(results, anew), results, charts)


def _write(
    path: Path, text: str, results: "Iterable[Mapping[str, Any]]", charts: "Mapping[str, bytes]"
) -> None:
    """Writes a page, and saves the charts and pictures of its results in the folder `PICTURES` beside it."""
    from thresher_lab.reproduction.page import PICTURES, chart_file, pictures_of
    from thresher_lab.training.store import whole

    pictures = {chart_file(name): content for name, content in charts.items()}
    for one in results:
        pictures |= pictures_of(one)
    contents = {path: text.encode()}
    contents |= {path.parent / PICTURES / name: content for name, content in pictures.items()}
    for target, content in contents.items():
        with whole(target) as file:
            file.write(content)


def _charts(results: "Mapping[str, Any]") -> dict[str, bytes]:
    """Returns the charts of the tables, by the names of the artefacts that have one and whose tables hold what it draws."""
    from thresher_lab.report.table_charts import table_chart
    from thresher_lab.reproduction import ARTEFACTS

    if find_spec("matplotlib") is None:
        typer.echo(
            "The pages have no charts: they are drawn by matplotlib (pip install 'thresher[plot]')",
            err=True,
        )
        return {}
    declared = {name: ARTEFACTS[name.partition("@")[0]].chart for name in results}
    return {
        name: table_chart(results[name]["tables"], chart)
        for name, chart in declared.items()
        if chart
    }


def _artefact_table() -> "Table":
    from rich.table import Table

    from thresher_lab.reproduction import ARTEFACTS

    table = Table(box=None, pad_edge=False)
    for heading in ("name", "in the paper", "what it shows", "recipes for --recipe"):
        table.add_column(heading)
    table.columns[0].no_wrap = True
    table.columns[-1].no_wrap = True
    for artefact in ARTEFACTS.values():
        table.add_row(artefact.name, artefact.paper, artefact.shows, "\n".join(artefact.recipes))
    return table
