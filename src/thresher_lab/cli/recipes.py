"""`thresher recipes`: lists the recipes of the papers' experiments, and shows one in detail."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thresher_lab.cli._console import JsonOption

if TYPE_CHECKING:
    from rich.table import Table

LISTED_RESULTS = 2
"""Largest number of published results per recipe in the list; mostly full training and the method."""


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Name of a recipe, to show its settings, its published results, and what its source leaves open."
        ),
    ] = None,
    json: JsonOption = None,
) -> None:
    """List the recipes of the papers' experiments, or show one in detail."""
    from rich.markup import escape

    from thresher_lab.cli._console import open_console, print_table, write_result

    if json is not None:
        write_result(json, _content(name))
        return
    console = open_console()
    if name is None:
        print_table(console, _recipe_table())
        return
    from thresher_lab.recipes import schema as loading

    file = loading.file_of(name)
    recipe = loading.read_recipe(file)
    paper = recipe.paper
    source = ", ".join(
        [paper.title, *([f"arXiv:{paper.arxiv}"] if paper.arxiv else []), paper.where]
    )
    console.print(f"[bold]{escape(recipe.title)}[/]\n{escape(source)}\n{file}\n")
    published = [(one.what, f"{one.value} ({one.where})") for one in recipe.published]
    console.print(_text_table("setting", "", flat(recipe.settings)), "")
    console.print(_text_table("published", "", published), "")
    console.print(
        _text_table(
            "contradictions, and what was chosen", None, ((note,) for note in recipe.notes)
        ),
        "",
    )
    console.print(_text_table("not given", "chosen", recipe.not_given.items()), "")
    typer.echo(f"thresher train {name} --smoke\nthresher train {name} --data DIR")


def _content(name: str | None) -> dict[str, Any]:
    """Returns what a recipe says; all of them by name, where none is asked for."""
    from thresher_lab.recipes import schema as loading

    if name is None:
        return {one: _content(one) for one in loading.recipe_names()}
    return loading.read_recipe(loading.file_of(name)).model_dump(mode="json")


def flat(settings: dict[str, Any], place: str = "") -> Iterable[tuple[str, str]]:
    """Yields nested settings as dotted names with their values, without those that are None or an empty list."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from flat(value, f"{place}{name}.")
        elif value is not None and value != []:
            yield f"{place}{name}", str(value)


def _recipe_table() -> "Table":
    from rich.table import Table

    from thresher_lab.recipes import schema as loading

    table = Table("recipe", "paper", box=None, pad_edge=False)
    for heading in ("experiment", "published"):
        table.add_column(heading, min_width=24)
    for name in loading.recipe_names():
        recipe = loading.read_recipe(loading.file_of(name))
        published = "; ".join(
            f"{one.what}: {one.value}" for one in recipe.published[:LISTED_RESULTS]
        )
        table.add_row(name, recipe.paper.arxiv or "poster", recipe.title, published)
    return table


def _text_table(heading: str, other: str | None, rows: Iterable[tuple[str, ...]]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(heading, *(() if other is None else (other,)), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(Text, row))
    return table
