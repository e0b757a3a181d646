"""`thresher recipes`: the papers' experiments, and what to know of one."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

SHOWN = 2
"""Published numbers in the list: mostly those of full training and of the method."""


def recipes(
    name: Annotated[
        str | None, typer.Argument(help="Of a recipe: its settings, the published numbers, and what the source leaves open.")
    ] = None,
) -> None:
    """List the recipes by name, or show one."""
    from rich.markup import escape

    from thresher.cli.compare import PLAIN_WIDTH, console_of

    console = console_of(PLAIN_WIDTH)
    if name is None:
        console.print(_list())
        return
    from thresher.experiments.recipes import loading

    file = loading.file_of(name)
    recipe = loading.read_recipe(file)
    paper = recipe.paper
    console.print(f"[bold]{escape(recipe.title)}[/]\n{escape(_of(paper.title, paper.arxiv))}, {escape(paper.where)}\n{file}\n")
    published = [(one.what, f"{one.value} ({one.where})") for one in recipe.published]
    console.print(_rows("setting", "", flat(recipe.settings)), "")
    console.print(_rows("published", "", published), "")
    console.print(_rows("contradictions, and what was chosen", None, ((note,) for note in recipe.notes)), "")
    console.print(_rows("not given", "chosen", recipe.not_given.items()), "")
    typer.echo(f"thresher train {name} --smoke\nthresher train {name} --data DIR")


def flat(settings: dict[str, Any], place: str = "") -> Iterable[tuple[str, str]]:
    """Settings by field, without those that are not used: None, and empty ones."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from flat(value, f"{place}{name}.")
        elif value is not None and value != []:
            yield f"{place}{name}", str(value)


def _list() -> "Table":
    from rich.table import Table

    from thresher.experiments.recipes import loading

    table = Table("recipe", "paper", "experiment", "published", box=None, pad_edge=False)
    for name in loading.recipe_names():
        recipe = loading.read_recipe(loading.file_of(name))
        published = "; ".join(f"{one.what}: {one.value}" for one in recipe.published[:SHOWN])
        table.add_row(name, recipe.paper.arxiv or "poster", recipe.title, published)
    return table


def _rows(heading: str, other: str | None, rows: Iterable[tuple[str, ...]]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(heading, *(() if other is None else (other,)), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _of(title: str, arxiv: str | None) -> str:
    return title if arxiv is None else f"{title}, arXiv:{arxiv}"
