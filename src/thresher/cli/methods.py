"""`thresher methods`: what there is to choose from, and what to know of one."""

from typing import TYPE_CHECKING, Annotated

import typer

from thresher import methods as registry

if TYPE_CHECKING:
    from rich.markdown import Markdown
    from rich.table import Table


def methods(
    name: Annotated[str | None, typer.Argument(help="Of a method, to read its card: settings, costs, what is missing.")] = None,
) -> None:
    """List the methods by name, or print the card of one."""
    from thresher.cli._console import open_console

    open_console().print(_list() if name is None else _card(name))


def _list() -> "Table":
    from rich.table import Table

    table = Table("method", "stage", "paper", "what it does", box=None, pad_edge=False)
    for name, info in sorted(registry.infos().items()):
        table.add_row(name, info.stage, info.paper, info.summary)
    return table


def _card(name: str) -> "Markdown":
    from rich.markdown import Markdown

    from thresher.report import cards

    return Markdown(cards.text(name))
