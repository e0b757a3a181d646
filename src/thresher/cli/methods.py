"""`thresher methods`: lists the methods, or prints the card of one method."""

from typing import TYPE_CHECKING, Annotated

import typer

from thresher.methods import registry

if TYPE_CHECKING:
    from rich.markdown import Markdown
    from rich.table import Table


def methods(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Name of a method whose card is printed: its settings, its costs and what is missing of its paper."
        ),
    ] = None,
) -> None:
    """List the methods by name, or print the card of one method."""
    from thresher.cli._console import open_console

    open_console().print(_methods_table() if name is None else _method_card(name))


def _methods_table() -> "Table":
    from rich.table import Table

    table = Table("method", "stage", "paper", "what it does", box=None, pad_edge=False)
    for name, info in sorted(registry.infos().items()):
        table.add_row(name, info.stage, info.paper, info.summary)
    return table


def _method_card(name: str) -> "Markdown":
    from rich.markdown import Markdown

    from thresher.report import cards

    return Markdown(cards.card_page(name))
