"""`thresher advise`: times a training, and prints what each way to train on less could save."""

from typing import Annotated

import typer

from thresher_lab.cli._console import (
    STANDARD_OUTPUT,
    DataOption,
    DeviceOption,
    JsonOption,
    QuietOption,
    announcer,
    open_console,
    training_of,
    use_device,
    write_result,
)

TRAINING_HELP = "Name of a task as in `thresher compare --task`, or your own training as FILE.py:FUNCTION (see `thresher init`)."
BUDGET_HELP = "Shares of the cost of full training that you want to pay, separated by commas, such as 0.5,0.35."
SECONDS_HELP = "Time limit, in seconds, after which no further round of timing begins. There is always one round."
THREADS_HELP = "Number of CPU threads torch may use (`compare` always uses one per run)."


def advise(
    training: Annotated[str, typer.Argument(metavar="TASK|FILE.py:FUNCTION", help=TRAINING_HELP)],
    epochs: Annotated[
        int, typer.Option(min=1, help="Number of epochs of the training that you plan.")
    ] = 20,
    budget: Annotated[str, typer.Option(help=BUDGET_HELP)] = "0.5",
    seconds: Annotated[float, typer.Option(help=SECONDS_HELP)] = 20.0,
    json: JsonOption = None,
    threads: Annotated[int, typer.Option(min=1, help=THREADS_HELP)] = 1,
    data: DataOption = None,
    device: DeviceOption = None,
    *,
    quiet: QuietOption = False,
) -> None:
    """Time the parts of a training step, print what each way to train on less could save, and the comparison to run.

    Takes less than a minute. Nothing is trained; what a way costs in accuracy, only `thresher compare` can measure.
    """
    use_device(device)
    training = training_of(training, None)
    announce = announcer("advise", quiet=quiet)
    announce("loading torch, for some seconds")
    from thresher_lab.advise.advise import advise
    from thresher_lab.comparison.controls import parse_budget

    shares = parse_budget(budget)
    settings = {"epochs": epochs, "data": data, "seconds": seconds, "threads": threads}
    advice = advise(training, budget=shares, announce=announce, **settings)
    console = open_console(to_stderr=json == STANDARD_OUTPUT)
    for line in advice["lines"]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if json is not None:
        write_result(json, advice)
        if json != STANDARD_OUTPUT:
            typer.echo(f"\n{json}")
