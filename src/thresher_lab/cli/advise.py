"""`thresher advise`: estimates from a short probe how much time selection could save on a training."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thresher_lab.cli._console import (
    STANDARD_OUTPUT,
    DataOption,
    DeviceOption,
    JsonOption,
    QuietOption,
    announcer,
    open_console,
    print_table,
    training_of,
    use_device,
    write_result,
)

if TYPE_CHECKING:
    from rich.table import Table

ADVISED_METHODS = (
    "winnow:share=0.5,kakurenbo,infobatch,uniform:keep=0.7,selective_backprop:keep=0.33:forward_passes=once,"
    "selective_backprop:keep=0.33:forward_passes=twice,random_backprop:keep=0.33"
)
"""Six methods at common settings, one of them with one forward pass and with two."""
ANSWERED_METHODS = "winnow:share=0.5,infobatch"
"""Methods that are timed where nothing but the answer is printed."""

TRAINING_HELP = (
    "Name of a task as in `thresher compare --task`, or your own training as FILE.py:FUNCTION (see `thresher init`)."
)
ADVISED_METHODS_HELP = (
    "Methods in the same form as in `thresher compare`. Default: winnow and infobatch; with --verbose or --json also "
    "kakurenbo, uniform, selective_backprop (with one and with two forward passes) and random_backprop, at common settings."
)

SECONDS_HELP = "Time limit for the probe and the short runs, in seconds. What it does not suffice for is left out, and said."
VERBOSE_HELP = "Print the estimate for each method and the other findings of the probe before the answer."
BUDGET_HELP = (
    "Shares of the cost of full training, separated by commas, such as 0.5,0.35: trains short runs, of a quarter of --epochs "
    "with two seeds, at full cost and with smaller batches, and says what smaller batches lose. The next command compares the "
    "shares that are not shown to lose, or tries a larger one. Default: none."
)


def advise(
    training: Annotated[str, typer.Argument(metavar="TASK|FILE.py:FUNCTION", help=TRAINING_HELP)],
    methods: Annotated[str, typer.Option(help=ADVISED_METHODS_HELP, show_default=False)] = "",
    epochs: Annotated[int, typer.Option(min=1, help="Number of epochs of the training that you plan.")] = 20,
    seconds: Annotated[float, typer.Option(help=SECONDS_HELP)] = 120.0,
    json: JsonOption = None,
    budget: Annotated[str | None, typer.Option(help=BUDGET_HELP)] = None,
    threads: Annotated[
        int, typer.Option(min=1, help="Number of CPU threads torch may use (`compare` always uses one per run).")
    ] = 1,
    data: DataOption = None,
    device: DeviceOption = None,
    *,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help=VERBOSE_HELP)] = False,
    quiet: QuietOption = False,
) -> None:
    """Probe a training for a short while, and say whether selection can help, why, and what to run next."""
    use_device(device)
    training = training_of(training, None)
    says = announcer("advise", quiet=quiet)
    says("loading torch, for some seconds")
    from thresher_lab.advise.advise import PROBE_PART, advise, budget_command, named_methods, seconds_of_runs
    from thresher_lab.advise.answer import answer_lines, answer_of, on_fewer_steps
    from thresher_lab.advise.budget import budget_advice, needs_steps, next_after_budget, times_at
    from thresher_lab.comparison.controls import parse_budget
    from thresher_lab.training.specs import parse_methods

    shares = [] if budget is None else parse_budget(budget)
    until, parts = time.monotonic() + seconds, verbose or json is not None
    if not methods:  # Winnow at the share that is asked for
        methods = (ADVISED_METHODS if parts else ANSWERED_METHODS).replace("share=0.5", f"share={(shares or [0.5])[0]:g}")
    specs = [spec for spec in parse_methods(methods) if spec.name != "full"]
    probed = seconds * (PROBE_PART if shares else 1)
    advice = advise(training, specs, epochs=epochs, data=data, seconds=probed, threads=threads, parts=parts, says=says)
    if shares:
        epoch_s = advice["step_s"] * advice["steps"] / epochs
        runs = {"epochs": epochs, "data": data, "threads": threads, "says": says, "until": until, "epoch_s": epoch_s}
        advice["budget"] = budget_advice(training, shares, **runs)
        named = named_methods(advice["worth_trying"], specs)
        advice["budget"]["times"] = times = times_at(advice["step"], shares)
        ways = {"by_steps": needs_steps(times), "and_steps": not needs_steps(times) and bool(on_fewer_steps(times, advice))}
        if advice["budget"]["losses"]:
            advice["next"] = next_after_budget(advice["budget"], training, named, epochs=epochs, data=data, **ways)
        else:
            advice["skipped"].append("short runs")
            limit = max(seconds_of_runs(advice), 2 * seconds)
            advice["next"] = budget_command(training, shares[0], epochs=epochs, data=data, seconds=limit)
    console = open_console(to_stderr=json == STANDARD_OUTPUT)
    advice["answer"] = answer_of(advice)
    if verbose:
        print_table(console, advice_table(advice))
        for sentence in [*advice["sentences"], ""]:
            console.print(sentence, markup=False, highlight=False)
    *said, command = answer_lines(advice)
    for line in said:
        console.print(line, markup=False, highlight=False)
    console.print(command, markup=False, highlight=False, soft_wrap=True)
    if json is not None:
        write_result(json, advice)
        if json != STANDARD_OUTPUT:
            typer.echo(f"\n{json}")


def advice_table(advice: dict[str, Any]) -> "Table":
    """Returns the table of what each method saves, in percent of the time of full training.

    Args:
        advice: Result of `advise.advise`.
    """
    from rich import box
    from rich.table import Table

    from thresher_lab.cli._console import LEAST_NAME

    title = f"{advice['task']}, {advice['epochs']} epochs, {advice['device']}: time saved, % of full training"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("\nmethod", overflow="fold", min_width=LEAST_NAME)
    for heading in ("samples\nleft out", "saved at\nthese losses", "saved if all\nwere learned"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in advice["methods"]:
        if row["refused"] is not None:
            table.add_row(row["method"], "", "", "not possible")
        else:
            table.add_row(row["method"], *(_percent_cell(row[name]) for name in ("left_out", "saves", "at_most")))
    return table


def _percent_cell(share: float | None) -> str:
    return "" if share is None else f"{round(100 * share)}"
