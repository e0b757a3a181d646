"""The application: all commands together."""

import difflib
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import thresher
from thresher_lab.cli._several import check_command
from thresher_lab.cli.advise import advise
from thresher_lab.cli.audit import audit
from thresher_lab.cli.compare import compare
from thresher_lab.cli.demo import demo
from thresher_lab.cli.init import init
from thresher_lab.cli.league import league
from thresher_lab.cli.methods import methods
from thresher_lab.cli.observe import observe
from thresher_lab.cli.precision import precision
from thresher_lab.cli.prune import prune
from thresher_lab.cli.recipes import recipes
from thresher_lab.cli.report import report
from thresher_lab.cli.reproduce import reproduce
from thresher_lab.cli.score import score
from thresher_lab.cli.time_to_target import time_to_target
from thresher_lab.cli.train import train
from thresher_lab.cli.why import why


class Commands(TyperGroup):
    """The commands; a name that is none gets the nearest one, and --ray needs no address."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Returns the command that the arguments begin with.

        Raises:
            click.UsageError: There is no such command.
        """
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        bare = [
            one == "--ray" and after.startswith("-")
            for one, after in zip(args, [*args[1:], "-"], strict=True)
        ]
        args = [
            part
            for one, alone in zip(args, bare, strict=True)
            for part in ([one, ""] if alone else [one])
        ]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    help="Train on the samples that still teach, skip the rest, and show what it cost.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    demo,
    advise,
    init,
    compare,
    league,
    report,
    why,
    observe,
    precision,
    audit,
    score,
    prune,
    time_to_target,
    reproduce,
    train,
    recipes,
    methods,
):
    app.command()(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"thresher {thresher.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    _: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Train on the samples that still teach, skip the rest, and show what it cost."""
    check_command(context.invoked_subcommand)
