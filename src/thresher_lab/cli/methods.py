"""`thresher methods`: lists the methods, or prints the card of one method."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thresher.methods import registry
from thresher_lab.cli._console import JsonOption

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
    json: JsonOption = None,
) -> None:
    """List the methods by name, or print the card of one method."""
    from thresher_lab.cli._console import open_console, print_table, write_result

    if json is not None:
        write_result(json, _facts(name))
    elif name is None:
        print_table(open_console(), _methods_table())
    else:
        open_console().print(_method_card(name))


def _facts(name: str | None) -> dict[str, Any]:
    """Returns the stage, the summary, the paper and the rule of a method; of each by its name, where none is asked for."""
    infos = registry.infos()
    if name is None:
        return {one: asdict(infos[one]) for one in sorted(infos)}
    if name not in infos:
        raise ValueError(registry.no_such("method", name, sorted(infos)))
    return asdict(infos[name])


def _methods_table() -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("method", no_wrap=True)
    table.add_column("stage", no_wrap=True)
    table.add_column("what it does, and its paper", min_width=24)
    for name, info in sorted(registry.infos().items()):
        table.add_row(name, info.stage, info.summary + f" ({info.paper})" * bool(info.paper))
    return table


def _method_card(name: str) -> "Markdown":
    from rich.markdown import Markdown

    from thresher_lab.report import cards

    return Markdown(cards.card_page(name, as_lists=True))
