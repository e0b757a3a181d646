"""`thresher methods`: what there is to choose from."""

from rich.console import Console
from rich.table import Table

from thresher import methods as registry


def methods() -> None:
    """List the methods by name."""
    table = Table("method", "stage", "paper", "what it does", box=None, pad_edge=False)
    for name, info in sorted(registry.infos().items()):
        table.add_row(name, info.stage, info.paper, info.summary)
    Console().print(table)
